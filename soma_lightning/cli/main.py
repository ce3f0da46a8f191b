"""The `soma` command: picks a subcommand and loads only what that one needs."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module

#: name -> (module with `main(argv) -> int`, one line of help)
COMMANDS = {
    "fit": ("soma_lightning.cli.fit", "train a policy from a config file"),
    "validate": ("soma_lightning.cli.fit", "run the validation loop of a config file"),
    "test": ("soma_lightning.cli.fit", "run the test loop of a config file"),
    "predict": ("soma_lightning.cli.fit", "run the predict loop of a config file"),
    "demos": ("soma_lightning.cli.demos", "record demonstrations of a scripted expert"),
    "eval": ("soma_lightning.cli.eval", "roll a policy out in an environment"),
    "compare": ("soma_lightning.cli.compare", "compare evaluations with their intervals"),
    "doctor": ("soma_lightning.cli.doctor", "say what this machine has and what is missing"),
}
LIGHTNING_COMMANDS = ("fit", "validate", "test", "predict")


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, (_, text) in COMMANDS.items()]
    return "usage: soma COMMAND [options]\n\n" + "\n".join(lines) + "\n\nsoma COMMAND --help says more."


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand. Returns the exit status; 2 for a wrong command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        print(f"soma: unknown command '{command}'{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    module = import_module(COMMANDS[command][0])
    return int(module.main(arguments if command in LIGHTNING_COMMANDS else rest) or 0)


if __name__ == "__main__":
    sys.exit(main())
