"""CUDA graphs of the expert: the numbers of eager passes, and what a replay must not do silently."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from soma_lightning.models.pi05 import graphs
from soma_lightning.models.pi05.config import PI05Config
from soma_lightning.models.pi05.model import PI05Model
from soma_lightning.models.pi05.prefix import PrefixCache

CONFIG = PI05Config.tiny(dtype="bfloat16", islands="openpi")


def make_model(device: str) -> PI05Model:
    torch.manual_seed(0)
    model = PI05Model(CONFIG)
    for name, p in model.expert.named_parameters():
        torch.nn.init.normal_(p, std=0.02 if "norm" in name else 0.1)
    return model.to(device)


def make_prefix(rows: int, length: int, *, stacked: bool, ragged: bool, device: str = "cuda") -> PrefixCache:
    layers, width = 2 * CONFIG.language.depth, CONFIG.language.head_dim
    streams = torch.randn(layers, rows, length, width, device=device, dtype=torch.bfloat16)
    lengths = torch.full((rows,), length, device=device)
    mask = None
    if ragged:
        lengths = torch.randint(1, length, (rows,), device=device)
        lengths[0] = length
        mask = torch.arange(length, device=device) < lengths[:, None]
    prefix = PrefixCache.of_streams(streams, width, mask, lengths)
    return prefix if stacked else PrefixCache(prefix.keys, prefix.values, mask, lengths)


def draws(rows: int, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    shape = (rows, CONFIG.chunk_size, CONFIG.max_action_dim)
    return torch.randn(shape, device=device), torch.randn(shape, device=device), torch.rand(rows, device=device)


def gradients(model: PI05Model) -> list[Tensor]:
    return [p.grad.clone() for p in model.expert.parameters() if p.grad is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_replays_have_the_numbers_of_eager_passes(stacked, ragged):
    eager = make_model("cuda")
    graphed = copy.deepcopy(eager)
    graphed.use_cuda_graphs(bucket=8, limit=2)
    for rows, draws_a_row, length in ((3, 1, 21), (3, 1, 24), (2, 2, 9), (3, 1, 17), (3, 1, 21)):
        prefix = make_prefix(rows, length, stacked=stacked, ragged=ragged)
        actions = draws(rows)[0]
        _, noise, time = draws(rows * draws_a_row)
        for model in (eager, graphed):
            model.zero_grad()
            loss = model.flow_loss(prefix, actions, noise, time).mean()
            loss.backward()
        wanted = eager.flow_loss(prefix, actions, noise, time).mean()
        assert float(loss) == pytest.approx(float(wanted), rel=2e-3)  # padding changes the order of the softmax's sums
        for mine, theirs in zip(gradients(graphed), gradients(eager), strict=True):
            assert (mine - theirs).float().norm() <= 0.02 * theirs.float().norm() + 1e-6
        with torch.no_grad():
            for model in (eager, graphed):
                for p in model.expert.parameters():
                    p.add_(0.01 * p.sign())  # as an optimizer does, in place
    assert len(graphed.graphs._recordings) <= 2


@pytest.mark.gpu
def test_gradients_of_several_passes_add_up():
    model = make_model("cuda")
    model.use_cuda_graphs()
    batches = [(make_prefix(2, 12, stacked=True, ragged=False), *draws(2)) for _ in range(3)]
    sums = None
    for batch in batches:
        model.zero_grad()
        model.flow_loss(*batch).mean().backward()
        found = [g.float() for g in gradients(model)]
        sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
    model.zero_grad()
    for batch in batches:
        model.flow_loss(*batch).mean().backward()
    for mine, theirs in zip(gradients(model), sums, strict=True):
        assert (mine.float() - theirs).norm() <= 0.01 * theirs.norm() + 1e-6


@pytest.mark.gpu
def test_a_pass_whose_memory_was_overwritten_is_not_differentiated():
    model = make_model("cuda")
    model.use_cuda_graphs()
    first = model.flow_loss(make_prefix(2, 12, stacked=True, ragged=False), *draws(2)).mean()
    model.flow_loss(make_prefix(2, 12, stacked=True, ragged=False), *draws(2)).mean()
    with pytest.raises(RuntimeError, match="each backward pass follows its forward pass"):
        first.backward()


@pytest.mark.gpu
def test_sampled_actions_are_those_of_eager_steps_also_after_an_update():
    eager = make_model("cuda")
    graphed = copy.deepcopy(eager)
    graphed.use_cuda_graphs()
    prefix, (noise, _, _) = make_prefix(3, 21, stacked=True, ragged=True), draws(3)
    for _ in range(2):
        mine, theirs = graphed.sample_actions(prefix, noise, 5), eager.sample_actions(prefix, noise, 5)
        assert (mine - theirs).norm() <= 0.01 * theirs.norm()
        with torch.no_grad():
            for model in (eager, graphed):
                for p in model.expert.parameters():
                    p.add_(0.05 * p.sign())
    kept = mine.clone()
    graphed.sample_actions(prefix, 2 * noise, 5)
    assert torch.equal(mine, kept), "a result is not the memory that the next replay writes"


@pytest.mark.gpu
def test_hooks_and_autocast_are_refused():
    model = make_model("cuda")
    model.use_cuda_graphs()
    arguments = (make_prefix(2, 12, stacked=True, ragged=False), *draws(2))
    with torch.autocast("cuda", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        model.flow_loss(*arguments)
    model.expert.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has hooks"):
        model.flow_loss(*arguments)


def test_graphs_without_a_gpu_are_refused():
    model = make_model("cpu")
    model.use_cuda_graphs()
    streams = torch.zeros(2 * CONFIG.language.depth, 1, 4, CONFIG.language.head_dim, dtype=torch.bfloat16)
    prefix = PrefixCache.of_streams(streams, CONFIG.language.head_dim, None, torch.tensor([4]))
    shape = (1, CONFIG.chunk_size, CONFIG.max_action_dim)
    with pytest.raises(ValueError, match="cuda_graphs=False"):
        model.velocity(prefix, torch.zeros(shape), torch.zeros(1))


def test_a_prefix_that_trains_would_get_no_gradients():
    model = make_model("cpu")
    model.freeze("all")
    with pytest.raises(ValueError, match="a part of the prefix trains"):
        model.use_cuda_graphs()
    model.freeze("expert")
    model.use_cuda_graphs()
    with pytest.raises(ValueError, match="trainable='all' and CUDA graphs of the expert exclude each other"):
        model.freeze("all")
    prefix = make_prefix(1, 4, stacked=False, ragged=False, device="cpu")
    prefix.keys[0].requires_grad_()
    with pytest.raises(ValueError, match="the prefix trains"):
        model.velocity(prefix, *draws(1, "cpu")[1:])


def test_a_copied_model_has_no_graphs():
    model = make_model("cpu")
    model.use_cuda_graphs()
    assert copy.deepcopy(model).graphs is None


class Replayed:
    """In the place of a recording: a replay runs the function on the same memory, without a GPU."""

    def __init__(self, inputs: Any, run: Any, parameters: Any, pool: Any) -> None:
        self.inputs, self.run, self.forward = inputs, run, self
        self.out = run(inputs).detach()

    def replay(self) -> None:
        self.out.copy_(self.run(self.inputs))


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_Recording", Replayed)
    monkeypatch.setattr(graphs.ExpertGraphs, "check", lambda self: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


@pytest.mark.parametrize("first", [True, False])
def test_what_is_recorded_in_validation_serves_outside_and_the_other_way_round(without_gpu, first: bool):
    eager, graphed = make_model("cpu"), make_model("cpu")
    graphed.use_cuda_graphs(bucket=8)
    for inference in (first, not first):
        with torch.inference_mode(inference):
            prefix = make_prefix(2, 13, stacked=True, ragged=True, device="cpu")
            noise, x_t, time = draws(2, "cpu")
            for model in (eager, graphed):
                for p in model.expert.parameters():
                    p.data.add_(0.01 * p.sign())
            wanted = eager.sample_actions(prefix, noise, 3)
            torch.testing.assert_close(graphed.sample_actions(prefix, noise, 3), wanted, rtol=0.02, atol=0.02)
            with torch.no_grad():
                wanted = eager.velocity(prefix, x_t, time)
                torch.testing.assert_close(graphed.velocity(prefix, x_t, time), wanted, rtol=0.02, atol=0.02)
    assert len(graphed.graphs._recordings) == 2


def test_inputs_of_another_dtype_are_not_rounded_to_those_of_before(without_gpu):
    eager, graphed = make_model("cpu"), make_model("cpu")
    graphed.use_cuda_graphs(bucket=8)
    prefix = make_prefix(2, 8, stacked=True, ragged=False, device="cpu")
    _, x_t, time = draws(2, "cpu")
    with torch.no_grad():
        graphed.velocity(prefix, x_t.bfloat16(), time)
        assert torch.equal(graphed.velocity(prefix, x_t, time), eager.velocity(prefix, x_t, time))
