"""How one rank runs checks of a test file: `python test_x.py FOLDER RANK WORLD DEVICE NAME ...`, over gloo or NCCL.

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
    """Calls the named checks on this rank; writes what happened to FOLDER/RANK.json: name -> "ok" or a traceback."""
    folder, rank, world, device = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT),
    )
    outcomes: dict[str, str] = {}
    for name in sys.argv[5:]:
        torch.manual_seed(0)
        try:
            checks[name]()
            dist.barrier()
            outcomes[name] = "ok"
        except BaseException:
            outcomes[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        if outcomes[name] != "ok":
            sys.exit(1)
    dist.destroy_process_group()
