"""The result of a run: whether every node ended well, and if not, which rank failed first, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

TIMED_OUT = 124
"""The return code of a run that was stopped at its time limit, as timeout(1) has it."""

_MOST_OF_A_CORE = 0.5
_LATE_SHARE, _LATE_SECONDS = 0.05, 0.5e-3
"""How much later than wanted packets may be in the mean: a share of that, and at least so many seconds."""


@dataclass(frozen=True)
class Ending:
    """The end of one rank that did not end well, whatever the cause.

    Attributes:
        rank: The global rank.
        node: Where it was.
        reason: How it ended, such as "killed by SIGKILL" or "exit code 1".
        traceback: The Python traceback that it printed last, if it printed one.
        lost: Whether it ended because of another: it reports a lost peer, or the launcher ended it.
    """

    rank: int
    node: int
    reason: str
    traceback: str | None = None
    lost: bool = False


@dataclass(frozen=True)
class Failure:
    """A node that failed.

    Attributes:
        node: The node.
        rank: The global rank that failed first on it; None when its launcher failed by itself.
        server: Which parameter server it is; None where it has ranks.
        reason: How it ended, such as "killed by SIGKILL", "exit code 1", or "froze: it did not answer".
        traceback: The Python traceback that the rank printed last, if it printed one.
        code: The exit code that the reason speaks of, minus the signal for one; None where it is not known.
    """

    node: int
    rank: int | None
    reason: str
    traceback: str | None = None
    code: int | None = field(default=None, compare=False)
    server: int | None = None

    def __str__(self) -> str:
        """One line that names the rank and the reason."""
        who = f"the launcher of node {self.node}" if self.rank is None else f"rank {self.rank}"
        if self.rank is None and self.code is None:
            who = f"node {self.node}"
        if self.server is not None:
            who = f"parameter server {self.server}"
        if self.server is not None or self.rank is None:
            return f"{who} {verb(self.reason)}"
        return f"{who} {verb(self.reason)} (node {self.node})"


@dataclass(frozen=True)
class Relayed:
    """How the relay kept up, a process that makes packets late or loses them where the kernel cannot.

    Attributes:
        cores: The most of a processor core that it took in any second.
        wanted: Seconds by which packets should have been late, in the mean.
        late: Seconds by which they were later than that, in the mean.
    """

    cores: float
    wanted: float
    late: float

    @property
    def doubt(self) -> str | None:
        """Why what was measured over such links does not count; None if it does."""
        if self.cores > _MOST_OF_A_CORE:
            return f"took {self.cores:.2f} of a processor core in its busiest second"
        if self.late > max(_LATE_SHARE * self.wanted, _LATE_SECONDS):
            return f"made packets {1e3 * self.late:.2f} ms later than it should"
        return None

    def __str__(self) -> str:
        """One line."""
        doubt = f"; the numbers do not count, as it {self.doubt}" if self.doubt else ""
        return f"relay of the links: {self.cores:.2f} of a core in its busiest second{doubt}"


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        returncode: 0 when all nodes ended well, else the code of the node that failed first.
        failures: One for each node that failed, the first failure first.
        timed_out: Whether the run was stopped at its time limit.
        seconds: How long it took.
        notes: What ranks could not write down, each once.
        endings: How each rank ended that did not end well, the first failure first.
        relayed: How the relay of its links kept up; None where there is none.
    """

    returncode: int
    failures: tuple[Failure, ...]
    timed_out: bool
    seconds: float
    notes: tuple[str, ...] = ()
    endings: tuple[Ending, ...] = ()
    relayed: Relayed | None = None

    @property
    def ok(self) -> bool:
        """Whether every node ended well."""
        return self.returncode == 0


def verb(reason: str) -> str:
    """A reason as a predicate: "was killed by SIGKILL", "ended with exit code 1"."""
    if reason.startswith("killed"):
        return f"was {reason}"
    return f"ended with {reason}" if reason.startswith("exit code") else reason
