"""Which configurations of `soma_kernels.attention.tiles.TABLE` are right on this GPU? Run after every change of Triton.

    PYTHONPATH=.:kernels python kernels/bench/check_attention_tiles.py [--jobs 12] [--out FILE]

Every tile runs at a full grid, for several head sizes and dtypes, with and without a mask and own keys; the output and
every gradient are compared with float64. One line for each configuration that is wrong, then a count and what to write
into CHECKED. Exit status 1 if any is wrong. Parts of the table run in processes of their own: a fault in one spoils its
CUDA context, and the rest of its part starts again behind the configuration that faulted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from soma_kernels.attention.backward import Needs, run_backward
from soma_kernels.attention.forward import run_forward
from soma_kernels.attention.keys import key_list
from soma_kernels.attention.reference import attention_reference
from soma_kernels.attention.tiles import TABLE, Entry, Kernel, Tile
from soma_kernels.runtime import device_facts
from soma_kernels.testing import assert_close, nan_filled_empty

#: Head sizes that stand for a range of the table.
HEAD_SIZES = (16, 32, 48, 64, 72, 80, 96, 128, 160, 256)
#: Programs of a launch: several waves on a large GPU. Some wrong configurations are right at small grids.
PROGRAMS = 1024
DEVICE = "cuda"
#: What is said of a configuration whose turn did not come.
NOT_RUN = "not run"


class Check(NamedTuple):
    """One configuration at one head size and dtype. masked: a random key mask; otherwise every key is readable."""

    entry: int
    D: int
    dtype: str
    masked: bool

    @property
    def name(self) -> str:
        entry = TABLE[self.entry]
        mask = "masked" if self.masked else "unmasked"
        return f"{self.entry:2d} {entry.kernel} D {self.D} {self.dtype} {mask} {entry.tile}"


def checks() -> list[Check]:
    """Every entry, at every head size of its range in bf16 (float32 where it is for that), at the largest in fp16.

    With and without a mask, unless the entry is for one of them.
    """
    found = []
    for number, entry in enumerate(TABLE):
        sizes = [D for D in HEAD_SIZES if entry.heads[0] <= D <= entry.heads[1]]
        dtypes = [("float32", sizes)] if entry.wide else [("bfloat16", sizes), ("float16", sizes[-1:])]
        masked = [m for m in (False, True) if entry.listed in (None, m)]
        found += [Check(number, D, dtype, m) for dtype, Ds in dtypes for D in Ds for m in masked]
    return found


def _lengths(entry: Entry) -> Iterator[tuple[int, int, int, int]]:
    """(T, G, Lq, Lk) for the fewest and, within reason, the most folded queries, and own keys where they are taken."""
    most = min(entry.rows[1], max(entry.rows[0], 3 * entry.tile.rows + 7))
    own = (10, 50) if entry.own is not False and entry.kernel in ("forward", "rows") else (0,)
    for rows, Lk in itertools.product({entry.rows[0], most}, own):
        yield 1, 1, rows, Lk
        if rows % 8 == 0 or rows > 16:
            yield 2, 4, max(1, rows // 8), Lk
    if entry.own is not True and own != (0,):
        yield 1, 1, most, 0


def run(check: Check) -> str | None:
    """What is wrong with one configuration, None when nothing is."""
    entry, dtype = TABLE[check.entry], getattr(torch, check.dtype)
    Lc = entry.keys - 1 if entry.keys < 1 << 20 else 3 * entry.tile.keys + 58
    for T, G, Lq, Lk in _lengths(entry):
        if not entry.rows[0] <= T * G * Lq <= entry.rows[1]:
            continue
        tiles = -(-T * G * Lq // entry.tile.rows)
        Bc = max(1, -(-PROGRAMS // (2 * max(tiles, 1))))
        try:
            _compare(check, dtype, (Bc, T, G, Lq, Lk, Lc))
        except (AssertionError, RuntimeError) as error:
            return f"T {T} G {G} Lq {Lq} Lk {Lk} Lc {Lc}: {str(error).splitlines()[0]}"
    return None


def _compare(check: Check, dtype: torch.dtype, sizes: tuple[int, int, int, int, int, int]) -> None:
    entry, (Bc, T, G, Lq, Lk, Lc) = TABLE[check.entry], sizes
    N, Hkv, D, scale = Bc * T, 2, check.D, check.D**-0.5
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(rows: int, heads: int, length: int) -> Tensor:
        return torch.randn(rows, heads, length, D, dtype=dtype, device=DEVICE, generator=generator)

    q, do, ck, cv = draw(N, Hkv * G, Lq), draw(N, Hkv * G, Lq), draw(Bc, Hkv, Lc), draw(Bc, Hkv, Lc)
    k, v = (draw(N, Hkv, Lk), draw(N, Hkv, Lk)) if Lk else (None, None)
    mask = torch.rand(Bc, Lc, device=DEVICE, generator=generator) < 0.6 if check.masked else None
    keys = None if mask is None else key_list(mask)
    context = entry.kernel in ("one_pass", "keys")
    needs = Needs(entry.kernel != "keys", bool(Lk), bool(Lk), context, context)
    with nan_filled_empty():
        out, lse = run_forward(
            q, k, v, ck, cv, None, keys, scale, tile=entry.tile if entry.kernel == "forward" else None
        )
        got: tuple[Tensor | None, ...] = ()
        if entry.kernel != "forward":
            tiles: dict[Kernel, Tile] = {entry.kernel: entry.tile}
            got = run_backward(do, q, k, v, ck, cv, None, keys, out, lse, scale, needs, tiles=tiles)
    inputs = [None if x is None else x.double() for x in (q, k, v, ck, cv)]
    wanted = [x for x, need in zip(inputs, needs, strict=True) if need and x is not None]
    for x in wanted:
        x.requires_grad_()
    truth = attention_reference(*inputs, None, mask, scale)  # type: ignore[call-arg, arg-type]
    assert_close("out", out, truth.detach())
    if got:
        expected = torch.autograd.grad(truth, wanted, do.double())
        names = [name for name, need in zip(Needs._fields, needs, strict=True) if need]
        for name, grad, true in zip(names, [g for g in got if g is not None], expected, strict=True):
            assert_close(f"d{name}", grad, true)


def _work(numbers: list[int]) -> None:
    """Runs some checks and prints a JSON line for each: [number, what is wrong or null]."""
    every = checks()
    for number in numbers:
        print(json.dumps([number, run(every[number])]), flush=True)


def _supervise(numbers: list[int], deadline: float) -> dict[int, str | None]:
    """Runs checks in worker processes, each until it faults; `deadline` in seconds of the monotonic clock."""
    results: dict[int, str | None] = {}
    left = list(numbers)
    while left and time.monotonic() < deadline:
        command = [sys.executable, __file__, "--work", ",".join(map(str, left))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                output, errors = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                output, errors = process.communicate()
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("[") and line.endswith("]")]
        for number, wrong in lines:
            results[number] = wrong
            if wrong is not None and "CUDA" in wrong:
                break  # whatever follows ran in a spoiled context
        left = [number for number in left if number not in results]
        if left and not lines and time.monotonic() < deadline:
            reason = (errors.strip().splitlines() or ["no reason given"])[-1]
            results[left[0]] = f"its process died: {reason}"
            left = left[1:]
    return results | dict.fromkeys(left, NOT_RUN)


def check_all(jobs: int, seconds: float) -> dict[str, str | None]:
    """{configuration: what is wrong, or None} for the whole table, in `jobs` processes and `seconds`."""
    every = checks()
    deadline = time.monotonic() + seconds
    shares = [list(range(start, len(every), jobs)) for start in range(min(jobs, len(every)))]
    with ThreadPoolExecutor(len(shares)) as pool:
        found: dict[int, str | None] = {}
        for part in pool.map(_supervise, shares, itertools.repeat(deadline)):
            found |= part
    return {every[number].name: found[number] for number in sorted(found)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks every attention configuration on this GPU.")
    parser.add_argument("--jobs", type=int, default=12, help="processes; compilation takes most of the time")
    parser.add_argument("--seconds", type=float, default=1200.0, help="what has not run by then counts as wrong")
    parser.add_argument("--out", type=Path, help="a JSON file of all results")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: what is checked is the compiled code")
    if chosen.work:
        _work([int(number) for number in chosen.work.split(",")])
        return 0
    results = check_all(chosen.jobs, chosen.seconds)
    wrong = {name: reason for name, reason in results.items() if reason is not None}
    if chosen.out:
        content: dict[str, Any] = {"device": torch.cuda.get_device_name(), "results": results}
        chosen.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, reason in wrong.items():
        print(f"WRONG {name}\n      {reason}")
    print(f"{len(results) - len(wrong)} of {len(results)} configurations are right")
    if not wrong:
        import triton

        version = ".".join(triton.__version__.split(".")[:2])
        print(f"CHECKED may hold {(version, device_facts(DEVICE).capability)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
