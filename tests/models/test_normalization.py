"""Normalization against the public formulas, its guard of near-constant dimensions, and the two files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from soma_lightning.contract import ACTION, STATE, Statistics
from soma_lightning.models.normalization import Normalizer, load_statistics, save_statistics

MODES = [(mode, eps) for mode in ("quantiles", "mean_std") for eps in ("lerobot", "openpi")]


def make_statistics() -> Statistics:
    rng = np.random.default_rng(0)
    statistics = {}
    for feature, dim, shift in ((STATE, 8, 0.3), (ACTION, 7, -0.1)):
        data = rng.normal(shift, np.linspace(0.02, 2.0, dim), size=(1000, dim))
        statistics[feature] = {
            "mean": data.mean(0),
            "std": data.std(0),
            "min": data.min(0),
            "max": data.max(0),
            "q01": np.quantile(data, 0.01, axis=0),
            "q99": np.quantile(data, 0.99, axis=0),
            "count": np.array([1000]),
        }
    return statistics


def one_dimension(low: float, high: float) -> Statistics:
    stats = {"q01": np.array([low]), "q99": np.array([high]), "mean": np.array([low]), "std": np.array([high - low])}
    return {ACTION: stats}


def public_formula(x: np.ndarray, stats: dict[str, np.ndarray], mode: str, eps: str) -> np.ndarray:
    """The formulas as the public code states them, in float64."""
    if mode == "mean_std":
        return (x - stats["mean"]) / (stats["std"] + (1e-8 if eps == "lerobot" else 1e-6))
    width = stats["q99"] - stats["q01"]
    if eps == "openpi":
        return (x - stats["q01"]) / (width + 1e-6) * 2.0 - 1.0
    return 2.0 * (x - stats["q01"]) / np.where(width == 0, 1e-8, width) - 1.0


@pytest.mark.parametrize(("mode", "eps"), MODES)
def test_ordinary_dimensions_follow_the_public_formula_and_come_back(mode: Any, eps: Any) -> None:
    statistics = make_statistics()
    for feature, dim in ((STATE, 8), (ACTION, 7)):
        normalizer = Normalizer(statistics, feature, mode, eps)
        assert normalizer.dim == dim
        assert normalizer.constant_dimensions == ()
        x = torch.randn(5, 3, dim, generator=torch.Generator().manual_seed(0))
        y = normalizer.normalize(x)
        expected = public_formula(x.double().numpy(), statistics[feature], mode, eps)
        torch.testing.assert_close(y.double(), torch.from_numpy(expected), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(normalizer.unnormalize(y), x, rtol=1e-6, atol=1e-6)
        exact = normalizer.unnormalize(normalizer.normalize(x.double()))
        torch.testing.assert_close(exact, x.double(), rtol=1e-13, atol=1e-13)


def test_quantiles_equal_lerobots_float32_arithmetic_bit_for_bit() -> None:
    statistics = make_statistics()
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    q01, q99 = (torch.tensor(statistics[STATE][name], dtype=torch.float32) for name in ("q01", "q99"))
    assert torch.equal(Normalizer(statistics, STATE).normalize(x), 2.0 * (x - q01) / (q99 - q01) - 1.0)


def test_known_values() -> None:
    normalizer = Normalizer(one_dimension(-2.0, 6.0), ACTION)
    assert normalizer.normalize(torch.tensor([[-2.0], [2.0], [6.0], [10.0]])).flatten().tolist() == [-1, 0, 1, 2]
    assert normalizer.unnormalize(torch.tensor([[-3.0], [0.5]])).flatten().tolist() == [-10.0, 4.0]


def test_the_epsilons_differ_where_they_should() -> None:
    statistics, x = one_dimension(0.0, 1e-3), torch.tensor([[1e-3]])
    assert Normalizer(statistics, ACTION, eps="lerobot").normalize(x).item() == pytest.approx(1.0, abs=1e-6)
    assert Normalizer(statistics, ACTION, eps="openpi").normalize(x).item() == pytest.approx(2 / 1.001 - 1, abs=1e-6)


@pytest.mark.parametrize(("mode", "eps"), MODES)
@pytest.mark.parametrize("value", [0.0, 0.04, -3.14159, 250.0])
def test_a_constant_dimension_is_kept_finite_and_comes_back_exactly(value: float, mode: Any, eps: Any) -> None:
    normalizer = Normalizer(one_dimension(value, value), ACTION, mode, eps)
    assert normalizer.constant_dimensions == (0,)
    constant = torch.tensor([[value]])
    y = normalizer.normalize(constant)
    assert y.item() == (-1.0 if mode == "quantiles" else 0.0)  # what the public formulas give
    assert torch.equal(normalizer.unnormalize(y), constant)
    near = constant + 1e-3 * max(1.0, abs(value))
    shifted = normalizer.normalize(near)
    assert 0.05 < (shifted - y).abs().item() < 0.3
    torch.testing.assert_close(normalizer.unnormalize(shifted), near)
    # A sampled action is never exact: its error must not move a constant dimension noticeably.
    assert (normalizer.unnormalize(y + 0.05) - constant).abs().item() < 1e-3 * max(1.0, abs(value))


def test_the_guard_starts_where_it_says() -> None:
    assert Normalizer(one_dimension(0.0, 0.9e-5), ACTION).constant_dimensions == (0,)
    assert Normalizer(one_dimension(0.0, 1.1e-5), ACTION).constant_dimensions == ()
    assert Normalizer(one_dimension(3.0, 3.0 + 2e-4), ACTION).constant_dimensions == (0,)
    assert Normalizer(one_dimension(3.0, 3.0 + 4e-4), ACTION).constant_dimensions == ()


@pytest.mark.parametrize("direction", ["normalize", "unnormalize"])
def test_dimensions_beyond_the_statistics_pass_through(direction: str) -> None:
    normalizer = Normalizer(make_statistics(), ACTION)
    x = torch.randn(2, 4, 32)
    done = getattr(normalizer, direction)(x)
    assert torch.equal(done[..., 7:], x[..., 7:])
    assert torch.equal(done[..., :7], getattr(normalizer, direction)(x[..., :7]))


def test_dtypes_and_input_are_kept() -> None:
    normalizer = Normalizer(make_statistics(), ACTION)
    x = torch.randn(2, 7)
    before = x.clone()
    assert normalizer.normalize(x.bfloat16()).dtype == torch.float32
    assert normalizer.normalize(x.double()).dtype == torch.float64
    assert torch.equal(x, before)


def without(statistics: Statistics, feature: str, name: str) -> Statistics:
    return {f: {n: v for n, v in stats.items() if (f, n) != (feature, name)} for f, stats in statistics.items()}


def changed(statistics: Statistics, **values: list[float]) -> Statistics:
    return {**statistics, ACTION: {**statistics[ACTION], **{n: np.array(v) for n, v in values.items()}}}


@pytest.mark.parametrize(
    ("statistics", "mode", "message"),
    [
        ({STATE: make_statistics()[STATE]}, "quantiles", r"no statistics of 'action'.*compute them from the data set"),
        (
            without(make_statistics(), ACTION, "q99"),
            "quantiles",
            r"'action' lack 'q99'.*'quantiles'.*another normalization",
        ),
        (without(make_statistics(), ACTION, "std"), "mean_std", r"'action' lack 'std'"),
        (changed(one_dimension(0, 1), q01=[0.0, 1.0]), "quantiles", r"'action' differ in length: \(2,\) and \(1,\)"),
        (changed(one_dimension(0, 1), q01=[2.0]), "quantiles", r"'action' have q99 < q01 in dimensions \[0\]"),
        (changed(one_dimension(0, 1), std=[-1.0]), "mean_std", r"std < 0 in dimensions \[0\]"),
        (changed(one_dimension(0, 1), q01=[float("nan")]), "quantiles", "'q01' of 'action' must be a finite vector"),
    ],
)
def test_unusable_statistics_are_named(statistics: Statistics, mode: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Normalizer(statistics, ACTION, mode)


def test_unknown_modes_and_short_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown normalization 'minmax'"):
        Normalizer(make_statistics(), ACTION, "minmax")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'action' has 6 dimensions, but its statistics have 7"):
        Normalizer(make_statistics(), ACTION).normalize(torch.zeros(2, 6))


@pytest.mark.parametrize("layout", ["lerobot", "openpi"])
def test_files_round_trip(tmp_path: Path, layout: Any) -> None:
    statistics = make_statistics()
    save_statistics(statistics, tmp_path / "deep" / "stats.json", layout)
    loaded = load_statistics(tmp_path / "deep" / "stats.json")
    names = set(statistics[STATE]) if layout == "lerobot" else {"mean", "std", "q01", "q99"}
    for feature in (STATE, ACTION):
        assert set(loaded[feature]) == names
        for name in names:
            assert np.array_equal(loaded[feature][name], statistics[feature][name])
    save_statistics(loaded, tmp_path / "again.json", layout)
    assert (tmp_path / "again.json").read_text() == (tmp_path / "deep" / "stats.json").read_text()


def test_the_forms_are_the_public_ones(tmp_path: Path) -> None:
    save_statistics(make_statistics(), tmp_path / "a.json", "openpi")
    openpi = json.loads((tmp_path / "a.json").read_text())
    assert set(openpi) == {"norm_stats"}
    assert set(openpi["norm_stats"]) == {"state", "actions"}
    save_statistics(make_statistics(), tmp_path / "b.json", "lerobot")
    lerobot = json.loads((tmp_path / "b.json").read_text())
    assert set(lerobot) == {STATE, ACTION}
    assert lerobot[ACTION]["count"] == [1000]


def test_files_of_the_public_projects_load(tmp_path: Path) -> None:
    image = {"mean": [[[0.5]], [[0.5]], [[0.5]]]}
    file = tmp_path / "stats.json"
    file.write_text(
        json.dumps({STATE: {"mean": [1, 2], "std": [1, 1], "count": [9]}, "observation.images.image": image})
    )
    loaded = load_statistics(file)
    assert set(loaded) == {STATE}
    assert loaded[STATE]["mean"].tolist() == [1.0, 2.0]
    assert loaded[STATE]["count"].dtype == np.int64
    file.write_text(json.dumps({"norm_stats": {"actions": {"mean": [1], "std": [2], "q01": None, "q99": None}}}))
    assert set(load_statistics(file)[ACTION]) == {"mean", "std"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no valid JSON"),
        ("[1]", "must hold a JSON object, got list"),
        ('{"index": {}}', r"has no statistics of 'observation.state' or 'action'; it has \['index'\]"),
        ('{"norm_stats": []}', "'norm_stats' must be an object of features, got list"),
        ('{"action": 3}', "'action' must be an object of statistics, got int"),
        ('{"action": {"mean": ["a"]}}', "'mean' of 'action' is no vector of numbers"),
        ('{"action": {"mean": [1, 2], "std": [1]}}', "'action' must be vectors of one length"),
        ('{"action": {"mean": [[1, 2]]}}', "'action' must be vectors of one length"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "stats.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_statistics(file)
    assert str(file) in str(error.value)


def test_what_a_form_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'action' lack \['std'\]"):
        save_statistics(without(make_statistics(), ACTION, "std"), tmp_path / "a.json", "openpi")
    with pytest.raises(ValueError, match="no name for 'reward'"):
        save_statistics({"reward": {}}, tmp_path / "a.json", "openpi")
    with pytest.raises(ValueError, match="unknown statistics layout 'csv'"):
        save_statistics(make_statistics(), tmp_path / "a.json", "csv")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        load_statistics(tmp_path / "missing.json")
