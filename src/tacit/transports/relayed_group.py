"""A process group whose ranks are connected to a hub, and not to each other.

Each collective is one message to the hub and one back. The hub adds up, or puts together, and knows no more
of what it carries.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.contracts import (
    AllGather,
    AllGatherInto,
    AllReduce,
    AllToAll,
    Collective,
    Payload,
    Permute,
    ReduceScatter,
)
from tacit.errors import PayloadError
from tacit.torch_compat import PythonGroup
from tacit.transports.message_layout import order

Done = Callable[[Tensor | BaseException], None]
Homes = dict[str, tuple[int, int]]
"""The hub of each bucket, and the bucket's bytes."""


class HubConnection(Protocol):
    """A connection to a hub, or to as many as `hubs` says, which share out what is exchanged."""

    hubs: int

    def share(
        self, group: str, about: Mapping[str, Any], body: Sequence[Tensor], done: Done, hub: int
    ) -> None:
        """Send a share of a collective; `done` gets the answer's bytes, or why there is none."""

    def quit(self, group: str) -> None:
        """Take no more part in a group: others that wait for this rank are told."""


class RelayedWork(dist.Work):
    """A collective under way."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def end(self, error: BaseException | None = None) -> None:
        """It is over; only the first call counts."""
        if self._future.done():
            return
        if error is None:
            self._future.set_result(self._tensors)
        else:
            kept = isinstance(error, PayloadError)  # which is about this rank
            self._future.set_exception(error if kept else RuntimeError(str(error)))

    def wait(self, timeout: object = None) -> bool:
        """Wait for its end; raises its error."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._future.done()

    def get_future(self) -> torch.futures.Future[Any]:
        """Done when it is."""
        return self._future


_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def kind_of(x: Tensor) -> str:
    """The name of its type, such as "float32"."""
    return str(x.dtype).removeprefix("torch.")


def _home(bucket: str, nbytes: int, homes: Homes, hubs: int) -> int:
    """The hub of a bucket: the one that has the fewest bytes when it comes first."""
    if bucket not in homes:
        full = [0] * hubs
        for hub, size in homes.values():
            full[hub] += size
        homes[bucket] = full.index(min(full)), nbytes
    return homes[bucket][0]


def _size(request: Collective) -> int:
    """The bytes of a request, equal on all ranks; 1 where each rank's has another size."""
    match request:
        case AllReduce(payload) | AllGather(payload):
            return sum(x.nbytes for x in payload)
        case AllToAll(payloads) if not request.arriving:
            return sum(x.nbytes for payload in payloads for x in payload)
        case ReduceScatter(x) | AllGatherInto(x):
            return x.nbytes
    return 1


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


class RelayedGroup(PythonGroup):
    """Collectives by a hub.

    Args:
        relay: the connection to it.
        named: equal on all ranks, and of this group alone.
        rank: this rank, of `size`.
    """

    def __init__(self, relay: HubConnection, named: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._relay, self._called = relay, named
        self._rank, self._size = rank, size
        self._numbers = itertools.count()
        self._messages: Counter[str] = Counter()
        self._works: dict[RelayedWork, None] = {}
        self._over: BaseException | None = None
        self._said: dict[str, Any] = {}
        self._hub = 0

    def says(self, request: Collective, bucket: str, stage: int, homes: Homes) -> None:
        """What the next collective is about, for a hub that judges it: it sees nothing but bytes.

        `homes`: of the exchange's buckets so far; it gets this one. Buckets come first in one order on all
        ranks, so that each goes by the same hub for all.
        """
        payloads: Sequence[Payload] = ()
        if isinstance(request, AllGather):
            payloads = (request.payload,)
        elif isinstance(request, AllToAll):
            payloads = request.payloads
        elif isinstance(request, ReduceScatter):
            payloads = ((request.x,),)
        if self._relay.hubs > 1 and not isinstance(request, Permute):
            self._hub = _home(bucket, _size(request), homes, self._relay.hubs)
        parts = [[(kind_of(each[i]), each[i].nbytes) for i in order(each)] for each in payloads]
        alike = all(each == parts[0] for each in parts)
        if isinstance(request, AllToAll) and request.arriving:
            bucket, parts = "", []  # each rank's has another form
        self._said = {"bucket": bucket, "stage": stage, "parts": parts[:1] if alike else parts}

    def _share(
        self,
        what: str,
        outs: Sequence[Tensor],
        body: Sequence[Tensor] = (),
        key: str | None = None,
        **more: Any,
    ) -> RelayedWork:
        """Take part in a collective; its answer is put into `outs`, one behind the other."""
        work = RelayedWork([*outs])
        if self._over is not None:
            work.end(self._over)
            return work
        self._works[work] = None

        def done(answer: Tensor | BaseException) -> None:
            self._works.pop(work, None)
            if isinstance(answer, BaseException):
                work.end(answer)
                return
            if work.is_completed():
                return
            sizes = [out.nbytes for out in outs]
            if answer.numel() != sum(sizes):
                work.end(RuntimeError(f"a hub answered {answer.numel()} bytes, where {sum(sizes)} belong"))
                return
            with torch.no_grad():
                for out, part in zip(outs, torch.split(answer, sizes), strict=True):
                    out.copy_(_typed(part, out))
            work.end()

        about = {"do": what, "rank": self._rank, "size": self._size, **self._said, **more}
        self._said = {}
        about["key"] = f"{next(self._numbers)}" if key is None else key
        hub = self._hub if key is None else crc32(key.encode()) % self._relay.hubs
        self._relay.share(self._called, about, body, done, hub)
        return work

    # ---- collectives, as torch calls them ---------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Sum, minimum or maximum, in place."""
        (x,) = tensors
        op = next(name for name, each in _OPERATIONS.items() if opts is None or opts.reduceOp == each)
        return self._share("reduce", [x], [_bytes(x)], op=op, dtype=kind_of(x))

    def allgather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Every rank's tensor."""
        return self._share("gather", outs[0], [_bytes(tensors[0])])

    def all_gather_single(self, out: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        """Every rank's tensor, one after the other."""
        return self._share("gather", [out], [_bytes(mine)])

    def gather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Every rank's tensor, for one of them."""
        here = outs[0] if outs and opts.rootRank == self._rank else []
        return self._share("gather to", here, [_bytes(tensors[0])], root=opts.rootRank)

    def all_to_all_single(
        self, out: Tensor, mine: Tensor, arriving: list[int], leaving: list[int], opts: Any = None
    ) -> dist.Work:
        """A part of each rank's tensor for each; sizes along the first dimension, none: equal ones."""
        row = mine.nbytes // max(1, mine.shape[0]) if mine.dim() else mine.nbytes
        sizes = [row * each for each in leaving] or [mine.nbytes // self._size] * self._size
        return self._share("exchange", [out], [_bytes(mine)], sizes=sizes)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """The root's tensor, for all."""
        (x,) = tensors
        body = [_bytes(x)] if opts.rootRank == self._rank else []
        return self._share("broadcast", [x], body, root=opts.rootRank)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all."""
        return self._share("gather", [])

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        """A tensor for one rank."""
        return self._share("send", [], [_bytes(tensors[0])], self._message(self._rank, to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        """A tensor of one rank."""
        return self._share("receive", tensors, key=self._message(source, self._rank, tag))

    def _message(self, source: int, to: int, tag: int) -> str:
        """The name of the next message between two ranks: several may be under way."""
        name = f"{source} {to} {tag}"
        self._messages[name] += 1
        return f"{name} {self._messages[name]}"

    # ---- the end ----------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End all that is under way, and take no more part."""
        if self._over is None:
            self._over = RuntimeError("the group was aborted")
            self._relay.quit(self._called)
        for work in [*self._works]:
            work.end(self._over)
        self._works.clear()

    def shutdown(self) -> None:
        """Called when it is destroyed."""
        self.abort()


def _typed(part: Tensor, like: Tensor) -> Tensor:
    """Bytes as a tensor of this shape and type; they may lie anywhere."""
    room = torch.empty(like.shape, dtype=like.dtype)
    room.view(-1).view(torch.uint8).copy_(part)
    return room
