"""Which checkpoints the strategies read and write: ordinary Lightning files, whatever the number of processes."""

from __future__ import annotations

from pathlib import Path


def refuse_directory(path: str | Path) -> None:
    """ValueError if `path` is a directory: sharded checkpoints are not read in this version."""
    if Path(path).is_dir():
        raise ValueError(
            f"{path} is a directory (a sharded checkpoint), which this version does not read; turn it into a file with "
            "`python -m lightning.pytorch.utilities.consolidate_checkpoint` or save with save_format='file'"
        )
