"""Progress in a few bits an entry, both ways; what is not sent stays in the replica. Ours; docs/lowbit.md.

Every `sync_every` steps, with x the common point, x_r the replica of worker r, and q(y) = y in `bits` bits an
entry:

    d_r <- x_r - x; s_r <- q(d_r): sent                 Blockwise(bits); biases and norms in 8 bits
    y   <- mean of all s_r + e; a <- q(y); e <- y - a   MeanFeedback: at a server, or by slices in two phases
    x   <- x + a; x_r <- x_r + (a - s_r)                CommonPoint

What a worker has not sent stays in its replica, and what an answer has not said in e: x + e + mean(x_r - x)
changes by exactly the mean of the workers' own progress. The result is x. No round sends everything; momentum
and all other state of the optimizer stay local, and BatchNorm's statistics are averaged by `session.sync()`
and as the session closes. With `late=1` an answer is applied as the next round leaves.
By `topology=all-gather` every rank gets all s_r, and e is 0: one round trip for two, and more bytes.
With Adam or AdamW each step's variance is scaled to that of the mean gradient, or
replicas, whose batches are smaller, would move too little; `variance=local` leaves it.
With `predictor=last`, or `least-squares` (of the last three changes of x), q is of what is not predicted:

    p   <- the last change of x, times a gain for each layer and the change of the learning rate
    s_r <- q(d_r - p); y and a as above; x <- x + p + a                     PredictiveCoding, LeastSquares

and a prediction cancels in a replica. Matrices and convolutions alone are predicted.

All wait for all, and where a worker is lost all end with an error that names it. With `bound`, at parameter
servers, workers may miss rounds, go and come back: the server keeps X = x + e, and of each worker the point
z_r from which that goes on, and answers how far it is off:

    worker r: d_r <- x_r - z_r; s_r <- q(d_r): sent
    server: X <- X + s_r / P, of all P workers, whoever came; when no other worker is more than `bound` rounds
        behind, a <- q(X - z_r): sent; z_r <- z_r + a          Star(StaleSynchronous, pull)
    worker r: z_r <- z_r + a; x_r <- x_r + (a - s_r)           CommonPoint

X + mean(d_r) changes by exactly the mean of the workers' own progress: one that misses a round counts as 0,
keeps its d_r, and gets all rounds that it has missed with its next answer. One that comes back, or joins
late, gets X whole, and starts there; what the dead one had not sent is lost.

Error feedback on both sides is DoubleSqueeze's (Tang et al., ICML 2019, arXiv 1905.05957), of gradients; here
a worker's residual is no buffer, but in its replica, which trains on with it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from tacit import checks
from tacit.algorithms.options.named_options import way
from tacit.algorithms.registry import algorithm
from tacit.compressors import Blockwise, EntropyCoded, MeanFeedback
from tacit.errors import ConfigError
from tacit.merges import CommonPoint
from tacit.overlap import Bucketwise, Delayed
from tacit.prediction import LeastSquares, PredictiveCoding
from tacit.rounds import Every
from tacit.strategy import Strategy, Variance
from tacit.topologies import Auto, StaleSynchronous, Star

Fitted: TypeAlias = Literal["last", "least-squares"]
FITTED = {"last": 1, "least-squares": 3}
"""How many past changes they predict from."""
Phases: TypeAlias = Literal["auto", "all-gather", "two-phase"]
LATEST = 2
"""The longest period that has a late form: answers of more steps ago cost accuracy (docs/lowbit.md)."""


@algorithm(
    family="periodic",
    paper="ours; error feedback both ways: DoubleSqueeze, Tang et al. 2019, arXiv 1905.05957",
    compresses=True,
    changes="progress travels in a few bits an entry both ways; replicas keep what they have not sent",
)
def lowbit(
    bits: int = 3,
    sync_every: int = 1,
    late: int = 0,
    entropy: bool = False,
    bound: int | None = None,
    predictor: Fitted | None = None,
    variance: Variance | None = None,
    topology: Phases = "auto",
    anchor_bits: int = 32,
) -> Strategy:
    """Send `bits` bits an entry every `sync_every` steps, and keep the rest.

    `bound`: by how many rounds a worker may be ahead of the slowest, at a parameter server; workers may then
    go and come back. Without it all wait for all.
    """
    checks.flag("entropy", entropy)
    checks.whole("late", late, 0, 1, "write 1 to apply an answer as the next round leaves")
    if predictor is not None:
        checks.one_of("predictor", predictor, tuple(FITTED))
    checks.one_of("topology", topology, get_args(Phases))
    rounds = Every(sync_every)
    if late and sync_every > LATEST:
        raise ConfigError(
            f"late=1 with sync_every={sync_every} is not possible, as answers would be {sync_every} steps "
            f"old: write sync_every=1 or {LATEST}, or late=0"
        )
    codec = EntropyCoded(bits) if entropy else Blockwise(bits)
    overlap = Delayed(sync_every) if late else Bucketwise()
    if bound is not None:
        if predictor:
            raise ConfigError(
                f"bound={bound} with a predictor is not possible, as it predicts from answers that all "
                "workers have in common, and the server then answers each one alone: leave one of them out"
            )
        if topology != "auto":
            raise ConfigError(
                f"bound={bound} with topology={topology!r} is not possible, as it is for servers: leave "
                "one of them out"
            )
        if variance == "scaled":
            raise ConfigError(
                f"bound={bound} with variance='scaled' is not possible, as workers do not wait for each "
                "other to compare gradients: leave one of them out"
            )
        return Strategy(
            subject="delta",
            rounds=rounds,
            compressor=codec,
            topology=Star(StaleSynchronous(bound), pull=codec),
            overlap=overlap,
            merge=CommonPoint(),
            anchor_bits=anchor_bits,
        )
    coded = MeanFeedback(codec)
    return Strategy(
        subject="delta",
        rounds=rounds,
        compressor=PredictiveCoding(coded, LeastSquares(FITTED[predictor])) if predictor else coded,
        topology=Auto(at_servers=True) if topology == "auto" else way(topology),
        overlap=overlap,
        merge=CommonPoint(),
        buffers="on_sync",
        variance="scaled" if variance is None else variance,
        anchor_bits=anchor_bits,
    )
