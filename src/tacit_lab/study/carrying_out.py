"""Train what is missing, several trainings at once, each in a process of its own."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tacit.files import spared
from tacit_lab.study.jobs import Ended, StudyRun, append

J = TypeVar("J")
R = TypeVar("R")
_SAID: Any = None
"""In a process that trains: what it says is put here."""


def carry_out(
    missing: Callable[[Mapping[StudyRun, Ended]], Iterable[StudyRun]],
    train: Callable[[StudyRun], Ended],
    done: dict[StudyRun, Ended],
    path: Path,
    *,
    jobs: int,
    minutes: float,
    tell: Callable[[str], None],
) -> dict[StudyRun, Ended]:
    """Train what a study lacks, until all is there or the time is over.

    Args:
        missing: what is to be trained, given what has been.
        done: what has been trained; it is filled up.
        path: the file that each is added to.
        tell: called with a line for each training that ended, or failed.
    """

    def fail(run: StudyRun, error: Exception) -> None:
        tell(f"{told(run)}: {type(error).__name__}: {error}")

    def keep(run: StudyRun, ended: Ended) -> None:
        take(ended, done, path, tell)

    train_at_once(lambda: missing(done), train, keep, fail, jobs=jobs, minutes=minutes)
    return done


def take(ended: Ended, done: dict[StudyRun, Ended], path: Path, tell: Callable[[str], None]) -> None:
    """Keep what came of a training of a study."""
    done[ended.job] = ended
    with spared(f"{path.name} is not whole"):
        append(path, ended)
    tell(outcome(ended))


def train_at_once(
    missing: Callable[[], Iterable[J]],
    train: Callable[[J], R],
    keep: Callable[[J, R], None],
    fail: Callable[[J, Exception], None],
    *,
    begin: Callable[[J], None] = lambda job: None,
    hear: Callable[[Any], None] = lambda said: None,
    jobs: int,
    minutes: float = math.inf,
) -> None:
    """Train what is missing, `jobs` at once; what has failed is not tried again.

    Args:
        missing: what is to be trained now; it is asked again and again.
        train: trains one; it is called in another process, so it must be one that can be pickled.
        keep: called with what came of one.
        fail: called with why one failed.
        begin: called with one that is begun.
        hear: called with what `train` has said by `say`.
        minutes: none is begun after so many.
    """
    until, tried = time.monotonic() + 60 * minutes, set[J]()
    context = multiprocessing.get_context("spawn")
    said = context.SimpleQueue()
    with context.Pool(jobs, _begin, (said,)) as pool:
        running: dict[J, Any] = {}
        while True:
            for job in missing() if len(running) < jobs else ():
                if len(running) >= jobs or time.monotonic() > until:
                    break
                if job not in tried:
                    tried.add(job)
                    begin(job)
                    running[job] = pool.apply_async(train, (job,))
            if not running:
                return
            time.sleep(0.2)
            while not said.empty():
                hear(said.get())
            for job in [job for job, result in running.items() if result.ready()]:
                try:
                    found = running.pop(job).get()
                except Exception as error:
                    fail(job, error)
                else:
                    keep(job, found)


def say(what: object) -> None:
    """In a process that trains: have the one that waits for it hear this."""
    _SAID.put(what)


def _begin(said: Any) -> None:
    """In a process that trains: one thread, and no longer than the command."""
    global _SAID
    import signal

    import torch

    from tacit_lab.testbed.network.linux import die_with_parent

    _SAID = said
    torch.set_num_threads(1)
    die_with_parent(signal.SIGKILL)


def told(job: StudyRun) -> str:
    """A training in words."""
    return f"{job.task} {job.steps} steps, {job.arm}, seed {job.seed}, rate x {job.rate:g}"


def outcome(ended: Ended) -> str:
    """What came of it, in a line."""
    sent = f"{ended.share:.2%} of the bytes"
    if ended.on_cluster:
        sent = "bytes not counted" if ended.megabytes is None else f"{ended.megabytes:.1f} MB"
    return f"{told(ended.job)}: {ended.accuracy:.4f}, loss {ended.loss:.4f}, {sent}, {ended.seconds:.0f} s"
