"""Which parameter sets and dtypes are measured, and how few bytes a clipped AdamW step of each must move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Shape = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Slot:
    """Where one gradient lies: the flat buffer that holds it and its first element there."""

    buffer: int
    offset: int


@dataclass(frozen=True)
class ParameterSet:
    """The trainable parameters of one workload on one device.

    shapes: one per tensor; empty tensors are allowed. slots: None when every gradient is its own allocation, otherwise
    its place in a flat buffer (only element alignment is then guaranteed). buffers: elements of each flat buffer.
    loops: whether the for-loop optimizer is worth its time on so many tensors.
    """

    name: str
    about: str
    shapes: tuple[Shape, ...]
    slots: tuple[Slot, ...] | None = None
    buffers: tuple[int, ...] = ()
    loops: bool = True

    @property
    def tensors(self) -> int:
        return len(self.shapes)

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True)
class Case:
    """The dtypes of one step: gradients have the parameter's dtype, the moments `state`.

    master: parameters are rounded copies of fp32 masters, which are read and written in their place.
    """

    name: str
    param: torch.dtype
    state: torch.dtype
    master: bool = False

    def floor_bytes_per_element(self) -> int:
        """Bytes that no two-pass step can avoid: the norm must be known before the first element is updated.

        Norm pass: read the gradient. Update: read the gradient, the parameter (or its master) and both moments; write
        the parameter, the master if there is one, and both moments.
        """
        p, s, m = self.param.itemsize, self.state.itemsize, torch.float32.itemsize if self.master else 0
        norm = p
        read = p + (m or p) + 2 * s
        written = p + m + 2 * s
        return norm + read + written


CASES = {
    case.name: case
    for case in (
        Case("fp32", torch.float32, torch.float32),
        Case("bf16_state32", torch.bfloat16, torch.float32),
        Case("bf16_master", torch.bfloat16, torch.float32, master=True),
        Case("bf16", torch.bfloat16, torch.bfloat16),
        Case("fp16_state32", torch.float16, torch.float32),
        Case("fp16_master", torch.float16, torch.float32, master=True),
    )
}


def _linear(outputs: int, inputs: int) -> list[Shape]:
    return [(outputs, inputs), (outputs,)]


def _pi05_expert() -> list[Shape]:
    """Action expert of pi0.5 with its projections, in the order of the module's parameters."""
    width, mlp, queries, keys = 1024, 4096, 2048, 256
    shapes = [*_linear(width, 32), *_linear(width, width), *_linear(width, width)]
    for _ in range(18):
        shapes += _linear(3 * width, width)
        shapes += [(queries, width), (keys, width), (keys, width), (width, queries)]
        shapes += _linear(3 * width, width)
        shapes += [(mlp, width), (mlp, width), (width, mlp)]
    return [*shapes, *_linear(3 * width, width), *_linear(32, width)]


def _groot_head() -> list[Shape]:
    """The 32 transformer blocks of GR00T N1.7's action head: cross- and self-attention alternate."""
    width = 1536
    shapes: list[Shape] = []
    for block in range(32):
        keys = 2048 if block % 2 == 0 else width
        shapes += [*_linear(width, width), *_linear(width, keys), *_linear(width, keys), *_linear(width, width)]
        shapes += [*_linear(4 * width, width), *_linear(width, 4 * width), *_linear(2 * width, width)]
    return shapes


def _molmoact2_expert() -> list[Shape]:
    """Action expert of MolmoAct2; its RMSNorms have no parameters."""
    width, mlp = 768, 3072
    shapes = [*_linear(width, 256), *_linear(width, width), *_linear(width, 32), (width, 1024), (width, 1024)]
    for _ in range(36):
        shapes += [*_linear(3 * width, width), *_linear(width, width)]
        shapes += [*_linear(width, width), *_linear(width, width)]
        shapes += [*_linear(mlp, width), *_linear(mlp, width), *_linear(width, mlp), *_linear(9 * width, width)]
    return [*shapes, *_linear(2 * width, width), *_linear(32, width)]


def _llama_units(layers: int, width: int, mlp: int, vocabulary: int) -> list[list[Shape]]:
    """FSDP units of a Llama-shaped policy: embedding, layers, heads.

    Each layer starts with one scalar gate, as zero-initialized adapters add it: it puts everything behind it in the
    unit's flat gradient at an odd element offset. The vocabulary and the heads do not divide by the ranks.
    """
    layer = [(1,), (width, width), (width, width), (width, width), (width, width)]
    layer += [(mlp, width), (mlp, width), (width, mlp), (width,), (width,)]
    heads = [(width,), *_linear(7, width), *_linear(1, width), (vocabulary, width)]
    return [[(vocabulary, width)], *([layer] * layers), heads]


def _rows_of_rank(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Rows that torch.chunk gives `rank`, and the rows of a full chunk, which FSDP2 pads every rank to."""
    full = -(-rows // ranks)
    return max(0, min(rows - rank * full, full)), full


def shard_set(
    name: str, about: str, units: list[list[Shape]], *, ranks: int, rank: int, loops: bool = True
) -> ParameterSet:
    """What `rank` of `ranks` holds under FSDP2: dim-0 shards, gradients as views into one flat buffer for each unit.

    Offsets in the buffer count padded shards, so a shard may be empty and still move those behind it.
    """
    shapes: list[Shape] = []
    slots: list[Slot] = []
    buffers: list[int] = []
    for unit, members in enumerate(units):
        offset = 0
        for rows, *rest in members:
            held, full = _rows_of_rank(rows, ranks, rank)
            shapes.append((held, *rest))
            slots.append(Slot(unit, offset))
            offset += full * math.prod(rest)
        buffers.append(offset)
    return ParameterSet(name, about, tuple(shapes), tuple(slots), tuple(buffers), loops)


def _sets() -> list[ParameterSet]:
    small: list[Shape] = [(257,)] * 4000 + [(64, 65)] * 2000
    return [
        ParameterSet("pi05_expert", "pi0.5 action expert", tuple(_pi05_expert())),
        ParameterSet("groot_head", "GR00T N1.7 action head blocks", tuple(_groot_head())),
        ParameterSet("molmoact2_expert", "MolmoAct2 action expert", tuple(_molmoact2_expert())),
        ParameterSet("many_small", "6,000 small tensors", tuple(small), loops=False),
        shard_set(
            "shards_7b",
            "rank 7 of 8 of a 7 B Llama-shaped policy under FSDP2",
            _llama_units(layers=32, width=4096, mlp=11008, vocabulary=32001),
            ranks=8,
            rank=7,
        ),
    ]


def _tiny_sets() -> list[ParameterSet]:
    dense: list[Shape] = [(48, 32), (48,), (0, 3), (), (129, 65), (1,)]
    return [
        ParameterSet("tiny_dense", "a check of the benchmark itself", tuple(dense)),
        ParameterSet("tiny_many", "a check of the benchmark itself", ((17,),) * 40 + ((3, 5),) * 20, loops=False),
        shard_set(
            "tiny_shards",
            "a check of the benchmark itself",
            _llama_units(layers=2, width=32, mlp=44, vocabulary=37),
            ranks=8,
            rank=7,
        ),
    ]


SETS = {s.name: s for s in _sets()}
#: For machines without a GPU: every code path, no meaning in the times.
TINY_SETS = {s.name: s for s in _tiny_sets()}


def select(kind: str, names: str, known: Mapping[str, T], default: Mapping[str, T]) -> list[T]:
    """The entries of `known` named in a comma-separated list, in its order; "all" means those of `default`.

    ValueError for a name that is unknown or given twice, with the valid ones.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if wanted == ["all"]:
        return list(default.values())
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ValueError(f"unknown {kind} {', '.join(unknown) or repr(names)}; valid: all, {', '.join(known)}")
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"a {kind} is given twice in {names!r}")
    return [known[name] for name in wanted]
