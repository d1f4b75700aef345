"""Random faults among members that come and go: who lives must end, and all of them equal.

    python benchmarks/fault_members.py                 # 300 faults: half an hour
    python benchmarks/fault_members.py --faults 30

A training begins with three members of a small model. Every half second to two, something happens: a member
is killed, frozen for some seconds, or asked to leave (SIGTERM), another one comes, or the store is killed and
started again. Then all have a quiet while in which to close after the same step. A hang is a member that has
not ended then. Wrong is one that ends by an error, or with other parameters than the others, or that has
learned nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing as mp
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fault_member
from paired import hardware, save

ALGORITHMS = (
    "lowbit:sync_every=2",
    "lowbit:sync_every=2,late=1",
    "localsgd:sync_every=4",
    "diloco:sync_every=8",
    "streaming-diloco:sync_every=12,fragments=2",
    "sparseloco:sync_every=8",
    "dense",
    "topk:ratio=0.1",
    "powersgd",
    "zeroone-adam:sync_every=4",
)
MOST, LEAST = 6, 2
"""Members that are at work."""
SHARE = 10
"""Faults in a training."""
MARGIN = 100
"""Steps that are left when the last fault is over."""
LIMIT = 300.0
"""Seconds from then on after which one that has not ended has hung; a busy machine starts it slowly."""


@dataclass
class Training:
    """One training and its processes."""

    algorithm: str
    folder: Path
    chance: random.Random
    faults: Counter[str] = field(default_factory=Counter)
    at_work: list[ForkServerProcess] = field(default_factory=list)
    frozen: list[tuple[float, ForkServerProcess]] = field(default_factory=list)
    gone: list[ForkServerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload([fault_member.__name__])
        self._reached, self._last = self._context.RawValue("q", 0), self._context.RawValue("q", 1 << 60)
        self._store, self._port, self._store_at = self._serve(0), 0, math.inf
        assert self._store.stdout is not None
        self._port = int(self._store.stdout.readline().split()[-1])

    def _serve(self, port: int) -> subprocess.Popen[str]:
        words = ["-u", "-m", "tacit.members.store", "--host", "127.0.0.1", "--port", str(port)]
        return subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)

    def come(self) -> None:
        """Start a member."""
        store = f"127.0.0.1:{self._port}"
        arguments = (store, self.algorithm, str(self.folder), self._reached, self._last)
        process = self._context.Process(target=fault_member.train, args=arguments)
        process.start()
        self.at_work.append(process)

    def fault(self) -> None:
        """Have something happen."""
        kinds: dict[str, Callable[[], None]] = {}
        if len(self._begun) > LEAST:
            kinds |= {"kill": self._kill, "freeze": self._freeze, "leave": self._leave}
        if len(self.at_work) + len(self.frozen) < MOST:
            kinds["come"] = self.come
        if self._store_at == math.inf and self.chance.random() < 0.5:
            kinds["store"] = self._take_store
        kind = self.chance.choice([*kinds])
        kinds[kind]()
        self.faults[kind] += 1

    @property
    def _begun(self) -> list[ForkServerProcess]:
        """Those at work that have met the others."""
        return [each for each in self.at_work if (self.folder / f"{each.pid}.begun").exists()]

    def _one(self) -> ForkServerProcess:
        process = self.chance.choice(self._begun)
        self.at_work.remove(process)
        return process

    def _kill(self) -> None:
        process = self._one()
        _signal(process, signal.SIGKILL)
        self.gone.append(process)

    def _freeze(self) -> None:
        process = self._one()
        _signal(process, signal.SIGSTOP)
        self.frozen.append((time.monotonic() + self.chance.uniform(0.2, 5), process))

    def _leave(self) -> None:
        process = self._one()
        _signal(process, signal.SIGTERM)
        self.gone.append(process)

    def _take_store(self) -> None:
        self._store.kill()
        self._store.wait()
        self._store_at = time.monotonic() + self.chance.uniform(0, 3)

    def mend(self, now: float) -> None:
        """Bring back what is due."""
        for due in [each for each in self.frozen if each[0] <= now]:
            self.frozen.remove(due)
            _signal(due[1], signal.SIGCONT)
            self.at_work.append(due[1])
        if self._store_at <= now:
            self._store, self._store_at = self._serve(self._port), math.inf

    def played(self, faults: int) -> list[str]:
        """So many faults, and the end. Returns what was wrong."""
        for _ in range(LEAST + 1):
            self.come()
        for _ in range(faults):
            until = time.monotonic() + self.chance.uniform(0.5, 2)
            self._pass(lambda: len(self._begun) == len(self.at_work), LIMIT)
            self._pass(lambda until=until: time.monotonic() > until, LIMIT)  # type: ignore[misc]
            self.fault()
        self._pass(lambda: not self.frozen and self._store_at == math.inf, LIMIT)
        self._pass(lambda: len(self._begun) == len(self.at_work), LIMIT)
        self._last.value = self._reached.value + MARGIN
        self._pass(lambda: not any(each.is_alive() for each in (*self.at_work, *self.gone)), LIMIT)
        wrong = [f"hang: {each.pid} has not ended" for each in (*self.at_work, *self.gone) if each.is_alive()]
        return wrong + self._judged()

    def _pass(self, until: Callable[[], bool], seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not until() and time.monotonic() < limit:
            self.mend(time.monotonic())
            time.sleep(0.02)

    def _judged(self) -> list[str]:
        wrong, ends = [], []
        for each in self.at_work:
            text = self.folder / f"{each.pid}.json"
            if text.exists():
                ends.append(json.loads(text.read_text()))
            elif not each.is_alive():
                said = (self.folder / f"{each.pid}.err").read_text().strip().splitlines()[-1:]
                wrong.append(f"wrong end: exit code {each.exitcode}: {said}")
        if len({json.dumps(each["sums"]) for each in ends}) > 1:
            apart = [(each["step"], each["members"], each["sums"][0]) for each in ends]
            wrong.append(f"wrong result: members end apart: {apart}")
        wrong += [f"wrong result: loss {each['loss']}" for each in ends if not each["loss"] < 1.0]
        return wrong

    def close(self) -> None:
        """Kill what is left."""
        for each in (*self.at_work, *self.gone, *(process for _, process in self.frozen)):
            _signal(each, signal.SIGKILL)
            each.join()
        self._store.kill()
        self._store.wait()


def _signal(process: ForkServerProcess, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        assert process.pid is not None
        os.kill(process.pid, number)


def trained(seed: int, faults: int, folder: Path) -> dict[str, Any]:
    """One training with so many faults."""
    training = Training(ALGORITHMS[seed % len(ALGORITHMS)], folder, random.Random(seed))
    began = time.monotonic()
    try:
        wrong = training.played(faults)
    finally:
        training.close()
    return {
        "seed": seed,
        "algorithm": training.algorithm,
        "faults": dict(training.faults),
        "seconds": round(time.monotonic() - began, 1),
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--faults", type=int, default=300, help="in all trainings together")
    parser.add_argument("--seed", type=int, default=0, help="of the first training")
    parser.add_argument("--keep", type=Path, help="a folder for what members say, of trainings gone wrong")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    given = parser.parse_args()
    rows, seed, left = [], given.seed, given.faults
    while left > 0:
        with TemporaryDirectory() as folder:
            row = trained(seed, min(SHARE, left), Path(folder))
            if row["wrong"] and given.keep:
                given.keep.mkdir(parents=True, exist_ok=True)
                Path(folder).rename(given.keep / str(seed))
                Path(folder).mkdir()
        print(json.dumps(row), flush=True)
        rows.append(row)
        seed, left = seed + 1, left - SHARE
    wrong = [each for row in rows for each in row["wrong"]]
    summary = {
        "faults": dict(sum((Counter(row["faults"]) for row in rows), Counter[str]())),
        "hangs": sum(each.startswith("hang") for each in wrong),
        "wrong": sum(not each.startswith("hang") for each in wrong),
    }
    print(json.dumps(summary))
    if given.save:
        print(save("fault-members", {"hardware": hardware(), "summary": summary, "rows": rows}))


if __name__ == "__main__":
    main()
