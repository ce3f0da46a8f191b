"""How the names "somaspeed", "somaspeed_hsdp" and "somaspeed_replicate" get into Lightning's strategy registries.

`install()` is called by `import soma_lightning` and by torch itself, through the entry point `torch.backends`, at the
end of `import torch`. The second route makes `Trainer(strategy="somaspeed")` work without importing this package; it is
a convenience, meant by torch for device back ends, and `SOMA_LIGHTNING_AUTOLOAD=0` turns it off.

Rules of this file: it imports neither torch nor lightning (torch is half loaded when it runs), and it never raises (an
error here would make `import torch` fail for everything in the environment).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from soma_lightning.imports import torch_autoload_is_off

#: Registered name -> the layout it stands for.
LAYOUT_OF_NAME = {"somaspeed": "auto", "somaspeed_hsdp": "hsdp", "somaspeed_replicate": "replicate"}

#: Module that owns a registry -> (name of the registry in it, module of our class, our class).
#: The stand-alone packages have base classes of their own: a strategy of `lightning` is none of theirs.
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "soma_lightning.strategy.trainer", "SomaSpeedStrategy"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "soma_lightning.strategy.fabric", "FabricSomaSpeedStrategy"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "", "pytorch_lightning"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "", "lightning_fabric"),
}


def install() -> None:
    """Registers our strategies in every registry that is loaded, and in the others once they are. Idempotent."""
    if torch_autoload_is_off() and _torch_is_loading():
        _forget_this_package()
        return
    try:
        for module_name in _REGISTRIES:
            module = sys.modules.get(module_name)
            if module is not None and not _is_loading(module):
                _register(module_name, module)
        if not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _RegistryFinder())
    except Exception as error:  # whatever it is, `import torch` must go on
        _warn(error)


def _warn(error: Exception) -> None:
    warnings.warn(
        f"soma_lightning could not register its strategies ({type(error).__name__}: {error}); "
        "pass an instance instead: Trainer(strategy=soma_lightning.SomaSpeedStrategy())",
        RuntimeWarning,
        stacklevel=3,
    )


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _torch_is_loading() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and _is_loading(torch)


def _forget_this_package() -> None:
    """Lets a later `import soma_lightning` run again: torch imported it although the user turned the hook off."""
    package = sys.modules.get("soma_lightning")
    installed = any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path)
    if package is None or _is_loading(package) or installed:
        return
    for name in [name for name in sys.modules if name == "soma_lightning" or name.startswith("soma_lightning.")]:
        del sys.modules[name]


def _register(module_name: str, module: ModuleType) -> None:
    registry_name, home, class_name = _REGISTRIES[module_name]
    registry = getattr(module, registry_name)
    for name, layout in LAYOUT_OF_NAME.items():
        if name not in registry:
            factory = _factory(home, class_name) if home else _refusal(class_name)
            registry.register(name, factory, description=f"SomaSpeed, layout {layout!r}", layout=layout)


def _factory(home: str, class_name: str) -> Callable[[str], Any]:
    """A callable for the registry that imports the strategy only when somebody asks for it."""

    def make(layout: str) -> Any:
        return getattr(importlib.import_module(home), class_name)(layout=layout)

    return make


def _refusal(package: str) -> Callable[[str], Any]:
    replacement = "lightning.pytorch" if package == "pytorch_lightning" else "lightning.fabric"

    def make(layout: str) -> Any:
        raise ImportError(
            f"strategy 'somaspeed' (layout {layout!r}) is written for the `lightning` package, and {package} has other "
            f"base classes; import from {replacement} instead of {package} everywhere in this program"
        )

    return make


class _RegistryFinder(importlib.abc.MetaPathFinder):
    """Finds the registry modules as everybody else does, and registers our names right after they have run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _REGISTRIES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _RegisteringLoader(spec.loader)
                return spec
        return None


class _RegisteringLoader(importlib.abc.Loader):
    """Stands in for a module's own loader during its first execution, then leaves."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            _register(module.__name__, module)
        except Exception as error:  # a changed registry must not break `import lightning`
            _warn(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
