"""Which episodes are kept as video: of each task the successes and the failures of the lowest initial states."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from soma_lightning import plots
from soma_lightning.evaluation.folder import PARTIAL
from soma_lightning.evaluation.settings import Rollout

_FPS = 20  # control steps a second


class KeptVideos:
    """The `limit` successes and the `limit` failures of each task with the lowest initial states, in `folder`.

    finished: earlier episodes of this evaluation, whose files may be there. A video shows in real time what the policy
    saw at its looks, `executed_steps` control steps apart, and the end; the frames go beside it as `frames` in an .npz.
    """

    def __init__(self, folder: Path, limit: int, executed_steps: int, finished: Iterable[Rollout] = ()) -> None:
        self._folder, self._limit, self._executed_steps = folder, limit, executed_steps
        self._kept: dict[tuple[str, bool], list[int]] = {}
        for rollout in finished:
            if self._path(rollout).exists():
                self._states(rollout).append(rollout.init_state)

    def wants(self, rollout: Rollout) -> bool:
        """Whether `keep` would keep this episode as things are now."""
        states = self._states(rollout)
        return len(states) < self._limit or (self._limit > 0 and rollout.init_state < max(states))

    def keep(self, rollout: Rollout, frames: list[np.ndarray]) -> None:
        """Writes the episode's files and drops those of one that it takes the place of."""
        path = self._path(rollout)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(PARTIAL)
        with open(partial, "wb") as file:
            np.savez_compressed(file, frames=np.stack(frames))
        partial.replace(path)
        shown = [frame for frame in frames[:-1] for _ in range(self._executed_steps)] + [frames[-1]] * _FPS
        plots.write_video(shown, path.with_suffix(".mp4"), fps=_FPS)
        states = self._states(rollout)
        states.append(rollout.init_state)
        if len(states) > self._limit:
            states.remove(surplus := max(states))
            for suffix in (".npz", ".mp4"):
                self._file(rollout.task, surplus, rollout.success_once, suffix).unlink(missing_ok=True)

    def listing(self, tasks: Iterable[str]) -> dict[str, dict[str, list[str]]]:
        """Task -> "success" and "failure" -> files beside results.json, in the order of initial states."""
        return {
            task: {
                _outcome(success): [
                    f"{self._folder.name}/{self._file(task, state, success, '.mp4').name}"
                    for state in sorted(self._kept.get((task, success), ()))
                ]
                for success in (True, False)
            }
            for task in tasks
        }

    def _states(self, rollout: Rollout) -> list[int]:
        return self._kept.setdefault((rollout.task, rollout.success_once), [])

    def _path(self, rollout: Rollout) -> Path:
        return self._file(rollout.task, rollout.init_state, rollout.success_once, ".npz")

    def _file(self, task: str, init_state: int, success: bool, suffix: str) -> Path:
        return self._folder / f"{task}_{init_state:04d}_{_outcome(success)}{suffix}"


def _outcome(success: bool) -> str:
    return "success" if success else "failure"
