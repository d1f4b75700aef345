"""Foretells steps with strategies on this model and this cluster, alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tacit.errors import ConfigError, TacitError
from tacit.planning.cluster_prediction import BASE, Prediction, predict, refuse
from tacit.planning.profile import Profile
from tacit.planning.simulation.clock import Network
from tacit.planning.simulation.costs import without_cost
from tacit.planning.strategy_costs import measured_cost
from tacit.strategy import AnyStrategy

__all__ = ["Foreteller"]


@dataclass(frozen=True, eq=False)
class Foreteller:
    """Measures what a strategy's own work costs, and foretells a step with it.

    Attributes:
        profile, network: equal on all ranks.
        tensors: the parameters, as this rank has them.
        slowest: the largest of what all ranks give. A collective call.
    """

    profile: Profile
    network: Network
    tensors: Mapping[str, Tensor]
    slowest: Callable[[float], float]

    def hopeful(self, strategies: Sequence[AnyStrategy]) -> list[tuple[AnyStrategy, float]]:
        """The strategies with what they would take at least, plain DDP first, then from the fastest on.

        What cannot be foretold is left out. No rank asks another.
        """
        found = []
        for strategy in strategies:
            try:
                refuse(strategy)
                free = without_cost(strategy, self.profile, self.network.nodes, self.network.ranks)
                seconds = predict(strategy, self.profile.with_costs([free]), self.network).seconds
            except ConfigError:
                continue
            found.append((strategy, seconds))
        return sorted(found, key=lambda pair: (pair[0].name != BASE, pair[1]))

    def foretold(self, strategy: AnyStrategy) -> Prediction | None:
        """The same on all ranks, as that of the rank on which it takes longest. A collective call."""
        prediction = None
        try:
            cost = measured_cost(strategy, self.profile, self.network.nodes, self.network.ranks, self.tensors)
            prediction = predict(strategy, self.profile.with_costs([cost]), self.network)
            seconds = prediction.seconds
        except TacitError:
            seconds = float("inf")
        slowest = self.slowest(seconds)
        if prediction is None or slowest == float("inf"):
            return None
        return replace(prediction, seconds=slowest)

    def all_foretold(self, strategies: Sequence[AnyStrategy], best: float = float("inf")) -> list[Prediction]:
        """Those that may be faster than the best, which are looked at in the order of `hopeful`.

        To measure what one costs takes time: once the next one could not be faster than the best so far, even
        if its own work cost nothing, the others are left. A collective call.
        """
        found = []
        for strategy, least in self.hopeful(strategies):
            if least >= best:
                break
            prediction = self.foretold(strategy)
            if prediction is not None:
                found.append(prediction)
                best = min(best, prediction.seconds)
        return found
