"""What `tacit plan` shows: a table, JSON, and a page with the timeline of a step."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from tacit.algorithms.auto import accuracy_hint
from tacit.contracts import NET, NODE
from tacit.planning.cluster_prediction import Prediction
from tacit.planning.simulation.timeline import ENCODING, MAIN, WAITING
from tacit_lab.cluster_plans import FRAMES, ClusterPlan, without_rate
from tacit_lab.reports.document import document

_HEAD = (
    "step ms",
    "computes",
    "loads",
    "between",
    "inside",
    "encodes",
    "MB",
    "memory MB",
    "x ddp",
    "of limit",
)
_LEGEND = (
    "A step is the sum of five: the training computes, waits for its data (loads), for links between nodes "
    "and inside them, and for encoding and decoding. MB: what leaves a node in a step. Memory: of a rank, "
    "without activations. Of limit: how fast a step is, of what it would be if communication cost nothing."
)
_ROWS = {MAIN: "training", ENCODING: "encoding", NET: "between nodes", NODE: "inside nodes"}
_COLOURS = {
    MAIN: "hsl(210 50% 50%)",
    WAITING: "hsl(0 0% 60% / 0.35)",
    ENCODING: "hsl(35 80% 50%)",
    NET: "hsl(350 60% 50%)",
    NODE: "hsl(160 45% 42%)",
}
_DRAWN, _SPANS = 8, 4000
"""So many algorithms have a timeline on the page, each with so many bars at the most."""


def to_json(plan: ClusterPlan, title: str, grid: Sequence[ClusterPlan] = ()) -> dict[str, Any]:
    """One JSON object; times in seconds, sizes in bytes."""
    network = plan.network
    return {
        "title": title,
        "cluster": {
            "nodes": network.nodes,
            "ranks": network.ranks,
            "bytes_per_second": network.rate,
            "latency": network.latency,
            "cores": network.cores,
            "ranks_on_these_cores": network.sharing,
        },
        "compute_only_seconds": plan.compute,
        "profile_of": plan.where,
        "computes_on": plan.kind,
        "optimizer": plan.optimizer,
        "not_in_the_profile": [*plan.unweighed],
        "extrapolated_from": plan.line,
        "predictions": [
            {
                "algorithm": each.algorithm,
                "seconds": each.seconds,
                "compute": each.compute,
                "loading": each.loading,
                "between_nodes": each.far,
                "inside_nodes": each.near,
                "encoding": each.encoding,
                "bytes_out_of_a_node": each.bytes_out,
                "memory": each.memory,
                "speedup": plan.speedup(each),
                "notes": [*each.notes],
            }
            for each in plan.predictions
        ],
        "refused": dict(plan.refused),
        "how_to_measure": plan.measuring,
        "sweep": [
            {
                "nodes": each.network.nodes,
                "bytes_per_second": each.network.rate,
                "fastest": each.predictions[0].algorithm,
                "seconds": each.predictions[0].seconds,
                "speedup": each.speedup(each.predictions[0]),
            }
            for each in grid
        ],
    }


def to_text(plan: ClusterPlan, title: str, grid: Sequence[ClusterPlan] = ()) -> str:
    """A table for a terminal, the fastest first."""
    width = max([len("algorithm"), *(len(each.algorithm) for each in plan.predictions)])
    lines = [
        f"{title}, {_of(plan)}: predicted, per step",
        "",
        f"{'algorithm':{width}}" + "".join(f"{h:>11}" for h in _HEAD),
    ]
    lines += [
        f"{each.algorithm:{width}}" + "".join(f"{cell:>11}" for cell in _cells(plan, each))
        for each in plan.predictions
    ]
    lines += ["", _lead(plan)] if len(plan.predictions) > 1 else []
    lines += ["", *textwrap.wrap(_LEGEND, 110)]
    lines += ["", f"If communication cost nothing: {1e3 * plan.compute:.1f} ms. {_assumed(plan)}"]
    lines += [f"{each.algorithm}: {note}" for each in plan.predictions for note in each.notes]
    lines += [f"Left out: {name}: {why}" for name, why in plan.refused.items()]
    lines += filter(None, [plan.measuring, _unweighed(plan)])
    return "\n".join([*lines, *_grid_lines(grid)])


def _of(plan: ClusterPlan) -> str:
    return f"{plan.kind}, {plan.optimizer or 'optimizer not known'}"


def _lead(plan: ClusterPlan) -> str:
    """A sentence on the fastest, and where it stands what that costs in accuracy."""
    best, speedup = plan.predictions[0], plan.speedup(plan.predictions[0])
    lead = f"{best.algorithm} would be the fastest: {1e3 * best.seconds:.1f} ms a step"
    lead += "." if speedup is None else f", {speedup:.1f} times as fast as ddp."
    return f"{lead} {accuracy_hint(best.algorithm)}".rstrip()


def _unweighed(plan: ClusterPlan) -> str:
    if not plan.unweighed:
        return ""
    return f"Planned by default, and not in this profile: {', '.join(plan.unweighed)}."


def _assumed(plan: ClusterPlan) -> str:
    network = plan.network
    where = f"{network.cores:g} cores for each rank"
    if network.sharing > 1:
        where = f"{network.sharing} ranks share {network.cores:g} cores"
    notes = [where, f"kernels and torch as fast as on {plan.where}", without_rate(network)]
    if plan.line:
        notes.append(f"what algorithms compute is on the straight line through {plan.line}")
    return f"Assumed: {'; '.join(filter(None, notes))}."


def _cells(plan: ClusterPlan, each: Prediction) -> Iterator[str]:
    for seconds in (each.seconds, each.compute, each.loading, each.far, each.near, each.encoding):
        yield f"{1e3 * seconds:.1f}"
    yield f"{each.bytes_out / 1e6:.2f}"
    yield f"{each.memory / 1e6:.0f}"
    speedup = plan.speedup(each)
    yield "–" if speedup is None else f"{speedup:.2f}"
    yield f"{100 * plan.compute / each.seconds:.0f} %"


def _grid_lines(grid: Sequence[ClusterPlan]) -> list[str]:
    if not grid:
        return []
    rates = [*dict.fromkeys(plan.network.rate for plan in grid)]
    width = max(12, *(len(plan.predictions[0].algorithm) + 8 for plan in grid))
    lines = ["", "The fastest, and how many times as fast as ddp:", ""]
    lines.append(f"{'nodes':>6}" + "".join(f"{_rate(rate):>{width}}" for rate in rates))
    for row in _rows(grid):
        cells = "".join(f"{_winner(plan):>{width}}" for plan in row)
        lines.append(f"{row[0].network.nodes:>6}" + cells)
    return lines


def _rows(grid: Sequence[ClusterPlan]) -> list[list[ClusterPlan]]:
    counts = dict.fromkeys(plan.network.nodes for plan in grid)
    return [[plan for plan in grid if plan.network.nodes == count] for count in counts]


def _winner(plan: ClusterPlan) -> str:
    best = plan.predictions[0]
    speedup = plan.speedup(best)
    return best.algorithm if speedup is None else f"{best.algorithm} {speedup:.1f}x"


def _rate(bytes_per_second: float) -> str:
    bits = 8e-6 * bytes_per_second / FRAMES
    return f"{bits / 1e3:.3g} Gbit/s" if bits > 999 else f"{bits:.3g} Mbit/s"


# ---- the page -------------------------------------------------------------------------------------------


def page(plan: ClusterPlan, title: str, grid: Sequence[ClusterPlan], command: str) -> str:
    """HTML: the table, the map of winners, and the timeline of a step for the fastest."""
    left_out = "".join(f"<li>{escape(name)}: {escape(why)}</li>" for name, why in plan.refused.items())
    parts = [
        f'<h1>{escape(title)}</h1><p class="lead">{escape(_lead(plan))}</p>',
        f"<p>{escape(_of(plan))}. Predicted, not measured. {escape(_assumed(plan))} What no algorithm can "
        f"beat, as communication would cost nothing: {1e3 * plan.compute:.1f} ms.</p>",
        f'<section><h2>A step</h2><div class="scroll">{_table(plan)}</div><p>{escape(_LEGEND)}</p></section>',
        _map(grid),
        "<section><h2>When what happens</h2><p>Training in blue, in grey where it waits; below it encoding "
        "and decoding, and messages between nodes and inside them.</p>"
        + "".join(_timeline(each) for each in _shown(plan))
        + "</section>",
        f"<section><h2>Left out</h2><ul>{left_out}</ul><p>{escape(plan.measuring)}</p>"
        f"<p>{escape(_unweighed(plan))}</p></section>"
        if left_out or plan.unweighed
        else "",
    ]
    return document("plan", parts, (), command)


def _table(plan: ClusterPlan) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("algorithm", *_HEAD))
    rows = "".join(
        "".join(
            [
                f"<tr><th>{escape(each.algorithm)}</th>",
                *map("<td>{}</td>".format, _cells(plan, each)),
                "</tr>",
            ]
        )
        for each in plan.predictions
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _map(grid: Sequence[ClusterPlan]) -> str:
    if not grid:
        return ""
    rates = [*dict.fromkeys(plan.network.rate for plan in grid)]
    winners = [*dict.fromkeys(plan.predictions[0].algorithm for plan in grid)]
    head = "".join(f"<th>{_rate(rate)}</th>" for rate in rates)
    rows = []
    for row in _rows(grid):
        cells = []
        for plan in row:
            hue = 360 * winners.index(plan.predictions[0].algorithm) / len(winners)
            cells.append(f'<td style="background: hsl({hue:.0f} 60% 50% / 0.3)">{escape(_winner(plan))}</td>')
        rows.append(f"<tr><th>{row[0].network.nodes}</th>{''.join(cells)}</tr>")
    return (
        "<section><h2>Which is the fastest where</h2><p>By the links' rate (columns) and the number of nodes "
        'with these ranks (rows); how many times as fast as ddp.</p><div class="scroll"><table><thead><tr>'
        f"<th>nodes</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _shown(plan: ClusterPlan) -> list[Prediction]:
    """The fastest, and DDP."""
    found = [*plan.predictions[:_DRAWN]]
    if plan.base is not None and plan.base not in found:
        found[-1:] = [plan.base]
    return found


def _timeline(prediction: Prediction) -> str:
    """Bars of the time of one step, as SVG, from shortly before the first message on."""
    length = prediction.seconds
    messages = [span.begun for span in prediction.spans if span.row in (NET, NODE)]
    start = max(0.0, min(messages, default=0.0) - 0.4 * length)
    shown = [span for span in prediction.spans if span.ended > start and span.begun < start + length]
    rows = [row for row in _ROWS if any(span.row == row for span in shown)]
    bars = []
    for span in shown[:_SPANS]:
        begun, ended = max(0.0, span.begun - start), min(length, span.ended - start)
        y = 4 + 18 * rows.index(span.row)
        x, width = 100 * begun / length, 100 * (ended - begun) / length
        colour = _COLOURS[WAITING if span.what == WAITING else span.row]
        told = escape(f"{span.what}: {1e3 * (span.ended - span.begun):.2f} ms")
        bars.append(
            f'<rect x="{x:.3f}%" y="{y}" width="{max(width, 0.05):.3f}%" height="14" style="fill: {colour}">'
            f"<title>{told}</title></rect>"
        )
    names = "".join(
        f'<text x="4" y="{15 + 18 * i}" style="font-size: 11px; fill: currentColor">{_ROWS[row]}</text>'
        for i, row in enumerate(rows)
    )
    height = 8 + 18 * len(rows)
    return (
        f"<h3>{escape(prediction.algorithm)} · {1e3 * length:.1f} ms</h3>"
        f'<div style="display: flex"><svg width="100" height="{height}">{names}</svg>'
        f'<svg style="flex: 1" height="{height}">{"".join(bars)}</svg></div>'
    )
