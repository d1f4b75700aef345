"""Combines generators of requests: sets their axis, answers `ReduceEncoded`, joins many into one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter, is_
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from tacit.contracts import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Flags,
    Grouped,
    Payload,
    Permute,
    ReduceEncoded,
    Request,
)
from tacit.exchange.finite_checks import divide_
from tacit.kernels.dispatch import on_host

T = TypeVar("T")

FEW, SMALL = 16, 1 << 14
"""Among so many ranks so many bytes are summed directly; TCP sends these at once, even after a pause."""
RIDES_ALONG = 1 << 16
"""Bytes up to which an `AllReduce` travels inside an `AllGather` of its axis, and both in an `AllToAll`."""

_BYTES = attrgetter("nbytes")
_FOR_TOPOLOGIES = ReduceEncoded, Grouped
_OF_ONE_PEER = AllReduce, Permute
_CARRIED = AllReduce, AllGather
_GATHERS = AllGather, AllToAll
_Joins: TypeAlias = AllReduce | AllGather | AllToAll | Permute


Reduce: TypeAlias = Callable[[ReduceEncoded], Generator[Request, Any, Any]]
"""Answers a `ReduceEncoded` by other requests."""


def conducted(
    exchange: Generator[Request, Any, T],
    axis: str = "",
    reduce: Reduce | None = None,
    flags: Flags | None = None,
    finite_probe: Tensor | None = None,
) -> Generator[Request, Any, T]:
    """Run `exchange`: set the axis of its requests, and answer or extend them.

    Args:
        axis: the axis of every request that names none.
        reduce: answers each `ReduceEncoded` by other requests; None: they are passed on.
        flags: averaged with the first message.
        finite_probe: a tensor of shape (n,); the first `AllReduce` adds to its first number, and so on; those
            after the n-th add to the last. So the rank that had a NaN first can be found: a later input of a
            rank may depend on an earlier mean.
    """
    beside, means = flags, 0
    reply: Any = None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration as end:
            if beside is not None:
                yield replace(beside.mean, axis=axis)
            result: T = end.value
            return result
        asked = [request]
        if reduce is not None:
            asked = leaves(request)
            parts = [reduce(each) if isinstance(each, ReduceEncoded) else each for each in asked]
            steps = fuse(parts, beside)
        else:
            steps = _joined(asked, beside)
        beside, answer = None, None
        while True:
            try:
                message = steps.send(answer)
            except StopIteration as end:
                answers = end.value
                break
            if finite_probe is not None and isinstance(message, AllReduce):
                probe = finite_probe[min(means, finite_probe.numel() - 1)]
                message = AllReduce(message.payload, message.axis or axis, probe)
                means += 1
            elif axis and isinstance(message, Collective) and not message.axis:
                message = replace(message, axis=axis)
            answer = yield message
        if reduce is None or not isinstance(request, Grouped):
            reply = answers[0]
        elif len(asked) == len(request.requests) and all(map(is_, asked, request.requests)):
            reply = answers
        else:
            reply = as_asked(request, iter(answers))


def average_(x: Tensor, axis: str = "") -> Generator[Request, Any, None]:
    """Overwrite `x` with the peers' mean."""
    yield AllReduce((x,), axis)


def summed_directly(request: AllReduce, peers: int) -> Generator[Request, Any, Payload]:
    """Answer an `AllReduce` in one message: each rank sends all to every other one, which adds it up.

    The payload is overwritten with the mean. All add in the order of the ranks, and so have the same bits.
    """
    for tensor in request.payload:
        divide_(tensor, peers, request.finite_probe)
    first, *others = yield AllGather(request.payload, request.axis)
    for tensor, *parts in zip(request.payload, first, *others, strict=True):
        tensor.copy_(parts[0])
        for part in parts[1:]:
            tensor.add_(part)
    return request.payload


def small_directly(request: Request, peers: int, most: float = SMALL) -> Generator[Request, Any, Any]:
    """Answer an `AllReduce` of at most `most` bytes among few ranks by `summed_directly`; pass others on."""
    if isinstance(request, AllReduce) and peers <= FEW and sum(map(_BYTES, request.payload)) <= most:
        return (yield from summed_directly(request, peers))
    return (yield request)


def gather(x: Tensor, axis: str = "") -> Generator[Request, Any, list[Tensor]]:
    """Every peer's `x`, in rank order."""
    return [payload[0] for payload in (yield AllGather((x,), axis))]


def leaves(request: Request) -> list[Request]:
    """The requests of a `Grouped`, also of nested ones, so that all of them may be joined."""
    if not isinstance(request, Grouped):
        return [request]
    found: list[Request] = []
    for each in request.requests:
        found += leaves(each) if isinstance(each, Grouped) else [each]
    return found


def as_asked(request: Request, answers: Iterator[Any]) -> Any:
    """The answers of the leaves, grouped as their requests were."""
    if not isinstance(request, Grouped):
        return next(answers)
    return [
        as_asked(each, answers) if isinstance(each, Grouped) else next(answers) for each in request.requests
    ]


def answered(
    exchange: Generator[Request, Any, T], answer: Callable[[Request], Generator[Request, Any, Any]]
) -> Generator[Request, Any, T]:
    """Run `exchange`; `answer` answers each of its requests by other requests."""
    reply: Any = None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result
        reply = yield from answer(request)


def fuse(
    exchanges: Sequence[Request | Generator[Request, Any, Any]], beside: Flags | None = None
) -> Generator[Request, Any, list[Any]]:
    """Run several exchanges at the same time, request by request; like requests travel as one message.

    A small `AllReduce` travels inside an `AllGather` or `AllToAll` of its axis, and is averaged on arrival; a
    small `AllGather` travels inside an `AllToAll`: one message costs less than two. Requests that cannot be
    joined follow one another, in an order that is equal on all ranks. A single request may stand for an
    exchange. `beside` joins the first message.
    """
    outcomes: list[Any] = [None] * len(exchanges)
    under_way, answers = [*range(len(exchanges))], [None] * len(exchanges)
    while under_way:
        going, requests = [], []
        for i, answer in zip(under_way, answers, strict=True):
            exchange = exchanges[i]
            if not isinstance(exchange, Generator):
                if answer is None:
                    requests.append(exchange)
                    going.append(i)
                else:
                    outcomes[i] = answer
                continue
            try:
                requests.append(exchange.send(answer))
                going.append(i)
            except StopIteration as end:
                outcomes[i] = end.value
        under_way = going
        if requests:
            answers = yield from _joined(requests, beside)
            beside = None
    if beside is not None:
        yield beside.mean
    return outcomes


def _joined(requests: Sequence[Request], beside: Flags | None = None) -> Generator[Request, Any, list[Any]]:
    """Post all requests, in as few messages as possible; returns their answers. `beside` joins the first."""
    if beside is None and len(requests) == 1:
        return [(yield requests[0])]
    for request in requests:
        if isinstance(request, _FOR_TOPOLOGIES):  # server requests join themselves
            every = requests if beside is None else (*requests, beside.mean)
            return list((yield Grouped(tuple(every))))[: len(requests)]
    answers: list[Any] = [None] * len(requests)
    for group in _alike(requests) if len(requests) > 1 else [[0]]:
        some: Any = [requests[i] for i in group]
        riding, alone = None, None
        if beside is not None:
            gathers = False
            for each in some:
                gathers = gathers or isinstance(each, _GATHERS)
            part = beside.part if gathers else beside.mean
            if len(_alike([*some, part])) == 1:
                some.append(part)
                riding = beside if gathers else None
            else:
                alone = beside.mean
            beside = None
        if len(some) == 1:
            answers[group[0]] = yield some[0]
        else:
            message = _message(some)
            found = _cut(some, message, (yield message))
            if riding is not None:
                _place_(riding, found[-1])
            for i, answer in zip(group, found, strict=False):
                answers[i] = answer
        if alone is not None:
            yield alone
    return answers


def _alike(requests: Sequence[Request]) -> Collection[Sequence[int]]:
    """The indices of requests that can travel together, group by group; in a fixed order."""
    carried: dict[str, str] = {}
    for request in requests:
        # In an all-to-all whose messages differ in size a receiver could not find another request's part.
        if isinstance(request, AllToAll) and not request.arriving:
            carried[request.axis] = "AllToAll"
        elif isinstance(request, AllGather):
            carried.setdefault(request.axis, "AllGather")
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, request in enumerate(requests):
        key: tuple[object, ...] = ("alone", i)
        if isinstance(request, _CARRIED):
            carrier = carried.get(request.axis)
            if carrier is not None and sum(map(_BYTES, request.payload)) <= RIDES_ALONG:
                key = (carrier, request.axis)
            elif isinstance(request, AllGather):
                key = ("AllGather", request.axis)
            else:
                key = ("AllReduce", request.axis, request.payload[0].dtype if request.payload else None)
        elif isinstance(request, Permute):
            # This is equal on all ranks, so all join the same requests.
            key = ("Permute", request.axis, request.to, bool(request.into))
        elif isinstance(request, AllToAll) and not request.arriving:
            key = ("AllToAll", request.axis)
        groups.setdefault(key, []).append(i)
    return groups.values()


def _message(requests: Sequence[_Joins]) -> Collective:
    """The one message of several requests that are alike."""
    first, exchanged = requests[0], None
    for request in requests:
        if isinstance(request, AllToAll):
            exchanged = request
    if exchanged is not None:
        peers = range(len(exchanged.payloads))
        return AllToAll(tuple(_payload_for(requests, peer) for peer in peers), first.axis)
    payload = _payload_for(requests, 0)
    if isinstance(first, Permute):
        into = tuple(t for request in requests for t in getattr(request, "into", ()))
        return Permute(payload, first.to, first.axis, into)
    for request in requests:
        if isinstance(request, AllGather):
            return AllGather(payload, first.axis)
    return AllReduce(payload, first.axis)


def _payload_for(requests: Sequence[_Joins], peer: int) -> Payload:
    payload: list[Tensor] = []
    for request in requests:
        payload += request.payloads[peer] if isinstance(request, AllToAll) else request.payload
    return tuple(payload)


def _cut(requests: Sequence[_Joins], message: Collective, answer: Any) -> list[Any]:
    """The answer of each request, cut from the answer to their one message."""
    found: list[Any] = []
    start = 0
    for request in requests:
        stop = start + len(request.payloads[0] if isinstance(request, AllToAll) else request.payload)
        if isinstance(message, _OF_ONE_PEER):
            found.append(None if answer is None else answer[start:stop])
        else:
            cuts: dict[int, Payload] = {}  # a dry run has the same answer for all of thousands of peers
            parts = []
            for each in answer:
                if id(each) not in cuts:
                    cuts[id(each)] = each[start:stop]
                parts.append(cuts[id(each)])
            found.append(_mean_(request.payload, parts) if isinstance(request, AllReduce) else parts)
        start = stop
    return found


def _place_(flags: Flags, parts: Sequence[Payload]) -> None:
    """Overwrite flags with their mean, by what all peers have sent of them in a gather."""
    if not flags.owned or flags.numbers.is_meta:
        return
    for i, (start, stop) in enumerate(flags.owned):
        every = torch.cat([part[i] for part in parts])  # a copy: they may lie where the mean is written
        torch.div(every, len(parts), out=flags.numbers[start:stop])  # the mean of one number and zeros
    if flags.shared:
        _mean_(flags.shared, [part[len(flags.owned) :] for part in parts])


def mean_in_few_launches_(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write the parts' mean to `out`, on a device: in as many launches for many as for few."""
    kind = torch.promote_types(out.dtype, torch.float32)
    every = torch.stack([*parts]).to(kind).div_(len(parts))
    if out.dtype == kind:
        torch.sum(every, 0, out=out)
    else:
        out.copy_(every.sum(0))


def _mean_(payload: Payload, by_peer: list[Payload]) -> Payload:
    """Overwrite the payload by the peers' mean, in rank order on every rank, so that all round alike."""
    if payload and payload[0].is_meta:  # for thousands of peers it takes seconds to compute nothing
        return payload
    for out, *peers in zip(payload, *by_peer, strict=True):
        # Divided before the sum, which might overflow, as every transport does.
        if not on_host(out):
            mean_in_few_launches_(peers, out)
            continue
        kind = torch.promote_types(out.dtype, torch.float32)
        mean = peers[0].to(kind, copy=True).div_(len(by_peer))
        for peer in peers[1:]:
            mean.add_(peer.to(kind, copy=True).div_(len(by_peer)))
        out.copy_(mean)
    return payload
