"""What came of a script that `tacit run` ran: put together from the testbed's result and the ranks' files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tacit.cli.job import DEFAULT, Job
from tacit.records import Environment, Status
from tacit.testbed import Failure, Result

__all__ = ["MEANINGS", "Outcome", "interrupted", "judge"]

MEANINGS = {
    "seconds": "from the launch to the end of all, imports included",
    "MB between nodes": "all that left the nodes' interfaces, summed",
    "MB by the formulas": "what the sessions sent, also inside nodes, summed",
    "compute share": "of the time between rounds; mean over the ranks",
}
"""What the lines of the summary say."""

NOTHING = "–"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run in numbers, as it is kept and printed.

    Attributes:
        script: What was run, with its arguments.
        algorithm: What the script was told to use.
        attached: The strategies that it did attach.
        cluster: The emulated cluster.
        status: Whether it ended well.
        exit_code: What to exit with; 124 after the time limit, 128 + n after signal n.
        seconds: From the launch to the end of all ranks; None where it was interrupted.
        mb_between_nodes: What the nodes' interfaces sent; None where there are none.
        mb_by_formulas: What all ranks sent by the collectives' formulas; None where no round was counted,
            as with plain DDP.
        compute_share: The mean over ranks, 0..1; None where no rank counted two rounds.
        failures: One for each node that failed, the first failure first.
        error: Why the run is no good, in one line; None where it is.
        ranks: What each rank left: which doors it called, and its sessions' numbers.
        environment: Where it took place.
    """

    script: tuple[str, ...]
    algorithm: str
    attached: tuple[str, ...] = ()
    cluster: str
    status: Status
    exit_code: int
    seconds: float | None = None
    mb_between_nodes: float | None = None
    mb_by_formulas: float | None = None
    compute_share: float | None = None
    failures: tuple[Failure, ...] = ()
    error: str | None = None
    ranks: tuple[Mapping[str, Any], ...] = ()
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
        trace = (self.failures[0].traceback or "") if self.failures else ""
        return [f"tacit: {self.error}", *trace.rstrip().splitlines(), ""]


def judge(job: Job, result: Result) -> Outcome:
    """Put together what came of a run that was followed to its end."""
    ranks, processes = _left(job.footprint, "rank"), _left(job.footprint, "process")
    sessions = [session for rank in ranks for session in rank["sessions"]]
    counted = [session["metrics"] for session in sessions if session["metrics"]["rounds"]]
    shares = [each["compute_share"] for each in counted if each["rounds"] > 1]
    attached = sorted({session["strategy"] for session in sessions})
    if result.ok:
        error = _without_effect(job, ranks, attached) or _without_curves(job, ranks)
    else:
        error = _why(job, result)
    return Outcome(
        script=job.script,
        algorithm=job.algorithm,
        attached=tuple(attached),
        cluster=str(job.cluster),
        status="failed" if error else "ok",
        exit_code=_exit_code(result) or (2 if error else 0),
        seconds=result.seconds,
        mb_between_nodes=_megabytes(processes, job.cluster.nodes),
        mb_by_formulas=sum(each["bytes_out"] for each in counted) / 1e6 if counted else None,
        compute_share=fmean(shares) if shares else None,
        failures=result.failures,
        error=error,
        ranks=tuple(ranks),
        environment=Environment.here(),
    )


def interrupted(job: Job, code: int, error: str) -> Outcome:
    """A run that was cut off; its ranks were killed, so there are no numbers."""
    return Outcome(
        script=job.script,
        algorithm=job.algorithm,
        cluster=str(job.cluster),
        status="interrupted",
        exit_code=code,
        error=error,
        environment=Environment.here(),
    )


def _why(job: Job, result: Result) -> str:
    if result.timed_out:
        return f"{job.name} was stopped after {job.timeout:g} s, see --timeout"
    return f"{job.name} failed: {result.failures[0] if result.failures else f'exit code {result.returncode}'}"


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


def _megabytes(processes: Sequence[Mapping[str, Any]], nodes: int) -> float | None:
    total = 0
    for node in range(nodes):
        mine = [each for each in processes if each["node"] == node and each["after"] is not None]
        if not mine:
            return None
        total += max(each["after"] for each in mine) - min(each["before"] for each in mine)
    return total / 1e6


def _left(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What the ranks left, in their order."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob(f"{kind}*.json")]
    return sorted(found, key=lambda each: int(each["rank"]))


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)
