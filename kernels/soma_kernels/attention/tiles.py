"""Which sizes and launch options do the attention kernels run with? Only those that a GPU has confirmed.

Triton 3.6 can compile some small matrix products on Hopper wrongly, without an error: all cases found have one
warpgroup, an operand that does not come through the pipelined loop, and a 16- or 32-wide product. So a head split into
narrow parts, as 48 = 32 + 16, needs the loop and rows that load 16 bytes at a time, and the own keys of the backward
take 64 at a time. The same tile may be right with one set of gradients and wrong with another, so nothing here is
searched at run time. `kernels/bench/check_attention_tiles.py` runs every entry of TABLE in every variant that a call
can ask for, at a full grid against float64; a Triton version and GPU generation enter CHECKED when all of it is right.

To add a configuration: put an entry before the ones it should win over, run the script on the GPU, and keep it if it
is right.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from soma_kernels.runtime import DeviceFacts

Kernel = Literal["forward", "rows", "one_pass", "keys"]

#: Head sizes that the kernels take.
MIN_HEAD_SIZE, MAX_HEAD_SIZE = 16, 256

#: (Triton version, compute capability) on which every entry of TABLE has been checked.
CHECKED: frozenset[tuple[str, tuple[int, int]]] = frozenset({("3.6", (9, 0))})

_ANY = 1 << 30


class Tile(NamedTuple):
    """Sizes of one program. Powers of two; products need 16 at least.

    rows: folded queries. keys: keys of a step. warps, stages: of the program and its software pipeline. width, rest:
    the head is read as this many columns, zeros beyond its size. own_keys: own keys of a step. more_rows: folded
    queries of a second, smaller group that shares each step's keys. max_registers: of a thread, None for no cap.
    one_block: no call has more keys than one step, so there is no loop over steps.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    width: int
    rest: int = 0
    own_keys: int = 64
    more_rows: int = 0
    max_registers: int | None = None
    one_block: bool = False


class Entry(NamedTuple):
    """Where a tile is used. heads, rows: first and last head size and number of folded queries; keys: most keys.

    wide: float32 inputs (True) or 16-bit ones. own: only calls with (True) or without own keys; None: both. listed:
    likewise, with a list of the readable keys or without. aligned: likewise, all rows at multiples of 16 bytes or not.
    """

    kernel: Kernel
    heads: tuple[int, int]
    rows: tuple[int, int]
    tile: Tile
    keys: int = _ANY
    own: bool | None = None
    wide: bool = False
    listed: bool | None = None
    aligned: bool | None = None

    def matches(
        self, kernel: Kernel, D: int, wide: bool, rows: int, keys: int, own: bool, listed: bool, aligned: bool
    ) -> bool:
        return (
            self.kernel == kernel
            and self.wide == wide
            and self.heads[0] <= D <= self.heads[1]
            and self.rows[0] <= rows <= self.rows[1]
            and keys <= self.keys
            and self.own in (None, own)
            and self.listed in (None, listed)
            and self.aligned in (None, aligned)
        )


#: The first entry that matches a call is used. 16-bit sizes up to 64 are read as 64 columns: narrower products are
#: those that can be compiled wrongly, unless a split (48 = 32 + 16, 96 = 64 + 32) has been checked.
TABLE: tuple[Entry, ...] = (
    # A list takes one stage of the pipeline for itself; without it three stages of keys exceed the shared memory.
    Entry("forward", (129, 256), (97, _ANY), Tile(128, 64, 8, 3, 256), listed=True),
    Entry("forward", (129, 256), (97, _ANY), Tile(128, 64, 8, 2, 256), listed=False),
    Entry("forward", (129, 256), (1, 96), Tile(64, 64, 4, 3, 256, own_keys=16), listed=True),
    Entry("forward", (129, 256), (1, 96), Tile(64, 64, 4, 2, 256, own_keys=16), listed=False),
    Entry("forward", (65, 96), (1, 16), Tile(16, 16, 1, 1, 128, one_block=True), keys=16, own=False),
    Entry("forward", (96, 96), (65, _ANY), Tile(128, 32, 4, 4, 64, 32), own=False, aligned=True),
    Entry("forward", (96, 96), (1, 64), Tile(64, 64, 4, 3, 64, 32), own=False, aligned=True),
    Entry("forward", (65, 128), (65, _ANY), Tile(128, 64, 4, 3, 128, own_keys=32)),
    Entry("forward", (65, 128), (1, 64), Tile(64, 64, 4, 3, 128)),
    Entry("forward", (16, 64), (1, _ANY), Tile(64, 64, 4, 1, 64, one_block=True), keys=64, own=False),
    Entry("forward", (48, 48), (1, _ANY), Tile(64, 32, 4, 4, 32, 16), own=False, aligned=True),
    Entry("forward", (16, 64), (1, _ANY), Tile(64, 32, 4, 3, 64)),
    Entry("rows", (129, 256), (97, _ANY), Tile(128, 32, 8, 2, 256)),
    Entry("rows", (129, 256), (1, 96), Tile(64, 64, 4, 2, 256)),
    Entry("rows", (65, 128), (1, _ANY), Tile(64, 64, 4, 3, 128)),
    Entry("rows", (16, 64), (1, _ANY), Tile(64, 32, 4, 3, 64)),
    Entry(
        *("one_pass", (96, 96), (1, 16), Tile(16, 16, 1, 1, 64, 32, max_registers=128, one_block=True)),
        keys=16,
        aligned=True,
    ),
    Entry("one_pass", (96, 96), (65, 80), Tile(64, 64, 4, 1, 64, 32, more_rows=16), aligned=True),
    Entry("one_pass", (96, 96), (1, 64), Tile(64, 64, 4, 2, 64, 32), aligned=True),
    Entry("one_pass", (65, 128), (1, 64), Tile(64, 64, 4, 2, 128)),
    Entry("one_pass", (16, 64), (1, 64), Tile(64, 64, 4, 1, 64, one_block=True), keys=64),
    Entry("one_pass", (16, 64), (33, 48), Tile(32, 64, 4, 3, 64, more_rows=16)),
    Entry("one_pass", (16, 64), (1, 64), Tile(64, 64, 4, 1, 64, max_registers=168)),
    Entry("keys", (129, 256), (1, _ANY), Tile(64, 64, 8, 2, 256)),
    Entry("keys", (65, 128), (1, _ANY), Tile(64, 64, 4, 2, 128)),
    Entry("keys", (16, 64), (1, _ANY), Tile(64, 64, 4, 3, 64)),
    # float32: products in full precision, without the matrix units, whose operands fill the registers.
    *(
        Entry(kernel, heads, (1, _ANY), Tile(size, size, 4, 1, heads[1], own_keys=size), wide=True)
        for kernel in ("forward", "rows", "keys")
        for heads, size in (((16, 64), 32), ((65, 128), 16), ((129, 256), 16))
    ),
    Entry("one_pass", (16, 64), (1, 32), Tile(32, 32, 4, 1, 64), wide=True),
)


@lru_cache(maxsize=4096)
def find_tile(
    kernel: Kernel,
    D: int,
    dtype: torch.dtype,
    *,
    rows: int,
    keys: int,
    own: bool = False,
    listed: bool = False,
    aligned: bool = True,
) -> Tile | None:
    """The tile of a call with `rows` folded queries and at most `keys` keys in a segment; None if there is none."""
    wide = dtype == torch.float32
    return next((e.tile for e in TABLE if e.matches(kernel, D, wide, rows, keys, own, listed, aligned)), None)


def why_unsupported(facts: DeviceFacts, triton_version: str | None) -> str | None:
    """Why the kernels must not run on this device, as a phrase; None when they may. On a CPU the interpreter runs them.

    triton_version: None when Triton is not installed.
    """
    if triton_version is None:
        return "Triton is not installed"
    if facts.interpreter:
        return None if facts.device == "cpu" else "TRITON_INTERPRET=1 interprets kernels on the CPU"
    if torch.version.hip is not None:
        return "its configurations are checked on NVIDIA GPUs only"
    if not facts.triton:
        return f"Triton does not compile for {facts.device}"
    short = ".".join(triton_version.split(".")[:2])
    if (short, facts.capability) not in CHECKED:
        known = ", ".join(f"Triton {v} on sm_{a}{b}" for v, (a, b) in sorted(CHECKED)) or "none"
        capability = "".join(map(str, facts.capability))
        return f"its configurations are not checked for Triton {short} on sm_{capability} (checked: {known})"
    return None
