"""How one rank runs the checks of a test file: `python test_x.py FOLDER RANK WORLD`, over gloo.

A check is a function without arguments that every rank calls. A rank that fails writes its traceback and leaves, so
that its peers fail in their next collective instead of waiting.
"""

from __future__ import annotations

import datetime
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

#: Seconds until a collective gives up on a missing peer.
COLLECTIVE_TIMEOUT = 30


def run_checks(checks: Mapping[str, Callable[[], None]]) -> None:
    """Calls every check on this rank and writes what happened to FOLDER/RANK.json: name -> "ok" or a traceback."""
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT),
    )
    outcomes: dict[str, str] = {}
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            check()
            dist.barrier()
            outcomes[name] = "ok"
        except BaseException:
            outcomes[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        if outcomes[name] != "ok":
            sys.exit(1)
    dist.destroy_process_group()
