"""Gradients that are sent only when they have changed enough (Chen, Giannakis, Sun & Yin, NeurIPS 2018)."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.blockwise import Blockwise
from tacit.contracts import (
    AllReduce,
    Compressor,
    Context,
    Exchange,
    Matrix,
    Outcome,
    Read,
    ReduceEncoded,
    Request,
    State,
    Transmitted,
)
from tacit.exchange.finite_checks import refuse_overflow
from tacit.kernels.dispatch import on_host


@dataclass(frozen=True)
class LAG(Compressor):
    """Use a rank's last gradient again until a new one differs enough from it (LAG-WK, the worker's rule).

    The paper's rule (15a), on each of P workers, where the parameters move by a times the SUM of gradients:

        upload, if |g - g_last|^2 > 1 / (a^2 P^2) x sum_{d=1..D} xi |theta^{k+1-d} - theta^{k-d}|^2

    The optimizer here moves by lr times the MEAN, so that a is lr / P, and with steps of plain SGD the right
    side is xi times the sum of the last D means' squares. That is what is compared, in all strategies: it is
    the squared norm of the gradient that the paper approximates by the motion, and momentum or a change of lr
    does not disturb it.

    A round has two messages: first whether each rank has a new gradient, 2 (P - 1) / P x 4 bytes; then, if
    any has, an all-reduce of all ranks' current gradients, 2 (P - 1) / P x n b bytes. If none has,
    nothing else is sent, and the mean is that of the round before. On a GPU the host waits for the flags,
    once for all buckets of a backward. So bytes are saved in rounds in which no
    rank has a new gradient, and only there: a rank that has none takes part in an all-reduce all the same.

    State: `held`, this rank's current gradient, rank-local; `mean`, of these, and `norms`, those of
    the last D means by parameter, equal on all ranks. It has a memory, so leave `ErrorFeedback` out.

    Differences from the paper: the rule is applied to a bucket, not to the whole model, so that some buckets
    may be sent and others not; ranks send the held gradient in place of its change, which on an all-reduce
    costs the same, and leaves no rounding errors to add up in the sum of all changes. Meant for gradients
    over all data, or large batches: the noise of small ones is a change in every step, and all of it is sent.

    Attributes:
        xi: how much change is tolerated; all of the paper's xi_d. A larger one sends less, and uses older
            gradients.
        window: D, the number of last means that a change is compared with.
        matrices: where the parameters lie in the flat tensor; filled in when it is attached.
    """

    xi: float = 0.1
    window: int = 10
    matrices: tuple[Matrix, ...] = ()

    on_device: ClassVar[bool] = True
    shared: ClassVar[frozenset[str]] = frozenset({"mean", "norms"})
    varies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.real("xi", self.xi, "write 0.1, as is usual, or 0 to send all changes", least=0.0)
        checks.whole("window", self.window, 1, None, "10 means are usual")
        checks.matrices(self.matrices)

    def exempts(self, shape: torch.Size) -> bool:
        """No parameter: a bucket is compared and sent as a whole."""
        return False

    def with_layout(self, matrices: tuple[Matrix, ...]) -> Compressor:
        return replace(self, matrices=matrices)

    def widths(self, field: str) -> tuple[int, ...] | None:
        """`norms` has `window` elements for each parameter."""
        return tuple(self.window for _ in self.matrices) if field == "norms" else None

    def init(self, like: Tensor) -> State:
        """Zeros: nothing has been sent yet."""
        norms = like.new_zeros(self.window * len(self.matrices))
        return {"held": torch.zeros_like(like), "mean": torch.zeros_like(like), "norms": norms}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Average a flag for "new"; if any rank's is set, average the held gradients."""
        held, is_new = self._held(x, state, ctx)
        mean, fresh = state["mean"], (yield from _is_new_anywhere(is_new, x, ctx))
        if fresh:
            mean = ctx.spare("mean", mean)
            mean.copy_(held)
            yield AllReduce((mean,))
        norms = self._norms(mean if fresh else None, state, ctx)
        ctx.out.copy_(mean)
        return Outcome(ctx.out, HeldGradient(held), {"held": held, "mean": mean, "norms": norms})

    def _held(self, x: Tensor, state: State, ctx: Context) -> tuple[Tensor, bool | Tensor]:
        """This rank's held gradient from now on, and whether it is new: on a device as a number there."""
        fresh = ctx.spare("held", state["held"])
        torch.sub(x, state["held"], out=fresh)
        if x.is_meta:
            return fresh, True
        is_new = _norm(fresh) ** 2 > self.xi * _norm(state["norms"]) ** 2
        if isinstance(is_new, Tensor):
            return torch.where(is_new, x, state["held"], out=fresh), is_new
        return (fresh.copy_(x) if is_new else state["held"]), is_new

    def _norms(self, mean: Tensor | None, state: State, ctx: Context) -> Tensor:
        """For each parameter those of the last D means, newest first; `mean` is None where it is the last."""
        norms = ctx.spare("norms", state["norms"])
        after, before = (each.view(len(self.matrices), self.window) for each in (norms, state["norms"]))
        after[:, 1:] = before[:, :-1]
        if mean is None:
            after[:, 0] = before[:, 0]
            return norms
        most = torch.finfo(norms.dtype).max
        for row, m in zip(after, self.matrices, strict=True):
            norm = _norm(mean[m.start : m.start + m.rows * m.columns])
            row[0] = norm.clamp(max=most) if isinstance(norm, Tensor) else min(norm, most)
        return norms


@dataclass(frozen=True)
class LAQ(LAG):
    """LAG whose changes travel in a few bits an entry (Sun et al., NeurIPS 2019, arXiv 1909.07588).

        q_r <- Q(g_r - held_r), 0 where that has not changed enough;    held_r <- held_r + q_r
        answer <- answer + mean_r(q_r)                                  = mean_r(held_r)

    Two messages, as `LAG`: the flags, and if any is set the bytes of `Blockwise(bits)` to P - 1 peers.
    What a change loses to rounding is part of the next one, so no residual is kept. State: as of `LAG`.

    Differences from the paper, beside those of `LAG`: a scale for each 512 entries, not one for all; the
    rule compares the change before it is rounded, and has no terms for errors of rounding.

    Attributes:
        bits: of an entry, 2 to 8.
    """

    bits: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole("bits", self.bits, 2, 8, "write 4, or from 2 to 8")

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Average a flag for "new"; if any rank's is set, average the changes."""
        _, is_new = self._held(x, state, ctx)
        held, mean = (ctx.spare(name, state[name]) for name in ("held", "mean"))
        change = ctx.scratch("change", x, x.shape, x.dtype)
        torch.sub(x, state["held"], out=change)
        refuse_overflow(change, ctx)
        if isinstance(is_new, Tensor):
            change.masked_fill_(is_new.logical_not(), 0)
        elif not is_new:
            change.zero_()
        if not (yield from _is_new_anywhere(is_new, x, ctx)):
            ctx.out.copy_(state["mean"])
            after = {**state, "norms": self._norms(None, state, ctx)}
            return Outcome(ctx.out, HeldGradient(state["held"]), after)
        held.copy_(change)
        _, sent = yield ReduceEncoded(Blockwise(self.bits), change, ctx.inside("change", out=mean))
        sent.subtract_from_(change)
        held.sub_(change).add_(state["held"])
        mean.add_(state["mean"])
        norms = self._norms(mean, state, ctx)
        ctx.out.copy_(mean)
        return Outcome(ctx.out, HeldGradient(held), {"held": held, "mean": mean, "norms": norms})


def _is_new_anywhere(is_new: bool | Tensor, x: Tensor, ctx: Context) -> Generator[Request, Any, bool]:
    """Whether any rank has a new gradient. On a device the host waits: else it launches no message."""
    news = ctx.scratch("news", x, (1,), torch.float32)
    news.copy_(is_new) if isinstance(is_new, Tensor) else news.fill_(is_new)
    yield AllReduce((news,))  # of zeros and ones: above zero on all ranks, or on none
    if x.is_meta:
        return True
    if on_host(x):
        return bool(news > 0)
    (found,) = yield Read((news > 0).int())
    return bool(found)


def _norm(x: Tensor) -> float | Tensor:
    """On a device in fp64, and there."""
    if not on_host(x):
        there: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
        return there
    norm = float(torch.linalg.vector_norm(x))
    # Only squares near the largest number need the memory that a wider type takes.
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(x, dtype=torch.float64))


@dataclass(frozen=True)
class HeldGradient(Transmitted):
    """This rank's part of the mean, sent now or earlier."""

    held: Tensor

    def subtract_from_(self, new_residual: Tensor) -> None:
        new_residual.sub_(self.held)

    def dense(self, like: Tensor) -> Tensor:
        return self.held.clone().view_as(like)
