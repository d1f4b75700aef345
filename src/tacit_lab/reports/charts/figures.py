"""The common parts of the page's charts: figures of plotly.js in plain dicts.

Colours are CSS variables, `var(--c0)`, which the page's script looks up when it draws: so light and dark
differ only in the style sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tacit_lab.reports.comparison import BASE, Comparison

Figure: TypeAlias = dict[str, Any]

PALETTE = 7
"""The number of colours of page.css besides the neutral one."""
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure with the words around it."""

    key: str
    title: str
    note: str
    figure: Figure


@dataclass(frozen=True)
class Style:
    """How an algorithm's curve is drawn: a CSS variable with its colour, and plotly's name of its dashes."""

    colour: str
    dash: str = "solid"


def styles(comparison: Comparison) -> dict[str, Style]:
    """A style for each algorithm; plain DDP always has the neutral one.

    Dashes change when all colours have been used, so up to 28 others can be distinguished.
    """
    others = [row.algorithm for row in comparison.rows if row.algorithm != BASE]
    return {BASE: Style("--base")} | {
        name: Style(f"--c{i % PALETTE}", DASHES[i // PALETTE % len(DASHES)]) for i, name in enumerate(others)
    }


def tint(algorithm: str, paint: Mapping[str, Style]) -> str:
    """The algorithm's colour, as it stands in a figure."""
    return f"var({paint[algorithm].colour if algorithm in paint else '--c0'})"


def line_at(axis: str, value: float, text: str) -> Figure:
    """A dashed line across the plot at a value of one axis, with its label at the line's beginning."""
    along = "x" if axis == "y" else "y"
    shape = {"type": "line", f"{axis}0": value, f"{axis}1": value, f"{axis}ref": axis}
    shape |= {f"{along}0": 0, f"{along}1": 1, f"{along}ref": f"{along} domain"}
    shape["line"] = {"color": "var(--limit)", "width": 1.5, "dash": "dash"}
    label = {
        axis: value,
        f"{axis}ref": axis,
        along: 0 if axis == "y" else 1,
        f"{along}ref": f"{along} domain",
    }
    label |= {"text": text, "showarrow": False, "xanchor": "left", "yanchor": "bottom"}
    return {"shapes": [shape], "annotations": [label | {"font": {"color": "var(--limit)"}}]}
