"""Which optional packages are here, and what to install when one is missing."""

from __future__ import annotations

from importlib.util import find_spec

EXTRA_OF_PACKAGE = {
    "mujoco": "sim",
    "av": "data",
    "tensorboard": "log",
    "libero": "libero",
    "peft": "lora",
    "ray": "ray",
    "triton": "test",
}


def is_available(package: str) -> bool:
    """True when the top-level `package` can be imported; nothing is imported to find out."""
    return find_spec(package) is not None


def require_package(package: str, *, purpose: str) -> None:
    """Raises ImportError with the exact install command unless `package` is here.

    `purpose` completes the sentence "<package> is needed to ...".
    """
    if is_available(package):
        return
    extra = EXTRA_OF_PACKAGE.get(package)
    target = f"'soma-lightning[{extra}]'" if extra else package
    raise ImportError(f"{package} is needed to {purpose}. Install it with: pip install {target}")
