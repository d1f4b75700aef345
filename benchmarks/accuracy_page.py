"""What accuracy.py has found, as a page of the site, as a figure, and as the facts of `tacit list`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_tables import markdown
from paired import ROOT
from tacit.files import put
from tacit_lab.study.jobs import written

PAGE = ROOT / "docs" / "accuracy-tables.md"
"""Written whole; docs/accuracy.md, which a test compares with the trainings, is written by hand."""
FIGURE = ROOT / "docs" / "images" / "accuracy.svg"
FACTS = ROOT / "src" / "tacit_lab" / "accuracy.json"
TITLES = {
    "cifar10": "resnet8 on 48,000 images of CIFAR-10 (JPEG q75), 16 x 16 pixels",
    "cifar10-large": "resnet8 on 10,000 images of CIFAR-10 (JPEG q75), 32 x 32 pixels",
    "resnet20": "ResNet-20 on 48,000 images of CIFAR-10 (JPEG q75), 32 x 32 pixels",
    "mnist": "LeNet-5 on 58,000 images of MNIST",
    "text": "a byte-level GPT on the source of Python's library",
    "text-large": "the byte-level GPT, judged by eight times as much text",
    "text-gpu": "the byte-level GPT on the library of Python 3.11.2, judged by eight times as much text",
    "gpt": "a byte-level GPT of 10.8 million parameters, in bf16, on 4 MB of Python's library",
    "digits": "digits",
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#8c564b")
WIDTH, HEIGHT, LEFT, TOP, RIGHT = 940, 320, 60, 30, 470
SEEDS = 3
"""Of fewer nothing is published."""
Row = Mapping[str, Any]
CHANGED = "† Trained before the algorithm, or its bytes, changed, or not looked at since"
FEW = """## With few trainings

600 steps of CIFAR-10, 16 x 16 pixels, most with one seed: read two points as none there. The learning rate is
the best for another seed of those that were tried, which are few, and for some only the one that was best for
a relative, such as `topk:ratio=0.01`: with one of its own an algorithm may lose less. `demo` and `dion` keep
momentum themselves, so they were trained with SGD without."""
METHOD = """## How it was measured

How the learning rates are chosen:

* Three multiples of the recipe's rate are tried (for `signsgd`, which moves by the rate itself, of a
  128th of it), more where the best is at an end, with a seed that is in no gap. The best is that with the
  highest accuracy on 2,000 training images that nobody trains on; of rates
  within one standard error of it, which so few images do not distinguish, that with the lowest loss in
  training.
* One seed is often wrong in the shortest trainings of CIFAR-10, 16 x 16: how two neighbouring rates compare
  differs by one to two points from seed to seed. So there, rates within two standard errors of the best are
  trained with three of the other seeds too, and the mean decides, by the same 2,000 images.
* In longer trainings rates are tried around the one that was best in the shortest; the longest of MNIST, and
  the longer ones of the GPT, take the rate of a shorter one.
* A rate with which one of the seeds collapses is given up for the next best, for all seeds.
* With `entropy=true` a training has the numbers of the one without, bit for bit on one processor, so only its
  bytes are measured again.

Is it still so? Of each algorithm without a mark (†) one training was made again with later code
(`python benchmarks/accuracy.py --again`), and ended as its record says. Since then its
[fingerprint](../benchmarks/results/fingerprints.json), the loss and the bytes of a training of a second, is
the same.

An interval that holds 0 does not show that nothing is lost: it shows how much at most. It does not count that
other images, or seeds, might have chosen another rate.

Four workers train inside one process and exchange what tacit sends (`src/tacit_lab/study/replicas.py`);
`python benchmarks/accuracy.py --check` compares that with real ranks. Bytes are those of ring collectives on
four workers, without the headers of a network, and 100 % is a dense fp32 all-reduce after every step.

Measured with `python benchmarks/accuracy.py --data PATH`; [each
training](../benchmarks/results/accuracy-runs.jsonl) is kept with its date, commit, processor and torch. Until
2026-11-28 `lowbit` was called `mp2`, and `mp2` was a form of it; the records have the names of today."""


def publish(rows: Sequence[Row], once: Sequence[Row], plain: str) -> list[Path]:
    """Write the page, its figure, and the facts, of what has enough seeds; which files were written.

    `once`: rows of few trainings, which the page has apart.
    """
    rows = enough(rows)
    shown = [row for row in rows if row["arm"] != plain]
    put(FACTS, json.dumps(facts(shown), indent=1) + "\n")
    put(PAGE, page(rows, once, plain))
    if not _drawn(rows):
        return [PAGE, FACTS]
    put(FIGURE, figure(shown))
    return [PAGE, FIGURE, FACTS]


def enough(rows: Sequence[Row]) -> list[Row]:
    """Those of at least so many seeds that an interval means something."""
    return [row for row in rows if row["gap"]["count"] >= SEEDS]


def facts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of each arm and task the longest training: what `tacit list` tells."""
    longest: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row["task"], row["arm"])
        if key not in longest or row["steps"] > longest[key]["steps"]:
            longest[key] = row
    return [
        {
            "algorithm": row["arm"].partition(":")[0],
            "attached": _attached(row),
            "task": row["task"],
            "steps": row["steps"],
            "bytes": round(row["bytes"], 5),
            "gap": round(row["gap"]["mean"], 5),
            "half": None if row["gap"]["half"] is None else round(row["gap"]["half"], 5),
            "seeds": row["gap"]["count"],
        }
        for row in longest.values()
    ]


def _attached(row: Row) -> str:
    return written(row["arm"], row["steps"])


def safest(rows: Sequence[Row]) -> Row | None:
    """Of the fewest bytes among those whose interval lies above minus half a point; None without any."""
    found = [row for row in rows if row["gap"]["half"] is not None and lower(row["gap"]) >= -0.005]
    return min(found, key=lambda row: float(row["bytes"]), default=None)


def lower(gap: Mapping[str, Any]) -> float:
    """The lower end of a gap's interval."""
    return float(gap["mean"]) - float(gap["half"])


def points(mean: Mapping[str, Any]) -> str:
    """A gap in points with its interval."""
    half = mean["half"]
    return f"{100 * mean['mean']:+.2f}" + (" (one seed)" if half is None else f" ± {100 * half:.2f}")


# ---- the page -----------------------------------------------------------------------------------------


def page(rows: Sequence[Row], once: Sequence[Row], plain: str) -> str:
    """The whole page."""
    parts = [_head(rows)]
    for task in dict.fromkeys(row["task"] for row in rows):
        parts.append(f"## {TITLES[task][0].upper()}{TITLES[task][1:]}")
        for steps in sorted({row["steps"] for row in rows if row["task"] == task}, reverse=True):
            here = [row for row in rows if (row["task"], row["steps"]) == (task, steps)]
            base = next((row for row in here if row["arm"] == plain), None)
            others = sorted((row for row in here if row["arm"] != plain), key=lambda row: row["bytes"])
            if base is None or not others:
                continue
            parts.append(
                f"{steps:,} steps. Plain training reaches {base['accuracy']['mean']:.2%} in the mean of "
                f"{base['accuracy']['count']} seeds, at {base['rate']:g} times the recipe's learning rate."
                + _where(here)
            )
            parts += [_table(others), _least(others)]
    if once:
        parts += [FEW, _table(sorted(once, key=lambda row: row["bytes"]))]
    return "\n\n".join([*parts, METHOD]) + "\n"


def _table(rows: Sequence[Row]) -> str:
    head = ["attached", "bytes", "accuracy", "gap, points (95 %)", "seeds", "rate, times the recipe's"]
    body = [
        [
            f"`{_attached(row)}`" + ("" if row["stands"] else " †"),
            f"{row['bytes']:.2%}",
            f"{row['accuracy']['mean']:.2%}",
            points(row["gap"]),
            f"{row['gap']['count']}",
            f"{row['rate']:g}",
        ]
        for row in rows
    ]
    marked = "" if all(row["stands"] for row in rows) else f"\n\n{CHANGED}."
    return markdown(head, body) + marked


def _where(rows: Sequence[Row]) -> str:
    """On which processors these were trained, and when."""
    kinds = sorted({kind for row in rows for kind in row["on"]})
    dates = sorted({date for row in rows for date in row["dates"]})
    return f" Trained {' to '.join((dates[0], dates[-1])[: len(dates)])} on {' and '.join(kinds)}."


def _least(rows: Sequence[Row]) -> str:
    row = safest(rows)
    if row is None:
        return f"A loss of more than half a point is excluded for none of these {len(rows)}."
    return (
        f"The fewest bytes for which a loss of more than half a point is excluded, of {len(rows)} looked at, "
        f"are {row['bytes']:.2%}: `{_attached(row)}`."
    )


def _head(rows: Sequence[Row]) -> str:
    counts = sorted({row["gap"]["count"] for row in rows})
    seeds = " to ".join(str(each) for each in (counts[0], counts[-1])[: len(counts)])
    return f"""# Accuracy: all tables

What each algorithm costs, for how many steps: [the summary](accuracy.md) says how to read it. Gaps are in
points, with the 95 % interval over {seeds} seeds ([how it was measured](#how-it-was-measured)). A gap is the
mean over seeds of the difference to plain training with the same seed, so where plain training has more seeds
than a row, it is not the difference of the two accuracies that are shown."""


# ---- the figure ---------------------------------------------------------------------------------------


def figure(rows: Sequence[Row]) -> str:
    """Gaps against steps as SVG, on a logarithmic axis: a panel for each task that has two lengths."""
    tasks = _drawn(rows)
    panels = [_panel([row for row in rows if row["task"] == task], i) for i, task in enumerate(tasks)]
    size = f'width="{WIDTH}" height="{len(panels) * HEIGHT}"'
    view = f'viewBox="0 0 {WIDTH} {len(panels) * HEIGHT}"'
    style = "font: 12px sans-serif"
    inside = "".join(panels)
    background = '<rect width="100%" height="100%" fill="white"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} style="{style}">{background}{inside}</svg>\n'
    )


def _drawn(rows: Sequence[Row]) -> list[str]:
    """The tasks that were trained for more than one length."""
    lengths: dict[str, set[int]] = {}
    for row in rows:
        lengths.setdefault(row["task"], set()).add(row["steps"])
    return [task for task, steps in lengths.items() if len(steps) > 1]


def _panel(rows: Sequence[Row], number: int) -> str:
    steps = sorted({row["steps"] for row in rows})
    lines = {arm: [row for row in rows if row["arm"] == arm] for arm in dict.fromkeys(r["arm"] for r in rows)}
    lines = {arm: sorted(each, key=lambda row: row["steps"]) for arm, each in lines.items() if len(each) > 1}
    gaps = [100 * row["gap"]["mean"] for each in lines.values() for row in each]
    low, high = min([-1.0, *gaps]), max([0.5, *gaps])

    def x(value: float) -> float:
        share = math.log(value / steps[0]) / math.log(steps[-1] / steps[0])
        return LEFT + float(share) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + float((high - value) / (high - low)) * (HEIGHT - 2 * TOP - 20)

    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{TITLES[rows[0]["task"]]}: gap in points</text>']
    for mark in _marks(low, high):
        parts.append(f'<text x="{LEFT - 8}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>')
        parts.append(
            f'<path d="M{LEFT} {y(mark):.1f}H{WIDTH - RIGHT}" stroke="{"#444" if mark == 0 else "#ddd"}"/>'
        )
    parts += [
        f'<text x="{x(each):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{each:,} steps</text>'
        for each in steps
    ]
    names = sorted(lines, key=lambda arm: -lines[arm][-1]["gap"]["mean"])
    for i, arm in enumerate(names):
        colour = COLOURS[i % len(COLOURS)]
        dash = "" if i < len(COLOURS) else ' stroke-dasharray="5 3"'
        path = "L".join(f"{x(row['steps']):.1f} {y(100 * row['gap']['mean']):.1f}" for row in lines[arm])
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        at = TOP + 8 + i * min(16, (HEIGHT - 2 * TOP) / max(1, len(names)))
        parts.append(f'<path d="M{WIDTH - RIGHT + 12} {at - 4:.1f}h20" stroke="{colour}"{dash}/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 38}" y="{at:.1f}" font-size="11">{_in_words(arm)}</text>')
    return f'<g transform="translate(0 {number * HEIGHT})">{"".join(parts)}</g>'


def _in_words(arm: str) -> str:
    """What is attached, whatever the length."""
    return arm.format(fifth="steps/5", tenth="steps/10", thirtieth="steps/30")


def _marks(low: float, high: float) -> list[float]:
    """Round numbers between the two, 0 among them."""
    step = next(each for each in (0.25, 0.5, 1, 2, 5, 10, 20, 50) if (high - low) / each <= 8)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
