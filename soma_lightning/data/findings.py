"""How is something that is wrong with a data set written down: which file, episode and column, and what?"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One problem or warning. file: relative to the data set's folder; None where it is not about one of them."""

    what: str
    file: str | None = None
    episode: int | None = None
    column: str | None = None

    def __str__(self) -> str:
        place = [] if self.episode is None else [f"episode {self.episode}"]
        place += [] if self.column is None else [f"column '{self.column}'"]
        return ": ".join([part for part in (self.file, ", ".join(place)) if part] + [self.what])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Findings:
    """problems: the data set cannot be trusted until they are gone. warnings: worth a look, may be meant so."""

    problems: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    _told: set[Finding] = field(default_factory=set)

    def problem(
        self, what: str, file: str | None = None, episode: int | None = None, column: str | None = None
    ) -> None:
        self._add(self.problems, Finding(what, file, episode, column))

    def warning(
        self, what: str, file: str | None = None, episode: int | None = None, column: str | None = None
    ) -> None:
        self._add(self.warnings, Finding(what, file, episode, column))

    def _add(self, findings: list[Finding], new: Finding) -> None:
        if new not in self._told:  # a column of a wrong type is found again in every row group
            self._told.add(new)
            findings.append(new)
