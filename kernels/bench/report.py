"""What every published figure carries: the machine, the versions, the commit, the command; as JSON and Markdown."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def current_commit() -> str:
    """Short commit of this repository, with "+changes" when tracked files differ from it.

    ValueError outside a git repository: a figure without its commit is not published.
    """
    try:
        head = _output("git", "rev-parse", "--short", "HEAD")
        changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError("the commit is unknown here (no git repository); name it with --commit") from error
    return head + ("+changes" if changed else "")


def available_device(name: str) -> torch.device:
    """The device of that name; ValueError if this machine has none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name} is no device; use cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name} is not measured here; use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; use cpu")
    return device


def make_folder(path: Path) -> None:
    """Creates the folder of the results before anything is measured; ValueError if it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {path} cannot be a folder for results: {error.strerror}") from error


def environment(device: torch.device, *, commit: str, command: str) -> dict[str, str]:
    """Facts under which a run measures; versions of what is not installed are left out."""
    facts = {"device": platform.processor() or platform.machine(), "date": _today(), "commit": commit}
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        facts["cuda"] = str(torch.version.cuda)
    facts["python"] = platform.python_version()
    for package in ("torch", "triton", "lightning"):
        try:
            facts[package] = torch.__version__ if package == "torch" else version(package)
        except PackageNotFoundError:
            continue
    return {**facts, "command": command}


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _output(*command: str) -> str:
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def significant(value: float) -> float:
    """`value` with five significant digits: what a clock is worth in a JSON file."""
    return float(f"{value:.5g}")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` with one line for each field and each element of a list of objects."""
    fields = [f" {json.dumps(key)}: {_value(value)}" for key, value in content.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join("  " + json.dumps(item, allow_nan=False) for item in value) + "\n ]"
    return json.dumps(value, allow_nan=False)


def write_text(path: Path, text: str) -> None:
    """Writes `text` and makes the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str:
    """A Markdown table: `text_columns` columns of text, then numbers. ValueError for a row of another length."""
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row has {len(row)} cells under {len(headers)} headers: {list(row)}")
    rule = ["---"] * text_columns + ["---:"] * (len(headers) - text_columns)
    return "\n".join("| " + " | ".join(line) + " |" for line in [headers, rule, *rows])


def measured_on(facts: Mapping[str, str]) -> str:
    """One paragraph and the command, for the top of a page."""
    versions = ", ".join(
        f"{key} {facts[key]}" for key in ("driver", "cuda", "python", "torch", "triton", "lightning") if key in facts
    )
    count = facts.get("devices", "one")
    place = f"Measured on {facts['date']} on {count} {facts['device']} ({versions}), commit {facts['commit']}."
    return f"{place}\n\n```bash\n{facts['command']}\n```"
