"""What a sharded Trainer run does besides its numbers: loops, data, stale optimizers, checkpoints, refusals."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from soma_lightning.layout.full_state import gather
from soma_lightning.modules.ema import TrainableEMA
from tests.ranks import ranks_run, whole

#: One worker runs the file: starting its processes takes longest.
pytestmark = pytest.mark.xdist_group("sharded_trainer")

STEPS, BATCH = 12, 8


class Net(L.LightningModule):
    def __init__(self, seed: int = 7, *, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.head = nn.Linear(5, 3)
        self.seen: list[int] = []
        self.modes: set[bool] = set()
        if frozen:
            self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("loss", loss := self(batch).pow(2).mean(), sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.modes.add(torch.is_inference_mode_enabled())
        self.log("val", self(batch).pow(2).mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)


def data() -> Tensor:
    return torch.randn(STEPS * BATCH, 6, generator=torch.Generator().manual_seed(3))


def loader() -> DataLoader[Any]:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    samples: Any = data()
    return DataLoader(samples, batch_size=BATCH // size, sampler=DistributedSampler(samples, size, rank, shuffle=False))


def make_trainer(strategy: Any = None, **settings: Any) -> L.Trainer:
    from soma_lightning import SomaSpeedStrategy

    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("WORLD_SIZE", "1")),
        "strategy": strategy or SomaSpeedStrategy(report=False),
        "max_steps": STEPS,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
    }
    return L.Trainer(**{**defaults, **settings})


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=0.02, initial_denom_lr=1.0)


# ---------------------------------------------------------------------- on every rank


def behaviors() -> dict[str, Any]:
    from soma_lightning import SomaSpeedStrategy

    return {
        "loops": loops(),
        "sampler": sampler(),
        "stale": stale(),
        "strangers": strangers(),
        "unlike": unlike_groups(),
        "finetuning": whole(finetuned()),
        "averaging": refused(callbacks=[EMAWeightAveraging(decay=0.9)]),
        "replicate": refused(strategy=SomaSpeedStrategy(frozen="replicate", report=False), callbacks=[Unfreeze()]),
        "directory": refused_directory(),
        "report": report(),
    }


def loops() -> dict[str, Any]:
    """validate before any training, fit, validate, test, predict, fit; a hook calls the module outside of a step."""

    class Early(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            with torch.no_grad():
                pl_module(torch.ones(1, 6))

    trainer = make_trainer(max_steps=6, limit_val_batches=2, num_sanity_val_steps=1, callbacks=[Early()])
    model = Net()
    first = trainer.validate(model, loader(), verbose=False)
    trainer.fit(model, loader(), loader())
    half = whole(model)
    results = [trainer.validate(model, loader(), verbose=False), trainer.test(model, loader(), verbose=False)]
    predictions = trainer.predict(model, loader())
    trainer.fit_loop.epoch_loop.max_steps = STEPS
    trainer.fit(model, loader(), loader())
    assert predictions is not None
    return {
        "modes": model.modes,
        "results": (first, results),
        "half": half,
        "end": whole(model),
        "predicted": len(predictions),
        "metric": trainer.callback_metrics["loss"].item(),
    }


def sampler() -> dict[str, Any]:
    """Lightning's own sampler, in a mesh with replicas: by place on both data dimensions."""
    from soma_lightning import SomaSpeedStrategy

    class Seen(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.seen += batch[:, 0].int().tolist()
            return super().training_step(batch, batch_idx)

    strategy = SomaSpeedStrategy(layout="replicate", report=False)
    trainer = make_trainer(strategy, max_steps=2)
    model = Seen()
    rows: Any = torch.arange(16.0).view(16, 1).expand(16, 6)
    trainer.fit(model, DataLoader(rows, batch_size=4))
    values = torch.tensor([float(strategy.global_rank)])
    return {
        "seen": model.seen,
        "dp": (strategy.dp_rank, strategy.dp_size),
        "kwargs": strategy.distributed_sampler_kwargs,
        "reduced": strategy.reduce(values.clone(), reduce_op="sum").item(),
        "gathered": strategy.all_gather(values).flatten().tolist(),
        "all": strategy.reduce_boolean_decision(strategy.global_rank == 0),
        "told": strategy.broadcast(f"from {strategy.global_rank}"),
        "mesh": model.device_mesh is strategy.device_mesh,
    }


def stale() -> dict[str, Any]:
    """An optimizer built in `__init__`, one step old."""

    class Stale(Net):
        def __init__(self, seed: int = 7) -> None:
            super().__init__(seed)
            self.made = torch.optim.AdamW(self.parameters(), lr=0.02)
            self(data()[:BATCH]).pow(2).mean().backward()
            self.made.step()
            self.zero_grad()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.made

    model = Stale()
    trainer = make_trainer()
    trainer.fit(model, loader())
    live = {id(p) for p in model.parameters()}
    held = {id(p) for group in model.made.param_groups for p in group["params"]}
    return {"same": live == held, "end": whole(model), "steps": model.made.state[model.head.bias]["step"].item()}


def strangers() -> str:
    class Strange(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([*self.head.parameters(), nn.Parameter(torch.ones(2, 5))])

    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared)
        make_trainer().fit(Strange(), loader())
    return str(caught.value)


def unlike_groups() -> str:
    """Each rank clips by other groups."""

    class Unlike(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            head = {"params": list(self.head.parameters()), "max_norm": 1.0 + self.global_rank}
            return torch.optim.AdamW([head, {"params": list(self.body.parameters())}])

    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared)
        make_trainer().fit(Unlike(), loader())
    return str(caught.value)


def finetuned() -> Net:
    """The body is frozen until the second epoch."""

    model = Net(frozen=True)
    make_trainer(callbacks=[Unfreeze()], limit_train_batches=6).fit(model, loader())
    return model


def report() -> Any:
    """The written report and the printed one, of rank 0."""
    from soma_lightning import SomaSpeedStrategy

    folder = Path(tempfile.mkdtemp())
    strategy = SomaSpeedStrategy(report=str(folder / "report.json"))
    trainer = make_trainer(strategy, max_steps=1)
    model = Net(frozen=True)
    trainer.fit(model, loader())
    if strategy.is_global_zero:
        return json.loads((folder / "report.json").read_text()), strategy._build_report(trainer, model).summary()
    return list(folder.iterdir())


def refused(**settings: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared)
        make_trainer(**settings).fit(Net(), loader())
    return str(caught.value)


def refused_directory() -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared)
        make_trainer().fit(Net(), loader(), ckpt_path=str(Path(__file__).parent))
    return str(caught.value)


def save(folder: Path, name: str) -> None:
    """Half of the run, saved by ModelCheckpoint."""
    callback = ModelCheckpoint(folder, filename=name, every_n_train_steps=STEPS // 2)
    callbacks = [callback, TrainableEMA(0.9)]
    trainer = make_trainer(max_steps=STEPS // 2, enable_checkpointing=True, callbacks=callbacks, gradient_clip_val=0.1)
    trainer.fit(Net(frozen=False), DataLoaderOfHalf(0))


def resume(folder: Path, names: list[str]) -> dict[str, dict[str, Tensor]]:
    ends = {}
    for name in names:
        model = Net(seed=99)
        average = TrainableEMA(0.9)
        trainer = make_trainer(gradient_clip_val=0.1, callbacks=[average])
        trainer.fit(model, DataLoaderOfHalf(1), ckpt_path=folder / f"{name}.ckpt")
        assert trainer.global_step == STEPS
        # The same file into a module that is sharded already.
        make_trainer().validate(model, loader(), ckpt_path=folder / f"{name}.ckpt", verbose=False)
        make_trainer(gradient_clip_val=0.1).fit(model, DataLoaderOfHalf(1), ckpt_path=folder / f"{name}.ckpt")
        ends[name] = whole(model) | {"average": gather(average.shadow["head.bias"], keep=True)}
    return ends


def DataLoaderOfHalf(half: int) -> DataLoader[Any]:  # noqa: N802
    """Rows of the first or the second half of the steps: an epoch each, so that nothing depends on where it stopped."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    rows: Any = data().chunk(2)[half]
    return DataLoader(rows, batch_size=BATCH // size, sampler=DistributedSampler(rows, size, rank, shuffle=False))


def save_and_resume(folder: Path, name: str, names: list[str]) -> dict[str, dict[str, Tensor]]:
    save(folder, name)
    return resume(folder, names)


# ---------------------------------------------------------------------- compared with one process


def averaged() -> Tensor:
    shadow = Net().head.bias.detach()
    for step in range(1, STEPS + 1):
        shadow = 0.9 * shadow + 0.1 * reference(step, limit=0.1)["head.bias"]
    return shadow


def reference(steps: int = STEPS, limit: float | None = None) -> dict[str, Tensor]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for batch in data().split(BATCH)[:steps]:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
    return whole(model)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks_run(behaviors, tmp_path_factory.mktemp("ranks"))


def test_every_loop_and_a_second_fit_work(found: Any) -> None:
    half = reference(STEPS // 2)
    for rank in found:
        loops = rank["loops"]
        assert loops["modes"] == {False}
        assert largest(half, loops["half"]) <= 1e-6
        assert largest(half, loops["end"]) > 0.01
        assert loops["predicted"] == STEPS
        assert loops["results"] == found[0]["loops"]["results"]
        assert loops["metric"] == found[0]["loops"]["metric"]


def test_each_rank_reads_its_part(found: Any) -> None:
    seen = [rank["sampler"]["seen"] for rank in found]
    assert sorted(seen[0] + seen[1]) == list(range(16))
    for place, rank in enumerate(found):
        facts = rank["sampler"]
        assert facts["dp"] == (place, 2)
        assert facts["kwargs"] == {"num_replicas": 2, "rank": place}
        assert (facts["reduced"], facts["gathered"], facts["all"]) == (1.0, [0.0, 1.0], False)
        assert facts["told"] == "from 0"
        assert facts["mesh"]


def test_an_optimizer_from_before_sharding_trains_with_its_state(found: Any) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for batch in (data()[:BATCH], *data().split(BATCH)):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    for rank in found:
        assert rank["stale"]["same"]
        assert rank["stale"]["steps"] == STEPS + 1
        assert largest(whole(model), rank["stale"]["end"]) <= 1e-6


def test_parameters_of_no_module_are_refused(found: Any) -> None:
    for rank in found:
        assert rank["strangers"].startswith(
            "AdamW holds 1 parameters that are in no module of this run: a tensor of shape (2, 5); several processes"
        )


def test_what_a_callback_unfreezes_later_trains(found: Any) -> None:
    model = Net(frozen=True)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=0.02)
    for step in range(STEPS):
        if step == STEPS // 2:
            model.body.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.02})
        optimizer.zero_grad()
        model(data().split(BATCH)[step % 6]).pow(2).mean().backward()
        optimizer.step()
    for rank in found:
        assert largest(whole(model), rank["finetuning"]) <= 1e-6


def test_what_cannot_work_is_refused(found: Any) -> None:
    for rank in found:
        assert rank["averaging"].startswith("EMAWeightAveraging copies the module before its parameters are divided")
        assert rank["unlike"].startswith(
            "the parameter groups have max_norm [1.0, None] on rank 0 and [2.0, None] on rank 1"
        )
        assert rank["replicate"].startswith("frozen='replicate', but Unfreeze trains frozen parameters later")
        assert "is a directory (a sharded checkpoint), which this version does not read" in rank["directory"]


def test_the_report_says_how_the_module_is_divided(found: Any) -> None:
    (written, printed), nothing = found[0]["report"], found[1]["report"]
    assert nothing == []
    assert written["layout"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 1}
    sharding = written["sharding"]
    assert (sharding["ranks"], sharding["coordinate"]["dp_shard"]) == (2, 0)
    assert [(unit["name"], unit["parameters"], unit["trainable"]) for unit in sharding["units"]] == [("", 18, True)]
    assert sharding["whole on every rank"] == {"frozen": 101, "trainable": 0}
    head = 4 * (2 * 5 + 2)  # two of three rows on rank 0
    assert sharding["bytes of a rank"] == {"parameters": 4 * 101 + head, "gradients": head, "optimizer": 2 * head}
    assert "units:      1: 1 trainable (float32, gathered in float32, reduced in float32)" in printed
    assert "whole:      101 frozen and 0 trainable parameters on every rank" in printed


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 4)])
def test_files_move_between_numbers_of_ranks(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Saved on 1, 2 and 4 ranks, continued on each of them, also in a module that was sharded before."""
    names = [f"from{size}" for size in sizes]
    for size, name in zip(sizes, names, strict=True):
        folder = tmp_path / f"save{size}"
        folder.mkdir()
        ranks_run(save, folder, world_size=size, arguments={"folder": tmp_path, "name": name})
    check_files(tmp_path, names)
    for size in sizes:
        folder = tmp_path / f"resume{size}"
        folder.mkdir()
        for rank in ranks_run(resume, folder, world_size=size, arguments={"folder": tmp_path, "names": names}):
            for name in names:
                assert largest(reference(limit=0.1), rank[name]) <= 1e-6, (size, name)


def test_a_file_of_two_ranks_is_an_ordinary_one(tmp_path: Path) -> None:
    """Continued on two ranks, and by Lightning's own single-device strategy with torch's AdamW."""
    arguments = {"folder": tmp_path, "name": "from2", "names": ["from2"]}
    for rank in ranks_run(save_and_resume, tmp_path, arguments=arguments):
        assert largest(reference(limit=0.1), rank["from2"]) <= 1e-6
        assert (rank["from2"]["average"] - averaged()).abs().max() <= 1e-6
    check_files(tmp_path, ["from2"])
    model = Net(seed=5)
    trainer = make_trainer("auto", gradient_clip_val=0.1)
    trainer.fit(model, DataLoaderOfHalf(1), ckpt_path=tmp_path / "from2.ckpt")
    assert largest(reference(limit=0.1), whole(model)) <= 1e-6


def check_files(folder: Path, names: list[str]) -> None:
    for name in names:
        file = torch.load(folder / f"{name}.ckpt", weights_only=True)
        assert {type(value) for value in file["state_dict"].values()} == {Tensor}
        state = file["optimizer_states"][0]
        assert list(state["state"][0]) == ["step", "exp_avg", "exp_avg_sq"]
        assert state["state"][0]["exp_avg"].shape == file["state_dict"]["body.0.weight"].shape
        assert state["param_groups"][0]["params"] == list(range(6))
