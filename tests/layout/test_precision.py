"""Which dtypes flags and policies mean, and that a unit computes in them without FSDP2. One process."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from soma_lightning.compat import completes_partial_units
from soma_lightning.layout.casting import apply_precision, cast_floating, keep_gradient_dtypes
from soma_lightning.layout.islands import fp32_islands
from soma_lightning.layout.precision import FLAGS, Precision, grad_dtype, read_precision
from soma_lightning.layout.wrap import Unit, UnitPlan, WrapOptions, plan_units
from soma_lightning.models import PI05Config
from soma_lightning.models.pi05.model import PI05Model

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FULL = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
LOW = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "bf16"}


class Net(nn.Module):
    """Records the dtypes that its parts see. `step` is a method besides forward that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Part()
        self.head = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor([1.0 + 2**-12]))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = (x.dtype, self.head.weight.dtype, self.scale.dtype)
        return self.head(self.body(x).to(self.head.weight.dtype))

    def step(self, x: Tensor) -> Tensor:
        self.seen_in_step = (x.dtype, self.scale.dtype)
        return self(x).float().square().mean()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = (x.dtype, self.proj.weight.dtype, self.norm.running_mean.dtype, torch.is_autocast_enabled("cpu"))
        out = self.proj(self.norm(x))
        self.out_dtype = out.dtype
        return out


def rules(flag: str = "32-true", **options: Any) -> Any:
    return read_precision(WrapOptions(**options), flag)


def body_bound_to(policy: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "wrappers": {"body": {"module_names": ["body"], "wrap_mode": "subtree"}},
        "mixed_precision_policies": {"own": policy},
        "mixed_precision_rules": {"body": "own"},
        **more,
    }


def applied(net: nn.Module, flag: str = "32-true", methods: tuple[str, ...] = (), **options: Any) -> UnitPlan:
    plan = plan_units(net, WrapOptions(**options), precision=flag)
    apply_precision(net, plan, sharded=False, forward_methods=methods)
    return plan


# -------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("flag", "policy"),
    [
        ("32-true", None),
        ("64-true", None),
        ("bf16-true", MixedPrecisionPolicy(reduce_dtype=FP32, cast_forward_inputs=False)),
        ("16-true", MixedPrecisionPolicy(reduce_dtype=FP32, cast_forward_inputs=False)),
        ("bf16-mixed", MixedPrecisionPolicy(BF16, FP32, cast_forward_inputs=False)),
        ("16-mixed", MixedPrecisionPolicy(FP16, FP32, cast_forward_inputs=False)),
    ],
)
def test_policy_of_each_flag(flag: str, policy: MixedPrecisionPolicy | None):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    (unit,) = plan_units(model, WrapOptions(), precision=flag).units
    assert unit.mp == policy
    assert unit.buffer_dtype is None


def test_every_flag_is_tested_above():
    marks = test_policy_of_each_flag.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for mark in marks for case in mark.args[1]} == set(FLAGS)


@pytest.mark.parametrize("flag", ["transformer-engine", "bf16", "8-true"])
def test_other_flags_are_refused(flag: str):
    with pytest.raises(ValueError, match=f"precision='{flag}' cannot be sharded; use one of 32-true, 64-true"):
        rules(flag)


def test_flags_without_settings_leave_one_process_to_lightning():
    net = Net()
    plan = plan_units(net, WrapOptions(), precision="bf16-mixed")
    assert apply_precision(net, plan, sharded=False) == []
    assert not net._forward_pre_hooks


# -------------------------------------------------------------------- fp32 islands of the mixed flags


def test_norms_and_named_modules_are_islands():
    class Model(nn.Module):
        _keep_in_fp32_modules = ("time_mlp", "deep.part")

        def __init__(self) -> None:
            super().__init__()
            self.time_mlp = nn.Linear(4, 4)
            self.time_mlp_out = nn.Linear(4, 4)  # another name, though it begins alike
            self.deep = nn.ModuleDict({"part": nn.Linear(4, 4), "norm": nn.RMSNorm(4)})
            self.custom = type("LlamaRMSNorm", (nn.LayerNorm,), {})(4)

    model = Model()
    assert fp32_islands(model) == {model.time_mlp, model.deep["part"], model.deep["norm"], model.custom}
    model.time_mlp.weight = model.time_mlp_out.weight  # one parameter cannot have two dtypes
    assert model.time_mlp not in fp32_islands(model)


def test_islands_stay_in_their_unit_and_settings_replace_them():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    (unit,) = plan_units(model, WrapOptions(), precision="bf16-mixed").units
    assert (unit.mp.param_dtype, unit.mp.reduce_dtype) == (BF16, FP32)
    assert unit.as_stored == ("0.weight", "0.bias", "2.weight", "2.bias")
    options = WrapOptions(mixed_precision={"param_dtype": "bf16", "cast_root_forward_inputs": False})
    for plan in (
        plan_units(model, options, precision="bf16-mixed"),
        plan_units(model, WrapOptions(), precision="bf16-true"),
    ):
        assert [unit.as_stored for unit in plan.units] == [()]


def test_islands_are_units_where_one_dtype_of_gradients_is_asked_for():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    options = WrapOptions(keep_low_precision_grads=True)
    inner, outer = plan_units(model, options, precision="bf16-mixed").units
    assert (inner.modules, inner.mp.param_dtype, inner.mp.reduce_dtype) == ((model[0], model[2]), None, FP32)
    assert (outer.parameters, outer.mp.param_dtype) == (("1.weight", "1.bias"), BF16)


def test_pi05_keeps_its_projections_and_norms():
    model = PI05Model(PI05Config.tiny(trainable="expert"))
    plan = plan_units(model, WrapOptions(), precision="bf16-mixed")
    kept = {name for unit in plan.units for name in unit.as_stored}
    expected = ("action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out", "norm.")
    assert kept == {name for name in model.trainable_names() if any(part in name for part in expected)}


# -------------------------------------------------------------------- what the settings say


def test_all_settings_are_read():
    read = rules(
        mixed_precision={
            "param_dtype": "bfloat16",
            "reduce_dtype": "bf16",
            "buffer_dtype": "float32",
            "cast_forward_inputs": False,
        },
        wrappers={"w": {"module_names": ["x"]}, "v": {"module_names": ["y"]}},
        mixed_precision_policies={"own": {**FULL, "keep_low_precision_grads": True}},
        mixed_precision_rules={"w": "own"},
    )
    assert (read.unbound.param_dtype, read.unbound.reduce_dtype, read.unbound.buffer_dtype) == (BF16, BF16, FP32)
    assert (read.unbound.cast_forward_inputs, read.root.cast_forward_inputs) == (False, True)
    assert read.of_wrapper("v") == read.unbound
    own = read.of_wrapper("w")
    assert (own.param_dtype, own.cast_forward_inputs, own.keep_low_precision_grads) == (FP32, True, True)


@pytest.mark.parametrize(
    ("flag", "options", "message"),
    [
        ("32-true", {"mixed_precision": {}}, "mixed_precision is empty"),
        ("32-true", {"mixed_precision": {"param_type": "bf16"}}, "no key 'param_type'; did you mean param_dtype?"),
        ("32-true", {"mixed_precision": {"param_dtype": "bf32"}}, "mixed_precision.param_dtype='bf32' is no dtype"),
        ("32-true", {"mixed_precision": {**LOW, "cast_forward_inputs": "no"}}, "='no' must be true or false"),
        (
            "32-true",
            {"mixed_precision": {"reduce_dtype": "bf16", "cast_forward_inputs": True}},
            "has no effect without",
        ),
        (
            "32-true",
            {"mixed_precision": {"param_dtype": "fp16"}},
            "param_dtype=fp16 does not go with precision='32-true'",
        ),
        ("bf16-mixed", {"mixed_precision": {"param_dtype": "fp16"}}, "which allows float32 or bfloat16; change one"),
        ("64-true", {"mixed_precision": {"param_dtype": "bf16"}}, "which allows no policy at all"),
        ("bf16-mixed", {"mixed_precision": {"param_dtype": "fp32"}}, "would turn off all that precision='bf16-mixed'"),
        (
            "32-true",
            {"mixed_precision": {**LOW, "keep_low_precision_grads": False}, "keep_low_precision_grads": True},
            "contradicts mixed_precision.keep_low_precision_grads=false",
        ),
        (
            "32-true",
            body_bound_to({"param_dtype": "fp32"}),
            "mixed_precision_policies.own lacks reduce_dtype, buffer_dtype; a named policy states all three dtypes",
        ),
        (
            "32-true",
            body_bound_to({**FULL, "cast_root_forward_inputs": True}),
            "own has no key 'cast_root_forward_inputs'",
        ),
        (
            "32-true",
            body_bound_to(FULL, mixed_precision_rules={"bodi": "own"}),
            "mixed_precision_rules.bodi=own: there is no wrapper 'bodi'; did you mean body?; defined: body",
        ),
        (
            "32-true",
            body_bound_to(FULL, mixed_precision_rules={"body": "owm"}),
            "mixed_precision_rules.body=owm: there is no policy 'owm'; did you mean own?",
        ),
        ("32-true", {"mixed_precision_rules": {"body": "own"}}, "there is no wrapper 'body'; defined: none"),
        (
            "32-true",
            body_bound_to(FULL, mixed_precision_policies={"own": FULL, "spare": FULL}),
            "mixed_precision_policies.spare is bound to no wrapper; add `WRAPPER: spare`",
        ),
    ],
)
def test_mistakes_name_the_entry_and_the_way_out(flag: str, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        rules(flag, **options)


@pytest.mark.parametrize(
    ("low", "replicated", "param", "reduce", "original", "expected"),
    [
        (False, False, BF16, FP32, FP32, FP32),
        (False, True, BF16, BF16, FP32, FP32),
        (True, False, BF16, FP32, FP32, BF16),
        (True, False, None, FP32, BF16, BF16),
        (True, True, BF16, FP32, FP32, FP32),
        (True, True, BF16, None, FP32, BF16),
        (True, True, BF16, BF16, FP32, BF16),
    ],
)
def test_dtype_of_gradients(low: bool, replicated: bool, param: Any, reduce: Any, original: Any, expected: Any):
    precision = Precision(param, reduce, keep_low_precision_grads=low)
    assert grad_dtype(precision, original, replicated=replicated) is expected


def test_keeping_low_precision_gradients_that_are_not_low_is_an_error():
    with pytest.raises(ValueError, match="keep_low_precision_grads has no effect: all gradients of 'the root'"):
        plan_units(Net(), WrapOptions(keep_low_precision_grads=True), precision="32-true")
    (unit,) = plan_units(Net().bfloat16(), WrapOptions(keep_low_precision_grads=True), precision="bf16-true").units
    assert unit.keep_low_precision_grads


# -------------------------------------------------------------------- computing in these dtypes on one process


def test_a_policy_casts_while_the_unit_computes_and_never_the_storage():
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    parameters = dict(net.named_parameters())
    applied(net, methods=("step",), mixed_precision=LOW, **body_bound_to({**FULL, "cast_forward_inputs": True}))
    loss = net.step(torch.randn(8, 4))
    assert net.seen_in_step == (BF16, BF16)
    assert net.seen == (BF16, BF16, BF16)
    assert net.body.seen == (FP32, FP32, FP32, False)
    assert all(p is parameters[name] for name, p in net.named_parameters())
    loss.backward()
    assert {p.grad.dtype for p in net.parameters()} == {FP32}
    head_grad = net.head.weight.grad
    assert torch.equal(head_grad, head_grad.bfloat16().float())  # computed in bf16
    assert not torch.equal(net.body.proj.weight.grad, net.body.proj.weight.grad.bfloat16().float())
    after = net.state_dict()
    assert {name: t.dtype for name, t in after.items()} == {name: t.dtype for name, t in before.items()}
    assert torch.equal(after["scale"], before["scale"])  # the copy was rounded, the buffer was not


def test_gradients_equal_those_of_a_cast_model():
    net, low = Net(), Net()
    low.load_state_dict(net.state_dict())
    low.bfloat16()
    applied(net, mixed_precision={"param_dtype": "bf16", "buffer_dtype": "bf16"})
    x = torch.randn(8, 4)
    for model, batch in ((net, x), (low, x.bfloat16())):
        model(batch).float().square().mean().backward()
    for ours, theirs in zip(net.parameters(), low.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad.float())


def test_running_statistics_are_kept():
    net = Net()
    applied(net, mixed_precision=LOW)
    x = torch.randn(64, 4) + 3.0
    net(x)
    mean = net.body.norm.running_mean
    assert mean.dtype == FP32
    torch.testing.assert_close(mean, 0.1 * x.mean(0), rtol=2e-2, atol=2e-2)
    assert net.body.norm.num_batches_tracked == 1
    kept = mean.clone()
    net.eval()
    net(x)
    assert torch.equal(net.body.norm.running_mean, kept)
    with torch.inference_mode():
        net(x)
    assert torch.equal(net.body.norm.running_mean, kept)


def test_originals_come_back_after_an_exception():
    net = Net()
    weight = net.head.weight
    applied(net, mixed_precision=LOW)
    with pytest.raises(RuntimeError):
        net(torch.randn(8, 5))
    assert net.head.weight is weight
    assert net.scale.dtype == FP32
    net(torch.randn(8, 4))
    assert net.seen == (BF16, BF16, BF16)


def test_inputs_stay_as_they_are_where_a_policy_says_so():
    net = Net()
    settings = {**LOW, "cast_forward_inputs": False, "cast_root_forward_inputs": False}
    applied(net, mixed_precision=settings, **body_bound_to(FULL))
    net(torch.randn(8, 4, dtype=torch.float64))
    assert net.seen[0] == torch.float64
    assert net.body.seen[0] == FP32  # named policies cast unless they say otherwise


@pytest.mark.parametrize("flag", ["32-true", "bf16-mixed"])
def test_a_unit_of_fp32_computes_in_fp32_under_autocast_too(flag: str):
    net = Net()
    applied(net, flag, **body_bound_to(FULL))
    with torch.autocast("cpu", dtype=BF16, enabled=flag == "bf16-mixed"):
        out = net(torch.randn(8, 4))
        assert torch.is_autocast_enabled("cpu") == (flag == "bf16-mixed")
    assert net.body.out_dtype == FP32
    assert net.body.seen[3] is False
    assert out.dtype == (BF16 if flag == "bf16-mixed" else FP32)


def test_units_inside_a_unit_of_fp32_have_autocast_back():
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Part()), nn.Linear(4, 4))
    wrappers = {"outer": {"module_names": ["0"]}, "inner": {"module_names": ["0.1"]}}
    options = body_bound_to(FULL, wrappers=wrappers, mixed_precision_rules={"outer": "own"})
    plan = applied(net, "bf16-mixed", **options)
    assert {unit.name: unit.autocast for unit in plan.units} == {"0.1": True, "0": False, "": None}
    with torch.autocast("cpu", dtype=BF16):
        net(torch.randn(8, 4))
    assert net[0][1].seen[3] is True
    assert net[0][1].out_dtype == BF16


def test_frozen_units_compute_in_their_policy():
    net = Net()
    net.body.requires_grad_(False)
    plan = applied(net, mixed_precision={"param_dtype": "fp32"}, **body_bound_to(LOW))
    assert [unit.name for unit in plan.unsharded] == ["body"]
    net(torch.randn(8, 4))
    assert net.body.seen[:3] == (BF16, BF16, BF16)
    assert net.body.proj.weight.dtype == FP32


@pytest.mark.parametrize(("reduce", "expected"), [("bf16", BF16), ("fp32", FP32)])
def test_gradients_that_stay_low(reduce: str, expected: torch.dtype):
    settings = {**LOW, "reduce_dtype": reduce}
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    x = torch.randn(8, 4)
    for net, keep in zip(nets, (True, False), strict=True):
        plan = applied(net, mixed_precision={**settings, "keep_low_precision_grads": keep})
        keep_gradient_dtypes(net, plan, sharded=False, replicated=True)
        net(x).float().square().mean().backward()
    for low, full in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert low.grad.dtype == expected
        assert full.grad.dtype == FP32
        assert torch.equal(low.grad.float(), full.grad)


def test_low_gradients_need_a_torch_that_gives_them(monkeypatch: pytest.MonkeyPatch):
    plan = plan_units(
        Net(),
        WrapOptions(mixed_precision={**LOW, "reduce_dtype": "bf16"}, keep_low_precision_grads=True),
        precision="32-true",
    )
    monkeypatch.setattr(torch, "Tensor", type("Tensor", (), {}))
    with pytest.raises(RuntimeError, match="no gradients of torch.bfloat16; store them in the low"):
        keep_gradient_dtypes(plan.units[-1].modules[0], plan, sharded=False, replicated=True)


def test_a_copy_of_the_module_casts_itself():
    net = Net()
    applied(net, methods=("step",), mixed_precision=LOW)
    twin = copy.deepcopy(net)
    twin.step(torch.randn(8, 4)).backward()
    assert twin.seen == (BF16, BF16, BF16)
    assert not hasattr(net, "seen")
    assert net.head.weight.grad is None
    assert twin.head.weight.grad is not None


def test_removing_the_casts_leaves_nothing():
    net = Net()
    plan = plan_units(net, WrapOptions(mixed_precision=LOW), precision="32-true")
    for casts in apply_precision(net, plan, sharded=False, forward_methods=("step",)):
        casts.remove()
    assert "step" not in vars(net)
    assert not net._forward_pre_hooks
    assert not net._forward_hooks
    net.step(torch.randn(8, 4))
    assert net.seen == (FP32, FP32, FP32)


def test_inputs_are_cast_wherever_they_are():
    @dataclass(frozen=True)
    class Cache:
        keys: list[Tensor]
        mask: Tensor

    x, mask = torch.ones(2), torch.ones(2, dtype=torch.bool)
    cast = cast_floating({"a": (x, [x]), "b": Cache([x], mask), "c": "text", "d": None}, BF16)
    assert cast["a"][0].dtype == cast["a"][1][0].dtype == cast["b"].keys[0].dtype == BF16
    assert cast["b"].mask is mask
    assert (cast["c"], cast["d"], x.dtype) == ("text", None, FP32)


def test_torch_tells_whether_it_completes_partial_units():
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        assert completes_partial_units()


def test_a_unit_says_where_its_policy_came_from():
    net = Net()
    plan = plan_units(net, WrapOptions(**body_bound_to(LOW)), precision="32-true")
    body: Unit = next(unit for unit in plan.units if unit.name == "body")
    assert body.precision.explicit
    assert not plan.units[-1].precision.explicit
