"""torch.distributed: real clusters, and the testbed."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor

from tacit.contracts import WORLD, Gather, Mean, Payload, Posted
from tacit.transports.wire import divide_, empty_message, nbytes, pack_, ring_gather, ring_mean, unpack

# torch 2.13 renamed it, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class _Now:
    """The answer of an axis with one rank: nothing is sent."""

    value: Any

    def on_done(self, call: Callable[[], None]) -> None:
        call()

    def answer(self) -> Any:
        return self.value


@dataclass(frozen=True)
class _Later:
    """A collective under way."""

    work: dist.Work
    read: Callable[[], Any]
    done: Callable[[], None]

    def on_done(self, call: Callable[[], None]) -> None:
        self.work.get_future().add_done_callback(lambda _: call())

    def answer(self) -> Any:
        self.work.get_future().value()  # raises what the backend raised
        self.done()
        return self.read()


@dataclass(eq=False)
class TorchTransport:
    """Collectives among `ranks` on process groups of our own, one for each stage of a conversation.

    One group for two stages would let bucket 2's first message and bucket 1's second change places between
    ranks. `open` makes the groups.

    Args:
        parent: the process group whose ranks take part.
        timeout: after which a collective that a peer does not join is an error.
    """

    parent: dist.ProcessGroup
    timeout: timedelta
    sent: int = 0
    """Bytes that this rank has sent, by the formulas of ring collectives."""
    under_way: int = 0
    """Collectives posted whose answers nobody has taken."""
    _groups: list[dist.ProcessGroup] = field(default_factory=list, repr=False)
    _messages: dict[tuple[str, int, int], Tensor] = field(default_factory=dict, repr=False)

    def open(self, stages: int) -> None:
        """Have process groups for exchanges that speak up to `stages` times. A collective call."""
        if self.peers() > 1:
            self._groups = _own_groups(self.parent, self.timeout, stages)
            _OPEN.add(self)

    def peers(self, axis: str = WORLD) -> int:
        """How many ranks take part."""
        return self.parent.size()

    def rank(self, axis: str = WORLD) -> int:
        """This rank's place among them."""
        return self.parent.rank()

    def post(self, request: Mean | Gather, stage: int, slot: str) -> Posted:
        """Start the collective; see `contracts.Transport`."""
        if self.peers() == 1:
            if isinstance(request, Mean):
                for tensor in request.payload:
                    divide_(tensor, 1, request.total)
            return _Now(request.payload if isinstance(request, Mean) else [request.payload])
        group = self._groups[stage]
        if isinstance(request, Gather):
            return self._gather(request.payload, group, (slot, stage, 0))
        return self._mean(request, group, (slot, stage, 1))

    def _mean(self, request: Mean, group: dist.ProcessGroup, key: tuple[str, int, int]) -> Posted:
        payload = request.payload
        self.sent += ring_mean(payload, self.peers())
        message = None
        if len(payload) == 1:
            flat = payload[0]
        else:
            message = self._message(key, payload, 1)
            pack_(payload, message)
            flat = message.view(payload[0].dtype)
        # Before the sum, as DDP does: the two then agree to the last bit.
        divide_(flat, self.peers(), request.total)
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None

        def read() -> Payload:
            if message is not None:
                for tensor, view in zip(payload, unpack(message, payload), strict=True):
                    tensor.copy_(view)
            return payload

        return self._later(work, read)

    def _gather(self, payload: Payload, group: dist.ProcessGroup, key: tuple[str, int, int]) -> Posted:
        self.sent += ring_gather(payload, self.peers())
        size = nbytes(payload)
        both = self._message(key, payload, self.peers() + 1)
        mine, all_ = both[:size], both[size:]
        pack_(payload, mine)
        work = _all_gather(all_, mine, group=group, async_op=True)
        assert work is not None
        return self._later(
            work, lambda: [unpack(all_[i : i + size], payload) for i in range(0, all_.numel(), size)]
        )

    def _later(self, work: dist.Work, read: Callable[[], Any]) -> Posted:
        self.under_way += 1
        return _Later(work, read, self._answered)

    def _answered(self) -> None:
        self.under_way -= 1

    def _message(self, key: tuple[str, int, int], like: Payload, copies: int) -> Tensor:
        size = copies * nbytes(like)
        message = self._messages.get(key)
        if message is None or message.numel() != size:
            message = self._messages[key] = empty_message(like, copies)
        return message

    def abort(self) -> None:
        """End every collective that is under way with an error; the groups are not used again."""
        for kept in _OWN.values():
            if any(group in self._groups for group in kept):
                kept.clear()
        for group in self._groups:
            abort(group)


def abort(group: dist.ProcessGroup) -> None:
    """End every collective of the group with an error."""
    for device in set(group._device_types):
        group._get_backend(device).abort()


_OWN: dict[tuple[object, ...], list[dist.ProcessGroup]] = {}
_OPEN: WeakSet[TorchTransport] = WeakSet()


@atexit.register
def _release() -> None:
    """Let the threads of our groups end while the interpreter lives.

    A thread of Gloo that returns from its last callback into an interpreter that is gone aborts the process.
    Groups that are still at work are left alone: to wait for them could take until their time-out.
    """
    if any(transport.under_way for transport in _OPEN):
        return
    for transport in _OPEN:
        transport._groups = []
    for kept in _OWN.values():
        while kept:
            group = kept.pop()
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)


def _own_groups(parent: dist.ProcessGroup, timeout: timedelta, count: int) -> list[dist.ProcessGroup]:
    """Process groups of the parent's ranks that nobody else uses, one session after another.

    They live until torch.distributed is shut down: a group that is made where another was destroyed would
    find the addresses of its dead in the store.
    """
    ranks, backend = dist.get_process_group_ranks(parent), dist.get_backend(parent)
    kept = _OWN.setdefault((tuple(ranks), timeout, backend), [])
    if any(group not in dist.distributed_c10d._world.pg_map for group in kept):
        kept.clear()
    whole = len(ranks) == dist.get_world_size()
    while len(kept) < count:
        kept.append(dist.new_group(ranks, timeout, backend, use_local_synchronization=not whole))
    return kept[:count]
