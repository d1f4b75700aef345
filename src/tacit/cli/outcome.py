"""What came of a script that `tacit run` ran: put together from the testbed's result and the ranks' files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from tacit.cli.endings import Group, grouped, kept, told
from tacit.cli.interrupts import Interrupted
from tacit.cli.job import DEFAULT, Job
from tacit.lab.cluster import Cluster
from tacit.lab.records import Environment, Status
from tacit.lab.testbed import Failure, Result
from tacit.lab.testbed.results import verb

__all__ = ["MEANINGS", "Outcome", "cut_off", "judge", "unfinished"]

MEANINGS = {
    "seconds": "from the launch to the end of all, imports included",
    "MB between nodes": "all that left the nodes' interfaces, summed",
    "MB by the formulas": "what the sessions sent, also inside nodes, summed",
    "compute share": "of the time between rounds; mean over the ranks",
}
"""What the lines of the summary say."""

NOTHING = "–"
_LAST = 20
"""Lines of a launcher that failed by itself."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run in numbers, as it is kept and printed.

    Attributes:
        script: What was run, with its arguments.
        algorithm: What the script was told to use.
        attached: The strategies that it did attach.
        cluster: The emulated cluster.
        status: Whether it ended well; "unfinished" while it goes on, and where the command was killed.
        exit_code: What to exit with; 124 after the time limit, 128 + n after signal n; None: unfinished.
        seconds: From the launch to the end of all ranks; None where it was interrupted.
        mb_between_nodes: What the nodes' interfaces sent; None where there are none.
        mb_by_formulas: What all ranks sent by the collectives' formulas; None where no round was counted,
            as with plain DDP.
        compute_share: The mean over ranks, 0..1; None where no rank counted two rounds.
        failures: One for each node that failed, the first failure first.
        errors: Ranks that ended alike, the first failure first: which, how, and what they said.
        tracebacks: The files with each rank's traceback, in the folder of the record.
        error: Why the run is no good, in one line; None where it is.
        ranks: What each rank left: which doors it called, and its sessions' numbers.
        servers: What each parameter server left: what it has counted.
        environment: Where it took place.
    """

    script: tuple[str, ...]
    algorithm: str
    attached: tuple[str, ...] = ()
    cluster: str
    status: Status | Literal["unfinished"]
    exit_code: int | None
    seconds: float | None = None
    mb_between_nodes: float | None = None
    mb_by_formulas: float | None = None
    compute_share: float | None = None
    failures: tuple[Failure, ...] = ()
    errors: tuple[Group, ...] = ()
    tracebacks: tuple[str, ...] = ()
    error: str | None = None
    ranks: tuple[Mapping[str, Any], ...] = ()
    servers: tuple[Mapping[str, Any], ...] = ()
    environment: Environment

    def to_json(self) -> str:
        """One JSON object on one line."""
        return json.dumps(asdict(self))

    def lines(self) -> list[str]:
        """The summary: what failed first, if anything did, and then the numbers."""
        numbers = (
            _number(self.seconds, "{:.1f}"),
            _number(self.mb_between_nodes, "{:.2f}"),
            _number(self.mb_by_formulas, "{:.2f}"),
            _number(self.compute_share, "{:.1%}"),
        )
        named = zip(MEANINGS.items(), numbers, strict=True)
        table = [f"  {name:<18}{number:>9}  {meaning}" for (name, meaning), number in named]
        return [*self._failure(), f"{self.algorithm} on {self.cluster}: {' '.join(self.script)}", *table]

    def _failure(self) -> list[str]:
        if self.error is None:
            return []
        lines = [f"tacit: {self.error}", *told(self.errors, self.error)]
        if not self.errors and self.failures and self.failures[0].traceback:
            lines += self.failures[0].traceback.splitlines()[-_LAST:]  # what the launcher printed last
        if self.tracebacks:
            lines.append(f"Whole tracebacks: {', '.join(self.tracebacks)}")
        return [*lines, ""]


def judge(job: Job, result: Result) -> Outcome:
    """Put together what came of a run that was followed to its end."""
    ranks, processes = _left(job.footprint, "rank"), _left(job.footprint, "process")
    servers = _left(job.footprint, "server")
    sessions = [session for rank in ranks for session in rank["sessions"]]
    counted = [session["metrics"] for session in sessions if session["metrics"]["rounds"]]
    shares = [each["compute_share"] for each in counted if each["rounds"] > 1]
    attached = sorted({session["strategy"] for session in sessions})
    if result.ok:
        # Where something could not be written down, it is not known what was called.
        error = None if result.notes else _without_effect(job, ranks, attached) or _without_curves(job, ranks)
    else:
        error = _why(job, result)
    traces, errors = kept(result.endings, job.folder / "errors"), grouped(result.endings)
    return Outcome(
        script=job.script,
        algorithm=job.algorithm,
        attached=tuple(attached),
        cluster=str(job.cluster),
        status="failed" if error else "ok",
        exit_code=_exit_code(result) or (2 if error else 0),
        seconds=result.seconds,
        mb_between_nodes=_megabytes(processes, servers, job.cluster),
        mb_by_formulas=sum(each["bytes_out"] + each["closing_bytes_out"] for each in counted) / 1e6
        if counted
        else None,
        compute_share=fmean(shares) if shares else None,
        failures=result.failures,
        errors=tuple(errors) if result.failures else (),
        tracebacks=tuple(str(Path("errors", name)) for name in traces),
        error=error,
        ranks=tuple(ranks),
        servers=tuple(servers),
        environment=Environment.here(),
    )


def unfinished(job: Job) -> Outcome:
    """A run that begins: what is on record of it if the command is killed."""
    return Outcome(
        script=job.script,
        algorithm=job.algorithm,
        cluster=str(job.cluster),
        status="unfinished",
        exit_code=None,
        error=f"it goes on, or tacit run (process {os.getpid()}) was killed",
        environment=Environment.here(),
    )


def cut_off(job: Job, error: BaseException) -> Outcome:
    """A run that a signal or a failure of the testbed ended; without numbers, as its ranks were killed."""
    came = replace(unfinished(job), error=str(error) or type(error).__name__)
    if isinstance(error, Interrupted):
        return replace(came, status="interrupted", exit_code=error.code)
    return replace(came, status="failed", exit_code=1)


def _why(job: Job, result: Result) -> str:
    if result.timed_out:
        return f"{job.name} was stopped after {job.timeout:g} s, see --timeout"
    if not result.failures:
        return f"{job.name} failed: exit code {result.returncode}"
    first, together = result.failures[0], next(iter(grouped(result.endings)), None)
    alike = together is not None and first.rank in together.ranks and first.reason == together.reason
    if together is not None and alike and len(together.ranks) > 1:
        return f"{job.name} failed: {together.who} {verb(together.reason)}"
    return f"{job.name} failed: {first}"


def _without_effect(job: Job, ranks: Sequence[Mapping[str, Any]], attached: Sequence[str]) -> str | None:
    """Why the algorithm that was asked for did nothing; None where it did, or none was asked for."""
    called = {door for rank in ranks for door in rank["called"]}
    if job.asked is None or job.asked in attached:
        return None
    # Nothing needs to be attached for plain DDP; and a script may make another strategy of what it was told.
    if "from_env" in called and (job.asked == DEFAULT or len(called) > 1):
        return None
    did = f"attached {', '.join(attached)} instead" if attached else "attached nothing"
    did = did if called else "never called tacit"
    return (
        f"{job.name} {did}, so --algorithm {job.asked} had no effect. Write in it:\n\n"
        "    import tacit\n"
        "    with tacit.attach(model, optimizer, tacit.from_env()):  # around the training loop\n"
    )


def _without_curves(job: Job, ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """Why there are no curves although they were asked for; None where there are."""
    if job.tensorboard is None or {door for rank in ranks for door in rank["called"]} - {"from_env"}:
        return None
    return f"{job.name} attached nothing, so --tensorboard had no effect: attach in it, or leave it out"


def _exit_code(result: Result) -> int:
    """The exit code of the rank that failed first: the launcher turns every one into 1."""
    code = result.returncode
    if result.failures and not result.timed_out:
        code = result.failures[0].code or code
    return code if code >= 0 else 128 - code


def _megabytes(
    processes: Sequence[Mapping[str, Any]], servers: Sequence[Mapping[str, Any]], cluster: Cluster
) -> float | None:
    by_servers = [each["transmitted"] for each in servers]
    if len(by_servers) < cluster.servers or None in by_servers:
        return None
    total: int = sum(by_servers)
    for node in range(cluster.nodes):
        mine = [each for each in processes if each["node"] == node and each["after"] is not None]
        if not mine:
            return None
        total += max(each["after"] for each in mine) - min(each["before"] for each in mine)
    return total / 1e6


def _left(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What the ranks left, in their order; a file that cannot be read is as good as none."""
    found = []
    for file in folder.glob(f"{kind}*.json"):
        with suppress(OSError, ValueError):
            found.append(json.loads(file.read_text(encoding="utf-8")))
    return sorted(found, key=lambda each: int(each["rank"]))


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)
