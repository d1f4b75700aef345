"""Show on standard error how far each training is."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tacit_lab.recipes.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console

MISSING = "–"
"""Stands for a number that is not known yet."""


class Display(ABC):
    """Shows the progress of one training after the other. A context manager."""

    @abstractmethod
    def started(self, algorithm: str, place: str) -> None:
        """Show that the ranks of this algorithm's training are being launched.

        Args:
            place: such as "training 7 of about 19".
        """

    @abstractmethod
    def advanced(self, progress: Progress) -> None:
        """Show a progress message of the ranks."""

    @abstractmethod
    def __enter__(self) -> Self:
        """Start the display."""

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the display; what it has shown stays on the terminal."""


def open_display(console: Console, algorithms: Sequence[str]) -> Display:
    """A display with bars on a terminal, and with plain lines elsewhere, such as in a log."""
    return Bars(console, algorithms) if console.is_terminal else Lines(console)


class Bars(Display):
    """A progress bar for each algorithm, all visible from the start."""

    def __init__(self, console: Console, algorithms: Sequence[str]) -> None:
        """Make an empty bar for each of these algorithms."""
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            console=console,
        )
        self._tasks = {
            each: self._bars.add_task(each, total=None, start=False, numbers="") for each in algorithms
        }

    def started(self, algorithm: str, place: str) -> None:
        """The bar pulses until the first message."""
        if algorithm not in self._tasks:
            self._tasks[algorithm] = self._bars.add_task(algorithm, total=None, start=False, numbers="")
        self._bars.update(self._tasks[algorithm], numbers=f"launching, {place}")
        self._bars.start_task(self._tasks[algorithm])

    def advanced(self, progress: Progress) -> None:
        """Move the bar of the message's algorithm."""
        self._bars.update(
            self._tasks[progress.algorithm],
            completed=progress.step,
            total=progress.steps,
            numbers=_numbers(progress),
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
    """Seconds between two lines within an epoch."""

    def __init__(self, console: Console) -> None:
        """Write to this console."""
        self._console = console
        self._last = 0.0
        self._epochs: dict[str, int] = {}

    def started(self, algorithm: str, place: str) -> None:
        """Write a line."""
        self._epochs[algorithm] = 0
        self._write(f"{algorithm}: launching, {place}")

    def advanced(self, progress: Progress) -> None:
        """Write a line if an epoch has ended, or if the last line is more than `EVERY` seconds ago."""
        name = progress.algorithm
        if progress.epoch != self._epochs.get(name, 0) or time.monotonic() - self._last > self.EVERY:
            self._epochs[name] = progress.epoch
            steps = "" if progress.steps is None else f"/{progress.steps}"
            self._write(f"{name}: step {progress.step}{steps}, {_numbers(progress)}")

    def _write(self, line: str) -> None:
        self._last = time.monotonic()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        """There is nothing to start."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is nothing to stop."""


def _numbers(progress: Progress) -> str:
    accuracy = MISSING if progress.accuracy is None else f"{progress.accuracy:.3f}"
    megabytes = MISSING if progress.mb is None else f"{progress.mb:.1f}"
    loss = MISSING if progress.loss is None else f"{progress.loss:.3f}"
    return f"loss {loss}  accuracy {accuracy}  {progress.seconds:.1f} s  {megabytes} MB"
