"""Statistics against numpy, their files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from soma_lightning.data.lerobot import LeRobotDataset
from soma_lightning.data.statistics import (
    check_statistics,
    compute_statistics,
    constant_dimensions,
    describe,
    describe_pixels,
    find_statistics,
    has_required,
    select_dimensions,
)
from soma_lightning.models.normalization import load_statistics, save_statistics


def test_describe_equals_numpy() -> None:
    values = np.random.default_rng(0).normal(size=(257, 3)).astype(np.float32)
    described = describe(values)
    exact = values.astype(np.float64)
    for name, want in (("mean", exact.mean(0)), ("std", exact.std(0)), ("min", exact.min(0)), ("max", exact.max(0))):
        np.testing.assert_array_equal(described[name], want, err_msg=name)
    for name, q in (("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)):
        np.testing.assert_array_equal(described[name], np.quantile(exact, q, axis=0), err_msg=name)
    assert described["count"].tolist() == [257]


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_pixels_from_a_histogram_equal_numpy(count: int) -> None:
    pixels = np.random.default_rng(count).integers(0, 256, (3, count))
    histogram = np.stack([np.bincount(channel, minlength=256) for channel in pixels])
    described = describe_pixels(histogram, num_images=5)
    scaled = pixels / 255.0
    for name, want in (
        ("min", scaled.min(1)),
        ("max", scaled.max(1)),
        ("mean", scaled.mean(1)),
        ("std", scaled.std(1)),
        ("q01", np.quantile(scaled, 0.01, axis=1)),
        ("q50", np.quantile(scaled, 0.5, axis=1)),
        ("q99", np.quantile(scaled, 0.99, axis=1)),
    ):
        assert described[name].shape == (3, 1, 1)
        np.testing.assert_allclose(described[name].ravel(), want, rtol=0, atol=1e-8, err_msg=name)
    assert described["count"].tolist() == [5]


def test_compute_from_a_data_set_and_from_arrays(record: Callable[..., Path]) -> None:
    data = LeRobotDataset(record((5, 7, 4)))
    statistics = compute_statistics(data)
    assert list(statistics) == ["observation.state", "action"]
    assert set(statistics["action"]) == {"mean", "std", "min", "max", "q01", "q99", "count"}
    np.testing.assert_array_equal(statistics["action"]["q99"], np.quantile(data.actions.double().numpy(), 0.99, axis=0))
    arrays = {"observation.state": data.states.numpy(), "action": data.actions.numpy()}
    again = compute_statistics(arrays)
    assert all((again[f][name] == value).all() for f, numbers in statistics.items() for name, value in numbers.items())


def test_compute_refuses_what_is_no_data() -> None:
    with pytest.raises(ValueError, match="'action' has values that are not finite"):
        compute_statistics({"action": np.array([[0.0], [np.inf]])})
    with pytest.raises(ValueError, match=r"shape \[N, D\] with N > 0, found \[0, 3\]"):
        compute_statistics({"action": np.zeros((0, 3))})


def test_constant_dimensions() -> None:
    values = np.random.default_rng(0).normal(size=(50, 4))
    values[:, 1], values[:, 3] = 3.14, np.linspace(0, 1e-7, 50)
    assert constant_dimensions(compute_statistics({"action": values, "observation.state": values[:, :1]})) == {
        "action": [1, 3]
    }


def test_files_keep_every_bit(tmp_path: Path) -> None:
    statistics = compute_statistics({"action": np.random.default_rng(0).normal(size=(100, 7))})
    save_statistics(statistics, tmp_path / "statistics.json")
    loaded = load_statistics(tmp_path / "statistics.json")
    for name, values in statistics["action"].items():
        np.testing.assert_array_equal(loaded["action"][name], values)
        assert loaded["action"][name].dtype == values.dtype


def test_the_data_sets_own_file_equals_computing(record: Callable[..., Path]) -> None:
    root = record((5, 7, 4))
    stored, computed = load_statistics(root / "meta/stats.json"), compute_statistics(LeRobotDataset(root))
    for feature, numbers in computed.items():
        for name, values in numbers.items():
            np.testing.assert_array_equal(stored[feature][name], values, err_msg=f"{feature}/{name}")


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="no statistics file at '.*nothing.json'"):
        find_statistics(tmp_path / "nothing.json")
    path = tmp_path / "statistics.json"
    for text, message in (
        ("{", "is no valid JSON"),
        ("[1]", "must hold a JSON object"),
        ('{"action": [1]}', "'action' must be an object"),
        ('{"action": {"mean": "high"}}', "'mean' of 'action' is no vector of numbers"),
        ('{"action": {"count": [Infinity]}}', "'count' of 'action' is no vector of numbers"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_statistics(path)
    with pytest.raises(ValueError, match="JSON compliant"):
        save_statistics({"action": {"mean": np.array([np.nan])}}, path)


def test_packaged_statistics_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soma_lightning.data.statistics.RECIPES", tmp_path)
    (tmp_path / "table_statistics.json").write_text(json.dumps({"action": {"mean": [0.5]}}))
    assert find_statistics("table_statistics") == tmp_path / "table_statistics.json"
    with pytest.raises(FileNotFoundError, match=r"packaged: \['table_statistics'\]"):
        find_statistics("chair_statistics")


def test_check_names_what_is_wrong() -> None:
    good = compute_statistics({"action": np.random.default_rng(0).normal(size=(9, 3))})
    check_statistics(good, {"action": 3}, "here")
    with pytest.raises(ValueError, match=r"here has no statistics of 'observation.state'; it has \['action'\]"):
        check_statistics(good, {"action": 3, "observation.state": 8}, "here")
    with pytest.raises(ValueError, match=r"here: 'action/mean' has \[3\] values, the data set's 'action' has 7"):
        check_statistics(good, {"action": 7}, "here")
    lacking = {"action": {name: values for name, values in good["action"].items() if name != "q99"}}
    assert has_required(good, ["action"])
    assert not has_required(lacking, ["action"])
    assert not has_required(good, ["action", "observation.state"])
    with pytest.raises(ValueError, match="here: 'action' lacks 'q99'.*statistics='computed'"):
        check_statistics(lacking, {"action": 3}, "here")
    infinite = {"action": {**good["action"], "std": np.array([1.0, np.inf, 1.0])}}
    with pytest.raises(ValueError, match="'action/std' has values that are not finite"):
        check_statistics(infinite, {"action": 3}, "here")


def test_select_dimensions_keeps_what_a_policy_needs() -> None:
    described = describe(np.arange(12.0).reshape(4, 3))
    chosen = select_dimensions(described, [2, 0])
    assert set(chosen) == {"mean", "std", "min", "max", "q01", "q99", "count"}
    assert chosen["max"].tolist() == [11.0, 9.0]
    assert select_dimensions(described, None)["max"].tolist() == [9.0, 10.0, 11.0]
