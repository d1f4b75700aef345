"""Predicts steps with other strategies on this model and this cluster, equally on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tacit.errors import ConfigError, TacitError
from tacit.planning.cluster_prediction import BASE, Prediction, predict, refuse
from tacit.planning.profile import Profile, StrategyCost
from tacit.planning.simulation.clock import Network
from tacit.planning.simulation.costs import cost_on, without_cost
from tacit.planning.strategy_costs import measured_cost
from tacit.strategy import AnyStrategy

_log = logging.getLogger("tacit")


@dataclass(frozen=True, eq=False)
class StepPredictor:
    """Measures the computing of a strategy, and predicts a step with it.

    Attributes:
        profile, network: equal on all ranks.
        tensors: the parameters, as this rank has them; None: nothing is measured, and the profile has the
            costs.
        slowest: returns the largest of the ranks' numbers. A collective call.
    """

    profile: Profile
    network: Network
    tensors: Mapping[str, Tensor] | None = None
    slowest: Callable[[float], float] = float

    def hopeful(self, strategies: Sequence[AnyStrategy]) -> list[tuple[AnyStrategy, float]]:
        """The strategies with the least seconds that each could take: plain DDP, then the fastest first.

        Strategies that cannot be predicted are left out. No collective call.
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

    def predict(self, strategy: AnyStrategy) -> Prediction | None:
        """Predict a step. A collective call: the result is that of the slowest rank, on all ranks.

        None if it fails on one of them, as where a GPU has no room for what is measured.
        """
        prediction = None
        try:
            cost = self._cost(strategy)
            prediction = predict(strategy, self.profile.with_costs([cost]), self.network)
            seconds = prediction.seconds
        except Exception as error:  # the others would wait in the call below
            seconds = float("inf")
            if not isinstance(error, TacitError):
                _log.warning("steps with %r were not predicted: %r", strategy.name, error)
        slowest = self.slowest(seconds)
        if prediction is None or slowest == float("inf"):
            return None
        return replace(prediction, seconds=slowest)

    def _cost(self, strategy: AnyStrategy) -> StrategyCost:
        nodes, ranks = self.network.nodes, self.network.ranks
        if self.tensors is None:
            return cost_on(self.profile, strategy.name, nodes, ranks)
        return measured_cost(strategy, self.profile, nodes, ranks, self.tensors)

    def predict_all(self, strategies: Sequence[AnyStrategy], best: float = float("inf")) -> list[Prediction]:
        """Predict the strategies that may be faster than `best` seconds, in the order of `hopeful`.

        Measuring a strategy's cost takes time: one that could not be faster than the best so far, even if its
        computing cost nothing, is left out. A collective call.
        """
        found = []
        for strategy, least in self.hopeful(strategies):
            if least >= best:
                continue  # plain DDP is the first, and may be slow
            prediction = self.predict(strategy)
            if prediction is not None:
                found.append(prediction)
                best = min(best, prediction.seconds)
        return found
