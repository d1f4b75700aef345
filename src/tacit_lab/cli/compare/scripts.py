"""One run of the user's own script: what its ranks report by `tacit.report`, as records."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tacit.environment import TRIAL
from tacit.errors import ConfigError
from tacit.reporting.trials import MARK
from tacit.timelines import Timeline, aligned
from tacit_lab.cli.run.command import run_in
from tacit_lab.cli.run.options import RunOptions
from tacit_lab.cli.run.result import RunResult
from tacit_lab.cluster import Cluster
from tacit_lab.recipes.progress import Progress
from tacit_lab.recipes.timing import middle
from tacit_lab.records import COMPUTE_ONLY, EndRecord, Environment, EpochRecord, Record, RunKey, RunRecord
from tacit_lab.testbed import Testbed
from tacit_lab.testbed.outputs import OnLine

EXAMPLE = "tacit.report(step, loss=float(loss)) every so many steps, on every rank"


@dataclass(frozen=True, kw_only=True)
class Said:
    """A line that a rank printed for the command.

    Attributes:
        at: seconds since 1970; `sent`: bytes that the node had sent by then.
        kind: "asked", "began", "report" or "ended"; the other fields are of one of them alone.
    """

    node: int
    kind: str
    rank: int
    at: float
    sent: int | None
    parameters: int = 0
    weights: float | None = None
    step: int = 0
    numbers: dict[str, float] | None = None

    @classmethod
    def of(cls, node: int, line: str) -> Said | None:
        """What a line of output says; None if it is no such line, or only a part of one."""
        _, mark, text = line.partition(MARK)
        try:
            return cls(node=node, **json.loads(text)) if mark else None
        except (json.JSONDecodeError, TypeError):
            return None


@dataclass(frozen=True)
class _Reported:
    """What all ranks have reported after one step."""

    step: int
    seconds: float
    sent: int | None
    numbers: dict[str, float]


class ScriptRun:
    """What the ranks of one run say, taken in line by line.

    Args:
        script: the script and its arguments, for the records.
    """

    def __init__(self, script: Sequence[str], cluster: Cluster, key: RunKey, target: float | None) -> None:
        self._script, self._cluster, self._trial, self._target = " ".join(script), cluster, key, target
        # Else bytes are those of the whole run, servers included.
        self._counted = not cluster.servers and not any(map(cluster.load_of, range(cluster.nodes)))
        self._said: list[Said] = []
        self._sessions: list[Said] = []
        """Of what was said, where ranks attached a session."""
        self._shown = 0

    def heard(self, said: Said, label: str, steps: int | None) -> Progress | None:
        """Take in what a rank says. Returns what to show of it: of the reports of rank 0.

        Args:
            label: what the run is called; `steps`: how many it will take, if that is known.
        """
        self._said.append(said)
        if said.kind == "began":
            self._sessions.append(said)
        begun = next((each for each in self._sessions if not each.rank), None)
        if said.kind != "report" or said.rank or begun is None:
            return None
        self._shown += 1
        numbers, sent = said.numbers or {}, None
        if self._counted and said.sent is not None and begun.sent is not None:
            sent = (said.sent - begun.sent) * self._cluster.nodes / 1e6
        return Progress(
            algorithm=label,
            epoch=self._shown,
            step=said.step,
            steps=steps,
            seconds=said.at - begun.at,
            loss=numbers.get("loss"),
            accuracy=numbers.get("accuracy"),
            mb=sent,
        )

    @property
    def names(self) -> set[str]:
        """The names of the numbers that it reports."""
        return {name for each in self._said for name in each.numbers or {}}

    def check(self, options: str) -> None:
        """Refuse a script that cannot be compared; to be called when it has ended well.

        Args:
            options: those of the command that need `tacit.trial`, e.g. "--rates 0.5,1"; "" where none does.

        Raises:
            ConfigError: it has reported nothing, or has not asked for what the options decide.
        """
        if not self.names:
            raise ConfigError(
                f"{self._script} never called tacit.report, so there is nothing to compare: write {EXAMPLE}"
            )
        if options and not any(each.kind == "asked" for each in self._said):
            raise ConfigError(
                f"{options} would do nothing, as {self._script} never calls tacit.trial(): write\n\n"
                "    asked = tacit.trial()\n"
                "    torch.manual_seed(asked.seed)  # and multiply the learning rate by asked.rate\n"
            )

    def records(self, result: RunResult, strategy: str, timelines: Sequence[Timeline]) -> list[Record]:
        """The records of a run that has ended well."""
        reports, key = self._reports(), self._trial._asdict()
        reached = [
            each.seconds
            for each in reports
            if self._target is not None and each.numbers.get("accuracy", -1.0) >= self._target
        ]
        last = reports[-1]
        head = RunRecord(
            **key,
            strategy=strategy,
            recipe=self._script,
            cluster=str(self._cluster),
            shaped=self._cluster.shaped,
            epochs=None,
            target=self._target,
            batch_per_rank=None,
            world_size=self._cluster.world_size,
            parameters=max((each.parameters for each in self._sessions), default=0),
            environment=Environment.here(),
            weights=next((each.weights for each in self._sessions if not each.rank), None),
        )
        between = [
            EpochRecord(
                **key,
                epoch=number,
                step=each.step,
                seconds=each.seconds,
                loss=each.numbers.get("loss"),
                accuracy=each.numbers.get("accuracy"),
                bytes_between_nodes=each.sent,
            )
            for number, each in enumerate(reports, 1)
        ]
        session: dict[str, Any] = next((each for rank in result.ranks for each in rank["sessions"]), {})
        metrics = dict(session.get("metrics", {}))
        if "choice" in session:
            metrics["choice"] = session["choice"]
        sent = self._sent([each for each in self._said if each.kind == "ended"])
        validation = last.numbers.get("validation", last.numbers.get("accuracy"))
        end = EndRecord(
            **key,
            status="ok",
            seconds=self._seconds(timelines),
            steps=last.step,
            mb_between_nodes=result.mb_between_nodes if sent is None else sent / 1e6,
            accuracy=last.numbers.get("accuracy"),
            loss=last.numbers.get("loss"),
            seconds_to_target=next(iter(reached), None),
            validation=-last.numbers["loss"] if validation is None else validation,
            metrics=metrics,
            traffic=result.traffic,
            relay_cores=None if result.relayed is None else result.relayed.cores,
            relay_doubt=None if result.relayed is None else result.relayed.doubt,
        )
        return [head, *between, end]

    def _reports(self) -> list[_Reported]:
        """What was reported, by step: means over the ranks, the time of the last of them."""
        by_step: dict[int, dict[int, Said]] = defaultdict(dict)
        for each in self._said:
            if each.kind == "report":
                by_step[each.step][each.rank] = each
        found = []
        for step, ranks in sorted(by_step.items()):
            given: dict[str, list[float]] = defaultdict(list)
            for each in ranks.values():
                for name, value in (each.numbers or {}).items():
                    given[name].append(value)
            numbers = {name: fmean(values) for name, values in given.items()}
            found.append(
                _Reported(step, self._since([*ranks.values()]), self._sent([*ranks.values()]), numbers)
            )
        return found

    def _since(self, said: Sequence[Said]) -> float:
        """Seconds from where each of these ranks attached its first session; of the slowest."""
        return max(each.at - self._begun(each.rank) for each in said)

    def _begun(self, rank: int) -> float:
        return min(each.at for each in self._sessions if each.rank == rank)

    def _sent(self, said: Sequence[Said]) -> int | None:
        """Bytes that all nodes have sent by then; None where one has not counted them, or says nothing."""
        total = 0
        for node in range(self._cluster.nodes):
            then = [each.sent for each in said if each.node == node and each.sent is not None]
            first = [each.sent for each in self._sessions if each.node == node and each.sent is not None]
            if not self._counted or not then or not first:
                return None
            total += max(then) - min(first)
        return total

    def _seconds(self, timelines: Sequence[Timeline]) -> float:
        """From attaching to closing; without communication to the last step, as closing averages replicas."""
        alone = self._trial.algorithm == COMPUTE_ONLY
        if alone and timelines and all(each.steps for each in timelines):
            return max(each.origin + each.steps[-1].ended - self._begun(each.rank) for each in timelines)
        ended = [each for each in self._said if each.kind == "ended"]
        return self._since(ended or [each for each in self._said if each.kind == "report"])


def run_script(
    bed: Testbed, options: RunOptions, asked: Mapping[str, object], on_line: OnLine
) -> tuple[RunResult, list[Timeline]]:
    """Run a script that is asked for this trial; what it has left, and its timelines, as they are.

    Nothing stays of it in the folder but tracebacks.
    """
    try:
        result = run_in(bed, options, {TRIAL: json.dumps(asked)}, on_line)
        return result, _read_timelines(options.footprint)
    finally:
        shutil.rmtree(options.footprint, ignore_errors=True)


def _read_timelines(folder: Path) -> list[Timeline]:
    """The timelines that the ranks of a run have written, as they are: of a thousand steps at most."""
    found = []
    for file in sorted(folder.glob("timeline*.jsonl")):
        try:
            found.append(Timeline.from_json(file.read_text(encoding="utf-8")))
        except (OSError, ConfigError):
            continue
    return sorted(found, key=lambda each: each.rank)


def of_the_middle(timelines: Sequence[Timeline]) -> list[Timeline]:
    """The middle of the steps that they have, by one clock."""
    steps = [each.step for timeline in timelines for each in timeline.steps]
    if not steps:
        return []
    half = (min(steps) + max(steps)) // 2
    # A schedule is the same on all ranks.
    kept = [replace(each, changes=each.changes if each.rank == 0 else ()) for each in timelines]
    return aligned(middle(each, half) for each in kept)
