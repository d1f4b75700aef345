"""The base of compressed gossip: one codec, and a sum over what peers have decoded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tacit.compressors.majority import MajoritySign
from tacit.compressors.wrappers import Wrapper
from tacit.contracts import (
    Compressor,
    Context,
    Exact,
    Exchange,
    MixingCompressor,
    OneShot,
    OneShotUse,
    Outcome,
    ReduceEncoded,
    Request,
    State,
    Transmitted,
    state_dtype,
)
from tacit.errors import ConfigError


@dataclass(frozen=True)
class CompressedMixing(Wrapper, MixingCompressor):
    """Base of compressors that send to a replica's neighbours by a one-shot codec.

    State and messages are in fp32 where parameters have two bytes, so that all ranks have equal values.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        name, inner = type(self).__name__, self.inner
        if not isinstance(inner, OneShot):
            raise ConfigError(
                f"{name}({inner}) is not possible, as what is inside takes several messages, or keeps a "
                f"residual itself: write what encodes once, such as {name}(TopK(ratio=0.01))"
            )
        if inner.varies:
            raise ConfigError(
                f"{name}({inner}) is not possible, as a neighbour expects a message of a known length: write "
                f"one of fixed length, such as {name}(Blockwise(bits=3))"
            )
        if inner.answers or isinstance(inner, MajoritySign):
            raise ConfigError(
                f"{name}({inner}) is not possible, as what it decodes is a vote or a server's answer, and "
                f"not near the input: write {name}(Sign()), or {name}(TopK(ratio=0.01))"
            )

    @property
    def on_device(self) -> bool:
        return self.inner.on_device

    def one_shot(self, step: int) -> OneShotUse | None:
        """None, as no mean of what it sends is an answer."""
        return None

    def exempted(self) -> Compressor | None:
        """That of the codec; wrapped too if it is lossy."""
        inner = self.inner.exempted()
        return replace(self, inner=inner) if isinstance(inner, OneShot) and not inner.linear else inner

    @property
    @abstractmethod
    def kept(self) -> tuple[str, ...]:
        """The names of its state fields."""

    def init(self, like: Tensor) -> State:
        """Zeros, as all replicas are at the anchor."""
        return {name: torch.zeros_like(like, dtype=state_dtype(like.dtype)) for name in self.kept}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Send to the neighbours, and mix; a replica alone is its own answer."""
        new = {name: ctx.spare(name, state[name]) for name in self.kept}
        if ctx.peers > 1:
            return (yield from self.mixed(x, state, new, ctx))
        ctx.out.copy_(x)
        return Outcome(ctx.out, Exact(x), state)

    @abstractmethod
    def mixed(self, x: Tensor, state: State, new: dict[str, Tensor], ctx: Context) -> Exchange:
        """The exchange with neighbours; writes all of the state to `new`."""

    def send(
        self, given: Tensor, ctx: Context, scale: float = 1.0
    ) -> Generator[Request, Any, tuple[Tensor, Tensor, Transmitted]]:
        """Send `given`; returns the sum over the neighbours by W's row, and what they decode.

        The latter as a tensor and as a `Transmitted`.

        All results are multiplied by `scale`.
        """
        assert isinstance(self.inner, OneShot)
        mixed = ctx.scratch("mixed", given, given.shape, given.dtype)
        minus = ctx.scratch("decoded", given, given.shape, given.dtype)
        _, sent = yield ReduceEncoded(self.inner, given, ctx.inside("inner", out=mixed))
        if isinstance(sent, Exact):
            torch.neg(given, out=minus)
        else:
            sent.subtract_from_(minus.zero_())
        return mixed.mul_(scale), minus.mul_(-scale), sent
