"""GradientFlow's coarse-grained sparse communication, CSC (Sun et al. 2019, arXiv 1902.06855).

The algorithm on each worker r:                                 here:
    G_r <- g_r + what was not sent                              ErrorFeedback
    the L1 norm of each chunk of 32 K entries, summed over r    LargestChunks: the first all-reduce
    average the chunks of largest norm                          LargestChunks: the second, dense
    the others wait on each worker                              ErrorFeedback

All ranks choose alike, so entries travel without positions and add up on the way. Its lazy all-reduce, one
message for many tensors, is what DDP's buckets do.

Differences from the paper: momentum stays with the optimizer; chunks are of a bucket, not of all gradients
joined (`chunk` must be well below a bucket's entries); the warm-up that it takes is `warmup_steps`, from a
quarter of the chunks on; biases and norms are sent densely in the same message.
"""

from __future__ import annotations

from tacit.algorithms.options.warmups import warmed_up
from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback, LargestChunks
from tacit.contracts import Compressor
from tacit.strategy import Strategy


@algorithm(
    family="sparsification",
    paper="GradientFlow: Sun et al. 2019, arXiv 1902.06855",
    compresses=True,
    changes="whole chunks travel, those of largest norm in the mean; the others are sent later",
    instead="topk",
)
def gradientflow(ratio: float = 0.1, chunk: int = 4096, warmup_steps: int = 0) -> Strategy:
    """One chunk in 1 / `ratio` is sent, chosen by the mean norm; the others stay in the residual."""

    def owing(ratio: float) -> Compressor:
        return ErrorFeedback(LargestChunks(ratio=ratio, chunk=chunk))

    return Strategy(compressor=warmed_up(owing, ratio, warmup_steps))
