"""MP² compared with its paper's baselines and with others at equal bytes: 4 workers and a parameter server.

    python benchmarks/mp2.py --data PATH     # about 2.5 hours; goes on where it was interrupted
    python benchmarks/mp2.py --quick         # under 10 minutes: digits, from one seed, and nothing is judged
    python benchmarks/mp2.py --json          # the last line on stdout is one JSON object

Accuracy and bytes are of whole trainings at 1 Gbit/s, from 3 seeds, paired with plain pushing (`ps`); times
of trainings of `digits` at 100 Mbit/s. Ratios are chosen so that each method sends about a ninth of what
plain pushing sends, both ways and with positions. Local SGD and QSGD use no server, but a ring. WNN trains
half as many epochs; it leaps five times or more, and trains on. The predictor was trained on other networks
and other data (`tacit predictor`). What predicting costs is timed by itself, for all ranks.
The page is benchmarks/results/DATE-papers-mp2.md, where neither --quick nor --only is given.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import mp2_page
from comparing import images_or
from experiments import NETWORKS, Scale, settled
from experiments import words as words_of
from grid import COMPUTE_ONLY, RUNS, Done, Run, carry_out, held, paired
from paired import RESULTS, conclude, hardware
from tacit.files import put
from tacit_lab.intervals import Mean

FAST, SLOW = "4x1@1gbit", "4x1@100mbit"
WORKERS = 4
SEEDS = 3
FILE = "mp2-runs-4.jsonl"
"""Not mp2-runs.jsonl, nor those of 2 and 3: they hold runs of what these names stood for then."""
ARMS = {
    "ps-topk": "ps-topk:ratio=0.033",
    "ps-dgc": "ps-dgc:ratio=0.033,masking=false,warmup_steps={warmup}",
    "localsgd": "localsgd:sync_every=9",
    "qsgd": "qsgd",
    "wnn": "wnn:period={period}",
    "lowbit": "lowbit",
    "lowbit, every second step": "lowbit:sync_every=2",
    "lowbit, two bits": "lowbit:bits=2",
    "mp2": "mp2",
    "mp2, every fourth step": "mp2:rescale=false,sync_every=4",
    "the same, nothing predicted": "mp2:rescale=false,sync_every=4,predictor=stale",
    "the same, exponential": "mp2:rescale=false,sync_every=4,predictor=exponential",
    "the same, own steps kept": "mp2:sync_every=4,predictor=own",
    "predictive": "predictive:ratio=0.13",
    "predictive, by default": "predictive",
}
QUICK = ("ps-topk", "lowbit", "lowbit, two bits", "mp2")
MAIN = (
    "ps-topk",
    "ps-dgc",
    "localsgd",
    "qsgd",
    "wnn",
    "lowbit",
    "lowbit, two bits",
    "mp2",
    "predictive",
)
"""On the networks beside the first two."""
HALVED = ("wnn",)
"""Trained for half as many epochs."""
PROMISED = {"bytes": 0.1102, "time": 1 - 0.4732, "difference": -0.005, "cost": 0.2}
"""Of plain pushing's bytes and time, at most; of its accuracy, at least; of its step, for predicting."""
LEAPS = 5
"""How often WNN leaps at least. The paper's trains for 25 epochs and more, and leaps after every fifth."""
WARMING = 20
"""Which part of a training DGC's warm-up is, one in so many: the paper's is 4 epochs of 90."""
WEIGHTY = 0.6
"""From which share of communication in a plain step on the promise of time holds."""


@dataclass(frozen=True)
class Task:
    """What is trained, for how many epochs of how many steps on 4 workers, and with which arms."""

    words: tuple[str, ...]
    epochs: int
    steps: int
    arms: tuple[str, ...] = tuple(ARMS)

    @property
    def name(self) -> str:
        """The network and its precision, or the recipe that has but one."""
        chosen = dict(zip(self.words[1::2], self.words[2::2], strict=True))
        return f"{chosen['--model']}, {chosen['--precision']}" if chosen else self.words[0]

    def run(self, arm: str, cluster: str, seed: int) -> Run:
        """One training of an arm; "ps" is plain pushing."""
        epochs = -(-self.epochs // 2) if arm in HALVED else self.epochs
        steps = epochs * self.steps
        told = {"period": period_of_leaps(steps), "warmup": max(4, steps // WARMING)}
        text = ARMS.get(arm, arm).format(**told)
        return Run(self.words, text, cluster, servers=1, seed=seed, epochs=epochs)


def period_of_leaps(steps: int) -> int:
    """A period such that WNN, which leaps after every fifth, does so at least five times, and trains on.

    Of those between a thirtieth and a twenty-fifth of all steps: what leaves most behind the last leap.
    """
    periods = range(max(1, steps // (5 * (LEAPS + 1))), max(1, steps // (5 * LEAPS)) + 1)
    return max(periods, key=lambda period: steps % (5 * period))


DIGITS = Task(("digits",), 6, 22)


def tasks(data: Path | None, there: Collection[Run] = ()) -> list[Task]:
    """`digits`, and where there are images, three networks on 10,000 of them.

    Each is in the precision in which all its runs are `there`, or else in the one that is faster here.
    """
    if data is None:
        return [DIGITS]

    def resnet(scale: Scale) -> Task:
        words = ("cifar10", "--data", str(data), "--model", "resnet8", "--precision", scale.precision)
        return Task((*words, "--limit", "10000"), 8, 10_000 // (32 * WORKERS))

    def other(name: str, scale: Scale) -> Task:
        network = NETWORKS[name]
        return Task(words_of(network, scale), network.epochs, network.steps, MAIN)

    def made(of: Callable[[Scale], Task]) -> Task:
        return of(settled(Scale(data=str(data)), lambda scale: _runs(of(scale)), there))

    return [DIGITS, made(resnet), made(partial(other, "vgg11-narrow")), made(partial(other, "alexnet"))]


def _runs(task: Task, cluster: str = FAST, seeds: int = SEEDS) -> list[Run]:
    return [task.run(arm, cluster, seed) for seed in range(seeds) for arm in ("ps", *task.arms)]


@dataclass
class Found:
    """What was measured.

    Attributes:
        rows: a dict for each arm of each task, means over the seeds; `done`: the runs behind them.
        share: of communication in a plain step on slow links, 0..1; None where that was not measured.
        spent: seconds of predicting; see `cost`.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    share: float | None = None
    spent: dict[str, float] = field(default_factory=dict)


def measured(task: Task, cluster: str, seeds: int, path: Path, into: Found) -> None:
    """Train what is missing; a row an arm, of means over the seeds."""
    into.done += carry_out(_runs(task, cluster, seeds), path)
    done = {each.run: each for each in into.done if each.status == "ok"}
    for arm in task.arms:
        # Paired by seed with plain pushing, which may have trained for longer.
        both = []
        for seed in range(seeds):
            mine, plain = (done.get(task.run(each, cluster, seed).key) for each in (arm, "ps"))
            if mine is not None and plain is not None:
                both += [replace(mine, run=replace(plain.run, algorithm=arm)), plain]
        about = {"task": task.name, "cluster": cluster, "epochs": task.epochs, "arm": arm}
        attached = task.run(arm, cluster, 0).algorithm
        into.rows += [{**about, **_told(row, attached)} for row in paired(both, "ps")]


def _told(row: Mapping[str, Any], attached: str) -> dict[str, Any]:
    texts = {key: row[key] for key in ("accuracy", "baseline_accuracy", "difference", "bytes", "time")}
    plain = {key: None if each is None else each.mean for key, each in texts.items()}
    half: Mean | None = row["difference"]
    return {
        "attached": attached,
        **plain,
        "half_interval": half and half.half,
        "seeds": len(row["seeds"]),
    }


def of_communication(done: Sequence[Done]) -> float | None:
    """Which share of a plain training on the slow links is not computing."""
    seconds = {each.run.algorithm: each.seconds for each in done}
    plain, alone = seconds.get("ps"), seconds.get(COMPUTE_ONLY)
    return None if not plain or not alone else 1 - alone / plain


def cost(rounds: int = 20) -> dict[str, float]:
    """Seconds of predicting for the parameters of `digits`: a round on one rank, a step on all together.

    It is what a round of `mp2` takes more than one in which nothing is predicted.
    """
    predicted, stale = (
        _round_seconds(ARMS[arm], rounds) for arm in ("mp2, every fourth step", "the same, nothing predicted")
    )
    each, every = max(0.0, predicted[0] - stale[0]), predicted[1]
    return {"round_seconds": each, "step_seconds_of_all": each * WORKERS / every, "entries": predicted[2]}


def _round_seconds(text: str, rounds: int) -> tuple[float, int, float]:
    """The median of some rounds of a single rank; steps from one to the next; and entries."""
    import torch

    from tacit import algorithms
    from tacit.replicas.rounds_after_step import OptimizerHook
    from tacit.rounds import Every
    from tacit.session import Session, Training
    from tacit.transports.loopback import Loopback, LoopbackTransport
    from tacit_lab.recipes.digits import Digits

    torch.set_num_threads(1)
    (level,) = algorithms.parse(text).levels
    named = {name: p.detach() for name, p in Digits().model(0).named_parameters()}
    training = Training(rates=lambda: dict.fromkeys(named, 0.1))
    session = Session(level, named, LoopbackTransport(Loopback(1), 0), [[*named]], training=training)
    door = OptimizerHook(session, named)
    seconds: list[float] = []
    while len(seconds) < rounds:
        for p in named.values():
            p.add_(torch.randn_like(p), alpha=0.01)
        exchanges, start = session.communicates(), perf_counter()
        door.after_step()
        if exchanges and session.step > 20:  # before that, rounds send everything
            seconds.append(perf_counter() - start)
    session.close()
    assert isinstance(level.rounds, Every)
    return statistics.median(seconds), level.rounds.sync_every, float(sum(p.numel() for p in named.values()))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text."""
    lines = [
        f"{'task':18} {'links':12} {'arm':24} {'bytes':>7} {'time':>6} {'accuracy':>9}  against ps (95 %)"
    ]
    for row in rows:
        half = "one seed" if row["half_interval"] is None else f"± {row['half_interval']:.4f}"
        lines.append(
            f"{row['task']:18} {row['cluster']:12} {row['arm']:24} {row['bytes']:7.1%} {row['time']:6.2f} "
            f"{row['accuracy']:9.4f}  {row['difference']:+.4f} {half}"
        )
    return "\n".join(lines)


def verdicts(rows: Sequence[Mapping[str, Any]], share: float | None, spent: Mapping[str, float]) -> list[str]:
    """What was promised of mp2, and what was found of it and of `lowbit`."""
    told = []
    for row in rows:
        if row["arm"] not in mp2_page.HELD:
            continue
        said = {"bytes": row["bytes"] <= PROMISED["bytes"]}
        if row["cluster"] == SLOW and share is not None and share >= WEIGHTY:
            said["time"] = row["time"] <= PROMISED["time"]
        if row["cluster"] == FAST:
            said["difference"] = row["difference"] >= PROMISED["difference"]
        told += [
            f"{row['task']} {row['cluster']} {row['arm']}: {name} {row[name]:+.4f}, promised "
            f"{PROMISED[name]:+.4f}{' met' if met else ' MISSED'}"
            for name, met in said.items()
        ]
    if "of_plain_step" in spent:
        met = spent["of_plain_step"] <= PROMISED["cost"]
        told.append(
            f"predicting, on all ranks: {spent['of_plain_step']:.1%} of a plain step, promised at most "
            f"{PROMISED['cost']:.0%}{' met' if met else ' MISSED'}"
        )
    return told


def found(quick: bool, only: str | None, data: Path | None, folder: Path) -> Found:
    """Measure what is missing of `only` one part, or all."""
    into, seeds, path = Found(spent=cost()), 1 if quick else SEEDS, folder / FILE
    for task in tasks(data, held(path)):
        if only in (None, task.words[0]):
            measured(replace(task, arms=QUICK) if quick else task, FAST, seeds, path, into)
    if only in (None, "time"):
        task = replace(DIGITS, epochs=2, arms=QUICK) if quick else DIGITS
        measured(task, SLOW, 1, path, into)
        slow = carry_out([task.run("ps", SLOW, 0)], path, tell=lambda text: None)
        into.share = of_communication(slow)
        for each in slow:
            if each.run.algorithm == "ps" and each.seconds and each.steps:
                into.spent["of_plain_step"] = into.spent["step_seconds_of_all"] * each.steps / each.seconds
    return into


def images_for(quick: bool, only: str | None, told: str | None) -> Path | None:
    """CIFAR-10, where the part that is asked for trains on it."""
    if quick or only not in (None, "cifar10"):
        return None
    return images_or("there is only digits", told, needed=only == "cifar10")


def written(everything: Found, command: str, folder: Path) -> Path:
    """The page of all that was measured."""
    path = folder / f"{date.today().isoformat()}-papers-mp2.md"
    text = mp2_page.page(command, everything.rows, everything.done, everything.share, everything.spent, SLOW)
    put(path, text)
    print(f"wrote {path}", file=sys.stderr)
    return path


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="CIFAR-10, as `tacit compare cifar10 --data` takes it")
    parser.add_argument("--quick", action="store_true", help="a few arms on digits, from one seed")
    parser.add_argument("--only", choices=("digits", "cifar10", "time"), help="one part")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-mp2.json")
    options = parser.parse_args()
    folder = RUNS if options.quick else RESULTS
    data = images_for(options.quick, options.only, options.data)
    everything = found(options.quick, options.only, data, folder)
    if not options.quick and options.only is None:
        written(everything, "python benchmarks/mp2.py", folder)
    said = [] if options.quick else verdicts(everything.rows, everything.share, everything.spent)
    share = everything.share
    shown = [table(everything.rows)]
    shown += [] if share is None else [f"communication in a plain step: {share:.0%}"]
    result = {
        "benchmark": "mp2",
        "quick": options.quick,
        "hardware": hardware(),
        "commits": sorted({str(each.hardware.get("commit")) for each in everything.done}),
        "rows": everything.rows,
        "communication_share": share,
        "cost": everything.spent,
        "verdicts": said,
    }
    conclude(result, "\n".join([*shown, *said]), options)


if __name__ == "__main__":
    main()
