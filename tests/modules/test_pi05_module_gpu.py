"""Fine-tuning pi0.5 on one CUDA device: the same numbers as on the CPU, and device times in the log."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def first_steps(make_run, accelerator: str, **trainer) -> tuple:
    run, module, data = make_run(accelerator, accelerator=accelerator, log_every_n_steps=1, **trainer)
    run.fit(module, data)
    return run, module


def test_it_trains_on_the_device(make_run):
    run, _ = first_steps(make_run, "gpu")  # the module is back on the CPU when the fit is over
    assert run.strategy.root_device.type == "cuda"
    assert torch.isfinite(run.logged_metrics["train_loss"])
    assert run.logged_metrics["forward_ms"] > 0
    assert run.logged_metrics["backward_ms"] > 0


def test_validation_agrees_with_the_cpu(make_run, monkeypatch: pytest.MonkeyPatch):
    """Noise is drawn on the device, so the same draws are handed to both."""
    losses = {}
    draws = {name: torch.Generator().manual_seed(3) for name in ("cpu", "gpu")}
    for accelerator in ("cpu", "gpu"):
        run, module, data = make_run(accelerator, accelerator=accelerator)
        chunk, width = module.policy.noise_shape

        def forward(batch, *, generator, policy=module.policy, draw=draws[accelerator], shape=(chunk, width), **_):
            rows = len(batch["action"])
            noise = torch.randn(rows, *shape, generator=draw)
            time = torch.rand(rows, generator=draw)
            return type(policy).sft_forward(policy, batch, noise=noise.to(policy.device), time=time.to(policy.device))

        monkeypatch.setattr(module.policy, "sft_forward", forward)
        losses[accelerator] = run.validate(module, data, verbose=False)[0]["val_loss"]
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=1e-4)


@pytest.mark.parametrize("settings", [{"precision": "bf16-mixed"}, {"model": {"config": {"dtype": "bfloat16"}}}])
def test_low_precision_trains(make_run, settings: dict):
    run, _ = first_steps(make_run, "gpu", **settings)
    assert torch.isfinite(run.logged_metrics["train_loss"])


def test_cuda_graphs_train_like_eager_passes(make_run):
    losses = {}
    for graphs in (False, True):
        model = {"cuda_graphs": graphs, "config": {"dtype": "bfloat16", "islands": "openpi"}}
        run, module, data = make_run(
            f"graphs_{graphs}", model=model, accelerator="gpu", max_steps=6, log_every_n_steps=1
        )
        run.fit(module, data)
        losses[graphs] = float(run.logged_metrics["train_loss"])
        assert module.policy.report_facts()["cuda_graphs"] == graphs
    assert losses[True] == pytest.approx(losses[False], rel=0.02)


def test_autocast_and_cuda_graphs_exclude_each_other(make_run):
    with pytest.raises(ValueError, match="not under autocast"):
        first_steps(make_run, "gpu", precision="bf16-mixed", model={"cuda_graphs": True})
