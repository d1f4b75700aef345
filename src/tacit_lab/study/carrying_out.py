"""Train what is missing, several trainings at once, each in a process of its own."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from tacit.errors import TestbedError
from tacit.files import spared
from tacit_lab.study.jobs import Ended, StudyRun, append

J = TypeVar("J")
R = TypeVar("R")
_SAYS, _ENDS, _FAILS = "says", "ends", "fails"
_PIPE: Any = None
"""In a process that trains: to the one that waits for it."""


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
    idle: list[_Worker] = []
    running: dict[_Worker, J] = {}
    try:
        while True:
            for job in missing() if len(running) < jobs else ():
                if len(running) >= jobs or time.monotonic() > until:
                    break
                if job not in tried:
                    tried.add(job)
                    begin(job)
                    worker = idle.pop() if idle else _Worker(train)
                    running[worker] = job
                    worker.pipe.send(job)
            if not running:
                return
            heard: Any = wait([worker.pipe for worker in running], 0.2)
            for worker in [worker for worker in running if worker.pipe in heard]:
                try:
                    kind, value = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    fail(running.pop(worker), TestbedError(f"its process {_end(worker.process.exitcode)}"))
                    continue
                if kind == _SAYS:
                    hear(value)
                    continue
                job = running.pop(worker)
                idle.append(worker)
                if kind == _FAILS:
                    fail(job, value)
                else:
                    keep(job, value)
    finally:
        for worker in (*idle, *running):
            worker.process.kill()
            worker.process.join()


class _Worker:
    """A process that trains what is sent to it, one after the other, and answers (kind, value)."""

    def __init__(self, train: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(train, theirs), daemon=True)
        self.process.start()
        theirs.close()  # else nobody is told that the process has died


def _end(code: int | None) -> str:
    return "was killed, perhaps as memory ran out" if code == -signal.SIGKILL else f"ended with code {code}"


def say(what: object) -> None:
    """In a process that trains: have the one that waits for it hear this."""
    _PIPE.send((_SAYS, what))


def _work(train: Callable[[Any], Any], pipe: Any) -> None:
    """In a process that trains: one thread, and no longer than the command."""
    global _PIPE
    import torch

    from tacit_lab.testbed.network.linux import die_with_parent

    _PIPE = pipe
    torch.set_num_threads(1)
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the command ends this process
    while True:
        job = pipe.recv()
        try:
            answer = _ENDS, train(job)
        except Exception as error:
            answer = _FAILS, _portable(error)
        pipe.send(answer)


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same where it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return TestbedError(f"{type(error).__name__}: {error}")
    return error


def told(job: StudyRun) -> str:
    """A training in words."""
    return f"{job.task} {job.steps} steps, {job.arm}, seed {job.seed}, rate x {job.rate:g}"


def outcome(ended: Ended) -> str:
    """What came of it, in a line."""
    sent = f"{ended.share:.2%} of the bytes"
    if ended.on_cluster:
        sent = "bytes not counted" if ended.megabytes is None else f"{ended.megabytes:.1f} MB"
    return f"{told(ended.job)}: {ended.accuracy:.4f}, loss {ended.loss:.4f}, {sent}, {ended.seconds:.0f} s"
