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


def all_gathered(codec: OneShot, payload: Payload, numel: int) -> Generator[Request, Any, Sequence[Payload]]:
    """Every peer's payload of `numel` entries, in rank order; as long as they are."""
    message, mine = _message(codec, payload, numel)
    lengths, numbers = yield from _lengths([message], [mine])
    messages = yield AllGather((_as_long(message, max(numbers)),))
    return _restored(codec, messages, lengths, numbers, numel, payload)


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
    lengths, numbers, longest = yield from _lengths_of_each(messages, mine, rank)
    padded = tuple((_as_long(each, most),) for each, most in zip(messages, longest, strict=True))
    theirs = yield AllToAll(padded)
    return _restored(codec, theirs, lengths, numbers, numels[rank], payloads[rank])


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
) -> Generator[Request, Any, tuple[Tensor, list[int], list[int]]]:
    """The lengths of the messages to this rank, twice as of `_lengths`; and the longest to each.

    Few peers send each other all of their lengths, as that is one message; many would send P numbers each.
    """
    peers = len(messages)
    if 4 * peers**2 <= RIDES_ALONG:
        lengths, numbers = yield from _lengths(messages, mine)
        arriving = lengths[rank::peers].contiguous()  # as kernels read them
        return arriving, numbers[rank::peers], [max(numbers[i::peers]) for i in range(peers)]
    leaving = _numbers(messages, mine)
    answered = yield AllToAll(tuple((each,) for each in torch.split(leaving, 1)))
    arriving = leaving[rank].expand(peers) if leaving.is_meta else torch.cat([each for (each,) in answered])
    longest = yield AllGather((arriving.max().view(1),))
    if leaving.is_meta:
        return arriving, [mine[rank]] * peers, [*mine]
    both = torch.cat((arriving, *(each for (each,) in longest)))
    found = yield from _read(both, [messages[rank]] * peers + [*messages])
    return arriving, found[:peers], found[peers:]


def _lengths(
    messages: Sequence[Tensor], mine: Sequence[Any]
) -> Generator[Request, Any, tuple[Tensor, list[int]]]:
    """The lengths of each peer's messages, in rank order: where they have come, and on the host."""
    lengths = _numbers(messages, mine)
    answered = yield AllGather((lengths,))
    if lengths.is_meta:
        return lengths, [*mine] * len(answered)
    everyones = torch.cat([each for (each,) in answered])
    return everyones, (yield from _read(everyones, [*messages] * len(answered)))


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


def _restored(
    codec: OneShot,
    messages: Sequence[Payload],
    lengths: Tensor,
    numbers: Sequence[int],
    numel: int,
    like: Payload,
) -> Sequence[Payload]:
    """The payload of each peer's message; on a device all in the same launches."""
    if on_host(like[0]) or like[0].is_meta:
        found = [tuple(torch.empty_like(each) for each in like) for _ in numbers]
        for payload, (message,), length in zip(found, messages, numbers, strict=True):
            if not message.is_meta:
                codec.restore_(message[:length], numel, payload)
        return found
    stacked = tuple(each.new_empty((len(numbers), *each.shape)) for each in like)
    codec.restore_on_device_(torch.stack([message for (message,) in messages]), lengths, numel, stacked)
    return [*zip(*stacked, strict=True)]
