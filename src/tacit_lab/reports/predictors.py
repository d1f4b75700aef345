"""An evaluation of predictors as a table for a terminal, and as a page with their paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from tacit_lab.reports.charts.figures import Chart, Figure, Style
from tacit_lab.reports.columns import TableRow, explained
from tacit_lab.reports.document import document
from tacit_lab.reports.sections import section, swatch

if TYPE_CHECKING:
    from rich.console import Group

NOTHING = "–"
COLOURS = 7
TRUE = Style("--base")
_BROKEN = {
    "convolution": "convo-\nlution",
    "assembled": "assem-\nbled",
    "accuracy": "accu-\nracy",
    "architecture": "archi-\ntecture",
}


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The results of a predictor. None stands for what was not tried, or is not known.

    Attributes:
        errors: kind of layer -> mean absolute error of the next change, as a share of that of no change.
        held_out: the same on recorded runs that were held out: "SPLIT, KIND" -> error.
        assembled: mean loss of the models put together of pushed and predicted parameters.
        assembled_accuracy: their mean accuracy, 0..1.
        loss: held-out loss in the end of the training that went by the predictions; `accuracy`, 0..1.
            Both are None where it did not stay finite.
        within: whether that loss is at most the full push's and the tolerance.
        operations: floating-point operations an element.
        microseconds: an element, as measured.
    """

    name: str
    errors: Mapping[str, float]
    held_out: Mapping[str, float] = field(default_factory=dict)
    assembled: float | None = None
    assembled_accuracy: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    within: bool | None = None
    operations: int | None = None
    microseconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Path:
    """The values of an element over a run, true and as predicted.

    Attributes:
        title: which element.
        true: after each round, as distance from where it began.
        led: predictor -> the predicted ones, likewise.
    """

    title: str
    true: Sequence[float]
    led: Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All predictors, and what they have in common.

    Attributes:
        tolerance: by what share a loss may be above the full push's.
        loss: of the full push in the end; `accuracy`, 0..1.
        next_loss: mean loss of the true next models; `next_accuracy`, 0..1.
    """

    recipe: str
    workers: int
    epochs: int
    share: float
    sync_every: int
    seed: int
    tolerance: float
    loss: float
    accuracy: float
    next_loss: float
    next_accuracy: float
    rows: tuple[Judged, ...]
    paths: tuple[Path, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text and None only, ready for JSON; without the paths."""
        return {k: v for k, v in asdict(self).items() if k != "paths"}

    @property
    def columns(self) -> dict[str, str]:
        """The columns after the names, with the meaning of each."""
        kinds = dict.fromkeys(kind for row in self.rows for kind in row.errors)
        ahead = "mean absolute error of the next change of {} layers / that of no change"
        within = f"the loss is at most {1 + self.tolerance:g} of the full push's"
        return {
            **{kind: ahead.format(kind) for kind in kinds},
            "assembled loss": f"of models of pushed and predicted parts; true next: {self.next_loss:.4f}",
            "loss": f"in the end of a training by these predictions; full push: {self.loss:.4f}",
            "accuracy": f"likewise, 0..1; full push: {self.accuracy:.4f}",
            f"within {self.tolerance:.0%}": within,
            "FLOP": "floating-point operations an element",
            "µs": "an element, measured here",
        }

    def cells(self, row: Judged) -> list[str]:
        """The texts of a predictor's columns, in order."""
        kinds = dict.fromkeys(kind for each in self.rows for kind in each.errors)
        return [
            *(_number(row.errors.get(kind), "{:.3f}") for kind in kinds),
            _number(row.assembled, "{:.4f}"),
            "diverged" if row.within is False and row.loss is None else _number(row.loss, "{:.4f}"),
            _number(row.accuracy, "{:.4f}"),
            NOTHING if row.within is None else "yes" if row.within else "no",
            NOTHING if row.operations is None else f"{row.operations}",
            _number(row.microseconds, "{:.2f}"),
        ]

    @property
    def title(self) -> str:
        """What was trained, and how."""
        epochs = f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}"
        rounds = "a round a step" if self.sync_every == 1 else f"a round every {self.sync_every} steps"
        return (
            f"{self.recipe}, {self.workers} workers in one process, {epochs}, {self.share:.0%} "
            f"pushed, {rounds}, seed {self.seed}"
        )


def table(evaluation: Evaluation) -> Group:
    """A title, a line for each predictor, what the columns mean; and errors on what was held out, if any."""
    from rich.console import Group
    from rich.text import Text

    meanings = "\n".join(f"{name}: {meaning}" for name, meaning in evaluation.columns.items())
    rows = [[row.name, *evaluation.cells(row)] for row in evaluation.rows]
    parts: list[Any] = [Text(evaluation.title, style="bold"), "", _grid(list(evaluation.columns), rows)]
    parts += ["", Text(meanings, style="dim")]
    held = _held_out(evaluation)
    if held:
        rows = [
            [row.name, *(_number(row.held_out.get(each), "{:.3f}") for each in held)]
            for row in evaluation.rows
        ]
        parts += ["", Text("One step ahead, on recorded runs that were held out", style="bold"), ""]
        parts.append(_grid(held, rows))
    return Group(*parts)


def _held_out(evaluation: Evaluation) -> list[str]:
    return list(dict.fromkeys(each for row in evaluation.rows for each in row.held_out))


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    result.add_column("predictor", overflow="fold", min_width=11, vertical="bottom")
    for name in columns:
        # In pieces, so that all columns fit into 80 characters.
        for whole, parts in _BROKEN.items():
            name = name.replace(whole, parts)
        result.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        result.add_row(*row)
    return result


# ---- the page -----------------------------------------------------------------------------------------


def page(evaluation: Evaluation) -> str:
    """One HTML page that needs nothing from any network."""
    names = list(dict.fromkeys(name for path in evaluation.paths for name in path.led))
    paint = {name: Style(f"--c{i % COLOURS}") for i, name in enumerate(names)}
    charts = [_chart(path, paint, i) for i, path in enumerate(evaluation.paths)]
    parts = [_header(evaluation), _results(evaluation)]
    if charts:
        key = "".join(
            f"<li>{swatch(style)}{escape(name)}</li>" for name, style in {"true": TRUE, **paint}.items()
        )
        parts.append(section("Where single elements were led", f'<ul class="key">{key}</ul>', charts)[0])
    return document(evaluation.title, parts, charts, "tacit predictor evaluate")


def _header(evaluation: Evaluation) -> str:
    good = [row.name for row in evaluation.rows if row.within]
    lead = f"Within {evaluation.tolerance:.0%} of the full push's loss: {', '.join(good) or 'none'}."
    return f"""<header>
<p class="brand">tacit predictor evaluate</p>
<h1>{escape(evaluation.title)}</h1>
<p class="lead">{escape(lead)}</p>
</header>"""


def _results(evaluation: Evaluation) -> str:
    lines = [TableRow(row.name, evaluation.cells(row)) for row in evaluation.rows]
    table = explained(evaluation.columns, lines, first="predictor")
    return f'<section aria-label="Results">\n{table}\n</section>'


def _chart(path: Path, paint: Mapping[str, Style], i: int) -> Chart:
    lines = {"true": (path.true, TRUE), **{name: (led, paint[name]) for name, led in path.led.items()}}
    return Chart(
        key=f"path-{i}",
        title=path.title,
        note="Sent in every few rounds, predicted in the others, along the recorded motion.",
        figure={
            "data": [_line(name, values, style) for name, (values, style) in lines.items()],
            "layout": {
                "xaxis": {"title": {"text": "round"}},
                "yaxis": {"title": {"text": "distance from the first value"}},
            },
        },
    )


def _line(name: str, values: Sequence[float], style: Style) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escape(name),
        "x": list(range(1, len(values) + 1)),
        "y": list(values),
        "line": {"color": f"var({style.colour})", "width": 3.5 if style is TRUE else 1.5},
        "hovertemplate": f"<b>{escape(name)}</b><br>round %{{x}}: %{{y:.3g}}<extra></extra>",
    }


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)
