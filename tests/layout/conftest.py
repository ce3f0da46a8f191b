"""Runs a function of a test file on several gloo ranks, with a time-out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
#: Imports the test file by path and calls the function: FILE FUNCTION FOLDER RANK WORLD_SIZE.
WORKER = """
import importlib.util, sys, torch
file, function, folder, rank, world_size = sys.argv[1:]
torch.manual_seed(0)
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/rendezvous", rank=int(rank), world_size=int(world_size)
)
spec = importlib.util.spec_from_file_location("ranked", file)
sys.modules["ranked"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
torch.save(getattr(module, function)(), f"{folder}/{rank}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """`run_ranks(function, world_size=2)`: what a top-level function of a test file returns on each rank."""

    def run(function: Callable[[], Any], *, world_size: int = 2, timeout: float = 100.0) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        command = [sys.executable, "-c", WORKER, function.__code__.co_filename, function.__name__, str(folder)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
        processes = []
        for rank in range(world_size):
            with (folder / f"{rank}.log").open("wb") as log:
                own = [*command, str(rank), str(world_size)]
                processes.append(subprocess.Popen(own, env=env, cwd=ROOT, stdout=log, stderr=log))
        end = time.monotonic() + timeout
        while (
            any(p.poll() is None for p in processes) and time.monotonic() < end and not any(p.poll() for p in processes)
        ):
            time.sleep(0.05)
        for process in processes:
            process.kill()
        codes = [process.wait() for process in processes]
        logs = "\n".join(f"--- rank {r}\n{(folder / f'{r}.log').read_text()[-4000:]}" for r in range(world_size))
        assert not any(codes), f"ranks ended with {codes}\n{logs}"
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]

    return run
