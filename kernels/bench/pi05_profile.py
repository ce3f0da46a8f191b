"""Where does the time of a training step of full-size pi0.5 go, and which share of the GPU's arithmetic is used?

    PYTHONPATH=.:kernels python kernels/bench/pi05_profile.py --out docs/benchmarks

profiles steps of the contenders of `pi05_step.py` that are ours, with random weights, and writes `pi05_profile.json`
and `pi05_profile.md`: device time by kind of kernel, its largest kernels, and the products' rate against the GPU's
peak. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.pi05_step import CONTENDERS
from bench.pi05_step_worker import SHAPES, Inputs, Ours, make_inputs
from bench.report import (
    available_device,
    current_commit,
    environment,
    make_folder,
    markdown_table,
    measured_on,
    write_json,
    write_text,
)
from soma_lightning.models.pi05.config import PI05Config

LAUNCH = "PYTHONPATH=.:kernels python kernels/bench/pi05_profile.py"
STEPS = 5
#: Dense bf16 and fp8 products of an H100 or H200 (SXM), FLOP/s, without sparsity: NVIDIA's data sheets.
PEAK = {"bf16": 989e12, "fp8": 1979e12}
#: The first pattern that a kernel's name contains says its kind.
KINDS = {
    "attention": r"attention|flash|fmha|_forward_kernel|_backward_.*kernel|_key_list",
    "norms, gates, rotations": r"_add_norm_kernel|_activation_kernel|_split_heads_kernel|rms_norm|layer_norm|gelu|silu",
    "optimizer": r"adamw|grad_stats|_update_kernel|_combine",
    "products": r"gemm|cutlass|nvjet|xmma|cublas|scaled_mm|sm90",
    "copies": r"[Mm]emcpy|[Mm]emset|copy|cat",
}


@dataclass(frozen=True)
class Profile:
    """Device milliseconds of one step. kinds: by kind; largest: {kernel: ms}; flops: of the whole step."""

    contender: str
    rows: int
    device_ms: float
    kinds: dict[str, float]
    largest: dict[str, float]
    flops: float


def kind_of(kernel: str) -> str:
    """The kind of a kernel's name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), "other")


def step_flops(config: PI05Config, rows: int, prefix_tokens: int, *, cached: bool) -> float:
    """FLOPs of a step that trains the expert alone: a product of [M, K] and [K, N] has 2 M K N.

    The prefix runs forward, the last language layer only for keys and values; the expert forward and backward (three
    times its forward products; of attention, no gradients for the prefix).
    """
    vision, language, expert = config.vision, config.language, config.expert
    head, kv = language.head_dim, language.num_kv_heads * language.head_dim
    image = 2 * config.image_tokens  # two cameras
    patch = 3 * vision.patch_size**2 * vision.width
    per_token = vision.depth * (4 * vision.width**2 + 2 * vision.width * vision.mlp_width) + patch
    per_token += vision.width * language.width
    scores = vision.depth * 2 * config.image_tokens * vision.width
    total_vision = image * 2 * (per_token + scores)
    q = language.num_heads * head
    layer = 2 * language.width * q + 2 * language.width * kv + 3 * language.width * language.mlp_width
    layers = (language.depth - 1) * (layer + 2 * prefix_tokens * q) + 2 * language.width * kv
    total_language = prefix_tokens * 2 * layers
    q = expert.num_heads * head
    own = 2 * expert.width * q + 2 * expert.width * kv + 3 * expert.width * expert.mlp_width
    horizon = config.chunk_size
    attended = 2 * (prefix_tokens + horizon) * q
    total_expert = horizon * 2 * expert.depth * (3 * own + 2.5 * attended)
    return rows * (total_expert if cached else total_expert + total_vision + total_language)


def profile(name: str, folder: Path, rows: int, size: str, device: torch.device) -> Profile:
    """Kernels of STEPS steps, by the profiler."""
    settings = dict(CONTENDERS[name].settings)
    ours = Ours(folder, size, device, **settings)
    inputs = make_inputs(SHAPES[size], rows, device)
    ours.prepare(inputs)
    for _ in range(3):
        _step(ours, inputs)
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            _step(ours, inputs)
        torch.cuda.synchronize(device)
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        times[event.key] = times.get(event.key, 0.0) + event.self_device_time_total / 1e3 / STEPS
    tokens = 2 * ours.model.config.image_tokens + SHAPES[size].prompt[0]
    flops = step_flops(ours.model.config, rows, tokens, cached=bool(settings.get("cached")))
    return summarize(name, rows, times, flops)


def summarize(name: str, rows: int, times: Mapping[str, float], flops: float) -> Profile:
    """times: {kernel: milliseconds of one step}."""
    kinds = dict.fromkeys([*KINDS, "other"], 0.0)
    for kernel, ms in times.items():
        kinds[kind_of(kernel)] += ms
    largest = dict(sorted(times.items(), key=lambda item: -item[1])[:12])
    return Profile(name, rows, sum(times.values()), kinds, largest, flops)


def _step(ours: Ours, inputs: Inputs) -> None:
    ours.loss(inputs).backward()  # type: ignore[no-untyped-call]
    ours.update()


def table(profiles: Sequence[Profile]) -> str:
    """Milliseconds by kind, and the share of the peak."""
    kinds = [*KINDS, "other"]
    lines = []
    for p in profiles:
        rate = p.flops / p.device_ms * 1e3
        cells = [f"{p.kinds[kind]:.1f}" for kind in kinds]
        lines.append([p.contender, str(p.rows), f"{p.device_ms:.1f}", *cells, f"{rate / PEAK['bf16']:.0%}"])
    return markdown_table(["contender", "rows", "device ms", *kinds, "of bf16's peak"], lines)


def page(facts: dict[str, str], profiles: Sequence[Profile]) -> str:
    """The Markdown page."""
    parts = []
    for p in profiles:
        rows = [[f"`{kernel[:90]}`", f"{ms:.2f}"] for kernel, ms in p.largest.items()]
        parts.append(f"## {p.contender}, {p.rows} rows\n\n{markdown_table(['kernel', 'ms'], rows)}")
    return f"""# Where the time of a training step of pi0.5 goes

Generated by `kernels/bench/pi05_profile.py`; the numbers are in `pi05_profile.json` beside it.

{measured_on(facts)}

Random weights, two cameras, a prompt of 60 tokens, expert only; device time of one step, by the profiler. The last
column is the step's FLOPs ({profiles[0].flops / 1e12:.0f} TFLOP in the first row) over its device time,
against 989 TFLOP/s.

{table(profiles)}

{(chr(10) * 2).join(parts)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Profiles and writes."""
    ours = [name for name, contender in CONTENDERS.items() if contender.kind == "ours"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contenders", nargs="+", choices=ours, default=["ours", "ours fp8", "ours cached"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--size", choices=["base", "tiny"], default="base")
    parser.add_argument("--scratch", type=Path, help="folder for the weights; a temporary one when left out")
    parser.add_argument("--commit", help="of the code, where git cannot say")
    chosen = parser.parse_args(arguments)
    device = available_device("cuda")
    make_folder(chosen.out)
    command = f"{LAUNCH} {shlex.join(sys.argv[1:] if arguments is None else arguments)}"
    facts = environment(device, commit=chosen.commit or current_commit(), command=command)
    with tempfile.TemporaryDirectory(dir=chosen.scratch) as folder:
        profiles = [profile(name, Path(folder), chosen.rows, chosen.size, device) for name in chosen.contenders]
    content: dict[str, Any] = {"environment": facts, "profiles": [asdict(p) for p in profiles]}
    write_json(chosen.out / "pi05_profile.json", content)
    write_text(chosen.out / "pi05_profile.md", page(facts, profiles))
    print(table(profiles))
    return 0


if __name__ == "__main__":
    sys.exit(main())
