"""Settings that are unknown, contradictory or not available yet are refused by name, by both strategies."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch.nn import Linear

from soma_lightning import FabricSomaSpeedStrategy, Layout, SomaSpeedStrategy
from soma_lightning.compat import set_rank_of_messages
from soma_lightning.strategy.options import StrategyOptions

BOTH = pytest.mark.parametrize("strategy", [SomaSpeedStrategy, FabricSomaSpeedStrategy])

LATER = {
    "compile": {"mode": "default"},
    "activation_checkpointing": {"blocks": True},
    "async_save": True,
    "tensor_parallel": {"attention.q_proj": "colwise"},
    "pipeline": {"run_ahead": 1},
    "cpu_offload": True,
}


@BOTH
@pytest.mark.parametrize("name", LATER)
def test_what_comes_later_is_refused_by_name(strategy: Any, name: str) -> None:
    message = f"{name}={LATER[name]!r} is not available in this version; leave it at "
    with pytest.raises(ValueError, match=re.escape(message)):
        strategy(**{name: LATER[name]})


@BOTH
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"save_format": "directory"},
            "save_format='directory' is not available; use one of 'auto', 'file'",
        ),
        ({"fused_optimizer": "yes"}, "fused_optimizer='yes' is not available; use one of 'auto', True"),
        ({"fused_optimizer": 1}, "fused_optimizer=1 is not available"),
        ({"master_weights": None}, "master_weights=None is not available"),
        ({"frozen": "drop"}, "frozen='drop' is not available; use one of 'auto', 'replicate', 'shard'"),
        (
            {"reshard_after_forward": "yes"},
            "reshard_after_forward='yes' is not available; use one of None",
        ),
        ({"forward_methods": "sample"}, "forward_methods='sample' must be a list of names"),
        ({"timeout": 0}, "timeout=0 must be a positive number of seconds"),
        ({"timeout": float("inf")}, "timeout=inf must be a positive number of seconds"),
        ({"wrap_policy": {Linear}}, "wrap_policy={<class 'torch.nn.modules.linear.Linear'>} must be a dict or None"),
        ({"wrappers": ["head"]}, "wrappers=['head'] must be a dict or None"),
        ({"mixed_precision": "bf16"}, "mixed_precision='bf16' must be a dict or None"),
        ({"mixed_precision_policies": "fp32"}, "mixed_precision_policies='fp32' must be a dict or None"),
        ({"mixed_precision_rules": ["a"]}, "mixed_precision_rules=['a'] must be a dict or None"),
        ({"wrappers": {"a": {}}}, "wrappers.a"),
        ({"mixed_precision_rules": {"norms": "fp32"}}, "mixed_precision_rules.norms=fp32: there is no wrapper 'norms'"),
        ({"nonfinite": "zero"}, "nonfinite='zero' is not available; use one of 'skip', 'raise'"),
        ({"checkpoint_weights_only": "no"}, "checkpoint_weights_only='no' is not available"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips=0 must be an integer of at least 1; None never stops"),
        ({"max_consecutive_skips": "3"}, "max_consecutive_skips='3' must be an integer of at least 1"),
        ({"max_consecutive_skips": True}, "max_consecutive_skips=True must be an integer of at least 1"),
        (
            {"keep_low_precision_grads": "yes"},
            "keep_low_precision_grads='yes' is not available; use one of True, False",
        ),
        ({"forward_methods": 3}, "forward_methods=3 must be a list of names"),
        ({"wrappers": {"a": {"module_names": [["x"]]}}}, "wrappers.a.module_names=[['x']] must be a list of names"),
        ({"wrap_policy": {"no_split_names": {"x": 1}}}, "wrap_policy.no_split_names={'x': 1} must be a list of names"),
        (
            {"wrappers": {"a": {"module_names": ["x"]}}, "mixed_precision_rules": {"a": ["p"]}},
            "mixed_precision_rules.a=['p'] must be the name of one of mixed_precision_policies",
        ),
        ({"report": "here.txt"}, "report='here.txt' must be True, False or the path of a .json file"),
        ({"fused_optimizer": False, "master_weights": True}, "master_weights=True needs the fused optimizer step"),
        ({"fused_optimizer": False, "nonfinite": "raise"}, "nonfinite='raise' needs the fused optimizer step"),
    ],
)
def test_values_that_make_no_sense_are_refused(strategy: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        strategy(**settings)


def test_the_trainer_refuses_other_norms_and_fabric_refuses_what_it_does_not_use() -> None:
    with pytest.raises(ValueError, match="norm_type=1.0 is not supported; use 2.0 or inf"):
        SomaSpeedStrategy(norm_type=1.0)
    with pytest.raises(ValueError, match="norm_type=inf is not used by Fabric; pass it to fabric.clip_gradients"):
        FabricSomaSpeedStrategy(norm_type=float("inf"))
    with pytest.raises(ValueError, match="log_grad_norm=True is not used by Fabric; log optimizer.last_grad_norm"):
        FabricSomaSpeedStrategy(log_grad_norm=True)


@BOTH
def test_both_strategies_take_exactly_the_settings_of_the_options(strategy: Any) -> None:
    signature = inspect.signature(strategy)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    assert defaults == {field.name: field.default for field in fields(StrategyOptions)}


def build(kind: str, strategy: Any, **settings: Any) -> Any:
    options = {"accelerator": "cpu", "devices": 1, **settings}
    if kind == "trainer":
        return L.Trainer(strategy=strategy, logger=False, enable_checkpointing=False, **options)
    return L.Fabric(strategy=strategy, **options)


TORCHRUN = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}


@pytest.fixture
def rank_one_of_two(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The environment that torchrun gives the second of two processes."""
    rank = rank_zero_only.rank
    for name, value in {**TORCHRUN, "TORCHELASTIC_RUN_ID": "run", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    yield
    set_rank_of_messages(rank)


@pytest.mark.usefixtures("rank_one_of_two")
@pytest.mark.parametrize("kind", ["trainer", "fabric"])
@pytest.mark.parametrize(("settings", "asked"), [({}, 1), ({"devices": 2, "num_nodes": 3}, 6)])
def test_another_number_of_processes_than_the_launchers_is_refused(
    kind: str, settings: dict[str, int], asked: int
) -> None:
    message = rf"{asked} processes were asked for .* one of 2 that a launcher \(torchrun, srun, mpirun\) started"
    with pytest.raises(ValueError, match=message):
        build(kind, "somaspeed", **settings)


@pytest.mark.usefixtures("rank_one_of_two")
@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_launched_processes_need_no_launcher(kind: str) -> None:
    strategy = build(kind, "somaspeed_hsdp", devices=2).strategy
    assert strategy.launcher is None
    assert (strategy.global_rank, strategy.world_size, strategy.is_distributed) == (1, 2, True)
    assert tuple(strategy.engine.layout.mesh_shape().values()) == (1, 2, 1, 1)
    with pytest.raises(RuntimeError, match="there is no device mesh: the run has one process, or has not begun"):
        _ = strategy.device_mesh


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_several_devices_get_the_script_launcher(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    strategy = build(kind, "somaspeed", devices=2, num_nodes=2).strategy
    assert type(strategy.launcher).__name__ == "_SubprocessScriptLauncher"
    assert strategy.launcher.is_interactive_compatible is False
    assert strategy.engine.layout == Layout(shard=4)


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
@pytest.mark.parametrize("layout", [Layout(tensor=2), {"pipeline": 2}])
def test_layouts_that_come_later_are_refused_by_name(kind: str, layout: Any) -> None:
    cls = SomaSpeedStrategy if kind == "trainer" else FabricSomaSpeedStrategy
    with pytest.raises(ValueError, match=r"Layout\((tensor|pipeline)=2\) is not available in this version"):
        build(kind, cls(layout=layout), devices=2)


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_what_only_divides_is_accepted_on_one_process(kind: str) -> None:
    cls = SomaSpeedStrategy if kind == "trainer" else FabricSomaSpeedStrategy
    strategy = build(kind, cls(frozen="shard", reshard_after_forward=True, forward_methods=["f"], timeout=60)).strategy
    assert strategy.launcher is None
    assert strategy.engine.mesh is None


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_a_left_over_local_rank_selects_no_other_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert build(kind, "somaspeed").strategy.root_device.type == "cpu"


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tensor=2), "= 2 does not divide the world size 1"),
        ({"shard": 4}, "= 4 ranks, but the world size is 1"),
        ("ddp", "layout='ddp' is unknown; use one of auto, fsdp, hsdp, replicate"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_with_the_trainer(kind: str, layout: Any, message: str) -> None:
    cls = SomaSpeedStrategy if kind == "trainer" else FabricSomaSpeedStrategy
    with pytest.raises(ValueError, match=re.escape(message)):
        build(kind, cls(layout=layout))


@pytest.mark.parametrize("layout", ["replicate", "hsdp"])
@pytest.mark.parametrize("settings", [{"frozen": "shard"}, {"reshard_after_forward": True}])
def test_settings_about_shards_are_refused_where_there_are_none(layout: str, settings: dict[str, Any]) -> None:
    engine = SomaSpeedStrategy(layout=layout, **settings).engine
    (name,) = settings
    with pytest.raises(ValueError, match=rf"^{name}=.* has no effect with replicate=2, shard=1"):
        engine.setup_world(devices=2, num_nodes=1, processes=2)
    engine.setup_world(devices=1, num_nodes=1, processes=1)


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
@pytest.mark.parametrize("layout", ["auto", "fsdp", "hsdp", "replicate", {"shard": 1}, Layout()])
def test_on_one_process_every_layout_is_the_trivial_mesh(kind: str, layout: Any) -> None:
    cls = SomaSpeedStrategy if kind == "trainer" else FabricSomaSpeedStrategy
    strategy = build(kind, cls(layout=layout)).strategy
    assert set(strategy.engine.layout.mesh_shape().values()) == {1}
