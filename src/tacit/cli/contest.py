"""Train every algorithm of a request in one testbed, one after the other."""

from __future__ import annotations

from pathlib import Path

from tacit.cli.book import Book
from tacit.cli.display import Display
from tacit.cli.interrupts import Interrupted
from tacit.cli.request import Request, takes_servers
from tacit.errors import TestbedError
from tacit.lab.recipes.progress import Progress, record_in
from tacit.lab.records import COMPUTE_ONLY, EndRecord, Status
from tacit.lab.testbed import Failure, Result, Serving, Testbed

__all__ = ["hold"]


def hold(request: Request, display: Display, book: Book) -> None:
    """Train all algorithms and once without communication; the book keeps the records.

    Raises:
        TestbedError: The cluster cannot be emulated, or a rank failed; the message names rank and reason.
        Interrupted: A signal came. In every case the testbed is gone, and what had finished is on record.
    """
    with Testbed(request.cluster) as bed:
        for algorithm in (*request.algorithms, COMPUTE_ONLY):
            _Heat(request, display, book, algorithm).train(bed)


class _Heat:
    """One algorithm's turn."""

    def __init__(self, request: Request, display: Display, book: Book, algorithm: str) -> None:
        self._request, self._display, self._book = request, display, book
        self._algorithm = algorithm

    def train(self, bed: Testbed) -> None:
        """Train to the end; a run that does not get there is on record with the reason."""
        self._display.started(self._algorithm)
        served = self._algorithm != COMPUTE_ONLY and takes_servers(self._algorithm)
        try:
            result = bed.run(
                self._command(bed),
                on_line=self._hear,
                timeout=self._request.timeout,
                servers=Serving() if served else None,
            )
            if not result.ok:
                raise TestbedError(self._reason(result))
        except Interrupted as error:
            self._ended("interrupted", str(error))
            raise
        except Exception as error:
            self._ended("failed", str(error))
            raise

    def _command(self, bed: Testbed) -> list[str]:
        request = self._request
        options = {
            "--recipe": request.recipe,
            "--algorithm": self._algorithm,
            "--epochs": request.epochs,
            "--seed": request.seed,
            "--target": request.target,
        }
        if request.tensorboard is not None:
            options["--tensorboard"] = request.tensorboard
        words = [str(word) for option in options.items() for word in option]
        return [
            "-m",
            "tacit.lab.recipes.worker",
            *words,
            *request.choices.words(),
            *(["--shaped"] if bed.shaped else []),
        ]

    def _hear(self, node: int, line: str) -> None:
        if (progress := Progress.from_line(line)) is not None:
            self._display.advanced(progress)
        elif (record := record_in(line)) is not None:
            self._book.keep(record)
        else:
            self._book.print(f"[{self._algorithm}, node {node}] {line}")

    def _ended(self, status: Status, error: str) -> None:
        self._book.keep(EndRecord(algorithm=self._algorithm, status=status, error=error))

    def _reason(self, result: Result) -> str:
        if result.timed_out:
            why = f"it was stopped after {self._request.timeout:g} s, see --timeout"
        else:
            why = _why(result.failures[0]) if result.failures else f"exit code {result.returncode}"
        return f"{self._algorithm} failed: {why}\nWhat the ranks printed is in {_near(self._request.output)}"


def _why(failure: Failure) -> str:
    last = (failure.traceback or "").strip().rpartition("\n")[2]
    return f"{failure}: {last}" if last else str(failure)


def _near(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
