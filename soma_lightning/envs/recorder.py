"""How one demonstration is made: a scripted expert acts, disturbed on purpose, and its clean actions are the labels.

This module needs numpy only, so that recording workers do not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from soma_lightning.envs.base import MAIN_IMAGE, WRIST_IMAGE, DisturbanceModel, ScriptedExpert, state_of
from soma_lightning.envs.registry import EnvSpec, expert_class

_NOISE_PURPOSE = 2  # first word of the noise seeds; init states use 1

_NOISE_DECAY, _NOISE_INPUT = 0.8, 0.6
_PUSH_STEPS = 5
_PUSH_SIZE = np.array([0.8, 0.8, 0.4])  # action units; less along z, where the table is near


@dataclass
class Rollout:
    """One attempt. T frames: the observation before each step and the expert's clean action for it.

    main_images, wrist_images: uint8 [T, h, w, 3]; states: float32 [T, 8]; actions: float32 [T, 7].
    """

    task: str
    instruction: str
    init_state: int
    main_images: np.ndarray
    wrist_images: np.ndarray
    states: np.ndarray
    actions: np.ndarray

    def __len__(self) -> int:
        return len(self.actions)


class Disturbance:
    """What is added to the expert's motion: correlated noise and now and then a push, in action units.

    AR(1): n = 0.8 n + 0.6 N(0, noise), for the rotation N(0, noise * model.rotation); with model.push_probability a
    step, a constant push of the translation by up to 0.8 for 5 steps. The gripper is left alone. A policy trained on
    the clean labels of disturbed states learns to recover. `noise` 0 means none of both.
    """

    def __init__(self, noise: float, generator: np.random.Generator, model: DisturbanceModel) -> None:
        self._noise, self._generator, self._model = noise, generator, model
        self._correlated, self._push = np.zeros(6), np.zeros(6)
        self._push_steps_left = 0

    def draw(self, *, may_be_pushed: bool = True) -> np.ndarray:
        """The next step's disturbance, float64 [6]. may_be_pushed: a push may begin; one that has begun goes on."""
        if self._noise == 0.0:
            return np.zeros(6)
        fresh = np.zeros(6)
        fresh[:3] = self._generator.normal(0.0, self._noise, 3)
        if self._model.rotation:
            fresh[3:] = self._generator.normal(0.0, self._noise * self._model.rotation, 3)
        self._correlated = _NOISE_DECAY * self._correlated + _NOISE_INPUT * fresh
        may_begin = self._push_steps_left == 0 and may_be_pushed
        if may_begin and self._generator.random() < self._model.push_probability:
            self._push_steps_left = _PUSH_STEPS
            self._push[:3] = self._generator.uniform(-_PUSH_SIZE, _PUSH_SIZE)
        if self._push_steps_left == 0:
            return self._correlated
        self._push_steps_left -= 1
        return np.asarray(self._correlated + self._push)

    def step_of(self, expert: ScriptedExpert) -> tuple[np.ndarray, np.ndarray]:
        """The expert's next action, and what is executed: the same with this step's disturbance. float32 [7] each."""
        may_be_pushed = expert.may_be_pushed()  # before the action, which may end a phase
        action = expert.act()
        executed = action.copy()
        executed[:6] += self.draw(may_be_pushed=may_be_pushed)
        return action, executed


class Recorder:
    """Makes demonstrations in one environment. A result depends on (seed, noise, task, index) alone.

    noise: standard deviation of the disturbance, action units; None: the expert's own.
    """

    def __init__(self, spec: EnvSpec, seed: int, noise: float | None = None) -> None:
        expert = expert_class(spec.name)
        self._env = spec.replace(**expert.recording_settings(seed))()
        self._expert = expert(self._env)
        self._seed = seed
        self._noise = expert.disturbance.noise if noise is None else noise

    def attempt(self, task: str, index: int) -> Rollout | None:
        """Attempt number `index` of `task`, from the init state of that number; None when it was not solved."""
        env = self._env
        env.reset(task, index)
        self._expert.reset()
        seed = (_NOISE_PURPOSE, self._seed, list(env.tasks).index(task), index)
        disturbance = Disturbance(self._noise, np.random.default_rng(seed), self._expert.disturbance)
        observations, actions = [], []
        while True:
            action, executed = disturbance.step_of(self._expert)
            observations.append(env.observe())
            actions.append(action)
            outcome = env.step(executed)
            if outcome.done:
                break
        if not outcome.success:
            return None
        return Rollout(
            task=task,
            instruction=env.instruction,
            init_state=index,
            main_images=np.stack([one[MAIN_IMAGE] for one in observations]),
            wrist_images=np.stack([one[WRIST_IMAGE] for one in observations]),
            states=np.stack([state_of(one) for one in observations]),
            actions=np.stack(actions),
        )

    def close(self) -> None:
        self._env.close()
