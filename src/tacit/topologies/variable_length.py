"""Collectives of payloads whose length depends on their values: peers exchange the lengths first.

A collective expects equal shapes. So each peer's lengths are sent first, four bytes a message, and then all
messages, padded to the longest; they differ little among replicas of one model.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tacit.contracts import AllGather, AllToAll, OneShot, Payload, Request

Lengths = list[list[int]]


def all_gathered(codec: OneShot, payload: Payload, numel: int) -> Generator[Request, Any, Sequence[Payload]]:
    """Every peer's payload of `numel` entries, in rank order; as long as they are."""
    message = _message(codec, payload, numel)
    lengths = yield from _lengths([message])
    longest = max(length for (length,) in lengths)
    messages = yield AllGather((pad(message, (0, longest - message.numel())),))
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
    messages = [_message(codec, *each) for each in zip(payloads, numels, strict=True)]
    lengths = yield from _lengths(messages)
    longest = [max(column) for column in zip(*lengths, strict=True)]
    padded = tuple(
        (pad(each, (0, most - each.numel())),) for each, most in zip(messages, longest, strict=True)
    )
    theirs = yield AllToAll(padded)
    return [
        _restored(codec, each[: row[rank]], numels[rank], payloads[rank])
        for (each,), row in zip(theirs, lengths, strict=True)
    ]


def _message(codec: OneShot, payload: Payload, numel: int) -> Tensor:
    """What travels; without data, the most that it may be."""
    if payload[0].is_meta:
        return torch.empty(codec.longest(payload, numel), dtype=torch.uint8, device="meta")
    return codec.shortened(payload, numel)


def _lengths(messages: Sequence[Tensor]) -> Generator[Request, Any, Lengths]:
    """Of each peer, in rank order, the lengths of its messages."""
    mine = [each.numel() for each in messages]
    lengths = torch.tensor(mine, dtype=torch.int32, device=messages[0].device)
    answered = yield AllGather((lengths,))
    return [mine if lengths.is_meta else each.tolist() for (each,) in answered]


def _restored(codec: OneShot, message: Tensor, numel: int, like: Payload) -> Payload:
    payload = tuple(torch.empty_like(each) for each in like)
    if not message.is_meta:
        codec.restore_(message, numel, payload)
    return payload
