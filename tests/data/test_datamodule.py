"""The data module: splits, statistics and their source, several data sets, resuming a fit inside an epoch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from soma_lightning.data import LeRobotDataModule
from soma_lightning.data.lerobot import LeRobotDataset
from soma_lightning.data.statistics import compute_statistics
from soma_lightning.models.normalization import save_statistics

CAMERA = "observation.images.image"
Record = Callable[..., Path]


def batches(loader: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in loader]


def test_batches_fit_the_contract(record: Record) -> None:
    data = LeRobotDataModule(str(record((9, 9, 9))), batch_size=4, chunk_size=3)
    batch = next(iter(data.train_dataloader()))
    assert {key: (value.dtype, list(value.shape)) for key, value in batch.items() if key != "task"} == {
        CAMERA: (torch.uint8, [4, 3, 8, 8]),
        "observation.state": (torch.float32, [4, 3]),
        "action": (torch.float32, [4, 3, 2]),
        "action_is_pad": (torch.bool, [4, 3]),
        "index": (torch.int64, [4]),
        "episode_index": (torch.int64, [4]),
    }
    assert isinstance(batch["task"], list)
    assert set(batch["task"]) <= {"pick up the cube", "reach the green disc"}
    for slot, index in enumerate(batch["index"].tolist()):
        episode, frame = divmod(index, 9)
        assert batch["observation.state"][slot].tolist() == [episode, frame, 0]
        assert batch["action"][slot, 0].tolist() == [100 * episode + frame, -frame]
        assert batch[CAMERA][slot, :, 0, 0].tolist() == [episode, frame, frame]
    validation = next(iter(data.val_dataloader()))
    assert validation["index"].tolist() == sorted(validation["index"].tolist())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_episode_is_in_both_splits(record: Record, seed: int) -> None:
    data = LeRobotDataModule(str(record((3, 4, 5, 6, 7))), batch_size=1, chunk_size=2, val_fraction=0.4, seed=seed)
    train = {int(e) for batch in data.train_dataloader() for e in batch["episode_index"]}
    val = {int(e) for batch in data.val_dataloader() for e in batch["episode_index"]}
    assert (len(train), len(val)) == (3, 2)
    assert train.isdisjoint(val)
    frames = [
        i for loader in (data.train_dataloader(), data.val_dataloader()) for batch in batches(loader) for i in batch
    ]
    assert sorted(frames) == list(range(25))
    assert (data.num_episodes, data.num_frames) == (5, 25)


def test_without_validation(record: Record) -> None:
    root = str(record((5, 5)))
    assert LeRobotDataModule(root, chunk_size=2, val_fraction=0).val_dataloader() == []
    single = LeRobotDataModule(root, batch_size=2, chunk_size=2, max_episodes=1)
    assert single.val_dataloader() == []
    assert {int(e) for batch in single.train_dataloader() for e in batch["episode_index"]} == {0}


def test_order_depends_on_seed_and_epoch_alone(record: Record) -> None:
    root = str(record((9, 9, 9)))

    def order(seed: int, preload: bool = False) -> list[list[int]]:
        loader = LeRobotDataModule(root, batch_size=4, chunk_size=2, seed=seed, preload=preload).train_dataloader()
        return batches(loader) + batches(loader)

    assert order(0) == order(0) == order(0, preload=True)
    assert order(0)[:4] != order(0)[4:]
    assert sorted(sum(order(0), [])) != sorted(sum(order(2), []))  # another split, too


def test_preloaded_batches_are_the_same(record: Record) -> None:
    root = str(record((9, 9, 9)))
    lazy, eager = (
        next(iter(LeRobotDataModule(root, batch_size=6, chunk_size=2, preload=preload).train_dataloader()))
        for preload in (False, True)
    )
    for key, values in lazy.items():
        assert torch.equal(values, eager[key]) if isinstance(values, torch.Tensor) else values == eager[key]


def test_workers_hand_out_the_same_batches(record: Record) -> None:
    root = str(record((9, 9, 9)))
    alone, worker = (
        list(LeRobotDataModule(root, batch_size=6, chunk_size=2, num_workers=n, preload=True).train_dataloader())
        for n in (0, 1)
    )
    assert [batch["task"] for batch in alone] == [batch["task"] for batch in worker]
    for key in (CAMERA, "action", "observation.state", "index"):
        assert all(torch.equal(a[key], b[key]) for a, b in zip(alone, worker, strict=True)), key


def test_facts_about_the_data(record: Record) -> None:
    data = LeRobotDataModule(str(record((5, 7, 4, 6), fps=15)), batch_size=4, chunk_size=3)
    assert (data.state_dim, data.action_dim, data.fps, data.cameras) == (3, 2, 15, [CAMERA])
    assert data.tasks == ["pick up the cube", "reach the green disc"]
    facts = data.report_facts()
    json.dumps(facts)
    assert (facts["train_episodes"], facts["val_episodes"], facts["image_sizes"]) == (3, 1, [[8, 8]])
    assert facts["train_frames"] + facts["val_frames"] == 22
    assert facts["constant_dimensions"] == {"observation.state": [2]}
    assert "meta/stats.json" in facts["statistics_source"]


def test_only_the_first_episodes(record: Record) -> None:
    data = LeRobotDataModule(str(record((5, 7, 4, 6))), batch_size=1, chunk_size=2, max_episodes=2, val_fraction=0.5)
    assert sorted(i for i in sum(batches(data.train_dataloader()) + batches(data.val_dataloader()), [])) == list(
        range(12)
    )
    assert LeRobotDataModule(str(record((5, 7), name="b")), chunk_size=2, max_episodes=9).num_episodes == 2


class TestStatistics:
    def test_the_data_sets_own(self, record: Record) -> None:
        root = record((5, 7, 4))
        data = LeRobotDataModule(str(root), chunk_size=2)
        assert "meta/stats.json" in data.statistics_source
        assert str(root) in data.statistics_source
        for feature, numbers in compute_statistics(LeRobotDataset(root)).items():
            for name, values in numbers.items():
                np.testing.assert_array_equal(data.statistics[feature][name], values)

    @pytest.mark.parametrize("lacking", ["file", "quantiles"])
    def test_computed_when_missing(self, record: Record, lacking: str) -> None:
        root = record((5, 7, 4))
        expected = LeRobotDataModule(str(root), chunk_size=2).statistics
        path = root / "meta/stats.json"
        if lacking == "file":
            path.unlink()
        else:
            stored = json.loads(path.read_text())
            del stored["action"]["q99"]
            path.write_text(json.dumps(stored))
        data = LeRobotDataModule(str(root), chunk_size=2)
        assert data.statistics_source.startswith("computed from 16 frames of")
        for feature, numbers in expected.items():
            for name, values in numbers.items():
                np.testing.assert_allclose(data.statistics[feature][name], values, rtol=1e-12)

    def test_computed_on_request(self, record: Record) -> None:
        root = record((5, 7, 4))
        stored = json.loads((root / "meta/stats.json").read_text())
        stored["action"]["q99"] = [1e9, 1e9]
        (root / "meta/stats.json").write_text(json.dumps(stored))
        assert LeRobotDataModule(str(root), chunk_size=2).statistics["action"]["q99"][0] == 1e9
        assert LeRobotDataModule(str(root), chunk_size=2, statistics="computed").statistics["action"]["q99"][0] < 300

    def test_from_a_file(self, record: Record, tmp_path: Path) -> None:
        numbers = compute_statistics({"observation.state": np.eye(3), "action": np.eye(2)})
        save_statistics(numbers, tmp_path / "own.json")
        data = LeRobotDataModule(str(record()), chunk_size=2, statistics=str(tmp_path / "own.json"))
        assert data.statistics["action"]["max"].tolist() == [1.0, 1.0]
        assert data.statistics_source == f"file '{tmp_path / 'own.json'}'"

    def test_files_that_do_not_fit(self, record: Record, tmp_path: Path) -> None:
        root, path = str(record()), tmp_path / "own.json"
        with pytest.raises(FileNotFoundError, match="no statistics file at 'own.json'"):
            _ = LeRobotDataModule(root, chunk_size=2, statistics="own.json").statistics
        for numbers, message in (
            ({"action": np.eye(2)}, "has no statistics of 'observation.state'"),
            ({"observation.state": np.eye(8), "action": np.eye(2)}, r"has \[8\] values, .* has 3 dimensions"),
        ):
            save_statistics(compute_statistics(numbers), path)
            with pytest.raises(ValueError, match=message):
                LeRobotDataModule(root, batch_size=2, chunk_size=2, statistics=str(path)).setup()

    def test_a_stale_file_of_the_data_set(self, record: Record) -> None:
        root = record()
        stored = json.loads((root / "meta/stats.json").read_text())
        stored["action"] = {name: values[:1] for name, values in stored["action"].items()}
        (root / "meta/stats.json").write_text(json.dumps(stored))
        with pytest.raises(ValueError, match=r"meta/stats.json: 'action/mean' has \[1\] values"):
            _ = LeRobotDataModule(str(root), chunk_size=2).statistics

    def test_follow_the_chosen_dimensions(self, record: Record) -> None:
        data = LeRobotDataModule(str(record((5, 7))), chunk_size=2, state_indices=[1], action_indices=[1, 0])
        assert data.statistics["observation.state"]["max"].tolist() == [6.0]
        assert data.statistics["action"]["max"].tolist() == [0.0, 106.0]
        swapped = LeRobotDataModule(str(record((5, 7), name="b")), chunk_size=2, state_key="action")
        assert swapped.statistics["observation.state"]["max"].tolist() == [106.0, 0.0]


class TestSeveralDataSets:
    def test_frames_of_all_with_equal_weight(self, record: Record) -> None:
        first = record((5, 7), name="first", tasks=("reach the disc",))
        second = record((4, 6, 3), name="second", tasks=("push the cube",), offset=1000.0)
        data = LeRobotDataModule([str(first), str(second)], batch_size=5, chunk_size=2, drop_last=False)
        assert (data.num_frames, data.num_episodes) == (25, 5)
        assert data.tasks == ["push the cube", "reach the disc"]
        seen: dict[int, tuple[int, str, float]] = {}
        for loader in (data.train_dataloader(), data.val_dataloader()):
            for batch in loader:
                columns = (batch["index"], batch["episode_index"], batch["task"], batch["action"][:, 0, 0])
                for index, episode, task, action in zip(*columns, strict=True):
                    seen[int(index)] = (int(episode), task, float(action))
        assert sorted(seen) == list(range(25))
        assert seen[11] == (1, "reach the disc", 106.0)
        assert seen[12] == (2, "push the cube", 1000.0)
        assert seen[24] == (4, "push the cube", 1202.0)
        assert all(len(val) == 1 for _, val in data.splits)

    def test_statistics_are_pooled(self, record: Record) -> None:
        roots = [record((5, 7), name="first"), record((4, 6), name="second", offset=1000.0)]
        data = LeRobotDataModule([str(root) for root in roots], chunk_size=2)
        pool = np.concatenate([LeRobotDataset(root).actions.numpy() for root in roots]).astype(np.float64)
        np.testing.assert_array_equal(data.statistics["action"]["q01"], np.quantile(np.sort(pool, 0), 0.01, axis=0))
        assert data.statistics_source.startswith("computed from 22 frames of [")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"action_dim": 3}, r"action dimension 2 and 3; choose .* \(action_indices\)"),
            ({"state_dim": 4}, "state dimension 3 and 4"),
            ({"fps": 20}, "fps 10 and 20; resample"),
            ({"size": 9}, r"image sizes .*\(8, 8\).* and .*\(9, 9\)"),
            ({"cameras": ("observation.images.top",)}, r"cameras \['observation.images.image'\] and \['.*top'\]"),
        ],
    )
    def test_that_do_not_fit_together(self, record: Record, changes: dict[str, Any], message: str) -> None:
        roots = [str(record(name="first")), str(record(name="second", **changes))]
        with pytest.raises(ValueError, match=f"'{roots[0]}' and '{roots[1]}' cannot be trained on together: {message}"):
            LeRobotDataModule(roots, batch_size=2, chunk_size=2).setup()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"root": []}, "root is empty"),
        ({"root": ["a", "./a"]}, "names a data set twice"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"chunk_size": 0}, "chunk_size=0 must be at least 1"),
        ({"num_workers": -1}, "num_workers=-1 must be at least 0"),
        ({"max_episodes": 0}, "max_episodes=0 must be at least 1"),
        ({"seed": -1}, "seed=-1"),
        ({"val_fraction": 1.5}, "val_fraction=1.5 must lie in"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LeRobotDataModule(**{"root": "data", **arguments})


def test_no_data_set_no_batch_no_chunk(record: Record, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="soma demos"):
        LeRobotDataModule(str(tmp_path / "nothing"), chunk_size=2).setup()
    with pytest.raises(ValueError, match="fewer than batch_size=64, so drop_last=True leaves no batch"):
        LeRobotDataModule(str(record()), batch_size=64, chunk_size=2).setup()
    data = LeRobotDataModule(str(record(name="b")), batch_size=2)
    data.setup()
    with pytest.raises(ValueError, match="chunk_size is not set"):
        data.train_dataloader()


def test_the_policy_gives_the_chunk_size(record: Record) -> None:
    data = LeRobotDataModule(str(record()), batch_size=2)
    data.setup()
    data.connect_policy(SimpleNamespace(chunk_size=5))
    assert next(iter(data.train_dataloader()))["action"].shape == (2, 5, 2)
    assert next(iter(data.val_dataloader()))["action"].shape[1:] == (5, 2)
    with pytest.raises(ValueError, match="data.chunk_size=5 differs from the policy's chunk_size=8"):
        data.connect_policy(SimpleNamespace(chunk_size=8))


class Recorder(pl.LightningModule):
    """Trains one number and writes down which frames every batch had."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["index"].tolist())
        return self.weight * batch["action"].mean()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val_loss", self.weight.detach(), batch_size=len(batch["action"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(
    root: Path, folder: Path, max_steps: int, every: int | None, ckpt_path: str | None = None, num_workers: int = 0
) -> list[list[int]]:
    model = Recorder()
    callbacks = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)] if every else []
    trainer = pl.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    data = LeRobotDataModule(str(root), batch_size=4, chunk_size=2, num_workers=num_workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
    return model.seen


def test_a_resumed_fit_sees_the_remaining_batches(record: Record, tmp_path: Path) -> None:
    """Five batches an epoch; checkpoints inside an epoch, at its end, and where validation runs."""
    root = record((9, 7, 8))
    whole = fit(root, tmp_path / "whole", 17, every=None)
    assert len(whole) == 17
    folder = tmp_path / "checkpoints"
    assert fit(root, folder, 13, every=1) == whole[:13]
    per_epoch = LeRobotDataModule(str(root), batch_size=4, chunk_size=2).train_dataloader()
    for step in (1, 3, len(per_epoch), len(per_epoch) + 2, 2 * len(per_epoch), 12):
        resumed = fit(root, folder, 17, every=None, ckpt_path=str(folder / f"step={step}.ckpt"))
        assert resumed == whole[step:], f"resumed after step {step}"


@pytest.mark.slow
def test_a_resumed_fit_with_workers_sees_the_remaining_batches(record: Record, tmp_path: Path) -> None:
    root, folder = record((9, 7, 8)), tmp_path / "checkpoints"
    whole = fit(root, folder, 11, every=7)
    assert fit(root, folder, 11, None, ckpt_path=str(folder / "step=7.ckpt"), num_workers=1) == whole[7:]


def test_advice_for_a_run_that_waits(record: Record) -> None:
    root = str(record((5, 5), size=32))
    advice = LeRobotDataModule(root, batch_size=2, chunk_size=1).loading_advice()
    assert "data.num_workers (now 0; this machine has" in advice
    assert "data.preload=true (the decoded images take 0.0 GiB" in advice
    assert "video" not in advice
    assert "preload" not in LeRobotDataModule(root, batch_size=2, chunk_size=1, preload=True).loading_advice()
