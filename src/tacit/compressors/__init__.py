"""WHAT is said: one file a compressor, and the wrappers that compose with any of them."""

from tacit.compressors.cast import BF16
from tacit.compressors.dense import Dense
from tacit.compressors.powersgd import PowerSGD
from tacit.compressors.randomk import RandomK
from tacit.compressors.sign import Sign
from tacit.compressors.topk import TopK
from tacit.compressors.wrappers import ErrorFeedback, Select

__all__ = ["BF16", "Dense", "ErrorFeedback", "PowerSGD", "RandomK", "Select", "Sign", "TopK"]
