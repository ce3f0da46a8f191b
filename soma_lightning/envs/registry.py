"""How an environment is named and built, in this process or in a worker."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, cast

from soma_lightning.envs.base import ManipulationEnv, ScriptedExpert, require_known
from soma_lightning.envs.spawned import SpawnedEnvs
from soma_lightning.envs.vector import LocalEnvs

#: Name -> "module:class". The class is imported when an environment is built, not before.
ENVIRONMENTS = {
    "somatable": "soma_lightning.envs.somatable:SomaTable",
    "libero": "soma_lightning.envs.libero:LiberoEnv",
    "point_reach": "soma_lightning.envs.point_reach:PointReach",
}
#: Name of an environment -> "module:class" of its scripted expert.
EXPERTS = {
    "somatable": "soma_lightning.envs.experts:SomaTableExpert",
    "libero": "soma_lightning.envs.libero_expert:LiberoExpert",
}


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class EnvSpec:
    """A picklable recipe for one environment; calling it builds the environment.

    `name` is a registered name or "package.module:Class" of your own; `settings` are the constructor's arguments.
    Raises ValueError naming the nearest name for an unknown environment or setting, and for one that is missing, before
    anything is built.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        accepted = inspect.signature(environment_class(self.name)).parameters
        for setting in self.settings:
            require_known(f"setting of environment '{self.name}'", setting, accepted)
        for name, parameter in accepted.items():
            is_needed = parameter.default is parameter.empty and parameter.kind in _NAMED
            if is_needed and name not in self.settings:
                raise ValueError(f"environment '{self.name}' needs {name}={_choices(self.name, name)}")

    def __call__(self) -> ManipulationEnv:
        return environment_class(self.name)(**self.settings)

    def replace(self, **settings: Any) -> EnvSpec:
        """The same recipe with some settings changed or added."""
        return EnvSpec(self.name, {**self.settings, **settings})


def environment_class(name: str) -> type[ManipulationEnv]:
    """The class behind `name`. ValueError naming the nearest known name, or why "module:Class" cannot be used."""
    if ":" not in name:
        require_known("environment", name, ENVIRONMENTS)
    module_name, _, class_name = ENVIRONMENTS.get(name, name).partition(":")
    try:
        cls = getattr(import_module(module_name), class_name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"environment '{name}' cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, ManipulationEnv)):
        raise ValueError(f"environment '{name}' is not a subclass of ManipulationEnv")
    return cls


def effective_settings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with the defaults of environment `name` for all other settings that JSON can say."""
    parameters = inspect.signature(environment_class(name)).parameters.values()
    return {**{one.name: one.default for one in parameters if _is_plain(one.default)}, **given}


def expert_class(name: str) -> type[ScriptedExpert]:
    """The scripted expert of environment `name`. ValueError naming those with one when it has none."""
    if name not in EXPERTS:
        raise ValueError(f"environment '{name}' has no scripted expert; those with one: {', '.join(EXPERTS)}")
    module_name, _, class_name = EXPERTS[name].partition(":")
    return cast("type[ScriptedExpert]", getattr(import_module(module_name), class_name))


def _choices(environment: str, setting: str) -> str:
    """What a setting may be, as the environment says in `setting_choices`."""
    choices = environment_class(environment).setting_choices.get(setting, ())
    return f", one of {', '.join(choices)}" if choices else ""


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def make(name: str, **settings: Any) -> ManipulationEnv:
    """Builds environment `name` with `settings`, for example `make("somatable", image_size=64, obs_type="state")`.

    ValueError naming the nearest name for an unknown environment or an unknown setting.
    """
    return EnvSpec(name, settings)()


def make_group(
    name: str, settings: Mapping[str, Any], *, num_slots: int, num_workers: int = 0, timeout_s: float = 60.0
) -> LocalEnvs | SpawnedEnvs:
    """`num_slots` environments as one batch: in this process when `num_workers` is 0, else in that many processes.

    timeout_s: the longest one call to a worker process may take; a call in this process cannot be cut off.
    """
    spec = EnvSpec(name, settings)
    if num_workers == 0:
        return LocalEnvs(spec, num_slots)
    return SpawnedEnvs(spec, num_slots, num_workers, timeout_s)
