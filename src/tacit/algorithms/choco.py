"""CHOCO-SGD: gossip by compressed differences to public copies (Koloskova, Stich & Jaggi, ICML 2019).

arXiv 1902.00340; for deep learning, Koloskova, Lin, Stich & Jaggi, ICLR 2020, arXiv 1907.09356.

The algorithm on each worker i, in the form that keeps two vectors (1902.00340, algorithm 6):    here:
    x_i^(t+1/2) <- x_i^t - eta * g_i                               the user's optimizer
    q_i <- Q(x_i^(t+1/2) - public_i)                               PublicCopy, by any one-shot codec
    send q_i to the neighbours, and receive theirs                 Gossip
    public_i <- public_i + q_i                                     PublicCopy: its state
    s_i <- s_i + sum_j w_ij q_j                                    PublicCopy: its state, `neighbours`
    x_i^(t+1) <- x_i^(t+1/2) + gamma * (s_i - public_i)            PublicCopy: the answer, which Mix applies

With `late=1` the answer is applied a step later, on top of that step. Then a message travels while a step is
computed, as in the form for deep learning, which moves by the copies of the round before.

Differences from the paper: public copies begin where all replicas are equal, at the anchor, and not at 0, and
`session.sync()` sets them there again. Parameters of fewer than two dimensions are sent densely with top-k
and sign, and averaged with the neighbours at once. Top-k chooses over a whole bucket.

The default gammas are ours, from a quadratic of 2,048 entries on a ring of 4: of 0.02, 0.05, 0.1, 0.3, 0.5
and 1, top-k of 1 % is best at 0.05 and diverges from 0.3 on; sign and QSGD take them all. Smaller is safer.

Any other one-shot codec, and any doubly stochastic matrix, as a value:

    Strategy(subject="delta", compressor=PublicCopy(Natural(), gamma=0.5), topology=Gossip(W), merge=Mix())
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from tacit import checks
from tacit.algorithms.gossip import mixing
from tacit.algorithms.options.codecs import values_of
from tacit.algorithms.registry import algorithm
from tacit.compressors import PublicCopy, TopK
from tacit.contracts import OneShot
from tacit.errors import ConfigError
from tacit.strategy import Buffers, Strategy
from tacit.topologies import Gossip

Codec: TypeAlias = Literal["topk", "sign", "qsgd", "int8"]
"""What compresses a difference: the largest entries, a bit, 4 bits, or 8 bits an entry."""
Fixed: TypeAlias = Literal["ring", "exponential", "complete"]
"""The graphs of `Gossip` that are the same in all rounds."""

_RATIO = 0.01
_GAMMA: dict[str, float] = {"topk": 0.05, "sign": 0.5, "qsgd": 0.5, "int8": 0.5}


def check_fixed(graph: str) -> None:
    """Refuse a graph that is not the same in all rounds, by name.

    Raises:
        ConfigError: it is none of `Fixed`.
    """
    checks.one_of("graph", graph, get_args(Fixed))


def codec_of(codec: str, ratio: float | None) -> OneShot:
    """What compresses a difference; `ratio`: the share of the entries that "topk" sends, None: 1 %.

    Raises:
        ConfigError: there is no such word, or it sends all entries.
    """
    checks.one_of("codec", codec, get_args(Codec))
    if codec == "topk":
        return TopK(ratio=_RATIO if ratio is None else ratio)
    if ratio is not None:
        raise ConfigError(f"ratio={ratio!r} is for codec='topk', and codec={codec!r}: leave one of them out")
    return values_of(codec, None)


@algorithm(
    family="gossip",
    paper="CHOCO-SGD: Koloskova et al. 2019, arXiv 1902.00340",
    compresses=True,
    changes="as gossip; compressed differences travel, by which neighbours keep track of each replica",
)
def choco(
    ratio: float | None = None,
    codec: Codec = "topk",
    gamma: float | None = None,
    graph: Fixed = "ring",
    sync_every: int = 1,
    late: int = 0,
    buffers: Buffers = "on_sync",
) -> Strategy:
    """Move by `gamma` towards what is known of the neighbours; differences are sent by `codec`."""
    check_fixed(graph)
    inner = codec_of(codec, ratio)
    compressor = PublicCopy(inner, _GAMMA[codec] if gamma is None else gamma)
    return mixing(Gossip(graph), sync_every, late, buffers, compressor)
