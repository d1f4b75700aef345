"""The requests that an exchange yields, and the answer to each.

A transport answers the collectives. A topology answers `ReduceEncoded`. `Grouped` holds several of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import Tensor

from tacit.contracts.common import SERVER, Payload, Spans

if TYPE_CHECKING:
    from tacit.contracts.compressor import OneShot, PayloadSpec
    from tacit.contracts.context import Context


_DTYPE = attrgetter("dtype")


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Answer: the peers' mean, tensor by tensor. The payload itself may be overwritten with it.

    All tensors have one type, as a transport adds them up in one message. Put several types into a `Grouped`
    of one `AllReduce` each.

    If there is a `finite_probe` (one element), the transport adds the sum of this rank's payload to it. The
    result is finite only if all entries are.
    """

    payload: Payload
    axis: str = ""
    finite_probe: Tensor | None = None

    def __post_init__(self) -> None:
        types = {*map(_DTYPE, self.payload)}
        assert len(types) < 2, f"an AllReduce of {types}: write one AllReduce for each type, in a Grouped"


@dataclass(frozen=True, slots=True)
class AllGather:
    """Answer: every peer's payload, in rank order. All peers send equal shapes."""

    payload: Payload
    axis: str = ""


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Answer: `x` (flat), in which this rank's span now holds the peers' mean (reduce-scatter).

    The other spans are unspecified afterwards. `finite_probe` is as in `AllReduce`.
    """

    x: Tensor
    spans: Spans
    axis: str = ""
    finite_probe: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AllGatherInto:
    """Answer: `x` (flat), in which every span holds the entries of the peer that owns it (all-gather).

    If one peer owns all of `x`, this is a broadcast.
    """

    x: Tensor
    spans: Spans
    axis: str = ""


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Answer: the payloads that the peers addressed to this rank, in rank order (all-to-all).

    `payloads`: one for each peer, in rank order. All payloads addressed to one rank have equal shapes, unless
    `arriving` says which: for each peer, a payload of the shapes and types of what that one sends here. Its
    values are not looked at.
    """

    payloads: tuple[Payload, ...]
    axis: str = ""
    arriving: tuple[Payload, ...] = ()


@dataclass(frozen=True, slots=True)
class Permute:
    """Answer: the payload of the peer that sends to this rank; None where none does.

    For exchanges in pairs, trees and gossip, and for schedules of an all-reduce. The payload is not changed
    until the answer is there.

    `to`: for each peer, in rank order, the rank on the axis that receives its payload, or None. Equal on all
    peers. No rank receives two payloads, or its own.

    `into`: where what arrives is written; it is then the answer. Where nothing arrives it is left alone.
    Where a rank gives none, all payloads have equal shapes, also that of a rank which only receives.
    """

    payload: Payload
    to: tuple[int | None, ...]
    axis: str = ""
    into: Payload = ()

    def __post_init__(self) -> None:
        ends = [end for end in self.to if end is not None]
        assert len(ends) == len(set(ends)), f"to={self.to} sends two payloads to one rank"
        assert all(
            end != i and end in range(len(self.to)) for i, end in enumerate(self.to) if end is not None
        )

    def comes_from(self, rank: int) -> int | None:
        """The rank on the axis that sends to `rank`; None if no rank does."""
        return self.to.index(rank) if rank in self.to else None

    @property
    def arriving(self) -> Payload:
        """Tensors of the shapes of what arrives."""
        return self.into or self.payload


@dataclass(frozen=True, slots=True)
class PushPull:
    """Answer: the server's payloads for this worker, one for each of `pulls`.

    Attributes:
        payloads: what is pushed, in the formats of `pieces`; empty with `do="pull"`, and where nothing is
            pushed before all meet.
        pulls: the formats of the answer.
        do: "push": push and pull. "pull": pull only. "meet": pull once all workers have asked (a barrier).
        lr: the learning rate of this step, for a server that applies what is pushed.
    """

    payloads: tuple[Payload, ...]
    pieces: tuple[PayloadSpec, ...]
    pulls: tuple[PayloadSpec, ...]
    do: Literal["push", "pull", "meet"] = "push"
    lr: float = 0.0
    axis: str = SERVER


@dataclass(frozen=True, slots=True)
class ReduceEncoded:
    """Answer, by the topology and never by a transport: `(mean, transmitted)`; the mean is in `ctx.out`.

    The topology encodes `x` whole, or span by span (`exchange.error_feedback.encoded`).

    Attributes:
        codec: encodes and decodes.
        x: what is to be averaged; flat, in the type that is sent.
        residual: with error feedback, the error of earlier payloads, of the shape of `x`. It is multiplied by
            the factors of `ctx.rescale` and added to `x`. May be of a wider type.
        new_residual: of the type of `residual`; overwritten by that sum less what this payload encodes.
        has_mean_feedback: whether what a compressed mean leaves out is added to the next mean.
    """

    codec: OneShot
    x: Tensor
    ctx: Context
    residual: Tensor | None = None
    new_residual: Tensor | None = None
    has_mean_feedback: bool = False


@dataclass(frozen=True, slots=True)
class Grouped:
    """Several independent requests. Answer: their answers, in order.

    Messages of the same kind that result from them are sent as one.
    """

    requests: tuple[Request, ...]


Collective: TypeAlias = AllReduce | AllGather | ReduceScatter | AllGatherInto | AllToAll | Permute | PushPull
"""The requests that a transport answers."""


def staged_on(kind: str, axis: str) -> str:
    """The name under which stages of this class of requests are counted; `Permute` has one for itself.

    A `Permute` needs no process group of its own, however many follow each other.
    """
    return f"{axis}/Permute" if kind == Permute.__name__ else axis


def stage_of(request: Collective) -> str:
    """The name under which the stages of this request are counted; see `staged_on`."""
    return f"{request.axis}/Permute" if isinstance(request, Permute) else request.axis


Request: TypeAlias = "Collective | ReduceEncoded | Grouped"
