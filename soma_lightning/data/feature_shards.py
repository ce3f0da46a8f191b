"""How are features kept in a folder, so that a killed run loses little and a later one can trust what is there?

`cache.json` says what the features are of. Shards are safetensors files with the parts of each sample under
"<sample>/<part>"; their headers are the only index, and name the hash of `cache.json`'s values. A shard is written
aside, flushed to the disk and renamed: it is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

#: A shard is closed when it holds this much.
SHARD_BYTES = 256 * 2**20
IDENTITY_FILE = "cache.json"
_OF = "identity"  # in a shard's metadata: the hash of the identity
_SHARDS, _PARTIAL = "*.safetensors", ".partial"
#: A shard is written within seconds; one that is still aside after this was left by a run that was killed.
_ABANDONED_S = 600.0


class FolderStore:
    """Samples of one identity in a folder, which several ranks may fill at once, each by shards of its own.

    identity: JSON values that decide the features. Samples of the shard in work are held in host memory until `flush`
    or until they are `SHARD_BYTES`; the others are mapped from the files.
    Raises ValueError naming what differs for a folder of another identity, for one that holds other files, for a shard
    of another folder, and for a damaged file; OSError when there is no room.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self._pending: dict[int, dict[str, Tensor]] = {}
        self._pending_bytes = 0
        self._shard_of: dict[int, Any] = {}  # sample -> the opened shard that it is in
        self._parts_of: dict[int, list[str]] = {}
        self._known: set[str] = set()
        self._hash = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"feature_cache: '{folder}' is a file; name a folder, new or empty")
        folder.mkdir(parents=True, exist_ok=True)
        self._settle_identity(identity)
        self._remove_abandoned()
        self.refresh()

    def keys(self) -> Iterable[int]:
        """The samples that are there, other ranks' as of the last `refresh`."""
        return [*self._shard_of, *self._pending]

    def put(self, key: int, sample: Mapping[str, Tensor]) -> None:
        """Keeps a copy of `sample`."""
        self._pending[key] = {name: values.to("cpu", copy=True).contiguous() for name, values in sample.items()}
        self._pending_bytes += sum(values.nbytes for values in self._pending[key].values())
        if self._pending_bytes >= SHARD_BYTES:
            self.flush()

    def get(self, key: int) -> Mapping[str, Tensor]:
        """The sample of this number; nobody may write to it."""
        if key in self._pending:
            return self._pending[key]
        shard = self._shard_of[key]
        return {name: shard.get_tensor(f"{key}/{name}") for name in self._parts_of[key]}

    def flush(self) -> None:
        """Writes the shard in work."""
        if not self._pending:
            return
        path = self.folder / f"{uuid.uuid4().hex}.safetensors"
        aside = path.with_name(path.name + _PARTIAL)
        tensors = {f"{key}/{name}": v for key, parts in self._pending.items() for name, v in parts.items()}
        try:
            save_file(tensors, aside, metadata={_OF: self._hash})
            _to_disk(aside)
            aside.replace(path)
            _to_disk(self.folder)
        except (SafetensorError, OSError) as error:  # the library's own error is no OSError
            aside.unlink(missing_ok=True)
            raise OSError(
                f"a shard of the feature cache '{self.folder}' cannot be written ({error}); make room and start again: "
                "the shards that are there are kept"
            ) from error
        self._pending, self._pending_bytes = {}, 0
        self._open(path)

    def refresh(self) -> None:
        """Opens shards that others have written since."""
        for path in sorted(self.folder.glob(_SHARDS)):
            if path.name not in self._known:
                self._open(path)

    def free_bytes(self) -> int:
        """Space on the folder's disk."""
        return shutil.disk_usage(self.folder).free

    def _open(self, path: Path) -> None:
        try:
            shard = safe_open(path, framework="pt", device="cpu")
            names = list(shard.keys())  # type: ignore[no-untyped-call]
            of = (shard.metadata() or {}).get(_OF)  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged ({error}); remove it, and its samples are computed again") from error
        if of != self._hash:
            raise ValueError(f"{path} holds features of something else than {IDENTITY_FILE} beside it says; remove it")
        found: dict[int, list[str]] = {}
        for key, name in (full_name.split("/", 1) for full_name in names):
            found.setdefault(int(key), []).append(name)
        self._parts_of |= found
        self._shard_of |= dict.fromkeys(found, shard)
        self._known.add(path.name)

    def _settle_identity(self, identity: Mapping[str, Any]) -> None:
        """Writes the identity into a new folder, or compares it with that of an old one."""
        path = self.folder / IDENTITY_FILE
        if not path.is_file():
            if others := sorted(p.name for p in self.folder.iterdir() if not p.name.startswith(IDENTITY_FILE)):
                raise ValueError(
                    f"feature_cache: '{self.folder}' is no feature cache, it holds {others[:5]}; name a new or empty "
                    "folder"
                )
            aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
            aside.write_text(json.dumps(identity, indent=2) + "\n")
            _to_disk(aside)
            try:
                os.link(aside, path)  # fails if another rank was first, whose identity then counts
            except FileExistsError:
                pass
            finally:
                aside.unlink()
        _check_same(self.folder, _read_identity(path), json.loads(json.dumps(identity)))

    def _remove_abandoned(self) -> None:
        for path in self.folder.glob(_SHARDS + _PARTIAL):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink(missing_ok=True)


def _read_identity(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); name another folder, or remove this one") from error
    if not isinstance(found, dict) or not all(isinstance(group, dict) for group in found.values()):
        raise ValueError(f"{path} does not say what the features are of; name another folder, or remove this one")
    return found


def _check_same(folder: Path, there: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    changed = [
        f"{group}.{name} ({_short(old.get(name))} there, {_short(new.get(name))} here)"
        for group, old, new in ((g, there.get(g, {}), mine.get(g, {})) for g in sorted({*there, *mine}))
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    if changed:
        raise ValueError(
            f"the feature cache '{folder}' is of something else: {', '.join(changed)}; name another folder, remove "
            "this one, or go back to the model, settings and data that it was made with"
        )


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."


def _to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
