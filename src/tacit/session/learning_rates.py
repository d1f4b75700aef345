"""The optimizers' present learning rates, and residuals of gradients, which are rescaled with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tacit.contracts import Factors
from tacit.session.buckets import Bucket

TOLERANCE = 0.02
"""The share by which a rate may differ from the rate in whose units a residual is. So a schedule that changes
the rate a little in every step costs a pass over the residual in one step of many only.
"""
LEAST = 1e-3
"""The share of its largest rate below which a parameter's rate counts as that share: where a schedule ends at
almost nothing, residuals would become arbitrarily large numbers."""


class Rates:
    """Reads learning rates by parameter.

    The group of a parameter is looked up once, and again when groups have been added or have grown. A group
    without a rate (Adafactor's relative steps: `lr=None`) counts as 0, and nothing is rescaled.

    Args:
        optimizers: step the parameters, and perhaps others.
        named: the parameters by name.
    """

    def __init__(self, optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]) -> None:
        self._optimizers = optimizers
        self._names = {id(p): name for name, p in named.items()}
        self._none = dict.fromkeys(named, 0.0)
        self._sizes: list[int] = []
        self._held: list[list[str]] = []
        self._before: list[Any] | None = None
        self._found: dict[str, float] = {}

    def __call__(self) -> Mapping[str, float]:
        """The rate of each parameter: 0 if no group holds it, the largest if several do.

        While no rate changes it is the same object.
        """
        now = self._now()
        if self._before is not None and now == self._before:
            return self._found
        self._found = dict(self._none)
        for names, given in zip(filter(None, self._held), now, strict=True):
            lr = 0.0 if given is None else float(given)
            for name in names:
                self._found[name] = max(self._found[name], lr)
        # A tensor stays the same object when it is written to.
        self._before = now if {*map(type, now)} <= {float, int, type(None)} else None
        return self._found

    def by_group(self) -> list[float]:
        """The rate of each group that holds one of the parameters, in their order.

        Without those that are on an accelerator, which reading would wait for.
        """
        return [
            float(lr)
            for lr in self._now()
            if lr is not None and not (isinstance(lr, Tensor) and lr.device.type != "cpu")
        ]

    def _now(self) -> list[Any]:
        """The rates of the groups that hold one of the parameters; loading a state makes other groups."""
        sizes, rates = [], []
        for optimizer in self._optimizers:
            sizes.append(-1)
            for group in optimizer.param_groups:
                sizes.append(len(group["params"]))
                rates.append(group.get("lr"))
        if sizes != self._sizes:
            self._sizes, self._before = sizes, None
            self._held = [
                [self._names[id(p)] for p in group["params"] if id(p) in self._names]
                for each in self._optimizers
                for group in each.param_groups
            ]
        return [*compress(rates, self._held)]


class Rescaling:
    """Keeps for each parameter the learning rate in whose units its residual is."""

    def __init__(self) -> None:
        self._units: dict[str, float] = {}
        self._largest: dict[str, float] = {}
        self._before = self._units, self._largest
        self._followed: Mapping[str, float] | None = None
        """The last rates, if they have changed nothing."""

    def changes(self, rates: Mapping[str, float]) -> dict[str, float]:
        """The parameters whose rate has changed, with their new rates; a parameter's first rate is no change.

        `rates`: the present rate of each parameter that has one. While a rate is 0 nothing is applied, and
            its units stay.
        """
        changed: dict[str, float] = {}
        if rates is self._followed:
            self._before = self._units, self._largest
            return changed
        self._before = self._units.copy(), self._largest.copy()
        for name, rate in rates.items():
            largest = self._largest[name] = max(rate, self._largest.get(name, 0.0))
            now = max(rate, LEAST * largest) if rate else 0.0
            then = self._units.setdefault(name, now)
            if now and abs(now - then) > TOLERANCE * then:
                changed[name] = now
        self._followed = None if changed else rates
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
        self._followed = None

    def state(self) -> dict[str, list[float]]:
        """For a checkpoint: for each parameter the rate of its units, and the largest rate so far."""
        return {name: [rate, self._largest[name]] for name, rate in self._units.items()}

    def resume(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from a checkpoint."""
        self._followed = None
        self._units = {name: units for name, (units, _) in state.items()}
        self._largest = {name: largest for name, (_, largest) in state.items()}
