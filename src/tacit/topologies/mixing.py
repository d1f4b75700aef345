"""Common parts of topologies whose answers differ from rank to rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from torch import Tensor

from tacit import checks
from tacit.contracts import Compressor, Context, MixingTopology, ReduceEncoded, Request, Transmitted
from tacit.errors import ConfigError

Mixing: TypeAlias = Callable[[ReduceEncoded], Generator[Request, Any, tuple[Tensor, Transmitted]]]
"""Computes a rank's answer from its tensor and those of others."""


def check_whole(compressor: Compressor, topology: MixingTopology, who: str, others: str) -> None:
    """Refuse lossy compressors, as their error would be lost.

    Args:
        compressor: the strategy's compressor.
        topology: the topology, for the error.
        who: names what has different answers, for the error.
        others: what could be written besides `Dense()`.

    Raises:
        ConfigError: peers do not decode exactly what a rank sends.
    """
    one_shot = compressor.one_shot(0)
    if one_shot is None or not one_shot.codec.additive or one_shot.has_feedback:
        raise ConfigError(
            f"compressor={compressor} with {type(topology).__name__}() would lose what it does not send, as "
            f"{who} has another answer: write compressor=Dense() {others}"
        )


def is_global(every: int, ctx: Context) -> bool:
    """Whether all ranks are averaged in this round; `every` of 0: never."""
    return every > 0 and (ctx.round + 1) % every == 0


def global_rounds(every: int) -> str:
    """A few words on when all ranks are averaged."""
    return f", all ranks every {every} rounds" if every else ""


# ---- groups, whose size is a power of two ---------------------------------------------------------------


def check_group_size(group_size: int | None) -> None:
    """Refuse a size that is no power of two from 2 on; None: it follows from the number of ranks.

    Raises:
        ConfigError: it is no such power.
    """
    if group_size is None:
        return
    checks.whole("group_size", group_size, 2, None, "write 2, 4 or another power of two")
    if group_size & (group_size - 1):
        raise ConfigError(
            f"group_size={group_size} is not a power of two, and a group is averaged by swaps of two ranks: "
            f"write {_below(group_size)} or {2 * _below(group_size)}"
        )


def group_size_for(group_size: int | None, peers: int) -> int:
    """S for `peers` ranks; by default the power of two nearest to the square root (Li et al. 2020).

    Raises:
        ConfigError: there are fewer ranks.
    """
    if peers == 1:
        return 1
    if group_size is None:
        return max(2, 1 << round(math.log2(peers) / 2))
    if group_size > peers:
        raise ConfigError(
            f"group_size={group_size} with {peers} ranks is not possible: write {_below(peers)}, or leave it "
            "out"
        )
    return group_size


def bits_of(peers: int, given: str, instead: str) -> int:
    """The number of bits of the ranks' numbers, each of which separates two partners.

    Args:
        peers: the number of ranks.
        given: the option that needs a power of two.
        instead: what to write for other numbers.

    Raises:
        ConfigError: it is no power of two.
    """
    if peers & (peers - 1):
        raise ConfigError(
            f"{given} with {peers} ranks is not possible, as groups are made of the bits of the ranks' "
            f"numbers: write {instead}, or train with {_below(peers)} or {2 * _below(peers)} ranks"
        )
    return peers.bit_length() - 1


def _below(number: int) -> int:
    """The largest power of two that is not larger than the number."""
    return 1 << number.bit_length() - 1
