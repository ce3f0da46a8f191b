"""An evaluation in LIBERO's real simulator: its own counts, limits and versions reach the results."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from soma_lightning.envs.libero import LiberoEnv
from soma_lightning.envs.libero_expert import LiberoExpert
from soma_lightning.envs.registry import effective_settings
from soma_lightning.envs.vector import LocalEnvs
from soma_lightning.evaluation import EPISODES, Rollout, evaluate
from soma_lightning.imports import is_available
from tests.evaluation.fakes import NoisePolicy, settings

if os.environ.get("SOMA_REQUIRE_LIBERO") != "1" and not is_available("libero"):
    pytest.skip("needs `pip install 'soma-lightning[libero]'`", allow_module_level=True)

# One worker process of pytest runs the whole file: a simulator takes 2 GB.
pytestmark = pytest.mark.xdist_group("libero")

TASK = "put_the_bowl_on_the_plate"
OPTIONS = {"suite": "libero_goal", "task_numbers": [8], "cameras": [], "max_steps": 125, "end_on_success": False}


class ExpertPolicy(NoisePolicy):
    """The scripted expert behind a policy's face; it fails from initial state 1 on, because it stands still there."""

    noise_shape = (1, 7)

    def __init__(self, env: LiberoEnv) -> None:
        super().__init__()
        self.env, self.expert, self.started = env, LiberoExpert(env), 0

    def predict_action_batch(self, observation, **options):
        if self.env._steps == 0:
            self.started += 1
            self.expert.reset()
        still = np.zeros(7, np.float32)
        return np.stack([self.expert.act() if self.started == 1 else still])[:, None], {}


def test_an_evaluation_in_the_real_simulator(tmp_path: Path) -> None:
    env = LiberoEnv(**OPTIONS)
    used = settings(
        env="libero",
        tasks=(TASK,),
        executed_steps=1,
        episodes=2,
        until="limit",
        env_options=effective_settings("libero", OPTIONS),
        protocol="libero_goal",
    )
    with LocalEnvs(lambda: env, 1) as group:
        results = evaluate(ExpertPolicy(env), group, used, tmp_path)
    lines = (tmp_path / EPISODES).read_text().splitlines()
    won, lost = (Rollout(**json.loads(line)) for line in lines)
    assert (won.success_once, won.success_at_end) == (True, True)
    assert 70 < won.steps < 125
    assert (lost.success_once, lost.success_at_end, lost.steps) == (False, False, 125)
    assert results["overall"]["success_at_end"] == results["overall"]["successes"] == 1
    assert results["step_limits"] == {TASK: 125}
    assert {"benchmark", "robosuite", "mujoco", "gl"} == set(results["simulator"])
    assert results["simulator"]["gl"] == "nothing"
    assert results["settings"]["env_options"]["settle_steps"] == 10
    assert results["protocol"]["deviations"] == ["1 of 10 tasks", "initial states 0..1 of 0..49", "max_steps=125"]
