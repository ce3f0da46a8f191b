"""Bounded lag as arithmetic: whatever the order in which fragments end, none is too old and nobody waits in vain."""

from __future__ import annotations

import random

import pytest

from soma_lightning.rl.schedule import Schedule


def begun(schedule: Schedule, version: int) -> list[int]:
    """All fragments that may begin with weights `version`."""
    numbers = []
    while (number := schedule.begin(version)) is not None:
        numbers.append(number)
    return numbers


@pytest.mark.parametrize(("max_lag", "expected"), [(0, [0, 1, 2]), (1, list(range(6))), (2, list(range(9)))])
def test_the_first_weights_serve_so_many_fragments(max_lag: int, expected: list[int]):
    schedule = Schedule(3, max_lag)
    schedule.credit = 100
    assert begun(schedule, 0) == expected
    assert schedule.upcoming == (len(expected), 1)
    assert begun(schedule, 1) == [expected[-1] + n for n in (1, 2, 3)]


def test_nothing_begins_without_credit():
    schedule = Schedule(2, 1)
    assert begun(schedule, 0) == []
    schedule.credit = 1
    assert begun(schedule, 0) == [0]


def test_a_lost_fragment_begins_again_under_its_number():
    schedule = Schedule(2, 0)
    schedule.credit = 2
    assert begun(schedule, 0) == [0, 1]
    schedule.lose(0)
    assert begun(schedule, 0) == [0]
    schedule.withdraw()
    schedule.lose(1)
    assert begun(schedule, 0) == []
    schedule.credit = 1
    assert begun(schedule, 0) == [1]
    schedule.lose(1)
    assert begun(schedule, 0) == [1], "it was begun with new credit"


def test_a_place_is_kept_for_an_older_fragment_that_still_runs():
    schedule = Schedule(1, 1)
    schedule.credit = 10
    assert begun(schedule, 0) == [0, 1]
    schedule.finish(1, 0)
    assert schedule.may_take(1, 0), "number 0 may be used in the next update"
    schedule.take(1)
    assert begun(schedule, 1) == [2]
    schedule.finish(2, 1)
    assert not schedule.may_take(2, 1), "it is now or never for number 0"
    schedule.lose(0)
    assert schedule.may_take(2, 1)


def test_completion_decides_as_long_as_a_place_is_left_for_the_older_one():
    schedule = Schedule(2, 1)
    schedule.credit = 10
    assert begun(schedule, 0) == [0, 1, 2, 3]
    for number in (1, 2):
        schedule.finish(number, 0)
        schedule.take(number)
    assert begun(schedule, 1) == [4, 5]
    schedule.finish(3, 0)
    schedule.take(3)
    schedule.finish(4, 1)
    assert not schedule.may_take(4, 1), "update 1 has one place left, for number 0"
    schedule = Schedule(3, 1)
    schedule.credit = 10
    assert begun(schedule, 0) == [0, 1, 2, 3, 4, 5]
    for number in (1, 2, 3, 4):
        schedule.finish(number, 0)
        schedule.take(number)
    schedule.lose(5)
    assert begun(schedule, 1) == [5, 6, 7, 8]
    schedule.finish(5, 1)
    assert schedule.may_take(5, 1), "update 1 has two places left, and one older fragment runs"


def test_a_run_that_goes_on_counts_from_its_own_version():
    schedule = Schedule(2, 1)
    schedule.credit, schedule.first_version = 100, 40
    assert begun(schedule, 39) == []
    assert begun(schedule, 40) == [0, 1, 2, 3]


@pytest.mark.parametrize("max_lag", [0, 1, 2])
@pytest.mark.parametrize("per_update", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_events_makes_a_fragment_too_old_or_blocks(max_lag: int, per_update: int, seed: int):
    """Random workers, some very slow, some losses; every update gets its fragments, each within the lag."""
    choose = random.Random(seed)
    schedule = Schedule(per_update, max_lag)
    schedule.credit = 10**6
    running: dict[int, tuple[int, float]] = {}  # number: version, when it ends
    finished: dict[int, int] = {}
    clock = 0.0
    num_workers = min(4, (max_lag + 1) * per_update)
    for version in range(60):
        taken = 0
        while taken < per_update:
            while len(running) < num_workers and (number := schedule.begin(version)) is not None:
                running[number] = (version, clock + choose.choice([1.0, 1.5, 20.0]))
            assert len(running) + len(finished) <= (max_lag + 1) * per_update
            oldest = min(finished, key=lambda number: (finished[number], number), default=None)
            if oldest is not None and schedule.may_take(oldest, version):
                assert version - finished.pop(oldest) <= max_lag
                schedule.take(oldest)
                taken += 1
                continue
            assert running, "the learner waits and nobody works"
            number = min(running, key=lambda number: running[number][1])
            of_version, clock = running.pop(number)
            if choose.random() < 0.1:
                schedule.lose(number)
            else:
                schedule.finish(number, of_version)
                finished[number] = of_version
