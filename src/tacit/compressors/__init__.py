"""WHAT is said: one file a compressor, and the wrappers that compose with any of them."""

from tacit.compressors.cast import BF16, FP8, FP16
from tacit.compressors.clip import Clip
from tacit.compressors.coding import PredictiveCoding
from tacit.compressors.dense import Dense
from tacit.compressors.int8 import Int8
from tacit.compressors.lag import LAG
from tacit.compressors.majority import MajoritySign
from tacit.compressors.momentum import MomentumCorrection
from tacit.compressors.natural import Natural
from tacit.compressors.nowcast import Nowcast
from tacit.compressors.onebit import OneBit
from tacit.compressors.phases import Phases
from tacit.compressors.powersgd import PowerSGD
from tacit.compressors.predicted import Predicted
from tacit.compressors.pulled import Pulled
from tacit.compressors.qsgd import QSGD
from tacit.compressors.randomk import RandomK
from tacit.compressors.sign import Sign
from tacit.compressors.terngrad import TernGrad
from tacit.compressors.then import Then
from tacit.compressors.threshold import Threshold
from tacit.compressors.topk import TopK
from tacit.compressors.wrappers import ErrorFeedback, Select

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "LAG",
    "QSGD",
    "Clip",
    "Dense",
    "ErrorFeedback",
    "Int8",
    "MajoritySign",
    "MomentumCorrection",
    "Natural",
    "Nowcast",
    "OneBit",
    "Phases",
    "PowerSGD",
    "Predicted",
    "PredictiveCoding",
    "Pulled",
    "RandomK",
    "Select",
    "Sign",
    "TernGrad",
    "Then",
    "Threshold",
    "TopK",
]
