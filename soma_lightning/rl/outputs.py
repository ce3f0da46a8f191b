"""What does a PPO run leave on disk? Logs, a learning curve, results, the policy, and what a later run goes on from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soma_lightning import plots
from soma_lightning.envs.base import EnvGroup, Episode
from soma_lightning.evaluation.folder import write_json
from soma_lightning.evaluation.results import wilson_interval
from soma_lightning.evaluation.runner import Runner
from soma_lightning.evaluation.settings import EvaluationSettings
from soma_lightning.evaluation.videos import KeptVideos
from soma_lightning.locks import lock_file

STATE, RESULTS, HISTORY, CURVE, POLICY = "state.ckpt", "results.json", "history.jsonl", "learning_curve.png", "policy"


#: Settings that a run may change when it goes on: they decide how it is carried out, not what it learns.
_MAY_CHANGE = {("loop", "iterations"), ("loop", "save_every"), ("loop", "arena_mb"), ("loop", "fragment_timeout_s")}
_SHOWN = 5


class RunFolder:
    """The folder of one run. One process at a time; an interrupted run goes on, one of other settings is refused.

    settings: what decides the run, JSON-ready. The folder belongs to a run from its first iteration on: one that fails
    before leaves nothing that would stand in the way. Raises ValueError when another process writes there, when another
    run's files lie there, and for a `policy` that no run wrote, which would be lost.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self._settings = json.loads(json.dumps(settings))
        self._is_finished = False
        self._lock = lock_file(
            out / ".lock", f"another run is writing into {out}; wait for it, or choose another --out"
        )
        try:
            is_run = (out / RESULTS).exists()
            if (out / POLICY).exists() and not is_run:
                raise ValueError(
                    f"{out / POLICY} was written by something else and would be lost; choose another --out"
                )
            if is_run and not overwrite:
                self._check()
            if overwrite:
                for name in (STATE, RESULTS, HISTORY, CURVE):
                    (out / name).unlink(missing_ok=True)
            if not (out / RESULTS).exists():  # nothing says which run it belongs to
                (out / STATE).unlink(missing_ok=True)
            self.history = self._read_history()
        except BaseException:
            self._lock.close()
            raise

    @property
    def state(self) -> Path:
        return self.out / STATE

    def add(self, iteration: int, row: Mapping[str, float]) -> None:
        """Notes an iteration, numbered from 1, in the place of those after the state that the run went on from."""
        entry = {"iteration": iteration, **{name: one for name, one in row.items() if math.isfinite(one)}}
        kept = [one for one in self.history if one["iteration"] < iteration]
        goes_back, self.history = len(kept) < len(self.history), [*kept, entry]
        with open(self.out / HISTORY, "w" if goes_back else "a") as file:
            file.writelines(json.dumps(one) + "\n" for one in (self.history if goes_back else [entry]))
        self._write("running")

    def finish(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Writes results.json and learning_curve.png; returns the results."""
        self._is_finished = True
        results = self._write("finished", facts)
        plots.reward_curve(self.history, self.out / CURVE)
        return results

    def close(self) -> None:
        """Lets others write here; results.json says so when the run did not finish."""
        if not self._is_finished and self.history:
            self._write("interrupted")
        self._lock.close()

    def _write(self, status: str, facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        results = {"status": status, "settings": self._settings, **(facts or {})}
        if self.history:
            results["last"] = self.history[-1]
        write_json(self.out / RESULTS, results)
        return results

    def _read_history(self) -> list[dict[str, Any]]:
        file = self.out / HISTORY
        if not file.is_file() or not self.state.is_file():
            file.unlink(missing_ok=True)
            return []
        return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]

    def _check(self) -> None:
        try:
            found = json.loads((self.out / RESULTS).read_text())["settings"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.out / RESULTS} does not say which run this was ({error}); choose another --out, or pass "
                "--overwrite"
            ) from error
        wanted = self._settings
        changed = sorted(
            f"{group}.{name}" if name else group
            for group, name in (_leaves(wanted) | _leaves(found)) - _MAY_CHANGE
            if group != "evaluation" and _value(wanted, group, name) != _value(found, group, name)
        )
        if changed:
            more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            raise ValueError(
                f"{self.out} holds a run with other settings ({', '.join(changed[:_SHOWN])}{more}); choose another "
                "--out, or pass --overwrite"
            )


@dataclass(frozen=True)
class EvaluationPlan:
    """How the policy is rolled out without noise while it trains, on initial states that training never sees.

    every: iterations between evaluations. episodes: of each task, on the initial states from first_init_state on.
    env_options: instead of the rollouts' (for another stream of initial states). denoising_steps: Euler steps; those of
    the rollouts when None. num_envs: side by side. recorded: successes and failures of each task that are kept as
    video, in videos/update_N of the run's folder.
    """

    every: int = 10
    episodes: int = 100
    first_init_state: int = 0
    env_options: Mapping[str, Any] | None = None
    denoising_steps: int | None = None
    num_envs: int = 50
    recorded: int = 0

    def __post_init__(self) -> None:
        for name in ("every", "episodes", "num_envs"):
            if getattr(self, name) < 1:
                raise ValueError(f"evaluation.{name}={getattr(self, name)} must be at least 1")


class Evaluator:
    """Success rate of a policy on `settings`, in environments that stay for the whole run.

    videos: folder for what `settings.recorded` asks for.
    """

    def __init__(self, envs: EnvGroup, settings: EvaluationSettings, videos: Path) -> None:
        self.envs, self.settings, self.videos = envs, settings, videos

    def __call__(self, policy: Any, updates: int) -> dict[str, float]:
        """{"success", "success_low", "success_high"}: rate and 95 % Wilson interval over all episodes.

        policy: in eval mode.
        """
        settings = self.settings
        videos = KeptVideos(self.videos / f"update_{updates:04d}", settings.recorded, settings.executed_steps)
        episodes = [Episode(task, k) for task in settings.tasks for k in settings.init_states]
        successes = 0
        for rollout, frames in Runner(policy, self.envs, settings, videos.wants).run(episodes):
            successes += rollout.success_once
            if frames:
                videos.keep(rollout, frames)
        low, high = wilson_interval(successes, len(episodes))
        return {"success": successes / len(episodes), "success_low": low, "success_high": high}


def _leaves(settings: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {
        (group, name) for group, value in settings.items() for name in (value if isinstance(value, Mapping) else ("",))
    }


def _value(settings: Mapping[str, Any], group: str, name: str) -> Any:
    value = settings.get(group)
    return value.get(name) if name and isinstance(value, Mapping) else value
