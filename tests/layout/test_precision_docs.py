"""What docs/precision.md says is what happens: its table of flags, and its settings on a tiny pi0.5, two ranks too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from soma_lightning.layout.casting import apply_precision
from soma_lightning.layout.mesh import NAMED_LAYOUTS
from soma_lightning.layout.precision import FLAGS, grad_dtype
from soma_lightning.layout.wrap import UnitPlan, WrapOptions, plan_units
from soma_lightning.models import PI05Config
from soma_lightning.models.pi05.initialization import initialize_from_scratch
from soma_lightning.models.pi05.model import PI05Model
from soma_lightning.strategy.engine import Engine
from soma_lightning.strategy.options import StrategyOptions
from tests.ranks import ranks_run

#: One worker runs the file: starting its processes takes longest.
pytestmark = pytest.mark.xdist_group("precision_docs")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "precision.md").read_text()
FP32, BF16 = torch.float32, torch.bfloat16
B = 3


def flags_table() -> list[list[str]]:
    rows = PAGE.split("<!-- flags -->\n")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]


def test_every_flag_has_a_row():
    assert [row[0] for row in flags_table()] == list(FLAGS)


@pytest.mark.parametrize("row", flags_table(), ids=lambda row: row[0])
def test_a_row_says_what_happens(row: list[str]):
    flag, *cells = row
    stored, computed, reduced, gradient, moments, buffers = (getattr(torch, cell) for cell in cells)
    assert stored == {"64": torch.float64, "bf16": BF16, "16": torch.float16}.get(flag.removesuffix("-true"), FP32)
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("table", torch.zeros(4))
    model.to(stored)  # what Lightning's plugin does under a "true" flag
    plan = plan_units(model, WrapOptions(), precision=flag)
    (unit,) = plan.units
    assert (unit.precision.param_dtype or stored) == computed
    assert (unit.precision.reduce_dtype or computed) == reduced
    assert grad_dtype(unit.precision, stored, replicated=False) == gradient
    apply_precision(model, plan, sharded=False)
    with torch.autocast("cpu", dtype=computed, enabled=flag.endswith("-mixed")):
        out = model(_convert_fp_tensor(torch.ones(2, 4), stored))
    assert out.dtype == computed
    out.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {gradient}
    optimizer = torch.optim.AdamW(model.parameters())
    Engine(StrategyOptions()).setup_optimizer(optimizer)
    optimizer.step()
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {moments}
    assert model.table.dtype == buffers


def test_keys_of_other_configurations_lead_to_settings_that_exist():
    table = PAGE.split("## Coming from RLinf\n")[1].strip().split("\n\n")[0]
    pairs = re.findall(r"`(\w+): (\w+)`", "".join(row.split("|")[2] for row in table.splitlines()[2:]))
    assert len(pairs) >= 6
    fields = StrategyOptions.__dataclass_fields__
    for key, value in pairs:
        assert key in fields, key
        assert key != "layout" or value in NAMED_LAYOUTS


# -------------------------------------------------------------------- the settings for pi0.5


class Step(nn.Module):
    """A training step of pi0.5 as one forward: prefix, then the squared error of the velocity."""

    def __init__(self, trainable: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = PI05Model(PI05Config.tiny(trainable=trainable))
        initialize_from_scratch(self.model)
        with torch.no_grad():  # norms start at zero, where most gradients vanish
            for name, p in self.model.expert.named_parameters():
                if "dense" in name:
                    p.copy_(0.1 * torch.randn(p.shape))

    def forward(self, images: list[Tensor], tokens: Tensor, actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        masks = [torch.ones(B, dtype=torch.bool)] * len(images)
        prefix = self.model.encode_prefix(images, masks, tokens, torch.ones_like(tokens, dtype=torch.bool))
        return self.model.flow_loss(prefix, actions, noise, time).mean()


def settings() -> tuple[str, WrapOptions]:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    trainer = yaml.safe_load(block)["trainer"]
    return trainer["precision"], WrapOptions(**trainer["strategy"]["init_args"])


def batch_of(rank: int) -> tuple[Any, ...]:
    config, g = PI05Config.tiny(), torch.Generator().manual_seed(rank)
    side, chunk = config.image_resolution, (B, config.chunk_size, config.max_action_dim)
    images = [torch.rand(B, 3, side, side, generator=g) * 2 - 1 for _ in config.cameras]
    tokens = torch.randint(1, 100, (B, 6), generator=g)
    return images, tokens, torch.randn(chunk, generator=g), torch.randn(chunk, generator=g), torch.rand(B, generator=g)


def dtypes_seen(step: Step) -> dict[str, set[torch.dtype]]:
    """Fills while it computes: module -> dtypes of its own parameters."""
    seen: dict[str, set[torch.dtype]] = {}

    def watch(name: str, module: nn.Module) -> None:
        def note(module: nn.Module, args: Any) -> None:
            seen[name] = {p.dtype for p in module.parameters(recurse=False)}

        module.register_forward_pre_hook(note)

    for name, module in step.model.named_modules():
        if list(module.parameters(recurse=False)):
            watch(name, module)
    return seen


def planned(trainable: str) -> tuple[Step, UnitPlan]:
    flag, options = settings()
    step = Step(trainable)
    return step, plan_units(step, options, precision=flag)


def facts_after(step: Step, ranks: list[int], seen: Any) -> dict[str, Any]:
    losses = []
    for rank in ranks:
        with torch.autocast("cpu", dtype=BF16):
            loss = step(*batch_of(rank))
        (loss / len(ranks)).backward()
        losses.append(loss.item())
    grads = {n: p.grad for n, p in step.named_parameters() if p.grad is not None}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    return {"losses": losses, "seen": seen, "gradients": whole}


def on_ranks() -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    results = {}
    for trainable in ("expert", "all"):
        step, plan = planned(trainable)
        parameters = dict(step.named_parameters())
        ignored = {parameters[name] for name in plan.replicated}
        for unit in plan.units:
            modules = list(unit.modules) if len(unit.modules) > 1 else unit.modules[0]
            fully_shard(modules, mesh=mesh, mp_policy=unit.mp or MixedPrecisionPolicy(), ignored_params=ignored)
        apply_precision(step, plan, sharded=True)
        results[trainable] = facts_after(step, [dist.get_rank()], dtypes_seen(step))
    return results


def alone(trainable: str) -> dict[str, Any]:
    step, plan = planned(trainable)
    apply_precision(step, plan, sharded=False)
    return facts_after(step, [0, 1], dtypes_seen(step))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return ranks_run(on_ranks, tmp_path_factory.mktemp("ranks"), device="cpu")


@pytest.mark.parametrize("trainable", ["expert", "all"])
def test_pi05_computes_as_the_settings_say(trainable: str, ranks: list[dict[str, dict[str, Any]]]):
    single = alone(trainable)
    full = ("action_", "time_mlp_", "norm", "vision_tower.embeddings", ".mlp.fc")
    for result in (single, *(rank[trainable] for rank in ranks)):
        for name, dtypes in result["seen"].items():
            assert dtypes == {FP32 if any(part in name for part in full) else BF16}, name
    assert {"expert.layers.0.self_attn.q_proj", "expert.action_in_proj"} <= single["seen"].keys()
    with torch.no_grad():
        exact = Step(trainable)(*batch_of(0))
    assert single["losses"][0] == pytest.approx(exact.item(), rel=1e-2)
    assert single["losses"][0] != exact.item()


@pytest.mark.parametrize("trainable", ["expert", "all"])
def test_pi05_on_two_ranks_equals_one_process(trainable: str, ranks: list[dict[str, dict[str, Any]]]):
    single = alone(trainable)
    for rank, result in enumerate(ranks):
        assert result[trainable]["losses"][0] == pytest.approx(single["losses"][rank], rel=1e-5)
        gradients = result[trainable]["gradients"]
        assert gradients.keys() == single["gradients"].keys()
        # Gradients of key biases are zero but for rounding: no error is measured against less than this.
        floor = 1e-3 * max(grad.norm() for grad in single["gradients"].values())
        for name, expected in single["gradients"].items():
            error = (gradients[name] - expected).norm() / expected.norm().clamp(min=floor)
            assert error < 1e-2, (name, error)  # two roundings of bf16
