"""`soma doctor`: what this machine has, and what to install for what it lacks."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from soma_lightning.envs import libero_package
from soma_lightning.envs.rendering import check_gl
from soma_lightning.imports import EXTRA_OF_PACKAGE, is_available

PACKAGES = ("soma-lightning", "torch", "lightning", "transformers", "jsonargparse", "pyarrow", "mujoco", "av", "triton")


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return (
            f"missing: pip install 'soma-lightning[{EXTRA_OF_PACKAGE[package]}]'"
            if package in EXTRA_OF_PACKAGE
            else "missing"
        )


def libero_state() -> str:
    """Which LIBERO is installed and where its meshes are, or what is missing; it is not needed for anything else."""
    try:
        return libero_package.describe()
    except (ImportError, FileNotFoundError) as error:
        return str(error)


def main(argv: list[str]) -> int:
    """Prints versions, devices and the state of off-screen rendering. Returns 1 when something is missing."""
    if argv:
        if argv[0] in ("-h", "--help"):
            print(f"usage: soma doctor\n\n{main.__doc__}")
            return 0
        print(f"error: soma doctor takes no options, got {argv}", file=sys.stderr)
        return 2
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in PACKAGES:
        print(f"{package:<16}{version_of(package)}")
    print(f"{'LIBERO':<16}{libero_state()}")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none (the CPU reference path is used)"
    print(f"{'CUDA device':<16}{device}")
    if not is_available("mujoco"):
        return 1
    try:
        print(f"{'rendering':<16}{check_gl()}")
    except RuntimeError as error:
        print(f"{'rendering':<16}{error}")
        return 1
    return 0
