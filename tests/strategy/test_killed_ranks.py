"""A rank that is killed with signal 9 ends the job soon, and every other rank names it last."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.ranks import start_ranks


def train_and_wait(victim: int, stuck: bool) -> None:
    """Says its process id, then trains; the survivors are in a collective, or stuck where no collective ends them.

    Without Lightning, which takes long to start.
    """
    import torch.distributed as dist

    from soma_lightning.strategy.faults import FailureWatch

    dist.init_process_group("gloo")
    FailureWatch.of_this_process(dist.get_rank(), dist.get_world_size(), os.environ["MASTER_ADDR"])
    print("process", os.getpid(), flush=True)
    if stuck or dist.get_rank() == victim:
        time.sleep(600)
    while True:
        dist.barrier()


def wait_for_ids(folder: Path, world_size: int) -> list[int]:
    """The process ids, once every rank has started."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        logs = [(folder / f"{rank}.log").read_text() for rank in range(world_size)]
        if all("process " in log for log in logs):
            return [int(log.partition("process ")[2].split()[0]) for log in logs]
        time.sleep(0.1)
    raise AssertionError("ranks did not start: " + "\n".join(logs))


@pytest.mark.parametrize(("world_size", "victim", "stuck"), [(2, 1, False), (2, 0, False), (3, 1, True)])
def test_a_killed_rank_is_named_by_the_others(tmp_path: Path, world_size: int, victim: int, stuck: bool) -> None:
    processes = start_ranks(train_and_wait, tmp_path, world_size, {"victim": victim, "stuck": stuck})
    try:
        os.kill(wait_for_ids(tmp_path, world_size)[victim], signal.SIGKILL)
        killed = time.monotonic()
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert time.monotonic() - killed < 30
    assert codes == [-signal.SIGKILL if rank == victim else 1 for rank in range(world_size)]
    for rank in set(range(world_size)) - {victim}:
        log = (tmp_path / f"{rank}.log").read_text()
        last = f"rank {rank} ends because rank {victim} failed:" if stuck else f"rank {victim} failed first:"
        assert "its process is gone without a traceback" in log[log.rindex(last) :], log[-3000:]
