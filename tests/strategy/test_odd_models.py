"""Models and loops that sharding could get wrong unseen: each equals one process, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.ranks import ranks_run, whole
from tests.strategy.test_sharded_fabric import inputs, make_fabric
from tests.strategy.test_sharded_trainer import Net, loader, make_trainer

#: One worker runs the file: starting its processes takes longest.
pytestmark = pytest.mark.xdist_group("odd_models")


class Scaled(nn.Module):
    """Parameters of several stored dtypes that cannot be divided: 0-d, and one without elements."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16))
        self.fine = nn.Parameter(torch.tensor(0.25, dtype=torch.float64))
        self.none = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.body(x).tanh()) * self.scale + self.fine.float() + self.none.sum()
        # 8 samples: the gradient of the offset is exact in bf16.
        return y.square().mean(1) + self.offset.float()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in module.named_parameters()}


def my_part(fabric: Any, step: int) -> Tensor:
    return inputs(step)[fabric.global_rank :: fabric.world_size]


def every_rank() -> dict[str, Any]:
    return {
        "dtypes": whole_dtypes(),
        "several dtypes": several_dtypes(),
        "shared": shared(),
        "tied norms": {layout: tied_norms(layout) for layout in ("fsdp", "replicate")},
        "modules": several_modules(),
        "sums": sums_of_two_passes(),
        "dropped": {layout: dropped(layout) for layout in ("fsdp", "replicate")},
        "attributes": attributes(),
        "refused": {change.__name__: refused(change) for change in (hooked, accumulating, renormalizing)},
        "lbfgs": refused_optimizer(),
        "stock": stock_clipping(),
        "device": device_records(),
    }


def whole_dtypes() -> dict[str, Tensor | None]:
    fabric = make_fabric()
    model = Scaled()
    wrapped, _ = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    fabric.backward(wrapped(my_part(fabric, 0)).mean())
    return gradients(model)


class Several(nn.Module):
    """One module that owns parameters of several dtypes, which FSDP2 could not keep in one unit."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.fine = nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.low = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.phase * x).abs() + self.fine * x).mean(1) + self.low.float().sum()


def several_dtypes() -> dict[str, Tensor | None]:
    fabric = make_fabric(layout="replicate")
    model = Several(fabric.global_rank)
    wrapped = fabric.setup_module(model)
    fabric.backward(wrapped(my_part(fabric, 0)).mean())
    return gradients(model)


def shared() -> str:
    """Actor and critic with one encoder, set up one by one: averages are averages twice, sums would not be."""
    fabric = make_fabric(layout="replicate")
    encoder = nn.Linear(6, 4)
    models = [nn.Sequential(encoder, nn.Linear(4, 1)) for _ in range(2)]
    wrapped: Any = [fabric.setup_module(model) for model in models]
    fabric.setup_optimizers(torch.optim.AdamW({p for model in models for p in model.parameters()}))
    x = my_part(fabric, 0)
    models[0].soma_normalizer = float(len(x))  # type: ignore[assignment]
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is compared)
        fabric.backward(sum(model(x).sum() for model in wrapped))
    return str(error.value)


def tied_norms(layout: str) -> dict[str, Tensor]:
    """Two norms of one weight, in fp32 among bf16."""
    fabric = make_fabric(precision="bf16-mixed", layout=layout)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    model[3].weight = model[1].weight
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    for step in range(3):
        optimizer.zero_grad()
        fabric.backward((wrapped(my_part(fabric, step)) - 1).square().mean())
        optimizer.step()
    assert model[3].weight is model[1].weight
    return whole(model)


def several_modules() -> list[dict[str, Tensor]]:
    """Six modules in one loss: their collectives need one order on all ranks."""
    fabric = make_fabric()
    models = [Scaled(seed) for seed in range(6)]
    wrapped = [fabric.setup_module(model) for model in models]
    optimizer = fabric.setup_optimizers(torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1))
    for step in range(3):
        optimizer.zero_grad()
        fabric.backward(sum(k * model(my_part(fabric, step)).mean() for k, model in enumerate(wrapped, 1)))
        optimizer.step()
    return [whole(model) for model in models]


def sums_of_two_passes() -> dict[str, Tensor | None]:
    """Two backward passes of loss sums, both reduced, before one step."""
    fabric = make_fabric()
    model: Any = Scaled()
    wrapped, _ = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    for step in range(2):
        x = my_part(fabric, step)
        model.soma_normalizer = float(len(x))
        fabric.backward(wrapped(x).sum())
    return gradients(model)


def dropped(layout: str) -> dict[str, Tensor | None]:
    """A window of micro-batches that is given up."""
    fabric = make_fabric(layout=layout)
    model = Scaled()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    with fabric.no_backward_sync(wrapped):
        fabric.backward(wrapped(my_part(fabric, 0)).mean())
    optimizer.zero_grad()
    fabric.backward(wrapped(my_part(fabric, 1)).mean())
    return gradients(model)


def attributes() -> list[bool]:
    model: Any = Scaled()
    model.body.weight.no_decay = True
    make_fabric().setup_module(model)
    return [getattr(param, "no_decay", False) for param in model.parameters()]


def hooked(model: Scaled) -> None:
    model.body.weight.register_hook(lambda grad: grad * 0)


def accumulating(model: Scaled) -> None:
    model.body.weight.register_post_accumulate_grad_hook(lambda param: None)


def renormalizing(model: Scaled) -> None:
    model.body = nn.Embedding(4, 4, max_norm=1.0)  # type: ignore[assignment]


def refused_optimizer() -> str:
    model = Scaled()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared)
        make_fabric().setup(model, torch.optim.LBFGS(model.parameters()))
    return str(caught.value)


def thawing(model: nn.Module, optimizer: Any, run: Callable[[int], Any]) -> list[float]:
    """The norms of six steps of SGD; the body, whole on every rank, trains from the fourth on."""
    norms = []
    for step in range(6):
        optimizer.zero_grad()
        model.get_submodule("body").requires_grad_(step >= 3)
        norms.append(float(run(step)))
        optimizer.step()
    return norms


def frozen_body() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential()
    model.add_module("body", nn.Linear(6, 8).requires_grad_(False))
    model.add_module("head", nn.Linear(8, 3))
    for param in model.parameters():
        nn.init.constant_(param, 0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def stock_clipping() -> tuple[list[float], dict[str, Tensor]]:
    """Whole and divided parameters in an optimizer without the fused step."""
    fabric = make_fabric()
    model, stock = frozen_body()
    wrapped, optimizer = fabric.setup(model, stock)

    def run(step: int) -> Any:
        fabric.backward(wrapped(my_part(fabric, step)).square().mean())
        return fabric.clip_gradients(wrapped, optimizer, max_norm=0.05)

    return thawing(model, optimizer, run), whole(model)


def device_records() -> tuple[torch.device, list[torch.device]]:
    """What the module and its metric believe after a set-up that moves parameters one by one."""

    class Recording(torchmetrics.MeanMetric):
        def to(self, device: Any) -> Any:  # type: ignore[override]
            moves.append(device)
            return super().to(device)

    class Measured(Net):
        def setup(self, stage: str) -> None:
            self.metric = Recording()
            self._device = torch.device("meta")

        def on_fit_start(self) -> None:
            self.believed = self.device

    moves: list[torch.device] = []
    model = Measured()
    make_trainer(max_steps=1).fit(model, loader())
    return model.believed, moves


def refused(change: Callable[[Scaled], None]) -> str:
    model = Scaled()
    change(model)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared)
        make_fabric().setup_module(model)
    return str(caught.value)


# ---------------------------------------------------------------------- compared with one process


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks_run(every_rank, tmp_path_factory.mktemp("ranks"))


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=2e-6, msg=lambda text, name=name: name + text)


def expected_gradients(loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor | None]:
    model = Scaled()
    loss(model).backward()
    return gradients(model)


def test_gradients_of_several_dtypes_are_averaged_in_one_order(found: Any) -> None:
    expected = expected_gradients(lambda model: model(inputs(0)).mean())
    for rank in found:
        assert_equal(rank["dtypes"], expected)


def test_several_modules_are_reduced_in_one_order(found: Any) -> None:
    models = [Scaled(seed) for seed in range(6)]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        sum(k * model(inputs(step)).mean() for k, model in enumerate(models, 1)).backward()
        optimizer.step()
    for rank in found:
        for got, model in zip(rank["modules"], copy.copy(models), strict=True):
            expected = whole(model)
            offset = expected.pop("offset")  # bf16 rounds an average in another way than a sum
            assert (got["offset"] - offset).abs() <= 0.02
            assert_equal(got, expected)


def test_a_sum_that_is_reduced_twice_counts_once(found: Any) -> None:
    expected = expected_gradients(lambda model: model(inputs(0)).sum() + model(inputs(1)).sum())
    for rank in found:
        for name, value in expected.items():
            torch.testing.assert_close(rank["sums"][name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["fsdp", "replicate"])
def test_zeroed_gradients_do_not_come_back(found: Any, layout: str) -> None:
    expected = expected_gradients(lambda model: model(inputs(1)).mean())
    for rank in found:
        assert_equal(rank["dropped"][layout], expected)


def test_attributes_of_parameters_stay(found: Any) -> None:
    for rank in found:
        assert rank["attributes"] == [name == "body.weight" for name, _ in Scaled().named_parameters()]


@pytest.mark.parametrize("kind", ["hooked", "accumulating"])
def test_a_hook_that_would_never_run_is_refused(found: Any, kind: str) -> None:
    for rank in found:
        assert rank["refused"][kind].startswith("'body.weight' has a gradient hook, which would never run")


def test_what_would_go_wrong_unseen_is_refused(found: Any) -> None:
    for rank in found:
        assert rank["refused"]["renormalizing"].startswith("'body' has max_norm=1.0: its forward writes to its weight")
        assert rank["lbfgs"].startswith("LBFGS decides by sums over all parameters")


def test_stock_clipping_takes_whole_and_divided_parameters_together(found: Any) -> None:
    model, optimizer = frozen_body()

    def run(step: int) -> Any:
        model(inputs(step)).square().mean().backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    norms = thawing(model, optimizer, run)
    for rank in found:
        got, parameters = rank["stock"]
        assert got == pytest.approx(norms, abs=1e-5)
        assert_equal(parameters, whole(model))


def test_module_and_metrics_know_their_device(found: Any) -> None:
    for rank in found:
        assert rank["device"] == (torch.device("cpu"), [torch.device("cpu")])


def test_replicas_may_own_any_dtypes(found: Any) -> None:
    model = Several()
    model(inputs(0)).mean().backward()
    for rank in found:
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(rank["several dtypes"][name], gradient, msg=name)


def test_sums_of_a_parameter_in_two_modules_are_refused(found: Any) -> None:
    for rank in found:
        assert rank["shared"].startswith("'0.weight' belongs to two modules that were set up")


def test_norms_that_share_a_weight_stay_fp32_under_a_mixed_flag(found: Any) -> None:
    for rank in found:
        for name, value in rank["tied norms"]["replicate"].items():
            assert torch.equal(rank["tied norms"]["fsdp"][name], value), name
