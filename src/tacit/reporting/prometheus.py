"""A session's numbers in Prometheus' text format 0.0.4."""

from __future__ import annotations

import re
from collections.abc import Mapping

_COUNTERS = {
    "steps": "Steps that were taken",
    "rounds": "Rounds of exchange that were begun",
    "void_rounds": "Rounds that came to nothing",
    "bytes_out": "Bytes that were sent in training, by the formulas of the collectives",
    "closing_bytes_out": "Bytes that were sent in closing",
    "ddp_bytes_out": "Bytes that DDP would have sent in these steps",
    "exchange_seconds": "Seconds with a round under way",
    "exposed_seconds": "Seconds for which training waited for rounds",
    "pushes": "Messages to parameter servers",
    "push_bytes": "Bytes that were pushed to parameter servers",
    "pull_bytes": "Bytes that were pulled from parameter servers",
    "queue_seconds": "Seconds that pushes have waited at the servers",
    "changes": "Changes of members that this one has gone through",
    "lost_steps": "Steps of others that died or left, since their last rounds",
}
_GAUGES = {
    "compute_share": "Share of the time between rounds that was not spent waiting",
    "compression": "How many times less was sent than DDP would have",
    "lag": "Steps from the start of a round to its effect, in the mean",
    "staleness": "Updates that a push was old, in the mean",
    "consensus_distance": "Distance of the replicas to their mean, in the mean",
    "consensus_relative": "That distance over the length of the mean",
    "members": "Members of the present period",
    "period": "Number of the present period",
}
_OF_LEVEL = re.compile(r"(.+)_(\d+)")


def metrics_text(metrics: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Lines that Prometheus reads: of each number its help, its type, and `tacit_<name>{labels} value`.

    Args:
        metrics: the numbers by name.
        labels: what all of them are labelled with.
    """
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "".join(f"{_head(name)}tacit_{name}{{{inside}}} {value!r}\n" for name, value in metrics.items())


def _head(name: str) -> str:
    of_level = _OF_LEVEL.fullmatch(name)
    plain, where = (of_level[1], f", level {of_level[2]}") if of_level else (name, "")
    meant = {**_COUNTERS, **_GAUGES}.get(plain, plain.replace("_", " ").capitalize())
    kind = "counter" if plain in _COUNTERS else "gauge"
    return f"# HELP tacit_{name} {meant}{where}.\n# TYPE tacit_{name} {kind}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
