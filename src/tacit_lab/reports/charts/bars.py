"""The chart of where the seconds went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from tacit_lab.reports.charts.figures import Chart, Figure, Style, line_at, tint
from tacit_lab.reports.charts.split import TimeSplit


def bars(
    splits: Sequence[TimeSplit], paint: Mapping[str, Style], alone: float | None, seed: int | None = None
) -> Chart | None:
    """A bar in two parts for each algorithm, and a line where nothing can be faster; None without any bar.

    `seed`: the one that the bars are of, where there are several.
    """
    if not splits:
        return None
    line = {} if alone is None else line_at("x", alone, f"compute-only {alone:.1f} s")
    if alone is not None and alone > max(each.total for each in splits) / 2:
        line["annotations"][0]["xanchor"] = "right"
    names = [_label(each, i, paint) for i, each in enumerate(splits)]
    layout: Figure = {
        "barmode": "stack",
        "bargap": 0.5,
        "xaxis": {"title": {"text": "training seconds"}, "rangemode": "tozero"},
        "yaxis": {"range": [len(splits) - 0.6, -0.8], "showgrid": False, "showticklabels": False},
        "height": 90 + 62 * len(splits),
        "shapes": line.get("shapes", []),
        "annotations": [*line.get("annotations", []), *names],
    }
    traces = [_bar(splits, paint, waiting=False), _bar(splits, paint, waiting=True)]
    return Chart(
        key="seconds-split",
        title="Where the seconds went",
        note=_bars_note(splits, seed),
        figure={"data": traces, "layout": layout},
    )


def _bars_note(splits: Sequence[TimeSplit], seed: int | None) -> str:
    note = "Solid: computing. Striped: waiting for communication that nothing hid."
    note += "" if seed is None else f" Of seed {seed} alone."
    derived = ", ".join(each.algorithm for each in splits if each.derived)
    return f"{note} *{derived} does not report it: total minus compute-only is shown." if derived else note


def _bar(splits: Sequence[TimeSplit], paint: Mapping[str, Style], *, waiting: bool) -> Figure:
    tints = [tint(each.algorithm, paint) for each in splits]
    marker: Figure = {"color": tints, "line": {"color": tints, "width": 1.5}}
    if waiting:
        stripes = {"shape": "/", "size": 7, "solidity": 0.3}
        marker["pattern"] = {**stripes, "fgcolor": tints, "bgcolor": "var(--page)"}
    return {
        "type": "bar",
        "orientation": "h",
        "name": "exposed communication" if waiting else "computing",
        "y": list(range(len(splits))),
        "x": [each.exposed if waiting else each.compute for each in splits],
        "customdata": [escape(each.algorithm) for each in splits],
        "marker": marker,
        "hovertemplate": "<b>%{customdata}</b><br>%{x:.1f} s %{fullData.name}<extra></extra>",
    }


def _label(each: TimeSplit, place: int, paint: Mapping[str, Style]) -> Figure:
    """The bar's name and numbers, above its left end, where there is room on a phone too."""
    share = each.exposed / each.total if each.total else 0.0
    star = "*" if each.derived else ""
    told = f"{each.total:.1f} s, {share:.0%} waiting{star}".replace("%", " %")
    return {
        "text": f"<b>{escape(each.algorithm)}</b>  {told}",
        "x": 0,
        "y": place,
        "xref": "x",
        "yref": "y",
        "xanchor": "left",
        "yanchor": "bottom",
        "yshift": 17,
        "showarrow": False,
        "font": {"color": tint(each.algorithm, paint)},
        "bgcolor": "var(--page)",
    }
