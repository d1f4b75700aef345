"""Named strategies, one file a paper. `parse` makes one from its text form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tacit.algorithms.bf16 import bf16
from tacit.algorithms.ddp import ddp, dense
from tacit.algorithms.localsgd import localsgd
from tacit.algorithms.powersgd import powersgd
from tacit.algorithms.randomk import randomk
from tacit.algorithms.sign import sign
from tacit.algorithms.topk import topk
from tacit.errors import ConfigError, unknown
from tacit.strategy import Strategy, split_text, typed

ALGORITHMS: dict[str, Callable[..., Strategy]] = {
    "ddp": ddp,
    "dense": dense,
    "bf16": bf16,
    "sign": sign,
    "topk": topk,
    "randomk": randomk,
    "powersgd": powersgd,
    "localsgd": localsgd,
}
"""Name -> the function that makes the strategy; its typed parameters are the algorithm's."""


def known() -> list[str]:
    """The names of all algorithms."""
    return list(ALGORITHMS)


def parse(text: str) -> Strategy:
    """The strategy of a text such as `"topk:ratio=0.01"`.

    Raises:
        ConfigError: unknown algorithm or parameter, or a value that cannot be; says what to write.
    """
    name, pairs = split_text(text)
    if not name:
        raise ConfigError(f"{text!r} names no algorithm: write one of {', '.join(known())}")
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, known())
    build = ALGORITHMS[name]
    return replace(build(**typed(name, build, pairs)), name=text.strip())
