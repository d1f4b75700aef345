"""The collectives that an exchange asks for, the answer to each, and the flags that ranks send beside."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tacit.contracts.common import Payload, Spans


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
    `arriving` says which: for each peer, a payload of the shapes and types that this peer sends here. Its
    values are not read.
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
    peers. No rank receives two payloads, or one from itself.

    `into`: the tensors that what arrives is written to; they are then the answer. Where nothing arrives they
        are left alone. Where a rank gives none, all payloads have equal shapes, also that of a rank which
        only receives.
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
class Flags:
    """Numbers that are averaged with an exchange's first message; made by `flags`, once.

    Attributes:
        mean: all of them.
        part: what travels inside a gather: of `owned` this rank's part alone. P numbers of each of P peers
            would be more than all gradients, for thousands of ranks.
        owned: the spans of which each rank of the axis has an equal part, in rank order, that is 0 on all
            others.
        shared: what is between them.
    """

    numbers: Tensor
    mean: AllReduce
    part: AllReduce | AllGather
    owned: Spans
    shared: Payload


def flags(numbers: Tensor, owned: Spans = (), rank: int = 0, peers: int = 1) -> Flags:
    """The flags of this rank among so many peers; see `Flags`."""
    mean = AllReduce((numbers,))
    if not owned:
        return Flags(numbers, mean, mean, (), ())
    mine, shared, before = [], [], 0
    for start, stop in owned:
        each = (stop - start) // peers
        mine.append(numbers[start + rank * each : start + (rank + 1) * each])
        if start > before:
            shared.append(numbers[before:start])
        before = stop
    if before < numbers.numel():
        shared.append(numbers[before:])
    return Flags(numbers, mean, AllGather((*mine, *shared)), owned, tuple(shared))
