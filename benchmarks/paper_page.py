"""The papers' tables: what each says, and what was trained and timed here, next to one another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from accuracy_page import CHANGED, points
from experiments import NETWORKS, PAPERS, Paper, attached
from markdown_tables import markdown
from runs import COMPUTE_ONLY, Run
from tacit_lab.study.jobs import written
from windows import Found

BEGIN, END = "<!-- made by benchmarks/papers.py -->\n", "<!-- until here -->"
DISTURBED = 0.02
"""The share of the processors' time, withheld by the hypervisor, from which on a page says so."""
MANY = 20
"""So many times fewer bytes are told as times; what is less, as a share."""
TASKS = {
    "cifar10": "CIFAR-10",
    "cifar10-large": "CIFAR-10, 32 x 32",
    "mnist": "MNIST",
    "text": "text",
    "text-large": "text, judged by more",
}
"""What the tasks of accuracy.py are called here, in their order; others by their names, behind them."""
MISSING = "not measured yet"
Row = Mapping[str, Any]


def pages(rows: Sequence[Row], found: Sequence[Found]) -> dict[str, str]:
    """File in docs/papers -> what stands there between the marks.

    Args:
        rows: of accuracy.py, with enough seeds, and with `stands`.
        found: windows, the newest last.
    """
    parts = {"index.md": [claims([*PAPERS.values()], rows, found)]}
    for paper in PAPERS.values():
        name = paper.title.partition("]")[0].removeprefix("[")
        title = f"### {name}\n\n" if paper.page == "index.md" else ""
        parts.setdefault(paper.page, []).append(title + figures(paper, rows, found))
    return {page: "\n\n".join(each) for page, each in parts.items()}


def placed(page: str, text: str, name: str) -> str:
    """The page with this text between its marks.

    Raises:
        SystemExit: it has none.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{name} has no place for the tables: write {BEGIN.strip()} and {END} around it")
    return f"{before}{BEGIN}\n{text}\n\n{END}{after}"


# ---- claims -------------------------------------------------------------------------------------------


def claims(papers: Sequence[Paper], rows: Sequence[Row], found: Sequence[Found]) -> str:
    """A row for each paper: what it says, what was found, and why they differ."""
    head = ["paper", "it says", "accuracy here, points", "time here", "bytes here", "why they differ"]
    body = []
    for paper in papers:
        gaps = [_of(paper, arm, _gaps(arm, rows)) for arm in paper.held]
        times, sent = [], []
        for network, each in latest(paper, found):
            for arm in paper.held:
                mine = attached(arm, network)
                if mine in each.parts:
                    times.append(_of(paper, arm, _time(mine, paper.rivals, each)))
                    sent.append(_of(paper, arm, _bytes(mine, paper.rivals[0], each)))
        cells = ["; ".join(some) or MISSING for some in (gaps, times, sent)]
        body.append([paper.title, paper.says, *cells, paper.differs])
    return markdown(head, body)


def _of(paper: Paper, arm: str, text: str) -> str:
    """What is told of an arm, with its name where there are others."""
    name = re.sub(r"[:,]warmup_steps=\{tenth\}$", "", arm)  # `Paper.differs` says how long it is
    return f"`{name}` {text}" if len(paper.held) > 1 else text


def _gaps(arm: str, rows: Sequence[Row]) -> str:
    """After the longest training of each task."""
    longest = {row["task"]: row for row in sorted(rows, key=_place) if row["arm"] == arm}
    told = [
        f"{points(row['gap'])}{_mark(row)} ({_task(row)}, {row['steps']:,} steps)" for row in longest.values()
    ]
    return ", ".join(told if "cifar10" in longest else ["CIFAR-10 not trained yet", *told])


def _mark(row: Row) -> str:
    return "" if row["stands"] else " †"


def _task(row: Row) -> str:
    return TASKS.get(row["task"]) or str(row["task"])


def _place(row: Row) -> tuple[int, str, int]:
    """By which rows are sorted: tasks, and shorter trainings first."""
    task = row["task"]
    return [*TASKS, task].index(task), task, row["steps"]


def _time(mine: str, rivals: Sequence[str], found: Found) -> str:
    saved = [f"{_less(found.seconds(mine) / found.seconds(rival))} than `{rival}`" for rival in rivals]
    name, date = _network(found).partition(",")[0], found.hardware.get("date")
    return f"{' and '.join(saved)} ({name}, {found.window.run.cluster}, {date})"


def _bytes(mine: str, base: str, found: Found) -> str:
    whole = _fewer(found.megabytes(mine) / found.megabytes(base))
    steady = _fewer(found.steady(mine)[1] / found.steady(base)[1])
    warms = len(found.parts[mine]) > 1
    told = f"{steady} after warm-up, {whole} with it" if warms else whole
    return f"{told} ({_network(found).partition(',')[0]})"


def _network(found: Found) -> str:
    return NETWORKS[called(found.window.run)].label


def _less(ratio: float) -> str:
    return f"{abs(1 - ratio):.0%} {'less' if ratio <= 1 else 'more'}"


def _fewer(ratio: float) -> str:
    return f"{1 / ratio:.0f} times fewer" if ratio * MANY <= 1 else _less(ratio)


def called(run: Run) -> str:
    """The network of a run, as NETWORKS names it."""
    return dict(zip(run.recipe[1::2], run.recipe[2::2], strict=True)).get("--model", run.recipe[0])


def latest(paper: Paper, found: Sequence[Found]) -> list[tuple[str, Found]]:
    """Of each setting that is timed the newest window, where there is one; with the network's name."""
    told = []
    for network, nodes in paper.timed:
        asked = {*paper.rivals, attached(paper.held[0], network)}
        fits = [
            each
            for each in found
            if (called(each.window.run), each.window.run.cluster.partition("@")[0]) == (network, nodes)
            and asked <= each.parts.keys()
        ]
        told += [(network, each) for each in fits[-1:]]
    return told


# ---- figures ------------------------------------------------------------------------------------------


def figures(paper: Paper, rows: Sequence[Row], found: Sequence[Found]) -> str:
    """The tables of a paper's accuracies and times."""
    return f"{_accuracies(paper, rows)}\n\n{_times(paper, found)}"


def _accuracies(paper: Paper, rows: Sequence[Row]) -> str:
    """What is held to the claims, and others where that was trained as long."""
    head = ["attached", "trained on", "steps", "bytes", "gap, points (95 %)", "seeds", "rate, times"]
    held = {(row["task"], row["steps"]) for row in rows if row["arm"] in paper.held}
    mine = [row for arm in paper.arms for row in rows if row["arm"] == arm]
    shown = sorted((row for row in mine if (row["task"], row["steps"]) in held), key=_place)
    body = [
        [
            f"`{written(row['arm'], row['steps'])}`{_mark(row)}",
            _task(row),
            f"{row['steps']:,}",
            f"{row['bytes']:.1%}",
            points(row["gap"]),
            f"{row['gap']['count']}",
            f"{row['rate']:g}",
        ]
        for row in shown
    ]
    return markdown(head, body) + ("" if all(row["stands"] for row in shown) else f"\n\n{CHANGED}.")


def _times(paper: Paper, found: Sequence[Found]) -> str:
    """Milliseconds and bytes a step of each window, over the whole training that it stands for."""
    made = [each for _, each in latest(paper, found)]
    if not made:
        return f"Times of steps are {MISSING}."
    head = ["attached", "network", "cluster", "ms a step", "blocks", "MB a step and node", "less time than"]
    body = [
        [
            f"`{algorithm}`",
            _network(each),
            each.window.run.cluster,
            f"{1e3 * each.seconds(algorithm):,.0f}",
            "{:,.0f} to {:,.0f}".format(*(1e3 * end(each.parts[algorithm][0][1]) for end in (min, max))),
            f"{each.megabytes(algorithm):.3f}",
            _saved(algorithm, paper.rivals, each),
            f"{each.hardware.get('date')}, {each.hardware.get('commit')}",
        ]
        for each in made
        for algorithm in each.parts
    ]
    whose, cpus = " and ".join(sorted({each.of for each in made})), every("cpu", made)
    return markdown([*head, "measured, commit"], body) + (
        "\n\nMedians of interleaved blocks in one launch (with a parameter server one launch each), for a "
        "whole training; *blocks* are the fastest and the slowest of the part that is most of it. "
        f"Seconds are those of {whose}; {cpus}.{withheld(made)}"
    )


def _saved(algorithm: str, rivals: Sequence[str], found: Found) -> str:
    if algorithm in (*rivals, COMPUTE_ONLY):
        return ""
    mine = found.seconds(algorithm)
    return ", ".join(f"`{rival}` {1 - mine / found.seconds(rival):.0%}" for rival in rivals)


def every(fact: str, made: Iterable[Found]) -> str:
    """What the hardware's records say of a fact, each answer once."""
    return " and ".join(sorted({str(each.hardware.get(fact)) for each in made})) or "-"


def withheld(found: Sequence[Found]) -> str:
    """In which windows a hypervisor let others have the processors; empty where it did in none."""
    told = [
        f"{each.withheld:.0%} ({called(each.window.run)} on {each.window.run.cluster})"
        for each in found
        if each.withheld is not None and each.withheld > DISTURBED
    ]
    if not told:
        return ""
    unknown = sum(each.withheld is None for each in found)
    rest = f"; of {unknown} it is not known" if unknown else ""
    return f" Of the processors' time the hypervisor withheld {', '.join(told)}{rest}."
