"""Train with every algorithm of a comparison in one testbed, one after the other."""

from __future__ import annotations

from pathlib import Path

from tacit.attaching.requirements import uses_servers
from tacit.errors import TestbedError
from tacit.files import unmake
from tacit.strategy import AnyStrategy
from tacit_lab.cli.compare.display import Display
from tacit_lab.cli.compare.options import CompareOptions
from tacit_lab.cli.compare.recorder import ComparisonRecorder
from tacit_lab.cli.interrupts import Interrupted
from tacit_lab.cli.parsing import OUT
from tacit_lab.recipes.progress import Progress, record_in
from tacit_lab.records import COMPUTE_ONLY, EndRecord, Status
from tacit_lab.testbed import Failure, Result, Serving, Testbed


def train_all(options: CompareOptions, display: Display, recorder: ComparisonRecorder) -> None:
    """Train with each strategy, and once without communication; the recorder keeps the records.

    However this ends, the testbed is removed, and the trainings that had ended are recorded.

    Raises:
        TestbedError: The cluster cannot be emulated, or a rank failed; the message names rank and reason.
        Interrupted: A signal came.
    """
    built = False
    try:
        with Testbed(options.cluster) as bed:
            built = True
            for strategy in (*options.strategies, None):
                _Training(options, display, recorder, strategy).run(bed)
    finally:
        if not built:
            unmake(options.records, options.folder, OUT)


class _Training:
    """The training with one strategy; with None, without communication."""

    def __init__(
        self,
        options: CompareOptions,
        display: Display,
        recorder: ComparisonRecorder,
        strategy: AnyStrategy | None,
    ) -> None:
        self._options, self._display, self._recorder = options, display, recorder
        self._algorithm = COMPUTE_ONLY if strategy is None else strategy.name
        self._served = strategy is not None and uses_servers(strategy)

    def run(self, bed: Testbed) -> None:
        """Train to the end. If that fails, the reason is recorded, and the error raised."""
        self._display.started(self._algorithm)
        try:
            result = bed.run(
                self._command(bed),
                on_line=self._handle_line,
                timeout=self._options.timeout,
                servers=Serving() if self._served else None,
            )
            if not result.ok:
                raise TestbedError(self._reason(result))
        except Interrupted as error:
            self._record_end("interrupted", str(error))
            raise
        except Exception as error:
            self._record_end("failed", str(error))
            raise

    def _command(self, bed: Testbed) -> list[str]:
        """The arguments of the worker, which is another process and gets the strategy as text."""
        options = self._options
        arguments = {
            "--recipe": options.recipe,
            "--algorithm": self._algorithm,
            "--epochs": options.epochs,
            "--seed": options.seed,
            "--target": options.target,
        }
        if options.tensorboard is not None:
            arguments["--tensorboard"] = options.tensorboard
        words = [str(word) for argument in arguments.items() for word in argument]
        shaped = ["--shaped"] if bed.shaped else []
        return ["-m", "tacit_lab.recipes.worker", *words, *options.choices.words(), *shaped]

    def _handle_line(self, node: int, line: str) -> None:
        if (progress := Progress.from_line(line)) is not None:
            self._display.advanced(progress)
        elif (record := record_in(line)) is not None:
            self._recorder.add(record)
        else:
            self._recorder.add_output(f"[{self._algorithm}, node {node}] {line}")

    def _record_end(self, status: Status, error: str) -> None:
        self._recorder.add(EndRecord(algorithm=self._algorithm, status=status, error=error))

    def _reason(self, result: Result) -> str:
        if result.timed_out:
            why = f"it was stopped after {self._options.timeout:g} s, see --timeout"
        else:
            why = _describe(result.failures[0]) if result.failures else f"exit code {result.returncode}"
        output = _relative(self._options.output)
        return f"{self._algorithm} failed: {why}\nWhat the ranks printed is in {output}"


def _describe(failure: Failure) -> str:
    last = (failure.traceback or "").strip().rpartition("\n")[2]
    return f"{failure}: {last}" if last else str(failure)


def _relative(path: Path) -> Path:
    """The path as seen from the current folder, if it is inside."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
