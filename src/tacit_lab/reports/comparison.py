"""A comparison: one row for each algorithm, computed from records alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from tacit.errors import ConfigError
from tacit_lab.intervals import Mean
from tacit_lab.records import (
    CHOOSING,
    COMPUTE_ONLY,
    UNDER_CHURN,
    ChurnRecord,
    EndRecord,
    Record,
    RunKey,
    RunRecord,
    Status,
    undisturbed,
)

BASE = "ddp"

UNSHAPED = "no network was shaped"
IN_PROCESS = "all replicas in one process"

_ACCURACY = {"accuracy": "held out, after the last epoch, 0..1, mean over the replicas"}
_REPORTED = {
    "accuracy": "as last reported, 0..1, mean over the ranks",
    "loss": "as last reported, mean over the ranks",
}
_SEEDS = {
    "gap": "to ddp (without it: to the first row), in points of accuracy (of a script without one, of its "
    "loss), paired by seed, ± half the 95 % interval"
}
_RATES = {
    "rate": "what the learning rate was multiplied by: the best on validation, chosen with another seed"
}
_PACE = {
    "seconds": "first step to last, without launch and evaluation",
    "to target": "seconds until the first epoch's end at the target",
    "speedup": "seconds of ddp (without it: of the first row) / seconds",
    "MB between nodes": "bytes that all nodes' interfaces transmitted / 10^6",
    "reduction": "1 - MB / MB of ddp (without it: of the first row)",
    "of compute-only": "seconds without any communication / seconds",
}
_CHURN = {
    "goodput": "samples of finished rounds / (seconds that replicas were up, summed, x samples a second of a "
    "replica of the same algorithm where all stay)"
}
_ENDS_LATE = {
    "seconds": "; under churn until the last replica has evaluated",
    "to target": "; under churn all seconds, as accuracy is known at the end alone",
}
_IN_PROCESS = {
    "MB by count": "what all ranks sent, inside nodes too, by the formulas of ring collectives / 10^6",
    "reduction": _PACE["reduction"],
}
_OF_SCRIPT = {
    "seconds": "from attach to the session's close, with what the script evaluates in between",
    "to target": "seconds until the first report at the target",
}
MEANINGS = {**_ACCURACY, **_PACE}
"""What each column means where a recipe is trained with one seed, in the words to print."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """How an algorithm did; of several seeds the means. None stands for what was not measured or divided.

    Attributes:
        algorithm: Its text.
        status: ok, failed or interrupted.
        accuracy: Held out, 0..1.
        loss: Held out, or as the script reports it.
        seconds: Training seconds.
        seconds_to_target: Training seconds until the target was reached, if each seed reached it.
        speedup: Seconds of the base / seconds.
        mb_between_nodes: Megabytes (10^6) that all nodes transmitted.
        mb_by_count: Megabytes that replicas in one process have sent, by formulas.
        reduction: The share of the base's megabytes that was saved; negative where there were more.
        of_compute_only: The seconds without communication / seconds.
        chosen: The algorithm that `auto` went on with.
        traffic: Bytes from each node, row by row, to each; the servers' nodes come last. Of the first seed.
        seeds: How many seeds ended well.
        rate: What the learning rate was multiplied by.
        gap: Of the accuracy (without one: of the loss) to the base's, paired by seed.
        speedups: The speedup's mean over pairs of seeds.
        goodput: Where replicas come and go, useful samples / those of as many seconds of replicas that stay.
        faults: Where replicas come and go, how many were killed or frozen.
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
    loss: float | None = None
    seeds: int = 1
    rate: float = 1.0
    gap: Mean | None = None
    speedups: Mean | None = None
    mb_by_count: float | None = None
    goodput: float | None = None
    faults: int | None = None

    @property
    def churned(self) -> bool:
        """Whether its replicas come and go."""
        return self.algorithm.endswith(UNDER_CHURN)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows, and what they have in common."""

    recipe: str
    cluster: str
    shaped: bool
    in_process: bool
    seeds: tuple[int, ...]
    epochs: int | None
    target: float | None
    compute_only_seconds: float | None
    rows: tuple[Row, ...]

    @property
    def columns(self) -> dict[str, str]:
        """The columns of its table, and what each means."""
        pace, judged = dict(_PACE), dict(_ACCURACY)
        if self.epochs is None:
            by_accuracy = any(row.accuracy is not None for row in self.rows)
            name = "accuracy" if by_accuracy else "loss"
            judged, pace = {name: _REPORTED[name]}, {**pace, **_OF_SCRIPT}
        if self.in_process:
            pace = dict(_IN_PROCESS)
        elif self.target is None:
            del pace["to target"]
        several = _SEEDS if len(self.seeds) > 1 else {}
        rates = _RATES if any(row.rate != 1 for row in self.rows) else {}
        churn = _CHURN if any(row.goodput is not None for row in self.rows) else {}
        columns = {**rates, **judged, **several, **pace, **churn}
        if not any(row.churned for row in self.rows):
            return columns
        if all(row.churned for row in self.rows):
            del columns["of compute-only"]
        also = "without it, and under churn:"
        return {
            name: said.replace("without it:", also) + _ENDS_LATE.get(name, "")
            for name, said in columns.items()
        }

    @property
    def network(self) -> str:
        """What there was in place of a network with shaped links; "" where there was one."""
        return "" if self.shaped else IN_PROCESS if self.in_process else UNSHAPED

    @property
    def asked(self) -> str:
        """What was trained, in a few words."""
        epochs = [] if self.epochs is None else [f"epochs {self.epochs}"]
        seeds = f"seed{'' if len(self.seeds) == 1 else 's'} {', '.join(map(str, self.seeds))}"
        target = [f"target accuracy {self.target:g}"] if "to target" in self.columns else []
        return ", ".join([*epochs, seeds, *target])

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
    everything = {record.key: record for record in records if isinstance(record, EndRecord)}
    counted = {key: end for key, end in everything.items() if key.seed != CHOOSING}
    alone = [end for key, end in counted.items() if key.algorithm == COMPUTE_ONLY]
    limit = next(iter(alone), None)
    found = _by_algorithm({t: end for t, end in counted.items() if t.algorithm != COMPUTE_ONLY})
    ends = {each: found[each] for each in dict.fromkeys(r.algorithm for r in records) if each in found}
    seeds = sorted({seed for each in ends.values() for seed in each}) or [head.seed]
    return Comparison(
        recipe=head.recipe,
        cluster=head.cluster,
        shaped=head.shaped,
        in_process=head.in_process,
        seeds=tuple(seeds),
        epochs=head.epochs,
        target=head.target,
        compute_only_seconds=limit.seconds if limit else None,
        rows=tuple(
            replace(
                _row([*each.values()], _base(name, ends), limit),
                goodput=_goodput(name, each, counted, records),
                faults=_faults(each, records),
            )
            for name, each in ends.items()
        ),
    )


def _base(name: str, ends: Mapping[str, Mapping[int, EndRecord]]) -> Mapping[int, EndRecord]:
    """What an algorithm is measured against: ddp, or the first; under churn the first of those under it."""
    churned = name.endswith(UNDER_CHURN)
    alike = {each: found for each, found in ends.items() if each.endswith(UNDER_CHURN) == churned}
    return alike.get(BASE, next(iter(alike.values())))


def _goodput(
    name: str, ends: Mapping[int, EndRecord], all_: Mapping[RunKey, EndRecord], records: Sequence[Record]
) -> float | None:
    """The mean over seeds; None where replicas stay, or it is not known how fast those are that do."""
    churned = {each.key: each for each in records if isinstance(each, ChurnRecord)}
    batches = {each.key: each.batch_per_rank for each in records if isinstance(each, RunRecord)}
    found = []
    for end in ends.values():
        churn, stays = churned.get(end.key), end.key._replace(algorithm=undisturbed(name))
        calm, batch = all_.get(stays), batches.get(stays)
        if churn is not None and calm is not None and calm.steps and batch:
            seconds = _ratio(calm.seconds, calm.steps * batch)
            if (share := _ratio(churn.useful * (seconds or 0.0), churn.up)) is not None:
                found.append(share)
    return fmean(found) if found else None


def _faults(ends: Mapping[int, EndRecord], records: Sequence[Record]) -> int | None:
    churned = {each.key: each for each in records if isinstance(each, ChurnRecord)}
    found = [churned[end.key].went for end in ends.values() if end.key in churned]
    return sum(what != "back" for went in found for *_, what in went) if found else None


def _by_algorithm(ends: Mapping[RunKey, EndRecord]) -> dict[str, dict[int, EndRecord]]:
    """The ends by algorithm and seed; of several rates the one that was trained last."""
    found: dict[str, dict[int, EndRecord]] = {}
    for key, end in ends.items():
        mine = found.setdefault(key.algorithm, {})
        if any(each.rate != key.rate for each in mine.values()):
            mine.clear()
        mine[key.seed] = end
    return found


def _common_head(heads: list[RunRecord]) -> RunRecord:
    if not heads:
        raise ConfigError("these records hold no run, so there is nothing to compare")
    first = heads[0]
    equal = ("recipe", "cluster", "shaped", "in_process", "epochs", "target", "batch_per_rank", "world_size")
    for name in equal:
        for head in heads:
            ours, theirs = getattr(first, name), getattr(head, name)
            if ours != theirs:
                raise ConfigError(
                    f"{first.algorithm} and {head.algorithm} cannot be compared: "
                    f"{name} was {ours!r} for one and {theirs!r} for the other"
                )
    return first


def _row(ends: Sequence[EndRecord], base: Mapping[int, EndRecord], limit: EndRecord | None) -> Row:
    first = next((end for end in ends if end.status != "ok"), ends[0])
    pairs = [(end, base[end.seed]) for end in ends if end.seed in base]
    others = [(end, other) for end, other in pairs if end is not other]
    seconds, megabytes = _mean(ends, "seconds"), _mean(ends, "mb_between_nodes")
    theirs = [other for _, other in pairs]
    sent = "mb_by_count" if megabytes is None else "mb_between_nodes"
    left = _ratio(_mean(ends, sent), _mean(theirs, sent))
    reached = [end.seconds_to_target for end in ends]
    return Row(
        algorithm=first.algorithm,
        status=first.status,
        accuracy=_mean(ends, "accuracy"),
        loss=_mean(ends, "loss"),
        seconds=seconds,
        seconds_to_target=None if None in reached else _mean(ends, "seconds_to_target"),
        speedup=_ratio(_mean(theirs, "seconds"), seconds),
        mb_between_nodes=megabytes,
        mb_by_count=_mean(ends, "mb_by_count"),
        reduction=None if left is None else 1 - left,
        of_compute_only=_ratio(limit.seconds if limit else None, seconds),
        chosen=first.metrics.get("choice", {}).get("algorithm"),
        traffic=ends[0].traffic,
        seeds=sum(end.status == "ok" for end in ends),
        rate=first.rate,
        gap=_over_pairs(others, _gap),
        speedups=_over_pairs(pairs, lambda end, other: _ratio(other.seconds, end.seconds)),
    )


def _mean(ends: Sequence[EndRecord], name: str) -> float | None:
    known = [value for end in ends if (value := getattr(end, name)) is not None]
    return fmean(known) if known else None


def _gap(end: EndRecord, other: EndRecord) -> float | None:
    for name in ("accuracy", "loss"):
        mine, theirs = getattr(end, name), getattr(other, name)
        if mine is not None and theirs is not None:
            return float(mine - theirs)
    return None


def _over_pairs(
    pairs: Sequence[tuple[EndRecord, EndRecord]], of: Callable[[EndRecord, EndRecord], float | None]
) -> Mean | None:
    return Mean.of([value for pair in pairs if (value := of(*pair)) is not None])


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
