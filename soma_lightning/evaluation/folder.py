"""What an evaluation keeps on disk, so that one that was interrupted goes on, and nobody reads half a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from soma_lightning.evaluation.settings import Rollout
from soma_lightning.locks import lock_file

RESULTS, EPISODES, SETTINGS, REPORT = "results.json", "episodes.jsonl", "settings.json", "run_report.json"
SEEDS = "seeds.json"
SUCCESS_CHART, CONTACT_SHEET, VIDEOS = "success.png", "contact_sheet.png", "videos"
PARTIAL = ".partial"  # suffix of a file that is being written
_WAY_OUT = "restore the file, or start anew with --overwrite"
_IN_WORDS = {"policy_digest": "the policy's weights or statistics", "simulator": "the simulator's versions or driver"}


def check_folder(out: Path) -> None:
    """Makes the folder of an evaluation. Raises OSError naming it when nothing can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"the results cannot go into {out}: it is or lies in a file ({error})") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise PermissionError(f"the results cannot go into {out}: the folder is not writable")


class EvaluationFolder:
    """Finished episodes on disk, one JSON line each; what an interrupted run left behind is read back.

    identity: what decides the outcome, JSON-ready; a resumed evaluation must have the same, but for the policy's path.
    One process at a time: a second one is refused. Nothing of an earlier evaluation is deleted before the first episode
    of the new one is there to replace it.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], overwrite: bool) -> None:
        self.out, self.path = out, out / EPISODES
        self._wanted = json.loads(json.dumps(identity))
        busy = f"another evaluation is writing into {out}; wait for it, or choose another --out"
        self._lock = lock_file(out / ".lock", busy)
        try:
            self._begun = (out / SETTINGS).exists() and not overwrite
            if self._begun:
                self._check_settings()
            elif self.path.exists() and not overwrite:
                raise ValueError(
                    f"{self.path} lies there without {SETTINGS}; choose another --out, or pass --overwrite"
                )
        except BaseException:
            self._lock.close()
            raise

    def _check_settings(self) -> None:
        found = _read_json(self.out / SETTINGS)
        # The digest says what the policy is; the folder it lies in may have moved.
        changed = sorted(key for key in self._wanted if key != "policy" and self._wanted[key] != found.get(key))
        if changed:
            names = [_IN_WORDS.get(key, key) for key in changed]
            raise ValueError(
                f"{self.out} holds an evaluation with other settings ({', '.join(names)}); choose another --out, "
                "or pass --overwrite"
            )

    def read(self) -> list[Rollout]:
        """The finished episodes. Raises ValueError naming file and line of one that cannot be read."""
        if not self._begun or not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # a killed run may have left half a line
        if whole != content:
            os.truncate(self.path, len(whole))
        rollouts: list[Rollout] = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                rollouts.append(Rollout(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number} is no finished episode ({error}); {_WAY_OUT}") from error
        episodes = [(rollout.task, rollout.init_state) for rollout in rollouts]
        if len(set(episodes)) != len(episodes):
            raise ValueError(f"{self.path} holds an episode twice; {_WAY_OUT}")
        return rollouts

    def begin(self) -> None:
        """Puts the settings there, in place of an earlier evaluation's files; once."""
        if self._begun:
            return
        for name in (RESULTS, REPORT, SUCCESS_CHART, CONTACT_SHEET, EPISODES, SETTINGS):
            (self.out / name).unlink(missing_ok=True)
        for video in (self.out / VIDEOS).glob("*"):
            if video.suffix in (".npz", ".mp4", PARTIAL):
                video.unlink()
        write_json(self.out / SETTINGS, self._wanted)
        self._begun = True

    def add(self, rollout: Rollout) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(asdict(rollout)) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON ({error}); {_WAY_OUT}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object; {_WAY_OUT}")
    return value


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all: a reader never sees half a file."""
    temporary = path.with_suffix(path.suffix + f".tmp{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1))
    temporary.replace(path)
