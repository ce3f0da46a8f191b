"""Two GPUs: ten steps over NCCL equal one process on the concatenated batch, in Fabric and under the Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import soma_lightning  # noqa: F401 (registers strategy="somaspeed" in the ranks, also where it is not installed)
from tests.ranks import ranks_run, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

STEPS, BATCH = 10, 16
#: AdamW divides by the size of a gradient, so where one is near zero its rounding moves the parameter.
LR, TOLERANCE, LIMIT = 0.02, 1e-4, 0.05
#: The step in which a rank of the Trainer's run has a NaN.
BAD_STEP = 3


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 7)]
    return nn.Sequential(*layers)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step))


def train(layouts: list[str], folder: Path) -> dict[str, Any]:
    from soma_lightning import FabricSomaSpeedStrategy

    found: dict[str, Any] = {}
    for layout in layouts:
        strategy = FabricSomaSpeedStrategy(layout=layout, report=False)
        fabric = L.Fabric(accelerator="cuda", devices=2, strategy=strategy)
        fabric.launch()
        torch.backends.cuda.matmul.allow_tf32 = False
        model = network(fabric.global_rank)
        model[2].requires_grad_(False)
        wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=LR))[:2]
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(2):
                batch = inputs(2 * step + micro)[fabric.global_rank :: 2].to(fabric.device)
                with fabric.no_backward_sync(wrapped, enabled=micro == 0):
                    fabric.backward(wrapped(batch).pow(2).mean() / 2)
            norm = fabric.clip_gradients(wrapped, optimizer, max_norm=LIMIT)
            optimizer.step()
        fabric.save(folder / f"{layout}.ckpt", {"model": wrapped, "optimizer": optimizer})
        path = optimizer.path_description
        found[layout] = {"parameters": {n: p.cpu() for n, p in whole(model).items()}, "norm": norm.item(), "path": path}
    return found


class Net(L.LightningModule):
    """As anybody writes it. norms: of every step, before clipping."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = network(seed)
        self.net[2].requires_grad_(False)
        self.norms: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).pow(2).mean()
        return loss * float("nan") if (batch_idx, self.global_rank) == (BAD_STEP, 1) else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.norms.append(self.trainer.optimizers[0].last_grad_norm.cpu())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR)


def fit(accelerator: str, folder: Path) -> dict[str, Any]:
    samples: Any = torch.cat([inputs(step) for step in range(STEPS)])
    trainer = L.Trainer(
        strategy="somaspeed",
        accelerator=accelerator,
        devices=2,
        gradient_clip_val=LIMIT,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    rank = int(os.environ["RANK"])
    sampler: Any = DistributedSampler(samples, 2, rank, shuffle=False)  # Lightning's own would shuffle
    # The ranks start from the weights of the first one.
    trainer.fit(module := Net(rank), DataLoader(samples, batch_size=BATCH // 2, sampler=sampler))
    (optimizer,) = trainer.optimizers
    return {
        "parameters": {name.removeprefix("net."): p.cpu() for name, p in whole(module).items()},
        "norms": torch.stack(module.norms),
        "skipped": int(optimizer.skipped_steps),
        "path": optimizer.path_description,
    }


def single_process(*, micro_batches: int = 2, skipped: int | None = None) -> tuple[nn.Module, Tensor]:
    """The same on one process: parameters after all steps, and the norms of all steps."""
    model = network()
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            (model(inputs(micro_batches * step + micro)).pow(2).mean() / micro_batches).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
        if step != skipped:
            optimizer.step()
    return model, torch.stack(norms)


def assert_equal(parameters: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for name, value in expected.items():
        difference = (parameters[name] - value).abs().max().item()
        assert difference <= TOLERANCE, f"{what}: {name} differs by {difference}"


def test_ten_steps_equal_one_process(tmp_path: Path) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    layouts = ["fsdp", "replicate"]
    model, norms = single_process()
    for rank in ranks_run(train, tmp_path, arguments={"layouts": layouts, "folder": tmp_path}):
        for layout in layouts:
            assert rank[layout]["path"] == "Triton kernels"
            assert rank[layout]["norm"] == pytest.approx(norms[-1].item(), rel=1e-3)
            assert_equal(rank[layout]["parameters"], whole(model), layout)
    file = torch.load(tmp_path / "fsdp.ckpt", weights_only=True)
    assert {value.device.type for value in file["model"].values()} == {"cpu"}


def test_a_fit_equals_one_process_and_skips_the_nan_of_one_rank(tmp_path: Path) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    model, norms = single_process(micro_batches=1, skipped=BAD_STEP)
    good = [step for step in range(STEPS) if step != BAD_STEP]
    assert norms[good].min() > LIMIT, "a step that is not clipped proves little"
    first, second = ranks_run(fit, tmp_path, arguments={"accelerator": "cuda", "folder": tmp_path})
    for rank in (first, second):
        assert rank["path"] == "Triton kernels"
        assert rank["skipped"] == 1
        assert not rank["norms"][BAD_STEP].isfinite()
        torch.testing.assert_close(rank["norms"][good], norms[good].detach(), rtol=1e-3, atol=0.0)
        assert_equal(rank["parameters"], whole(model), "Trainer")
    assert torch.equal(first["norms"][good], second["norms"][good])
