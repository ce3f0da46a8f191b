"""Which fragment may begin, and which may the learner take? The arithmetic of bounded lag, without any process.

Fragment number n may begin with weights of version n // F - max_lag or newer, F fragments an update. So at most
(w + max_lag + 1) F fragments ever begin with version w or older, and the updates up to number w + max_lag have just
that many places. None is ever too old if the learner, before it takes a newer fragment, keeps places for the older ones
that are still under way: what schedulers call earliest deadline first, the deadline being the version plus max_lag.
"""

from __future__ import annotations

import heapq


class Schedule:
    """Counts credits and fragments. Numbers of lost fragments are given out again, the lowest first."""

    def __init__(self, fragments_per_update: int, max_lag: int) -> None:
        self.fragments_per_update, self.max_lag = fragments_per_update, max_lag
        self.credit = 0
        self.consumed = 0
        self.first_version = 0  # a resumed run goes on with its own count of versions
        self._next = 0
        self._again: list[int] = []
        self._withdrawn: set[int] = set()  # under way without credit to come back
        self._under_way: dict[int, int] = {}  # version at least, by number; from the beginning until it is taken

    @property
    def num_under_way(self) -> int:
        """Fragments that have begun and were neither taken nor lost."""
        return len(self._under_way)

    @property
    def upcoming(self) -> tuple[int, int]:
        """(number, oldest version allowed) of the fragment that begins next."""
        number = self._again[0] if self._again else self._next
        return number, self.first_version + max(0, number // self.fragments_per_update - self.max_lag)

    def begin(self, version: int) -> int | None:
        """The number of a fragment that may begin now with weights `version`; None without credit or when too old."""
        number, oldest = self.upcoming
        if self.credit < 1 or version < oldest:
            return None
        if self._again:
            heapq.heappop(self._again)
        else:
            self._next += 1
        self.credit -= 1
        self._under_way[number] = version
        return number

    def withdraw(self) -> None:
        """Takes all credit back, that of the fragments under way too: none begins for one that is lost."""
        self.credit = 0
        self._withdrawn = set(self._under_way)

    def lose(self, number: int) -> None:
        """Fragment `number` came to nothing; another one may begin for it."""
        del self._under_way[number]
        heapq.heappush(self._again, number)
        self.credit += number not in self._withdrawn
        self._withdrawn.discard(number)

    def finish(self, number: int, version: int) -> None:
        """Fragment `number` is there; `version` acted, which may be newer than the one it was begun with."""
        self._under_way[number] = version

    def may_take(self, number: int, learner_version: int) -> bool:
        """Whether a learner at `learner_version` can use finished fragment `number` and make no other one too old.

        Ask for the oldest finished one: when that has to wait, all have.
        """
        deadline = self._under_way[number] + self.max_lag
        for end in range(learner_version, deadline):  # updates before its own deadline
            must = sum(version + self.max_lag <= end for version in self._under_way.values())
            places = (end - self.first_version + 1) * self.fragments_per_update - self.consumed
            if must and must >= places:
                return False
        return True

    def take(self, number: int) -> None:
        """The learner has fragment `number`."""
        del self._under_way[number]
        self._withdrawn.discard(number)
        self.consumed += 1
