"""Starts the ranks of a test file whose checks need several processes, once for the whole file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Seconds for all checks of a file together; a rank that is still there afterwards is killed.
FILE_TIMEOUT = 150


def _run(file: Path, names: Sequence[str], world: int, device: str, folder: Path) -> list[dict[str, str]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    logs = [(folder / f"{rank}.log").open("w") for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(file), str(folder), str(rank), str(world), device, *names],
            env=env,
            stdout=log,
            stderr=log,
            cwd=ROOT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process in ranks:
            process.wait(FILE_TIMEOUT)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    results = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(result.read_text()) if result.exists() else {} for result in results]


@pytest.fixture(scope="module")
def passes_on_all_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], None]:
    """Runs the module's NAMES among the checks of test_ranks.py, on WORLD ranks of DEVICE.

    Fails the test if the check of this name, or one before it, failed on a rank.
    """
    module, folder = request.module, tmp_path_factory.mktemp("ranks")
    file = Path(__file__).with_name("test_ranks.py")
    outcomes = _run(file, module.NAMES, module.WORLD, module.DEVICE, folder)

    def assert_ok(name: str) -> None:
        for rank, outcome in enumerate(outcomes):
            result = outcome.get(name)
            if result is None:
                pytest.fail(f"rank {rank} did not come to {name!r}:\n{(folder / f'{rank}.log').read_text()[-3000:]}")
            assert result == "ok", f"rank {rank}:\n{result}"

    return assert_ok
