"""Generators of requests, and how to combine them: on an axis, with `ReduceEncoded` answered, many as one."""

from __future__ import annotations

import typing
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

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

    return _answered(exchange, stamp)


def watched(
    exchange: Generator[Request, Any, T], nonfinite_flags: Tensor | None, finite_probe: Tensor | None
) -> Generator[Request, Any, T]:
    """Run `exchange` with `word` averaged beside it, and with what this rank gives to its means added up.

    None: without. `total`: of shape (n,); the first `AllReduce` adds to its first number, and so on; those
    behind the last to the last. So it can be told who had a NaN first: what a rank gives to a later
    `AllReduce` may come from what it was answered.
    """
    if nonfinite_flags is not None:
        exchange = _beside(exchange, say(nonfinite_flags))
    return exchange if finite_probe is None else _totalled(exchange, finite_probe)


def say(nonfinite_flags: Tensor, axis: str = "") -> Generator[Request, Any, None]:
    """Overwrite `word` with the peers' mean."""
    yield AllReduce((nonfinite_flags,), axis)


def hear(x: Tensor, axis: str = "") -> Generator[Request, Any, list[Tensor]]:
    """Every peer's `x`, in rank order."""
    return [payload[0] for payload in (yield AllGather((x,), axis))]


def _beside(
    exchange: Generator[Request, Any, T], other: Generator[Request, Any, None]
) -> Generator[Request, Any, T]:
    result, _ = yield from fuse([exchange, other])
    return typing.cast(T, result)


def _totalled(exchange: Generator[Request, Any, T], finite_probe: Tensor) -> Generator[Request, Any, T]:
    means = 0

    def add_up(request: Request) -> Generator[Request, Any, Any]:
        nonlocal means
        if not isinstance(request, AllReduce):
            return (yield request)
        mine = finite_probe[min(means, len(finite_probe) - 1)]
        means += 1
        return (yield replace(request, finite_probe=mine))

    return _answered(exchange, add_up)


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

    return _answered(exchange, answer)


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


def _answered(
    exchange: Generator[Request, Any, T], answer: Callable[[Request], Generator[Request, Any, Any]]
) -> Generator[Request, Any, T]:
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
        wishes: dict[int, Request] = {}
        for i, answer in answers.items():
            try:
                wishes[i] = exchanges[i].send(answer)
            except StopIteration as end:
                outcomes[i] = end.value
        answers = yield from _all(wishes)
    return [outcomes[i] for i in range(len(exchanges))]


def _all(wishes: dict[int, Request]) -> Generator[Request, Any, dict[int, Any]]:
    if len(wishes) > 1 and any(isinstance(wish, ReduceEncoded | Grouped) for wish in wishes.values()):
        # Only the topology knows what these become: it joins them with the others.
        return dict(zip(wishes, (yield Grouped(tuple(wishes.values()))), strict=True))
    answers: dict[int, Any] = {}
    for group in _alike(wishes):
        answers.update((yield from _together(group)))
    return {i: answers[i] for i in wishes}


def _alike(wishes: dict[int, Request]) -> list[dict[int, Request]]:
    """Split requests into groups that can travel together, in a fixed order."""
    carried = {w.axis: type(w).__name__ for w in wishes.values() if isinstance(w, AllGather | AllToAll)}
    groups: dict[tuple[object, ...], dict[int, Request]] = {}
    for i, wish in wishes.items():
        if isinstance(wish, AllReduce) and not (wish.axis in carried and _rides(wish)):
            key: tuple[object, ...] = ("Mean", wish.axis, tuple({t.dtype for t in wish.payload}))
        elif isinstance(wish, AllReduce):
            key = (carried[wish.axis], wish.axis)
        elif isinstance(wish, AllGather | AllToAll):
            key = (type(wish).__name__, wish.axis)
        elif isinstance(wish, Permute):
            key = ("Send", wish.axis, wish.to)  # equal on all ranks, so that all of them join the same
        else:
            key = ("alone", i)
        groups.setdefault(key, {})[i] = wish
    return list(groups.values())


def _rides(wish: AllReduce) -> bool:
    return sum(t.numel() * t.element_size() for t in wish.payload) <= RIDES_ALONG


def _together(group: dict[int, Request]) -> Generator[Request, Any, dict[int, Any]]:
    if len(group) == 1:
        ((i, wish),) = group.items()
        return {i: (yield wish)}
    wishes: dict[int, _Joins] = {i: w for i, w in group.items() if isinstance(w, _Joins)}
    first = next(iter(wishes.values()))
    axis = first.axis
    if all(isinstance(w, AllReduce) for w in wishes.values()):
        return _cut(wishes, (yield AllReduce(_joined(wishes, 0), axis)))
    if isinstance(first, Permute):
        answer = yield Permute(_joined(wishes, 0), first.to, axis)
        return dict.fromkeys(wishes) if answer is None else dict(_cut(wishes, answer))
    deals = [w for w in wishes.values() if isinstance(w, AllToAll)]
    if deals:
        peers = len(deals[0].payloads)
        answers = yield AllToAll(tuple(_joined(wishes, peer) for peer in range(peers)), axis)
    else:
        answers = yield AllGather(_joined(wishes, 0), axis)
    by_peer = [_cut(wishes, answer) for answer in answers]
    return {i: _joined_answer(wish, [answer[i] for answer in by_peer]) for i, wish in wishes.items()}


_Joins: TypeAlias = AllReduce | AllGather | AllToAll | Permute


def _for(wish: _Joins, peer: int) -> Payload:
    return wish.payloads[peer] if isinstance(wish, AllToAll) else wish.payload


def _joined(wishes: dict[int, _Joins], peer: int) -> Payload:
    return tuple(t for wish in wishes.values() for t in _for(wish, peer))


def _cut(wishes: dict[int, _Joins], payload: Payload) -> dict[int, Payload]:
    parts: dict[int, Payload] = {}
    start = 0
    for i, wish in wishes.items():
        count = len(_for(wish, 0))
        parts[i] = payload[start : start + count]
        start += count
    return parts


def _joined_answer(wish: _Joins, by_peer: list[Payload]) -> Any:
    if not isinstance(wish, AllReduce):
        return by_peer
    # In rank order on every rank, so that all of them round alike.
    for out, *peers in zip(wish.payload, *by_peer, strict=True):
        # Divided before the sum, which might overflow, as every transport does.
        kind = torch.promote_types(out.dtype, torch.float32)
        finite_probe = peers[0].to(kind, copy=True).div_(len(by_peer))
        for peer in peers[1:]:
            finite_probe.add_(peer.to(kind, copy=True).div_(len(by_peer)))
        out.copy_(finite_probe)
    return wish.payload
