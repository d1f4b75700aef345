"""EF-signSGD (Karimireddy, Rebjock, Stich & Jaggi, ICML 2019, arXiv 1901.09847).

The paper's algorithm, on each worker r:            here:
    p_r <- g_r + e_r                                ErrorFeedback: add the residual
    D_r <- (|p_r|_1 / d) sign(p_r)                  Sign.encode: one bit an entry, one magnitude
    e_r <- p_r - D_r                                ErrorFeedback: what was not sent is the new residual
    x   <- x - lr * mean_r(D_r)                     Flat: all-gather, then unpack and add P messages

By `topology=two-phase` each rank averages one slice for all and sends the mean compressed too, with error
separate feedback: fewer bytes from 3 ranks on (`efsign` is that, by blocks).

The learning rate is applied after the mean, by the optimizer, where the paper has p_r = lr g_r + e_r; so that
it comes to the same, e_r follows the learning rate (`ErrorFeedback.rescale`).

Differences from the paper: one magnitude for all tensors of a bucket; biases and norms are sent densely in
the same message.
"""

from __future__ import annotations

from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback, Sign
from tacit.strategy import Strategy


@algorithm(
    family="quantization",
    paper="EF-signSGD: Karimireddy et al. 2019, arXiv 1901.09847",
    compresses=True,
    changes="one bit an entry and one magnitude; the rest is sent later (error feedback)",
    instead="efsign",
)
def sign(topology: Way = "all-gather") -> Strategy:
    """One bit an entry; the rest stays in the residual."""
    return Strategy(compressor=ErrorFeedback(Sign()), topology=way(topology))
