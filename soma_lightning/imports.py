"""Which optional packages are here, what to install when one is missing, and which extension modules the user names."""

from __future__ import annotations

import os
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

#: Environment variable: one dotted module name or several separated by commas.
EXTENSION_VARIABLE = "SOMA_EXT_MODULE"


def extension_modules() -> tuple[str, ...]:
    """Module names in the environment variable SOMA_EXT_MODULE, in order."""
    return tuple(name.strip() for name in os.environ.get(EXTENSION_VARIABLE, "").split(",") if name.strip())


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


def torch_autoload_is_off() -> bool:
    """True when SOMA_LIGHTNING_AUTOLOAD=0 asks that `import torch` alone registers nothing."""
    return os.environ.get("SOMA_LIGHTNING_AUTOLOAD") == "0"
