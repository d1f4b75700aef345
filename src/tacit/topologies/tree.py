"""Sparse messages merged along a tree; after each merge only the largest entries are kept (gTop-k)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from tacit.contracts import (
    WORLD,
    Compressor,
    Context,
    Exchange,
    OneShot,
    Payload,
    Permute,
    ReduceEncoded,
    Request,
    State,
    Topology,
    Transmitted,
)
from tacit.errors import ConfigError
from tacit.exchange.error_feedback import encoded
from tacit.exchange.joined_requests import conducted
from tacit.kernels.dispatch import on_host
from tacit.kernels.entry_buffers import EntryBuffer, Selection
from tacit.kernels.merge import common_positions, keep_arrived, merge_largest
from tacit.kernels.payload_layout import position_bytes
from tacit.kernels.positions import clear_, pack_positions, scatter_add_, unpack_positions
from tacit.topologies.flat import codecs_in, reduce_flat

Ends: TypeAlias = tuple[int | None, ...]
"""For each rank, the rank that its payload is sent to; see `contracts.Permute`."""


@dataclass(frozen=True)
class GlobalTopK(Topology):
    """Ranks swap their k entries with one peer after another, add them, and keep the k largest each time.

    With P = 2^m ranks, m swaps: the first with the neighbour, the next two ranks away, then four (recursive
    doubling). A rank sends m payloads of k entries, s bytes each, where an all-gather costs (P - 1) s. What
    remains is a set of k entries, the same on all ranks to the last bit; of equal magnitudes the first ones.
    Where P = 2^m + e, the last e ranks swap with the first e before that, and afterwards get the
    result and ceil(k / 8) bytes more: the first e send m + 2 payloads, the last e one.

    An entry counts as sent if every merge on this rank's path has kept it, as its whole value is then in the
    mean; under `ErrorFeedback` all others stay in the residual. Entries that are large, of opposite signs, on
    two ranks may be sent and rejected in every round, as long as they are small in the sum.

    Shi et al., ICDCS 2019 (arXiv 1901.04359), gTopKAllReduce. Differences: the paper merges the same pairs
    towards rank 0, which broadcasts the result; that is 2 m steps in place of m, with 2 (P - 1) s bytes in
    all in place of P m s, and as many from the rank that sends most. An entry that was rejected in one merge
    and arrives from other ranks counts there as sent by all; the first ranks' part of it is lost.

    For compressors that send exact entries, such as `TopK`; additive requests in the same exchange
    (biases sent dense) become all-reduces.
    """

    on_device: ClassVar[bool] = True

    def summary(self, compressors: Sequence[Compressor]) -> str:
        """A few words on its swaps."""
        return "a tree"

    def check(self, compressor: Compressor) -> None:
        """Refuse codecs whose entries cannot be merged, and compressors that send no entries."""
        super().check(compressor)
        codecs = [*codecs_in(compressor)]
        for codec in codecs:
            _entries(codec, 1)
        if all(codec.additive for codec in codecs):
            raise ConfigError(
                f"compressor={compressor} sends no entries that GlobalTopK could merge: write "
                "ErrorFeedback(TopK()), or topology=Flat()"
            )

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """The compressor's exchange; each `ReduceEncoded` of entries becomes a sequence of swaps."""
        # The flags travel with the compressor's requests, so that they join those that become an `AllReduce`.
        exchange = conducted(compressor.exchange(x, state, ctx), flags=ctx.nonfinite_flags)
        return conducted(exchange, WORLD, _reduce, finite_probe=ctx.finite_probe)


def _entries(codec: OneShot, numel: int) -> int | None:
    """The number of entries that the codec sends; None if its payloads are additive."""
    if codec.additive:
        return None
    if (count := codec.exact_entries(numel)) is not None:
        return count
    raise ConfigError(
        f"{codec} does not send exact entries, so that GlobalTopK cannot add up and choose among "
        "them: write TopK(ratio=...) with values=Dense(), or topology=Flat()"
    )


# ---- swaps -----------------------------------------------------------------------------------


def reduce_steps(peers: int) -> list[Ends]:
    """The swaps of each step, until the first 2^m ranks have merged the entries of all."""
    core = 1 << peers.bit_length() - 1
    pairs = [_swap(core, step, peers) for step in (1 << i for i in range(core.bit_length() - 1))]
    return pairs if core == peers else [_fold(peers), *pairs]


def _swap(core: int, step: int, peers: int) -> Ends:
    return tuple(rank ^ step if rank < core else None for rank in range(peers))


def _fold(peers: int) -> Ends:
    core = 1 << peers.bit_length() - 1
    return tuple(
        rank - core if rank >= core else rank + core if rank + core < peers else None for rank in range(peers)
    )


def result_step(peers: int) -> Ends:
    """The last step: the ranks of the core send the result to the others; empty if P is a power of two."""
    core = 1 << peers.bit_length() - 1
    return tuple(end if rank < core else None for rank, end in enumerate(_fold(peers)))


# ---- one reduction ------------------------------------------------------------------------------------


def _reduce(request: ReduceEncoded) -> Generator[Request, Any, tuple[Tensor, Transmitted]]:
    k = _entries(request.codec, request.x.numel())
    if k is None:
        return (yield from reduce_flat(request))
    buffers, payload = _MergeBuffers(request, k), encoded(request)
    mine = buffers.read(payload, "mine")
    whole, arrived = yield from _merged(buffers, mine, payload, request.ctx.peers)
    out = request.ctx.out.zero_()
    scatter_add_(whole.positions, whole.values, out, 1 / request.ctx.peers)
    return out, _Arrived(*keep_arrived(mine, arrived, buffers.room("sent"), request.new_residual))


@dataclass(frozen=True, slots=True)
class _Arrived(Transmitted):
    """The entries that every merge has kept; on a device, those at -1 are none."""

    positions: Tensor
    values: Tensor

    def subtract_from_(self, new_residual: Tensor) -> None:
        scatter_add_(self.positions, self.values, new_residual, -1.0)

    def clear_(self, x: Tensor) -> None:
        clear_(self.positions, x)

    def dense(self, like: Tensor) -> Tensor:
        out = torch.zeros_like(like)
        scatter_add_(self.positions, self.values, out)
        return out


def _merged(
    buffers: _MergeBuffers, mine: Selection, payload: Payload, peers: int
) -> Generator[Request, Any, tuple[Selection, Tensor]]:
    """The k entries that all ranks keep, and which of them every merge on this rank's path has kept.

    Both ranks of a swap, and all with the entries of either, compute the same merge: so each knows, without a
    message, which of its entries were kept.
    """
    whole, arrived, places = mine, mine.positions, mine.positions
    for round_index, ends in enumerate(reduce_steps(peers)):
        theirs = yield Permute(payload, ends)
        if theirs is None:  # this rank has no peer in this step
            continue
        merged = merge_largest(
            whole, buffers.read(theirs, "theirs"), buffers.k, buffers.room(f"merged{round_index % 2}", 2)
        )
        before = merged.positions if whole is mine else arrived
        arrived, places = common_positions(before, merged.positions, *buffers.lists)
        whole, payload = merged, buffers.payload(merged)
    ends = result_step(peers)
    if any(end is not None for end in ends):
        result = yield Permute((*payload, buffers.marks(places)), ends)
        if result is not None:
            whole, arrived = buffers.result(result)
    return whole, arrived


class _MergeBuffers:
    """Buffers for the entries of one reduction, and their packed form."""

    def __init__(self, request: ReduceEncoded, k: int) -> None:
        self._x, self._ctx, self.k = request.x, request.ctx.inside("tree"), k
        self.lists = self._places("arrived", k), self._places("places", k)

    def room(self, name: str, lists: int = 1) -> EntryBuffer:
        """A buffer for one or two lists of k entries."""
        count = lists * self.k
        values = self._ctx.scratch(f"{name}.values", self._x, (count,), self._x.dtype)
        return EntryBuffer(self._places(name, count), values)

    def read(self, payload: Payload, name: str) -> Selection:
        """Decode the entries of a payload into buffers named `name`."""
        values, packed = payload[:2]
        room = self._places(name, self.k + 1)
        at = unpack_positions(packed, self._x.numel(), self.k, room)
        return Selection(at, values[: at.numel()])

    def payload(self, entries: Selection) -> Payload:
        """The payload of these entries: (values, positions), always of the same shapes."""
        packed = self._bytes("packed", position_bytes(self._x.numel(), self.k))
        pack_positions(entries.positions, self._x.numel(), self.k, packed)
        return entries.values.as_strided((self.k,), (1,)), packed

    def marks(self, places: Tensor) -> Tensor:
        """Indices among k entries, as one bit each."""
        bits = self._bytes("marks", position_bytes(self.k, self.k))
        pack_positions(places, self.k, self.k, bits)
        return bits

    def result(self, payload: Payload) -> tuple[Selection, Tensor]:
        """The result, and which of its entries every merge has kept."""
        whole = self.read(payload, "theirs")
        places = unpack_positions(payload[2], self.k, self.k, self._places("marked", self.k + 1))
        at = self._places("told", self.k)[: places.numel()]
        if at.is_meta:
            return whole, at
        if on_host(at):
            return whole, torch.index_select(whole.positions, 0, places, out=at)
        return whole, torch.where(places < 0, -1, whole.positions[places.clamp(min=0)])

    def _places(self, name: str, count: int) -> Tensor:
        return self._ctx.scratch(name, self._x, (count,), torch.int32)

    def _bytes(self, name: str, count: int) -> Tensor:
        return self._ctx.scratch(name, self._x, (count,), torch.uint8)
