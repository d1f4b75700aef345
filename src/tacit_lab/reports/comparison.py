"""A comparison: one row for each algorithm, computed from records alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tacit.errors import ConfigError
from tacit_lab.records import COMPUTE_ONLY, EndRecord, Record, RunRecord, Status

BASE = "ddp"

UNSHAPED = "no network was shaped"

MEANINGS = {
    "accuracy": "held out, after the last epoch, 0..1, mean over the replicas",
    "seconds": "first step to last, without launch and evaluation",
    "to target": "seconds until the first epoch's end at the target",
    "speedup": "seconds of ddp (without it: of the first row) / seconds",
    "MB between nodes": "bytes that all nodes' interfaces transmitted / 10^6",
    "reduction": "1 - MB / MB of ddp (without it: of the first row)",
    "of compute-only": "seconds without any communication / seconds",
}
"""What each column means, in the words to print."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """How an algorithm did. None stands for what was not measured or cannot be divided.

    Attributes:
        algorithm: Its text.
        status: ok, failed or interrupted.
        accuracy: Held out, 0..1.
        seconds: Training seconds.
        seconds_to_target: Training seconds until the target was reached.
        speedup: Seconds of the base / seconds.
        mb_between_nodes: Megabytes (10^6) that all nodes transmitted.
        reduction: The share of the base's megabytes that was saved; negative where there were more.
        of_compute_only: The seconds without communication / seconds.
        chosen: The algorithm that `auto` went on with.
        traffic: Bytes from each node, row by row, to each; the servers' nodes come last.
    """

    algorithm: str
    status: Status
    accuracy: float | None
    seconds: float | None
    seconds_to_target: float | None
    speedup: float | None
    mb_between_nodes: float | None
    reduction: float | None
    of_compute_only: float | None
    chosen: str | None = None
    traffic: list[list[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows, and what they have in common."""

    recipe: str
    cluster: str
    shaped: bool
    seed: int
    epochs: int
    target: float
    compute_only_seconds: float | None
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text and None only, ready for JSON."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}


def compare(records: Iterable[Record]) -> Comparison:
    """Compute the comparison that the records of one recipe on one cluster hold.

    Raises:
        ConfigError: No run has begun, or runs differ in what must be equal to compare them.
    """
    records = list(records)
    head = _common_head([record for record in records if isinstance(record, RunRecord)])
    ends = {record.algorithm: record for record in records if isinstance(record, EndRecord)}
    limit = ends.pop(COMPUTE_ONLY, None)
    base = ends.get(BASE, next(iter(ends.values()), None))
    return Comparison(
        recipe=head.recipe,
        cluster=head.cluster,
        shaped=head.shaped,
        seed=head.seed,
        epochs=head.epochs,
        target=head.target,
        compute_only_seconds=limit.seconds if limit else None,
        rows=tuple(_row(end, base or end, limit) for end in ends.values()),
    )


def _common_head(heads: list[RunRecord]) -> RunRecord:
    if not heads:
        raise ConfigError("these records hold no run, so there is nothing to compare")
    first = heads[0]
    for name in ("recipe", "cluster", "shaped", "seed", "epochs", "target", "batch_per_rank", "world_size"):
        for head in heads:
            ours, theirs = getattr(first, name), getattr(head, name)
            if ours != theirs:
                raise ConfigError(
                    f"{first.algorithm} and {head.algorithm} cannot be compared: "
                    f"{name} was {ours!r} for one and {theirs!r} for the other"
                )
    return first


def _row(end: EndRecord, base: EndRecord, limit: EndRecord | None) -> Row:
    left = _ratio(end.mb_between_nodes, base.mb_between_nodes)
    return Row(
        algorithm=end.algorithm,
        status=end.status,
        accuracy=end.accuracy,
        seconds=end.seconds,
        seconds_to_target=end.seconds_to_target,
        speedup=_ratio(base.seconds, end.seconds),
        mb_between_nodes=end.mb_between_nodes,
        reduction=None if left is None else 1 - left,
        of_compute_only=_ratio(limit.seconds if limit else None, end.seconds),
        chosen=end.metrics.get("choice", {}).get("algorithm"),
        traffic=end.traffic,
    )


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
