"""Ranks average with one neighbour at a time, without waiting for a step of others (AD-PSGD, WAGMA)."""

from __future__ import annotations

import random
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from tacit import checks
from tacit.contracts import (
    AdaptiveRounds,
    Compressor,
    Context,
    Exact,
    Exchange,
    Merge,
    Outcome,
    Overlap,
    PairTopology,
    PayloadSpec,
    PushPull,
    Request,
    Rounds,
    State,
)
from tacit.errors import ConfigError
from tacit.topologies.mixing import bits_of, check_group_size, global_rounds, group_size_for, is_global

RandomGraph: TypeAlias = Literal["complete", "ring", "exponential"]
PairGraph: TypeAlias = Literal["complete", "ring", "exponential", "butterfly"]


@dataclass(frozen=True)
class Pairs(PairTopology):
    """In each round even ranks ask one random odd neighbour; the two become their mean (AD-PSGD).

        x_i, x_j <- (x_i + x_j) / 2

    Each rank keeps its parameters x in a store, in addition to those that it trains. Its steps are added to
    x, and it goes on from x. An odd rank's store answers in a separate thread, at any time of its training.
    So an even rank waits for a message and its answer, never for a step, and an odd one for nothing. Bytes:
    of n, an even rank sends n a round, and an odd one n each time that it is asked.

    The mean is atomic: the odd rank moves by d = (x_i - x_j) / 2 at one moment, and the even one by -d when d
    comes back. Between the two only its steps move the even rank's x, as no rank asks it: they are added to
    the mean. So the sum of the two is preserved up to rounding, in any order, and no two ranks ever wait for
    each other. Lian et al., ICML 2018 (arXiv 1710.06952), which cuts the ranks into an active and a passive
    set for the same two reasons.

    Each partner is drawn equally often. With an even number of ranks, those that have taken equally many
    rounds draw different ones, so that equally fast ranks do not share one link.

    In a butterfly nothing is drawn. In its turn t a rank averages with the one whose number differs in bit t,
    cyclically, and a round has log2(S) turns: ranks in step thus take the mean of groups of S, as `Groups`
    does. From one that is late, or ahead, the present value of its store is taken. So a group waits for no
    rank
    (WAGMA: Li et al., arXiv 2005.00124). The ranks whose number has an even number of bits set ask.

    Attributes:
        graph: the ranks that an even rank may ask. "complete": any odd rank. "ring": both neighbours.
            "exponential": the ranks at distances 1, 3, 5, 9, 17, ... These two need an even number of ranks.
            "butterfly": those of its groups, for a power of two of ranks.
        allow_lost: leave out a rank that is gone, and log it. Otherwise that is a `PeerLost`.
        group_size: S, a power of two, above 2 for a butterfly only. None: the one nearest to the square root
            of the number of ranks.
        global_every: in every so many-th round all ranks wait for each other, and take the mean of all; 0:
            never. All of them must take equally many steps then.
    """

    graph: PairGraph = "complete"
    allow_lost: bool = False
    group_size: int | None = 2
    global_every: int = 0

    def __post_init__(self) -> None:
        checks.one_of("graph", self.graph, get_args(PairGraph))
        checks.flag("allow_lost", self.allow_lost)
        checks.whole("global_every", self.global_every, 0, None, "write 0 for never")
        check_group_size(self.group_size)
        if self.graph != "butterfly" and self.group_size != 2:
            raise ConfigError(
                f"group_size={self.group_size} with graph={self.graph!r} is not possible, as only a "
                "butterfly has larger groups: write graph='butterfly', or leave group_size out"
            )

    @property
    def averages(self) -> bool:
        """False: it keeps the parameters."""
        return False

    @property
    def counts_all(self) -> bool:
        """True: no step is dropped or divided."""
        return True

    @property
    def has_feedback(self) -> bool:
        """False: whole parameters come back."""
        return False

    def partners(self, rank: int, peers: int) -> tuple[int, ...]:
        if self.graph == "butterfly":
            group_size_for(self.group_size, peers)
            bits = bits_of(peers, "graph='butterfly'", "graph='complete' (or attach adpsgd)")
            return () if rank.bit_count() % 2 else tuple(rank ^ 1 << bit for bit in range(bits))
        if self.graph != "complete" and peers % 2 and peers > 1:
            raise ConfigError(
                f"graph={self.graph!r} with {peers} ranks is not possible: ranks that ask and ranks that "
                "answer take turns around it, and an odd number of them cannot. Write graph=complete, or "
                f"train with {peers - 1} or {peers + 1} ranks"
            )
        if rank % 2:
            return ()
        if self.graph == "complete":
            return tuple(range(1, peers, 2))
        steps = (1, peers - 1) if self.graph == "ring" else _odd_distances(peers)
        return tuple(dict.fromkeys((rank + step) % peers for step in steps if peers > 1))

    def partner(self, rank: int, peers: int, turn: int, seed: int, lost: Collection[int] = ()) -> int | None:
        partners = [*self.partners(rank, peers)]
        if self.graph == "butterfly":
            other = partners[turn % len(partners)] if partners else None
            return None if other in lost else other
        random.Random(f"{seed}/{turn}").shuffle(partners)  # on all ranks alike
        first = rank // 2 if self.graph == "complete" else 0
        inturn = (partners[(first + i) % len(partners)] for i in range(len(partners)))
        return next((each for each in inturn if each not in lost), None)

    def turns(self, peers: int) -> int:
        return group_size_for(self.group_size, peers).bit_length() - 1 if self.graph == "butterfly" else 1

    def admit(self, subject: str, rounds: Rounds, merge: Merge, overlap: Overlap) -> None:
        """Require deltas, and rounds that do not depend on other ranks."""
        if subject != "delta":
            raise ConfigError(f"subject={subject!r} with {self} is not possible: write subject='delta'")
        if rounds.phased or isinstance(rounds, AdaptiveRounds):
            raise ConfigError(
                f"rounds={rounds} are agreed on by all ranks, and with {self} nobody waits for others: write "
                "Every(1)"
            )

    def summary(self, compressors: Sequence[Compressor]) -> str:
        """A few words on the graph."""
        pairs = (
            "groups of a butterfly" if self.graph == "butterfly" else f"random pairs in {self.graph} graph"
        )
        return f"{pairs}{global_rounds(self.global_every)}"

    def collectives(self, compressors: Sequence[Compressor]) -> str:
        return "messages between two ranks at a time"

    def check(self, compressor: Compressor) -> None:
        """Refuse lossy compressors: the mean of rounded values is not the mean of the two."""
        super().check(compressor)
        one_shot = compressor.one_shot(0)
        x = torch.zeros(1, dtype=torch.float32)
        exact = (
            one_shot is not None
            and not one_shot.has_feedback
            and one_shot.codec.additive
            and one_shot.codec.inline
            and isinstance(one_shot.codec.sent((x,), x), Exact)
        )
        if not exact:
            raise ConfigError(
                f"compressor={compressor} with {self} is not possible, as two ranks' parameters are averaged "
                "whole: write compressor=Dense()"
            )

    def fields(self, compressor: Compressor) -> tuple[str, ...]:
        self.check(compressor)
        return ()

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Add this rank's steps to its store, and take the store's parameters after the round's average."""
        if not x.is_meta and ctx.knows_of_nonfinite:
            return Outcome(x, Exact(x), state)  # nothing is pushed: the session reports what is not finite
        whole = self.back(x)
        do: Literal["push", "meet"] = "meet" if is_global(self.global_every, ctx) else "push"
        (answer,) = yield PushPull(((x,),), (whole,), (whole,), do, lr=ctx.lr)
        ctx.out.copy_(answer[0])
        return Outcome(ctx.out, Exact(x), state)

    def agree(self, x: Tensor) -> Generator[Request, Any, None]:
        """Wait until all ranks have arrived, and take the mean of their stores."""
        (answer,) = yield PushPull((), (), (self.back(x),), do="meet")
        x.copy_(answer[0])

    def back(self, x: Tensor) -> PayloadSpec:
        """The format of a bucket's parameters: uncompressed."""
        return PayloadSpec(None, x.numel(), x.dtype)


def _odd_distances(peers: int) -> tuple[int, ...]:
    """1, 3, 5, 9, 17, ...: from an even rank to odd ones."""
    return (1, *(1 + (1 << k) for k in range(1, peers.bit_length()) if 1 + (1 << k) < peers))
