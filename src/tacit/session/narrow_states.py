"""Residuals that are kept in bf16 between exchanges, and are float32 inside of one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from tacit.contracts import Context, Exact, Outcome, Request, State
from tacit.kernels.narrow import round_at_random

FIELDS = ("residual", "velocity", "second")
"""The last parts of their names: of what is sent, DGC's of gradients, and of means."""


class NarrowStates:
    """The residuals of a bucket, each rounded at random to bf16 when an exchange is over.

    One that is rounded to the nearest number would lose what is below half a unit in its last place, round
    by round; rounded at random it is right in the mean. The random bits follow from the session's seed, the
    round, the bucket, the field and the rank, so that a round that is made again draws the same.

    Args:
        state: the bucket's first state.
    """

    def __init__(self, state: State) -> None:
        self._fields = [
            name
            for name, tensor in state.items()
            if tensor.dtype == torch.float32 and name.rpartition(".")[2] in FIELDS
        ]
        self._wide: dict[str, tuple[Tensor, Tensor]] = {}

    def kept(self, state: State) -> State:
        """The state as it is kept."""
        return {name: x.bfloat16() if name in self._fields else x for name, x in state.items()}

    def make_room(self, state: State) -> None:
        """Allocate what an exchange reads, and what it writes.

        In stream order the exchange does it itself, on its stream: the host lets go of both as soon as all is
        launched, and what comes on another stream may not have them then.
        """
        for name in self._fields:
            if name not in self._wide:
                like = torch.empty_like(state[name], dtype=torch.float32)
                self._wide[name] = like, torch.empty_like(like)

    def spare(self, field: str) -> Tensor | None:
        """What an exchange writes a residual to; None: the field is none."""
        return self._wide[field][1] if field in self._wide else None

    def exchanged(
        self,
        conduct: Callable[[State, Context], Generator[Request, Any, Outcome]],
        state: State,
        ctx: Context,
        room: Callable[[str], Tensor],
    ) -> Generator[Request, Any, Outcome]:
        """An exchange by residuals of float32, whose outcome has narrow ones.

        Args:
            conduct: makes the exchange.
            room: the second buffer of a field, for the new residual.
        """
        self.make_room(state)
        wide = {name: self._wide[name][0].copy_(state[name]) for name in self._fields}
        outcome = yield from conduct({**state, **wide}, ctx)
        after = {**outcome.state}
        for name in self._fields:
            put = room(name)
            round_at_random(after[name], ctx.draw("narrow", name, ctx.rank), put)
            after[name] = put
        self._wide.clear()  # to which what it says was sent may refer: of gradients nobody asks for that
        return outcome._replace(state=after, sent=Exact(outcome.mean))
