"""Goodput where replicas die and come back: a small GPT, paced, undisturbed and under churn.

    python benchmarks/elastic.py                         # lowbit and diloco, 10 minutes, 3 seeds: 2 hours
    python benchmarks/elastic.py --quick                 # one seed, a minute each
    python benchmarks/elastic.py --algorithms dense --seeds 1 --cluster 6x1@100mbit,30ms
    python benchmarks/elastic.py --cluster 6x1+1@100mbit --hub 3 --arms rough    # by a hub, killed 3 times

A step lasts a fixed time on the wall, so that all replicas together leave half of the cores idle, and a dead
replica speeds nobody up. Every `--churn` seconds one replica is killed or frozen, by a schedule that the seed
decides; it is started again, or goes on, when the next one goes. Goodput is the samples of steps that came
into a round, over those of a replica that takes a step each `--pace` seconds, in the seconds for which
replicas were up: from the first step of each start, with a pace for that step. Each replica is a node of the
testbed. With a server beside them they exchange by a hub there, which is killed `--hub`
times, and back 5 seconds later.
"""

from __future__ import annotations

import argparse
import bisect
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from paired import hardware, save
from tacit_lab.cluster import Cluster
from tacit_lab.testbed import Testbed
from tacit_lab.testbed.churn import HUB_AWAY, Churn, ChurnEvent

RANK = Path(__file__).with_name("elastic_rank.py")
QUIET = 25.0
"""Seconds at the end without a fault."""
ATTEMPTS = 3.0
"""A run that takes so many times as long as it is to has hung."""
COUNTED = "with a pace for the first step of each start"
"""How goodput is counted, as rows say; of those until 2026-11-30 most are without that time."""
Lines = Sequence[dict[str, Any]]


class Heard:
    """What the replicas of one run say.

    Args:
        nodes: how many there are.
        quiet: the step after which there are no faults.
        hub_goes: see `Churn`.
    """

    def __init__(
        self, nodes: int, churn: float, seed: int, quiet: float, hub_goes: Sequence[float] = ()
    ) -> None:
        self.churn = Churn(churn, seed, lambda: len(self._begun) == nodes, hub_goes)
        self._begun: set[int] = set()
        self._quiet, self._idle = quiet, not churn
        self.processes: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        self.others: list[str] = []

    def heard(self, node: int, line: str) -> None:
        """Take in a line."""
        if not line.startswith('{"process"'):
            self.others.append(f"[node {node}] {line}")
            return
        said = json.loads(line)
        self.processes[node, said["process"]].append(said)
        self._begun.add(node)
        if self._idle or said.get("step", 0) >= self._quiet:
            self.churn.end()


def up(lines: Lines, events: Sequence[ChurnEvent], pace: float) -> tuple[int, float]:
    """A process' useful steps, and the seconds for which it was up, with a `pace` for the first of them.

    Args:
        events: what was done to its node.
    """
    taken = [each for each in lines if "step" in each]
    first = taken[0]["time"]
    since, seconds, killed = first - pace, 0.0, False
    for each in events:
        if each.at > first and not killed:
            seconds += each.at - since if each.what != "back" else 0.0
            since, killed = each.at, each.what == "killed"
    if not killed:
        seconds += max(0.0, taken[-1]["time"] - since)
    last = taken[-1]["round"]
    useful = [each for each in taken if not killed or each["round"] < last or each is taken[0]]
    return len(useful), seconds


def pause(
    processes: Mapping[tuple[int, int], Lines],
    events: Sequence[ChurnEvent],
    since: float,
    to: float,
    pace: float,
) -> float:
    """The longest time between two steps of a process that lies in this window, in part; beyond the pace.

    A time in which the process itself was frozen does not count.
    """
    longest = pace
    for (node, _), lines in processes.items():
        times = [each["time"] for each in lines if "step" in each]
        frozen = [e.at for e in events if e.node == node and e.what == "frozen"]
        for a, b in pairwise(times):
            if a < to and b > since and not any(a < at < b for at in frozen):
                longest = max(longest, b - a)
    return longest - pace


def run(bed: Testbed, algorithm: str, seed: int, churn: float, given: argparse.Namespace) -> dict[str, Any]:
    """One training; `churn`: seconds from one fault to the next, or 0."""
    steps = round(given.seconds / given.pace)
    hub_goes = [(given.seconds - QUIET) * (i + 0.5) / given.hub for i in range(given.hub)]
    heard = Heard(bed.cluster.nodes, churn, seed, steps - QUIET / given.pace, hub_goes)
    words = [algorithm, str(seed), str(given.pace), str(steps), str(given.silence)]
    began = time.time()
    limit = ATTEMPTS * (given.seconds + 30)
    result = bed.run([str(RANK), *words], on_line=heard.heard, timeout=limit, churn=heard.churn)
    processes = {key: said for key, said in heard.processes.items() if any("step" in each for each in said)}
    events, every = heard.churn.events, [*processes.values()]
    counts = [
        up(lines, [e for e in events if e.node == node], given.pace) for (node, _), lines in processes.items()
    ]
    useful, seconds = sum(each[0] for each in counts), sum(each[1] for each in counts)
    taken = sorted(line["time"] for lines in every for line in lines if "step" in line)
    curve = sorted(
        (bisect.bisect_right(taken, line["time"]), line["loss"])
        for lines in every
        for line in lines
        if "loss" in line and "step" in line
    )
    ends = [lines[-1] for lines in every if "sums" in lines[-1]]
    firsts = [lines[0]["time"] for lines in every]
    starts = {node: [e.at for e in events if e.node == node and e.what == "back"] for node, _ in processes}
    joins = [
        (lines[0]["time"], max(earlier))
        for (node, _), lines in processes.items()
        if (earlier := [at for at in starts[node] if at < lines[0]["time"]])
    ]
    gone: dict[str, list[float]] = {"killed": [], "frozen": []}
    for e in events:
        if e.what != "back":
            gone[e.what].append(round(pause(processes, events, e.at, e.at + given.pace, given.pace), 2))
    if not ends or result.failures:
        print(*heard.others[-30:], sep="\n")
    return {
        "algorithm": algorithm,
        "seed": seed,
        "cluster": str(bed.cluster),
        "churn": churn,
        "hub_killed": given.hub if churn else 0,
        "faults": {how: len(gone[how]) for how in gone},
        "steps": useful,
        "seconds_up": round(seconds, 1),
        "goodput": round(useful * given.pace / seconds, 4) if seconds else None,
        "counted": COUNTED,
        "until_first_step": round(min(firsts) - began, 1) if firsts else None,
        "pauses": {how: sorted(seconds) for how, seconds in gone.items()},
        "hub_pauses": [
            round(pause(processes, events, at, at + HUB_AWAY, given.pace), 2) for at in heard.churn.hub_went
        ],
        "joins": sorted(
            round(pause(processes, events, at - given.pace, at, given.pace), 2) for at, _ in joins
        ),
        "starts": sorted(round(at - started, 1) for at, started in joins),
        "loss": ends[0]["loss"] if ends else None,
        "curve": curve,
        "hangs": int(result.timed_out),
        "failures": [str(each) for each in result.failures],
        "ended": len(ends),
        "equal": len({json.dumps(each["sums"]) for each in ends}) == 1,
    }


def further(calm: dict[str, Any], rough: dict[str, Any]) -> float | None:
    """How much larger the loss under churn is at equal samples, as a share: the mean of the last third."""
    if not calm["curve"] or not rough["curve"]:
        return None
    last = min(calm["curve"][-1][0], rough["curve"][-1][0])
    ratios = [
        at_samples(rough["curve"], where) / at_samples(calm["curve"], where) - 1
        for where in range(2 * last // 3, last + 1, max(1, last // 60))
    ]
    return round(statistics.fmean(ratios), 4)


def at_samples(curve: Sequence[Sequence[float]], where: float) -> float:
    """The loss there, on a straight line between two points."""
    for (a, before), (b, after) in pairwise(curve):
        if a <= where <= b and a < b:
            return before + (after - before) * (where - a) / (b - a)
    return curve[-1][1] if where > curve[-1][0] else curve[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--algorithms", default="lowbit,diloco:sync_every=8")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--cluster", default="6x1@100mbit")
    parser.add_argument("--pace", type=float, default=0.6, help="seconds a step")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--churn", type=float, default=20, help="seconds from one fault to the next")
    parser.add_argument("--hub", type=int, default=0, help="how often the hub is killed")
    parser.add_argument("--silence", type=float, default=1.0, help="seconds until a silent one is given up")
    parser.add_argument("--arms", default="calm,rough", help="undisturbed, under churn, or both")
    parser.add_argument("--save", default="", help="the results' name")
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.seconds, given.churn = 1, 60, 8
    rows: list[dict[str, Any]] = []
    print(hardware())
    with Testbed(Cluster.parse(given.cluster)) as bed:
        for algorithm in given.algorithms.split(","):
            for seed in range(given.first, given.first + given.seeds):
                for arm in given.arms.split(","):
                    row = run(bed, algorithm, seed, given.churn if arm == "rough" else 0.0, given)
                    rows.append(row)
                    print({key: value for key, value in row.items() if key != "curve"}, flush=True)
                    if given.save:
                        save(given.save, {"hardware": hardware(), "settings": vars(given), "rows": rows})
                if given.arms == "calm,rough":
                    share = further(*rows[-2:])
                    print(f"loss at equal samples beyond that of undisturbed: {share:.2%}", flush=True)


if __name__ == "__main__":
    main()
