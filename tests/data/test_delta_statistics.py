"""Statistics of actions that a policy sees relative to the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from soma_lightning.data import LeRobotDataModule
from soma_lightning.data.lerobot_writer import LeRobotWriter

Record = Callable[..., Path]
CHUNK = 4


def record_random(root: Path, lengths: tuple[int, ...], seed: int) -> Path:
    features = {
        "observation.state": {"dtype": "float32", "shape": [3], "names": None},
        "action": {"dtype": "float32", "shape": [3], "names": None},
    }
    draw = np.random.default_rng(seed)
    with LeRobotWriter(root, features=features) as writer:
        for length in lengths:
            values = {key: draw.normal(size=(length, 3)).astype(np.float32) for key in features}
            writer.add_episode(values, "reach")
    return root


def brute_force(batches: list[dict]) -> np.ndarray:
    """Every real step of every chunk, [N, A], dimensions 0 and 2 minus the state."""
    rows = []
    for batch in batches:
        for state, chunk, is_pad in zip(
            batch["observation.state"], batch["action"], batch["action_is_pad"], strict=True
        ):
            for action, pad in zip(chunk.numpy(), is_pad.tolist(), strict=True):
                if not pad:
                    rows.append([action[0] - state[0].item(), action[1], action[2] - state[2].item()])
    return np.array(rows, np.float64)


def test_they_pool_the_real_steps_of_all_chunks(tmp_path: Path):
    roots = [record_random(tmp_path / "a", (5, 2, 9), 0), record_random(tmp_path / "b", (3, 7), 1)]
    data = LeRobotDataModule(
        [str(root) for root in roots], batch_size=5, statistics="computed", val_fraction=0.3, drop_last=False
    )
    data.setup()
    absolute = data.statistics
    data.connect_policy(SimpleNamespace(chunk_size=CHUNK, delta_actions=(0, 2)))
    pool = brute_force([*data.train_dataloader(), *data.val_dataloader()])
    numbers = data.statistics["action"]
    for dim in (0, 2):
        np.testing.assert_allclose(numbers["mean"][dim], pool[:, dim].mean(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(numbers["std"][dim], pool[:, dim].std(), rtol=1e-5)
        for name, q in (("min", 0), ("q01", 0.01), ("q99", 0.99), ("max", 1)):
            np.testing.assert_allclose(numbers[name][dim], np.quantile(pool[:, dim], q), rtol=1e-5, atol=1e-6)
    for name in ("mean", "std", "q01", "q99"):
        assert numbers[name][1] == absolute["action"][name][1], "an absolute dimension is of the frames"
        np.testing.assert_array_equal(data.statistics["observation.state"][name], absolute["observation.state"][name])
    assert "dimensions [0, 2] of action relative to the state over chunks of 4" in data.statistics_source
    assert data.report_facts()["delta_actions"] == [0, 2]


def test_stored_statistics_are_refused(record: Record):
    data = LeRobotDataModule(str(record()), batch_size=2)
    data.setup()
    data.connect_policy(SimpleNamespace(chunk_size=CHUNK, delta_actions=(0,)))
    with pytest.raises(
        ValueError, match=r"are of absolute actions, but the policy has delta_actions=\[0\]; set statist"
    ):
        _ = data.statistics
    data.connect_policy(SimpleNamespace(chunk_size=CHUNK))
    assert "meta/stats.json" in data.statistics_source
