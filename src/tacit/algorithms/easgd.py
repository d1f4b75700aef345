"""EASGD (Zhang, Choromanska & LeCun, NIPS 2015, arXiv 1412.6651), the synchronous form.

The paper's algorithm, on each worker r, with the centre x~:       here:
    x_r <- x_r - lr * g_r                                          the user's optimizer (momentum: EAMSGD)
    every tau steps: x_r <- x_r - alpha * (x_r - x~)               Every(tau), Elastic: the parameters
                     x~  <- x~  + alpha * sum_r (x_r - x~)         Elastic: the anchor, beta = P * alpha

Both right-hand sides are of the moment before, as in the paper's synchronous equations. The centre is the
anchor that every rank keeps; there is no server. Closing the session leaves every replica at it.
"""

from __future__ import annotations

from tacit.algorithms.registry import algorithm
from tacit.merges import Elastic
from tacit.rounds import Every
from tacit.strategy import Strategy


@algorithm(
    family="periodic",
    paper="EASGD: Zhang et al. 2015, arXiv 1412.6651",
    compresses=False,
    changes="replicas stay apart; they and a centre pull at each other every few steps",
)
def easgd(sync_every: int = 10, beta: float = 0.9) -> Strategy:
    """Replicas and a centre pull at each other every `sync_every` steps."""
    return Strategy(subject="delta", rounds=Every(sync_every), merge=Elastic(beta))
