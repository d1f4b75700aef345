"""Who sent how much to whom in a run, of what its ranks' processes have counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tacit_lab.cluster import Cluster
from tacit_lab.reports.traffic import digits, names

_MOST = 8
"""From more nodes on the matrix is in run.json alone."""


def matrix(processes: Sequence[Mapping[str, Any]], cluster: Cluster) -> list[list[int]] | None:
    """Bytes from each node, row by row, to each; None if it is not known of one.

    What servers sent is what the others received of them.
    """
    rows = [[0] * cluster.places for _ in range(cluster.places)]
    for node in range(cluster.nodes):
        mine = [each for each in processes if each["node"] == node]
        before = [each["exchanged_before"] for each in mine if each.get("exchanged_before")]
        after = [each["exchanged_after"] for each in mine if each.get("exchanged_after")]
        if not before or not after:
            return None
        for place in map(str, range(cluster.places)):
            sent, received = (
                max(each[way].get(place, 0) for each in after)
                - min(each[way].get(place, 0) for each in before)
                for way in (0, 1)
            )
            rows[node][int(place)] = sent
            if int(place) >= cluster.nodes:
                rows[int(place)][node] = received
    return rows


def printed(rows: Sequence[Sequence[int]] | None, nodes: int) -> list[str]:
    """The same as lines of a table; none for one node or many."""
    if rows is None or not 1 < len(rows) <= _MOST:
        return []
    called = names(len(rows), nodes)
    form = f"{{:.{digits(max(map(max, rows)) / 1e6)}f}}"
    cells = [[form.format(each / 1e6) for each in row] for row in rows]
    width = 2 + max(map(len, [*called, *(each for row in cells for each in row)]))
    table = [
        f"    {name:<10}{''.join(each.rjust(width) for each in row)}"
        for name, row in zip(["", *called], [called, *cells], strict=True)
    ]
    return ["  MB from each node (row) to each other (column):", *table]
