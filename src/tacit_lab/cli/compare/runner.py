"""Make the runs of a comparison in one testbed, one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

from tacit.algorithms import parse
from tacit.attaching.requirements import uses_servers
from tacit.errors import ConfigError, TestbedError
from tacit.files import unmake
from tacit.timelines import Timeline
from tacit_lab.cli.compare.churned import ChurnedRun
from tacit_lab.cli.compare.display import Display
from tacit_lab.cli.compare.options import CompareOptions
from tacit_lab.cli.compare.recorder import ComparisonRecorder
from tacit_lab.cli.compare.run_keys import missing, place
from tacit_lab.cli.compare.scripts import Said, ScriptRun, of_the_middle, run_script
from tacit_lab.cli.interrupts import Interrupted
from tacit_lab.cli.parsing import OUT
from tacit_lab.cli.run.options import RunOptions
from tacit_lab.recipes.progress import MemberSign, Progress, record_in
from tacit_lab.records import COMPUTE_ONLY, EndRecord, RunKey, Status, undisturbed
from tacit_lab.testbed import Failure, Result, Serving, Testbed

ALONE = "localsgd:sync_every=1000000000"
"""What a script trains with where nothing is to be exchanged: no training is so long."""
_SILENCE, _LEAST_SILENCE = 5.0, 1.0
"""Seconds after which members that come and go are given up; between the two a quarter of --churn."""


def planned(options: CompareOptions, recorder: ComparisonRecorder) -> list[str]:
    """What the next runs are called, as far as they are known."""
    return [options.label(key) for key in missing(options, recorder.ends)]


def train_all(options: CompareOptions, display: Display, recorder: ComparisonRecorder) -> None:
    """Make each run that is missing, one after the other; the recorder keeps the records.

    If an algorithm fails, the others are trained before this raises; if the first run fails, none is. However
    this ends, the testbed is removed, and the runs that had ended are recorded.

    Raises:
        TestbedError: The cluster cannot be emulated, or a rank failed; the message names rank and reason.
        ConfigError: The user's script cannot be compared.
        Interrupted: A signal came.
    """
    if options.in_process:
        from tacit_lab.cli.compare import in_process  # it imports torch

        return in_process.train_all(options, display, recorder)
    built = False
    made = _ScriptRunner if options.script else _RecipeRunner if options.churn is None else _ChurnRunner
    try:
        with Testbed(options.cluster) as bed:
            built = True
            runs, failed = made(options, display, recorder, bed), dict[str, TestbedError]()
            while (key := _next(options, recorder, failed)) is not None:
                try:
                    runs.run(key)
                except TestbedError as error:
                    if all(end.status != "ok" for end in recorder.ends.values()):
                        raise
                    failed[key.algorithm] = error
        if failed:
            raise TestbedError("\n".join(map(str, failed.values())))
    finally:
        if not built:
            unmake(options.description, options.records, options.folder, OUT)


def _next(options: CompareOptions, recorder: ComparisonRecorder, failed: Container[str]) -> RunKey | None:
    return next((key for key in missing(options, recorder.ends) if key.algorithm not in failed), None)


class _Runner(ABC):
    """Makes one run after the other in a testbed."""

    def __init__(
        self, options: CompareOptions, display: Display, recorder: ComparisonRecorder, bed: Testbed
    ) -> None:
        self._options, self._display, self._recorder, self._bed = options, display, recorder, bed
        self._strategies = {strategy.name: strategy for strategy in options.strategies}

    def run(self, key: RunKey) -> None:
        """Train to the end. If that fails, the reason is recorded, and the error raised."""
        self._display.started(self._options.label(key), place(self._options, self._recorder.ends, 0))
        try:
            self._train(key)
        except Interrupted as error:
            self._record_end(key, "interrupted", str(error))
            raise
        except Exception as error:
            self._record_end(key, "failed", str(error))
            raise

    @abstractmethod
    def _train(self, key: RunKey) -> None: ...

    def _record_end(self, key: RunKey, status: Status, error: str) -> None:
        self._recorder.add(EndRecord(**key._asdict(), status=status, error=error))

    def _serving(self, key: RunKey) -> Serving | None:
        strategy = self._strategies.get(key.algorithm)
        return Serving() if strategy is not None and uses_servers(strategy) else None

    def _keep(self, key: RunKey, node: int, line: str) -> None:
        self._recorder.add_output(f"[{self._options.label(key)}, node {node}] {line}")

    def _failed(self, key: RunKey, why: str) -> TestbedError:
        output = _relative(self._options.output)
        return TestbedError(
            f"{self._options.label(key)} failed: {why}\nWhat the ranks printed is in {output}"
        )


class _RecipeRunner(_Runner):
    """Runs the worker of the recipes."""

    def _train(self, key: RunKey) -> None:
        ends: list[EndRecord] = []

        def handle(node: int, line: str) -> None:
            if (progress := Progress.from_line(line)) is not None:
                self._display.advanced(replace(progress, algorithm=self._options.label(key)))
            elif (record := record_in(line)) is None:
                self._keep(key, node, line)
            elif isinstance(record, EndRecord):
                ends.append(record)
            elif not isinstance(record, Timeline) or key.seed == self._options.seeds[0]:
                self._recorder.add(record)

        result = self._bed.run(
            self._command(key),
            on_line=handle,
            timeout=self._options.timeout,
            servers=self._serving(key),
        )
        for end in ends:
            if (relay := result.relayed) is not None:
                end = replace(end, relay_cores=relay.cores, relay_doubt=relay.doubt)
            self._recorder.add(end)
        if not result.ok:
            raise self._failed(key, self._reason(result))

    def _command(self, key: RunKey) -> list[str]:
        """The arguments of the worker, which is another process and gets the strategy as text."""
        options = self._options
        arguments: dict[str, object] = {
            "--recipe": options.recipe,
            "--algorithm": undisturbed(key.algorithm),
            "--epochs": options.epochs,
            "--seed": key.seed,
            "--rate": key.rate,
            "--target": options.target,
        }
        if options.tensorboard is not None:
            arguments["--tensorboard"] = options.tensorboard
        words = [str(word) for argument in arguments.items() for word in argument]
        shaped = ["--shaped"] if self._bed.shaped else []
        return ["-m", "tacit_lab.recipes.worker", *words, *options.choices.words(), *shaped]

    def _reason(self, result: Result) -> str:
        if result.timed_out:
            return f"it was stopped after {self._options.timeout:g} s, see --timeout"
        return _describe(result.failures[0]) if result.failures else f"exit code {result.returncode}"


class _ChurnRunner(_RecipeRunner):
    """Runs the worker of the recipes on nodes that come and go."""

    def _train(self, key: RunKey) -> None:
        heard = ChurnedRun(self._options, key, self._options.label(key))

        def handle(node: int, line: str) -> None:
            if (sign := MemberSign.from_line(line)) is None:
                self._keep(key, node, line)
            elif (progress := heard.heard(sign)) is not None:
                self._display.advanced(progress)

        silence = max(_LEAST_SILENCE, min(_SILENCE, heard.churn.every / 4))
        command, timeout = [*self._command(key), "--silence", str(silence)], self._options.timeout
        result = self._bed.run(command, on_line=handle, timeout=timeout, churn=heard.churn)
        if not result.ok:
            raise self._failed(key, self._reason(result))
        for record in heard.records(result, repr(self._strategies[key.algorithm])):
            self._recorder.add(record)


class _ScriptRunner(_Runner):
    """Runs the user's own script as `tacit run` does, and makes records of what it reports."""

    def __init__(
        self, options: CompareOptions, display: Display, recorder: ComparisonRecorder, bed: Testbed
    ) -> None:
        super().__init__(options, display, recorder, bed)
        self._steps: int | None = None
        self._names: tuple[str, set[str]] | None = None

    def _train(self, key: RunKey) -> None:
        options, label = self._options, self._options.label(key)
        heard = ScriptRun(options.script, options.cluster, key, options.target)
        strategy = self._strategies.get(key.algorithm) or parse(ALONE)

        def handle(node: int, line: str) -> None:
            if (said := Said.of(node, line)) is None:
                self._keep(key, node, line)
            elif (progress := heard.heard(said, label, self._steps)) is not None:
                self._display.advanced(progress)

        run = RunOptions(
            script=options.script,
            cluster=options.cluster,
            strategy=strategy,
            timeout=options.timeout,
            folder=options.folder,
            tensorboard=options.tensorboard and options.tensorboard / label,
            serving=self._serving(key),
        )
        result, found = run_script(self._bed, run, {"seed": key.seed, "rate": key.rate}, handle)
        timelines = [replace(each, algorithm=key.algorithm) for each in found]
        if result.error is not None:
            raise self._failed(key, "\n".join([result.error, *result.why()]))
        heard.check(self._needing())
        self._compare_names(label, heard.names)
        records = heard.records(result, repr(strategy) if key.algorithm != COMPUTE_ONLY else "", timelines)
        if key.seed == options.seeds[0]:
            for timeline in of_the_middle(timelines):
                self._recorder.add(timeline)
        for record in records:
            self._recorder.add(record)
        self._steps = next(each.steps for each in records if isinstance(each, EndRecord))

    def _needing(self) -> str:
        """The options that the script must ask for."""
        seeds = "--seeds" if len(self._options.seeds) > 1 or self._options.seeds[0] else ""
        return seeds or ("--rates" if self._options.rates != (1.0,) else "")

    def _compare_names(self, label: str, names: set[str]) -> None:
        first, known = self._names = self._names or (label, names)
        if names != known:
            raise ConfigError(
                f"{first} reported {_and(known)}, and {label} {_and(names)}: have the script call "
                "tacit.report with the same names whatever the algorithm"
            )


def _and(names: set[str]) -> str:
    return " and ".join(sorted(names)) or "nothing"


def _describe(failure: Failure) -> str:
    last = (failure.traceback or "").strip().rpartition("\n")[2]
    return f"{failure}: {last}" if last else str(failure)


def _relative(path: Path) -> Path:
    """The path as seen from the current folder, if it is inside."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
