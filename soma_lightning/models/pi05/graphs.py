"""How does the expert run without waiting for the host? Its passes are recorded once a shape, as CUDA graphs.

An eager step of the full-size expert launches thousands of kernels and takes the host several times as long as the
GPU. A graph is one launch. It reads the memory that it was recorded with: inputs are copied there, parameters are
updated there in place. Prefixes are padded to few lengths, which changes nothing: padding is masked.

Shape letters: B observations, N = B * T rows, H horizon, A action width, P prefix tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from soma_lightning.models.flow import euler_sample, euler_times
from soma_lightning.models.pi05.expert import ActionExpert
from soma_lightning.models.pi05.prefix import PrefixCache

#: Iterations before a recording: libraries choose their algorithms, kernels are compiled.
_WARM_UP = 3


class _Inputs:
    """Memory that graphs of one shape read: a prefix of `length` tokens, and what enters the expert beside it."""

    def __init__(self, prefix: PrefixCache, length: int, others: Sequence[Tensor]) -> None:
        layers, (rows, heads, _, head_dim) = len(prefix.keys), prefix.keys[0].shape
        like = prefix.keys[0]
        self.streams = like.new_zeros(2 * layers, rows, length, heads * head_dim)
        self.mask = torch.zeros(rows, length, dtype=torch.bool, device=like.device)
        self.lengths = torch.zeros_like(prefix.lengths)
        self.others = [torch.empty_like(x) for x in others]
        self.prefix = PrefixCache.of_streams(self.streams, head_dim, self.mask, self.lengths)

    def take(self, prefix: PrefixCache, others: Sequence[Tensor]) -> None:
        """Copies; what lies behind the prefix stays masked."""
        P = prefix.keys[0].shape[2]
        if prefix.streams is not None:
            self.streams[:, :, :P].copy_(prefix.streams)
        else:
            mine = [x[:, :, :P] for x in (*self.prefix.keys, *self.prefix.values)]
            torch._foreach_copy_(mine, [*prefix.keys, *prefix.values])
        self.mask[:, P:] = False
        self.mask[:, :P] = True if prefix.mask is None else prefix.mask
        self.lengths.copy_(prefix.lengths)
        for kept, given in zip(self.others, others, strict=True):
            kept.copy_(given)


class _Recording:
    """A function of `_Inputs`, and its gradients for `parameters`, recorded."""

    def __init__(
        self, inputs: _Inputs, run: Callable[[_Inputs], Tensor], parameters: Sequence[Tensor], pool: Any
    ) -> None:
        self.inputs, self.forward, self.backward = inputs, torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                out = run(inputs)
                if parameters:
                    torch.autograd.grad(out, parameters, torch.zeros_like(out))
                del out
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.forward, pool=pool):
            out = run(inputs)
        if parameters:
            self.grad_out = torch.zeros_like(out)
            with torch.cuda.graph(self.backward, pool=pool):
                self.grads = torch.autograd.grad(out, parameters, self.grad_out)
        self.out = out.detach()


class ExpertGraphs:
    """Recorded passes of one expert, at most `limit` of them; the one that was not used for longest makes room.

    bucket: prefixes are padded to multiples of this many tokens. A recording is made again when a parameter was moved,
    frozen or thawed. The backward pass of a forward pass must come before the next forward pass: there is one memory
    for both, and RuntimeError says when it was overwritten. Raises ValueError for an expert that is not whole on a CUDA
    device, or has hooks, which a replay would not call.
    """

    def __init__(self, expert: ActionExpert, bucket: int = 32, limit: int = 8) -> None:
        self.expert, self.bucket, self.limit = expert, bucket, limit
        self._recordings: OrderedDict[Any, _Recording] = OrderedDict()
        self._pool: Any = None
        self.passes = 0  # forward passes so far: which one the memory holds

    def velocity(self, prefix: PrefixCache, x_t: Tensor, time: Tensor) -> Tensor:
        """`ActionExpert.forward`, with gradients for its trainable parameters."""
        if prefix.keys[0].requires_grad:
            raise ValueError("the prefix trains, to which CUDA graphs of the expert would send no gradients")
        trained = [p for p in self.expert.parameters() if p.requires_grad] if torch.is_grad_enabled() else []

        def run(inputs: _Inputs) -> Tensor:
            return self.expert(inputs.prefix, *inputs.others)  # type: ignore[no-any-return]

        recording = self._recording(("velocity", bool(trained)), prefix, (x_t, time), run, trained)
        recording.inputs.take(prefix, (x_t, time))
        self.passes += 1
        if not trained:
            recording.forward.replay()
            return recording.out.clone()
        out: Tensor = _Replay.apply(self, recording, *trained)  # type: ignore[no-untyped-call]
        return out

    @torch.no_grad()
    def sample(self, prefix: PrefixCache, noise: Tensor, num_steps: int) -> Tensor:
        """`PI05Model.sample_actions`, all steps in one launch."""
        times = euler_times(num_steps, noise.device)

        def run(inputs: _Inputs) -> Tensor:
            noise, times = inputs.others
            return euler_sample(lambda x_t, time: self.expert(inputs.prefix, x_t, time), noise, num_steps, times)

        recording = self._recording(("sample", num_steps), prefix, (noise, times), run, [])
        recording.inputs.take(prefix, (noise, times))
        self.passes += 1
        recording.forward.replay()
        return recording.out.clone()

    def _recording(
        self,
        kind: tuple[Any, ...],
        prefix: PrefixCache,
        others: Sequence[Tensor],
        run: Callable[[_Inputs], Tensor],
        trained: Sequence[Tensor],
    ) -> _Recording:
        places = tuple((p.data_ptr(), p.requires_grad) for p in self.expert.parameters())
        rows, _, tokens, _ = prefix.keys[0].shape
        length = -(-tokens // self.bucket) * self.bucket
        key = (kind, rows, length, prefix.keys[0].dtype, *((x.shape, x.dtype) for x in others), places)
        found = self._recordings.get(key)
        if found is None:
            self.check()
            for old in [old for old in self._recordings if old[-1] != places]:
                del self._recordings[old]
            while len(self._recordings) >= self.limit:
                self._recordings.popitem(last=False)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            # What validation records under inference mode must be writable outside of it, too.
            with torch.inference_mode(False), torch.set_grad_enabled(bool(trained)):
                inputs = _Inputs(prefix, length, others)
                inputs.take(prefix, others)
                found = self._recordings[key] = _Recording(inputs, run, trained, self._pool)
        self._recordings.move_to_end(key)
        return found

    def check(self) -> None:
        """Raises ValueError when the expert cannot be recorded here and now; see the class."""
        device = next(self.expert.parameters()).device
        if device.type != "cuda":
            raise ValueError(f"CUDA graphs need a CUDA device, and the model is on {device}; set cuda_graphs=False")
        if torch.is_autocast_enabled("cuda"):
            raise ValueError(
                "CUDA graphs of the expert run in the config's dtype, not under autocast; use precision='32-true' with "
                "config={'dtype': 'bfloat16'}, or cuda_graphs=False"
            )
        for module in self.expert.modules():
            if isinstance(module, FSDPModule):
                raise ValueError("CUDA graphs need the whole expert on each GPU; use layout='replicate'")
            if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
                raise ValueError(f"{type(module).__name__} has hooks, which a CUDA graph would not call; remove them")

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model has its parameters elsewhere, and no graphs: call `use_cuda_graphs` on it."""
        return

    def __reduce__(self) -> Any:
        return type(None), ()


class _Replay(torch.autograd.Function):
    """A recorded forward pass as a node of autograd; its parents are the trained parameters."""

    @staticmethod
    def forward(ctx: Any, graphs: ExpertGraphs, recording: _Recording, *_: Tensor) -> Tensor:
        ctx.graphs, ctx.recording, ctx.number = graphs, recording, graphs.passes
        recording.forward.replay()
        return recording.out.clone()

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:  # type: ignore[override]
        if ctx.number != ctx.graphs.passes:
            raise RuntimeError(
                "another forward pass has overwritten the activations of this one: with CUDA graphs each backward pass "
                "follows its forward pass; add the losses of one pass (flow_draws, a larger batch), or use "
                "cuda_graphs=False"
            )
        recording = ctx.recording
        recording.grad_out.copy_(grad_out)
        recording.backward.replay()
        # The recording holds these tensors, too, so autograd copies them and does not make them anyone's `.grad`.
        return (None, None, *recording.grads)
