"""What an element of a model will do next, told from what it did: one file a predictor."""

from tacit.prediction.extrapolation import Exponential, Linear, Persistent, Stale
from tacit.prediction.loading import trained
from tacit.prediction.mp2_network import MP2
from tacit.prediction.predictor import KINDS, Predictor, Seen, in_a_row, kind_of
from tacit.prediction.wnn_network import WNN

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
