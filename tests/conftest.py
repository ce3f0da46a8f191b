"""Every test starts from the same random state, and kernels run everywhere: compiled on a GPU, else interpreted."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# Triton reads it when it is imported, so it is set before any test module is.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (the global state is what tests must not inherit)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where Triton's kernels run: the CPU in the interpreter, and a GPU. A test that takes it runs on both."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "cpu":
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("kernels run on the CPU only with TRITON_INTERPRET=1")
    return torch.device(request.param)


ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    return lambda function, **settings: ranks_run(function, tmp_path_factory.mktemp("ranks"), **settings)


def ranks_run(
    function: Callable[..., Any], folder: Path, *, world_size: int = 2, timeout: float = 120.0, **arguments: Any
) -> list[Any]:
    """What `function(**arguments)`, of the top level of its file, returns on each of `world_size` processes.

    AssertionError with the end of every rank's output when one fails, or when they take longer than `timeout` seconds.
    """
    processes = start_ranks(function, folder, world_size, arguments)
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
    function: Callable[..., Any], folder: Path, world_size: int, arguments: dict[str, Any]
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
            command = [sys.executable, str(ROOT / "tests" / "rank_worker.py"), function.__code__.co_filename]
            command += [function.__name__, str(folder / "arguments.pt"), str(folder / f"{rank}.pt")]
            processes.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log))
    return processes
