"""Residuals of gradients follow the learning rate that will be applied to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tacit.contracts import Factors
from tacit.session.buckets import Bucket

TOLERANCE = 0.02
"""The share by which a rate may differ from the rate in whose units a residual is. So a schedule that changes
the rate a little in every step costs a pass over the residual in one step of many only.
"""
LEAST = 1e-3
"""The share of its largest rate below which a parameter's rate counts as that share: where a schedule ends at
almost nothing, residuals would become arbitrarily large numbers."""


class Rescaling:
    """Keeps for each parameter the learning rate in whose units its residual is."""

    def __init__(self) -> None:
        self._units: dict[str, float] = {}
        self._largest: dict[str, float] = {}
        self._before = self._units, self._largest

    def changes(self, rates: Mapping[str, float]) -> dict[str, float]:
        """The parameters whose rate has changed, with their new rates; a parameter's first rate is no change.

        `rates`: the present rate of each parameter that has one. While a rate is 0 nothing is applied, and
            its units stay.
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
        """The factors by which to multiply the residual of a bucket."""
        here = [param for param in bucket.slices if param.name in changes]
        return tuple(
            (param.start, param.stop, self._units[param.name] / changes[param.name])
            for param in here
            if param.stop > param.start
        )

    def commit(self, changes: Mapping[str, float], but: Collection[str]) -> None:
        """Note that a round has rescaled the residuals, except those of the parameters `but`."""
        self._units |= {name: rate for name, rate in changes.items() if name not in but}

    def take_back(self) -> None:
        """Restore the units from before the last `changes`, as its round is taken back."""
        self._units, self._largest = self._before

    def state(self) -> dict[str, list[float]]:
        """For a checkpoint: for each parameter the rate of its units, and the largest rate so far."""
        return {name: [rate, self._largest[name]] for name, rate in self._units.items()}

    def resume(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from a checkpoint."""
        self._units = {name: units for name, (units, _) in state.items()}
        self._largest = {name: largest for name, (_, largest) in state.items()}
