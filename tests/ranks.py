"""Runs a function of a test file on several processes, as torchrun would, and brings back what it returned.

As a script it is one of them: python ranks.py FILE FUNCTION ARGUMENTS RESULT DEVICE.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[1]

#: Seconds until a collective gives up on a missing peer, in the group that a device asks for.
COLLECTIVE_TIMEOUT = 60


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters; every rank calls it."""
    named = module.named_parameters()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named}


def ranks_run(
    function: Callable[..., Any],
    folder: Path,
    *,
    world_size: int = 2,
    timeout: float = 240.0,
    arguments: dict[str, Any] | None = None,
    device: str | None = None,
) -> list[Any]:
    """What `function(**arguments)`, of the top level of its file, returns on each of `world_size` processes.

    device: "cpu" or "cuda": the process group is there when it is called; None: it makes one itself, or Lightning does.
    AssertionError with the end of every rank's output when one fails, or when they take longer than `timeout` seconds.
    """
    processes = start_ranks(function, folder, world_size, arguments or {}, device)
    end = time.monotonic() + timeout
    try:
        while any(p.poll() is None for p in processes):
            if time.monotonic() > end or any(p.poll() for p in processes):
                time.sleep(3)  # the others may have something to say
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
    codes = [p.wait() for p in processes]
    if any(codes):
        output = "\n".join(f"--- rank {r}\n{(folder / f'{r}.log').read_text()[-6000:]}" for r in range(world_size))
        raise AssertionError(f"ranks ended with {codes}\n{output}")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def start_ranks(
    function: Callable[..., Any],
    folder: Path,
    world_size: int,
    arguments: dict[str, Any],
    device: str | None = None,
) -> list[subprocess.Popen[bytes]]:
    """The processes, started as torchrun would; rank r writes r.log and r.pt into `folder`."""
    torch.save(arguments, folder / "arguments.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "test"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    path = f"{ROOT}:{ROOT / 'kernels'}"
    processes = []
    for rank in range(world_size):
        own = {"RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": path}
        environment = os.environ | {name: str(value) for name, value in (shared | own).items()}
        with (folder / f"{rank}.log").open("wb") as log:
            command = [sys.executable, __file__, function.__code__.co_filename]
            command += [function.__name__, str(folder / "arguments.pt"), str(folder / f"{rank}.pt"), device or ""]
            processes.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log))
    return processes


def run_one_rank(file: str, function: str, arguments: str, result: str, device: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if device:
        join(device)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    returned = getattr(module, function)(**torch.load(arguments, weights_only=False))
    torch.save(returned, result)
    if device:
        dist.destroy_process_group()


def join(device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT))


if __name__ == "__main__":
    run_one_rank(*sys.argv[1:])
