"""Which attention calls are measured, and how little work each of them needs?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

#: Dense bf16 products of one H200 on random data, from a measurement; floors divide by it.
MATRIX_FLOPS = 790e12

Layout = Literal["NHLD", "NLHD"]
LAYOUTS: tuple[Layout, ...] = ("NHLD", "NLHD")
NAMES = ("q", "k", "v", "ck", "cv")


class Floor(NamedTuple):
    """Bytes and floating-point operations that a call cannot avoid; keys that no query reads do not count."""

    bytes: int
    flops: int

    def microseconds(self, bandwidth: float) -> float:
        """bandwidth: bytes per second of a copy inside the device."""
        return max(self.bytes / bandwidth, self.flops / MATRIX_FLOPS) * 1e6


@dataclass(frozen=True)
class AttentionCase:
    """One call. trains: inputs that require grad. masked: a prompt's padding (see `mask_of`). Lk or Lc 0: no segment.

    loops: whether peers that store scores or repeat keys are worth their time on it.
    """

    name: str
    about: str
    Bc: int
    T: int
    Hq: int
    Hkv: int
    Lq: int
    Lk: int
    Lc: int
    D: int
    trains: tuple[str, ...]
    masked: bool = False
    dtype: torch.dtype = field(default=torch.bfloat16)

    @property
    def N(self) -> int:  # noqa: N802 (a size, like the fields)
        return self.Bc * self.T

    def forward_floor(self, readable: int) -> Floor:
        """readable: context keys that are read, over all context rows."""
        return Floor(
            (2 * self._query_elements + 2 * self._key_elements(readable)) * self.dtype.itemsize,
            4 * self.D * self._pairs(readable),
        )

    def backward_floor(self, readable: int) -> Floor:
        """Scores and dP again, then one product for each wanted gradient; frozen segments are read for dq only."""
        needs_q = "q" in self.trains
        own, context = {"k", "v"} & set(self.trains), {"ck", "cv"} & set(self.trains)
        enters_context = bool(context) or needs_q
        elements = (3 + needs_q) * self._query_elements
        elements += (2 + len(own)) * self.N * self.Hkv * self.Lk * self.D
        elements += 2 * readable * self.Hkv * self.D if enters_context else 0
        elements += len(context) * self.Bc * self.Hkv * self.Lc * self.D
        per_own, per_context = 2 + needs_q + len(own), 2 + needs_q + len(context)
        own_pairs = self.N * self.Hq * self.Lq * self.Lk
        flops = 2 * self.D * (per_own * own_pairs + enters_context * per_context * (self._pairs(readable) - own_pairs))
        return Floor(elements * self.dtype.itemsize, flops)

    @property
    def _query_elements(self) -> int:
        return self.N * self.Hq * self.Lq * self.D

    def _key_elements(self, readable: int) -> int:
        return (readable + self.N * self.Lk) * self.Hkv * self.D

    def _pairs(self, readable: int) -> int:
        """Pairs of a query (in one head) and a key that it reads."""
        return self.Hq * self.Lq * (self.T * readable + self.N * self.Lk)


def mask_of(case: AttentionCase, device: torch.device) -> Tensor | None:
    """bool [Bc, Lc]: 512 readable camera tokens, 256 of a camera that is not there, then a prompt of 120 +- 16 tokens.

    Scaled to the case's context; None when the case has no mask.
    """
    if not case.masked:
        return None
    generator = torch.Generator().manual_seed(0)
    at = torch.arange(case.Lc) * 968 / case.Lc
    prompt = 768 + 120 + torch.randint(-16, 17, (case.Bc, 1), generator=generator)
    return ((at < 512) | ((at >= 768) & (at < prompt))).to(device)


def draw(
    case: AttentionCase, layout: Layout, device: torch.device, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """q and the segments that the case has, normal, those that train requiring grad."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = {"q": (case.N, case.Hq, case.Lq)}
    if case.Lk:
        sizes |= dict.fromkeys(("k", "v"), (case.N, case.Hkv, case.Lk))
    if case.Lc:
        sizes |= dict.fromkeys(("ck", "cv"), (case.Bc, case.Hkv, case.Lc))
    found = {}
    for name, (rows, heads, length) in sizes.items():
        shape = (rows, heads, length, case.D) if layout == "NHLD" else (rows, length, heads, case.D)
        x = torch.randn(shape, device=device, dtype=dtype or case.dtype, generator=generator)
        x = x if layout == "NHLD" else x.transpose(1, 2)
        found[name] = x.requires_grad_(name in case.trains)
    return found


_OWN, _ALL, _CONTEXT = ("q", "k", "v"), NAMES, ("q", "ck", "cv")


def _cases() -> list[AttentionCase]:
    make: Callable[..., AttentionCase] = AttentionCase
    a = make("A", "pi0.5, horizon 50", 32, 1, 8, 1, 50, 50, 968, 256, _OWN, masked=True)
    b = make("B", "GR00T N1.7 cross", 64, 1, 32, 32, 41, 0, 190, 48, _CONTEXT)
    c = make("C", "MolmoAct2 cross, 8 times", 32, 8, 8, 8, 10, 0, 483, 96, _CONTEXT)
    return [
        a,
        replace(a, name="A2", about="pi0.5, horizon 10", Bc=64, Lq=10, Lk=10),
        b,
        replace(b, name="B2", about="GR00T N1.7 cross, frozen context", trains=("q",)),
        c,
        make("D1", "MolmoAct2 self", 256, 1, 8, 8, 10, 10, 0, 96, _OWN),
        make("D2", "GR00T N1.7 self", 64, 1, 32, 32, 41, 41, 0, 48, _OWN),
        replace(b, name="B64", about="GR00T-like, head size 64", Hq=24, Hkv=24, D=64),
        replace(a, name="E128", about="pi0.5-like, head size 128", Hq=16, Hkv=2, D=128),
        make("V", "GR00T N1.7 VLSA self", 16, 1, 32, 32, 190, 190, 0, 64, _OWN),
        replace(a, name="A_all", about="pi0.5, trainable backbone", Bc=16, trains=_ALL),
        replace(a, name="A_T8", about="pi0.5, 8 times an observation", Bc=8, T=8),
    ]


def _sweep() -> list[AttentionCase]:
    """One size of a model's call at a time, from small to large; head sizes between the models' own."""
    a, b, c = (ATTENTION_CASES[name] for name in ("A", "B", "C"))
    heads = replace(b, about="a few heads of other sizes", Bc=16, Hq=16, Hkv=16, Lq=64, Lc=512, trains=("q",))
    return [
        *(replace(a, name=f"A_B{n}", about=f"pi0.5, {n} observations", Bc=n) for n in (1, 8, 128)),
        *(replace(a, name=f"A_L{n}", about=f"pi0.5, horizon {n}", Lq=n, Lk=n) for n in (1, 16, 200)),
        *(replace(a, name=f"A_C{n}", about=f"pi0.5, prefix of {n}", Lc=n) for n in (128, 2048)),
        *(replace(b, name=f"B_B{n}", about=f"GR00T N1.7 cross, {n} observations", Bc=n) for n in (1, 8)),
        replace(b, name="B_C1024", about="GR00T N1.7 cross, context of 1024", Bc=16, Lc=1024),
        *(replace(c, name=f"C_T{n}", about=f"MolmoAct2 cross, {n} times", T=n) for n in (1, 3)),
        *(replace(heads, name=f"D{n}", D=n) for n in (16, 32, 72, 80, 128, 160)),  # 256: A
    ]


ATTENTION_CASES = {case.name: case for case in _cases()}
#: How the gain moves with one size at a time.
ATTENTION_SWEEP = {case.name: case for case in _sweep()}
#: For machines without a GPU: every code path, no meaning in the times.
TINY_ATTENTION_CASES = {
    case.name: case
    for case in (
        AttentionCase("tiny_two", "a check", 2, 2, 4, 2, 3, 4, 20, 16, NAMES, masked=True, dtype=torch.float32),
        AttentionCase("tiny_own", "a check", 2, 1, 2, 2, 5, 5, 0, 16, _OWN, dtype=torch.float32),
        AttentionCase("tiny_context", "a check", 2, 2, 2, 2, 3, 0, 9, 16, _CONTEXT, dtype=torch.float32),
    )
}


def readable_keys(case: AttentionCase, mask: Tensor | None) -> int:
    """Context keys that are read, over all context rows."""
    return case.Bc * case.Lc if mask is None else int(mask.sum())


def score_bytes(case: AttentionCase) -> int:
    """What a stored score matrix of the case takes."""
    return case.dtype.itemsize * math.prod((case.N, case.Hq, case.Lq, case.Lk + case.Lc))
