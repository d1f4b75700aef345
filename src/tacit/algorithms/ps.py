"""A parameter server (Li et al., OSDI 2014): workers push to it and pull from it; it holds or averages.

What each of P workers does, and the server:        here:
    g_r <- gradient at x_r; push it                  Star: `PushPull`, bucket by bucket, during backward
    server: x <- x - lr * mean_r(g_r)                `ps`: Synchronous; the server gives the mean, and each
                                                     worker's optimizer steps by it: x is equal on all
    push d_r = how far the optimizer has moved x_r   the others: subject "delta", and merge `ServerParams`
    server: x <- x + d_r / P                         `ParameterService`; with optimizer=server it is sent
                                                     g_r, and steps
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
from typing import Literal, TypeAlias, get_args

from tacit import checks
from tacit.algorithms.dgc import dgc
from tacit.algorithms.options.codecs import EntryValues, coded, values_of
from tacit.algorithms.registry import algorithm
from tacit.algorithms.topk import topk
from tacit.compressors import ErrorFeedback, InParts, TopK
from tacit.contracts import Compressor
from tacit.errors import ConfigError
from tacit.merges import ServerParams
from tacit.rounds import Every
from tacit.strategy import Strategy
from tacit.topologies import Asynchronous, StaleSynchronous, Star, Synchronous

Stepper: TypeAlias = Literal["worker", "server"]
Push: TypeAlias = Literal["dense", "bf16", "fp16", "int8", "qsgd", "sign", "topk"]


@algorithm(
    family="parameter server",
    paper="Li et al. 2014, OSDI; backup workers: Chen et al. 2016, arXiv 1604.00981",
    compresses=False,
    changes="a server averages the gradients of all workers, in every step",
)
def ps(
    push: Push = "dense",
    pull: Push = "dense",
    backup_workers: int = 0,
    optimizer: Stepper = "worker",
    ratio: float | None = None,
    bits: int | None = None,
    entropy: bool = False,
) -> Strategy:
    """All wait for all, but for `backup_workers`, whose pushes are dropped where they come late.

    `ratio` is of push or pull "topk", `bits` of "qsgd". `entropy`: what is compressed is entropy coded, too.
    """
    up, down = _ways(push, pull, ratio, bits, entropy)
    if backup_workers or optimizer != "worker":
        return _kept(Star(Synchronous(backup_workers), down, optimizer), up)
    checks.whole(
        "backup_workers", backup_workers, 0, None, "write how many need not be waited for, such as 1"
    )
    return Strategy(compressor=up, topology=Star(pull=down))


@algorithm(
    family="parameter server",
    paper="Downpour SGD: Dean et al. 2012, NIPS",
    compresses=False,
    changes="a server keeps the parameters; workers push their steps and pull, and wait for nobody",
)
def ps_async(
    push: Push = "dense",
    pull: Push = "dense",
    sync_every: int = 1,
    by_staleness: bool = False,
    optimizer: Stepper = "worker",
    compensation: float = 0.0,
    ratio: float | None = None,
    bits: int | None = None,
    entropy: bool = False,
) -> Strategy:
    """Nobody waits for anybody; a worker pushes every `sync_every` steps.

    `compensation`, above 0, is DC-ASGD's lambda, and needs optimizer="server". `ratio` is of push or pull
    "topk", and `bits` of "qsgd". `entropy`: what is compressed is entropy coded, too.
    """
    up, down = _ways(push, pull, ratio, bits, entropy)
    star = Star(Asynchronous(), down, optimizer, compensation, by_staleness)
    return _kept(star, up, sync_every)


@algorithm(
    family="parameter server",
    paper="SSP: Ho et al. 2013, NIPS",
    compresses=False,
    changes="a server keeps the parameters; no worker is more than a few steps ahead of the slowest",
)
def ps_ssp(
    bound: int = 3,
    push: Push = "dense",
    pull: Push = "dense",
    by_staleness: bool = False,
    optimizer: Stepper = "worker",
    ratio: float | None = None,
    bits: int | None = None,
    entropy: bool = False,
) -> Strategy:
    """Nobody is more than `bound` steps ahead of the slowest.

    `ratio` is of push or pull "topk", `bits` of "qsgd". `entropy`: what is compressed is entropy coded, too.
    """
    up, down = _ways(push, pull, ratio, bits, entropy)
    star = Star(StaleSynchronous(bound), down, optimizer, by_staleness=by_staleness)
    return _kept(star, up)


@algorithm(
    family="parameter server",
    paper="Aji & Heafield 2017, arXiv 1704.05021; Stich et al. 2018, arXiv 1809.07599",
    compresses=True,
    changes="topk where a server averages: the union of the largest entries comes back",
)
def ps_topk(
    ratio: float = 0.01,
    values: EntryValues = "fp32",
    warmup_steps: int = 0,
    chunk: int | None = None,
    bits: int | None = None,
    entropy: bool = False,
    deadline: float | None = None,
) -> Strategy:
    """`topk` by a server: the union of what was sent comes back, and all entries where `values` round it.

    `deadline`: seconds after which a worker stops sending, the largest entries first; see `Star`. As many
    entries come back then, and the server owes the others.
    """
    whole = topk(ratio, values, warmup_steps, chunk=chunk, bits=bits, entropy=entropy)
    if deadline is None:
        return replace(whole, topology=Star())
    if (values, warmup_steps, entropy) != ("fp32", 0, False):
        raise ConfigError(
            f"values={values!r}, warmup_steps={warmup_steps!r}, entropy={entropy!r} with "
            f"deadline={deadline!r} is not possible, as exact entries are sent in parts of one size: leave "
            "them out"
        )
    compressor = ErrorFeedback(InParts(TopK(ratio=ratio, chunk=chunk)))
    return Strategy(compressor=compressor, topology=Star(pull=compressor, deadline=deadline))


@algorithm(
    family="parameter server",
    paper="DGC: Lin et al. 2018, arXiv 1712.01887",
    compresses=True,
    changes="dgc where a server averages: the union of the largest entries comes back",
)
def ps_dgc(
    ratio: float = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    max_norm: float | None = None,
    warmup_steps: int = 0,
    values: EntryValues = "fp32",
    bits: int | None = None,
) -> Strategy:
    """`dgc` by a server: the union of what was sent comes back, and all entries where `values` round it."""
    whole = dgc(ratio, momentum, nesterov, masking, max_norm, warmup_steps, values=values, bits=bits)
    return replace(whole, topology=Star())


def _kept(star: Star, compressor: Compressor, sync_every: int = 1) -> Strategy:
    """The server keeps the parameters."""
    rounds = Every(sync_every)
    if star.optimizer == "server":
        if sync_every != 1:
            raise ConfigError(
                f"sync_every={sync_every!r} with optimizer='server' would lose gradients: leave it out, or "
                "write optimizer='worker'"
            )
        return Strategy(compressor=compressor, topology=star)
    merge = ServerParams(whole=star.pull is None)
    return Strategy(subject="delta", rounds=rounds, compressor=compressor, topology=star, merge=merge)


def _ways(
    push: Push, pull: Push, ratio: float | None, bits: int | None, entropy: bool
) -> tuple[Compressor, Compressor | None]:
    """What compresses on the way to the server, and on the way back; None there: nothing."""
    for name, given in (("push", push), ("pull", pull)):
        checks.one_of(name, given, get_args(Push))
    checks.flag("entropy", entropy)
    if entropy and push == pull == "dense":
        raise ConfigError(
            "entropy=True is for what is compressed, and push and pull are 'dense': write push='bf16', or "
            "leave it out"
        )
    for name, number, of in (("ratio", ratio, "topk"), ("bits", bits, "qsgd")):
        if number is not None and of not in (push, pull):
            raise ConfigError(
                f"{name}={number!r} is for push={of!r} or pull={of!r}, and they are {push!r} and {pull!r}: "
                "leave it out"
            )
    up, down = (_of(word, ratio, bits, entropy) for word in (push, pull))
    return up, None if pull == "dense" else down


def _of(word: Push, ratio: float | None, bits: int | None, entropy: bool) -> Compressor:
    if word == "topk":
        return ErrorFeedback(coded(TopK() if ratio is None else TopK(ratio=ratio), entropy))
    codec = values_of("fp32" if word == "dense" else word, bits if word == "qsgd" else None)
    codec = coded(codec, entropy and word != "dense")
    return ErrorFeedback(codec) if word in ("int8", "sign") else codec
