"""`import soma_lightning` is free: it loads nothing heavy, and its names resolve when they are used."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import soma_lightning

ROOT = Path(__file__).resolve().parents[1]

HEAVY = {
    "torch",
    "lightning",
    "transformers",
    "numpy",
    "pyarrow",
    "matplotlib",
    "mujoco",
    "triton",
    "jsonargparse",
    "av",
    "websockets",
    "msgpack",
}


def modules_after(code: str) -> set[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"],
        env={**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return {name for name in result.stdout.split() if "." not in name}


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert modules_after("import soma_lightning") & HEAVY == set()


def test_the_optimizer_needs_torch_alone() -> None:
    loaded = modules_after("from soma_lightning import FusedAdamW, Layout") & HEAVY
    assert loaded - {"numpy"} == {"torch"}, "torch itself may load numpy"


@pytest.mark.parametrize(
    "name", ["SomaSpeedStrategy", "FabricSomaSpeedStrategy", "Layout", "FusedAdamW", "FP32MasterAdamW"]
)
def test_public_names_resolve(name: str) -> None:
    assert name in soma_lightning.__all__
    assert name in dir(soma_lightning)
    value = getattr(soma_lightning, name)
    assert value.__name__ == name
    assert getattr(importlib.import_module(value.__module__), name) is value


def test_unknown_names_are_ordinary_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'soma_lightning' has no attribute 'SomaSped'"):
        soma_lightning.SomaSped  # noqa: B018


def test_kernels_is_not_a_package() -> None:
    """A regular package of that name makes transformers believe that Hugging Face's `kernels` is installed."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
