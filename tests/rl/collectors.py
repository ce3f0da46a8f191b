"""Collectors for tests of the engines, as rollout processes import them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from soma_lightning.rl.engine import Collected, FragmentLostError


def weights(version: int) -> dict[str, Tensor]:
    """A snapshot whose every element says its version (bf16 is exact to 256)."""
    return {
        "matrix": torch.full((300, 301), float(version)),
        "half": torch.full((77,), float(version % 256), dtype=torch.bfloat16),
        "count": torch.tensor(version),
    }


def named_memory() -> list[str]:
    """Shared memory that this process maps and that has a name in /dev/shm: it would outlive all processes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")]


class Collector:
    """Fragments that say which weights made them; misbehaves where its script says so."""

    def __init__(self, script: Script, worker: int) -> None:
        self.script, self.worker = script, worker
        # an environment in a process of its own; `cat` ends with its pipe, as those of this project do
        command = ["sleep", "600"] if script.is_stubborn else ["cat"]
        self._simulator = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._weights = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}

    def tensors(self) -> dict[str, Tensor]:
        return self._weights

    def collect(self, index: int, version: int) -> Collected:
        action = self.script.actions.get(index)
        if action is not None and self.script.is_first(action, index):
            misbehave(action)
        time.sleep(self.script.sleep_s)
        for name, expected in weights(version).items():
            assert torch.equal(self._weights[name], expected), f"{name} is not of version {version}"
        tensors = {
            "matrix": self._weights["matrix"],
            "index": torch.tensor(index),
            "flags": torch.tensor([True, False]),
        }
        tensors["payload"] = torch.full((self.script.payload,), index % 256, dtype=torch.uint8)
        facts = {"pid": os.getpid(), "simulator": self._simulator.pid, "role": os.environ.get("SOMA_ROLE")}
        return Collected(tensors, {**facts, "named_memory": named_memory()})

    def close(self) -> None:
        self._simulator.kill()
        self._simulator.wait()
        (self.script.folder / f"closed_{os.getpid()}").touch()


def misbehave(action: str) -> None:
    if action == "lost":
        raise FragmentLostError("the simulator hung")
    if action == "raise":
        raise ArithmeticError("collecting failed on purpose")
    if action == "exit":
        os._exit(3)
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


@dataclass(frozen=True)
class Script:
    """Makes a `Collector`. actions: by fragment number, done the first time that it is collected by any process.
    is_stubborn: the environments' process does not end by itself."""

    folder: Path
    actions: Mapping[int, str] = field(default_factory=dict)
    sleep_s: float = 0.0
    payload: int = 1000
    raises: str = ""
    is_stubborn: bool = False

    def __call__(self, worker: int) -> Collector:
        if self.raises:
            raise ValueError(self.raises)
        return Collector(self, worker)

    def is_first(self, action: str, index: int) -> bool:
        try:
            (self.folder / f"{action}_{index}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
