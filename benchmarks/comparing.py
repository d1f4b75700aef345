"""Training runs made by `tacit compare`, each given as it ends; where the images for them are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep

from runs import Done, Run

EVERY = 0.5
"""Seconds between two looks at what has ended."""
LAST = 2000
"""Characters of what the ranks printed that are kept of a failure."""
ARCHIVES = ("cifar10-jpeg-q75.tar.xz", "cifar-10-binary.tar.gz")
"""The names of files that hold CIFAR-10, the preferred one first."""


def by_compare(group: Run, algorithms: Sequence[str]) -> Iterator[Done]:
    """Make runs by one call of `tacit compare`; a call that trains nothing fails all of them."""
    with TemporaryDirectory(prefix="tacit-grid-") as folder:
        out = Path(folder) / "out"
        given, said = yield from watched(group, _words(group, algorithms, out), out)
        if said is not None and not given:
            for algorithm in algorithms:
                yield Done(replace(group, algorithm=algorithm), "failed", error=said)


def watched(
    group: Run, command: Sequence[str], out: Path
) -> Generator[Done, None, tuple[set[str], str | None]]:
    """Runs that a command records in the folder `out`, as they end.

    Returns:
        Which algorithms had an end, and what the command printed last if it failed.
    """
    given: set[str] = set()
    printed = out.with_name("printed")
    with _started(command, printed) as process:
        going = True
        while going:
            going = process.poll() is None
            for done in _ended(group, out):
                if done.run.algorithm not in given:
                    given.add(done.run.algorithm)
                    yield done
            sleep(EVERY if going else 0.0)
    return given, printed.read_text()[-LAST:].strip() if process.returncode else None


def _words(group: Run, algorithms: Sequence[str], out: Path) -> list[str]:
    from tacit import algorithms as named
    from tacit.attaching.requirements import uses_servers

    words = ["compare", *group.recipe, "--algorithms", ",".join(algorithms), "--cluster", group.cluster]
    words += ["--seeds", str(group.seed), "--out", str(out), "--json"]
    # A grid that is resumed may have left only what has no use for servers, and then they are refused.
    served = group.servers and any(uses_servers(named.parse(each)) for each in algorithms)
    words += ["--servers", str(group.servers)] if served else []
    words += ["--epochs", str(group.epochs)] if group.epochs else []
    return [sys.executable, "-m", "tacit_lab", *words]


@contextmanager
def _started(words: Sequence[str], printed: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command under way; it is ended on the way out, so that it can take its cluster down."""
    with printed.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait()


def _ended(group: Run, out: Path) -> Iterator[Done]:
    """The runs on record that have ended; a line that is being written is for the next look."""
    from tacit_lab import records

    file = out / "records.jsonl"
    text = file.read_bytes() if file.exists() else b""
    found = [records.parse(line) for line in text[: text.rfind(b"\n") + 1].decode().splitlines()]
    heads = {each.algorithm: each for each in found if isinstance(each, records.RunRecord)}
    for end in found:
        if not isinstance(end, records.EndRecord):
            continue
        head = heads.get(end.algorithm)
        yield Done(
            run=replace(group, algorithm=end.algorithm),
            status=end.status,
            accuracy=end.accuracy,
            loss=end.loss,
            seconds=end.seconds,
            seconds_to_target=end.seconds_to_target,
            steps=end.steps,
            megabytes=end.mb_between_nodes,
            parameters=head.parameters if head else None,
            strategy=head.strategy if head else "",
            curve=[
                [each.step, each.seconds, each.loss, each.accuracy]
                for each in found
                if isinstance(each, records.EpochRecord) and each.algorithm == end.algorithm
            ],
            metrics=end.metrics,
            error=None if end.error is None else f"{end.error}\n{_printed(out)}",
        )


def _printed(out: Path) -> str:
    log = out / "output.log"
    return log.read_text()[-LAST:] if log.exists() else ""


def images_or(until_then: str, told: str | None = None, *, needed: bool = False) -> Path | None:
    """As `images`; where they are nowhere, and neither `told` of nor `needed`, say so and give None."""
    try:
        return images(told)
    except SystemExit as error:
        if told or needed:
            raise
        print(f"{error}\nUntil then {until_then}.", file=sys.stderr)
        return None


def images(told: str | None = None) -> Path:
    """Where CIFAR-10 is: as told, in the folder TACIT_DATA, or where `tacit compare --download` keeps it.

    A folder that holds one of its archives stands for the archive.

    Raises:
        SystemExit: it is nowhere; the message says where that was looked for, and how to get it.
    """
    from tacit_lab.recipes.data import download

    root = os.environ.get("TACIT_DATA") if told is None else told
    places = [Path(root, name) for name in ARCHIVES] if root else []
    if told is not None:
        places.append(Path(told))
    else:
        fetched = download.fetched("cifar10")
        places += [fetched] if fetched else []
    for place in places:
        if place.exists():
            return place.absolute()
    looked = told or ", ".join([*map(str, places), "what tacit has downloaded"])
    raise SystemExit(
        f"CIFAR-10 is not here; looked at {looked}. Give --data PATH (a folder of images, or an archive), "
        "set TACIT_DATA to the folder that holds it, or fetch it: tacit compare cifar10 --download --epochs 1"
    )
