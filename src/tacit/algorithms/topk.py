"""Top-k sparsification with error feedback (Aji & Heafield, EMNLP 2017; Stich et al., NeurIPS 2018).

The paper's algorithm, on each worker r:            here:
    a_r <- g_r + e_r                                ErrorFeedback: add the residual
    s_r <- the k entries of a_r largest in |.|      TopK.encode
    e_r <- a_r - s_r                                ErrorFeedback: what was not sent is the new residual
    x   <- x - lr * mean_r(s_r)                     Flat: all-gather, then scatter-add of P sparse messages
    warm-up (DGC's): k of 25 %, 6.25 %, ...         Scheduled, a quarter of `warmup_steps` each

By `topology=two-phase` each rank averages one slice for all and sends the mean compressed too, with error
separate feedback: of the up to P k entries that came, the k largest; the others wait where they are. From 3
ranks on these are fewer bytes, and of P k entries k arrive: at equal bytes the two come to the same.

By `chunk=4096` the choice is made among so many entries in a row at a time, as `sparseloco` does it to deltas
over many steps.

The papers send the chosen entries exactly, as `values=fp32` does. Other `values` write them shorter, and what
that loses goes into the residual e_r. `bits` is of the levels of `values=qsgd`. By `entropy=true` the gaps
between positions, and the bytes of values, are entropy coded (ByteCoded), and the same arrives.

Differences from the papers: the k entries are chosen over a whole bucket (the tensors that travel in one
message), not tensor by tensor; parameters of fewer than two dimensions are sent densely in the same message.
"""

from __future__ import annotations

from tacit.algorithms.options.codecs import EntryValues, coded, values_of
from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.options.warmups import warmed_up
from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback, TopK
from tacit.contracts import Compressor
from tacit.strategy import Strategy


@algorithm(
    family="sparsification",
    paper="Aji & Heafield 2017, arXiv 1704.05021; Stich et al. 2018, arXiv 1809.07599",
    compresses=True,
    changes="only the largest entries travel; the rest is sent later (error feedback)",
)
def topk(
    ratio: float = 0.01,
    values: EntryValues = "fp32",
    warmup_steps: int = 0,
    topology: Way = "all-gather",
    chunk: int | None = None,
    bits: int | None = None,
    entropy: bool = False,
    residual_bits: int = 32,
) -> Strategy:
    """One entry in 1 / `ratio` is sent, the largest; the rest stays in the residual."""
    written = values_of(values, bits)

    def owing(ratio: float) -> Compressor:
        return ErrorFeedback(coded(TopK(ratio=ratio, values=written, chunk=chunk), entropy))

    return Strategy(
        compressor=warmed_up(owing, ratio, warmup_steps), topology=way(topology), residual_bits=residual_bits
    )
