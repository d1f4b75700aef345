"""The result of `tacit run`: made from the testbed's result and the files that ranks and servers wrote."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from tacit_lab.cli.interrupts import Interrupted
from tacit_lab.cli.run.failures import (
    FailureGroup,
    dragged_along,
    format_groups,
    group_endings,
    named,
    write_tracebacks,
)
from tacit_lab.cli.run.options import DEFAULT, RunOptions
from tacit_lab.cli.run.traffic import matrix, printed
from tacit_lab.cluster import Cluster
from tacit_lab.profiling import profile as profiles
from tacit_lab.records import Environment, Status
from tacit_lab.testbed import Failure, Result
from tacit_lab.testbed.churn import ChurnEvent
from tacit_lab.testbed.results import Relayed, verb

MEANINGS = {
    "seconds": "from the launch to the end of all, imports included",
    "MB between nodes": "all that left the nodes' interfaces, summed",
    "MB by the formulas": "what the sessions sent, also inside nodes, summed",
    "compute share": "of the time between rounds; mean over the ranks",
}
"""The numbers of the summary, and what they mean."""

MISSING = "–"
"""Stands for a number that is not known."""
_LAST = 20
"""At most so many last lines are shown of a launcher that failed itself."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run in numbers, as it is written to run.json and printed.

    Attributes:
        script: The script and its arguments.
        algorithm: The algorithm of --algorithm.
        attached: The strategies that it did attach.
        cluster: The emulated cluster.
        status: "unfinished" while the run goes on, and if the command was killed.
        exit_code: The command's; 124 after the time limit, 128 + n after signal n; None while unfinished.
        seconds: From the launch to the end of all ranks; None if it was interrupted.
        mb_between_nodes: What the nodes' interfaces sent; None if there are none.
        traffic: Bytes from each node, row by row, to each other, the servers' last; None if it is not known.
        mb_by_formulas: What all ranks sent by the formulas of the collectives; None if no round was counted,
            as with plain DDP.
        mb_in_closing: How much of that closing the sessions sent.
        compute_share: The mean over ranks, 0..1; None if no rank counted two rounds.
        failures: One for each node that failed, the first failure first.
        errors: The ranks that failed, grouped by their error, the first failure first.
        dragged_along: The ranks that were ended because these had failed.
        tracebacks: The files with each rank's traceback, relative to the folder of run.json.
        error: Why the run failed, in one line; None if it did not.
        ranks: What each rank wrote: which functions of tacit it called, and its sessions' numbers.
        servers: What each parameter server wrote: its counts.
        churn: What was done to replicas that come and go.
        relayed: How the relay of the links kept up; None where there is none.
        profile: Where the ranks' processor time went; None without --profile.
        environment: The machine and the versions of the software.
    """

    script: tuple[str, ...]
    algorithm: str
    attached: tuple[str, ...] = ()
    cluster: str
    status: Status | Literal["unfinished"]
    exit_code: int | None
    seconds: float | None = None
    mb_between_nodes: float | None = None
    traffic: list[list[int]] | None = None
    mb_by_formulas: float | None = None
    mb_in_closing: float | None = None
    compute_share: float | None = None
    failures: tuple[Failure, ...] = ()
    errors: tuple[FailureGroup, ...] = ()
    dragged_along: tuple[int, ...] = ()
    tracebacks: tuple[str, ...] = ()
    error: str | None = None
    ranks: tuple[Mapping[str, Any], ...] = ()
    servers: tuple[Mapping[str, Any], ...] = ()
    churn: tuple[ChurnEvent, ...] = ()
    relayed: Relayed | None = None
    profile: profiles.Summary | None = None
    environment: Environment

    def to_json(self) -> str:
        """One JSON object on one line."""
        return json.dumps(asdict(self))

    def lines(self) -> list[str]:
        """The lines of the summary: the first failure, if there is one, and then the numbers."""
        numbers = (
            _number(self.seconds, "{:.1f}"),
            _number(self.mb_between_nodes, "{:.2f}"),
            _number(self.mb_by_formulas, "{:.2f}"),
            _number(self.compute_share, "{:.1%}"),
        )
        named = zip(MEANINGS.items(), numbers, strict=True)
        table = [f"  {name:<18}{number:>9}  {meaning}" for (name, meaning), number in named]
        if self.mb_by_formulas is not None and self.mb_in_closing is not None:
            in_rounds = self.mb_by_formulas - self.mb_in_closing
            table[2] += f": in rounds {in_rounds:.2f}, closing {self.mb_in_closing:.2f}"
        head = f"{', '.join(self.attached) or self.algorithm} on {self.cluster}: {' '.join(self.script)}"
        if self.failures and not self.ranks:  # the launcher ends ranks before they can write a report
            head = f"{' '.join(self.script)} on {self.cluster}; no rank could write what it had attached"
        told = ["", *self.profile.lines()] if self.profile else []
        traffic = printed(self.traffic, Cluster.parse(self.cluster).nodes)
        failed = [] if self.error is None else [f"tacit: {self.error}", *self.why(), ""]
        relay = [f"  {self.relayed}"] if self.relayed else []
        counts: Counter[str] = Counter(each.what for each in self.churn)
        churn = ", ".join(f"{counts[what]} {what}" for what in ("killed", "frozen", "back"))
        went = [f"  replicas that came and went: {churn}"] if self.churn else []
        return [*failed, head, *table, *relay, *went, *traffic, *told]

    def why(self) -> list[str]:
        """Behind its error: the errors of the ranks, and where their tracebacks are."""
        lines = format_groups(self.errors, self.error or "")
        if not self.errors and self.failures and self.failures[0].traceback:
            lines += self.failures[0].traceback.splitlines()[-_LAST:]  # what the launcher printed last
        if self.dragged_along:
            whose, were = ("its", "was") if len(self.dragged_along) == 1 else ("their", "were")
            lines.append(f"{named(self.dragged_along)} lost {whose} peers by it, and {were} ended")
        return [*lines, *([f"Whole tracebacks: {', '.join(self.tracebacks)}"] if self.tracebacks else [])]


def summarize(
    options: RunOptions,
    result: Result,
    profiled: Sequence[profiles.RankProfile] = (),
    churn: Sequence[ChurnEvent] = (),
) -> RunResult:
    """The result of a run that has ended, or that was ended at its time limit."""
    ranks, processes, servers = (_reports(options.footprint, kind) for kind in ("rank", "process", "server"))
    sessions = [session for rank in ranks for session in rank["sessions"]]
    counted = [session["metrics"] for session in sessions if session["metrics"]["rounds"]]
    sent, closing = (sum(each[key] for each in counted) for key in ("bytes_out", "closing_bytes_out"))
    shares = [each["compute_share"] for each in counted if each["rounds"] > 1]
    attached = sorted({session["strategy"] for session in sessions})
    error = _error(options, result, ranks, attached) or _without_profile(options, profiled)
    names = write_tracebacks(result.endings, options.folder / "errors")
    return RunResult(
        script=options.script,
        algorithm=options.algorithm,
        attached=tuple(attached),
        cluster=str(options.cluster),
        status="failed" if error else "ok",
        exit_code=_exit_code(result) or (2 if error else 0),
        seconds=result.seconds,
        mb_between_nodes=_megabytes(processes, servers, options.cluster),
        traffic=matrix(processes, options.cluster),
        mb_by_formulas=(sent + closing) / 1e6 if counted else None,
        mb_in_closing=closing / 1e6 if counted else None,
        compute_share=fmean(shares) if shares else None,
        failures=result.failures,
        errors=tuple(group_endings(result.endings)) if result.failures else (),
        dragged_along=dragged_along(result.endings) if result.failures else (),
        tracebacks=tuple(str(Path("errors", name)) for name in names),
        error=error,
        ranks=tuple(ranks),
        servers=tuple(servers),
        churn=tuple(churn),
        relayed=result.relayed,
        profile=profiles.Summary.of(profiled) if profiled else None,
        environment=Environment.here(),
    )


def unfinished(options: RunOptions) -> RunResult:
    """The result while the run goes on; it stays in the folder if the command is killed."""
    return RunResult(
        script=options.script,
        algorithm=options.algorithm,
        cluster=str(options.cluster),
        status="unfinished",
        exit_code=None,
        error=f"it is still running, or tacit run (process {os.getpid()}) was killed",
        environment=Environment.here(),
    )


def cut_off(options: RunOptions, error: BaseException) -> RunResult:
    """The result of a run that a signal or a failure of the testbed ended. It has no numbers."""
    result = replace(unfinished(options), error=str(error) or type(error).__name__)
    if isinstance(error, Interrupted):
        return replace(result, status="interrupted", exit_code=error.code)
    return replace(result, status="failed", exit_code=1)


def _error(
    options: RunOptions, result: Result, ranks: Sequence[Mapping[str, Any]], attached: Sequence[str]
) -> str | None:
    """Why the run failed; None if it did not."""
    if not result.ok:
        return _failure(options, result)
    if result.notes:
        return None  # a rank could not write its report, so it is not known what it called
    called = {function for rank in ranks for function in rank["called"]}
    return (
        _without_members(options, ranks)
        or _without_effect(options, called, attached)
        or _without_curves(options, called)
    )


def _failure(options: RunOptions, result: Result) -> str:
    if result.timed_out:
        return f"{options.name} was stopped after {options.timeout:g} s, see --timeout"
    if not result.failures:
        return f"{options.name} failed: exit code {result.returncode}"
    first, group = result.failures[0], next(iter(group_endings(result.endings)), None)
    same = group is not None and first.rank in group.ranks and first.reason == group.reason
    if group is not None and same and len(group.ranks) > 1:
        return f"{options.name} failed: {group.who} {verb(group.reason)}"
    return f"{options.name} failed: {first}"


def _without_members(options: RunOptions, ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """Why --churn is of no use; None if it is, or was not given."""
    sessions = [session for rank in ranks for session in rank["sessions"]]
    if options.churn is None or any("members" in session["metrics"] for session in sessions):
        return None
    return (
        f"{options.name} attached no members, so each of its replicas trained alone under --churn. Write in "
        "it:\n\n"
        "    import tacit\n"
        "    session = tacit.attach(model, optimizer, tacit.from_env(), members=tacit.Members())\n"
    )


def _without_effect(options: RunOptions, called: set[str], attached: Sequence[str]) -> str | None:
    """Why --algorithm had no effect; None if it had one, or was not given."""
    asked = None if options.strategy is None else options.strategy.name
    if asked is None or asked in attached:
        return None
    # Plain DDP needs nothing attached; and a script may attach another strategy than --algorithm's.
    if "from_env" in called and (asked == DEFAULT or len(called) > 1):
        return None
    did = f"attached {', '.join(attached)} instead" if attached else "attached nothing"
    did = did if called else "never called tacit"
    return (
        f"{options.name} {did}, so --algorithm {asked} had no effect. Write in it:\n\n"
        "    import tacit\n"
        "    with tacit.attach(model, optimizer, tacit.from_env()):  # around the training loop\n"
    )


def _without_curves(options: RunOptions, called: set[str]) -> str | None:
    """Why --tensorboard had no effect; None if it had one, or was not given."""
    if options.tensorboard is None or called - {"from_env"}:
        return None
    return f"{options.name} attached nothing, so --tensorboard had no effect: attach in it, or leave it out"


def _without_profile(options: RunOptions, found: Sequence[profiles.RankProfile]) -> str | None:
    """Why --profile had no effect; None if it had one, or was not given."""
    if not options.profile or found:
        return None
    return (
        f"{options.name} wrote no profile, so --profile had no effect: have an optimizer of torch.optim make "
        "two steps or more in the rank's process, and end the process as usual, without os._exit"
    )


def _exit_code(result: Result) -> int:
    """The exit code of the rank that failed first. The launcher itself always exits with 1."""
    code = result.returncode
    if result.failures and not result.timed_out:
        code = result.failures[0].code or code
    return code if code >= 0 else 128 - code


def _megabytes(
    processes: Sequence[Mapping[str, Any]], servers: Sequence[Mapping[str, Any]], cluster: Cluster
) -> float | None:
    """What all nodes sent; None if that of one node or server is not known."""
    by_servers = [each["transmitted"] for each in servers]
    if len(by_servers) < cluster.servers or None in by_servers:
        return None
    total: int = sum(by_servers)
    for node in range(cluster.nodes):
        counts = [each for each in processes if each["node"] == node and each["after"] is not None]
        if not counts:
            return None
        total += max(each["after"] for each in counts) - min(each["before"] for each in counts)
    return total / 1e6


def _reports(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What ranks, their processes or servers wrote, in the order of their numbers, if it can be read."""
    found = []
    for file in folder.glob(f"{kind}*.json"):
        with suppress(OSError, ValueError):
            found.append(json.loads(file.read_text(encoding="utf-8")))
    return sorted(found, key=lambda each: int(each["rank"]))


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else form.format(value)
