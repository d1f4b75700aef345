"""The counts of the parameter servers of each run, as a table of the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tacit_lab.records import EndRecord, Record
from tacit_lab.reports.columns import TableRow, explained

COLUMNS = {
    "server": "which of the run's servers; parameters are shared out by size",
    "pushes": "messages that workers pushed: one a bucket, and several of a long one",
    "MB pushed": "their bytes / 10^6, without headers",
    "MB pulled": "bytes of the answers / 10^6",
    "queue s": "seconds that messages waited for their turn once they had come, summed",
    "updates old": "how many pushes were so many updates old: the staleness",
    "late": "pushes that were dropped, as their round was over",
}
"""The columns, and what each means."""


def servers(records: Iterable[Record]) -> str:
    """One row for each server of each finished run; "" if no run had any."""
    ends = {record.algorithm: record for record in records if isinstance(record, EndRecord)}
    told = [(name, each) for name, end in ends.items() for each in end.metrics.get("servers", ())]
    if not told:
        return ""
    lines = [_line(name, each) for name, each in told]
    return f"""<section aria-label="Parameter servers">
<h2>Parameter servers</h2>
{explained(COLUMNS, lines)}
</section>"""


def _line(name: str, told: Mapping[str, Any]) -> TableRow:
    cells = [
        str(told["server"]),
        f"{told['pushes']:,}",
        f"{told['push_bytes'] / 1e6:.1f}",
        f"{told['pull_bytes'] / 1e6:.1f}",
        f"{told['queue_seconds']:.2f}",
        _histogram(told["stale"]),
        str(told["late"]),
    ]
    return TableRow(name, cells)


def _histogram(stale: Mapping[Any, int]) -> str:
    """Such as `0: 40 %, 1: 35 %, 2: 25 %`; ages beyond the tenth together."""
    total = sum(stale.values()) or 1
    ages = sorted((int(age), count) for age, count in stale.items())
    shown = [f"{age}: {count / total:.0%}" for age, count in ages[:10]]
    rest = sum(count for _, count in ages[10:])
    more = [f"more: {rest / total:.0%}"] if rest else []
    return ", ".join([*shown, *more]).replace("%", " %")
