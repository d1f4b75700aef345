"""Residuals of gradients follow the learning rate that will be applied to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tacit.contracts import Factors
from tacit.session.buckets import Bucket

TOLERANCE = 0.02
"""By what share a rate may differ from the one in whose units a residual is. A schedule that changes the
rate a little in every step so costs a pass over the residual in one step of many."""
LEAST = 1e-3
"""The share of its largest rate below which a parameter's rate counts as that share: where a schedule ends at
almost nothing, residuals would become arbitrarily large numbers."""


class Rescaling:
    """Of each parameter the learning rate in whose units its residual is."""

    def __init__(self) -> None:
        self._units: dict[str, float] = {}
        self._largest: dict[str, float] = {}
        self._before = self._units, self._largest

    def changes(self, rates: Mapping[str, float]) -> dict[str, float]:
        """The parameters whose rate has changed since, with their rates; new ones are taken as they are.

        `rates`: the present one of each parameter that has one. While that is 0 nothing is applied, and
        nothing changes.
        """
        changed: dict[str, float] = {}
        self._before = self._units.copy(), self._largest.copy()
        for name, rate in rates.items():
            largest = self._largest[name] = max(rate, self._largest.get(name, 0.0))
            now = max(rate, LEAST * largest) if rate else 0.0
            then = self._units.setdefault(name, now)
            if now and abs(now - then) > TOLERANCE * then:
                changed[name] = now
        return changed

    def factors(self, bucket: Bucket, changes: Mapping[str, float]) -> Factors:
        """What to multiply the residual of a bucket by."""
        here = [param for param in bucket.slices if param.name in changes]
        return tuple(
            (param.start, param.stop, self._units[param.name] / changes[param.name])
            for param in here
            if param.stop > param.start
        )

    def commit(self, changes: Mapping[str, float], but: Collection[str]) -> None:
        """A round has rescaled the residuals, except of some parameters."""
        self._units |= {name: rate for name, rate in changes.items() if name not in but}

    def take_back(self) -> None:
        """The round that asked last for changes has never been."""
        self._units, self._largest = self._before

    def state(self) -> dict[str, list[float]]:
        """For a checkpoint: of each parameter the rate of its units, and the largest so far."""
        return {name: [rate, self._largest[name]] for name, rate in self._units.items()}

    def resume(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from a checkpoint."""
        self._units = {name: units for name, (units, _) in state.items()}
        self._largest = {name: largest for name, (_, largest) in state.items()}
