"""A wheel built from the tree works outside the clone, recipes included."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tracked files, so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (source / name).symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).exists():
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    subprocess.run(command, cwd=source, check=True)
    return next(folder.glob("*.whl"))


def test_wheel_holds_our_packages_and_nothing_else(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"soma_lightning", "soma_kernels"}
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("soma_lightning/**/*.py")}
    assert modules <= set(names)
    recipes = {f"soma_lightning/{path.relative_to(ROOT)}" for path in (ROOT / "recipes").rglob("*") if path.is_file()}
    assert recipes
    assert recipes <= set(names)
    assert "soma_lightning/py.typed" in names
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry_points).decode()
    assert "soma = soma_lightning.cli.main:main" in text
    assert "soma_lightning = soma_lightning._autoload:install" in text


def test_installed_wheel_finds_its_recipes_outside_the_clone(wheel: Path, tmp_path: Path):
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True)
    # -P leaves the working directory out; the source tree may be installed here too, so the wheel must come first.
    line = "import soma_lightning, sys; from soma_lightning.cli.main import main; print(soma_lightning.__file__); "
    line += "main(['fit', '--config', 'pi05_somatable', '--print_config'])"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run(
        [sys.executable, "-P", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0].startswith(str(site))
    assert "class_path: soma_lightning.modules.PI05Module" in run.stdout
