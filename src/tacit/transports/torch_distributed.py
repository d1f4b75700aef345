"""The transport by torch.distributed: on real clusters, and on the testbed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.contracts import (
    NODE,
    WORLD,
    AllGather,
    AllGatherInto,
    AllReduce,
    AllToAll,
    AxisRank,
    Collective,
    Payload,
    Permute,
    Posted,
    PushPull,
    ReduceScatter,
    Spans,
)
from tacit.exchange.finite_checks import divide_, probe_
from tacit.exchange.joined_requests import mean_in_few_launches_
from tacit.torch_compat import copy_each_
from tacit.transports import pairwise_all_to_all, permute, process_groups
from tacit.transports.message_layout import (
    AT_ONCE,
    IN_ROUNDS,
    Slots,
    empty_message,
    nbytes,
    pack_,
    ring_bytes,
    unpack,
)
from tacit.transports.pairwise_all_to_all import Pairwise, Sizes
from tacit.transports.permute import Waiters
from tacit.transports.started_collectives import Later, Now

_LEAST_PART = 1 << 18
"""Of a message that is cut for several connections; entries."""


@dataclass(eq=False)
class TorchTransport:
    """Collectives among replicas, on separate process groups: one for each axis and stage of an exchange.

    With one group for two stages, bucket 2's first message and bucket 1's second could be posted in another
    order on each rank. `open` makes the groups.

    Args:
        parent: the process group whose ranks are the replicas.
        timeout: after which a collective that a peer does not join is an error.
        nodes: which replicas (counted from 0 in the parent) share a node; all nodes have equally many.
            Without it there is no axis but the world.
        backend: of the groups; by default the parent's.
        in_order: whether a collective counts as done when it has been launched, as on a CUDA stream (NCCL).
            All are then launched by the calling thread, on its current stream, in one group an axis: with two
            threads, or several groups in different orders, ranks could wait for each other for ever.
    """

    parent: dist.ProcessGroup
    timeout: timedelta
    nodes: Sequence[Sequence[int]] = ()
    backend: str = ""
    in_order: bool = False
    sent: int = 0
    """Bytes that this rank has sent, by the formulas of ring collectives."""
    under_way: dict[Later, dist.ProcessGroup] = field(default_factory=dict, repr=False)
    """Posted collectives whose answers have not been read, and the group of each."""
    _failure: BaseException | None = field(default=None, repr=False)
    _groups: dict[tuple[str, int], dist.ProcessGroup] = field(default_factory=dict, repr=False)
    _messages: dict[tuple[object, ...], Tensor] = field(default_factory=dict, repr=False)
    _slotted: dict[tuple[object, ...], Slots] = field(default_factory=dict, repr=False)
    _places: dict[str, AxisRank] = field(default_factory=dict, repr=False)
    _waiters: Waiters = field(default_factory=Waiters, repr=False)
    _exchanges: Counter[dist.ProcessGroup] = field(default_factory=Counter, repr=False)
    _joined: set[dist.ProcessGroup] = field(default_factory=set, repr=False)
    _spread: bool | None = None
    _relayed: bool = False
    _homes: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    _connections: int = 1

    def open(self, stages: Mapping[str, int]) -> None:
        """Make process groups for exchanges with this number of collectives on each axis. A collective call.

        It may be called again when nothing is under way; buffers of messages are freed then.
        """
        self._messages.clear()
        self._slotted.clear()
        self._relayed = process_groups.is_relayed(self.parent)
        if self._spread is None:
            self._spread = self._is_spread()
        channel = process_groups.channel_of(self)
        for axis, count in stages.items():
            ranks = self.ranks(axis)
            if len(ranks) > 1 or ALONE_TOO:
                backend = self.backend or process_groups.backend_of(self.parent)
                count = 1 if self.in_order else count
                use = (channel, axis)
                timeout = self.timeout + LATER * self.in_order
                self._connections = 1 if self.in_order else process_groups.connections()
                groups = process_groups.own_groups(
                    self.parent, ranks, timeout, backend, use, count, self._connections
                )
                self._groups |= {(axis, stage): group for stage, group in enumerate(groups)}

    def close(self) -> None:
        """Free the groups for the next transport; after a failure they are not used again."""
        process_groups.leave(self)
        if self._failure is not None and not self.in_order:
            posted = [*self.under_way.items()]
            groups = self._groups.values()
            process_groups.retire({each: [later for later, at in posted if at is each] for each in groups})
            self.under_way.clear()
        self._exchanges.clear()
        self._groups = {}
        self._waiters.close()

    def ranks(self, axis: str) -> list[int]:
        """The replicas that share the axis with this one, in order."""
        if axis == WORLD:
            return list(range(self.parent.size()))
        me = self.parent.rank()
        node = next(node for node in self.nodes if me in node)
        return list(node) if axis == NODE else [other[node.index(me)] for other in self.nodes]

    def place(self, axis: str = WORLD) -> AxisRank:
        """This rank's position on the axis."""
        if axis not in self._places:
            ranks = self.ranks(axis)
            self._places[axis] = AxisRank(ranks.index(self.parent.rank()), len(ranks))
        return self._places[axis]

    def global_rank(self, replica: int) -> int:
        """The replica's rank in `torch.distributed`."""
        return process_groups.ranks_of(self.parent)[replica]

    def post(self, request: Collective, stage: int, key: str) -> Posted:
        """Start the collective; see `contracts.Transport`."""
        assert not isinstance(request, PushPull), "a server was asked, and there is none"
        place = self.place(request.axis)
        sent = ring_bytes(request, place)
        if place.peers == 1 and not ALONE_TOO:
            return Now(_alone(request), sent)
        self.sent += sent
        group: Any = self._groups[request.axis, 0 if self.in_order or isinstance(request, Permute) else stage]
        if self._relayed:
            group.says(request, key, stage, self._homes)
        match request:
            case AllReduce():
                posted = self._all_reduce(request, group, (key, request.axis, stage))
            case AllGather():
                posted = self._all_gather(request, place, group, (key, request.axis, stage))
            case ReduceScatter():
                posted = self._reduce_scatter(request, place, group, (key, request.axis, stage))
            case AllGatherInto(x, spans):
                posted = self._all_gather_into(x, spans, place, group)
            case AllToAll():
                posted = self._all_to_all(request, place, group, (key, request.axis, stage))
            case Permute():
                posted = self._permute(request, place, group, stage, key)
        posted.sent = sent
        return posted

    def _permute(
        self, request: Permute, place: AxisRank, group: dist.ProcessGroup, stage: int, key: str
    ) -> Posted:
        """Post it in `group`, the axis' first whatever its stage: tags identify messages."""

        def message(part: str, like: Payload) -> Tensor:
            return self._message((key, request.axis, stage, part), like, 1)

        if self.in_order:
            if group not in self._joined:  # NCCL connects in a group's first collective, which all must join
                one = torch.zeros(1, device=request.payload[0].device, dtype=torch.float32)
                dist.all_reduce(one, group=group)
                self._joined.add(group)
            return self._later([], permute.in_stream(request, place, group, message), group)
        works, read = permute.posted(request, place, group, stage, message)
        return self._under_way([self._waiters.wait(works)], read, group) if works else Now(read())

    def _all_reduce(self, request: AllReduce, group: dist.ProcessGroup, key: tuple[object, ...]) -> Posted:
        payload = request.payload
        message = None
        if len(payload) == 1:
            flat = payload[0]
        else:
            message = self._message(key, payload, 1)
            pack_(payload, message)
            flat = message.view(payload[0].dtype)
        # Divided before the sum, as in DDP: both then agree to the last bit.
        divide_(flat, group.size(), request.finite_probe)
        parts: Sequence[Tensor] = (flat,)
        if self._connections > 1:  # one message travels by one of them
            parts = torch.split(flat.view(-1), max(_LEAST_PART, -(-flat.numel() // self._connections)))
        works = [dist.all_reduce(part, group=group, async_op=not self.in_order) for part in parts]

        def read() -> Payload:
            if message is not None:
                copy_each_([*payload], [*unpack(message, payload)])
            return payload

        return self._later(works, read, group)

    def _all_gather(
        self, request: AllGather, place: AxisRank, group: dist.ProcessGroup, key: tuple[object, ...]
    ) -> Posted:
        payload, peers = request.payload, place.peers
        direct = not self.in_order and (request.axis != WORLD or bool(self._spread))
        at_once = direct and nbytes(payload) <= AT_ONCE
        first = peers if at_once else 0
        slots = self._slots(key, [payload] * (first + peers))
        begin = first * slots.sizes[0]
        all_ = slots.message[begin:]
        work: dist.Work | Pairwise | None
        if at_once:
            slots.pack([payload])
            copies = slots.message[:begin].view(peers, slots.sizes[0])
            copies[1:] = copies[0]
            work = dist.all_to_all_single(all_, copies.view(-1), group=group, async_op=True)
        else:
            slots.pack([payload], place.rank)  # written in place
            mine = slots.slots[first + place.rank]
            if direct:
                work = self._pairwise(slots.slots, [mine] * peers, group)
            else:
                work = process_groups.all_gather_flat(all_, mine, group=group, async_op=not self.in_order)
        return self._later([work], partial(slots.payloads, first), group)

    def _is_spread(self) -> bool:
        """Whether no node has several ranks, or there is one node. A collective call if that is not known.

        Otherwise a ring sends each payload between two nodes once, and an all-to-all once for each rank
        there.
        """
        if self._relayed or process_groups.are_members(self.parent):
            return not self._relayed
        if self.nodes or self.in_order or self.parent.size() == 1:
            return len(self.nodes) == 1 or all(len(node) == 1 for node in self.nodes)
        everyones = process_groups.gather_texts(os.environ.get("LOCAL_WORLD_SIZE", ""), self.parent)
        return all(each == "1" for each in everyones)

    def _reduce_scatter(
        self, request: ReduceScatter, place: AxisRank, group: dist.ProcessGroup, key: tuple[object, ...]
    ) -> Posted:
        # Gloo's reduce-scatter has no callback, and takes three times as long.
        x, (start, stop) = request.x, request.spans[place.rank]
        if request.finite_probe is not None:
            probe_(x, request.finite_probe.view(-1)[:1])
        sizes = [b - a for a, b in request.spans]
        arrived = self._message(key, (x[start:stop],), place.peers).view(x.dtype)
        parts = [stop - start] * place.peers
        done = self._all_to_all_flat(arrived, x, (parts, sizes), group, x.nbytes)

        def read() -> Tensor:
            if self.in_order:
                mean_in_few_launches_(arrived.view(place.peers, stop - start).unbind(), x[start:stop])
                return x
            first, *others = arrived.view(place.peers, stop - start)
            mine = torch.div(first, place.peers, out=x[start:stop])  # before the sum, which might overflow
            for other in others:
                mine.add_(other, alpha=1 / place.peers)
            return x

        return self._later(done, read, group)

    def _all_gather_into(self, x: Tensor, spans: Spans, place: AxisRank, group: dist.ProcessGroup) -> Posted:
        start, stop = spans[place.rank]
        equal = len({b - a for a, b in spans}) == 1 and place.peers * (stop - start) == x.numel() > 0
        if self.in_order and equal:  # in place, in one launch
            process_groups.all_gather_flat(x, x[start:stop], group=group)
            return self._later([], lambda: x, group)
        # In place, and with Gloo in a third of the time of an all-gather.
        works = [
            dist.broadcast(x[start:stop], group=group, group_src=root, async_op=not self.in_order)
            for root, (start, stop) in enumerate(spans)
            if stop > start
        ]
        return self._later(works, lambda: x, group)

    def _all_to_all(
        self, request: AllToAll, place: AxisRank, group: dist.ProcessGroup, key: tuple[object, ...]
    ) -> Posted:
        payloads = request.payloads
        leaving = self._slots((*key, "leaving"), payloads)
        arriving = self._slots((*key, "arriving"), request.arriving or [payloads[place.rank]] * place.peers)
        leaving.pack(payloads)
        # Only if all ranks send equally much do they choose the same implementation.
        total = 0 if request.arriving else leaving.message.numel()
        sizes = arriving.sizes, leaving.sizes
        done = self._all_to_all_flat(arriving.message, leaving.message, sizes, group, total)
        return self._later(done, arriving.payloads, group)

    def _all_to_all_flat(
        self, arriving: Tensor, leaving: Tensor, sizes: Sizes, group: dist.ProcessGroup, total: int
    ) -> Sequence[dist.Work | Pairwise | None]:
        """Start it: in rounds of pairs if its bytes, equal on all ranks, make Gloo's slower."""
        together = self.in_order or self._relayed
        if together or total <= group.size() * IN_ROUNDS:
            return [dist.all_to_all_single(arriving, leaving, *sizes, group, async_op=not self.in_order)]
        return [self._pairwise(torch.split(arriving, [*sizes[0]]), torch.split(leaving, [*sizes[1]]), group)]

    def _pairwise(
        self, arriving: Sequence[Tensor], leaving: Sequence[Tensor], group: dist.ProcessGroup
    ) -> Pairwise:
        self._exchanges[group] += 1
        return pairwise_all_to_all.begun(arriving, leaving, group, self._exchanges[group])

    def _later(
        self,
        works: Sequence[dist.Work | Pairwise | None],
        read: Callable[[], Any],
        group: dist.ProcessGroup,
    ) -> Posted:
        if self.in_order:
            if self._failure is not None:
                raise self._failure
            return Now(read())
        futures = [
            self._waiters.wait([work]) if isinstance(work, Pairwise) else work.get_future()
            for work in works
            if work is not None
        ]
        return self._under_way(futures, read, group)

    def _under_way(
        self,
        futures: Sequence[torch.futures.Future[Any]],
        read: Callable[[], Any],
        group: dist.ProcessGroup,
    ) -> Posted:
        later = Later(futures, read, self._taken)
        self.under_way[later] = group
        if self._failure is not None:
            later.give_up(self._failure)
        return later

    def _taken(self, later: Later) -> None:
        self.under_way.pop(later, None)

    def _slots(self, key: tuple[object, ...], likes: Sequence[Payload]) -> Slots:
        found = self._slotted.get(key)
        if found is None or not found.fit(likes):
            found = self._slotted[key] = Slots(likes)
        return found

    def _message(self, key: tuple[object, ...], like: Payload, copies: int) -> Tensor:
        size = copies * nbytes(like)
        message = self._messages.get(key)
        if message is None or message.numel() != size:
            message = self._messages[key] = empty_message(like, copies)
        return message

    def abort(self, error: BaseException | None = None) -> None:
        """End every collective under way with an error; the groups are not used again.

        They may still hang in Gloo until peers have closed their sessions (`close`) or have exited, or until
        the time-out.
        """
        self._failure = self._failure or error or RuntimeError("the session has failed")
        for later in [*self.under_way]:
            later.give_up(self._failure)
        process_groups.abort(self._groups.values())


def _alone(request: Collective) -> Any:
    """The answer of an axis with one rank."""
    assert not isinstance(request, PushPull)
    if isinstance(request, AllGather):
        return [request.payload]
    if isinstance(request, AllToAll):
        return list(request.payloads)
    if isinstance(request, AllGatherInto):
        return request.x
    if isinstance(request, Permute):
        return None
    for tensor in request.payload if isinstance(request, AllReduce) else (request.x,):
        divide_(tensor, 1, request.finite_probe)
    return request.payload if isinstance(request, AllReduce) else request.x


LATER = timedelta(minutes=1)
"""NCCL's watchdog ends the process, without naming a rank, later than a session notices a lost peer."""
ALONE_TOO = False
"""Whether a single rank starts collectives too, to measure launches on one GPU."""
