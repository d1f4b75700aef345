"""When replicas exchange: pure state machines, so that all ranks decide the same without communication."""

from typing import TYPE_CHECKING

from tacit import _moved
from tacit.rounds.adaptive import AdaComm, ByLearningRate, ByVariance, OnPlateau
from tacit.rounds.cycling import Cycling, NodeRounds
from tacit.rounds.periods import During, Every, EveryEpoch, EveryStep, MomentPeriods, Renewals, Until

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

if not TYPE_CHECKING:
    __getattr__ = _moved.attributes(__name__)
