"""Which runs a comparison needs: of each algorithm its seeds, and before them those that choose a rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tacit_lab.cli.compare.options import CompareOptions
from tacit_lab.records import CHOOSING, COMPUTE_ONLY, EndRecord, RunKey
from tacit_lab.study.search import LIMITS


def missing(options: CompareOptions, ends: Mapping[RunKey, EndRecord]) -> Iterator[RunKey]:
    """What is still to be run, given what has come of the runs until now: take the first, and ask again.

    The rule is that of docs/accuracy.md. Each algorithm is trained with each rate and a seed of its own. The
    best on validation is taken; while it is the smallest or the largest that was tried, one beyond is tried
    too. All other seeds are trained with that rate.
    """
    done = {key for key, end in ends.items() if end.status == "ok"}
    rates: dict[str, float] = {}
    for strategy in options.strategies:
        tried = [RunKey(strategy.name, CHOOSING, rate) for rate in options.rates]
        rate: float | None = options.rates[0]
        if len(tried) > 1:
            yield from (key for key in tried if key not in done)
            rate = _chosen(strategy.name, ends) if done.issuperset(tried) else None
            beyond = None if rate is None else _beyond(rate, strategy.name, ends)
            if beyond is not None:
                yield RunKey(strategy.name, CHOOSING, beyond)
                rate = None
        if rate is not None:
            rates[strategy.name] = rate
    for seed in options.seeds:
        for name, rate in rates.items():
            if (key := RunKey(name, seed, rate)) not in done:
                yield key
    if (alone := RunKey(COMPUTE_ONLY, options.seeds[0], 1.0)) not in done:
        yield alone


def _chosen(algorithm: str, ends: Mapping[RunKey, EndRecord]) -> float:
    """The rate that was best on validation; of equals the one with the lowest loss."""
    tried = [end for key, end in ends.items() if (key.algorithm, key.seed) == (algorithm, CHOOSING)]
    return max(tried, key=lambda end: (_number(end.validation), -_number(end.loss, math.inf))).rate


def _beyond(rate: float, algorithm: str, ends: Mapping[RunKey, EndRecord]) -> float | None:
    """The rate to try next, as the best is at an end; None where the search is over."""
    tried = [key.rate for key in ends if (key.algorithm, key.seed) == (algorithm, CHOOSING)]
    if rate not in (min(tried), max(tried)):
        return None
    beyond = rate / 2 if rate == min(tried) else 2 * rate
    return beyond if LIMITS[0] <= beyond <= LIMITS[1] else None


def _number(value: float | None, otherwise: float = -math.inf) -> float:
    return value if value is not None and math.isfinite(value) else otherwise
