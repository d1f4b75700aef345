"""A comparison for a paper: a table in LaTeX or CSV, figures, and the BibTeX of the methods in it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.errors import ConfigError, installing
from tacit_lab.records import Environment, Record, RunRecord
from tacit_lab.reports.charts.curves import curves_of, points_of
from tacit_lab.reports.comparison import Comparison, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEADS = {"of compute-only": "of compute", "MB between nodes": "MB"}
"""Shorter names of columns."""
_SPECIAL = re.compile(r"([&%$#_{}])")
_COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
"""Okabe and Ito's, which the colour-blind tell apart too."""


def to_csv(comparison: Comparison) -> str:
    """A line for each algorithm, with all that is known of it; means of several seeds with half intervals."""
    lines = [dict(_flat(row)) for row in comparison.rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, lines[0] if lines else (), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _flat(row: Row) -> Iterator[tuple[str, Any]]:
    for field in fields(Row):
        value = getattr(row, field.name)
        if field.name in ("gap", "speedups"):
            yield field.name, value and value.mean
            yield f"{field.name}_half", value and value.half
        elif field.name != "traffic":
            yield field.name, value


def to_latex(comparison: Comparison, runs: Sequence[RunRecord], command: str) -> str:
    r"""A table for the package booktabs, which cites each method by `\cite`; comments say how it was made."""
    columns = list(comparison.columns)
    heads = [_escaped(_HEADS.get(name, name)) for name in columns]
    rows = [[_name(row), *(_latex(row, name) for name in columns)] for row in comparison.rows]
    lines = [
        *(f"% {line}" for line in about(comparison, runs, command)),
        r"\begin{table}",
        r"\centering",
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
        " & ".join(["algorithm", *heads]) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        rf"\caption{{{_caption(comparison)}}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def about(comparison: Comparison, runs: Sequence[RunRecord], command: str) -> list[str]:
    """How the numbers were made: the command, seeds, versions and the machine."""
    here = runs[0].environment
    facts = {field.name: str(getattr(here, field.name)) for field in fields(Environment)}
    return [
        f"{comparison.recipe} on {comparison.cluster}; {comparison.asked}",
        *([f"command: {command}"] if command else []),
        *(f"{name}: {value}" for name, value in facts.items()),
        *(f"{row.algorithm}: {_strategy(row.algorithm, runs)}" for row in comparison.rows),
    ]


def _strategy(algorithm: str, runs: Iterable[RunRecord]) -> str:
    return next((run.strategy for run in runs if run.algorithm == algorithm), "")


def _caption(comparison: Comparison) -> str:
    said = f"{comparison.recipe} on {comparison.cluster}; {comparison.asked}."
    if comparison.compute_only_seconds is not None:
        said += f" Without communication {comparison.compute_only_seconds:.1f} s."
    if len(comparison.seeds) > 1:
        said += " Gaps are paired by seed, with 95 % intervals by Student's t."
    return _escaped(said)


def _name(row: Row) -> str:
    cited = ",".join(_keys(row.algorithm))
    return rf"\texttt{{{_escaped(row.algorithm)}}}" + (rf"~\cite{{{cited}}}" if cited else "")


def _latex(row: Row, column: str) -> str:
    from tacit_lab.reports.table import cells

    (text,) = cells(row, [column])[1:]
    mean, sign, half = text.replace("\n", " ").partition("±")
    shown = _escaped(mean.strip()).replace("–", "--").replace("-0.", "$-$0.").replace("x", r"$\times$")
    return rf"{shown}~$\pm$~{half}" if sign else shown


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)


# ---- the methods' papers ------------------------------------------------------------------------------


def to_bibtex(algorithms: Iterable[str]) -> str:
    """The entries of the methods' papers; of what has none a comment says whose method it is."""
    from tacit.algorithms.registry import ENTRIES

    known, parts = _entries(), dict[str, None]()
    for algorithm in algorithms:
        keys, name = _keys(algorithm), algorithm.partition(":")[0]
        parts.update(dict.fromkeys(known[key] for key in keys))
        if not keys and name in ENTRIES:
            parts[f"% {name}: {ENTRIES[name].paper}\n"] = None
    return "\n".join(parts)


def _keys(algorithm: str) -> list[str]:
    """The keys of an algorithm's papers."""
    from tacit.algorithms.registry import ENTRIES

    entry = ENTRIES.get(algorithm.partition(":")[0])
    paper = "" if entry is None else entry.paper
    return [key for key, text in _entries().items() if any(mark in paper for mark in _marks(text))]


def _marks(entry: str) -> list[str]:
    """By which words of an algorithm's facts an entry is found."""
    return re.findall(r"^  (?:eprint|doi|cited) = \{(.*)\}", entry, re.MULTILINE)


def _entries() -> Mapping[str, str]:
    """The bibliography by key."""
    text = files(__package__).joinpath("papers.bib").read_text(encoding="utf-8")
    found = re.findall(r"^(@\w+\{([^,]+),\n.*?^\}\n?)", text, re.MULTILINE | re.DOTALL)
    return {key: entry for entry, key in found}


# ---- the figure ---------------------------------------------------------------------------------------


def draw(comparison: Comparison, records: Sequence[Record], target: Path) -> None:
    """Draw accuracy, or loss where there is none, against seconds and against bytes.

    Args:
        target: the file; its ending says the format, such as .png or .pdf.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"figures need matplotlib: {installing('plots')}") from error
    runs = curves_of(comparison, records)
    by = "accuracy" if any(row.accuracy is not None for row in comparison.rows) else "loss"
    costs = ("steps", "MB by count") if comparison.in_process else ("training seconds", "MB between nodes")
    axes = [x for x in costs if any(_known(runs, x, by))]
    figure = Figure(figsize=(4.2 * max(1, len(axes)), 3.2), layout="constrained")
    for number, x in enumerate(axes, 1):
        plot = figure.add_subplot(1, len(axes), number, xlabel=x, ylabel=by if number == 1 else None)
        for i, (name, each) in enumerate(runs.items()):
            _line(plot, name, points_of(each, x, by), _COLOURS[i % len(_COLOURS)])
        if by == "accuracy" and comparison.target is not None:
            plot.axhline(comparison.target, color="#999999", linewidth=0.8, linestyle="--")
        if x != "steps":
            plot.set_xscale("log")
        plot.grid(alpha=0.3, linewidth=0.5)
    if axes:
        figure.axes[-1].legend(fontsize=7, frameon=False)
    try:
        figure.savefig(target, dpi=200)
    except ValueError as error:
        raise ConfigError(f"cannot draw {target}: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error


def _known(runs: Mapping[str, Sequence[Any]], x: str, y: str) -> Iterable[bool]:
    return (bool(points_of(each, x, y)) for each in runs.values())


def _line(plot: Axes, name: str, points: Sequence[Any], colour: str) -> None:
    xs = [point.x for point in points]
    plot.plot(xs, [point.y for point in points], color=colour, marker="o", markersize=3, label=name)
    if any(point.low < point.high for point in points):
        low, high = [point.low for point in points], [point.high for point in points]
        plot.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
