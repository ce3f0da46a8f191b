"""The `soma` command: picks a subcommand and loads only what that one needs."""

from __future__ import annotations

import difflib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

from soma_lightning import __version__

#: name -> (module with `main(argv) -> int`, one line of help)
COMMANDS = {
    "fit": ("soma_lightning.cli.fit", "train a policy from a config file"),
    "validate": ("soma_lightning.cli.fit", "run the validation loop of a config file"),
    "test": ("soma_lightning.cli.fit", "run the test loop of a config file"),
    "predict": ("soma_lightning.cli.fit", "run the predict loop of a config file"),
    "ppo": ("soma_lightning.cli.ppo", "improve a policy by reinforcement learning"),
    "demos": ("soma_lightning.cli.demos", "record demonstrations of a scripted expert"),
    "data": ("soma_lightning.cli.data", "describe, check and draw a data set"),
    "eval": ("soma_lightning.cli.eval", "roll a policy out in an environment"),
    "open-loop": ("soma_lightning.cli.open_loop", "compare a policy's chunks with recorded actions"),
    "cache": ("soma_lightning.cli.cache", "compute a config's frozen features ahead of training"),
    "serve": ("soma_lightning.cli.serve", "offer a policy over the openpi websocket protocol"),
    "compare": ("soma_lightning.cli.compare", "compare evaluations with their intervals"),
    "doctor": ("soma_lightning.cli.doctor", "say what this machine has and what is missing"),
}
LIGHTNING_COMMANDS = ("fit", "validate", "test", "predict")


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, (_, text) in COMMANDS.items()]
    return (
        "usage: soma COMMAND [options]\n\n"
        + "\n".join(lines)
        + "\n\nsoma COMMAND --help says more; soma --version says which version this is."
    )


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand. Returns the exit status; 2 for a wrong command line, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"soma-lightning {__version__}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        print(f"soma: unknown command '{command}'{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    module = import_module(COMMANDS[command][0])
    if command in LIGHTNING_COMMANDS:  # Lightning handles signals itself
        return int(module.main(arguments) or 0)
    try:
        with terminated_like_interrupted():
            return int(module.main(rest) or 0)
    except KeyboardInterrupt:
        print(f"soma {command}: interrupted", file=sys.stderr)
        return 130


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the block as an exception does, so that workers are ended and half-written files removed."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
