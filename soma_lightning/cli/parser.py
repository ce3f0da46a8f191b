"""A command-line parser whose errors are one line and name the nearest option."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NoReturn, get_type_hints

from jsonargparse import ActionYesNo, ArgumentParser

UNKNOWN_OPTION = (
    re.compile(r"does not accept option '([^']+)'"),
    re.compile(r"Option '([^']+)' is not accepted"),
    re.compile(r"[Uu]nrecognized arguments: --([^\s=]+)"),
    re.compile(r"Key '([^']+)' is not expected"),
)

#: What a constructor said, inside jsonargparse's account of every type that it tried.
CAUSE = re.compile(r"Problem with given class_path '([^']+)':\n(.*?)\n\s*- Expected", re.DOTALL)
#: The same when the class is built after parsing: `LightningModule or None` fits neither.
UNION_CAUSE = re.compile(
    r"any of the Union subtypes.*?Errors:\n\s*- (.*?)\n\s*- Expected a <class 'NoneType'>", re.DOTALL
)
#: The same of a dataclass beside simpler types, as in `str | bool | ImageAugmentation`.
LAST_CAUSE = re.compile(
    r"any of the Union subtypes.*?Errors:\n(?:\s*- Expected a <class '[^']+'>\n)+\s*- (?!Expected a <class)(.*?)"
    r"\n\s*Given value type",
    re.DOTALL,
)


def options_of(class_path: str) -> list[str]:
    """Names of a class's constructor arguments, with `argument.field` for those that are dataclasses."""
    module, _, name = class_path.rpartition(".")
    try:
        cls = getattr(import_module(module), name)
        hints = get_type_hints(cls.__init__)
    except (ImportError, AttributeError, ValueError, NameError, TypeError):
        return []
    names = [parameter for parameter in inspect.signature(cls).parameters]
    for argument, hint in hints.items():
        if dataclasses.is_dataclass(hint):
            names += [f"{argument}.{field.name}" for field in dataclasses.fields(hint)]
    return names


def explain(message: str, known: Iterable[str]) -> str:
    """The unknown option with its nearest relatives; other messages unchanged."""
    for pattern in UNKNOWN_OPTION:
        found = pattern.search(message)
        if found is None:
            continue
        option = found.group(1)
        candidates = set(known)
        for class_path in re.findall(r"class_path '?([\w.]+)'?", message):
            candidates.update(options_of(class_path))
        group = re.search(r"Group '([^']+)'", message)
        prefix = f"{group.group(1)}." if group else ""
        near = difflib.get_close_matches(prefix + option, candidates, 3, 0.5)
        near = near or difflib.get_close_matches(option.split(".")[0], candidates, 1)
        hint = f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
        return f"unknown option '{prefix}{option}'{hint}"
    cause = CAUSE.search(message)
    if cause is not None:
        return f"{cause.group(1)}: {textwrap.dedent(cause.group(2)).strip()}"
    union_cause = UNION_CAUSE.search(message) or LAST_CAUSE.search(message)
    # The cause may be another union's: that of an argument inside that of its class.
    return explain(textwrap.dedent(union_cause.group(1)).strip(), known) if union_cause else message


class ShortErrors:
    """Mixin of jsonargparse parsers: one line of error; the full list of options is one `--help` away."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        source: Any = getattr(ex, "subcommand_parser", None) or self
        parsers: tuple[Any, ...] = (source, self)
        known = {action.dest for parser in parsers for action in parser._actions}
        print(f"error: {explain(message, known)}\n{self.help_command(source)} lists every option.", file=sys.stderr)
        sys.exit(2)

    def help_command(self, source: Any) -> str:
        """The command that lists the options of `source`, the parser that found the error."""
        return f"{source.prog} --help"


class CommandParser(ShortErrors, ArgumentParser):
    """The parser of one command: whole option names only, short errors."""

    def __init__(self, command: str = "", description: str | None = None, **options: Any) -> None:
        """options: what jsonargparse builds the parsers of nested classes with."""
        super().__init__(**{"prog": f"soma {command}", "description": description, "allow_abbrev": False, **options})

    def add_tasks(self, help_text: str, *, required: bool = False) -> None:
        """`--task NAME`, repeated for several; the parsed name is `task`, a list."""
        self.add_argument("--task", action="append", type=str, required=required, help=f"{help_text}; repeatable")

    def add_overwrite(self, help_text: str) -> None:
        """`--overwrite`, bare or with true/false."""
        self.add_argument("--overwrite", action=ActionYesNo, nargs="?", default=False, help=help_text)
