"""One row a compressor: a new compressor is one file in src and one row here."""

from collections.abc import Callable
from dataclasses import dataclass

from tacit.compressors import BF16, Dense, ErrorFeedback, Select, TopK
from tacit.compressors.wrappers import Part
from tacit.contracts import Compressor

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
    "topk 1%, a third bf16": Row(
        Select(TopK(ratio=0.01), (Part(BF16(), ((300, 600),)),)),
        gather(10 * 8 + 300 * 2),
        1.0,
        rounding=2**-7,
    ),
}
