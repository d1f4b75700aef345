"""A comparison's result in one sentence, and warnings about missing or doubtful numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tacit.errors import ConfigError
from tacit_lab.cluster import Cluster
from tacit_lab.impairment import ETHERNET, Impairment
from tacit_lab.records import COMPUTE_ONLY, ChurnRecord, EndRecord, EpochRecord, Record, RunKey, RunRecord
from tacit_lab.reports.comparison import BASE, IN_PROCESS, UNSHAPED, Comparison, Row, compare
from tacit_lab.study.search import BESIDE_SGD

TWO_SEEDS = "Two seeds: an interval of two pairs says next to nothing; three are the least."
UNFINISHED = "it was still running, or was killed"
_PERIOD = re.compile(r"\bsync_every=(\d+)(?:, fragments=(\d+))?")


def close_open_runs(records: Iterable[Record]) -> list[Record]:
    """Add an end record with status "interrupted" to every run that has none."""
    records = list(records)
    ended = {record.key for record in records if isinstance(record, EndRecord)}
    begun = dict.fromkeys(record.key for record in records if isinstance(record, RunRecord))
    open_ = [
        EndRecord(**each._asdict(), status="interrupted", error=UNFINISHED)
        for each in begun
        if each not in ended
    ]
    return [*records, *open_]


def headline(comparison: Comparison) -> str:
    """One plain sentence: how the best algorithm did against the base; with churn, of those whom it hit."""
    unknown = comparison.in_process  # seconds are
    churn = any(row.churned for row in comparison.rows)
    alike = [row for row in comparison.rows if row.churned == churn]
    alike = [row for row in alike if row.faults] or alike
    rows = [row for row in alike if row.status == "ok" and (unknown or row.seconds is not None)]
    base = _base(alike, rows)
    if base is None:
        return f"No algorithm finished {where(comparison)}."
    others = [row for row in rows if row is not base and (unknown or row.speedup is not None)]
    if unknown:
        return _counted(base, others)
    if not others:
        return _alone(base, comparison)
    reached = [row for row in others if row.seconds_to_target is not None]
    as_good = [row for row in reached or others if not _loses(row)]
    best = max(as_good or reached or others, key=lambda row: row.speedup or 0)
    missed = "" if reached or comparison.target is None else _missed(base, comparison)
    return f"{_pace(best, base)} {where(comparison)}{_traffic(best, base)}{_accuracy(best, base)}{missed}."


def _counted(base: Row, others: Sequence[Row]) -> str:
    """The same of replicas in one process, of which no seconds are known."""
    others = [row for row in others if row.reduction is not None]
    if not others:
        return f"{base.algorithm} reached {base.accuracy or math.nan:.3f} accuracy, with {IN_PROCESS}."
    as_good = [row for row in others if not _loses(row)]
    best = max(as_good or others, key=lambda row: row.reduction or 0)
    sent = _traffic(best, base).removeprefix(" and")
    return f"{best.algorithm}{sent} than {base.algorithm}{_accuracy(best, base)}, with {IN_PROCESS}."


def _loses(row: Row) -> bool:
    """Whether seeds show that it learns less than the base."""
    if row.gap is None or row.gap.half is None:
        return False
    worse = -row.gap.mean if row.accuracy is not None else row.gap.mean
    return worse > row.gap.half


def where(comparison: Comparison) -> str:
    """The links, in words."""
    if not comparison.shaped:
        return f"on {comparison.cluster} ({comparison.network})"
    return f"over {links(comparison.cluster)}"


def links(cluster: str) -> str:
    """The links of a cluster in words; its text where it cannot be read."""
    try:
        parsed = Cluster.parse(cluster)
    except ConfigError:
        return cluster
    rate = "full-speed" if parsed.rate is None else _rate(parsed.rate)
    if parsed.rates:
        rate = f"uneven {_rate(min(parsed.rates))} to {_rate(max(parsed.rates))}"
    late = f" with {parsed.latency * 1e3:g} ms of latency" if parsed.latency else ""
    if parsed.latencies:
        late = f" with {_span(parsed.latencies, lambda each: f'{each * 1e3:g}')} ms of latency"
    late += f", {parsed.apart * 1e3:g} ms between {parsed.sites} places" if parsed.sites > 1 else ""
    late += ", whose loss, jitter, MTU or NAT differs" if parsed.impairments else _impaired(parsed.impairment)
    busy = f", each with a background load of {_rate(parsed.load)}" if parsed.load else ""
    if parsed.loads:
        busy = f", with background loads of {_span(parsed.loads, _rate)}"
    return f"{rate} links{late}{busy}"


def _impaired(impairment: Impairment) -> str:
    jitter = f", ± {impairment.jitter * 1e3:g} ms" if impairment.jitter else ""
    loss = f", {100 * impairment.loss:g} % of packets lost" if impairment.loss else ""
    mtu = f", an MTU of {impairment.mtu:,} bytes" if impairment.mtu != ETHERNET else ""
    return jitter + loss + mtu + (", behind NATs" if impairment.nat else "")


def _span(values: Sequence[float], shown: Callable[[float], str]) -> str:
    return f"{shown(min(values))} to {shown(max(values))}"


def notices(comparison: Comparison | None, records: Sequence[Record]) -> list[str]:
    """Warnings that a reader needs with the numbers, the gravest first."""
    found = [_failure(record) for record in _last_ends(records) if record.status != "ok"]
    found += doubts(records)
    if comparison and comparison.in_process:
        return [
            *found,
            f"{IN_PROCESS.capitalize()}: nothing is known of seconds, and bytes are counted by the formulas "
            "of ring collectives. Accuracies are those of processes, up to the order of sums.",
        ]
    if comparison and not comparison.shaped:
        found.append(f"{UNSHAPED.capitalize()}: all ranks ran on one machine at its own speed.")
    if comparison and _uncounted(comparison):
        found.append("No bytes were counted: there is no network interface between the ranks.")
    stay = comparison and not all(row.churned for row in comparison.rows)
    if comparison and stay and comparison.compute_only_seconds is None:
        found.append(
            f"There is no finished {COMPUTE_ONLY} run, so there is no limit to measure against, "
            f"and the seconds of {BASE} cannot be split."
        )
    return found


def news(records: Sequence[Record]) -> list[str]:
    """What `auto` went on with, and why."""
    return list(dict.fromkeys(each for record in _last_ends(records) for each in _choices(record)))


def _uncounted(comparison: Comparison) -> bool:
    done = [row for row in comparison.rows if row.status == "ok"]
    return bool(done) and all(row.mb_between_nodes is None for row in done)


def _last_ends(records: Sequence[Record]) -> list[EndRecord]:
    return list({record.key: record for record in records if isinstance(record, EndRecord)}.values())


def _failure(end: EndRecord) -> str:
    verb = "failed" if end.status == "failed" else "was interrupted"
    if end.error == UNFINISHED:
        verb = "has no end in the records"
    why = (end.error or "").removeprefix(f"{end.algorithm} failed: ").strip()
    return f"{end.algorithm} {verb}: {why}" if why else f"{end.algorithm} {verb}."


def doubts(records: Sequence[Record]) -> list[str]:
    """What a reader should doubt: weights and lengths of a script's runs, seeds, a limit that is none."""
    heads = {record.key: record for record in records if isinstance(record, RunRecord)}
    ends = {
        record.key: record for record in records if isinstance(record, EndRecord) and record.status == "ok"
    }
    begun = {key: head.weights for key, head in heads.items() if head.weights is not None and key in ends}
    found = [*_other_weights(begun), *_useless_seeds(begun, ends), *_other_lengths(begun, ends)]
    found += [
        *_short(heads, ends),
        *_closings(records, ends),
        *_of_numbers(compare(records) if heads else None),
    ]
    return [*_relayed(ends.values()), *_calm(records, heads, ends), *found]


def _relayed(ends: Iterable[EndRecord]) -> Iterator[str]:
    """The runs whose links a relay made late that did not keep up."""
    for name, doubt in {end.algorithm: end.relay_doubt for end in ends if end.relay_doubt}.items():
        yield f"{name} does not count: the relay, a process that makes packets late here, {doubt}."


def _calm(
    records: Sequence[Record], heads: Mapping[RunKey, RunRecord], ends: Mapping[RunKey, EndRecord]
) -> Iterator[str]:
    """The runs under churn in which nothing happened."""
    calm = {
        each.key.algorithm: each.key for each in records if isinstance(each, ChurnRecord) and not each.went
    }
    for name, key in calm.items():
        if key in ends and key in heads:
            seconds, every = ends[key].seconds or 0.0, heads[key].churn
            yield (
                f"Nothing happened to a replica in {name}: it took {seconds:.1f} s, and one goes every "
                f"{every:g} s. Write more --epochs, or a shorter --churn."
            )


def _short(heads: Mapping[RunKey, RunRecord], ends: Mapping[RunKey, EndRecord]) -> Iterator[str]:
    """The algorithms whose runs were over before their first round."""
    found = dict[str, tuple[int, int]]()
    for key, end in ends.items():
        told = _PERIOD.findall(heads[key].strategy if key in heads else "")
        periods = [int(period) // int(fragments or 1) for period, fragments in told]
        if end.steps and periods and end.steps < min(periods):
            found[key.algorithm] = end.steps, min(periods)
    for name, (steps, period) in found.items():
        yield (
            f"{name} exchanges every {period} steps, and its run had {steps}: it made no round but that of "
            "closing, so its seconds and bytes are not those of a training. Write more --epochs."
        )


def _closings(records: Sequence[Record], ends: Mapping[RunKey, EndRecord]) -> Iterator[str]:
    """What a script's sessions have sent behind the last report, where that is much."""
    last = {each.key: each.bytes_between_nodes for each in records if isinstance(each, EpochRecord)}
    told = {COMPUTE_ONLY}
    for key, end in ends.items():
        sent, before = end.mb_between_nodes, last.get(key)
        if sent is None or before is None or key.algorithm in told or sent - before / 1e6 <= 0.05 * sent:
            continue
        told.add(key.algorithm)
        yield (
            f"Of the {sent:.1f} MB of {key.algorithm}, {sent - before / 1e6:.1f} were sent behind the last "
            "report: closing makes replicas equal, once, however long the training is."
        )


def _of_numbers(comparison: Comparison | None) -> Iterator[str]:
    """Doubts about the table's numbers."""
    if comparison is None:
        return
    if len(comparison.seeds) == 2:
        yield TWO_SEEDS
    sized = [
        row.algorithm
        for row in comparison.rows
        if row.algorithm.partition(":")[0] in BESIDE_SGD
        and row.rate == 1
        and row.accuracy is not None
        and row.accuracy < (comparison.target or 0)
    ]
    if sized:
        yield (
            f"{', '.join(sized)} missed the target at a learning rate that is made for gradients: here it is "
            "the size of a step, whatever the gradient. With --rates 0.5,1,2 each gets one of its own."
        )
    fast = [row.algorithm for row in comparison.rows if round(row.of_compute_only or 0.0, 3) > 1]
    if fast:
        yield (
            f"{', '.join(fast)} took less time than training without communication, which cannot be: that "
            "ran once, and seconds move from run to run."
        )


def _other_weights(begun: Mapping[RunKey, float]) -> Iterator[str]:
    for seed in sorted({key.seed for key in begun}):
        alike: dict[float, str] = {}
        for key, weights in begun.items():
            if key.seed == seed:
                alike.setdefault(weights, key.algorithm)
        if len(alike) > 1:
            first, second, *_ = alike.values()
            yield (
                f"With seed {seed}, {first} and {second} began with different weights: seed the script by "
                "torch.manual_seed(tacit.trial().seed) before it makes the model."
            )
            return


def _useless_seeds(begun: Mapping[RunKey, float], ends: Mapping[RunKey, EndRecord]) -> Iterator[str]:
    for key in begun:
        for other in begun:
            same = (key.algorithm, key.rate) == (other.algorithm, other.rate) and key.seed < other.seed
            if same and begun[key] == begun[other] and ends[key].loss == ends[other].loss:
                yield (
                    f"{key.algorithm} had equal weights and an equal loss with the seeds {key.seed} "
                    f"and {other.seed}: the script ignores its seed; seed it by "
                    "torch.manual_seed(tacit.trial().seed)."
                )
                return


def _other_lengths(begun: Mapping[RunKey, float], ends: Mapping[RunKey, EndRecord]) -> Iterator[str]:
    lengths = {key.algorithm: steps for key in begun if (steps := ends[key].steps) is not None}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {steps}" for name, steps in lengths.items())
        yield f"The algorithms did not take the same number of steps: {told}."


def _choices(end: EndRecord) -> Iterator[str]:
    if "choice" in end.metrics:
        choice = end.metrics["choice"]
        reason = choice["reason"].removeprefix(f"{choice['algorithm']}: ")
        yield f"{end.algorithm} went on with {choice['algorithm']}: {reason}"


def _base(begun: Sequence[Row], rows: Sequence[Row]) -> Row | None:
    names = [row.algorithm for row in begun]
    name = BASE if BASE in names else next(iter(names), None)
    found = next((row for row in rows if row.algorithm == name), None)
    return found or next(iter(rows), None)


def _alone(base: Row, comparison: Comparison) -> str:
    sent = "" if base.mb_between_nodes is None else f" and sent {base.mb_between_nodes:.1f} MB"
    accuracy = "" if base.accuracy is None else f", at {base.accuracy:.3f} accuracy"
    if base.accuracy is None and base.loss is not None:
        accuracy = f", at a loss of {base.loss:.3f}"
    return f"{base.algorithm} trained in {base.seconds:.1f} s {where(comparison)}{sent}{accuracy}."


def _pace(best: Row, base: Row) -> str:
    times = (best.speedup or 0) / (base.speedup or 1)  # both are against the first row
    if round(times, 2) > 1:
        shown = f"{times:.1f}" if round(times, 1) > 1 else f"{times:.2f}"
        return f"{best.algorithm} trained {shown}x as fast as {base.algorithm}"
    took = f"{1 / times:.2f}x as long as {base.algorithm}" if times else f"longer than {base.algorithm}"
    return f"Nothing trained faster than {base.algorithm}: {best.algorithm} took {took}"


def _traffic(best: Row, base: Row) -> str:
    if best.reduction is None or base.reduction in (None, 1):
        return ""
    less = 1 - (1 - best.reduction) / (1 - base.reduction)
    return f" and sent {abs(less):.1%} {'less' if less >= 0 else 'more'}".replace("%", " %")


def _accuracy(best: Row, base: Row) -> str:
    if best.accuracy is not None and base.accuracy is not None:
        return f", at {best.accuracy:.3f} against {base.accuracy:.3f} accuracy"
    if best.loss is not None and base.loss is not None:
        return f", at a loss of {best.loss:.3f} against {base.loss:.3f}"
    return ""


def _missed(base: Row, comparison: Comparison) -> str:
    who = "neither reached" if base.seconds_to_target is None else "it did not reach"
    return f"; {who} the target accuracy {comparison.target:g}"


def _rate(rate: float) -> str:
    unit, scale = next(((u, s) for u, s in (("Gbit/s", 1e9), ("Mbit/s", 1e6)) if rate >= s), ("kbit/s", 1e3))
    return f"{rate / scale:g} {unit}"
