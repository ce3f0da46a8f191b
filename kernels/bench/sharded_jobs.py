"""How are the ranks of one contender started, watched and brought back? A process each, so that no memory is shared.

The processes of the next contender load their libraries while this one is measured; they touch no device before it is
their turn. A contender that fails is a row that says why, and the others go on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.report import ROOT
from bench.sharded_worker import Job

#: Starts a rank; the paths of its job and of its result follow.
WORKER = (sys.executable, "-m", "bench.sharded_worker")
#: No multicast over NVLink: where hosts are shared, it can put GPUs out of service.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
#: Seconds that one contender may take from its turn on.
JOB_SECONDS = 150.0
#: Characters of a reason on the page.
REASON_LENGTH = 200

Reports = list[dict[str, Any]]


class Ranks:
    """The processes of one job. place: the first device that it uses."""

    def __init__(self, job: Job, folder: Path, place: int = 0) -> None:
        self.job, self._folder = job, folder
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
        port = _free_port()
        self._processes = [self._start(rank, _environment(job, rank, place, port)) for rank in range(job.world)]

    def _start(self, rank: int, environment: dict[str, str]) -> subprocess.Popen[str]:
        command = [*WORKER, str(self._folder / "job.json"), str(self._folder / f"{rank}.json")]
        with self._log(rank).open("w", encoding="utf-8") as log:
            return subprocess.Popen(
                command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True
            )

    def _log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"

    def go(self) -> None:
        """Their turn: they begin as soon as they are loaded."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write("go\n")
                process.stdin.close()
            except BrokenPipeError:  # it died while loading; `finish` finds out why
                continue

    def finish(self, seconds: float) -> Reports | str:
        """What the ranks wrote, or why there is nothing."""
        end = time.monotonic() + seconds
        while not self._failed() and any(p.poll() is None for p in self._processes):
            if time.monotonic() > end:
                self.stop()
                return f"not done after {seconds:.0f} s"
            time.sleep(0.05)
        if failed := self._failed():
            time.sleep(2.0)  # the others may have something to say
            self.stop()
            reasons = [_last_error(self._log(r).read_text(errors="replace")) for r in range(len(self._processes))]
            return next((reason for reason in reasons if reason), failed)
        return [json.loads((self._folder / f"{rank}.json").read_text()) for rank in range(self.job.world)]

    def _failed(self) -> str | None:
        """Which rank has ended with an error by now, and how."""
        for rank, process in enumerate(self._processes):
            if code := process.poll():
                return f"rank {rank} ended: {f'signal {signal.Signals(-code).name}' if code < 0 else f'status {code}'}"
        return None

    def stop(self) -> None:
        """Ends what still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()


def _last_error(log: str) -> str:
    """The message of the first traceback in a log, shortened; "" without one."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in log.splitlines()]
    start = next((i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")), len(lines))
    for line in lines[start + 1 :]:
        if line and not line.startswith((" ", "\t")):
            return line[:REASON_LENGTH]
    return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(job: Job, rank: int, place: int, port: int) -> dict[str, str]:
    """As torchrun sets it; a job of one process gets the device at `place` and no ranks."""
    environment = {**NO_MULTICAST, **os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        environment.pop(name, None)
    if job.world == 1:
        if job.device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = _visible_device(place)
        return environment
    shared = {"WORLD_SIZE": job.world, "LOCAL_WORLD_SIZE": job.world, "GROUP_RANK": 0, "MASTER_PORT": port}
    own = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "sharded"}
    return environment | {name: str(value) for name, value in (shared | own).items()}


def _visible_device(place: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[place] if visible else str(place)


def run_waves(
    waves: Sequence[Sequence[Job]], folder: Path, seconds: float, say: Callable[[str], None]
) -> dict[tuple[str, str], Reports | str]:
    """Runs the jobs of a wave side by side, one wave after the other: {(model, contender): reports or a reason}.

    seconds: no wave begins after so many.
    """
    end = time.monotonic() + seconds
    results: dict[tuple[str, str], Reports | str] = {}
    loading: list[Ranks] = []

    def load(index: int) -> list[Ranks]:
        jobs = enumerate(waves[index]) if index < len(waves) else ()
        return [Ranks(job, folder / f"{index}_{place}", place) for place, job in jobs]

    try:
        loading = load(0)
        for index, wave in enumerate(waves):
            present, loading = loading, []
            if time.monotonic() > end:
                for ranks in present:
                    ranks.stop()
                late = f"not started: the {seconds:.0f} s of --seconds were over"
                results.update({(job.model, job.contender): late for rest in waves[index:] for job in rest})
                break
            say(" and ".join(f"{job.model}: {job.contender}" for job in wave))
            for ranks in present:
                ranks.go()
            loading = load(index + 1)
            for ranks in present:
                results[ranks.job.model, ranks.job.contender] = ranks.finish(JOB_SECONDS)
    finally:
        for ranks in loading:
            ranks.stop()
    return results
