"""Imports point one way: each layer may import itself and what lies to its left."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (
    ("soma_kernels",),
    ("attention", "frozen_layers", "optim", "layout", "contract", "imports", "compat", "locks", "_autoload"),
    ("models", "strategy"),
    ("modules", "data"),
    ("envs",),
    ("rl", "evaluation", "serving", "plots"),
    ("cli",),
)
LAYER_OF = {name: index for index, names in enumerate(LAYERS) for name in names}
#: Pairs on one layer that may not import each other either.
FORBIDDEN = {("strategy", "models"), ("models", "strategy"), ("modules", "strategy"), ("strategy", "modules")}


def part_of(module: str) -> str | None:
    """'soma_lightning.models.flow' -> 'models'; None for modules outside our packages and for the lazy root."""
    names = module.split(".")
    if names[0] == "soma_kernels":
        return "soma_kernels"
    return names[1] if names[0] == "soma_lightning" and len(names) > 1 else None


def imported_modules(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(
                f"{node.module}.{alias.name}" if node.module == "soma_lightning" else node.module
                for alias in node.names
            )
    return found


def wrong_arrows(source: str, part: str) -> list[str]:
    wrong = []
    for module in sorted(imported_modules(ast.parse(source))):
        other = part_of(module)
        if other is None or other == part or other not in LAYER_OF:
            continue
        if LAYER_OF[other] > LAYER_OF[part] or (part, other) in FORBIDDEN:
            wrong.append(f"{part} imports {module}")
    return wrong


def our_files() -> list[tuple[str, Path]]:
    files = []
    for path in sorted([*ROOT.glob("soma_lightning/**/*.py"), *ROOT.glob("kernels/soma_kernels/**/*.py")]):
        relative = path.relative_to(ROOT)
        part = "soma_kernels" if relative.parts[0] == "kernels" else relative.parts[1].removesuffix(".py")
        files.append((part, path))
    return files


def test_every_part_has_a_layer():
    unknown = {part for part, _ in our_files()} - set(LAYER_OF) - {"__init__", "__main__"}
    assert not unknown, f"give these parts a place in LAYERS: {sorted(unknown)}"


def test_imports_point_left():
    wrong = [
        f"{path.relative_to(ROOT)}: {arrow}"
        for part, path in our_files()
        if part in LAYER_OF
        for arrow in wrong_arrows(path.read_text(), part)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("models", "from soma_lightning.data.lerobot import X"),
        ("strategy", "import soma_lightning.models.flow"),
        ("soma_kernels", "from soma_lightning import contract"),
    ],
)
def test_a_wrong_arrow_is_found(part: str, line: str):
    assert wrong_arrows(line, part)


@pytest.mark.parametrize("folder", ["kernels", "recipes", "tests", "notebooks"])
def test_folders_that_must_not_be_packages(folder: str):
    assert not (ROOT / folder / "__init__.py").exists()
