"""The collapsible part of the page: all that decides the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape

from tacit_lab.records import VERSION, EndRecord, Record, RunRecord
from tacit_lab.reports.comparison import Comparison


def details(comparison: Comparison, runs: Sequence[RunRecord], records: Sequence[Record]) -> str:
    """Configuration, strategies and environment, closed until it is asked for."""
    strategies = [*{run.algorithm: run.strategy or "nothing is exchanged" for run in runs}.items()]
    return f"""<details>
<summary>Configuration and environment</summary>
<h3>Configuration</h3>
{_pairs([*_configuration(comparison, runs[0]), *_relay(records)])}
<h3>Strategies</h3>
{_pairs(strategies)}
<h3>Environment</h3>
{_pairs(_environment(runs))}
</details>"""


def _configuration(comparison: Comparison, run: RunRecord) -> list[tuple[str, str]]:
    known = {
        "script" if comparison.epochs is None else "recipe": comparison.recipe,
        "cluster": comparison.cluster,
        "network": comparison.network or "links shaped to the cluster's rate",
        "seeds": ", ".join(map(str, comparison.seeds)),
        "epochs": comparison.epochs,
        "target accuracy": comparison.target and f"{comparison.target:g}",
        "world size": run.world_size,
        "batch per rank": run.batch_per_rank,
        "parameters": f"{run.parameters:,}",
        "version of the records": VERSION,
    }
    return [(name, str(value)) for name, value in known.items() if value is not None]


def _relay(records: Sequence[Record]) -> list[tuple[str, str]]:
    """What the process took that made packets late, where there was one."""
    cores = [each.relay_cores for each in records if isinstance(each, EndRecord) and each.relay_cores]
    return [("relay of the links", f"at most {max(cores):.2f} of a core in any second")] if cores else []


def _environment(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    every = [asdict(run.environment) for run in runs]
    dates = sorted({each.pop("date") for each in every})
    found = [(name, _distinct(each[name] for each in every)) for name in every[0]]
    return [*found, ("date", dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}")]


def _distinct(values: Iterable[object]) -> str:
    return " / ".join(dict.fromkeys(str(value) for value in values))


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "\n".join(f'<tr><th scope="row">{escape(a)}</th><td>{escape(b)}</td></tr>' for a, b in pairs)
    return f'<table class="pairs"><tbody>\n{rows}\n</tbody></table>'
