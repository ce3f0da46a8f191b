"""One rank of a test: python rank_worker.py FILE FUNCTION ARGUMENTS RESULT runs FUNCTION(**arguments) of a test file.

RANK and WORLD_SIZE are in the environment, as torchrun leaves them.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch


def main(file: str, function: str, arguments: str, result: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    returned = getattr(module, function)(**torch.load(arguments, weights_only=False))
    torch.save(returned, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
