"""What came of a run: did every node end well, and if not, which rank failed first, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

TIMED_OUT = 124
"""The return code of a run that was stopped at its time limit, as timeout(1) has it."""


@dataclass(frozen=True)
class Failure:
    """A node that failed.

    Attributes:
        node: The node.
        rank: The global rank that failed first on it; None when its launcher failed by itself.
        reason: How it ended, such as "killed by SIGKILL" or "exit code 1".
        traceback: The Python traceback that the rank printed last, if it printed one.
        code: The exit code that the reason speaks of, minus the signal for one; None where it is not known.
    """

    node: int
    rank: int | None
    reason: str
    traceback: str | None = None
    code: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """One line that names the rank and the reason."""
        who = f"the launcher of node {self.node}" if self.rank is None else f"rank {self.rank}"
        verb = "was" if self.reason.startswith("killed") else "ended with"
        where = "" if self.rank is None else f" (node {self.node})"
        return f"{who} {verb} {self.reason}{where}"


@dataclass(frozen=True)
class Result:
    """What came of a run.

    Attributes:
        returncode: 0 when all nodes ended well, else the code of the node that failed first.
        failures: One for each node that failed, the first failure first.
        timed_out: Whether the run was stopped at its time limit.
        seconds: How long it took.
    """

    returncode: int
    failures: tuple[Failure, ...]
    timed_out: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every node ended well."""
        return self.returncode == 0
