"""Loading with workers takes no more memory the longer it runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path

import pytest

from soma_lightning.data import DataSource, LeRobotDataModule

CAMERAS = tuple(f"observation.images.{name}" for name in ("image", "image2", "image3"))


def memory_and_files() -> tuple[float, int]:
    """Memory in MiB of this process and its workers, shared pages counted once, and open files."""
    folders = [Path(f"/proc/{pid}") for pid in (os.getpid(), *(child.pid for child in active_children()))]
    accounts = [(folder / "smaps_rollup").read_text() for folder in folders]
    kib = [int(match[1]) for text in accounts if (match := re.search(r"^Pss: +(\d+) kB", text, re.M))]
    assert len(kib) == 3
    return sum(kib) / 1024, sum(len(list((folder / "fd").iterdir())) for folder in folders)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="reads Linux's accounts of shared memory")
def test_three_cameras_and_workers_over_300_steps(record: Callable[..., Path]) -> None:
    roots = [record((20,) * 6, name=name, size=64, cameras=CAMERAS) for name in ("a", "b")]
    data = LeRobotDataModule(
        [DataSource(str(root), weight=weight) for root, weight in zip(roots, (3.0, 1.0), strict=True)],
        batch_size=16,
        chunk_size=4,
        num_workers=2,
        augment="openpi",
    )
    loader = data.train_dataloader()
    assert data.augmenter is not None
    measured, step = {}, 0
    while step < 300:
        for batch_idx, batch in enumerate(loader):
            data.augmenter(data.augmenter.draw(batch, step, batch_idx))
            step += 1
            if step in (100, 200, 300):
                measured[step] = memory_and_files()
    (early, files), (late, files_late) = measured[100], measured[300]
    # One batch that is kept is 0.6 MiB, so a leak of every batch would be 118 MiB.
    assert late - early < 40, measured
    assert files_late - files < 8, measured
