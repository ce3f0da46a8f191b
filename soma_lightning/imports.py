"""What is imported, and when: optional packages, extension modules that the user names, public names on first use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

EXTRA_OF_PACKAGE = {
    "mujoco": "sim",
    "av": "data",
    "tensorboard": "log",
    "libero": "libero",
    "peft": "lora",
    "ray": "ray",
    "websockets": "serve",
    "msgpack": "serve",
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


def lazy_names(package: str, home_of_name: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__` (PEP 562): each public name is imported when it is first used.

    home_of_name: {public name: dotted module that defines it}.
    """

    def getattribute(name: str) -> Any:
        if name in home_of_name:
            return getattr(import_module(home_of_name[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattribute, lambda: sorted(home_of_name)
