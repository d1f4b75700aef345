"""A profile: what the threads of a rank did in the measured steps; as rows that add up, and as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from tacit.described import Saved
from tacit.errors import ConfigError
from tacit_lab.profiling.stages import UNATTRIBUTED

ENDED = "threads that have ended"
"""The row of what the process has used and no thread that is still there."""
_FILES = "profile*.json"
_LEAST = 0.001
"""Stages below this share of all are one row."""


@dataclass(frozen=True)
class ThreadProfile:
    """One thread in the measured steps.

    Attributes:
        name: What it is for.
        stages: For each step the processor time of each stage without those inside it, in ns. Those of a step
            add up to the thread's processor time in it.
    """

    name: str
    stages: tuple[Mapping[str, int], ...]

    @property
    def cpu_ns(self) -> int:
        """Its processor time in all these steps."""
        return sum(sum(step.values()) for step in self.stages)

    def totals(self) -> dict[str, int]:
        """The processor time of each stage in all these steps, in ns."""
        found: dict[str, int] = defaultdict(int)
        for step in self.stages:
            for stage, spent in step.items():
                found[stage] += spent
        return dict(found)


@dataclass(frozen=True)
class ProfileRow:
    """Processor time, in ms for each rank and step."""

    thread: str
    stage: str
    ms: float


@dataclass(frozen=True, kw_only=True)
class RankProfile(Saved):
    """One rank in the measured steps.

    Attributes:
        first: The first of these steps, counted from 1.
        wall_ns: How long each took by the clock.
        process_ns: The processor time of the process in each.
        timing_ns: About how much of all that went into timing the stages, in all steps; it counts in them.
    """

    what: ClassVar[str] = "profile of a rank"
    made_by: ClassVar[str] = "tacit run --profile"

    rank: int
    first: int
    wall_ns: tuple[int, ...]
    process_ns: tuple[int, ...]
    threads: tuple[ThreadProfile, ...]
    timing_ns: int = 0

    @property
    def steps(self) -> int:
        """How many were measured."""
        return len(self.wall_ns)

    def rows(self) -> list[ProfileRow]:
        """By thread and stage: they add up to the processor time of the process."""
        rows = [
            ProfileRow(thread.name, stage, spent / self.steps / 1e6)
            for thread in self.threads
            for stage, spent in thread.totals().items()
        ]
        rest = sum(self.process_ns) - sum(thread.cpu_ns for thread in self.threads)
        return [*rows, ProfileRow(ENDED, UNATTRIBUTED, rest / self.steps / 1e6)]


def read(folder: Path) -> list[RankProfile]:
    """What the ranks have written into a folder, in the order of their numbers; those that can be read.

    Raises:
        ConfigError: A file is no profile.
    """
    return sorted(map(RankProfile.load, folder.glob(_FILES)), key=lambda each: each.rank)


# ---- all ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Means over the ranks, for each rank and step.

    Attributes:
        ranks: How many were measured, in how many steps (the fewest of a rank), from which one on.
        wall_ms: How long a step took; `cpu_ms`: the processor time of a process in it.
        rows: Where that went; they add up to `cpu_ms`.
        timing_ms: About how much of it was spent on timing the stages.
    """

    ranks: int
    steps: int
    first: int
    wall_ms: float
    cpu_ms: float
    rows: tuple[ProfileRow, ...]
    timing_ms: float = 0.0

    @classmethod
    def of(cls, profiles: Sequence[RankProfile]) -> Self:
        """The means of one rank or more.

        Raises:
            ConfigError: There is none.
        """
        if not profiles:
            raise ConfigError("no rank has written its profile: profile two steps of an optimizer or more")
        count = len(profiles)
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for each in profiles:
            for row in each.rows():
                sums[row.thread, row.stage] += row.ms / count
        return cls(
            ranks=count,
            steps=min(each.steps for each in profiles),
            first=profiles[0].first,
            wall_ms=sum(sum(each.wall_ns) / each.steps for each in profiles) / count / 1e6,
            cpu_ms=sum(sum(each.process_ns) / each.steps for each in profiles) / count / 1e6,
            rows=tuple(ProfileRow(*key, ms) for key, ms in sums.items()),
            timing_ms=sum(each.timing_ns / each.steps for each in profiles) / count / 1e6,
        )

    def by_thread(self) -> dict[str, float]:
        """ms of processor time of each thread, the largest first."""
        return _summed(self.rows, lambda row: row.thread)

    def lines(self) -> list[str]:
        """The tables: threads, then the stages of each; each adds up."""
        steps = f"steps {self.first} to {self.first + self.steps - 1}"
        ranks = f"mean of {self.ranks} ranks" if self.ranks > 1 else "one rank"
        return [
            f"Processor time in ms a rank and step ({ranks}, {steps}): {self.cpu_ms:.1f}; by the clock a "
            f"step took {self.wall_ms:.1f}",
            "",
            f"{'thread':26}{'CPU':>9}",
            *(f"{name:26.26}{_ms(ms)}" for name, ms in self.by_thread().items()),
            f"{'all':26}{_ms(sum(row.ms for row in self.rows))}",
            "",
            f"{'thread':26}{'stage':34}{'CPU':>9}",
            *(line for name in self.by_thread() for line in self._stages(name)),
            "",
            f"Timing the stages took about {self.timing_ms:.2f} of all; it counts in them.",
        ]

    def _stages(self, thread: str) -> list[str]:
        """The stages of one thread, and what the small ones are together."""
        stages = _summed([row for row in self.rows if row.thread == thread], lambda row: row.stage)
        small = {stage: ms for stage, ms in stages.items() if abs(ms) < _LEAST * self.cpu_ms}
        if len(small) > 1 or 0 < len(small) < len(stages):
            stages = {stage: ms for stage, ms in stages.items() if stage not in small}
            stages[f"{len(small)} smaller stages"] = sum(small.values())
        return [f"{thread:26.26}{stage:34.34}{_ms(ms)}" for stage, ms in stages.items()]


def _ms(value: float) -> str:
    """Without the sign of what is rounded to nothing."""
    return f"{round(value, 2) + 0.0:9.2f}"


def _summed(rows: Iterable[ProfileRow], key: Callable[[ProfileRow], str]) -> dict[str, float]:
    """The times of all rows with the same key, the largest first."""
    found: dict[str, float] = defaultdict(float)
    for row in rows:
        found[key(row)] += row.ms
    return dict(sorted(found.items(), key=lambda each: -each[1]))
