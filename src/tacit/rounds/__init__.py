"""When replicas exchange: pure state machines, so that all ranks decide the same without communication."""

from typing import TYPE_CHECKING

from tacit.exports import on_first_use

if TYPE_CHECKING:
    from tacit.rounds.adaptive import AdaComm, ByLearningRate, ByVariance, OnPlateau
    from tacit.rounds.cycling import Cycling, NodeRounds
    from tacit.rounds.periods import During, Every, EveryEpoch, EveryStep, MomentPeriods, Renewals, Until
else:
    __getattr__ = on_first_use(__name__)

__all__ = [
    "AdaComm",
    "ByLearningRate",
    "ByVariance",
    "Cycling",
    "During",
    "Every",
    "EveryEpoch",
    "EveryStep",
    "MomentPeriods",
    "NodeRounds",
    "OnPlateau",
    "Renewals",
    "Until",
]
