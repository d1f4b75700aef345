"""Generators of requests, and how to combine them: on an axis, with `ReduceEncoded` answered, many as one."""

from __future__ import annotations

import typing
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor

from tacit.contracts import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Grouped,
    Payload,
    Permute,
    ReduceEncoded,
    Request,
)

T = TypeVar("T")

RIDES_ALONG = 1 << 16
"""Bytes up to which an `AllReduce` travels inside an `AllGather` or `AllToAll` of its axis."""


# ---- many as one --------------------------------------------------------------------------------------


def on(axis: str, exchange: Generator[Request, Any, T]) -> Generator[Request, Any, T]:
    """Run `exchange` with every request that names no axis stamped with `axis`."""

    def stamp(request: Request) -> Generator[Request, Any, Any]:
        if isinstance(request, Collective) and not request.axis:
            request = replace(request, axis=axis)
        return (yield request)

    return answered(exchange, stamp)


def watched(
    exchange: Generator[Request, Any, T], nonfinite_flags: Tensor | None, finite_probe: Tensor | None
) -> Generator[Request, Any, T]:
    """Run `exchange` with `nonfinite_flags` averaged beside it, and what it averages added to `finite_probe`.

    None: without. `finite_probe`: of shape (n,); the first `AllReduce` adds to its first number, and so on;
    those behind the last to the last. So it can be told who had a NaN first: what a rank gives to a later
    `AllReduce` may come from what it was answered.
    """
    if nonfinite_flags is not None:
        exchange = _beside(exchange, average_(nonfinite_flags))
    return exchange if finite_probe is None else _probed(exchange, finite_probe)


def average_(x: Tensor, axis: str = "") -> Generator[Request, Any, None]:
    """Overwrite `x` with the peers' mean."""
    yield AllReduce((x,), axis)


def gather(x: Tensor, axis: str = "") -> Generator[Request, Any, list[Tensor]]:
    """Every peer's `x`, in rank order."""
    return [payload[0] for payload in (yield AllGather((x,), axis))]


def _beside(
    exchange: Generator[Request, Any, T], other: Generator[Request, Any, None]
) -> Generator[Request, Any, T]:
    result, _ = yield from fuse([exchange, other])
    return typing.cast(T, result)


def _probed(exchange: Generator[Request, Any, T], finite_probe: Tensor) -> Generator[Request, Any, T]:
    means = 0

    def add_up(request: Request) -> Generator[Request, Any, Any]:
        nonlocal means
        if not isinstance(request, AllReduce):
            return (yield request)
        mine = finite_probe[min(means, len(finite_probe) - 1)]
        means += 1
        return (yield replace(request, finite_probe=mine))

    return answered(exchange, add_up)


def reduced(
    exchange: Generator[Request, Any, T], reduce: Callable[[ReduceEncoded], Generator[Request, Any, Any]]
) -> Generator[Request, Any, T]:
    """Run `exchange`, letting `reduce` answer each `ReduceEncoded` by requests of its own."""

    def answer(request: Request) -> Generator[Request, Any, Any]:
        if isinstance(request, ReduceEncoded):
            return (yield from reduce(request))
        if isinstance(request, Grouped):
            return as_asked(request, iter((yield from fuse([answer(each) for each in leaves(request)]))))
        return (yield request)

    return answered(exchange, answer)


def leaves(request: Request) -> list[Request]:
    """The requests of a `Grouped`, those of others inside it too: so that all of them may join."""
    if isinstance(request, Grouped):
        return [leaf for each in request.requests for leaf in leaves(each)]
    return [request]


def as_asked(request: Request, answers: Iterator[Any]) -> Any:
    """The leaves' answers, put together as their requests were."""
    if isinstance(request, Grouped):
        return [as_asked(each, answers) for each in request.requests]
    return next(answers)


def answered(
    exchange: Generator[Request, Any, T], answer: Callable[[Request], Generator[Request, Any, Any]]
) -> Generator[Request, Any, T]:
    """Run `exchange`, having `answer` make the answer to each request, by requests of its own."""
    reply: Any = None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result
        reply = yield from answer(request)


def fuse(exchanges: Sequence[Generator[Request, Any, Any]]) -> Generator[Request, Any, list[Any]]:
    """Run several exchanges side by side, request by request; like requests travel as one message.

    A small `AllReduce` rides inside a `AllGather` or `AllToAll` of its axis, and is averaged on arrival: one
    message costs less than two. Requests that cannot be joined follow one another, in an order that is equal
    on all ranks.
    """
    outcomes: dict[int, Any] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(exchanges)))
    while answers:
        requests: dict[int, Request] = {}
        for i, answer in answers.items():
            try:
                requests[i] = exchanges[i].send(answer)
            except StopIteration as end:
                outcomes[i] = end.value
        answers = yield from _all(requests)
    return [outcomes[i] for i in range(len(exchanges))]


def _all(requests: dict[int, Request]) -> Generator[Request, Any, dict[int, Any]]:
    if len(requests) > 1 and any(isinstance(r, ReduceEncoded | Grouped) for r in requests.values()):
        # Only the topology knows what these become: it joins them with the others.
        return dict(zip(requests, (yield Grouped(tuple(requests.values()))), strict=True))
    answers: dict[int, Any] = {}
    for group in _alike(requests):
        answers.update((yield from _together(group)))
    return {i: answers[i] for i in requests}


def _alike(requests: dict[int, Request]) -> list[dict[int, Request]]:
    """Split requests into groups that can travel together, in a fixed order."""
    carried = {r.axis: type(r).__name__ for r in requests.values() if _carries(r)}
    groups: dict[tuple[object, ...], dict[int, Request]] = {}
    for i, request in requests.items():
        if isinstance(request, AllReduce) and not (request.axis in carried and _rides(request)):
            key: tuple[object, ...] = ("AllReduce", request.axis, tuple({t.dtype for t in request.payload}))
        elif isinstance(request, AllReduce):
            key = (carried[request.axis], request.axis)
        elif _carries(request):
            key = (type(request).__name__, request.axis)
        elif isinstance(request, Permute):
            # Equal on all ranks: all of them join the same.
            key = ("Permute", request.axis, request.to, bool(request.into))
        else:
            key = ("alone", i)
        groups.setdefault(key, {})[i] = request
    return list(groups.values())


def _carries(request: Request) -> TypeGuard[AllGather | AllToAll]:
    """Whether others may travel in it."""
    return isinstance(request, AllGather) or (isinstance(request, AllToAll) and not request.arriving)


def _rides(request: AllReduce) -> bool:
    return sum(t.numel() * t.element_size() for t in request.payload) <= RIDES_ALONG


def _together(group: dict[int, Request]) -> Generator[Request, Any, dict[int, Any]]:
    if len(group) == 1:
        ((i, request),) = group.items()
        return {i: (yield request)}
    requests: dict[int, _Joins] = {i: r for i, r in group.items() if isinstance(r, _Joins)}
    first = next(iter(requests.values()))
    axis = first.axis
    if all(isinstance(r, AllReduce) for r in requests.values()):
        return _cut(requests, (yield AllReduce(_joined(requests, 0), axis)))
    if isinstance(first, Permute):
        into = tuple(t for request in requests.values() for t in getattr(request, "into", ()))
        answer = yield Permute(_joined(requests, 0), first.to, axis, into)
        return dict.fromkeys(requests) if answer is None else dict(_cut(requests, answer))
    exchanged = [r for r in requests.values() if isinstance(r, AllToAll)]
    if exchanged:
        peers = len(exchanged[0].payloads)
        answers = yield AllToAll(tuple(_joined(requests, peer) for peer in range(peers)), axis)
    else:
        answers = yield AllGather(_joined(requests, 0), axis)
    cuts = {id(answer): answer for answer in answers}  # a dry run has the same for all of thousands of peers
    parts = {key: _cut(requests, answer) for key, answer in cuts.items()}
    by_peer = [parts[id(answer)] for answer in answers]
    return {i: _joined_answer(request, [answer[i] for answer in by_peer]) for i, request in requests.items()}


_Joins: TypeAlias = AllReduce | AllGather | AllToAll | Permute


def _for(request: _Joins, peer: int) -> Payload:
    return request.payloads[peer] if isinstance(request, AllToAll) else request.payload


def _joined(requests: dict[int, _Joins], peer: int) -> Payload:
    return tuple(t for request in requests.values() for t in _for(request, peer))


def _cut(requests: dict[int, _Joins], payload: Payload) -> dict[int, Payload]:
    parts: dict[int, Payload] = {}
    start = 0
    for i, request in requests.items():
        count = len(_for(request, 0))
        parts[i] = payload[start : start + count]
        start += count
    return parts


def _joined_answer(request: _Joins, by_peer: list[Payload]) -> Any:
    if not isinstance(request, AllReduce):
        return by_peer
    # In rank order on every rank, so that all of them round alike.
    for out, *peers in zip(request.payload, *by_peer, strict=True):
        if out.is_meta:  # for thousands of peers it takes seconds to compute nothing
            continue
        # Divided before the sum, which might overflow, as every transport does.
        kind = torch.promote_types(out.dtype, torch.float32)
        mean = peers[0].to(kind, copy=True).div_(len(by_peer))
        for peer in peers[1:]:
            mean.add_(peer.to(kind, copy=True).div_(len(by_peer)))
        out.copy_(mean)
    return request.payload
