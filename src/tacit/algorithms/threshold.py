"""Threshold quantization with error feedback (Strom, Interspeech 2015).

The paper's algorithm, on each worker r:            here:
    a_r <- a_r + g_r                                ErrorFeedback: add the residual
    for a_r[i] >= +tau: send (i, +), a_r[i] -= tau  Threshold.encode: positions and signs
    for a_r[i] <= -tau: send (i, -), a_r[i] += tau  ErrorFeedback: what was not sent is the new residual
    x   <- x - lr * sum_r(tau of the signs sent)    Flat: all-gather, then the mean of P messages

By `topology=two-phase` each rank averages one slice for all and sends the mean compressed too, with error
separate feedback: fewer bytes from 3 ranks on, and an entry of the mean waits until it reaches tau.

Differences from the paper: a round sends each entry at most once, and at most a share of the entries, the
largest; so that the size of a message is known beforehand. The mean, not the sum, is applied, by the
optimizer. Biases and norms are sent densely in the same message.
"""

from __future__ import annotations

from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback, Threshold
from tacit.strategy import Strategy


@algorithm(
    family="sparsification",
    paper="Strom, Interspeech 2015",
    compresses=True,
    changes="entries that reach a threshold travel as plus or minus it; "
    "the rest is sent later (error feedback)",
)
def threshold(tau: float = 0.01, capacity: float = 0.01, topology: Way = "all-gather") -> Strategy:
    """Entries of magnitude `tau` or more are sent as plus or minus `tau`; the rest stays in the residual."""
    compressor = ErrorFeedback(Threshold(tau=tau, capacity=capacity))
    return Strategy(compressor=compressor, topology=way(topology))
