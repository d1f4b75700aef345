"""Asynchronous DiLoCo with delayed Nesterov momentum (Liu et al. 2024, arXiv 2401.09135).

The server's algorithm 3, N pushes from one step of the momentum to the next:    here, of d = -delta:
    worker: H steps of the inner optimizer from theta                 the user's; merge `ServerParams`
            delta <- theta - its parameters; push it                  subject "delta", `Every(sync_every)`
    server: Delta <- Delta + delta                                    `ServerDelayedNesterov`, for each push:
            if N pushes have come since the last time:                s <- s + d / N
                m <- beta m + Delta / N; Delta <- 0                   m <- beta m + s; s <- 0
                theta <- theta - lr (delta / N + beta m)              x <- x + lr (d / N + beta m)
            else: theta <- theta - lr delta / N                       x <- x + lr d / N
            answer with theta, at once                                Star(Asynchronous(), outer=...)

A worker that is twice as fast pushes twice as often, so its samples count twice as much, and nobody waits.

Differences: c, the momentum's part in the other steps, is 0. Not here: dynamic local updates (fewer steps
for slow workers), a grace period for pushes that come together, and data that is drawn by progress. Each
bucket counts its own pushes. Closing and `session.sync()` push what a worker has done since its last push,
and that counts as any other push. Pushes may travel in few bits. Of the paper the abstract was read, and its
algorithm 3 as two other implementations have it.
"""

from __future__ import annotations

from tacit import checks
from tacit.algorithms.options.codecs import of_bits
from tacit.algorithms.registry import algorithm
from tacit.merges import ServerParams
from tacit.rounds import Every
from tacit.strategy import Strategy
from tacit.topologies import Asynchronous, DelayedNesterov, Star


@algorithm(
    family="parameter server",
    paper="Asynchronous DiLoCo: Liu et al. 2024, arXiv 2401.09135",
    compresses=False,
    changes="DiLoCo where nobody waits: a server steps by each worker's progress, its momentum now and then",
)
def async_diloco(
    sync_every: int = 32,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    delay: int | None = None,
    bits: int = 32,
) -> Strategy:
    """A worker pushes every `sync_every` steps; the momentum steps every `delay` pushes."""
    checks.real("outer_lr", outer_lr, "write 0.7", above=0)
    checks.real("outer_momentum", outer_momentum, "write 0.9, or 0 for none", least=0, below=1)
    star = Star(Asynchronous(), outer=DelayedNesterov(outer_lr, outer_momentum, delay))
    return Strategy(
        subject="delta",
        rounds=Every(sync_every),
        compressor=of_bits(bits),
        topology=star,
        merge=ServerParams(),
    )
