"""Which units a module is divided into: boundaries, order, dtypes, frozen and tied parameters. No processes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soma_lightning.layout import boundaries, wrap
from soma_lightning.layout.wrap import UnitPlan, WrapOptions, check_settings, plan_units
from soma_lightning.strategy.options import StrategyOptions


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.proj(self.norm(x)))


class Model(nn.Module):
    """Embedding, two blocks, head; a container in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.trunk = nn.Module()
        self.trunk.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 16, bias=False)


class DeclaringModel(Model):
    _no_split_modules = ("Block",)


def plan(model: nn.Module, precision: str = "32-true", **options: Any) -> UnitPlan:
    made = plan_units(model, WrapOptions(**options), precision=precision)
    check_partition(model, made)
    return made


def check_partition(model: nn.Module, made: UnitPlan) -> None:
    """Each parameter in one place, units inside out; what `fully_shard` would take, in this order, is the plan."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    listed = [parameters[name] for unit in made.units for name in unit.parameters]
    out = {parameters[name] for name in made.replicated}
    assert len(set(listed)) + len(out) == len(set(parameters.values()))
    assert made.units[-1].name == ""
    assert made.units[-1].modules == (model,)
    taken: set[nn.Parameter] = set()
    for unit in made.units:
        new = {p for module in unit.modules for p in module.parameters()} - taken - out
        assert new == {parameters[name] for name in unit.parameters}, unit.name
        assert len({p.dtype for p in new if p.requires_grad}) <= 1, unit.name
        assert unit.trainable == any(p.requires_grad for p in new)
        taken |= new


def names(made: UnitPlan) -> list[str]:
    return [unit.name for unit in made.units]


# -------------------------------------------------------------------- where units begin


def test_units_of_a_model_that_declares_them():
    assert names(plan(DeclaringModel())) == ["trunk.blocks.1", "trunk.blocks.0", ""]


def test_layers_and_leaves_by_size(monkeypatch: pytest.MonkeyPatch):
    assert names(plan(Model())) == [""]
    monkeypatch.setattr(boundaries, "MIN_LAYER_PARAMETERS", 50)
    monkeypatch.setattr(boundaries, "MIN_LEAF_PARAMETERS", 63)
    # The head comes last in the module, so first inside-out; Linear layers inside the blocks are too small.
    assert names(plan(Model())) == ["head", "trunk.blocks.1", "trunk.blocks.0", "embed", ""]


def test_nothing_is_wrapped_by_size_inside_a_declared_unit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(boundaries, "MIN_LAYER_PARAMETERS", 1)
    monkeypatch.setattr(boundaries, "MIN_LEAF_PARAMETERS", 1)
    found = names(plan(DeclaringModel()))
    assert "trunk.blocks.0" in found
    assert not [name for name in found if name.startswith("trunk.blocks.0.")]


def test_tags_that_a_model_declares():
    model = Model()
    model.head._fsdp_wrap_name = "value_head"
    model._no_split_names = ["value_head"]
    assert names(plan(model)) == ["head", ""]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"transformer_layer_cls_to_wrap": ["Block"]}, ["trunk.blocks.1", "trunk.blocks.0", ""]),
        ({"module_classes_to_wrap": ["torch.nn.modules.sparse.Embedding"]}, ["embed", ""]),
        ({"module_classes_to_wrap": ["Embedding"], "no_split_names": ["value_head"]}, ["head", "embed", ""]),
    ],
)
def test_wrap_policy_replaces_what_the_model_declares(policy: dict[str, list[str]], expected: list[str]):
    model = DeclaringModel()
    model.head._fsdp_wrap_name = "value_head"
    assert names(plan(model, wrap_policy=policy)) == expected


def test_wrap_modes():
    def of(mode: str, paths: list[str]) -> list[str]:
        wrappers = {"w": {"module_names": paths, "wrap_mode": mode}}
        return names(plan(DeclaringModel(), wrappers=wrappers))

    assert of("individual", ["trunk.blocks.*.mlp"]) == [
        "trunk.blocks.1.mlp",
        "trunk.blocks.1",
        "trunk.blocks.0.mlp",
        "trunk.blocks.0",
        "",
    ]
    assert of("combined", ["trunk.blocks.0.norm", "trunk.blocks.0.proj"]) == ["trunk.blocks.1", "trunk.blocks.0", ""]


def test_subtree_has_no_units_inside():
    model = nn.ModuleDict({"tower": DeclaringModel()})
    model["tower"].forward = lambda x: x  # so that it can be entered
    root = nn.Sequential(model["tower"], nn.Linear(2, 2))
    assert names(plan(root)) == ["0.trunk.blocks.1", "0.trunk.blocks.0", ""]
    wrapper = {"w": {"module_names": ["0"], "wrap_mode": "subtree"}}
    assert names(plan(root, wrappers=wrapper)) == ["0", ""]


# -------------------------------------------------------------------- dtypes, ties, frozen and 0-d parameters


def test_modules_of_another_dtype_become_one_unit_inside():
    model = DeclaringModel()
    for block in model.trunk.blocks:
        block.proj.bfloat16()
        block.mlp.bfloat16()
    made = plan(model)
    assert names(made) == ["trunk.blocks.1.norm", "trunk.blocks.1", "trunk.blocks.0.norm", "trunk.blocks.0", ""]
    model.trunk.blocks[0].mlp[0].float()
    made = plan(model)
    (split,) = [unit for unit in made.units if unit.name == "trunk.blocks.0.norm"]
    assert split.modules == (model.trunk.blocks[0].norm, model.trunk.blocks[0].mlp[0])


def test_they_are_units_one_by_one_where_torch_wants_all_of_a_unit_to_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wrap, "completes_partial_units", lambda: False)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 400))
    model[:3].bfloat16()
    model[2].weight = model[0].weight
    made = plan(model)
    assert [unit.modules for unit in made.units] == [(model[1],), (model[0], model[2]), (model,)]


def test_direct_parameters_stay_in_their_boundary():
    model = DeclaringModel()
    for block in model.trunk.blocks:
        block.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))  # the block itself owns it
    made = plan(model)
    assert "trunk.blocks.0.scale" in made.units[3].parameters
    assert made.units[2].name == "trunk.blocks.0.norm"
    assert len(made.units[2].modules) == 4


def test_a_module_that_differs_and_holds_others_becomes_a_boundary():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale

    model = nn.Sequential(nn.Linear(4, 40), Scaled())
    made = plan(model)
    assert [(unit.name, unit.parameters) for unit in made.units] == [
        ("1.inner", ("1.inner.weight", "1.inner.bias")),
        ("1", ("1.scale",)),
        ("", ("0.weight", "0.bias")),
    ]


def test_one_module_of_two_dtypes_is_an_error():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].bias.data = model[0].bias.data.bfloat16()
    with pytest.raises(ValueError, match=r"'0', owns '0.weight' \(trainable, torch.float32\) and '0.bias'"):
        plan(model)


def test_attention_projection_that_is_never_called_is_not_a_unit():
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 400))
    model[0].bfloat16()
    assert plan(model).units[0].modules == (model[0],)
    model[0].float().out_proj.bfloat16()
    with pytest.raises(ValueError, match=r"one module, '0', owns .* and '0.out_proj.weight'"):
        plan(model)


def test_frozen_parameters_are_replicated():
    model = DeclaringModel()
    model.trunk.blocks[0].requires_grad_(False)
    model.trunk.blocks[1].proj.requires_grad_(False)
    made = plan(model)
    assert names(made) == ["trunk.blocks.1", ""]
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert list(made.replicated) == frozen
    assert plan(model, frozen="replicate") == made


def test_frozen_units_hold_nothing_trainable():
    model = DeclaringModel()
    model.trunk.blocks[0].requires_grad_(False)
    model.trunk.blocks[1].proj.requires_grad_(False)
    model.embed.requires_grad_(False)
    made = plan(model, frozen="shard")
    assert made.replicated == ()
    assert names(made) == ["trunk.blocks.1.proj", "trunk.blocks.1", "trunk.blocks.0", "embed", ""]
    assert [unit.trainable for unit in made.units] == [False, True, False, False, True]
    parameters = dict(model.named_parameters())
    for unit in made.units:
        assert len({parameters[name].requires_grad for name in unit.parameters}) == 1


def test_frozen_layers_interleaved_with_trainable_ones():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"frozen": Block(), "expert": Block()}) for _ in range(4))
    for layer in model.layers:
        layer["frozen"].requires_grad_(False)
    options: dict[str, Any] = {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Block"]}}
    made = plan(model, frozen="shard", **options)
    assert names(made) == [f"layers.{i}.{part}" for i in (3, 2, 1, 0) for part in ("expert", "frozen")] + [""]
    assert names(plan(model, **options)) == [f"layers.{i}.expert" for i in (3, 2, 1, 0)] + [""]


def test_frozen_and_trainable_mix_only_where_a_wrapper_says_so():
    model = DeclaringModel()
    model.trunk.blocks[1].proj.requires_grad_(False)
    wrappers = {"w": {"module_names": ["trunk.blocks.1"], "wrap_mode": "subtree"}}
    for frozen in ("auto", "shard"):
        made = plan(model, wrappers=wrappers, frozen=frozen)
        assert "trunk.blocks.1.proj.weight" in made.units[0].parameters
        assert made.replicated == ()


def test_a_frozen_bias_beside_a_trainable_weight_can_be_replicated_not_sharded():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].bias.requires_grad_(False)
    assert plan(model).replicated == ("0.bias",)
    with pytest.raises(ValueError, match=r"'0.bias' \(frozen.*frozen='replicate'"):
        plan(model, frozen="shard")


def test_0d_parameters_are_replicated_and_may_train():
    model = DeclaringModel()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    assert plan(model, frozen="shard").replicated == ("temperature",)


def test_tied_weights_belong_to_the_lowest_unit_that_holds_both(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(boundaries, "MIN_LEAF_PARAMETERS", 10)
    model = DeclaringModel()
    assert "head" in names(plan(model))
    model.head.weight = model.embed.weight
    made = plan(model)
    assert names(made) == ["trunk.blocks.1", "trunk.blocks.0", ""]
    assert set(made.units[-1].parameters) == {"embed.weight", "head.weight"}


def test_weights_tied_across_blocks_take_their_blocks_out_of_the_plan():
    model = DeclaringModel()
    model.trunk.blocks.append(Block())
    model.trunk.blocks[2].proj = model.trunk.blocks[0].proj  # a shared module
    assert names(plan(model)) == ["trunk.blocks.1", ""]
    wrappers = {"w": {"module_names": ["trunk.blocks.0"]}}
    with pytest.raises(ValueError, match=r"wrappers.w selects 'trunk.blocks.0', but .* are one tied parameter"):
        plan(model, wrappers=wrappers)


def test_a_layer_used_many_times_is_one_unit():
    layer = Block()
    model = nn.ModuleDict({"layers": nn.ModuleList([layer] * 3)})
    assert names(plan(model, wrap_policy={"transformer_layer_cls_to_wrap": ["Block"]})) == ["layers.0", ""]


@pytest.mark.parametrize(("value", "of_root"), [(None, None), (True, None), (False, False)])
def test_frozen_units_are_freed_after_forward_and_the_root_never(value: bool | None, of_root: bool | None):
    model = DeclaringModel()
    model.trunk.blocks[1].requires_grad_(False)
    made = plan(model, reshard_after_forward=value, frozen="shard")
    assert [unit.reshard_after_forward for unit in made.units] == [True, value, of_root]


def test_options_of_the_strategy_make_a_plan():
    assert names(plan_units(DeclaringModel(), StrategyOptions(), precision="32-true")) == names(plan(DeclaringModel()))


def test_settings_are_checked_without_a_model_and_a_flag():
    check_settings(WrapOptions(mixed_precision={"param_dtype": "fp16"}))  # right under 16-mixed
    with pytest.raises(ValueError, match="mixed_precision is empty"):
        check_settings(WrapOptions(mixed_precision={}))
    with pytest.raises(ValueError, match="wrap_policy is empty"):
        check_settings(WrapOptions(wrap_policy={}))


def test_the_plan_is_the_same_on_every_rank():
    assert plan(DeclaringModel(), "bf16-mixed") != plan(DeclaringModel(), "32-true")  # modules compare by identity
    model = DeclaringModel()
    assert plan(model, "bf16-mixed") == plan(model, "bf16-mixed")


# -------------------------------------------------------------------- errors


def by_path(*paths: str, **more: Any) -> dict[str, Any]:
    return {"module_names": list(paths), **more}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frozen": "shared"}, "frozen='shared' is unknown; use 'auto', 'replicate' or 'shard'"),
        ({"wrap_policy": {}}, "wrap_policy is empty"),
        (
            {"wrap_policy": {"transformer_layers": ["Block"]}},
            "no key 'transformer_layers'; did you mean transformer_la",
        ),
        ({"wrap_policy": {"module_classes_to_wrap": "Block"}}, "must be a list of names with at least one entry"),
        ({"wrap_policy": {"module_classes_to_wrap": ["Blok"]}}, "selects nothing with 'Blok'; did you mean Block?"),
        ({"wrap_policy": {"no_split_names": ["head"]}}, "with 'head': no module has _fsdp_wrap_name tags"),
        (
            {"wrap_policy": {"module_classes_to_wrap": ["ModuleList"]}},
            "'trunk.blocks' is a ModuleList, whose forward is",
        ),
        ({"wrappers": {"w": by_path("trunk.block.*")}}, "nothing with 'trunk.block.*'; did you mean trunk.blocks"),
        ({"wrappers": {"w": by_path("head", "hed")}}, "wrappers.w.module_names selects nothing with 'hed'"),
        ({"wrappers": {"w": by_path("trunk")}}, "'trunk' is a Module, whose forward is never called"),
        (
            {"wrappers": {"w": by_path("head", module_classes=["Linear"])}},
            "got module_classes and module_names; use a wr",
        ),
        (
            {"wrappers": {"w": {"wrap_mode": "subtree"}}},
            "needs exactly one of wrap_names, module_classes, module_names",
        ),
        ({"wrappers": {"w": by_path("head", wrap_mod="subtree")}}, "no key 'wrap_mod'; did you mean wrap_mode?"),
        (
            {"wrappers": {"w": by_path("head", wrap_mode="tree")}},
            "wrappers.w.wrap_mode='tree' is unknown; use one of indiv",
        ),
        ({"wrappers": {"w": by_path()}}, "must be a list of names with at least one entry"),
        ({"wrappers": {"w": by_path("head"), "v": by_path("he*")}}, "selects 'head', which wrapper 'w' selects too"),
        (
            {"wrappers": {"w": by_path("trunk.blocks.0", wrap_mode="subtree"), "v": by_path("*.0.norm")}},
            "wrappers.w makes all of 'trunk.blocks.0' one unit, but wrappers.v selects 'trunk.blocks.0.norm' inside it",
        ),
        (
            {"wrappers": {"w": by_path("trunk.blocks.0", "trunk.blocks.0.mlp", wrap_mode="subtree")}},
            "wrappers.w selects 'trunk.blocks.0.mlp' inside it",
        ),
        ({"wrappers": {"w": by_path("head", wrap_mode="combined")}}, "combined joins several, use wrap_mode: subtree"),
        ({"wrappers": {"w": by_path("head", "embed", wrap_mode="combined")}}, "is the root, which is a unit already"),
        (
            {"wrappers": {"w": by_path("trunk.blocks.0", "trunk.blocks.1", wrap_mode="combined")}},
            "'trunk.blocks' is a ModuleList, whose forward is never called",
        ),
    ],
)
def test_mistakes_name_the_entry_and_the_way_out(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(DeclaringModel(), **options)


@pytest.mark.parametrize("mode", ["individual", "subtree"])
def test_a_selected_unit_of_two_dtypes_is_an_error(mode: str):
    model = DeclaringModel()
    model.trunk.blocks[0].proj.bfloat16()
    with pytest.raises(ValueError, match=r"wrappers.w makes 'trunk.blocks.0' one unit, but it holds .*torch.bfloat16"):
        plan(model, wrappers={"w": by_path("trunk.blocks.0", wrap_mode=mode)})
