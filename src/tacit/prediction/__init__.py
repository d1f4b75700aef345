"""Predictors of parameter changes, and compressors that send only what is not predicted."""

from typing import TYPE_CHECKING

from tacit.exports import on_first_use

if TYPE_CHECKING:
    from tacit.prediction.extrapolation import Exponential, Linear, Persistent, Stale
    from tacit.prediction.least_squares import LeastSquares
    from tacit.prediction.networks.loading import trained
    from tacit.prediction.networks.mp2 import MP2
    from tacit.prediction.networks.wnn import WNN
    from tacit.prediction.nowcaster import Nowcast
    from tacit.prediction.partly_sent import Predicted
    from tacit.prediction.predictive_coding import PredictiveCoding
    from tacit.prediction.predictor import KINDS, Predictor, Seen, in_a_row, kind_of
    from tacit.prediction.server_prediction import Pulled
else:
    __getattr__ = on_first_use(__name__)

__all__ = [
    "KINDS",
    "MP2",
    "WNN",
    "Exponential",
    "LeastSquares",
    "Linear",
    "Nowcast",
    "Persistent",
    "Predicted",
    "PredictiveCoding",
    "Predictor",
    "Pulled",
    "Seen",
    "Stale",
    "in_a_row",
    "kind_of",
    "trained",
]
