"""fp16 loss scaling on several ranks: one decision, the same scale everywhere, and what one process does with torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader, DistributedSampler

from soma_lightning.optim.shards import local
from tests.ranks import ranks_run, whole

#: One worker runs the file: starting its processes takes longest.
pytestmark = pytest.mark.xdist_group("loss_scale")

STEPS, BATCH, BAD_STEP = 10, 4, 4

#: name -> what differs from the plain run
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"clip": 0.05},
    "value": {"clip": 0.01, "algorithm": "value"},
    "accumulation": {"clip": 0.05, "accumulate": 3},
    "stock optimizer": {"clip": 0.05, "options": {"fused_optimizer": False}},
    "hook that looks": {"clip": 0.05, "looks": True},
    "hook on the optimizer": {"clip": 0.05, "step_hook": True},
    "manual": {"manual": True, "clip": 0.05},
    "sums": {"clip": 0.05, "sums": True},
    "replicas": {"clip": 0.05, "options": {"layout": "replicate"}},
    "fp16": {"clip": 0.05, "fp16": True},
}


class Scaled(MixedPrecision):
    """A scaler around fp32 arithmetic, so that results can be compared closely."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        super().__init__("16-mixed", "cpu", scaler)
        self.precision: Any = "32-true"

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        yield


class FabricScaled(FabricMixedPrecision):
    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        super().__init__("16-mixed", "cpu", scaler)
        self.precision: Any = "32-true"
        self._desired_input_dtype = torch.float32

    def forward_context(self) -> Any:
        return contextlib.nullcontext()


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)


class Net(L.LightningModule):
    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.case = case
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.seen: list[float] = []
        self.automatic_optimization = not case.get("manual")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x))) * self.scale

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self(batch).float().pow(2)
        if self.case.get("sums"):
            self.soma_normalizer = loss.numel()
            return loss.sum()
        if self.automatic_optimization:
            return loss.mean()
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss.mean())
        self.clip_gradients(optimizer, gradient_clip_val=self.case["clip"])
        optimizer.step()
        return None

    def look(self, *_: Any) -> None:
        grad = self.head.bias.grad
        assert grad is not None
        self.seen.append((grad.full_tensor() if hasattr(grad, "full_tensor") else grad).abs().max().item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        if self.case.get("step_hook"):
            optimizer.register_step_pre_hook(self.look)
        return optimizer


class Looks(L.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.look()


def samples(accumulate: int = 1) -> Tensor:
    """One sample, of the second rank on two, is too large for the loss."""
    data = torch.randn(STEPS * accumulate * BATCH * 2, 6, generator=torch.Generator().manual_seed(3))
    data[BAD_STEP * accumulate * BATCH * 2 + 1] = torch.inf
    return data


def every_rank(folder: Path) -> dict[str, Any]:
    found = {name: one_run(case) for name, case in CASES.items()}
    found["fabric"] = fabric_run(with_norm=True)
    found["fabric, no limit"] = fabric_run(with_norm=False)
    found["collectives"] = collectives()
    found["own scaler"] = own_scaler()
    found["checkpoint"] = checkpoint(folder)
    return found


def trainer_for(case: dict[str, Any], plugin: Any, world_size: int) -> L.Trainer:
    from soma_lightning import SomaSpeedStrategy

    return L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=SomaSpeedStrategy(report=False, nonfinite="skip", max_consecutive_skips=1, **case.get("options", {})),
        max_steps=STEPS,
        accumulate_grad_batches=case.get("accumulate", 1),
        gradient_clip_val=None if case.get("manual") else case.get("clip"),
        gradient_clip_algorithm=case.get("algorithm"),
        plugins=[plugin],
        callbacks=[Looks()] if case.get("looks") else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def one_run(case: dict[str, Any]) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = Net(case)
    plugin = MixedPrecision("16-mixed", "cpu", scaler()) if case.get("fp16") else Scaled(scaler())
    trainer = trainer_for(case, plugin, world_size)
    data: Any = samples(case.get("accumulate", 1))
    in_order = DistributedSampler(data, world_size, rank, shuffle=False)
    trainer.fit(model, DataLoader(data, batch_size=BATCH * 2 // world_size, sampler=in_order))
    optimizer: Any = trainer.optimizers[0]
    return {
        "parameters": whole(model),
        "scaler": plugin.scaler.state_dict() if plugin.scaler is not None else {},
        "kind": type(optimizer).__name__,
        "skipped": int(getattr(optimizer, "skipped_steps", -1)),
        "seen": model.seen,
        "steps": float(next(iter(optimizer.state.values()))["step"]),
    }


def fabric_run(*, with_norm: bool) -> dict[str, Any]:
    from soma_lightning import FabricSomaSpeedStrategy

    strategy, world_size = FabricSomaSpeedStrategy(report=False), int(os.environ["WORLD_SIZE"])
    plugin = FabricScaled(scaler())
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=[plugin])
    fabric.launch()
    model = Net({})
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02))[:2]
    norms, kept = [], True
    for batch in samples().split(BATCH * 2):
        optimizer.zero_grad()
        fabric.backward(wrapped(batch[fabric.global_rank :: world_size]).pow(2).mean())
        before = [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        if with_norm:
            norms.append(fabric.clip_gradients(wrapped, optimizer, max_norm=0.05, error_if_nonfinite=False).item())
        optimizer.step()
        after = [local(p.grad) for p in model.parameters() if p.grad is not None]
        kept &= all(a.equal(b) for a, b in zip(before, after, strict=True) if b.isfinite().all())
    assert plugin.scaler is not None
    state = plugin.scaler.state_dict()
    return {"parameters": whole(model), "scaler": state, "norms": norms, "kept": kept}


def collectives() -> int:
    """How many collectives unscaling, clipping, deciding and the new scale take together."""
    case: dict[str, Any] = {"clip": 0.05}
    trainer = trainer_for(case, Scaled(scaler()), int(os.environ["WORLD_SIZE"]))
    model = Net(case)
    trainer.fit(model, DataLoader(samples(), batch_size=BATCH))  # type: ignore[arg-type]
    shared, optimizer = trainer.precision_plugin.scaler, trainer.optimizers[0]  # type: ignore[attr-defined]
    shared.scale(model.training_step(samples()[:4], 0)).backward()
    with CommDebugMode() as counted:
        shared.unscale_(optimizer)
        trainer.precision_plugin.clip_gradients(optimizer, 0.05)
        shared.step(optimizer)
        shared.update()
    return counted.get_total_counts()


def own_scaler() -> str:
    class Mine(torch.amp.GradScaler):
        pass

    try:
        trainer = trainer_for({}, Scaled(Mine("cpu")), int(os.environ["WORLD_SIZE"]))
        trainer.fit(Net({}), DataLoader(samples(), batch_size=BATCH))  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return ""


def checkpoint(folder: Path) -> dict[str, Any]:
    trainer = trainer_for({}, Scaled(scaler()), int(os.environ["WORLD_SIZE"]))
    trainer.fit(Net({}), DataLoader(samples(), batch_size=BATCH))  # type: ignore[arg-type]
    trainer.save_checkpoint(folder / "scaled.ckpt")
    dist.barrier()
    return torch.load(folder / "scaled.ckpt", weights_only=True)["Scaled"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return ranks_run(every_rank, folder, arguments={"folder": folder})


def single_process(case: dict[str, Any]) -> dict[str, Any]:
    """torch alone: GradScaler, AdamW, clip_grad_norm_."""
    model, amp, norms = Net(case), scaler(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    accumulate = case.get("accumulate", 1)
    batches = samples(accumulate).split(BATCH * 2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in batches[step * accumulate : (step + 1) * accumulate]:
            with torch.autocast("cpu", torch.float16, enabled=bool(case.get("fp16"))):
                loss = model(batch).float().pow(2).mean() / accumulate
            amp.scale(loss).backward()
        if not case.get("manual"):  # there the limit is that of the scaled gradients, as with the stock strategy
            amp.unscale_(optimizer)
            model.look()
        if case.get("algorithm") == "value":
            nn.utils.clip_grad_value_(model.parameters(), case["clip"])
        elif case.get("clip"):
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), case["clip"]).item())
        amp.step(optimizer)
        amp.update()
    return {"parameters": whole(model), "scaler": amp.state_dict(), "norms": norms, "seen": model.seen}


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_equal_one_process(found: Any, case: str) -> None:
    expected = single_process(CASES[case])
    bar = 2e-3 if case == "fp16" else 1e-6
    for rank in found:
        ours = rank[case]
        assert ours["kind"] == ("AdamW" if case == "stock optimizer" else "FusedAdamW")
        assert ours["scaler"] == expected["scaler"]
        assert ours["steps"] == STEPS - 1  # one was skipped, on both ranks
        for name, value in expected["parameters"].items():
            assert (ours["parameters"][name] - value).abs().max().item() <= bar, name
    assert expected["scaler"]["scale"] != 2.0**10


def test_a_step_that_the_scaler_skips_is_not_counted(found: Any) -> None:
    """As on one process, where the optimizer never sees it; max_consecutive_skips=1 would have stopped the run."""
    for rank in found:
        assert {rank[case]["skipped"] for case in CASES if case != "stock optimizer"} == {0}


@pytest.mark.parametrize("case", ["hook that looks", "hook on the optimizer"])
def test_a_hook_sees_unscaled_gradients(found: Any, case: str) -> None:
    expected = single_process(CASES[case])["seen"]
    for rank in found:
        assert len(rank[case]["seen"]) == STEPS
        assert rank[case]["seen"] == pytest.approx(expected, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("limited", [True, False])
def test_fabric_equals_one_process(found: Any, limited: bool) -> None:
    expected = single_process({"clip": 0.05} if limited else {})
    for rank in found:
        ours = rank["fabric" if limited else "fabric, no limit"]
        assert ours["scaler"] == expected["scaler"]
        assert ours["norms"] == pytest.approx(expected["norms"], rel=1e-5, nan_ok=True)
        assert ours["kept"], "gradients keep their bits: nothing passes over them to unscale"
        for name, value in expected["parameters"].items():
            assert (ours["parameters"][name] - value).abs().max().item() <= 1e-6, name


def test_one_collective_decides_about_step_and_scale(found: Any) -> None:
    assert [rank["collectives"] for rank in found] == [1, 1]


def test_a_scaler_of_an_own_class_is_refused(found: Any) -> None:
    for rank in found:
        assert "Mine decides on each rank by itself whether a step is skipped" in rank["own scaler"]


def test_the_scale_is_in_the_checkpoint(found: Any) -> None:
    for rank in found:
        assert set(rank["checkpoint"]) == {
            "scale",
            "growth_factor",
            "backoff_factor",
            "growth_interval",
            "_growth_tracker",
        }
