"""Starts the ranks of a test file whose checks need several processes, once for the whole file."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ranks import ranks_run

#: Seconds for all checks of a file together; a rank that is still there afterwards is killed.
FILE_TIMEOUT = 150


@pytest.fixture(scope="module")
def passes_on_all_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], None]:
    """Runs the module's NAMES among the checks of test_ranks.py, on WORLD ranks of DEVICE.

    Fails the test if the check of this name, or one before it, failed on a rank.
    """
    from tests.optim.test_ranks import run_checks

    module = request.module
    outcomes = ranks_run(
        run_checks,
        tmp_path_factory.mktemp("ranks"),
        world_size=module.WORLD,
        timeout=FILE_TIMEOUT,
        arguments={"names": module.NAMES, "device": module.DEVICE},
        device=module.DEVICE,
    )

    def assert_ok(name: str) -> None:
        for rank, outcome in enumerate(outcomes):
            if name not in outcome:
                pytest.fail(f"rank {rank} did not come to {name!r}:\n{list(outcome.values())[-1]}")
        failed = [f"rank {rank}:\n{outcome[name]}" for rank, outcome in enumerate(outcomes) if outcome[name] != "ok"]
        assert not failed, "\n".join(failed)

    return assert_ok
