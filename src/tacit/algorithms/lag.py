"""Lazily aggregated gradients, LAG-WK (Chen, Giannakis, Sun & Yin, NeurIPS 2018, arXiv 1805.09965).

The paper's algorithm 1, in iteration k, on each worker m of M:  here:
    server broadcasts theta^k                                    all replicas have it
    g_m <- gradient of L_m at theta^k, over all of m's data      the user's backward
    check (15a): |g_m - g_m,last|^2 against xi and the motion    LAG: `held`, `norms`
    if violated: upload the change d_m; g_m,last <- g_m          LAG: a number, then `held` in an all-reduce
    sum^k <- sum^(k-1) + sum of the d_m that came                LAG: `mean`, anew or that of the last round
    theta^(k+1) <- theta^k - a sum^k                             the optimizer; a = lr / M, as it has a mean

xi_d = `xi` for d = 1 .. D = `window`; 0.1 and 10 are the paper's for LAG-WK. What is saved: a round of a
bucket in which no rank has anything new costs one number a rank in place of the gradient. As there is no
server, one rank with something new makes all of them take part in an all-reduce: it is not the paper's count
of uploads that is saved here. The rule is that of each bucket, see `LAG`. With plain SGD the motion is that
of the paper; with momentum, Adam, or an lr that changes, its place is taken by the means, for which it stands
there.

The paper's gradients are over all data. With small batches a gradient changes by its own noise in every step,
and nearly every round travels whole: take large ones (gradient accumulation under `no_sync` is one way).
"""

from __future__ import annotations

from tacit.algorithms.registry import algorithm
from tacit.compressors import LAG
from tacit.strategy import Strategy


@algorithm(
    family="lazy",
    paper="LAG: Chen et al. 2018, arXiv 1805.09965",
    compresses=True,
    changes="gradients stand, and do not travel, until they have changed enough; for large batches",
    instead="topk",
)
def lag(xi: float = 0.1, window: int = 10) -> Strategy:
    """Gradients stand, and do not travel, until one has changed by more than `xi` lets pass."""
    return Strategy(compressor=LAG(xi, window))
