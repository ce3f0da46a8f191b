"""Which configurations of `soma_kernels.attention.tiles.TABLE` are right on this GPU? Run after every change of Triton.

    PYTHONPATH=.:kernels python kernels/bench/check_attention_tiles.py [--jobs 12] [--entries 3,5] [--out FILE]

Every tile runs at a full grid in each variant of its kernel that a model can launch (VARIANTS): rows and heads that
share keys, masks, wanted gradients, strides. The output and every gradient are compared with float64. Compilation takes
nearly all of the time, so one head size of an entry takes all variants and the others two of them. One line for each
check that fails, then a count and what to write into CHECKED. Exit status 1 if any is wrong. Parts of the table run in
processes of their own: a fault in one spoils its CUDA context, and the rest of its part starts again behind the check
that faulted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

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

#: Head sizes that stand for a range of the table: its ends, and inside it those that do not fill their columns.
HEAD_SIZES = (16, 32, 48, 64, 72, 80, 96, 128, 160, 256)
#: The one of an entry's head sizes that takes all variants: the last of these in its range.
WHOLE_SIZES = (48, 64, 96, 128, 256)
#: Programs of a launch: several waves on a large GPU. Some wrong configurations are right at small grids.
PROGRAMS = 1024
DEVICE = "cuda"
#: What is said of a check whose turn did not come.
NOT_RUN = "not run"


class Variant(NamedTuple):
    """What is compiled into a kernel beside its tile.

    T, G: query rows and heads that share keys. own: own keys of a query row. fewest: the fewest folded queries of the
    entry, not the most within reason. wanted: which gradients, as initials of q, k, v, and K, V of the context; "": all
    that the kernel makes. strides: every tensor "heads" first ([N, H, L, D]), or "unlike" ([N, L, H, D], but values and
    the gradient of the output heads first), or "odd" (rows that start at no multiple of 16 bytes).
    """

    T: int = 2
    G: int = 4
    own: int = 10
    masked: bool = True
    key_mask: bool = False
    fewest: bool = False
    wanted: str = ""
    strides: Literal["heads", "unlike", "odd"] = "heads"


#: The variants of every head size: the fold in full, and without any.
EVERYWHERE = {
    "rows and heads share": Variant(),
    "nothing is shared": Variant(T=1, G=1, own=50, fewest=True),
}
VARIANTS = EVERYWHERE | {
    "heads share": Variant(T=1, G=8),
    "rows share": Variant(T=8, G=1),
    "no own keys": Variant(own=0),
    "key mask": Variant(T=1, G=8, key_mask=True),
    "key mask, rows share": Variant(key_mask=True),
    "no mask": Variant(T=1, G=8, masked=False),
    "unlike strides": Variant(T=1, G=8, strides="unlike"),
    "odd strides": Variant(strides="odd"),
    **{f"wanted {wanted}": Variant(T=1, G=8, wanted=wanted) for wanted in ("q", "kv", "k", "v", "qk", "qv")},
    **{f"wanted {wanted}": Variant(T=8, G=1, wanted=wanted) for wanted in ("KV", "K", "V", "qK", "qV")},
}


class Check(NamedTuple):
    """One entry of the table at one head size and dtype, in one variant."""

    entry: int
    D: int
    dtype: str
    variant: str

    @property
    def name(self) -> str:
        entry = TABLE[self.entry]
        return f"{self.entry:2d} {entry.kernel} D {self.D} {self.dtype}, {self.variant}: {entry.tile}"


def variants(entry: Entry) -> dict[str, Variant]:
    """The variants in which an entry can be launched, those that would compile the same kernel twice left out."""
    takes_own = entry.own is not False and entry.kernel in ("forward", "rows")
    makes = {"forward": "", "rows": "qkv", "one_pass": "qKV", "keys": "KV"}[entry.kernel]
    found = {}
    for name, variant in VARIANTS.items():
        if not takes_own and (variant.key_mask or name == "no own keys"):
            continue
        if variant.wanted and (variant.wanted == makes or not set(variant.wanted) <= set(makes)):
            continue
        if entry.kernel == "one_pass" and variant.wanted == "q":  # the rows kernel's
            continue
        if entry.listed is not None and name == "no mask":
            continue
        if entry.aligned and variant.strides == "odd":
            continue
        if entry.own is True and name == "no own keys":
            continue
        masked = variant.masked and entry.listed is not False
        found[name] = variant._replace(own=variant.own if takes_own else 0, masked=masked)
    return found


def checks(entries: Collection[int] = ()) -> list[Check]:
    """The checks of some entries, or of all. In bf16, the largest head size also in fp16; or in the entry's float32."""
    found = []
    for number, entry in enumerate(TABLE):
        if entries and number not in entries:
            continue
        sizes = [D for D in HEAD_SIZES if entry.heads[0] <= D <= entry.heads[1]]
        whole = [D for D in WHOLE_SIZES if D in sizes][-1]
        dtype = "float32" if entry.wide else "bfloat16"
        names = variants(entry)
        for D in sizes:
            found += [Check(number, D, dtype, name) for name in (names if whole == D else EVERYWHERE)]
        if not entry.wide:
            found.append(Check(number, sizes[-1], "float16", next(iter(names))))
    return found


def _num_queries(entry: Entry, variant: Variant) -> int:
    """Lq with which the folded queries are the most within reason, or the fewest, of the entry."""
    most = min(entry.rows[1], max(entry.rows[0], 3 * entry.tile.rows + 8))
    return max(1, (entry.rows[0] if variant.fewest else most) // (variant.T * variant.G))


def _context_lengths(entry: Entry) -> tuple[int, ...]:
    """Numbers of context keys: several steps, the last one not full; less than one step."""
    keys = entry.tile.keys
    return min(entry.keys, 3 * keys + 58) - entry.tile.one_block, keys // 2 + 1


def run(check: Check) -> str | None:
    """What is wrong with one check, None when nothing is."""
    entry = TABLE[check.entry]
    variant = variants(entry)[check.variant]
    Lq = _num_queries(entry, variant)
    folded = variant.T * variant.G * Lq
    assert entry.rows[0] <= folded <= entry.rows[1], f"{check.name}: {folded} folded queries are not the entry's"
    tiles = -(-folded // entry.tile.rows)
    for Lc in _context_lengths(entry):
        try:
            _compare(check, variant, -(-PROGRAMS // (2 * tiles)), Lq, Lc)
        except (AssertionError, RuntimeError) as error:
            return f"Lq {Lq} Lc {Lc}: {str(error).splitlines()[0]}"
    return None


class _Inputs(NamedTuple):
    """A call's tensors and the gradient of its output."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    ck: Tensor
    cv: Tensor
    do: Tensor
    key_mask: Tensor | None
    mask: Tensor | None


def _draw(check: Check, variant: Variant, Bc: int, Lq: int, Lc: int) -> _Inputs:
    generator = torch.Generator(DEVICE).manual_seed(0)
    N, Hkv, dtype = Bc * variant.T, 2, getattr(torch, check.dtype)

    def draw(rows: int, heads: int, length: int, lines_first: bool = False) -> Tensor:
        shape = (rows, length, heads, check.D) if lines_first else (rows, heads, length, check.D)
        if variant.strides == "odd":
            shape = (*shape[:3], check.D + 1)
        x = torch.randn(*shape, dtype=dtype, device=DEVICE, generator=generator)[..., : check.D]
        return x.transpose(1, 2) if lines_first else x

    def readable(rows: int, length: int) -> Tensor:
        mask = torch.rand(rows, length, device=DEVICE, generator=generator) < 0.6
        mask[rows // 2] = False  # a row with an empty list
        return mask

    unlike = variant.strides == "unlike"
    own = (N, Hkv, variant.own)
    return _Inputs(
        q=draw(N, Hkv * variant.G, Lq, unlike),
        k=draw(*own, unlike) if variant.own else None,
        v=draw(*own) if variant.own else None,
        ck=draw(Bc, Hkv, Lc, unlike),
        cv=draw(Bc, Hkv, Lc),
        do=draw(N, Hkv * variant.G, Lq),
        key_mask=readable(N, variant.own) if variant.key_mask else None,
        mask=readable(Bc, Lc) if variant.masked else None,
    )


def _needs(kernel: Kernel, variant: Variant) -> Needs:
    own = "kv" if variant.own else ""
    makes = {"forward": "", "rows": f"q{own}", "one_pass": "qKV", "keys": "KV"}[kernel]
    wanted = variant.wanted or makes
    return Needs(*(initial in wanted for initial in "qkvKV"))


def _compare(check: Check, variant: Variant, Bc: int, Lq: int, Lc: int) -> None:
    entry, scale = TABLE[check.entry], check.D**-0.5
    x = _draw(check, variant, Bc, Lq, Lc)
    keys = None if x.mask is None else key_list(x.mask)
    needs = _needs(entry.kernel, variant)
    doubles = [None if y is None else y.double() for y in x[:5]]
    wanted = [y for y, need in zip(doubles, needs, strict=True) if need and y is not None]
    for y in wanted:
        y.requires_grad_()
    truth = attention_reference(*doubles, x.key_mask, x.mask, scale)  # type: ignore[call-arg, arg-type]
    with nan_filled_empty():
        if entry.kernel == "forward":
            out, _ = run_forward(*x[:5], x.key_mask, keys, scale, tile=entry.tile)
            assert_close("out", out, truth.detach())
            return
        # The forward's results, without its kernel.
        out = torch.empty_like(x.q).copy_(truth.detach())
        lse, with_fixed_sums = _with_fixed_sums(doubles, x, scale)
        tiles: dict[Kernel, Tile] = {entry.kernel: entry.tile}
        got = run_backward(x.do, *x[:5], x.key_mask, keys, out, lse, scale, needs, tiles=tiles)
    expected = torch.autograd.grad(truth, wanted, x.do.double())
    terms = torch.autograd.grad(with_fixed_sums, wanted, x.do.double())
    names = [name for name, need in zip(Needs._fields, needs, strict=True) if need]
    for name, grad, true, term in zip(names, [g for g in got if g is not None], expected, terms, strict=True):
        assert_close(f"d{name}", grad, true, terms=term)


def _scores(doubles: Sequence[Tensor | None], x: _Inputs, scale: float) -> Tensor:
    """float64 scores [N, Hq, Lq, Lc + Lk], -inf where a key is masked."""
    q, k, _, ck, _ = doubles
    assert q is not None
    assert ck is not None
    T, G = q.shape[0] // ck.shape[0], q.shape[1] // ck.shape[1]
    scores = q @ ck.repeat_interleave(T, 0).repeat_interleave(G, 1).mT * scale
    if x.mask is not None:
        scores = scores.masked_fill(~x.mask.repeat_interleave(T, 0)[:, None, None], -torch.inf)
    if k is not None:
        own = q @ k.repeat_interleave(G, 1).mT * scale
        if x.key_mask is not None:
            own = own.masked_fill(~x.key_mask[:, None, None], -torch.inf)
        scores = torch.cat([scores, own], -1)
    return scores


def _with_fixed_sums(doubles: Sequence[Tensor | None], x: _Inputs, scale: float) -> tuple[Tensor, Tensor]:
    """Base-2 log-sum-exp [N, Hq, Lq] float32, +inf where a query reads nothing; the output from it as a constant.

    A score's gradient of that output is P dP, from which attention's takes P (dO . O): what errors are relative to.
    """
    scores = _scores(doubles, x, scale)
    lse = scores.detach().logsumexp(-1)
    lse = lse.where(lse > -torch.inf, torch.inf)
    _, _, v, _, cv = doubles
    assert cv is not None
    T, G = scores.shape[0] // cv.shape[0], scores.shape[1] // cv.shape[1]
    values = cv.repeat_interleave(T, 0).repeat_interleave(G, 1)
    if v is not None:
        values = torch.cat([values, v.repeat_interleave(G, 1)], 2)
    return (lse * LOG2E).float(), (scores - lse[..., None]).exp() @ values


def _work(numbers: list[int]) -> None:
    """Runs some checks of all and prints a JSON line for each: [number, what is wrong or null]."""
    every = checks()
    for number in numbers:
        print(json.dumps([number, run(every[number])]), flush=True)


def _supervise(numbers: list[int], deadline: float, device: str) -> dict[int, str | None]:
    """Runs checks in worker processes, each until it faults, on the GPU of one number.

    deadline: in seconds of the monotonic clock.
    """
    env = os.environ | {"CUDA_VISIBLE_DEVICES": device}
    results: dict[int, str | None] = {}
    left = list(numbers)
    while left and time.monotonic() < deadline:
        command = [sys.executable, __file__, "--work", ",".join(map(str, left))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
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


def _visible_devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may be for each GPU, so that processes spread over all of them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


def check_all(entries: Collection[int], jobs: int, seconds: float) -> dict[str, str | None]:
    """{check: what is wrong, or None} for some entries or all, in `jobs` processes on all GPUs and `seconds`."""
    every, chosen = checks(), set(checks(entries))
    numbers = [number for number, check in enumerate(every) if check in chosen]
    deadline = time.monotonic() + seconds
    shares = [numbers[start::jobs] for start in range(min(jobs, len(numbers)))]
    with ThreadPoolExecutor(len(shares)) as pool:
        found: dict[int, str | None] = {}
        for part in pool.map(_supervise, shares, itertools.repeat(deadline), itertools.cycle(_visible_devices())):
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
    print(f"{len(results) - len(wrong)} of {len(results)} checks are right")
    if not wrong and not entries:
        import triton

        version = ".".join(triton.__version__.split(".")[:2])
        print(f"CHECKED may hold {(version, device_facts(DEVICE).capability)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
