"""How the learning rate moves over a fine-tuning run."""

from __future__ import annotations

import math
from collections.abc import Callable


def fit_to_run(warmup_steps: int, decay_steps: int, total_steps: float) -> tuple[int, int]:
    """Shrinks warm-up and decay in proportion when the run is shorter than `decay_steps`.

    total_steps: optimizer steps of the run; infinite runs keep both numbers. Returns (warmup_steps, decay_steps).
    """
    if not math.isfinite(total_steps) or total_steps <= 0 or total_steps >= decay_steps:
        return warmup_steps, decay_steps
    return int(warmup_steps * total_steps / decay_steps), int(total_steps)


def warmup_cosine(warmup_steps: int, decay_steps: int, final_ratio: float) -> Callable[[int], float]:
    """Factor of the peak learning rate at each optimizer step (for `LambdaLR`).

    Linear from 1 / (warmup_steps + 1) to 1, then a cosine over the absolute step that reaches `final_ratio` at
    `decay_steps` and stays there (LeRobot's pi0.5 schedule).
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return 1 / (warmup_steps + 1) + (1 - 1 / (warmup_steps + 1)) * step / warmup_steps
        progress = min(step, decay_steps) / max(decay_steps, 1)
        return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor
