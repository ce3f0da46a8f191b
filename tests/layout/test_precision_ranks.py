"""Two ranks compute, reduce and keep gradients in the dtypes of one process, and get its numbers.

The network has the module names of the precision example that users of RLinf know; the example itself is applied as it
is written there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from soma_lightning.compat import gather_as_stored
from soma_lightning.layout.casting import apply_precision, keep_gradient_dtypes
from soma_lightning.layout.wrap import UnitPlan, WrapOptions, plan_units
from tests.ranks import ranks_run

#: One worker runs the file: starting its processes takes longest.
pytestmark = pytest.mark.xdist_group("precision_ranks")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

EXAMPLE = """
fsdp_config:
  strategy: fsdp
  sharding_strategy: no_shard
  use_orig_params: true
  mixed_precision:
    param_dtype: bf16
    reduce_dtype: fp32
    buffer_dtype: fp32
    cast_forward_inputs: false
    cast_root_forward_inputs: false
  wrappers:
    projections:
      wrap_names: [action_in_proj, action_out_proj, time_mlp_in, time_mlp_out]
    norms:
      module_classes: [RMSNorm]
    vision_embedding:
      module_names: [img, img.stem]
    vision_mlps:
      module_names: ["img.encoder.layers.*.mlp"]
      wrap_mode: subtree
  mixed_precision_policies:
    fp32:
      param_dtype: fp32
      reduce_dtype: fp32
      buffer_dtype: fp32
      cast_forward_inputs: true
    fp32_preserve_inputs:
      param_dtype: fp32
      reduce_dtype: fp32
      buffer_dtype: fp32
      cast_forward_inputs: false
  mixed_precision_rules:
    projections: fp32
    norms: fp32_preserve_inputs
    vision_embedding: fp32_preserve_inputs
    vision_mlps: fp32
  amp_autocast:
    enabled: false
"""
SETTINGS = ("mixed_precision", "wrappers", "mixed_precision_policies", "mixed_precision_rules")
#: Width of everything; even, so that shards need no padding.
W = 8


def example(**more: Any) -> dict[str, Any]:
    config = yaml.safe_load(EXAMPLE)["fsdp_config"]
    return {**{key: config[key] for key in SETTINGS}, **more}


class RMSNorm(nn.Module):
    """Computes in fp32 and gives back what it was given, as the networks of this family do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(W))

    def forward(self, x: Tensor) -> Tensor:
        return (nn.functional.rms_norm(x.float(), (W,)) * self.weight.float()).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(W, 2 * W), nn.Linear(2 * W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class ImageLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(W), nn.Linear(W, W), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x).to(x.dtype)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ImageLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Image(nn.Module):
    def __init__(self, activations: torch.dtype) -> None:
        super().__init__()
        self.activations = activations
        self.stem, self.encoder = nn.Linear(W, W), Encoder()
        self.position = nn.Parameter(torch.zeros(W))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder((self.stem(x) + self.position).to(self.activations))


class LanguageLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = RMSNorm(), nn.Linear(W, W)
        self.register_buffer("frequencies", torch.linspace(0.1, 1.0, W))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(self.norm(x)) * self.frequencies.to(x.dtype)


class Policy(nn.Module):
    """Image tokens and noisy actions to a velocity. activations: dtype of the residual stream."""

    _no_split_modules = ("ImageLayer", "LanguageLayer")
    recompute = False

    def __init__(self, activations: torch.dtype = BF16) -> None:
        super().__init__()
        self.activations = activations
        self.img = Image(activations)
        self.llm = nn.ModuleList(LanguageLayer() for _ in range(2))
        self.final_norm = RMSNorm()
        self.unused_norm = RMSNorm()
        for name in ("action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out"):
            layer = nn.Linear(W, W)
            layer._fsdp_wrap_name = name
            setattr(self, name, layer)

    def forward(self, image: Tensor, actions: Tensor, time: Tensor) -> Tensor:
        condition = self.time_mlp_out(nn.functional.silu(self.time_mlp_in(time)))
        x = (self.action_in_proj(actions) + condition).to(self.activations) + self.img(image)
        for layer in self.llm:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.action_out_proj(self.final_norm(x))


# -------------------------------------------------------------------- one training step, alone or on a rank


def batches(dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """What each of two ranks gets: image, actions, time, target."""
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(6, W, generator=generator).to(dtype) for _ in range(4)) for _ in range(2)]


def watch(policy: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Fills while it computes: module -> dtypes of its inputs, of its own weights and of its own buffers."""
    seen: dict[str, tuple[Any, ...]] = {}

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            tensors = (args, module.parameters(recurse=False), module.buffers(recurse=False))
            seen[name] = tuple(tuple(t.dtype for t in group) for group in tensors)

        return note

    for name, module in policy.named_modules():
        module.register_forward_pre_hook(hook(name))
    return seen


#: flag, settings, whether the image tower is frozen
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "example": ("32-true", example(), False),
    "example_frozen": ("32-true", example(), True),
    "example_frozen_sharded": ("32-true", example(frozen="shard"), True),
    "example_autocast": ("bf16-mixed", example(), False),
    "32-true": ("32-true", {}, False),
    "bf16-true": ("bf16-true", {}, False),
    "16-true": ("16-true", {}, False),
    "bf16-mixed": ("bf16-mixed", {}, False),
    "16-mixed": ("16-mixed", {}, False),
    "low_reduction": ("32-true", {"mixed_precision": {"param_dtype": "bf16", "buffer_dtype": "bf16"}}, False),
    "low_gradients": (
        "32-true",
        {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "keep_low_precision_grads": True}},
        False,
    ),
    "two_stored_dtypes": (
        "32-true",
        {
            "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "cast_root_forward_inputs": False},
            "wrappers": {"stem": {"module_names": ["img.stem"]}},
        },
        False,
    ),
    "example_recompute": ("bf16-mixed", example(), False),
    "bf16-mixed_recompute": ("bf16-mixed", {}, False),
    "replicated_low_gradients": (
        "32-true",
        {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16", "keep_low_precision_grads": True}},
        False,
    ),
    "replicated_reduced_gradients": (
        "32-true",
        {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "keep_low_precision_grads": True}},
        False,
    ),
}


def build(case: str) -> tuple[Policy, UnitPlan, torch.dtype]:
    flag, settings, frozen = CASES[case]
    torch.manual_seed(2)
    stored = {"bf16-true": BF16, "16-true": FP16}.get(flag, FP32)
    policy = Policy(BF16 if "mixed_precision" in settings else stored).to(stored)
    if case == "two_stored_dtypes":  # a unit below the root, of two modules that are given fp32
        for layer in (policy.action_in_proj, policy.time_mlp_in):
            layer.bfloat16()
    policy.recompute = case.endswith("_recompute")
    if frozen:
        policy.img.requires_grad_(False)
    return policy, plan_units(policy, WrapOptions(**settings), precision=flag), stored


def autocast(case: str) -> contextlib.AbstractContextManager[Any]:
    low = {"bf16-mixed": BF16, "16-mixed": FP16}.get(CASES[case][0])
    return contextlib.nullcontext() if low is None else torch.autocast("cpu", dtype=low)


def loss_of(policy: Policy, batch: tuple[Tensor, ...], case: str) -> Tensor:
    with autocast(case):
        out = policy(*batch[:3])
    return (out.float() - batch[3].float()).square().mean()


def facts(policy: Policy, seen: dict[str, Any], losses: list[float]) -> dict[str, Any]:
    def whole(tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    return {
        "seen": seen,
        "losses": losses,
        "stored": {name: tensor.dtype for name, tensor in policy.state_dict().items()},
        "gradients": {name: whole(p.grad) for name, p in policy.named_parameters() if p.grad is not None},
    }


def alone(case: str) -> dict[str, Any]:
    policy, plan, stored = build(case)
    apply_precision(policy, plan, sharded=False)
    keep_gradient_dtypes(policy, plan, sharded=False, replicated=case.startswith("replicated"))
    seen, losses = watch(policy), []
    for batch in batches(stored):
        loss = loss_of(policy, batch, case)
        (loss / 2).backward()
        losses.append(loss.item())
    return facts(policy, seen, losses)


def on_ranks() -> dict[str, dict[str, Any]]:
    names = ("dp_replicate", "dp_shard")
    sharded, replicated = (init_device_mesh("cpu", shape, mesh_dim_names=names) for shape in ((1, 2), (2, 1)))
    return {
        case: on_this_rank(case, replicated if case.startswith("replicated") else sharded["dp_shard"]) for case in CASES
    }


def on_this_rank(case: str, mesh: Any) -> dict[str, Any]:
    policy, plan, stored = build(case)
    assert case != "two_stored_dtypes" or "action_in_proj.weight" not in plan.units[-1].parameters
    parameters = dict(policy.named_parameters())
    ignored = {parameters[name] for name in plan.replicated}
    for unit in plan.units:
        modules = list(unit.modules) if len(unit.modules) > 1 else unit.modules[0]
        policy_of_unit = unit.mp or MixedPrecisionPolicy()
        fully_shard(modules, mesh=mesh, mp_policy=policy_of_unit, ignored_params=ignored)
    present = dict(policy.named_parameters())
    for unit in plan.units:
        gather_as_stored(unit.modules[0], {present[name] for name in unit.as_stored})
    apply_precision(policy, plan, sharded=True)
    fully_shard.state(policy)._lazy_init()
    keep_gradient_dtypes(policy, plan, sharded=True, replicated=case.startswith("replicated"))
    with torch.no_grad():
        loss_of(policy, batches(stored)[0], case)
    loss_of(policy, batches(stored)[0], case).backward()  # what is compared is not the first pass
    policy.zero_grad()
    seen = watch(policy)
    reductions: Counter[tuple[int, torch.dtype]] = Counter()
    # torch 2.13 renamed what FSDP2 calls.
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    original = getattr(dist, name)

    def counting(**call: Any) -> Any:
        reductions[call["input"].numel(), call["input"].dtype] += 1
        return original(**call)

    setattr(dist, name, counting)
    loss = loss_of(policy, batches(stored)[dist.get_rank()], case)
    loss.backward()
    setattr(dist, name, original)
    has_gradient = {name for name, p in policy.named_parameters() if p.grad is not None}
    reduced = [(unit, [n for n in unit.parameters if n in has_gradient]) for unit in plan.units]
    expected = Counter(
        (
            sum(parameters[name].numel() for name in names),
            (unit.mp and (unit.mp.reduce_dtype or unit.mp.param_dtype)) or stored,
        )
        for unit, names in reduced
        if names
    )
    return {**facts(policy, seen, [loss.item()]), "reductions": reductions, "expected_reductions": expected}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As on the ranks: sums over a batch are split by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return ranks_run(on_ranks, tmp_path_factory.mktemp("ranks"), device="cpu")


# -------------------------------------------------------------------- what must hold

#: Largest relative error of a gradient. Both sum two bf16 gradients in fp32; the rest rounds in a low dtype.
TOLERANCES = {
    "16-true": 2e-3,
    "bf16-true": 1e-2,
    "low_reduction": 1e-2,
    "two_stored_dtypes": 1e-2,
    "low_gradients": 1e-2,
    "replicated_low_gradients": 1e-2,
    "bf16-mixed": 1e-2,
    "bf16-mixed_recompute": 1e-2,
    "16-mixed": 2e-3,
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_equal_one_process(case: str, ranks: list[dict[str, dict[str, Any]]]):
    single = alone(case)
    for rank, cases in enumerate(ranks):
        result = cases[case]
        assert result["losses"][0] == pytest.approx(single["losses"][rank], rel=1e-6)
        assert result["stored"] == single["stored"]
        assert result["gradients"].keys() == single["gradients"].keys()
        for name, expected in single["gradients"].items():
            got = result["gradients"][name]
            assert got.dtype == expected.dtype, name
            error = (got.double() - expected.double()).norm() / expected.double().norm()
            assert error <= TOLERANCES.get(case, 1e-6), (name, error)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("replicated")])
def test_every_unit_reduces_once_in_its_dtype(case: str, ranks: list[dict[str, dict[str, Any]]]):
    for cases in ranks:
        assert cases[case]["reductions"] == cases[case]["expected_reductions"]


@pytest.mark.parametrize("case", [case for case in CASES if "16-mixed" not in case])
def test_every_module_sees_the_dtypes_of_one_process(case: str, ranks: list[dict[str, dict[str, Any]]]):
    single = alone(case)["seen"]
    for cases in ranks:
        assert cases[case]["seen"] == single


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("example")])
def test_the_example_means_what_it_says(case: str, ranks: list[dict[str, dict[str, Any]]]):
    for seen in (alone(case)["seen"], ranks[0][case]["seen"]):
        weights = {name: set(of_weights) for name, (_, of_weights, _) in seen.items() if of_weights}
        low = {"img.encoder.layers.0.norm", "img.encoder.layers.0.attn", "llm.0.proj", "llm.1.proj"}
        low |= {"img.encoder.layers.1.norm", "img.encoder.layers.1.attn"}
        assert {name for name, dtypes in weights.items() if dtypes == {BF16}} == low
        assert {name for name, dtypes in weights.items() if dtypes == {FP32}} == weights.keys() - low
        inputs = {name: of_inputs for name, (of_inputs, _, _) in seen.items()}
        assert inputs[""] == (FP32, FP32, FP32)  # actions and time reach their projections unrounded
        assert inputs["action_in_proj"] == inputs["time_mlp_in"] == inputs["img.stem"] == (FP32,)
        assert inputs["img.encoder.layers.0"] == inputs["llm.0.norm"] == (BF16,)
        assert inputs["img.encoder.layers.0.mlp"] == inputs["action_out_proj"] == (FP32,)
        assert seen["llm.0"][2] == (FP32,)


@pytest.mark.parametrize(
    ("case", "computed", "buffers", "gradient", "reduced"),
    [
        ("32-true", FP32, FP32, FP32, FP32),
        ("bf16-true", BF16, BF16, BF16, FP32),
        ("16-true", FP16, FP16, FP16, FP32),
        ("bf16-mixed", BF16, FP32, FP32, FP32),
        ("16-mixed", FP16, FP32, FP32, FP32),
        ("low_reduction", BF16, BF16, FP32, BF16),
        ("low_gradients", BF16, FP32, BF16, FP32),
    ],
)
def test_dtypes_of_each_flag(
    case: str,
    computed: torch.dtype,
    buffers: torch.dtype,
    gradient: torch.dtype,
    reduced: torch.dtype,
    ranks: list[dict[str, dict[str, Any]]],
):
    result = ranks[0][case]
    assert set(result["seen"]["llm.0.proj"][1]) == {computed}
    assert result["seen"]["llm.0"][2] == (buffers,)
    assert {grad.dtype for grad in result["gradients"].values()} == {gradient}
    assert {dtype for _, dtype in result["reductions"]} == {reduced}
    if case.endswith("-mixed"):  # islands
        assert set(result["seen"]["llm.0.norm"][1]) == {FP32}
