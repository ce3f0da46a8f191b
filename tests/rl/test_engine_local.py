"""The engine with processes: concurrency, bounded lag, every failure of processes, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from soma_lightning.rl.engine_local import LocalEngine
from soma_lightning.rl.rollout_process import rollout_environment

sys.path.insert(0, str(Path(__file__).parent))  # rollout processes take it over and import the module by name
import collectors  # type: ignore[import-not-found]  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
Make = Callable[..., LocalEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Builds engines. At the end: no process, thread, descriptor or shared memory of theirs is left."""
    engines: list[LocalEngine] = []
    gc.collect()  # what earlier tests left in cycles is closed now, or with it, not in between
    descriptors = num_descriptors()

    def build(script: dict[str, Any] | None = None, num_workers: int = 1, **settings: Any) -> LocalEngine:
        settings = {"fragments_per_update": 1, "arena_bytes": 2**22, "fragment_timeout_s": WAIT_S, **settings}
        engines.append(LocalEngine(collectors.Script(tmp_path, **(script or {})), num_workers, **settings))
        return engines[-1]

    yield build
    for engine in engines:
        engine.stop()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rollout")]
    assert not children()
    assert not collectors.named_memory()
    engines.clear()
    gc.collect()
    # multiprocessing keeps one descriptor of its resource tracker from the first process on
    assert num_descriptors() <= descriptors + 1


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> list[str]:
    """Command lines of spawned processes that this process is the parent of."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            command = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if parent == os.getpid() and "spawn_main" in command:
            found.append(command)
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def await_end(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.05)


def begin(engine: LocalEngine, credit: int) -> None:
    engine.publish(0, collectors.weights(0))
    engine.submit_fragment_credit(credit)


# -- running ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_lag", "per_update", "num_workers"), [(0, 2, 2), (1, 1, 2), (2, 1, 2)])
def test_lag_is_bounded_and_nothing_dropped(make: Make, max_lag: int, per_update: int, num_workers: int):
    """Some hundred versions: the collectors check every element of their weights against the version that they name."""
    updates = 150
    numbers: list[int] = []
    with make(None, num_workers, max_lag=max_lag, fragments_per_update=per_update) as engine:
        begin(engine, updates * per_update)
        for update in range(updates):
            for _ in range(per_update):
                with engine.next_fragment(WAIT_S) as lease:
                    assert update - max_lag <= lease.version <= update
                    assert lease.tensors["matrix"].eq(lease.version).all()
                    assert lease.tensors["payload"].eq(lease.index % 256).all()
                    assert lease.tensors["index"] == lease.index
                    assert lease.facts["role"] == "rollout"
                    assert not lease.facts["named_memory"], "so that nothing can be left behind in /dev/shm"
                    numbers.append(lease.index)
                assert engine.stats().queued <= (max_lag + 1) * per_update
            assert engine.publish(update + 1, collectors.weights(update + 1))
        stats = engine.stats()
    assert sorted(numbers) == list(range(updates * per_update))
    assert (stats.consumed, stats.stale, stats.lost, stats.restarts) == (len(numbers), 0, 0, 0)
    assert sum(stats.consumed_by_lag.values()) == len(numbers)
    assert max(stats.consumed_by_lag) <= max_lag
    assert (stats.snapshots_published, stats.snapshots_skipped) == (updates + 1, 0)
    assert stats.bytes_leased == 0


def test_collection_and_learning_overlap(make: Make):
    """Both take 250 ms a turn: 10 turns of both take hardly longer than those of one."""
    turns, pause = 10, 0.25
    with make({"sleep_s": pause}) as engine:
        begin(engine, turns + 1)
        engine.next_fragment(WAIT_S).release()
        first = time.monotonic()
        for update in range(turns):
            engine.publish(update + 1, collectors.weights(update + 1))
            with engine.next_fragment(WAIT_S):
                time.sleep(pause)
        wall = time.monotonic() - first
        stats = engine.stats()
    assert wall <= 0.65 * 2 * turns * pause
    assert stats.collecting_s >= turns * pause
    assert stats.credit_waited_s < stats.collecting_s


def test_a_fast_collector_waits_for_the_learner_within_every_bound(make: Make):
    """Credit for 50 fragments and a learner that does not take them: no more than (1 + 1) * 4 are collected. The arena
    holds three, so memory is waited for, too."""
    with make({"payload": 400_000}, 1, fragments_per_update=4, arena_bytes=2_400_000) as engine:
        begin(engine, 50)
        taken = engine.next_fragment(WAIT_S)
        while engine.stats().collected < 3:
            time.sleep(0.01)
        time.sleep(0.4)
        stats = engine.stats()
        assert stats.collected == 3
        assert stats.bytes_leased <= stats.arena_bytes
        for _ in range(2):
            engine.next_fragment(WAIT_S)
        with pytest.raises(RuntimeError, match=r"\[0\] wait for memory .* raise arena_bytes=2,400,000"):
            engine.next_fragment(WAIT_S)
        taken.release()
        for _ in range(5):
            engine.next_fragment(WAIT_S).release()
        with pytest.raises(RuntimeError, match="fragment 8 needs weights of version 1, and the newest published is 0"):
            engine.next_fragment(WAIT_S)
        assert engine.stats().memory_waited_s > 0.3
        assert engine.stats().collected == 8


def test_fragments_that_are_too_old_are_dropped_and_collected_again(make: Make):
    """Only a learner that publishes without learning gets there."""
    with make(None, 1, max_lag=0, fragments_per_update=2) as engine:
        begin(engine, 2)
        engine.next_fragment(WAIT_S).release()
        while engine.stats().queued < 1:
            time.sleep(0.01)
        engine.publish(1, collectors.weights(1))
        with engine.next_fragment(WAIT_S) as lease:
            assert (lease.index, lease.version) == (1, 1)
        assert engine.stats().stale == 1


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_killed_process_loses_one_fragment_and_is_replaced(make: Make):
    with make({"sleep_s": 0.5, "is_stubborn": True}, 2, fragments_per_update=3) as engine:
        begin(engine, 6)
        kept = engine.next_fragment(WAIT_S)
        killed = kept.facts["pid"]
        while engine._workers[kept.worker].running is None:
            time.sleep(0.01)
        os.kill(killed, signal.SIGKILL)
        numbers = [kept.index]
        for _ in range(5):
            with engine.next_fragment(WAIT_S) as lease:
                numbers.append(lease.index)
        assert sorted(numbers) == list(range(6))
        assert not is_alive(killed)
        await_end(kept.facts["simulator"])
        assert kept.tensors["payload"].eq(kept.index).all(), "its memory outlives it"
        stats = engine.stats()
        assert (stats.lost, stats.restarts, stats.consumed) == (1, 1, 6)
        kept.release()
        assert engine.stats().bytes_leased == 0


def test_every_failure_of_collecting_costs_its_fragment_and_the_run_goes_on(make: Make):
    actions = {1: "lost", 2: "raise", 3: "hang", 4: "exit"}
    with make({"actions": actions}, 1, fragments_per_update=6, fragment_timeout_s=3) as engine:
        begin(engine, 6)
        pids = []
        for number in range(6):
            with engine.next_fragment(WAIT_S) as lease:
                assert lease.index == number
                pids.append(lease.facts["pid"])
        stats = engine.stats()
        os.kill(pids[-1], signal.SIGSTOP)  # it stops answering between two fragments, with a snapshot leased
        for version in range(1, 8):
            assert engine.publish(version, collectors.weights(version))
        engine.submit_fragment_credit(1)
        with engine.next_fragment(WAIT_S) as lease:
            assert (lease.index, lease.version) == (6, 7)
        assert engine.stats().restarts == stats.restarts + 1
        assert set(engine._writer._leases) <= set(engine._workers), "no lease of a dead process remains"
    assert pids[0] == pids[1], "a lost fragment alone ends no process"
    assert len(set(pids)) == 4
    assert (stats.lost, stats.restarts, stats.consumed) == (4, 3, 6)


def test_too_many_failures_end_the_run_with_the_last_traceback(make: Make):
    with make({"actions": {0: "raise"}}, max_restarts_per_hour=0) as engine:
        begin(engine, 1)
        with pytest.raises(RuntimeError, match=r"max_restarts_per_hour=0[\s\S]*fragment 0:\n[\s\S]*failed on purpose"):
            engine.next_fragment(WAIT_S)
        with pytest.raises(RuntimeError, match="max_restarts_per_hour=0"):
            engine.publish(1, collectors.weights(1))


def test_a_collector_that_cannot_be_built_fails_at_the_start(make: Make):
    engine = make({"raises": "there is no such simulator"}, 2, fragments_per_update=2)
    with pytest.raises(RuntimeError, match=r"before it was ready[\s\S]*Traceback[\s\S]*there is no such simulator"):
        engine.start()
    assert not children()


def test_a_fragment_that_can_never_fit_is_an_error_of_its_own(make: Make):
    with make({"payload": 10_000}, arena_bytes=4_000, max_restarts_per_hour=0) as engine:
        begin(engine, 1)
        with pytest.raises(RuntimeError, match=r"can never fit into arena_bytes=4,000"):
            engine.next_fragment(WAIT_S)


def test_drain_lets_fragments_finish_or_drops_them_and_credit_can_come_again(make: Make):
    """Process 0 or 1 hangs at fragment 3; the others are kept."""
    with make({"actions": {3: "hang"}, "sleep_s": 0.1}, 2, fragments_per_update=6) as engine:
        begin(engine, 4)
        while engine.stats().collected < 3:
            time.sleep(0.01)
        assert engine.drain(0.3) == 1
        for _ in range(3):
            engine.next_fragment(WAIT_S).release()
        with pytest.raises(RuntimeError, match="no credit is left"):
            engine.next_fragment(WAIT_S)
        assert (engine.stats().lost, engine.stats().restarts) == (1, 0)
        engine.submit_fragment_credit(1)
        with engine.next_fragment(WAIT_S) as lease:
            assert lease.index == 3
        assert engine.drain(WAIT_S) == 0


def test_an_error_of_the_learner_passes_through_and_ends_everything(make: Make, tmp_path: Path):
    with pytest.raises(ZeroDivisionError), make(None, 2, fragments_per_update=2) as engine:  # noqa: PT012
        begin(engine, 4)
        held = engine.next_fragment(WAIT_S)
        while engine.stats().collected < 4:
            time.sleep(0.01)
        with pytest.raises(ValueError, match=r"missing \['count', 'half'\]"):
            engine.publish(1, {"matrix": torch.zeros(300, 301)})
        with pytest.raises(ValueError, match="version 0 must be above the published version, 0"):
            engine.publish(0, collectors.weights(0))
        while engine.stats().collected < 4:  # what is still at work at the end is killed, and closes nothing
            time.sleep(0.01)
        _ = 1 / 0
    assert not children()
    assert held.tensors["matrix"].eq(0).all(), "what is held stays readable"
    held.release()
    assert engine.worker_pids == [None, None]
    engine.stop()
    with pytest.raises(RuntimeError, match="not running"):
        engine.next_fragment(WAIT_S)
    with pytest.raises(RuntimeError, match="started once"):
        engine.start()
    assert len(list(tmp_path.glob("closed_*"))) == 2, "idle processes close their collectors"


PARENT = """
import sys
sys.path.insert(0, {folder!r})
import collectors, pathlib, time
from soma_lightning.rl.engine_local import LocalEngine

if __name__ == "__main__":
    script = collectors.Script(pathlib.Path({tmp!r}), {{1: {action!r}}})
    engine = LocalEngine(script, 1, fragments_per_update=1, arena_bytes=2**22)
    engine.start()
    engine.publish(0, collectors.weights(0))
    engine.submit_fragment_credit(2)
    lease = engine.next_fragment(60)
    print(lease.facts["pid"], lease.facts["simulator"], flush=True)
    {then}
"""


def run_parent(tmp_path: Path, action: str, then: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A learner's process in a state that it does not clean up, and the pids of its rollout process and simulator."""
    text = PARENT.format(folder=str(Path(__file__).parent), tmp=str(tmp_path), action=action, then=then)
    (tmp_path / "parent.py").write_text(text)
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    return parent, [int(pid) for pid in parent.stdout.readline().split()]


@pytest.mark.parametrize("action", ["hang", "stop"])
def test_a_killed_learner_takes_its_processes_with_it(tmp_path: Path, action: str):
    """Even one that is in the middle of a fragment, or stopped."""
    parent, pids = run_parent(tmp_path, action, "time.sleep(600)")
    assert [is_alive(pid) for pid in pids] == [True, True]
    parent.kill()
    parent.wait(WAIT_S)
    for pid in pids:
        await_end(pid)


def test_a_learner_that_forgets_to_stop_still_exits(tmp_path: Path):
    parent, pids = run_parent(tmp_path, "lost", "pass")
    assert parent.wait(WAIT_S) == 0
    assert [is_alive(pid) for pid in pids] == [False, False]


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 0}, "num_workers=0 must be at least 1"),
        ({"fragments_per_update": 0}, "fragments_per_update=0 must be at least 1"),
        ({"arena_bytes": 0}, "arena_bytes=0 must be at least 1"),
        ({"max_lag": 3}, "max_lag=3 must be 0, 1 or 2"),
        ({"num_workers": 3}, r"num_workers=3 can never work at once.* = 2 fragments"),
        ({"fragment_timeout_s": 0.0}, "fragment_timeout_s=0 above 0"),
        ({"environment": [{}, {}]}, "environment has variables of 2 processes, num_workers=1"),
    ],
)
def test_settings_that_cannot_work_are_named(make: Make, settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make(None, **settings)


def test_a_recipe_that_cannot_be_pickled_is_refused_at_once():
    with pytest.raises(TypeError, match="make_collector must be picklable"):
        LocalEngine(lambda worker: None, 1, fragments_per_update=1)  # type: ignore[arg-type, return-value]


def test_a_rollout_process_is_no_rank_of_the_learners_job():
    inherited = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "TORCHELASTIC_RUN_ID": "x", "LT_DEVICES": "2"}
    inherited |= {"PL_GLOBAL_SEED": "0", "LOCAL_RANK": "1", "PATH": "/bin", "SOMA_EXT_MODULE": "mine"}
    own = {"CUDA_VISIBLE_DEVICES": "3"}
    expected = {"PATH": "/bin", "SOMA_EXT_MODULE": "mine", "SOMA_ROLE": "rollout", "SOMA_WORKER": "2", **own}
    assert rollout_environment(inherited, 2, own) == expected
