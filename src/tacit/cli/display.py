"""Show how training goes while it goes, on standard error."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tacit.lab.recipes.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Display", "display"]

NOTHING = "–"


class Display(ABC):
    """Shows one line for each algorithm, or writes lines one after the other."""

    @abstractmethod
    def started(self, algorithm: str) -> None:
        """The ranks are being launched."""

    @abstractmethod
    def advanced(self, progress: Progress) -> None:
        """A message came from the ranks."""

    @abstractmethod
    def __enter__(self) -> Self:
        """Begin to show."""

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave what is shown as it is, and give the terminal back."""


def display(console: Console, algorithms: Sequence[str]) -> Display:
    """Bars on a terminal; plain lines elsewhere, such as in a log."""
    return Bars(console, algorithms) if console.is_terminal else Lines(console)


class Bars(Display):
    """A bar for each algorithm, all visible from the start."""

    def __init__(self, console: Console, algorithms: Sequence[str]) -> None:
        """Make the bars, empty."""
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[told]}"),
            console=console,
        )
        self._tasks = {
            each: self._bars.add_task(each, total=None, start=False, told="") for each in algorithms
        }

    def started(self, algorithm: str) -> None:
        """Let the bar pulse until the first message."""
        self._bars.update(self._tasks[algorithm], told="launching")
        self._bars.start_task(self._tasks[algorithm])

    def advanced(self, progress: Progress) -> None:
        """Move the bar."""
        self._bars.update(
            self._tasks[progress.algorithm],
            completed=progress.step,
            total=progress.steps,
            told=_told(progress),
        )

    def __enter__(self) -> Self:
        """Show the bars."""
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing."""
        self._bars.stop()


class Lines(Display):
    """A line at the end of each epoch, and every few seconds within it."""

    EVERY = 5.0

    def __init__(self, console: Console) -> None:
        """Write to this console."""
        self._console = console
        self._last = 0.0
        self._epoch = 0

    def started(self, algorithm: str) -> None:
        """Say so."""
        self._epoch = 0
        self._write(f"{algorithm}: launching")

    def advanced(self, progress: Progress) -> None:
        """Write the message if an epoch has ended, or the last line is a while ago."""
        if progress.epoch != self._epoch or time.monotonic() - self._last > self.EVERY:
            self._epoch = progress.epoch
            self._write(f"{progress.algorithm}: step {progress.step}/{progress.steps}, {_told(progress)}")

    def _write(self, line: str) -> None:
        self._last = time.monotonic()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to restore."""


def _told(progress: Progress) -> str:
    accuracy = NOTHING if progress.accuracy is None else f"{progress.accuracy:.3f}"
    megabytes = NOTHING if progress.mb is None else f"{progress.mb:.1f}"
    return f"loss {progress.loss:.3f}  accuracy {accuracy}  {progress.seconds:.1f} s  {megabytes} MB"
