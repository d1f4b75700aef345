"""One row a compressor: a new compressor is one file in src and one row here."""

from collections.abc import Callable
from dataclasses import dataclass

from tacit.compressors import BF16, Dense, ErrorFeedback, PowerSGD, RandomK, Select, Sign, TopK
from tacit.compressors.wrappers import Part
from tacit.contracts import Compressor, Matrix

NUMEL = 1000


@dataclass(frozen=True)
class Row:
    """What the laws need to know of a compressor, for tensors of NUMEL fp32 entries.

    Attributes:
        sent: the exact bytes that a rank sends among P peers.
        error: the largest error of the mean that a single round may have, relative to the largest entry.
        conserves: whether what was not sent is kept.
        rounding: the relative error of the arithmetic in the type that travels.
    """

    compressor: Compressor
    sent: Callable[[int], int]
    error: float
    conserves: bool = False
    rounding: float = 1e-6


def ring(nbytes: int) -> Callable[[int], int]:
    return lambda peers: -(-2 * (peers - 1) * nbytes // peers)


def gather(nbytes: int) -> Callable[[int], int]:
    return lambda peers: (peers - 1) * nbytes


BIASES = ((0, 10), (500, 520))

# 20 x 30 and 16 x 25 fill 1000 entries; rank 2: P has 36 rows and Q 55.
MATRICES = (Matrix(0, 20, 30), Matrix(600, 16, 25))
LOW_RANK = PowerSGD(rank=2, matrices=MATRICES)

TABLE = {
    "dense": Row(Dense(), ring(4 * NUMEL), 1e-6),
    "bf16": Row(BF16(), ring(2 * NUMEL), 2e-2, rounding=2**-7),
    "bf16 + ef": Row(ErrorFeedback(BF16()), ring(2 * NUMEL), 2e-2, conserves=True, rounding=2**-7),
    "dense + ef": Row(ErrorFeedback(Dense()), ring(4 * NUMEL), 1e-6, conserves=True),
    "topk 1%": Row(TopK(ratio=0.01), gather(10 * 8), 1.0),
    "topk 1% + ef": Row(ErrorFeedback(TopK(ratio=0.01)), gather(10 * 8), 1.0, conserves=True),
    "topk 100%": Row(TopK(ratio=1.0), gather(NUMEL * 8), 1e-6),
    "topk 1% + ef, biases dense": Row(
        # The dense entries ride in the sparse message: 30 x 4 bytes to each peer.
        Select(ErrorFeedback(TopK(ratio=0.01)), (Part(Dense(), BIASES),)),
        gather(10 * 8 + 30 * 4),
        1.0,
    ),
    "sign": Row(Sign(), gather(125 + 4), 1.0, rounding=1e-5),
    "sign + ef": Row(ErrorFeedback(Sign()), gather(125 + 4), 1.0, rounding=1e-5, conserves=True),
    "sign + ef, biases dense": Row(
        Select(ErrorFeedback(Sign()), (Part(Dense(), BIASES),)), gather(125 + 4 + 30 * 4), 1.0, rounding=1e-5
    ),
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
    "powersgd + ef, vectors dense": Row(
        # The vectors ride in the message of P.
        Select(
            ErrorFeedback(PowerSGD(rank=1, matrices=(Matrix(10, 7, 70), Matrix(520, 6, 80)))),
            (Part(Dense(), BIASES),),
        ),
        lambda p: ring((13 + 30) * 4)(p) + ring(150 * 4)(p),
        1.0,
        rounding=1e-5,
    ),
    "topk 1%, a third bf16": Row(
        Select(TopK(ratio=0.01), (Part(BF16(), ((300, 600),)),)),
        gather(10 * 8 + 300 * 2),
        1.0,
        rounding=2**-7,
    ),
}
