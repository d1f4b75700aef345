"""The requests that an exchange yields, and what each is answered.

A transport answers the collectives. A topology answers `ReduceEncoded`. `Grouped` holds several of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import Tensor

from tacit.contracts.common import SERVER, Payload, Spans

if TYPE_CHECKING:
    from tacit.contracts.compressor import OneShot, PayloadSpec
    from tacit.contracts.context import Context


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Answer: the peers' mean, tensor by tensor. The payload itself may be overwritten with it.

    All tensors have one type, as a transport adds them up in one message. Put several types into a `Grouped`
    of one `AllReduce` each.

    Where `total` is given, the transport adds to it a sum over this rank's own payload, which it passes over
    anyway: finite if all entries are, and their sum does not overflow.
    """

    payload: Payload
    axis: str = ""
    finite_probe: Tensor | None = None

    def __post_init__(self) -> None:
        types = {tensor.dtype for tensor in self.payload}
        assert len(types) < 2, f"a Mean of {types}: put each type into a Mean of its own, inside a Together"


@dataclass(frozen=True, slots=True)
class AllGather:
    """Answer: every peer's payload, in rank order. All peers send equal shapes."""

    payload: Payload
    axis: str = ""


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Answer: `x` (flat), in which this rank's own stretch now is the peers' mean (reduce-scatter).

    The other stretches are unspecified afterwards. `total` is as in `AllReduce`.
    """

    x: Tensor
    spans: Spans
    axis: str = ""
    finite_probe: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AllGatherInto:
    """Answer: `x` (flat), with every stretch as the peer has it whose stretch it is (all-gather).

    Where one peer has the whole, it is a broadcast.
    """

    x: Tensor
    spans: Spans
    axis: str = ""


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Answer: what every peer has for this rank, in rank order (all-to-all).

    `payloads`: one for each peer, in rank order; all peers' for one rank have equal shapes.
    """

    payloads: tuple[Payload, ...]
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Permute:
    """Answer: the payload of the peer that sends to this rank; None where none does.

    Two peers that send to each other swap; trees and gossip are made of it. All payloads have equal shapes,
    also that of a rank which only receives.

    `to`: for each peer, in rank order, the place of the one that gets its payload, or None; equal on all
    peers. Nobody gets two, nor what is its own.
    """

    payload: Payload
    to: tuple[int | None, ...]
    axis: str = ""

    def __post_init__(self) -> None:
        ends = [end for end in self.to if end is not None]
        assert len(ends) == len(set(ends)), f"to={self.to} gives somebody two payloads"
        assert all(
            end != i and end in range(len(self.to)) for i, end in enumerate(self.to) if end is not None
        )

    def comes_from(self, rank: int) -> int | None:
        """The place of the one that sends to `rank`."""
        return self.to.index(rank) if rank in self.to else None


@dataclass(frozen=True, slots=True)
class PushPull:
    """Answer: what the server has for this worker, a payload for each of `pulls`.

    Attributes:
        payloads: what is pushed, each as `pieces` says; with `do="pull"` nothing.
        pulls: how the answer is read.
        do: "push", and be answered; "pull" only; "meet": be answered when all workers have come so far.
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

    The topology encodes, all of `x` at once or stretch by stretch (`exchange.error_feedback.encoded`).

    Attributes:
        codec: encodes and decodes.
        x: what is to be averaged; flat; in the type that travels.
        residual: with error feedback, what earlier payloads have left out; multiplied as `ctx.rescale` says,
            it is added to `x`. May be of a wider type.
        new_residual: of the type of `residual`; holds in the end all of that sum that this payload leaves
            out.
    """

    codec: OneShot
    x: Tensor
    ctx: Context
    residual: Tensor | None = None
    new_residual: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Grouped:
    """Several requests at once, given to the topology as some are `ReduceEncoded`. Answer: theirs, in order.

    Like messages among what they become travel as one.
    """

    requests: tuple[Request, ...]


Collective: TypeAlias = AllReduce | AllGather | ReduceScatter | AllGatherInto | AllToAll | Permute | PushPull
"""What a transport can answer."""
Request: TypeAlias = "Collective | ReduceEncoded | Grouped"
