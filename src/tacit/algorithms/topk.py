"""Top-k sparsification with error feedback (Aji & Heafield, EMNLP 2017; Stich et al., NeurIPS 2018).

The paper's algorithm, on each worker r:            here:
    a_r <- g_r + e_r                                ErrorFeedback: add what is owed
    s_r <- the k entries of a_r largest in |.|      TopK.encode
    e_r <- a_r - s_r                                ErrorFeedback: keep what was not sent
    x   <- x - lr * mean_r(s_r)                     Flat: all-gather, then scatter-add of P sparse messages
    warm-up (DGC's): k of 25 %, 6.25 %, ...         Phases, a quarter of `warmup_steps` each

By `topology=two-phase` each rank averages one stretch for all and sends the mean compressed too, with error
feedback of its own: of the up to P k entries that came, the k largest; the others wait where they are. From 3
ranks on these are fewer bytes, and of P k entries k arrive: at equal bytes the two come to the same.

By `chunk=4096` the choice is made among so many entries in a row at a time, as SparseLoCo does (Sarfi et al.
2025, arXiv 2508.15706, 64 of each 4096, of progress over many steps).

Differences from the papers: the k entries are chosen over a whole bucket (the tensors that travel in one
message), not tensor by tensor; parameters of fewer than two dimensions are sent densely in the same message.
"""

from __future__ import annotations

from typing import Literal

from tacit import checks
from tacit.algorithms.warming import warmed_up
from tacit.algorithms.ways import Way, way
from tacit.compressors.cast import BF16, FP16
from tacit.compressors.dense import Dense
from tacit.compressors.int8 import Int8
from tacit.compressors.qsgd import QSGD
from tacit.compressors.sign import Sign
from tacit.compressors.topk import TopK
from tacit.compressors.wrappers import ErrorFeedback
from tacit.contracts import Compressor, OneShot
from tacit.strategy import Strategy

VALUES: dict[str, OneShot] = {
    "fp32": Dense(),
    "bf16": BF16(),
    "fp16": FP16(),
    "int8": Int8(),
    "qsgd": QSGD(),
    "sign": Sign(),
}
"""How the chosen entries are written, as the text form names it."""


def topk(
    ratio: float = 0.01,
    values: Literal["fp32", "bf16", "fp16", "int8", "qsgd", "sign"] = "fp32",
    warmup_steps: int = 0,
    topology: Way = "all-gather",
    chunk: int | None = None,
) -> Strategy:
    """One entry in 1 / `ratio` is sent, the largest; the rest is owed."""
    checks.word("values", values, tuple(VALUES))

    def owing(ratio: float) -> Compressor:
        return ErrorFeedback(TopK(ratio=ratio, values=VALUES[values], chunk=chunk))

    return Strategy(compressor=warmed_up(owing, ratio, warmup_steps), topology=way(topology), name="topk")
