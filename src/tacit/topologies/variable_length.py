"""Collectives of payloads whose length depends on their values: peers exchange the lengths first.

A collective expects equal shapes. So each peer's lengths are sent first, four bytes a message, and then all
messages, padded to the longest; they differ little among replicas of one model. On a device the host must
wait for the lengths, as it launches with them: see `Read`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tacit.contracts import AllGather, AllToAll, OneShot, Payload, Read, Request
from tacit.errors import PayloadError
from tacit.exchange.joined_requests import RIDES_ALONG
from tacit.kernels.dispatch import on_host

Lengths = list[list[int]]


def all_gathered(codec: OneShot, payload: Payload, numel: int) -> Generator[Request, Any, Sequence[Payload]]:
    """Every peer's payload of `numel` entries, in rank order; as long as they are."""
    message, mine = _message(codec, payload, numel)
    lengths = yield from _lengths([message], [mine])
    longest = max(length for (length,) in lengths)
    messages = yield AllGather((_as_long(message, longest),))
    return [
        _restored(codec, each[:length], numel, payload)
        for (each,), (length,) in zip(messages, lengths, strict=True)
    ]


def all_to_all(
    codec: OneShot, payloads: tuple[Payload, ...], numels: Sequence[int], rank: int
) -> Generator[Request, Any, Sequence[Payload]]:
    """What the peers addressed to this rank, in rank order; as `all_gathered`.

    Args:
        payloads: one for each peer; `numels`: how many entries each of them encodes.
        rank: this one among the peers.
    """
    made = [_message(codec, *each) for each in zip(payloads, numels, strict=True)]
    messages, mine = [message for message, _ in made], [length for _, length in made]
    arriving, longest = yield from _lengths_of_each(messages, mine, rank)
    padded = tuple((_as_long(each, most),) for each, most in zip(messages, longest, strict=True))
    theirs = yield AllToAll(padded)
    return [
        _restored(codec, each[:length], numels[rank], payloads[rank])
        for (each,), length in zip(theirs, arriving, strict=True)
    ]


def _message(codec: OneShot, payload: Payload, numel: int) -> tuple[Tensor, int | Tensor]:
    """What travels, and its length; without data, the most that it may be. A device has as much room."""
    if payload[0].is_meta:
        most = codec.longest(payload, numel)
        return torch.empty(most, dtype=torch.uint8, device="meta"), most
    if not on_host(payload[0]):
        return codec.shortened_on_device(payload, numel)
    message = codec.shortened(payload, numel)
    return message, message.numel()


def _as_long(message: Tensor, most: int) -> Tensor:
    return message[:most] if message.numel() >= most else pad(message, (0, most - message.numel()))


def _lengths_of_each(
    messages: Sequence[Tensor], mine: Sequence[Any], rank: int
) -> Generator[Request, Any, tuple[list[int], list[int]]]:
    """The lengths of the messages to this rank, and the longest to each.

    Few peers send each other all of their lengths, as that is one message; many would send P numbers each.
    """
    peers = len(messages)
    if 4 * peers**2 <= RIDES_ALONG:
        lengths = yield from _lengths(messages, mine)
        return [row[rank] for row in lengths], [max(column) for column in zip(*lengths, strict=True)]
    leaving = _numbers(messages, mine)
    answered = yield AllToAll(tuple((each,) for each in torch.split(leaving, 1)))
    arriving = leaving[rank].expand(peers) if leaving.is_meta else torch.cat([each for (each,) in answered])
    longest = yield AllGather((arriving.max().view(1),))
    if leaving.is_meta:
        return [mine[rank]] * peers, [*mine]
    both = torch.cat((arriving, *(each for (each,) in longest)))
    found = yield from _read(both, [messages[rank]] * peers + [*messages])
    return found[:peers], found[peers:]


def _lengths(messages: Sequence[Tensor], mine: Sequence[Any]) -> Generator[Request, Any, Lengths]:
    """Of each peer, in rank order, the lengths of its messages."""
    lengths = _numbers(messages, mine)
    answered = yield AllGather((lengths,))
    if lengths.is_meta:
        return [[*mine] for _ in answered]
    numbers = yield from _read(torch.cat([each for (each,) in answered]), [*messages] * len(answered))
    return [numbers[at : at + len(mine)] for at in range(0, len(numbers), len(mine))]


def _numbers(messages: Sequence[Tensor], mine: Sequence[Any]) -> Tensor:
    """This rank's lengths, which may be numbers on a device."""
    if isinstance(mine[0], Tensor):
        return torch.stack([*mine])
    return torch.tensor(mine, dtype=torch.int32, device=messages[0].device)


def _read(lengths: Tensor, messages: Sequence[Tensor]) -> Generator[Request, Any, list[int]]:
    """The lengths of messages like these, on the host; a device has room for the longest of each."""
    if on_host(lengths):
        return lengths.tolist()
    numbers: list[int] = yield Read(lengths)
    for length, message in zip(numbers, messages, strict=True):
        if not 0 <= length <= message.numel():
            raise PayloadError(
                f"a peer's message is {length} bytes long, and {message.numel()} are the most: the length "
                "is damaged"
            )
    return numbers


def _restored(codec: OneShot, message: Tensor, numel: int, like: Payload) -> Payload:
    payload = tuple(torch.empty_like(each) for each in like)
    if not message.is_meta:
        codec.restore_(message, numel, payload)
    return payload
