"""What each algorithm costs in accuracy, against the length of training: the gap to plain training.

    python benchmarks/accuracy.py --data PATH            # hours; goes on where it was interrupted
    python benchmarks/accuracy.py --task mnist --steps 600 --arms "dense;topk" --data PATH
    python benchmarks/accuracy.py --quick                # under 10 minutes: digits, and nothing is claimed
    python benchmarks/accuracy.py --table --publish      # of what was trained until now: the pages
    python benchmarks/accuracy.py --task text-gpu --steps 3600 --device cuda     # all of it on a GPU
    TACIT_IMPORT=mine.py python benchmarks/accuracy.py --task digits --steps 110 --arms mine --runs mine.jsonl

Four workers train in one process (`in_one_process.py`): an algorithm whose course does not depend on the
network has the same trajectory there as on real ranks, which --check shows once. Each arm is trained with
three learning rates, and more where the best is at an end. The best is taken for all its seeds: by a
validation split (training images that no arm trains on), and of rates that this does not tell apart the one
with the lowest loss in training; for plain training (`dense`) likewise. An arm with an entropy coder is
trained for its bytes, and takes the accuracies of the arm without, which are the same bit for bit where
both run on one processor. Gaps are paired by seed: equal weights, order and augmentation. Bytes are by the
formulas of ring collectives, against a dense fp32 all-reduce after every step.

PATH holds cifar10 (an archive or a folder, as `tacit compare cifar10 --data` takes it) and mnist.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accuracy_page import publish, written
from grid import RUNS, Mean
from paired import RESULTS, conclude, hardware
from runs import append, lines

WORKERS = 4
FILE = "accuracy-runs.jsonl"
RATES = (0.5, 1.0, 2.0)
"""What the recipe's own learning rate is multiplied by, to choose from; more where the best is at an end."""
SIGNS, SMALLER = "signsgd", 1 / 128
"""signSGD moves each parameter by the rate itself, whatever the gradient: its rates are so much smaller."""
LIMITS = (1 / 1024, 16.0)
CHOOSING = 1000
"""The seed with which learning rates are chosen; no claim is made of it."""
VALIDATION = 2000
"""Training images that only learning rates are chosen by."""
PLAIN = "dense"
SWITCHING = 2e-4
"""Seconds after which a thread hands the interpreter on; workers are threads, and wait for each other."""
ARMS = (
    PLAIN,
    # About 10 % of the bytes.
    "lowbit",
    "topk:ratio=0.03",
    "localsgd:sync_every=10",
    "qsgd:bits=2",
    "mp2",
    # About 3 %.
    "lowbit:sync_every=2",
    "lowbit:bits=2",
    "topk:ratio=0.01",
    "topk:ratio=0.01,warmup_steps={tenth}",
    "dgc:ratio=0.01,warmup_steps={tenth},masking=false",
    "efsign",
    "localsgd:sync_every=32",
    "diloco:sync_every=32",
    "powersgd:rank=2",
    "predictive",
    # About 1 % and below.
    "lowbit:bits=2,sync_every=2",
    "lowbit:bits=2,sync_every=2,entropy=true",
    "lowbit:bits=2,sync_every=3,entropy=true",
    "lowbit:bits=2,sync_every=6",
    "localsgd:sync_every=100",
    "powersgd:rank=1",
    "diloco:sync_every=13,bits=4",
    "streaming-diloco",
    "topk:ratio=0.003",
    "dgc:ratio=0.003,warmup_steps={tenth}",
    "diloco:sync_every=100",
    # As their papers have them.
    "bf16",
    "int8",
    "qsgd",
    "terngrad",
    "onebit",
    "powersgd:rank=4",
    "dgc:warmup_steps={tenth}",
    "stc",
    "slowmo",
    "ednncomm",
    "daso",
    "fp16",
    "fp8",
    "sign",
    "signsgd",
    "natural",
    "gtopk",
    "randomk",
    "threshold",
    "lag",
    "pipesgd",
    "postlocal:start_step={fifth},sync_every=10",
    "adacomm",
    "easgd",
    "snoo",
    "sparseloco",
    "dilocox",
    "desloc",
    "overlap-localsgd",
    "odsgd",
    "dcd",
    "deepsqueeze",
    "wagma",
    "noloco",
    # With Adam alone, as DGC is with SGD alone.
    "onebit-adam:freeze_step={fifth}",
    "onebit-adam:freeze_step={fifth},refresh=0",
    "zeroone-adam:freeze_step=60,refresh=10,sync_every=2,entropy=true",
    "zeroone-adam:freeze_step=60,refresh=5,sync_every=3,entropy=true,gradient_bits=4",
    "zeroone-adam:freeze_step=60,refresh=5,sync_every=4,entropy=true,gradient_bits=4",
    "zeroone-adam:freeze_step=60,refresh=5,sync_every=4,entropy=true,gradient_bits=3",
    # With a few others only.
    "gossip:graph=ring",
    "sgp",
    "gossip-pga",
    "prague",
    "choco",
    "choco:codec=qsgd",
    # Five leaps, and a sixth of the steps behind the last; it sends all, and may need fewer steps.
    "wnn:period={thirtieth}",
)
BY_NODE = ("ednncomm", "daso")
"""Trained on two nodes of two ranks; all others on four nodes."""


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        kind: the recipe's name; `model`: the network, where the recipe leaves it open.
        side: of the images that the network gets; 32 where they are as they are.
        limit: training images.
        searched: steps up to which a training's learning rate is searched among `RATES`; that of a longer one
            is searched around the rate that was best there.
        longest: the longest training whose learning rate is searched; a longer one takes this one's.
        judged: bytes of text by which the GPT is judged; the recipe's own number where it is 0.
        choosing: how many other seeds judge the rates that seed `CHOOSING` does not tell apart, in trainings
            of up to `searched` steps. They are those of the claims, by the validation split.
    """

    kind: str
    model: str = ""
    side: int = 32
    limit: int = 0
    searched: int = 600
    longest: int = 2400
    judged: int = 0
    choosing: int = 0


TASKS = {
    "cifar10": Task("cifar10", "resnet8", 16, 48_000, longest=9600, choosing=3),
    "cifar10-large": Task("cifar10", "resnet8", 32, 10_000, searched=624),
    "mnist": Task("mnist", "lenet", 32, 58_000),
    "text": Task("bytes", longest=600),
    "text-large": Task("bytes", longest=600, judged=98_304),
    # Trained on a GPU, with the library of another Python: no pair is of both.
    "text-gpu": Task("bytes", longest=600, judged=98_304),
    "digits": Task("digits"),
}
STEPS = (600, 2400, 9600)


@dataclass(frozen=True)
class Job:
    """One training."""

    task: str
    arm: str
    steps: int
    seed: int
    rate: float

    def differs_by_seed(self, other: Job) -> bool:
        """Whether nothing but the seed differs, or nothing at all."""
        return (self.arm, self.rate, self.steps, self.task) == (
            other.arm, other.rate, other.steps, other.task
        )  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """What came of a training.

    Attributes:
        accuracy: on the test set, 0..1; `validation`: on the validation split, or minus the training loss
            of the last tenth where the task has no split.
        loss: of training, over the last tenth of the steps.
        share: of plain training's bytes; `seconds`: of processor time.
    """

    job: Job
    accuracy: float
    validation: float
    loss: float
    share: float
    seconds: float
    hardware: Mapping[str, object]

    @classmethod
    def from_json(cls, line: str) -> Ended:
        values = json.loads(line)
        return cls(**{**values, "job": Job(**values["job"])})


def trained(job: Job, data: str | None, device: str = "cpu") -> Ended:
    """Train it, in this process; `device`: where the networks are."""
    import torch

    from in_one_process import Replicas
    from tacit.algorithms import parse

    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCHING)
    about, start = hardware(), time.process_time()
    if device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    recipe = recipe_of(TASKS[job.task], data)
    strategy = parse(written(job.arm, job.steps))
    nodes = 2 if job.arm.partition(":")[0] in BY_NODE else 1
    done = Replicas(
        recipe,
        strategy,
        steps=job.steps,
        seed=job.seed,
        rate=job.rate,
        workers=WORKERS,
        ranks_per_node=nodes,
        device=device,
    ).train()
    accuracy = recipe.evaluate(done.model)[1] if done.finite else 0.0
    judge: Callable[[Any], float] | None = getattr(recipe, "validate", None)
    validation = -done.loss if judge is None else judge(done.model)
    if not done.finite:
        validation = -math.inf if judge is None else 0.0
    return Ended(
        job, accuracy, validation, done.loss, done.sent / done.plain, time.process_time() - start, about
    )


def recipe_of(task: Task, data: str | None) -> Any:
    """The recipe of a task; of images with `validate`, the accuracy on images that are not trained on."""
    from torch import nn

    from tacit_lab.recipes import bytes as text
    from tacit_lab.recipes import digits, images

    if task.kind == "bytes":
        return text.Bytes(task.judged or text.HELD_OUT_BYTES)
    if task.kind == "digits":
        return digits.Digits()
    assert data is not None
    dataset = {"cifar10": images.CIFAR10, "mnist": images.MNIST}[task.kind]

    class Held(images.ImageRecipe):
        """Images, of which some are held back for choosing."""

        def model(self, seed: int) -> nn.Module:
            network = super().model(seed)
            return network if task.side == 32 else nn.Sequential(nn.AvgPool2d(32 // task.side), network)

        def validate(self, model: nn.Module) -> float:
            return self.evaluate_unseen(model, VALIDATION)[1]

    folder = Path(data)
    there = [
        path for path in (folder / task.kind, *sorted(folder.glob(f"{task.kind}*")), folder) if path.exists()
    ]
    precision = "bf16" if task.kind == "cifar10" else "fp32"
    return Held(dataset, model=task.model, data=there[0], limit=task.limit, precision=precision)


# ---- what is to be trained ----------------------------------------------------------------------------


def read(path: Path) -> dict[Job, Ended]:
    """All that a file holds."""
    return {ended.job: ended for ended in lines(path, Ended.from_json)}


def searched(done: Mapping[Job, Ended], task: str, arm: str, steps: int) -> list[Job]:
    """The trainings by which an arm's learning rate is chosen: until the best is between two that are not.

    Where one seed does not tell rates apart, the task's other seeds train with each of those too.
    """
    smaller = SMALLER if arm.partition(":")[0] == SIGNS else 1.0
    short, rates, seeds = TASKS[task].searched, tuple(smaller * rate for rate in RATES), TASKS[task].choosing
    steps = min(steps, max(short, TASKS[task].longest))
    tried_with = partial(Job, task, arm, steps, CHOOSING)
    if steps > short:
        tried = sorted((job for job in done if job == tried_with(job.rate)), key=lambda job: job.rate)
        if tried and _beyond(done, tried) is None:
            return tried
        middle = best(done, task, arm, short)
        if middle is None:
            return searched(done, task, arm, short)
        rates, seeds = (middle / 2, middle, 2 * middle), 0
    jobs = [tried_with(rate) for rate in rates if LIMITS[0] <= rate <= LIMITS[1]]
    while all(job in done for job in jobs):
        alike = _alike([done[job] for job in jobs])
        again = [replace(each.job, seed=seed) for each in alike for seed in range(seeds)]
        found = [*jobs, *again]
        if not all(job in done for job in again) or (beyond := _beyond(done, found)) is None:
            return found
        jobs.append(tried_with(beyond))
    return jobs


def _alike(tried: Sequence[Ended]) -> Sequence[Ended]:
    """Those that are within two standard errors of a difference of the best; none where that is one alone."""
    highest = max(each.validation for each in tried)
    found = [each for each in tried if each.validation >= highest - 2 * math.sqrt(2) * _error(highest)]
    return found if len(found) > 1 else []


def _beyond(done: Mapping[Job, Ended], jobs: Sequence[Job]) -> float | None:
    """The rate that is to be tried next, as the best is at an end; None where the search is over."""
    found, tried = _judged(done, jobs)[0].job.rate, {job.rate for job in jobs}
    if found in (min(tried), max(tried)):
        beyond = found / 2 if found == min(tried) else 2 * found
        return beyond if LIMITS[0] <= beyond <= LIMITS[1] else None
    return None


def _judged(done: Mapping[Job, Ended], jobs: Sequence[Job]) -> list[Ended]:
    """What came of each rate, in the mean of the seeds that it was tried with; the best first.

    One that was tried with one seed, where others were with more, was worse with that: it stands behind them.
    """
    rates = [
        [done[job] for job in jobs if job.rate == rate] for rate in dict.fromkeys(job.rate for job in jobs)
    ]
    means = [
        replace(
            some[0],
            validation=statistics.fmean(each.validation for each in some),
            loss=statistics.fmean(each.loss for each in some),
        )
        for some in rates
    ]
    most = max(len(some) for some in rates)
    clear = [mean for mean, some in zip(means, rates, strict=True) if len(some) == most]
    return [*by_merit(clear, most), *(mean for mean in means if mean not in clear)]


def best(done: Mapping[Job, Ended], task: str, arm: str, steps: int) -> float | None:
    """The learning rate that was best, and with which no seed has collapsed; None while it is searched."""
    for twin in _twins(done, task, arm):
        jobs = searched(done, task, twin, steps)
        if all(job in done for job in jobs):
            break
    else:
        return None
    tried = _judged(done, jobs)
    stable = [
        each.job.rate for each in tried if not _collapsed(done, replace(each.job, steps=steps), tried[0])
    ]
    return stable[0] if stable else tried[-1].job.rate


def _twins(done: Mapping[Job, Ended], task: str, arm: str) -> Iterator[str]:
    """The arm, and those that differ from it by an entropy coder alone, which have its learning rate."""
    yield from dict.fromkeys((arm, uncoded(arm)))
    yield from sorted(
        {job.arm for job in done if job.task == task and uncoded(job.arm) == uncoded(arm)}
        - {arm, uncoded(arm)}
    )


def by_merit(tried: Sequence[Ended], seeds: int = 1) -> list[Ended]:
    """Trainings with several rates, or means of as many `seeds`, the best first.

    Of those whose accuracy on the validation split is within one standard error of the highest, which so few
    images do not distinguish, the one with the lowest loss in training; then the others by that accuracy.
    """
    highest = max(each.validation for each in tried)
    error = _error(highest) / math.sqrt(seeds)
    alike = [each for each in tried if each.validation >= highest - error]
    others = [each for each in tried if each.validation < highest - error]
    return [
        *sorted(alike, key=lambda each: each.loss),
        *sorted(others, key=lambda each: -each.validation),
    ]


def _error(accuracy: float) -> float:
    """The standard error of an accuracy on the validation split; 0 where there is none, and losses count."""
    return math.sqrt(accuracy * (1 - accuracy) / VALIDATION) if 0 < accuracy < 1 else 0.0


def _collapsed(done: Mapping[Job, Ended], chosen: Job, leading: Ended) -> bool:
    """Whether a training with this rate has ended at less than half of the best accuracy."""
    return any(
        ended.accuracy < leading.accuracy / 2
        for job, ended in done.items()
        if job.differs_by_seed(chosen) and job.seed != CHOOSING
    )


def uncoded(arm: str) -> str:
    """The arm whose numbers are this one's bit for bit, as an entropy coder changes bytes alone."""
    return re.sub(r",?entropy=true(?=,|$)", "", arm).replace(":,", ":").rstrip(":")


def ended_as(done: Mapping[Job, Ended], job: Job) -> Ended | None:
    """What came of a training; of one with an entropy coder, by one without and the bytes of another seed."""
    if job in done:
        return done[job]
    plain = done.get(replace(job, arm=uncoded(job.arm)))
    if plain is None:
        return None
    shares = [each.share for other, each in done.items() if other.differs_by_seed(job)]
    return replace(plain, job=job, share=statistics.mean(shares)) if shares else None


def missing(done: Mapping[Job, Ended], wanted: Sequence[tuple[str, str, int]], seeds: int) -> Iterator[Job]:
    """What is still to be trained, of (task, arm, steps); seeds of an arm as soon as its rate is known."""
    for task, arm, steps in wanted:
        if best(done, task, arm, steps) is None:
            yield from (job for job in searched(done, task, arm, steps) if job not in done)
    for seed in range(seeds):
        for task, arm, steps in wanted:
            rate = best(done, task, arm, steps)
            if rate is not None and ended_as(done, job := Job(task, arm, steps, seed, rate)) is None:
                yield job


def carry_out(
    wanted: Sequence[tuple[str, str, int]],
    seeds: int,
    data: str | None,
    path: Path,
    jobs: int,
    minutes: float,
    device: str = "cpu",
) -> dict[Job, Ended]:
    """Train what is missing, `jobs` at once, until all is there or the time is over."""
    done, until = read(path), time.monotonic() + 60 * minutes
    tried: set[Job] = set()
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, _begin) as pool:
        running: dict[Job, Any] = {}
        while True:
            for job in missing(done, wanted, seeds) if len(running) < jobs else ():
                if len(running) >= jobs or time.monotonic() > until:
                    break
                if job not in tried:
                    tried.add(job)
                    running[job] = pool.apply_async(trained, (job, data, device))
            if not running:
                return done
            time.sleep(0.2)
            for job in [job for job, result in running.items() if result.ready()]:
                try:
                    ended = running.pop(job).get()
                except Exception as error:
                    print(f"{job}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    continue
                done[job] = ended
                append(path, json.dumps(asdict(ended)))
                print(_told(ended), file=sys.stderr, flush=True)


def _begin() -> None:
    """In a process that trains: one thread, and no longer than the command."""
    import signal

    from tacit_lab.testbed.network.linux import die_with_parent

    os.environ["OMP_NUM_THREADS"] = "1"
    die_with_parent(signal.SIGKILL)


def _told(ended: Ended) -> str:
    job = ended.job
    return (
        f"{job.task} {job.steps} steps, {job.arm}, seed {job.seed}, rate x {job.rate:g}: "
        f"{ended.accuracy:.4f}, loss {ended.loss:.4f}, {ended.share:.2%} of the bytes, {ended.seconds:.0f} s"
    )


# ---- what came of it ----------------------------------------------------------------------------------


def rows(
    done: Mapping[Job, Ended], wanted: Sequence[tuple[str, str, int]], seeds: int
) -> list[dict[str, Any]]:
    """A row for each (task, arm, steps) that has a pair of seeds; `gap` is to plain training."""
    found = []
    for task, arm, steps in wanted:
        mine, plain = best(done, task, arm, steps), best(done, task, PLAIN, steps)
        if mine is None or plain is None:
            continue
        pairs = [
            (a, b)
            for seed in range(seeds)
            if seed != CHOOSING
            and (a := ended_as(done, Job(task, arm, steps, seed, mine))) is not None
            and (b := done.get(Job(task, PLAIN, steps, seed, plain))) is not None
        ]
        accuracy = Mean.of([a.accuracy for a, _ in pairs])
        gap = Mean.of([a.accuracy - b.accuracy for a, b in pairs])
        if accuracy is None or gap is None:
            continue
        found.append(
            {
                "task": task,
                "arm": arm,
                "steps": steps,
                "rate": mine,
                "bytes": statistics.mean(a.share for a, _ in pairs),
                "accuracy": accuracy.to_dict(),
                "gap": gap.to_dict(),
                "loss_gap": statistics.mean(a.loss - b.loss for a, b in pairs),
                "on": sorted({str(each.hardware.get("gpu", "CPU")) for pair in pairs for each in pair}),
            }
        )
    return found


def there(done: Mapping[Job, Ended]) -> list[tuple[str, str, int]]:
    """Each (task, arm, steps) that was trained, in the order of the tasks, and of their lengths."""
    found = {(job.task, job.arm, job.steps) for job in done if job.seed != CHOOSING}
    # Of an arm with an entropy coder one training is enough, of whichever seed.
    found |= {
        (job.task, job.arm, job.steps) for job in done if (job.task, uncoded(job.arm), job.steps) in found
    }
    return sorted(found, key=lambda each: (list(TASKS).index(each[0]), each[2], each[1] != PLAIN, each[1]))


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Rows as text, task by task and length by length."""
    lines_ = []
    for task, steps in dict.fromkeys((row["task"], row["steps"]) for row in found):
        here = [row for row in found if (row["task"], row["steps"]) == (task, steps)]
        lines_ += ["", f"{task}, {steps} steps", f"{'':50} {'bytes':>7} {'accuracy':>8} {'gap, points':>16}"]
        for row in here:
            half, gap = row["gap"]["half"], 100 * row["gap"]["mean"]
            width = "one seed" if half is None else f"± {100 * half:.2f}"
            lines_.append(
                f"{row['arm']:44} x{row['rate']:<4g} {row['bytes']:7.2%} {row['accuracy']['mean']:8.4f} "
                f"{gap:+7.2f} {width:>8}"
            )
    return "\n".join(lines_).strip()


def check(data: str | None) -> None:
    """Train `digits` with some arms here and on real ranks, and print how far they are apart."""
    from comparing import by_compare
    from runs import Run
    from tacit_lab.recipes.digits import Digits

    steps = 2 * Digits().steps_per_epoch(WORKERS)
    arms = (PLAIN, "topk", "powersgd", "lowbit")
    real = {
        done.run.algorithm: done
        for done in by_compare(Run(("digits",), "", f"{WORKERS}x1", seed=0, epochs=2), arms)
    }
    for arm in arms:
        here, there = trained(Job("digits", arm, steps, 0, 1.0), data), real[arm]
        print(f"{arm}: {here.accuracy:.4f} here, {there.accuracy or math.nan:.4f} on real ranks")


def parsed() -> argparse.Namespace:
    """What the command was given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default=os.environ.get("TACIT_DATA"), help="the folder of the images")
    parser.add_argument("--task", help="some of " + ", ".join(TASKS), default="cifar10,mnist,text,text-large")
    parser.add_argument("--steps", default=",".join(map(str, STEPS)), help="lengths of training")
    parser.add_argument("--arms", help="algorithms, divided by ';'; left out: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trainings at once")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the networks are")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin none after so many")
    parser.add_argument("--quick", action="store_true", help="a few arms on digits, two seeds")
    parser.add_argument("--table", action="store_true", help="train nothing; all that was trained until now")
    parser.add_argument("--check", action="store_true", help="compare with real ranks, and no more")
    parser.add_argument(
        "--publish", action="store_true", help="write the page docs/accuracy-tables.md and what it holds"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-accuracy.json")
    parser.add_argument(
        "--runs",
        type=Path,
        help="the file that each training is added to, and that a call goes on from; left out: "
        f"benchmarks/results/{FILE}, the project's own, or with --quick one of runs/",
    )
    options = parser.parse_args()
    options.only = None
    from tacit.algorithms import parse
    from tacit.errors import ConfigError

    for arm in options.arms.split(";") if options.arms else ():
        try:
            parse(arm)
        except ConfigError as error:
            parser.error(f"--arms: {error}")
    unknown = [each for each in options.task.split(",") if each not in TASKS]
    if unknown:
        parser.error(f"--task {','.join(unknown)}: there are {', '.join(TASKS)}")
    return options


def main() -> None:
    """Train what is missing, and print the gaps."""
    options = parsed()
    if options.check:
        return check(options.data)
    tasks = ["digits"] if options.quick else options.task.split(",")
    lengths = [66] if options.quick else [int(each) for each in options.steps.split(",")]
    arms = options.arms.split(";") if options.arms else list(ARMS)
    if options.quick and not options.arms:
        arms = [PLAIN, "lowbit", "topk", "powersgd", "localsgd"]
    if not options.quick and not options.table and not options.data and set(tasks) - {"text", "digits"}:
        raise SystemExit("there are no images: write --data PATH, or set TACIT_DATA")
    arms = list(dict.fromkeys([PLAIN, *arms]))
    wanted = [(task, arm, steps) for steps in lengths for task in tasks for arm in arms]
    path = options.runs or (RUNS if options.quick else RESULTS) / FILE
    seeds = 2 if options.quick else options.seeds
    if options.table:
        done = read(path)
        wanted, seeds = there(done), CHOOSING
    else:
        done = carry_out(wanted, seeds, options.data, path, options.jobs, options.minutes, options.device)
    found = rows(done, wanted, seeds)
    if options.publish:
        for written in publish(found, hardware(), PLAIN):
            print(f"wrote {written}", file=sys.stderr)
    result = {"benchmark": "accuracy", "quick": options.quick, "hardware": hardware(), "rows": found}
    conclude(result, table(found), options)
    return None


if __name__ == "__main__":
    main()
