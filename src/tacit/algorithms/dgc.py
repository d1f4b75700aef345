"""Deep gradient compression, DGC (Lin, Han, Mao, Wang & Dally, ICLR 2018, arXiv 1712.01887).

The paper's algorithm, on each worker r:            here:
    g_r <- clip(g_r, threshold / sqrt(P))           Clip, where `max_norm` is given
    u_r <- m u_r + g_r                              MomentumCorrection: `velocity`
    v_r <- v_r + u_r                                ErrorFeedback: add the residual
    M   <- the k entries of v_r largest in |.|      TopK.encode
    s_r <- v_r on M;  v_r <- 0 on M                 ErrorFeedback: what was not sent is the new residual
    u_r <- 0 on M                                   MomentumCorrection: momentum factor masking
    x   <- x - lr * mean_r(s_r)                     Flat: all-gather, then scatter-add of P sparse messages
    warm-up: k of 25 %, 6.25 %, 1.56 %, 0.4 %       Scheduled, a quarter of `warmup_steps` each

With `nesterov`, g_r + m u_r is added to v_r. The optimizer must be SGD; its momentum is taken over while the
strategy is attached, with what its buffers hold, and set to 0 there. Weight decay keeps its momentum, in a
separate velocity that is not compressed and is not sent, as in the authors' code. What waits in v_r follows
the learning rate (`ErrorFeedback.rescale`); the paper leaves that open.

By `topology=two-phase` each rank averages one slice for all and sends the largest entries of the mean:
fewer bytes from 3 ranks on. Of what was sent a part then waits, though its momentum is masked already.

The paper sends the chosen entries exactly, as `values=fp32` does. Other `values` write them shorter, and what
that loses stays in v_r. `bits` is of the levels of `values=qsgd`.

Differences from the paper: the k entries are chosen over a whole bucket, exactly, not by a sampled threshold
tensor by tensor; the warm-up is in steps, not epochs; clipping is off by default, as in the authors' code,
and bucket by bucket. Biases and norms are sent densely in the same message, with momentum and without
masking.
"""

from __future__ import annotations

from tacit.algorithms.options.codecs import EntryValues, values_of
from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.options.warmups import warmed_up
from tacit.algorithms.registry import algorithm
from tacit.compressors import Clip, ErrorFeedback, MomentumCorrection, TopK
from tacit.contracts import Compressor
from tacit.strategy import Strategy


@algorithm(
    family="sparsification",
    paper="DGC: Lin et al. 2018, arXiv 1712.01887",
    compresses=True,
    changes="only the largest entries of the accumulated momentum travel; the optimizer's is taken over",
)
def dgc(
    ratio: float = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    max_norm: float | None = None,
    warmup_steps: int = 0,
    topology: Way = "all-gather",
    values: EntryValues = "fp32",
    bits: int | None = None,
    residual_bits: int = 32,
) -> Strategy:
    """One entry in 1 / `ratio` of the accumulated momentum is sent, the largest; the rest waits."""
    written = values_of(values, bits)

    def corrected(ratio: float) -> Compressor:
        return MomentumCorrection(
            ErrorFeedback(TopK(ratio=ratio, values=written)), momentum, nesterov, masking
        )

    compressor = warmed_up(corrected, ratio, warmup_steps)
    if max_norm is not None:
        compressor = Clip(compressor, max_norm)
    return Strategy(compressor=compressor, topology=way(topology), residual_bits=residual_bits)
