"""Everything that the documents show runs: Python blocks, commands, configurations, links, tables of arguments.

Python blocks of one document run in order, in one namespace, in a temporary folder that holds what the documents name:
small recordings and a small policy under the paths of `PREPARED`. Readers do not see these HTML comments, which stand
before a block or a table:

    <!-- docs-test: file NAME -->     the block is saved as NAME, as its reader is told to
    <!-- docs-test: slow -->          the block runs in the slow tests only
    <!-- signature: PACKAGE.NAME -->  the table lists every argument of NAME with its default
    <!-- contract -->, <!-- tasks -->, <!-- tree -->   the table or tree equals what the code says
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonargparse
import numpy as np
import pytest
import torch
import yaml

from soma_lightning import contract
from soma_lightning.cli import main as soma
from soma_lightning.data import LeRobotWriter
from soma_lightning.envs.somatable import TASKS, SomaTable
from soma_lightning.models import PI05Config, PI05Policy, registry

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
#: Documents that have nothing to run; every other one must have a block that is checked here.
PROSE = {"CONTRIBUTING.md", "CHANGELOG.md", "docs/numerics.md"}
#: What the documents name -> the prepared folder that stands there.
PREPARED = {
    "outputs/demos/pick": "recording",
    "outputs/pi05_somatable/policy": "policy",
    "outputs/pi05_somatable_base/policy": "policy",
    "outputs/demo/base/policy": "policy",
    "outputs/demo/expert/policy": "policy",
}
LANGUAGES = {"python", "bash", "yaml", "text"}
BLOCK = re.compile(r"^(?:<!-- (?P<comment>[^\n]+?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.M)
TABLE = re.compile(r"^<!-- (?P<comment>.+?) -->\n\|.*\n\|[-|]+\n(?P<rows>(?:\|.*\n)+)", re.M)
LINK = re.compile(r"\[[^\]\n]+\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document; `line` is where its text begins."""

    language: str
    comment: str
    text: str
    line: int


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def blocks_of(document: Path, *languages: str) -> list[Block]:
    text = document.read_text()
    blocks = [
        Block(m["language"], m["comment"] or "", m["text"], text.count("\n", 0, m.start("text")) + 1)
        for m in BLOCK.finditer(text)
    ]
    return [block for block in blocks if not languages or block.language in languages]


def tables_of(kind: str) -> Iterator[tuple[Path, str, list[list[str]]]]:
    """(document, rest of the comment, rows of cells) of every table under a comment that starts with `kind`."""
    for document in DOCUMENTS:
        for match in TABLE.finditer(document.read_text()):
            if match["comment"].split(":")[0] == kind:
                rows = [re.split(r" *(?<!\\)\| *", row.strip("| \n")) for row in match["rows"].splitlines()]
                yield document, match["comment"].partition(": ")[2], rows


def with_blocks(*languages: str) -> list[Any]:
    return [pytest.param(d, id=name_of(d)) for d in DOCUMENTS if blocks_of(d, *languages)]


# -------------------------------------------------------------------- what is there to check


def test_every_document_is_read():
    assert {name_of(document) for document in DOCUMENTS} >= PROSE | {"README.md", "docs/main_job.md"}
    assert len(DOCUMENTS) >= 9


@pytest.mark.parametrize("document", [pytest.param(d, id=name_of(d)) for d in DOCUMENTS])
def test_every_fenced_block_is_seen_and_of_a_known_language(document: Path):
    blocks = blocks_of(document)
    assert len(re.findall(r"^ *(?:```|~~~)", document.read_text(), re.M)) == 2 * len(blocks)
    assert {block.language for block in blocks} <= LANGUAGES
    assert bool(blocks) != (name_of(document) in PROSE), "list documents without blocks in PROSE"


@pytest.mark.parametrize("document", [pytest.param(d, id=name_of(d)) for d in DOCUMENTS])
def test_relative_links_resolve(document: Path):
    for target in (match["target"] for match in LINK.finditer(document.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{target}: there is no {file}"
        assert not anchor or anchor in anchors_of(file), f"{target}: {file.name} has no such heading"


def anchors_of(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# -------------------------------------------------------------------- Python


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recording of the table's shapes and an untrained tiny policy."""
    root = tmp_path_factory.mktemp("prepared")
    image = {"dtype": "image", "shape": [64, 64, 3]}
    features = {
        "observation.images.image": image,
        "observation.images.image2": image,
        "observation.state": {"dtype": "float32", "shape": [8]},
        "action": {"dtype": "float32", "shape": [7]},
    }
    draw = np.random.default_rng(0)
    with LeRobotWriter(root / "recording", features=features) as writer:
        for _ in range(5):
            frames = {
                "observation.images.image": draw.integers(0, 256, (12, 64, 64, 3), dtype=np.uint8),
                "observation.images.image2": draw.integers(0, 256, (12, 64, 64, 3), dtype=np.uint8),
                "observation.state": draw.uniform(-0.1, 0.1, (12, 8)).astype(np.float32),
                "action": draw.uniform(-1, 1, (12, 7)).astype(np.float32),
            }
            writer.add_episode(frames, "pick up the cube")
    PI05Policy(PI05Config.tiny(), SomaTable.statistics()).save_pretrained(root / "policy")
    return {name: root / name for name in ("recording", "policy")}


@pytest.fixture
def reader(prepared: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of somebody who follows a document, with the process as it was before afterwards."""
    for place, source in PREPARED.items():
        shutil.copytree(prepared[source], tmp_path / place)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SOMA_EXT_MODULE", "")
    monkeypatch.setattr(registry, "_models", dict(registry._models))
    monkeypatch.setattr(registry, "_loaded_extensions", set())
    loaded = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - loaded:
        if getattr(sys.modules[name], "__file__", None) and Path(str(sys.modules[name].__file__)).parent == tmp_path:
            del sys.modules[name]


def run_python(document: Path, folder: Path, *, slow: bool) -> int:
    """Runs the document's Python blocks; returns how many ran."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    ran = 0
    for block in blocks_of(document, "python"):
        order, _, argument = block.comment.removeprefix("docs-test: ").partition(" ")
        assert not block.comment or order in ("file", "slow"), f"{name_of(document)}:{block.line}: {block.comment}"
        if order == "file":
            (folder / argument).write_text(block.text)
        elif order == "slow" and not slow:
            continue
        else:
            # Line numbers of the document, so that a traceback points into it.
            code = compile("\n" * (block.line - 1) + block.text, str(document), "exec")
            exec(code, namespace)
        ran += 1
    return ran


@pytest.mark.parametrize("document", with_blocks("python"))
def test_python_blocks_run(document: Path, reader: Path):
    torch.manual_seed(0)
    assert run_python(document, reader, slow=False)


# -------------------------------------------------------------------- commands and configurations


class Parsed(BaseException):
    """Raised in place of what a command would do after its options were accepted."""


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """`soma` stops with `Parsed` once its command line was read."""
    original = jsonargparse.ArgumentParser.parse_args
    depth = 0

    def parse_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            parsed = original(self, *args, **kwargs)
        finally:
            depth -= 1
        if depth == 0:
            raise Parsed
        return parsed

    monkeypatch.setattr(jsonargparse.ArgumentParser, "parse_args", parse_args)


def commands_of(text: str) -> list[list[str]]:
    """Command lines of a shell block as words, comments dropped."""
    joined = text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def check_command(words: list[str]) -> None:
    """Raises AssertionError unless the command exists and takes these options."""
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    program, rest = words[0], words[1:]
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in rest:
            pattern = rf"^{word.split('=')[0]} \?=|ifdef {word.split('=')[0]}" if "=" in word else rf"^{word}:"
            assert re.search(pattern, makefile, re.M), f"the Makefile knows no {word}"
    elif program == "soma":
        if rest == ["doctor"]:
            return
        with pytest.raises(Parsed):
            soma.main(rest)
    elif program in ("bash", "python"):
        assert (ROOT / rest[0]).is_file(), rest[0]
    elif program == "pre-commit":
        assert rest == ["install"]
    else:
        raise AssertionError(f"nothing here checks the program {program!r}")


@pytest.mark.parametrize("document", with_blocks("bash"))
@pytest.mark.usefixtures("parse_only")
def test_commands_parse(document: Path, reader: Path):
    commands = [words for block in blocks_of(document, "bash") for words in commands_of(block.text)]
    assert commands
    for words in commands:
        check_command(words)


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize(
    "command",
    [
        "soma fit --config pi05_somatabel",
        "soma fit --config pi05_somatable --model.trainig.lr 1",
        "soma eval --polizy outputs/policy --out outputs/eval",
        "soma demos --task pick --out x",
        "soma doctor --all",
        "make dmeo",
        "make demo SED=1",
        "somma fit",
    ],
)
def test_a_wrong_command_is_found(command: str):
    with pytest.raises((AssertionError, SystemExit, pytest.fail.Exception)):
        check_command(shlex.split(command))


@pytest.mark.parametrize("document", with_blocks("yaml"))
@pytest.mark.usefixtures("parse_only")
def test_configurations_are_accepted(document: Path, reader: Path):
    for block in blocks_of(document, "yaml"):
        assert isinstance(yaml.safe_load(block.text), dict)
        (reader / "config.yaml").write_text(block.text)
        with pytest.raises(Parsed):
            soma.main(["fit", "--config", "pi05_somatable", "--config", "config.yaml"])


#: Options that make a documented command small; the last value of an option counts.
SMALL = {
    "demos": ["--episodes", "2", "--workers", "1", "--image_size", "64", "--overwrite", "true"],
    "fit": ["--trainer.max_steps", "2", "--data.batch_size", "8", "--trainer.limit_val_batches", "1"],
    "eval": ["--episodes", "2", "--num_envs", "2", "--recorded", "1"],
    "compare": [],
    "ppo": [
        *("--loop.iterations", "1", "--rollout.envs_per_worker", "2", "--rollout.decisions", "2"),
        *("--evaluation.episodes", "2", "--evaluation.num_envs", "2"),
    ],
    "doctor": [],
    "data": [],
    "open-loop": [],
    "cache": ["--data.batch_size", "8", "--data.preload", "false"],
}
#: Commands that end with a signal only; their own tests start them.
STAYING = {"serve"}
#: Documents that begin with nothing: their own commands make what later ones need.
FROM_NOTHING = {"docs/main_job.md"}


@pytest.mark.slow
@pytest.mark.parametrize("document", with_blocks("python", "bash"))
def test_everything_runs_as_documented(document: Path, reader: Path, monkeypatch: pytest.MonkeyPatch):
    if name_of(document) in FROM_NOTHING:
        shutil.rmtree(reader / "outputs")
    assert run_python(document, reader, slow=True) == len(blocks_of(document, "python"))
    for words in (words for block in blocks_of(document, "bash") for words in commands_of(block.text)):
        while "=" in words[0]:
            variable, _, value = words.pop(0).partition("=")
            monkeypatch.setenv(variable, value)
        if words[0] == "soma" and words[1] not in STAYING:
            # With two episodes of an untrained policy no claim can hold.
            expected = 1 if "--claim_best" in words else 0
            one_task = ["--task", "put_the_bowl_on_the_plate"] if "--protocol" in words else []
            assert soma.main([*words[1:], *SMALL[words[1]], *one_task]) == expected, words


# -------------------------------------------------------------------- tables and the tree


def parameters_of(path: str) -> dict[str, Any]:
    """Arguments of a function, method or class -> default (`inspect.Parameter.empty` for none)."""
    names = path.split(".")
    for cut in range(len(names) - 1, 0, -1):
        try:
            target: Any = importlib.import_module(".".join(names[:cut]))
        except ModuleNotFoundError:
            continue
        for name in names[cut:]:
            target = getattr(target, name)
        return {name: parameter.default for name, parameter in inspect.signature(target).parameters.items()}
    raise AssertionError(f"{path} cannot be imported")


SIGNATURES = [pytest.param(path, rows, id=path) for _, path, rows in tables_of("signature")]


@pytest.mark.parametrize(("path", "rows"), SIGNATURES)
def test_tables_list_every_argument_with_its_default(path: str, rows: list[list[str]]):
    actual = parameters_of(path)
    assert [row[0].strip("`") for row in rows] == list(actual)
    header_has_type = "soma_lightning.SomaSpeedStrategy" in path or path.endswith("FusedAdamW")
    for row in rows:
        name, shown = row[0].strip("`"), row[2 if header_has_type else 1]
        default = actual[name]
        if shown == "required":
            assert default is inspect.Parameter.empty, f"{name} has the default {default!r}"
        elif shown.startswith("`"):
            assert literal(shown.strip("`")) == default, f"{name}: the table says {shown}, the code {default!r}"
        else:  # described in words: a nested configuration
            assert hasattr(default, "__dataclass_fields__") or "factory" in repr(default), f"{name}: {default!r}"


def literal(text: str) -> Any:
    return print if text == "print" else ast.literal_eval(text)


def test_the_tiny_configuration_is_as_the_table_says():
    rows = next(rows for _, path, rows in tables_of("signature") if path.endswith("PI05Config"))
    base, tiny = PI05Config.base(), PI05Config.tiny()
    for name, _, shown, *_ in rows:
        field = name.strip("`")
        if shown == "same":
            assert getattr(tiny, field) == getattr(base, field), field
        elif shown.startswith("`"):
            assert getattr(tiny, field) == literal(shown.strip("`")), field
        else:
            width, depth = getattr(tiny, field).width, getattr(tiny, field).depth
            assert shown.startswith(f"{width} wide, {depth} layers"), field


def test_both_strategies_share_the_table():
    assert parameters_of("soma_lightning.FabricSomaSpeedStrategy") == parameters_of("soma_lightning.SomaSpeedStrategy")


def test_the_contract_is_as_the_table_says():
    ((_, _, rows),) = tables_of("contract")
    shown = [(key.strip("`"), shape.strip("`"), dtype) for key, shape, dtype, *_ in rows]
    assert shown == [(field.key, field.shape, field.dtype) for field in contract.TRAINING_BATCH]


def test_the_tasks_are_as_the_table_says():
    ((_, _, rows),) = tables_of("tasks")
    shown = [(name.strip("`"), instruction, int(steps)) for name, instruction, steps, _ in rows]
    assert shown == [(task.name, task.instruction, task.max_steps) for task in TASKS.values()]


def test_the_tree_is_the_tree():
    (block,) = (b for b in blocks_of(ROOT / "docs/architecture.md") if b.comment == "tree")
    folders: list[str] = []
    listed = set()
    for line in block.text.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders = [*folders[:depth], name]
        path = "".join(folders) if depth else name
        assert (ROOT / path).exists(), path
        assert len(line.split()) > 1 or name.endswith("/"), f"{path} has no description"
        listed.add(path.rstrip("/"))
    for package in ("soma_lightning", "kernels/soma_kernels"):
        there = {p.relative_to(ROOT).as_posix() for p in (ROOT / package).iterdir() if p.name != "__pycache__"}
        assert there - {"kernels/soma_kernels/__init__.py"} <= listed, "docs/architecture.md lacks these"
    code = {p.parent.relative_to(ROOT).as_posix() for p in (ROOT / "soma_lightning").rglob("*.py")}
    assert code <= listed, "docs/architecture.md lacks these folders"
