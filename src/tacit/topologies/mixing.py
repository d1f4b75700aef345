"""What topologies have in common whose answers differ from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from torch import Tensor

from tacit.contracts import Compressor, Context, MixingTopology, ReduceEncoded, Request, Transmitted
from tacit.errors import ConfigError

Mixing: TypeAlias = Callable[[ReduceEncoded], Generator[Request, Any, tuple[Tensor, Transmitted]]]
"""How a rank's answer is made of its own tensor and of those of others."""


def check_whole(compressor: Compressor, topology: MixingTopology, who: str, others: str) -> None:
    """Refuse what does not arrive as it is, as nobody would keep what was left out.

    Args:
        compressor: the one that was asked for.
        topology: this one.
        who: has answers of its own.
        others: what could be written beside `Dense()`.

    Raises:
        ConfigError: peers do not have all that a rank gives.
    """
    one_shot = compressor.one_shot(0)
    if one_shot is None or not one_shot.codec.additive or one_shot.has_feedback:
        raise ConfigError(
            f"compressor={compressor} with {type(topology).__name__}() would lose what it does not send, as "
            f"{who} has an answer of its own: write compressor=Dense() {others}"
        )


def is_global(every: int, ctx: Context) -> bool:
    """Whether all ranks are averaged in this round; `every` of 0: never."""
    return every > 0 and (ctx.round + 1) % every == 0


def global_rounds(every: int) -> str:
    """When they are, for a summary."""
    return f", all ranks every {every} rounds" if every else ""
