"""Goodput where replicas die and come back: a small GPT, paced, undisturbed and under churn.

    python benchmarks/elastic.py             # lowbit and diloco, 6 replicas, 10 minutes, 3 seeds: 2 hours
    python benchmarks/elastic.py --quick     # one seed, a minute each
    python benchmarks/elastic.py --algorithms dense --seeds 1

A step lasts a fixed time on the wall, so that all replicas together leave half of the cores idle, and a dead
replica speeds nobody up. Every `--churn` seconds one replica is killed or frozen, in turn; it is back as many
seconds later. Goodput is the samples of steps that came into a round, over those of an undisturbed replica in
the seconds for which replicas were up, from the first step of each. Replicas are processes of this machine,
joined by its loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from paired import hardware, save

RANK = Path(__file__).with_name("elastic_rank.py")


@dataclass
class Replica:
    """A replica and its processes, one after another.

    Attributes:
        said: what each of them has said.
        down: (from, to): when it was frozen.
    """

    name: str
    process: subprocess.Popen[str] | None = None
    said: list[list[dict[str, Any]]] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    down: list[tuple[float, float]] = field(default_factory=list)

    def start(self, words: Sequence[str], env: dict[str, str]) -> None:
        """Start it, and read what it says."""
        command = [sys.executable, "-u", str(RANK), f"{self.name}{len(self.said)}", *words]
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        lines: list[dict[str, Any]] = []

        def read() -> None:
            assert process.stdout is not None
            lines.extend(map(json.loads, process.stdout))

        threading.Thread(target=read, daemon=True).start()
        self.process = process
        self.said.append(lines)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def samples(self) -> tuple[int, float]:
        """Useful steps, and seconds up."""
        steps, seconds = 0, 0.0
        for i, lines in enumerate(self.said):
            taken = [each for each in lines if "step" in each]
            if not taken:
                continue
            died = i < len(self.ended)
            last = taken[-1]["round"]
            useful = [each for each in taken if not died or each["round"] < last or each is taken[0]]
            steps += len(useful)
            end = self.ended[i] if died else taken[-1]["time"]
            seconds += end - taken[0]["time"]
        return steps, seconds - sum(to - since for since, to in self.down)


def run(algorithm: str, seed: int, churn: float, given: argparse.Namespace) -> dict[str, Any]:
    """One training; `churn`: seconds from one fault to the next, or 0."""
    store = subprocess.Popen(
        [sys.executable, "-m", "tacit.members.store", "--host", "127.0.0.1", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert store.stdout is not None
    port = store.stdout.readline().split()[-1]
    env = os.environ | {"TACIT_MEMBERS": f"127.0.0.1:{port}", "OMP_NUM_THREADS": "1"}
    until = time.time() + given.start + given.seconds
    words = [algorithm, str(seed), str(given.pace), str(given.seconds / given.pace)]
    replicas = [Replica(f"r{i}.") for i in range(given.replicas)]
    for each in replicas:
        each.start(words, env)
    draw, events = random.Random(seed), 0
    due: list[tuple[float, Replica, str]] = []
    following = time.time() + given.start + churn
    while time.time() < until - given.quiet:
        time.sleep(0.02)
        now = time.time()
        for at, replica, how in [each for each in due if each[0] <= now]:
            due.remove((at, replica, how))
            if how == "freeze":
                replica.signal(signal.SIGCONT)
                replica.down[-1] = (replica.down[-1][0], now)
            else:
                replica.start(words, env)
        if churn and now >= following:
            following += churn
            busy = {id(replica) for _, replica, _ in due}
            replica = draw.choice([each for each in replicas if id(each) not in busy])
            how, events = ("kill", "freeze")[events % 2], events + 1
            if how == "freeze":
                replica.signal(signal.SIGSTOP)
                replica.down.append((now, now))
            else:
                replica.signal(signal.SIGKILL)
                replica.ended.append(now)
            due.append((now + churn, replica, how))
    for _, replica, how in due:
        if how == "freeze":
            replica.signal(signal.SIGCONT)
            replica.down[-1] = (replica.down[-1][0], time.time())
        else:
            replica.start(words, env)
    kills = [at for replica in replicas for at in replica.ended]
    hangs = 0
    for each in replicas:
        assert each.process is not None
        try:
            each.process.wait(until - time.time() + 0.5 * given.seconds + 60)
        except subprocess.TimeoutExpired:
            hangs += 1
            each.process.kill()
    store.kill()
    last = [each.said[-1][-1] for each in replicas if each.said[-1]]
    totals = [each.samples() for each in replicas]
    steps, up = sum(each[0] for each in totals), sum(each[1] for each in totals)
    curve = sorted(
        (line["step"], line["loss"])
        for r in replicas
        for lines in r.said
        for line in lines
        if "loss" in line and "step" in line
    )
    return {
        "algorithm": algorithm,
        "seed": seed,
        "churn": churn,
        "faults": events,
        "steps": steps,
        "seconds_up": round(up, 1),
        "goodput": round(steps * given.pace / up, 4),
        "pauses": sorted(round(_pause(replicas, at, given.pace), 2) for at in kills),
        "loss": last[0].get("loss") if last else None,
        "curve": curve,
        "hangs": hangs,
        "ended": sum("sums" in each for each in last),
        "equal": len({json.dumps(each.get("sums")) for each in last}) == 1,
    }


def _pause(replicas: Sequence[Replica], at: float, pace: float) -> float:
    """For how long a kill kept the others from their next step, beyond the pace."""
    longest = 0.0
    for replica in replicas:
        for lines in replica.said:
            times = [
                line["time"] for line in lines if "step" in line and at - 2 * pace < line["time"] < at + 4
            ]
            if times and times[0] < at < times[-1]:
                longest = max(longest, *(late - soon for soon, late in pairwise(times)))
    return max(0.0, longest - pace)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--algorithms", default="lowbit,diloco:sync_every=8")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=6)
    parser.add_argument("--pace", type=float, default=0.6, help="seconds a step")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--churn", type=float, default=20, help="seconds from one fault to the next")
    parser.add_argument("--start", type=float, default=20, help="seconds in which all begin")
    parser.add_argument("--quiet", type=float, default=25, help="seconds at the end without a fault")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.seconds, given.churn = 1, 60, 8
    rows = []
    print(hardware())
    for algorithm in given.algorithms.split(","):
        for seed in range(given.seeds):
            for churn in (0.0, given.churn):
                row = run(algorithm, seed, churn, given)
                rows.append(row)
                print({key: value for key, value in row.items() if key != "curve"}, flush=True)
            calm, rough = rows[-2:]
            print(f"goodput of undisturbed: {rough['goodput'] / calm['goodput']:.3f}", flush=True)
    if given.save:
        save("elastic", {"hardware": hardware(), "settings": vars(given), "rows": rows})


if __name__ == "__main__":
    main()
