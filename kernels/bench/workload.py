"""Random parameters and gradients of one parameter set, laid out in memory as training lays them out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from bench.registry import Case, ParameterSet

#: Parameters are drawn with this standard deviation: the size of initialized weights.
PARAMETER_STD = 0.02
#: Elements that are converted or compared at once: bounds temporaries and still fills the device.
CHUNK_ELEMENTS = 1 << 26


class Workload:
    """The parameters of `parameter_set` in the dtypes of `case`, with several sets of gradients to take turns.

    In training the gradients of two steps need not share addresses, so one set would be too kind to a step that caches
    them. params: n tensors. gradients: [num_gradient_sets][n] tensors of the parameters' dtype and shapes.
    """

    def __init__(
        self,
        parameter_set: ParameterSet,
        case: Case,
        device: torch.device,
        *,
        num_gradient_sets: int = 2,
        seed: int = 0,
    ) -> None:
        self.set, self.case, self.device = parameter_set, case, device
        self._generator = torch.Generator(device).manual_seed(seed)
        self.params = [Parameter(self._empty(shape)) for shape in parameter_set.shapes]
        with torch.no_grad():
            for p in self.params:
                p.normal_(0.0, PARAMETER_STD, generator=self._generator)
        self._storage: list[list[Tensor]] = []
        self.gradients: list[list[Tensor]] = []
        for _ in range(num_gradient_sets):
            storage, views = self._allocate_gradients()
            self._storage.append(storage)
            self.gradients.append(views)
        for index in range(num_gradient_sets):
            self.draw_gradients(index, std=1e-3)
        self.assign(0)

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=self.case.param, device=self.device)

    def _allocate_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        if self.set.slots is None:
            own = [self._empty(shape) for shape in self.set.shapes]
            return own, own
        buffers = [self._empty((elements,)) for elements in self.set.buffers]
        views = [
            buffers[slot.buffer][slot.offset : slot.offset + math.prod(shape)].view(shape)
            for shape, slot in zip(self.set.shapes, self.set.slots, strict=True)
        ]
        return buffers, views

    def draw_gradients(self, index: int, *, std: float) -> None:
        """Fills gradient set `index` with normal values of standard deviation `std`."""
        for tensor in self._storage[index]:
            tensor.normal_(0.0, std, generator=self._generator)

    def assign(self, index: int) -> None:
        """Makes gradient set `index` the `.grad` of the parameters."""
        for p, gradient in zip(self.params, self.gradients[index], strict=True):
            p.grad = gradient


def chunks(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Positions of non-empty tensors in runs of at most CHUNK_ELEMENTS elements (or one larger tensor)."""
    run: list[int] = []
    elements = 0
    for i, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        if run and elements + tensor.numel() > CHUNK_ELEMENTS:
            yield run
            run, elements = [], 0
        run.append(i)
        elements += tensor.numel()
    if run:
        yield run
