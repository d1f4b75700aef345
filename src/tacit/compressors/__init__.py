"""What is sent: one compressor a file, and wrappers that can go around any of them."""

from typing import TYPE_CHECKING

from tacit.exports import on_first_use

if TYPE_CHECKING:
    from tacit.compressors.adacomp import AdaComp
    from tacit.compressors.adam_momentum import AdamMomentum
    from tacit.compressors.blockwise import Blockwise
    from tacit.compressors.byte_coded import ByteCoded
    from tacit.compressors.cascade import Cascade
    from tacit.compressors.cast import BF16, FP8, FP16
    from tacit.compressors.chunks import LargestChunks
    from tacit.compressors.clip import Clip
    from tacit.compressors.count_sketch import CountSketch
    from tacit.compressors.dct import DCT, SignOfMean
    from tacit.compressors.dense import Dense
    from tacit.compressors.difference_copy import DifferenceCopy
    from tacit.compressors.dion import Dion
    from tacit.compressors.ef21 import EF21
    from tacit.compressors.entropy_coded import EntropyCoded
    from tacit.compressors.in_parts import InParts
    from tacit.compressors.int8 import Int8
    from tacit.compressors.lag import LAG, LAQ
    from tacit.compressors.majority import MajoritySign
    from tacit.compressors.mean_feedback import MeanFeedback
    from tacit.compressors.momentum import MomentumCorrection
    from tacit.compressors.natural import Natural
    from tacit.compressors.natural_dithering import NaturalDithering
    from tacit.compressors.ok_topk import OkTopK
    from tacit.compressors.onebit import OneBit
    from tacit.compressors.outer_mix import OuterMix
    from tacit.compressors.powersgd import PowerSGD
    from tacit.compressors.public_copy import PublicCopy
    from tacit.compressors.push_sum import PushSum
    from tacit.compressors.qsgd import QSGD
    from tacit.compressors.quantized_powersgd import QuantizedPowerSGD
    from tacit.compressors.randomk import RandomK
    from tacit.compressors.sampling import SampledEntries, SampledSpectrum
    from tacit.compressors.scheduled import Scheduled
    from tacit.compressors.sign import Sign
    from tacit.compressors.squeezed import Squeezed
    from tacit.compressors.terngrad import TernGrad
    from tacit.compressors.three_lc import ThreeLC
    from tacit.compressors.threshold import Threshold
    from tacit.compressors.topk import TopK
    from tacit.compressors.tracking import Tracking
    from tacit.compressors.two_magnitudes import TwoMagnitudes
    from tacit.compressors.wrappers import ErrorFeedback, Partition
    from tacit.compressors.wrappers import Part as Part
else:
    __getattr__ = on_first_use(__name__)

__all__ = [
    "BF16",
    "DCT",
    "EF21",
    "FP8",
    "FP16",
    "LAG",
    "LAQ",
    "QSGD",
    "AdaComp",
    "AdamMomentum",
    "Blockwise",
    "ByteCoded",
    "Cascade",
    "Clip",
    "CountSketch",
    "Dense",
    "DifferenceCopy",
    "Dion",
    "EntropyCoded",
    "ErrorFeedback",
    "InParts",
    "Int8",
    "LargestChunks",
    "MajoritySign",
    "MeanFeedback",
    "MomentumCorrection",
    "Natural",
    "NaturalDithering",
    "OkTopK",
    "OneBit",
    "OuterMix",
    "Partition",
    "PowerSGD",
    "PublicCopy",
    "PushSum",
    "QuantizedPowerSGD",
    "RandomK",
    "SampledEntries",
    "SampledSpectrum",
    "Scheduled",
    "Sign",
    "SignOfMean",
    "Squeezed",
    "TernGrad",
    "ThreeLC",
    "Threshold",
    "TopK",
    "Tracking",
    "TwoMagnitudes",
]
