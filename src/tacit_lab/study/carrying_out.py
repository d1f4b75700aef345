"""Train what a study lacks, several trainings at once, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tacit.files import spared
from tacit_lab.study.jobs import Ended, StudyRun, append


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
    """Train what is missing, `jobs` at once, until all is there or the time is over.

    Args:
        missing: what is to be trained, given what has been.
        train: trains one; it is called in another process, so it must be one that can be pickled.
        done: what has been trained; it is filled up.
        path: the file that each is added to.
        minutes: none is begun after so many.
        tell: called with a line for each training that ended, or failed.
    """
    until, tried = time.monotonic() + 60 * minutes, set[StudyRun]()
    with multiprocessing.get_context("spawn").Pool(jobs, _begin) as pool:
        running: dict[StudyRun, Any] = {}
        while True:
            for job in missing(done) if len(running) < jobs else ():
                if len(running) >= jobs or time.monotonic() > until:
                    break
                if job not in tried:
                    tried.add(job)
                    running[job] = pool.apply_async(train, (job,))
            if not running:
                return done
            time.sleep(0.2)
            for job in [job for job, result in running.items() if result.ready()]:
                try:
                    ended = running.pop(job).get()
                except Exception as error:
                    tell(f"{told(job)}: {type(error).__name__}: {error}")
                    continue
                done[job] = ended
                with spared(f"{path.name} is not whole"):
                    append(path, ended)
                tell(outcome(ended))


def _begin() -> None:
    """In a process that trains: one thread, and no longer than the command."""
    import signal

    from tacit_lab.testbed.network.linux import die_with_parent

    os.environ["OMP_NUM_THREADS"] = "1"
    die_with_parent(signal.SIGKILL)


def told(job: StudyRun) -> str:
    """A training in words."""
    return f"{job.task} {job.steps} steps, {job.arm}, seed {job.seed}, rate x {job.rate:g}"


def outcome(ended: Ended) -> str:
    """What came of it, in a line."""
    return (
        f"{told(ended.job)}: {ended.accuracy:.4f}, loss {ended.loss:.4f}, {ended.share:.2%} of the bytes, "
        f"{ended.seconds:.0f} s"
    )
