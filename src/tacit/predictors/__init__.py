"""What an element of a model will do next, told from what it did: one file a predictor."""

from tacit.predictors.extrapolation import Exponential, Linear, Persistent, Stale
from tacit.predictors.mp2 import MP2
from tacit.predictors.opening import trained
from tacit.predictors.predictor import KINDS, Predictor, Seen, in_a_row, kind_of
from tacit.predictors.wnn import WNN

__all__ = [
    "KINDS",
    "MP2",
    "WNN",
    "Exponential",
    "Linear",
    "Persistent",
    "Predictor",
    "Seen",
    "Stale",
    "in_a_row",
    "kind_of",
    "trained",
]
