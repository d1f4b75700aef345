"""What each algorithm costs in accuracy, against the length of training: the gap to plain training.

    python benchmarks/accuracy.py --data PATH            # hours; goes on where it was interrupted
    python benchmarks/accuracy.py --task mnist --steps 600 --arms "dense;topk" --data PATH
    python benchmarks/accuracy.py --quick                # under 10 minutes: digits, and nothing is claimed
    python benchmarks/accuracy.py --table --publish      # of what was trained until now: the pages
    python benchmarks/accuracy.py --again --data PATH    # whether what was trained is still so: an hour
    python benchmarks/accuracy.py --task text-gpu --steps 3600 --device cuda     # all of it on a GPU
    TACIT_IMPORT=mine.py python benchmarks/accuracy.py --task digits --steps 110 --arms mine --runs mine.jsonl

Four workers train in one process (`tacit_lab.study`): an algorithm whose course does not depend on the
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
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accuracy_page import Row, enough, publish
from fingerprints import as_recorded, note, noted, standing
from paired import RESULTS, RUNS, conclude, hardware
from tacit_lab.recipes.images import VALIDATION
from tacit_lab.records import CHOOSING
from tacit_lab.study.carrying_out import carry_out, train_at_once
from tacit_lab.study.jobs import Ended, StudyRun, read, written
from tacit_lab.study.search import Rule, Study, table
from tacit_lab.study.training import WORKERS, train

FILE = "accuracy-runs.jsonl"
PLAIN = "dense"
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
    "signsgd:momentum=0.9",
    "natural",
    "natural-dithering",
    "three-lc",
    "demo",
    "ef21-sgdm",
    "oktopk",
    "sketched-sgd",
    "gradientflow",
    "adacomp",
    "gspar",
    "dion",
    "atomo",
    "laq",
    "gtopk",
    "randomk",
    "threshold",
    "lag",
    "pipesgd",
    "postlocal:start_step={fifth},sync_every=10",
    "adacomm",
    "easgd",
    "eager-diloco",
    "snoo",
    "sparseloco",
    "dilocox",
    "desloc",
    "overlap-localsgd",
    "odsgd",
    "sparta",
    "gradient-tracking",
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


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        kind: the recipe's name; `model`: the network, where the recipe leaves it open.
        side: of the images that the network gets; 32 where they are as they are.
        limit: training images.
        judged: bytes of text by which the GPT is judged; the recipe's own number where it is 0.
        rule: by which learning rates are chosen.
    """

    kind: str
    model: str = ""
    side: int = 32
    limit: int = 0
    judged: int = 0
    rule: Rule = Rule()


BY_ADAM = Rule(longest=600, scales={"demo": 0.5, "dion": 4.0})
TASKS = {
    "cifar10": Task(
        "cifar10", "resnet8", 16, 48_000, rule=Rule(longest=9600, choosing=3, validation=VALIDATION)
    ),
    "cifar10-large": Task("cifar10", "resnet8", 32, 10_000, rule=Rule(searched=624, validation=VALIDATION)),
    "resnet20": Task(
        "cifar10", "resnet20", 32, 48_000, rule=Rule(longest=600, choosing=3, validation=VALIDATION)
    ),
    "mnist": Task("mnist", "lenet", 32, 58_000, rule=Rule(validation=VALIDATION)),
    "text": Task("bytes", rule=BY_ADAM),
    "text-large": Task("bytes", judged=98_304, rule=BY_ADAM),
    # Trained on a GPU, with the library of another Python: no pair is of both.
    "text-gpu": Task("bytes", judged=98_304, rule=BY_ADAM),
    "gpt": Task("gpt", judged=98_304, rule=replace(BY_ADAM, validation=12_288)),
    "digits": Task("digits"),
}
STEPS = (600, 2400, 9600)


STUDY = Study({name: each.rule for name, each in TASKS.items()}, PLAIN)
LIKE = {
    **dict.fromkeys(("ef21-sgdm", "oktopk", "sketched-sgd", "gradientflow", "adacomp"), "topk:ratio=0.01"),
    "demo": "signsgd",
    "signsgd:momentum=0.9": "signsgd",
    "three-lc": "efsign",
    "natural-dithering": "qsgd",
    "laq": "int8",
    "gspar": "randomk",
    "atomo": "powersgd:rank=4",
    "gradient-tracking": "gossip:graph=ring",
    "eager-diloco": "diloco:sync_every=32",
    "sparta": "localsgd:sync_every=10",
}
ONCE = Study(
    {name: replace(each.rule, choosing=0) for name, each in TASKS.items()}, PLAIN, (2.0, 4.0), LIKE, STUDY
)
"""For arms of few trainings: another seed chooses their rates, for most around that of a relative."""


def once(done: Mapping[StudyRun, Ended]) -> list[dict[str, Any]]:
    """A row for each arm of few trainings, of as many seeds as there are."""
    wanted = [("cifar10", arm, min(STEPS)) for arm in (*LIKE, "dion")]
    return ONCE.rows(done, wanted, range(CHOOSING))


def trained(job: StudyRun, data: str | None, device: str = "cpu") -> Ended:
    """Train it, in this process; `device`: where the networks are."""
    return train(job, recipe_of(TASKS[job.task], data), hardware(), device)


def recipe_of(task: Task, data: str | None) -> Any:
    """The recipe of a task; of images with `validate`."""
    from torch import nn

    from tacit_lab.recipes import bytes as text
    from tacit_lab.recipes import digits, images
    from tacit_lab.recipes.models.precision import InBfloat16

    if task.kind == "bytes":
        return text.Bytes(task.judged or text.HELD_OUT_BYTES)
    if task.kind == "gpt":

        class Gpt(text.Gpt):
            """The recipe's network in bf16, on twice as much text."""

            train_bytes = 4_000_000

            def model(self, seed: int) -> nn.Module:
                return InBfloat16(super().model(seed))

        return Gpt(task.judged)
    if task.kind == "digits":
        return digits.Digits()
    assert data is not None
    dataset = {"cifar10": images.CIFAR10, "mnist": images.MNIST}[task.kind]

    class Held(images.ImageRecipe):
        """Images, of which some are held back for choosing."""

        def model(self, seed: int) -> nn.Module:
            network = super().model(seed)
            return network if task.side == 32 else nn.Sequential(nn.AvgPool2d(32 // task.side), network)

    folder = Path(data)
    there = [
        path for path in (folder / task.kind, *sorted(folder.glob(f"{task.kind}*")), folder) if path.exists()
    ]
    precision = "bf16" if task.kind == "cifar10" else "fp32"
    return Held(dataset, model=task.model, data=there[0], limit=task.limit, precision=precision)


def check(data: str | None) -> None:
    """Train `digits` with some arms here and on real ranks, and print how far they are apart."""
    from tacit_lab.recipes.digits import Digits

    steps = 2 * Digits().steps_per_epoch(WORKERS)
    arms = (PLAIN, "topk", "powersgd", "lowbit")
    words = f"compare digits --algorithms {','.join(arms)} --cluster {WORKERS}x1 --epochs 2 --json".split()
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tacit_lab", *words, "--out", f"{folder}/out"]
        told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    real = {row["algorithm"]: row["accuracy"] for row in told["rows"]}
    for arm in arms:
        here = trained(StudyRun("digits", arm, steps, 0, 1.0), data)
        print(f"{arm}: {here.accuracy:.4f} here, {real[arm]:.4f} on real ranks")


def again(done: Mapping[StudyRun, Ended], rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Make one training of each arm again, where it isn't known to be of today's code.

    Args:
        rows: of the tables; those trained on a GPU are left out. Of an arm's rows, the cheapest training.
    """
    kept = noted()
    told = {(row["task"], row["arm"], row["steps"], row["rate"]): row for row in rows}
    jobs: dict[str, tuple[StudyRun, Row]] = {}
    for job in sorted(done, key=lambda job: done[job].seconds):
        row = told.get((job.task, job.arm, job.steps, job.rate))
        if row is not None and job.seed < CHOOSING and "gpu" not in done[job].hardware:
            jobs.setdefault(job.arm, (job, row))

    def keep(job: StudyRun, now: Ended) -> None:
        then = done[job]
        stands = as_recorded(now, then, jobs[job.arm][1]["gap"]["half"])
        if stands:
            note(job.arm, job)
        print(
            f"{written(job.arm, job.steps)}, {job.task}: {'stands' if stands else 'is STALE'}: accuracy "
            f"{now.accuracy:.4f}, bytes {now.share:.5f}; recorded were {then.accuracy:.4f}, {then.share:.5f}",
            flush=True,
        )

    def fail(job: StudyRun, error: Exception) -> None:
        print(f"{job.arm}: {type(error).__name__}: {error}", flush=True)

    train = partial(trained, data=options.data)
    missing = [job for arm, (job, _) in jobs.items() if not standing(arm, kept)]
    train_at_once(lambda: missing, train, keep, fail, jobs=options.jobs, minutes=options.minutes)


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
    parser.add_argument(
        "--again", action="store_true", help="train one of each arm's again, to see whether it is still so"
    )
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
            parse(written(arm, min(STEPS)))
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
    study = ONCE if options.seeds == 1 else STUDY
    path = options.runs or (RUNS if options.quick else RESULTS) / FILE
    seeds = range(2 if options.quick else options.seeds)
    if options.table or options.again:
        done = read(path)
        wanted, seeds = study.there(done), range(CHOOSING)
    else:
        done = carry_out(
            lambda done: study.missing(done, wanted, seeds),
            partial(trained, data=options.data, device=options.device),
            read(path),
            path,
            jobs=options.jobs,
            minutes=options.minutes,
            tell=partial(print, file=sys.stderr, flush=True),
        )
    found = study.rows(done, wanted, seeds)
    if options.again:
        shown = [row for row in (*enough(found), *once(done)) if not options.arms or row["arm"] in arms]
        return again(done, shown, options)
    if options.publish:
        kept, rare = noted(), once(done)
        for row in (*found, *rare):
            row["stands"] = standing(row["arm"], kept)
        for file in publish(found, rare, PLAIN):
            print(f"wrote {file}", file=sys.stderr)
    result = {"benchmark": "accuracy", "quick": options.quick, "hardware": hardware(), "rows": found}
    conclude(result, table(found), options)
    return None


if __name__ == "__main__":
    main()
