"""Where do finished attempts wait while a recording goes on, so that one that was stopped continues?

Every attempt depends on the recording's settings and its own number alone, so one that is there need not be made again.
The folder is hidden beside the data set and goes away with the end of the recording.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from soma_lightning.envs.recorder import Rollout

_IDENTITY = "recording.json"
_FAILED = ".failed"
_ZLIB_LEVEL = 1  # four times the speed of the default for a few percent more bytes


class AttemptStore:
    """Attempts of one recording in `folder`, which is made by the first `save`.

    identity: the settings that attempts depend on, JSON-ready. Raises ValueError when the folder holds attempts of
    other settings.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._folder, self._identity = folder, json.loads(json.dumps(identity))
        if not (folder / _IDENTITY).is_file():
            return
        stored = _read_identity(folder / _IDENTITY)
        for key, value in self._identity.items():
            if stored.get(key) != value:
                raise ValueError(
                    f"a recording that was stopped left {folder}, with {key}={stored.get(key)!r} and not {value!r}; "
                    "repeat its settings to continue it, or pass --overwrite to drop it"
                )

    def known(self, task: str) -> set[int]:
        """Numbers of the attempts at `task` that are there."""
        folder = self._folder / task
        found = folder.iterdir() if folder.is_dir() else ()
        return {int(path.stem) for path in found if path.suffix in (".npz", _FAILED) and path.stem.isdecimal()}

    def load(self, task: str, index: int) -> Rollout | None:
        """An attempt in `known`; None when it did not succeed."""
        path = self._path(task, index)
        if not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as stored:
                values = {field.name: stored[field.name] for field in fields(Rollout)}
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path} cannot be read ({error}); delete it, and it is recorded anew") from error
        return Rollout(**{name: value if value.ndim else value.item() for name, value in values.items()})

    def save(self, task: str, index: int, rollout: Rollout | None) -> None:
        """Keeps an attempt, whole or not at all."""
        path = self._path(task, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (self._folder / _IDENTITY).is_file():
            _put(self._folder / _IDENTITY, json.dumps(self._identity, indent=2).encode())
        if rollout is None:
            path.with_suffix(_FAILED).touch()
            return
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=_ZLIB_LEVEL) as archive:
            for field in fields(Rollout):
                content = io.BytesIO()
                np.lib.format.write_array(content, np.asarray(getattr(rollout, field.name)), allow_pickle=False)
                archive.writestr(f"{field.name}.npy", content.getvalue())
        _put(path, packed.getvalue())

    def remove(self) -> None:
        """Drops all attempts."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, task: str, index: int) -> Path:
        return self._folder / task / f"{index:06d}.npz"


def _read_identity(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is no valid JSON ({error}); pass --overwrite to drop the stopped recording"
        ) from error
    return stored if isinstance(stored, dict) else {}


def _put(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)
