"""A parameter server (Li et al., OSDI 2014): workers push to it and pull from it; it holds or averages.

What each of P workers does, and the server:        here:
    g_r <- gradient at x_r; push it                  Star: `PushPull`, bucket by bucket, during backward
    server: x <- x - lr * mean_r(g_r)                `ps`: Synchronous; the server gives the mean, and each
                                                     worker's optimizer steps by it: x is equal on all
    push d_r = how far the optimizer has moved x_r   the others: subject "progress", and merge `ServerParams`
    server: x <- x + d_r / P                         `Keeper`; with optimizer=server it is sent g_r, and steps
    x_r <- x                                         the answer; at once (`ps-async`: Downpour SGD, Dean et
                                                     al. 2012), or when nobody is more than `bound` steps
                                                     behind (`ps-ssp`: Ho et al., NIPS 2013)

`ps-topk` and `ps-dgc` are `topk` and `dgc` where a server averages: up travel the largest entries, down the
union of what all have sent, so that nothing is compressed twice (Aji & Heafield 2017; Lin et al. 2018).

Differences from the papers: a push counts 1 / P, so that an asynchronous run moves as far as a synchronous
one at the same learning rate; Downpour adds all of it, and wants a smaller one. Downpour's server has
Adagrad; ours what the worker has. In SSP a worker reads after each push, never from a cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

from tacit import checks
from tacit.algorithms.dgc import dgc
from tacit.algorithms.topk import topk
from tacit.compressors.cast import BF16, FP16
from tacit.compressors.dense import Dense
from tacit.compressors.int8 import Int8
from tacit.compressors.qsgd import QSGD
from tacit.compressors.sign import Sign
from tacit.compressors.topk import TopK
from tacit.compressors.wrappers import ErrorFeedback
from tacit.contracts import Compressor
from tacit.errors import ConfigError
from tacit.merges import ServerParams
from tacit.rounds import Every
from tacit.strategy import Strategy
from tacit.topologies.star import Asynchronous, StaleSynchronous, Star, Synchronous

Stepper: TypeAlias = Literal["worker", "server"]
Push: TypeAlias = Literal["dense", "bf16", "fp16", "int8", "qsgd", "sign", "topk"]

_COMPRESSORS: dict[str, Compressor] = {
    "dense": Dense(),
    "bf16": BF16(),
    "fp16": FP16(),
    "int8": ErrorFeedback(Int8()),
    "qsgd": QSGD(),
    "sign": ErrorFeedback(Sign()),
    "topk": ErrorFeedback(TopK()),
}


def ps(
    push: Push = "dense", pull: Push = "dense", backup_workers: int = 0, optimizer: Stepper = "worker"
) -> Strategy:
    """All wait for all, but for `backup_workers`, whose pushes are dropped where they come late."""
    if backup_workers or optimizer != "worker":
        return _kept("ps", Star(Synchronous(backup_workers), _back(pull), optimizer), push)
    checks.whole(
        "backup_workers", backup_workers, 0, None, "write how many need not be waited for, such as 1"
    )
    return Strategy(compressor=_of("push", push), topology=Star(pull=_back(pull)), name="ps")


def ps_async(
    push: Push = "dense",
    pull: Push = "dense",
    sync_every: int = 1,
    by_staleness: bool = False,
    optimizer: Stepper = "worker",
    compensation: float = 0.0,
) -> Strategy:
    """Nobody waits for anybody; a worker pushes every `sync_every` steps.

    `compensation`, above 0, is DC-ASGD's lambda, and needs optimizer="server".
    """
    star = Star(Asynchronous(), _back(pull), optimizer, compensation, by_staleness)
    return _kept("ps-async", star, push, sync_every)


def ps_ssp(
    bound: int = 3,
    push: Push = "dense",
    pull: Push = "dense",
    by_staleness: bool = False,
    optimizer: Stepper = "worker",
) -> Strategy:
    """Nobody is more than `bound` steps ahead of the slowest."""
    star = Star(StaleSynchronous(bound), _back(pull), optimizer, by_staleness=by_staleness)
    return _kept("ps-ssp", star, push)


def ps_topk(ratio: float = 0.01) -> Strategy:
    """`topk` by a server: the union of what was sent comes back."""
    return replace(topk(ratio), topology=Star(), name="ps-topk")


def ps_dgc(
    ratio: float = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    max_norm: float | None = None,
    warmup_steps: int = 0,
) -> Strategy:
    """`dgc` by a server: the union of what was sent comes back."""
    whole = dgc(ratio, momentum, nesterov, masking, max_norm, warmup_steps)
    return replace(whole, topology=Star(), name="ps-dgc")


def _kept(name: str, star: Star, push: str, sync_every: int = 1) -> Strategy:
    """The server keeps the parameters."""
    compressor, rounds = _of("push", push), Every(sync_every)
    if star.optimizer == "server":
        if sync_every != 1:
            raise ConfigError(
                f"sync_every={sync_every!r} with optimizer='server' would lose gradients: leave it out, or "
                "write optimizer='worker'"
            )
        return Strategy(compressor=compressor, topology=star, name=name)
    merge = ServerParams(whole=star.pull is None)
    return Strategy(
        subject="delta", rounds=rounds, compressor=compressor, topology=star, merge=merge, name=name
    )


def _of(name: str, given: str) -> Compressor:
    checks.word(name, given, tuple(_COMPRESSORS))
    return _COMPRESSORS[given]


def _back(pull: str) -> Compressor | None:
    back = _of("pull", pull)
    return None if back == Dense() else back
