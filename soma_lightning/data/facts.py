"""What does a run report say about where the training data came from? Everything is JSON-ready."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data.sources import DataSource


def source_facts(sources: Sequence[DataSource], sizes: Sequence[int], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Of each source: its filters, its share of the samples, and how often an epoch reads its training frames.

    sizes: training frames of each source. counts: samples an epoch draws of it.
    """
    return [
        {
            "root": source.root,
            **source.filters,
            "train_frames": size,
            "share": round(count / sum(counts), 4),
            "passes_per_epoch": round(count / size, 4),
        }
        for source, size, count in zip(sources, sizes, counts, strict=True)
    ]


def recording_facts(roots: Sequence[str]) -> dict[str, Any]:
    """Where demonstrations of `soma demos` came from and their initial states; nothing for other data sets."""
    files = [Path(root) / fmt.RECORDING_FILE for root in roots]
    recordings = [json.loads(file.read_text()) for file in files if file.is_file()]
    if not recordings:
        return {}
    sources = [f"{r['environment']}, seed {r['seed']}, stream {r['init_state_stream']}" for r in recordings]
    tasks = [task for recording in recordings for task in recording["tasks"]]
    states = [f"{task['task']} {state}" for task in tasks for state in task["init_states"]]
    return {"demonstrations": sources, "demonstration_init_states": states}
