"""A comparison for a paper: a table in LaTeX or CSV, figures, and the BibTeX of the methods in it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.errors import ConfigError, installing
from tacit_lab.records import Record, RunRecord
from tacit_lab.reports.charts.curves import curves_of, points_of
from tacit_lab.reports.comparison import Comparison, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEADS = {"of compute-only": "of compute", "MB between nodes": "MB"}
"""Shorter names of columns."""
_SPECIAL = re.compile(r"([&%$#_{}])")
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
"""Okabe and Ito's, which the colour-blind tell apart too."""


def to_csv(comparison: Comparison) -> str:
    """A line for each algorithm, with all that is known of it; means of several seeds with half intervals."""
    return csv_of([dict(_flat(row)) for row in comparison.rows])


def csv_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """Lines of equal keys, which are the head."""
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
    heads = ["algorithm", *(_HEADS.get(name, name) for name in columns)]
    rows = [[cited(row.algorithm), *(_latex(row, name) for name in columns)] for row in comparison.rows]
    return tabular(about(comparison, runs, command), heads, rows, _caption(comparison))


def tabular(
    comments: Iterable[str], heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str
) -> str:
    """A table for booktabs, of cells that are LaTeX; in its first column stand names."""
    lines = [
        *(f"% {line}" for line in comments),
        r"\begin{table}",
        r"\centering",
        rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        r"\toprule",
        " & ".join(map(escaped, heads)) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        rf"\caption{{{escaped(caption)}}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def about(comparison: Comparison, runs: Sequence[RunRecord], command: str) -> list[str]:
    """How the numbers were made: the command, seeds, versions and the machine."""
    facts = asdict(runs[0].environment)
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
    return said


def cited(algorithm: str) -> str:
    """Its name, and the papers of the method."""
    keys = ",".join(_keys(algorithm))
    return rf"\texttt{{{escaped(algorithm)}}}" + (rf"~\cite{{{keys}}}" if keys else "")


def _latex(row: Row, column: str) -> str:
    from tacit_lab.reports.table import cells

    (text,) = cells(row, [column])[1:]
    return number(text)


def number(text: str) -> str:
    """A number as a table has it, such as "-1.2 ±0.3", in LaTeX."""
    mean, sign, half = text.replace("\n", " ").partition("±")
    shown = re.sub(r"-(?=\d)", "$-$", escaped(mean.strip())).replace("–", "--").replace("x", r"$\times$")
    return rf"{shown}~$\pm$~{half}" if sign else shown


def escaped(text: str) -> str:
    """Text for LaTeX."""
    return _SPECIAL.sub(r"\\\1", text)


# ---- the methods' papers ------------------------------------------------------------------------------


def to_bibtex(algorithms: Iterable[str]) -> str:
    """tacit's entry, and those of the methods' papers; of what has none a comment says whose method it is."""
    from tacit.algorithms.registry import ENTRIES

    known = _entries()
    parts = dict.fromkeys([known["tacit"]])
    for algorithm in algorithms:
        keys, name = _keys(algorithm), algorithm.partition(":")[0]
        parts.update(dict.fromkeys(known.get(key) or _entry(key, ENTRIES[name].paper) for key in keys))
        if not keys and name in ENTRIES:
            parts[f"% {name}: {ENTRIES[name].paper}\n"] = None
    return "\n".join(parts)


def _keys(algorithm: str) -> list[str]:
    """The keys of an algorithm's papers: those that are known, and `arxiv-NUMBER` of others."""
    from tacit.algorithms.registry import ENTRIES

    entry = ENTRIES.get(algorithm.partition(":")[0])
    paper = "" if entry is None else entry.paper
    found = [key for key, text in _entries().items() if any(mark in paper for mark in _marks(text))]
    return list(dict.fromkeys([*found, *(f"arxiv-{each}" for each in re.findall(r"\d{4}\.\d{5}", paper))]))


def _entry(key: str, paper: str) -> str:
    """That of a method of one's own, by what it says of its paper."""
    eprint = key.removeprefix("arxiv-")
    return (
        f"@misc{{{key},\n  note = {{{paper}}},\n  eprint = {{{eprint}}},\n  archivePrefix = {{arXiv}},\n}}\n"
    )


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
    runs = curves_of(comparison, records)
    by = "accuracy" if any(row.accuracy is not None for row in comparison.rows) else "loss"
    costs = ("steps", "MB by count") if comparison.in_process else ("training seconds", "MB between nodes")
    axes = [x for x in costs if any(_known(runs, x, by))]
    figure = figure_of(len(axes))
    for number, x in enumerate(axes, 1):
        plot = figure.add_subplot(1, len(axes), number, xlabel=x, ylabel=by if number == 1 else None)
        for i, (name, each) in enumerate(runs.items()):
            _line(plot, name, points_of(each, x, by), COLOURS[i % len(COLOURS)])
        if by == "accuracy" and comparison.target is not None:
            plot.axhline(comparison.target, color="#999999", linewidth=0.8, linestyle="--")
        if x != "steps":
            plot.set_xscale("log")
        plot.grid(alpha=0.3, linewidth=0.5)
    save(figure, target)


def figure_of(panels: int) -> Figure:
    """A figure for so many panels beside each other.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"figures need matplotlib: {installing('plots')}") from error
    return Figure(figsize=(4.2 * max(1, panels), 3.2), layout="constrained")


def save(figure: Figure, target: Path) -> None:
    """Write it, with its legend above the panels.

    Raises:
        ConfigError: matplotlib does not know the format, or the file cannot be written.
    """
    from matplotlib.ticker import LogFormatter

    for axes in figure.axes:
        if axes.get_xscale() == "log":  # as 20, not as 2 x 10^1, of which few have room
            axes.xaxis.set_major_formatter(LogFormatter())
            axes.xaxis.set_minor_formatter(LogFormatter())
    named = {n: h for axes in figure.axes for h, n in zip(*axes.get_legend_handles_labels(), strict=True)}
    if named:
        looks: Any = {"loc": "outside upper center", "ncols": 3, "fontsize": 7, "frameon": False}
        figure.legend(named.values(), named.keys(), **looks)
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
