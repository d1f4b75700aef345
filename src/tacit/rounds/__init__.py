"""WHEN replicas talk. Pure state machines: every rank decides alike, without asking."""

from tacit.rounds.adaptive import AdaComm, ByVariance, OnPlateau
from tacit.rounds.cycling import Cycling, NodeRounds
from tacit.rounds.periods import Every, EveryEpoch, EveryStep, Until

__all__ = [
    "AdaComm",
    "ByVariance",
    "Cycling",
    "Every",
    "EveryEpoch",
    "EveryStep",
    "NodeRounds",
    "OnPlateau",
    "Until",
]
