"""One row a compressor: a new compressor is one file in src and one row here."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature

from tacit.compressors import (
    BF16,
    DCT,
    EF21,
    FP8,
    FP16,
    LAG,
    LAQ,
    QSGD,
    AdaComp,
    AdamMomentum,
    Blockwise,
    ByteCoded,
    Cascade,
    Clip,
    CountSketch,
    Dense,
    Dion,
    EntropyCoded,
    ErrorFeedback,
    InParts,
    Int8,
    LargestChunks,
    MajoritySign,
    MeanFeedback,
    MomentumCorrection,
    Natural,
    NaturalDithering,
    OkTopK,
    OneBit,
    Partition,
    PowerSGD,
    QuantizedPowerSGD,
    RandomK,
    SampledEntries,
    SampledSpectrum,
    Scheduled,
    Sign,
    SignOfMean,
    TernGrad,
    ThreeLC,
    Threshold,
    TopK,
    TwoMagnitudes,
)
from tacit.compressors.wrappers import Part
from tacit.contracts import Compressor, Matrix, Topology
from tacit.prediction import LeastSquares, Nowcast, Predicted, PredictiveCoding
from tacit.prediction.extrapolation import Linear
from tacit.prediction.networks.mp2 import MP2
from tacit.topologies import Flat, GlobalTopK

NUMEL = 1000


@dataclass(frozen=True)
class Row:
    """What the laws need to know of a compressor, for tensors of NUMEL fp32 entries.

    Attributes:
        sent: the exact bytes that a rank sends among P peers; where not all send equally many, by rank too.
            Of payloads of variable length, the most.
        error: the largest error of the mean that a single round may have, relative to the largest entry.
        conserves: whether what was not sent is kept.
        rounding: the relative error of the arithmetic in the type that travels.
        votes: whether the answer is a vote, and not the mean of what was sent.
        steps: whether it is a step in the direction of the mean, and not the mean.
    """

    compressor: Compressor
    sent: Callable[[int], int] | Callable[[int, int], int]
    error: float
    conserves: bool = False
    rounding: float = 1e-6
    votes: bool = False
    steps: bool = False
    topology: Topology = Flat()

    @property
    def varies(self) -> bool:
        """Whether the length of a payload follows from its values."""
        one_shot = self.compressor.one_shot(0)
        return one_shot is not None and one_shot.codec.varies

    def bytes(self, peers: int) -> list[int]:
        """What each rank sends."""
        even = len(signature(self.sent).parameters) == 1
        return [self.sent(peers) if even else self.sent(peers, rank) for rank in range(peers)]  # type: ignore


def ring(nbytes: int) -> Callable[[int], int]:
    return lambda peers: -(-2 * (peers - 1) * nbytes // peers)


def gather(nbytes: int) -> Callable[[int], int]:
    return lambda peers: (peers - 1) * nbytes


def tree(nbytes: int, marks: int, beside: Callable[[int], int] = lambda p: 0) -> Callable[[int, int], int]:
    """m swaps among 2^m ranks; the others swap with the first ones before, and are told afterwards."""

    def sent(peers: int, rank: int) -> int:
        m = peers.bit_length() - 1
        others = peers - 2**m
        payloads = 1 if rank >= 2**m else m + 2 * (rank < others)
        return payloads * nbytes + marks * (rank < others) + beside(peers)

    return sent


# 10 of 1000 entries: their values, a low byte of each position, and ceil((10 + 3) / 8) bytes of high parts.
TOPK = 10 * 4 + 10 + 2

BIASES = ((0, 10), (500, 520))


def split(peers: int) -> int:
    """The bounds of regions, then twice 12.5 of 1000 entries in 8 bytes each, a P-th to each rank."""
    return ring(4 * (peers - 1))(peers) + 2 * gather(8 * math.ceil(12.5 / peers))(peers)


# 20 x 30 and 16 x 25 fill 1000 entries; rank 2: P has 36 rows and Q 55.
MATRICES = (Matrix(0, 20, 30), Matrix(600, 16, 25))
EVEN = (Matrix(0, 10, 20), Matrix(250, 10, 20), Matrix(500, 10, 20), Matrix(710, 5, 6), Matrix(750, 10, 20))
LOW_RANK = PowerSGD(rank=2, matrices=MATRICES)

MIRRORED = Predicted(
    budget=0.1, predictor=Linear(), full_steps=0, horizon=10**6, whole_below=1, matrices=MATRICES
)

TABLE = {
    "dense": Row(Dense(), ring(4 * NUMEL), 1e-6),
    "bf16": Row(BF16(), ring(2 * NUMEL), 2e-2, rounding=2**-7),
    "bf16 + ef": Row(ErrorFeedback(BF16()), ring(2 * NUMEL), 2e-2, conserves=True, rounding=2**-7),
    "dense + ef": Row(ErrorFeedback(Dense()), ring(4 * NUMEL), 1e-6, conserves=True),
    "topk 1%": Row(TopK(ratio=0.01), gather(TOPK), 1.0),
    "topk 1% + ef": Row(ErrorFeedback(TopK(ratio=0.01)), gather(TOPK), 1.0, conserves=True),
    # 10 marks: 2 bytes.
    "gtopk 1%": Row(TopK(ratio=0.01), tree(TOPK, 2), 1.0, topology=GlobalTopK()),
    "gtopk 1% + ef": Row(
        ErrorFeedback(TopK(ratio=0.01)), tree(TOPK, 2), 1.0, conserves=True, topology=GlobalTopK()
    ),
    "gtopk 30% + ef": Row(
        ErrorFeedback(TopK(ratio=0.3)), tree(300 * 4 + 125, 38), 1.0, conserves=True, topology=GlobalTopK()
    ),
    "gtopk 1% + ef, biases dense": Row(
        Partition(ErrorFeedback(TopK(ratio=0.01)), (Part(Dense(), BIASES),)),
        tree(TOPK, 2, ring(30 * 4)),
        1.0,
        topology=GlobalTopK(),
    ),
    "gtopk 1%, momentum corrected": Row(
        MomentumCorrection(ErrorFeedback(TopK(ratio=0.01))), tree(TOPK, 2), 1.0, topology=GlobalTopK()
    ),
    "gtopk of each 128 + ef": Row(
        ErrorFeedback(TopK(ratio=0.03, chunk=128)),
        tree(32 * 4 + 32 + 5, 4),
        1.0,
        conserves=True,
        topology=GlobalTopK(),
    ),
    "gtopk 100%": Row(TopK(ratio=1.0), tree(NUMEL * 4 + 125, 125), 1e-6, topology=GlobalTopK()),
    "topk 100%": Row(TopK(ratio=1.0), gather(NUMEL * 4 + 125), 1e-6),
    "topk 1% + ef, biases dense": Row(
        # The dense entries ride in the sparse message: 30 x 4 bytes to each peer.
        Partition(ErrorFeedback(TopK(ratio=0.01)), (Part(Dense(), BIASES),)),
        gather(TOPK + 30 * 4),
        1.0,
    ),
    "topk 1%, values in bf16, + ef": Row(
        ErrorFeedback(TopK(ratio=0.01, values=BF16())), gather(10 * 2 + 12), 1.0, True, rounding=2**-7
    ),
    "topk 1%, momentum corrected": Row(
        MomentumCorrection(ErrorFeedback(TopK(ratio=0.01))), gather(TOPK), 1.0
    ),
    "topk 1%, Nesterov, no masking": Row(
        MomentumCorrection(ErrorFeedback(TopK(ratio=0.01)), nesterov=True, masking=False), gather(TOPK), 1.0
    ),
    "dense, momentum corrected": Row(MomentumCorrection(Dense()), ring(4 * NUMEL), 1e-6),
    "bf16, momentum corrected, + ef": Row(
        MomentumCorrection(ErrorFeedback(BF16())), ring(2 * NUMEL), 2e-2, rounding=2**-7
    ),
    # In step 0, with a variance that is kept from step 1 on: a gradient.
    "before Adam's momentum": Row(AdamMomentum(Dense(), Dense(), freeze_step=1), ring(4 * NUMEL), 1e-6),
    "before Adam's momentum, in bf16, + ef": Row(
        AdamMomentum(ErrorFeedback(BF16()), ErrorFeedback(BF16())), ring(2 * NUMEL), 2e-2, rounding=2**-7
    ),
    "the first of two phases": Row(
        Scheduled(((3, ErrorFeedback(TopK(ratio=0.01))),), ErrorFeedback(TopK(ratio=0.001))),
        gather(TOPK),
        1.0,
        conserves=True,
    ),
    "topk 5%, values in int8, + ef": Row(
        # 50 bytes and a scale; 50 low bytes of positions, and ceil((50 + 3) / 8) of high parts.
        ErrorFeedback(TopK(ratio=0.05, values=Int8())),
        gather(50 + 4 + 50 + 7),
        1.0,
        True,
        rounding=1e-2,
    ),
    "low rank, then topk 1%": Row(
        Cascade(LOW_RANK, TopK(ratio=0.01)),
        lambda p: ring(36 * 2 * 4)(p) + ring(55 * 2 * 4)(p) + gather(TOPK)(p),
        1.0,
        rounding=1e-5,
    ),
    "low rank, then topk 1%, + ef": Row(
        ErrorFeedback(Cascade(LOW_RANK, TopK(ratio=0.01))),
        lambda p: ring(36 * 2 * 4)(p) + ring(55 * 2 * 4)(p) + gather(TOPK)(p),
        1.0,
        conserves=True,
        rounding=1e-5,
    ),
    "bf16, then all that is left": Row(
        Cascade(BF16(), Dense()), lambda p: ring(2 * NUMEL)(p) + ring(4 * NUMEL)(p), 1e-2, rounding=2**-7
    ),
    # 4 of each 128, and of the 104 behind them: 32 values, their low bytes, and ceil((32 + 3) / 8).
    "topk of each 128": Row(TopK(ratio=0.03, chunk=128), gather(32 * 4 + 32 + 5), 1.0),
    "topk of each 128 + ef": Row(
        ErrorFeedback(TopK(ratio=0.03, chunk=128)), gather(32 * 4 + 32 + 5), 1.0, conserves=True
    ),
    # As SparseLoCo: 12 + 8 entries, as there are only 8 behind the first 992; 20 levels of 2 bits, a unit.
    "topk of each 992, values in 2 bits, + ef that decays": Row(
        ErrorFeedback(TopK(ratio=0.012, values=QSGD(bits=2), chunk=992), decay=0.95),
        gather(5 + 4 + 20 + 3),
        1.0,
    ),
    "topk of each 992, signs and two magnitudes, + ef that decays": Row(
        ErrorFeedback(TopK(ratio=0.012, values=TwoMagnitudes(64), chunk=992), decay=0.95),
        gather(5 + 4 + 20 + 3),
        1.0,
    ),
    "sign + ef that decays": Row(ErrorFeedback(Sign(), decay=0.9), gather(125 + 4), 1.0, rounding=1e-5),
    # Sparse ternary compression: ceil(10 / 8) bytes of signs, and one magnitude.
    "topk 1%, signs": Row(TopK(ratio=0.01, values=Sign()), gather(2 + 4 + 12), 1.0, rounding=1e-5),
    "topk 1%, signs, + ef": Row(
        ErrorFeedback(TopK(ratio=0.01, values=Sign())), gather(2 + 4 + 12), 1.0, True, rounding=1e-5
    ),
    # Room for 50: ceil(50 / 8) bytes of signs, 50 low bytes, ceil((50 + 3) / 8) of high parts.
    "threshold": Row(Threshold(tau=2.5, capacity=0.05), gather(7 + 50 + 7), 1.0),
    "threshold + ef": Row(
        ErrorFeedback(Threshold(tau=2.5, capacity=0.05)), gather(7 + 50 + 7), 1.0, conserves=True
    ),
    "threshold that most reach + ef": Row(
        ErrorFeedback(Threshold(tau=0.1, capacity=0.05)), gather(7 + 50 + 7), 1.0, conserves=True
    ),
    "threshold that none reaches + ef": Row(
        ErrorFeedback(Threshold(tau=1e6, capacity=0.05)), gather(7 + 50 + 7), 1.0, conserves=True
    ),
    "sign": Row(Sign(), gather(125 + 4), 1.0, rounding=1e-5),
    "sign + ef": Row(ErrorFeedback(Sign()), gather(125 + 4), 1.0, rounding=1e-5, conserves=True),
    "sign + ef, biases dense": Row(
        Partition(ErrorFeedback(Sign()), (Part(Dense(), BIASES),)),
        gather(125 + 4 + 30 * 4),
        1.0,
        rounding=1e-5,
    ),
    "sign by blocks": Row(Sign(block=512), gather(125 + 2 * 4), 1.0, rounding=1e-5),
    "sign by blocks + ef": Row(
        ErrorFeedback(Sign(block=512)), gather(125 + 2 * 4), 1.0, rounding=1e-5, conserves=True
    ),
    "onebit": Row(OneBit(), gather(125 + 4 * 4), 1.0, rounding=1e-5),
    "onebit + ef": Row(ErrorFeedback(OneBit()), gather(125 + 4 * 4), 1.0, rounding=1e-5, conserves=True),
    "onebit + ef, biases dense": Row(
        Partition(ErrorFeedback(OneBit()), (Part(Dense(), BIASES),)),
        gather(125 + 4 * 4 + 30 * 4),
        1.0,
        rounding=1e-5,
    ),
    "majority": Row(MajoritySign(), gather(125 + 2), 1.1, votes=True),
    "majority of momenta": Row(
        MomentumCorrection(MajoritySign(), masking=False), gather(125 + 2), 1.1, votes=True
    ),
    "qsgd": Row(QSGD(), gather(4 * 125 + 2 * 4), 1 / 7),
    "qsgd 3 bits + ef": Row(
        ErrorFeedback(QSGD(bits=3, bucket=128)), gather(3 * 125 + 8 * 4), 1 / 3, conserves=True
    ),
    "qsgd 8 bits": Row(QSGD(bits=8), gather(8 * 125 + 2 * 4), 1 / 127),
    "qsgd 5 bits, by norm": Row(QSGD(bits=5, bucket=64, scale="norm"), gather(5 * 125 + 16 * 4), 8 / 15),
    "qsgd, biases dense": Row(
        Partition(QSGD(), (Part(Dense(), BIASES),)), gather(4 * 125 + 2 * 4 + 30 * 4), 1 / 7
    ),
    "terngrad": Row(TernGrad(), gather(2 * 125 + 2 * 4), 1.0),
    "terngrad, not clipped, + ef": Row(
        ErrorFeedback(TernGrad(clip=None)), gather(2 * 125 + 2 * 4), 1.0, conserves=True
    ),
    "blockwise": Row(Blockwise(), gather(3 * 125 + 2 * 2), 1 / 5.9),
    "blockwise + ef": Row(ErrorFeedback(Blockwise()), gather(3 * 125 + 2 * 2), 1 / 5.9, conserves=True),
    "blockwise 2 bits + ef": Row(
        ErrorFeedback(Blockwise(bits=2)), gather(103 + 98 + 2 * 2), 1 / 1.9, conserves=True
    ),
    "blockwise 5 bits + ef": Row(
        ErrorFeedback(Blockwise(bits=5)), gather(5 * 125 + 2 * 2), 1 / 29, conserves=True
    ),
    "blockwise, biases in 8 bits + ef": Row(
        Partition(ErrorFeedback(Blockwise()), (Part(ErrorFeedback(Blockwise(bits=8)), BIASES),)),
        gather(3 * 125 + 2 * 2 + 30 + 2),
        1 / 5.9,
    ),
    "blockwise, with feedback of means": Row(
        MeanFeedback(Blockwise(bits=4)), gather(4 * 125 + 2 * 2), 1 / 13.8
    ),
    "entropy coded + ef": Row(
        ErrorFeedback(EntropyCoded()), gather(1 + 3 * 125 + 2 * 2 + 4), 1 / 5.9, conserves=True
    ),
    # A byte for each byte of a number that it sends, at most, and its length.
    "byte coded int8 + ef": Row(
        ErrorFeedback(ByteCoded(Int8())), gather(NUMEL + 2 * 4 + 1 + 4 + 4), 1 / 250, conserves=True
    ),
    "byte coded qsgd": Row(ByteCoded(QSGD()), gather(4 * 125 + 2 * 4 + 1 + 4 + 4), 1 / 7),
    "byte coded bf16 + ef": Row(
        ErrorFeedback(ByteCoded(BF16())), gather(2 * NUMEL + 2 + 4), 2e-2, conserves=True, rounding=2**-7
    ),
    "byte coded topk 30% + ef": Row(
        ErrorFeedback(ByteCoded(TopK(ratio=0.3))), gather(300 * 4 + 125 + 1 + 4 + 4), 1.0, conserves=True
    ),
    "topk 30% in parts + ef": Row(
        ErrorFeedback(InParts(TopK(ratio=0.3))), gather(16 * (19 * 4 + 22) + 4), 1.0, conserves=True
    ),
    "two magnitudes": Row(TwoMagnitudes(), gather(2 * 125 + 2 * 4), 1.0),
    "two magnitudes of 64 + ef": Row(
        ErrorFeedback(TwoMagnitudes(bucket=64)), gather(2 * 125 + 16 * 4), 1.0, conserves=True
    ),
    "int8": Row(Int8(), gather(NUMEL + 2 * 4), 1 / 250),
    "int8 + ef": Row(ErrorFeedback(Int8()), gather(NUMEL + 2 * 4), 1 / 250, conserves=True),
    "natural": Row(Natural(), gather(NUMEL + 125), 1.0),
    "natural + ef": Row(ErrorFeedback(Natural()), gather(NUMEL + 125), 1.0, conserves=True),
    "fp16": Row(FP16(), ring(2 * NUMEL), 2e-3, rounding=2**-9),
    "fp16 + ef": Row(ErrorFeedback(FP16()), ring(2 * NUMEL), 2e-3, conserves=True, rounding=2**-9),
    "fp8": Row(FP8(), gather(NUMEL + 4), 1 / 16),
    "fp8, e5m2, + ef": Row(ErrorFeedback(FP8(format="e5m2")), gather(NUMEL + 4), 1 / 8, conserves=True),
    "randomk 5%": Row(RandomK(ratio=0.05), ring(50 * 4), 1.0),
    "randomk 5% + ef": Row(ErrorFeedback(RandomK(ratio=0.05)), ring(50 * 4), 1.0, conserves=True),
    "randomk 100%": Row(RandomK(ratio=1.0), ring(NUMEL * 4), 1e-6),
    "powersgd": Row(LOW_RANK, lambda p: ring(36 * 2 * 4)(p) + ring(55 * 2 * 4)(p), 1.0, rounding=1e-5),
    "powersgd + ef": Row(
        ErrorFeedback(LOW_RANK),
        lambda p: ring(36 * 2 * 4)(p) + ring(55 * 2 * 4)(p),
        1.0,
        conserves=True,
        rounding=1e-5,
    ),
    "powersgd, full rank": Row(
        PowerSGD(rank=20, matrices=(Matrix(0, 20, 50),)),
        lambda p: ring(20 * 20 * 4)(p) + ring(50 * 20 * 4)(p),
        1.0,
        rounding=1e-5,
    ),
    # 72 numbers of P in 4 bits and their scale, then 110 of Q.
    "powersgd in 4 bits": Row(
        QuantizedPowerSGD(rank=2, matrices=MATRICES), lambda p: gather(40)(p) + gather(59)(p), 1.5
    ),
    "powersgd in 4 bits + ef": Row(
        ErrorFeedback(QuantizedPowerSGD(rank=2, matrices=MATRICES)),
        lambda p: gather(40)(p) + gather(59)(p),
        1.5,
        conserves=True,
        rounding=1e-5,
    ),
    # Three of them at equal distances; the fourth too, but for what lies before it.
    "powersgd + ef, equal matrices": Row(
        ErrorFeedback(PowerSGD(rank=2, matrices=EVEN)),
        lambda p: ring((40 + 5) * 2 * 4)(p) + ring((80 + 6) * 2 * 4)(p),
        1.0,
        conserves=True,
        rounding=1e-5,
    ),
    "powersgd + ef, vectors dense": Row(
        # The vectors ride in the message of P.
        Partition(
            ErrorFeedback(PowerSGD(rank=1, matrices=(Matrix(10, 7, 70), Matrix(520, 6, 80)))),
            (Part(Dense(), BIASES),),
        ),
        lambda p: ring((13 + 30) * 4)(p) + ring(150 * 4)(p),
        1.0,
        rounding=1e-5,
    ),
    # The first rounds of gradients that have nothing in common: all of it travels, and a number before it.
    "lag": Row(LAG(matrices=MATRICES), lambda p: ring(4)(p) + ring(4 * NUMEL)(p), 1e-6),
    "lag, momentum corrected": Row(
        MomentumCorrection(LAG(matrices=MATRICES)), lambda p: ring(4)(p) + ring(4 * NUMEL)(p), 1e-6
    ),
    "lag, biases dense": Row(
        # The biases ride with the number.
        Partition(LAG(matrices=(Matrix(10, 7, 70), Matrix(520, 6, 80))), (Part(Dense(), BIASES),)),
        lambda p: ring((1 + 30) * 4)(p) + ring(4 * NUMEL)(p),
        1e-6,
    ),
    # Of 1000 entries 100 may travel, with two numbers by which ranks see that they predict alike.
    "predicted": Row(MIRRORED, ring(100 * 4), 1.0),
    "predicted + ef": Row(ErrorFeedback(MIRRORED), ring(100 * 4), 1.0, conserves=True),
    "predicted, at first": Row(replace(MIRRORED, full_steps=2, horizon=100), ring((NUMEL + 3) * 4), 1e-6),
    # A matrix and the vectors below 500 entries travel whole: 400 of 1000.
    "predicted, small ones whole": Row(replace(MIRRORED, budget=0.5, whole_below=500), ring(500 * 4), 1.0),
    "predicted, at random": Row(replace(MIRRORED, subset="random"), ring(100 * 4), 1.0),
    "predicted, by layers": Row(replace(MIRRORED, subset="layers"), ring(100 * 4), 1.0),
    # In the bytes of 97 entries there is room for twice as many halves, beside three marks.
    "predicted, in bf16": Row(
        replace(MIRRORED, values=BF16()), lambda p: ring(97 * 4)(p) + ring(3 * 4)(p), 1.0, rounding=2**-7
    ),
    # 7 are drawn at random. 70 values, their low bytes, and ceil((70 + 3) / 8) of high parts are what fits
    # into the bytes of the other 90.
    "predicted, the largest sent": Row(
        replace(MIRRORED, subset="magnitude"), gather(70 * 4 + 70 + 10 + 7 * 4 + 3 * 4), 1.0
    ),
    "predictive coding of topk 1% + ef": Row(
        PredictiveCoding(ErrorFeedback(TopK(ratio=0.01)), matrices=MATRICES),
        gather(TOPK),
        1.0,
        conserves=True,
    ),
    "predictive coding of dense, by MP2": Row(
        PredictiveCoding(Dense(), MP2(), MATRICES), ring(4 * NUMEL), 1e-5
    ),
    "fitted coding of blockwise + ef": Row(
        PredictiveCoding(ErrorFeedback(Blockwise()), LeastSquares()),
        gather(3 * 125 + 2 * 2),
        1 / 5.9,
        conserves=True,
    ),
    "fitted coding of bf16, two answers": Row(
        PredictiveCoding(BF16(), LeastSquares(2), MATRICES), ring(2 * NUMEL), 2e-2, rounding=2**-7
    ),
    "predictive coding of bf16": Row(
        PredictiveCoding(BF16(), Linear()), ring(2 * NUMEL), 2e-2, rounding=2**-7
    ),
    "nowcast": Row(Nowcast(Dense(), Linear(), period=1, matrices=MATRICES), ring(4 * NUMEL), 1.0),
    "dense, clipped": Row(Clip(Dense(), max_norm=2.0), ring(4 * NUMEL), 1.0),
    "dense, not reached by the clip": Row(Clip(Dense(), max_norm=1e6), ring(4 * NUMEL), 1e-6),
    "bf16, clipped": Row(Clip(BF16(), max_norm=2.0), ring(2 * NUMEL), 1.0, rounding=2**-7),
    "topk 1% + ef, clipped": Row(
        Clip(ErrorFeedback(TopK(ratio=0.01)), max_norm=2.0), gather(TOPK), 1.0, rounding=1e-6
    ),
    # What is cut off is owed too: no way to train, but nothing may be lost.
    "dense, clipped, + ef": Row(
        ErrorFeedback(Clip(Dense(), max_norm=2.0)), ring(4 * NUMEL), 1.0, conserves=True
    ),
    "powersgd + ef, clipped": Row(
        Clip(ErrorFeedback(LOW_RANK), max_norm=2.0),
        lambda p: ring(36 * 2 * 4)(p) + ring(55 * 2 * 4)(p),
        1.0,
        rounding=1e-5,
    ),
    "topk 1%, a third bf16": Row(
        Partition(TopK(ratio=0.01), (Part(BF16(), ((300, 600),)),)),
        gather(TOPK + 300 * 2),
        1.0,
        rounding=2**-7,
    ),
    "cosine transform, topk 1%": Row(DCT(TopK(ratio=0.01)), gather(TOPK), 1.0, rounding=1e-5),
    "cosine transform, topk 1% + ef that decays": Row(
        ErrorFeedback(DCT(TopK(ratio=0.01), length=8), decay=0.999), gather(TOPK), 1.0, rounding=1e-5
    ),
    "cosine transform, signs, + ef": Row(
        ErrorFeedback(DCT(Sign())), gather(125 + 4), 1.0, conserves=True, rounding=1e-5
    ),
    "demo": Row(SignOfMean(ErrorFeedback(DCT(TopK(ratio=0.01)), decay=0.999)), gather(TOPK), 1.1, votes=True),
    "dion": Row(
        ErrorFeedback(Dion(rank=2, matrices=MATRICES), rescale=False),
        lambda p: ring(36 * 2 * 4)(p) + ring(55 * 2 * 4)(p),
        1.1,
        conserves=True,
        steps=True,
    ),
    "ef21 of topk 1%": Row(EF21(TopK(ratio=0.01)), gather(TOPK), 1.0),
    "ef21 of topk 1%, momentum corrected": Row(
        MomentumCorrection(EF21(TopK(ratio=0.01)), masking=False), gather(TOPK), 1.0
    ),
    "laq": Row(LAQ(matrices=MATRICES), lambda p: ring(4)(p) + gather(4 * 125 + 2 * 2)(p), 1 / 13.8),
    "3lc + ef": Row(ErrorFeedback(ThreeLC()), gather(200 + 2 * 4 + 4), 1.0, conserves=True),
    "natural dithering": Row(NaturalDithering(), gather(4 * 125 + 2 * 4), 0.5),
    "natural dithering 3 bits, buckets of 64": Row(
        NaturalDithering(bits=3, bucket=64), gather(3 * 125 + 16 * 4), 0.5
    ),
    # 5 rows of 20 sums, then 40 entries.
    "count sketch + ef": Row(
        ErrorFeedback(CountSketch()), lambda p: ring(5 * 20 * 4)(p) + ring(40 * 4)(p), 1.0, conserves=True
    ),
    # 15 norms; 3 chunks, of which the last may be filled up.
    "chunks + ef": Row(
        ErrorFeedback(LargestChunks(ratio=0.2, chunk=70)),
        lambda p: ring(15 * 4)(p) + ring(3 * 70 * 4)(p),
        1.0,
        conserves=True,
    ),
    "sampled entries": Row(SampledEntries(), gather(TOPK), 10.0),
    "sampled spectrum": Row(
        SampledSpectrum(rank=2, matrices=MATRICES), gather(2 * (50 + 41) * 4), 10.0, rounding=1e-5
    ),
    # Room for 100: ceil(100 / 8) bytes of signs, a magnitude, 100 low bytes, 13 of high parts.
    "adacomp + ef": Row(
        ErrorFeedback(AdaComp(bin=50, capacity=0.1)), gather(13 + 4 + 100 + 13), 1.0, True, rounding=1e-5
    ),
    "adacomp of small bins, full, + ef": Row(
        ErrorFeedback(AdaComp(bin=4, capacity=0.1)), gather(13 + 4 + 100 + 13), 1.0, True, rounding=1e-5
    ),
    "oktopk 1% + ef": Row(ErrorFeedback(OkTopK()), split, 1.0, conserves=True),
}
