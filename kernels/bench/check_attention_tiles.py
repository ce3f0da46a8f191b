"""Which configurations of `soma_kernels.attention.tiles.TABLE` are right on this GPU? Run after every change of Triton.

    PYTHONPATH=.:kernels python kernels/bench/check_attention_tiles.py [--jobs 12] [--entries 3,5] [--out FILE]

Every tile runs at a full grid, for several head sizes and dtypes, with and without a mask and own keys; the output and
every gradient are compared with float64. Compilation takes nearly all of the time, so these are a covering set. One
line for each that is wrong, then a count and what to write into CHECKED. Exit status 1 if any is wrong. Parts of the
table run in processes of their own: a fault in one spoils its CUDA context, and the rest of its part starts again
behind the configuration that faulted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from soma_kernels.attention.backward import Needs, run_backward
from soma_kernels.attention.call import LOG2E
from soma_kernels.attention.forward import run_forward
from soma_kernels.attention.keys import key_list
from soma_kernels.attention.reference import attention_reference
from soma_kernels.attention.tiles import TABLE, Entry, Kernel, Tile
from soma_kernels.runtime import device_facts
from soma_kernels.testing import assert_close, nan_filled_empty

#: Head sizes that stand for a range of the table: its ends, and inside it one that does not fill its columns.
HEAD_SIZES = (16, 48, 64, 72, 96, 128, 160, 256)
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


def checks(entries: Collection[int] = ()) -> list[Check]:
    """Configurations of some entries, or of all: every head size of the range with a mask, the largest without one.

    In bf16, the largest also in fp16; or in float32, where the entry is for that.
    """
    found = []
    for number, entry in enumerate(TABLE):
        if entries and number not in entries:
            continue
        sizes = [D for D in HEAD_SIZES if entry.heads[0] <= D <= entry.heads[1]]
        dtype = "float32" if entry.wide else "bfloat16"
        masked = entry.listed is not False
        found += [Check(number, D, dtype, masked) for D in sizes]
        if entry.listed is None:
            found.append(Check(number, sizes[-1], dtype, False))
        if not entry.wide:
            found.append(Check(number, sizes[-1], "float16", masked))
    return found


def _lengths(entry: Entry) -> Iterator[tuple[int, int, int, int]]:
    """(T, G, Lq, Lk): the most folded queries within reason, of rows and heads that share keys; then the fewest."""
    most = min(entry.rows[1], max(entry.rows[0], 3 * entry.tile.rows + 8))
    takes_own = entry.own is not False and entry.kernel in ("forward", "rows")
    if most >= 8:
        yield 2, 4, most // 8, 10 if takes_own else 0
    yield 1, 1, entry.rows[0], 50 if takes_own else 0
    if takes_own and entry.own is None:
        yield 1, 1, most, 0


def _context_lengths(entry: Entry) -> tuple[int, ...]:
    """Numbers of context keys: several steps, the last one not full; less than one step."""
    keys = entry.tile.keys
    return min(entry.keys, 3 * keys + 58) - entry.tile.one_block, keys // 2 + 1


def run(check: Check) -> str | None:
    """What is wrong with one configuration, None when nothing is."""
    entry, dtype = TABLE[check.entry], getattr(torch, check.dtype)
    for (T, G, Lq, Lk), Lc in itertools.product(_lengths(entry), _context_lengths(entry)):
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
    inputs = [None if x is None else x.double() for x in (q, k, v, ck, cv)]
    wanted = [x for x, need in zip(inputs, needs, strict=True) if need and x is not None]
    for x in wanted:
        x.requires_grad_()
    truth = attention_reference(*inputs, None, mask, scale)  # type: ignore[call-arg, arg-type]
    with nan_filled_empty():
        if entry.kernel == "forward":
            out, _ = run_forward(q, k, v, ck, cv, None, keys, scale, tile=entry.tile)
            assert_close("out", out, truth.detach())
            return
        # The forward's results, without its kernel.
        out, lse = truth.detach().to(dtype), _log_sum_exp(inputs, mask, scale)
        tiles: dict[Kernel, Tile] = {entry.kernel: entry.tile}
        got = run_backward(do, q, k, v, ck, cv, None, keys, out, lse, scale, needs, tiles=tiles)
    expected = torch.autograd.grad(truth, wanted, do.double())
    names = [name for name, need in zip(Needs._fields, needs, strict=True) if need]
    for name, grad, true in zip(names, [g for g in got if g is not None], expected, strict=True):
        assert_close(f"d{name}", grad, true)


def _log_sum_exp(inputs: Sequence[Tensor | None], mask: Tensor | None, scale: float) -> Tensor:
    """Base-2 log-sum-exp [N, Hq, Lq] float32 of the scores; +inf where a query reads nothing."""
    q, k, _, ck, _ = (None if x is None else x.detach() for x in inputs)
    assert q is not None
    assert ck is not None
    T, G = q.shape[0] // ck.shape[0], q.shape[1] // ck.shape[1]
    scores = q @ ck.repeat_interleave(T, 0).repeat_interleave(G, 1).mT * scale
    if mask is not None:
        scores.masked_fill_(~mask.repeat_interleave(T, 0)[:, None, None], -torch.inf)
    if k is not None:
        scores = torch.cat([scores, q @ k.repeat_interleave(G, 1).mT * scale], -1)
    lse = scores.logsumexp(-1) * LOG2E
    return torch.where(lse == -torch.inf, torch.inf, lse).float()


def _work(numbers: list[int]) -> None:
    """Runs some checks of all and prints a JSON line for each: [number, what is wrong or null]."""
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


def check_all(entries: Collection[int], jobs: int, seconds: float) -> dict[str, str | None]:
    """{configuration: what is wrong, or None} for some entries or all, in `jobs` processes and `seconds`."""
    every, chosen = checks(), set(checks(entries))
    numbers = [number for number, check in enumerate(every) if check in chosen]
    deadline = time.monotonic() + seconds
    shares = [numbers[start::jobs] for start in range(min(jobs, len(numbers)))]
    with ThreadPoolExecutor(len(shares)) as pool:
        found: dict[int, str | None] = {}
        for part in pool.map(_supervise, shares, itertools.repeat(deadline)):
            found |= part
    return {every[number].name: found[number] for number in sorted(found)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks every attention configuration on this GPU.")
    parser.add_argument("--jobs", type=int, default=12, help="processes; compilation takes most of the time")
    parser.add_argument("--seconds", type=float, default=1200.0, help="what has not run by then counts as wrong")
    parser.add_argument("--entries", default="", help="numbers of entries, for example 3,5; default: the whole table")
    parser.add_argument("--out", type=Path, help="a JSON file of all results")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: what is checked is the compiled code")
    if chosen.work:
        _work([int(number) for number in chosen.work.split(",")])
        return 0
    entries = {int(number) for number in chosen.entries.split(",") if number}
    results = check_all(entries, chosen.jobs, chosen.seconds)
    wrong = {name: reason for name, reason in results.items() if reason is not None}
    if chosen.out:
        content: dict[str, Any] = {"device": torch.cuda.get_device_name(), "results": results}
        chosen.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, reason in wrong.items():
        print(f"{'' if reason == NOT_RUN else 'WRONG: '}{name}: {reason}")
    print(f"{len(results) - len(wrong)} of {len(results)} configurations are right")
    if not wrong and not entries:
        import triton

        version = ".".join(triton.__version__.split(".")[:2])
        print(f"CHECKED may hold {(version, device_facts(DEVICE).capability)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
