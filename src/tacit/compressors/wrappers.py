"""Compressors around compressors. A wrapper knows nothing of the one inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from tacit import checks
from tacit.contracts import (
    Compressor,
    Context,
    Exchange,
    Factors,
    Matrix,
    Momentum,
    OneShot,
    OneShotUse,
    Outcome,
    PartitionedCompressor,
    ReduceEncoded,
    ScheduleState,
    Spans,
    State,
    Transmitted,
    add_rescaled,
    cut_factors,
    lasting,
    state_dtype,
)
from tacit.errors import ConfigError
from tacit.exchange.combinators import fuse
from tacit.exchange.health import refuse_overflow


def inner_state(state: State, part: str) -> dict[str, Tensor]:
    """The fields of one inside, by their own names."""
    return {k.removeprefix(part + "."): v for k, v in state.items() if k.startswith(part + ".")}


def outer_state(state: State, part: str) -> dict[str, Tensor]:
    """The state of one inside, as fields of the wrapper's: `part.` before each name."""
    return {f"{part}.{k}": v for k, v in state.items()}


@dataclass(frozen=True)
class Wrapper(Compressor):
    """Around one compressor, whose state fields are `inner.` and whose answers hold for both.

    A state field of the wrapper's own is rank-local, and as long as the parameters.
    """

    inner: Compressor

    def __post_init__(self) -> None:
        checks.compressor("inner", self.inner)

    @property
    def hides_nonfinite(self) -> bool:  # type: ignore[override]
        """As the one inside."""
        return self.inner.hides_nonfinite

    @property
    def needs_server(self) -> bool:
        """As the one inside."""
        return self.inner.needs_server

    def exempts(self, shape: torch.Size) -> bool:
        """As the one inside."""
        return self.inner.exempts(shape)

    def exempted(self) -> Compressor | None:
        """As the one inside; what this wrapper does is not for them."""
        return self.inner.exempted()

    @property
    def takes_momentum(self) -> Momentum | None:
        """As the one inside."""
        return self.inner.takes_momentum

    @property
    def changes(self) -> tuple[int, ...]:
        """As the one inside."""
        return self.inner.changes

    def one_shot(self, step: int) -> OneShotUse | None:
        """As the one inside."""
        return self.inner.one_shot(step)

    def for_model(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """Pass it on."""
        return replace(self, inner=self.inner.for_model(matrices))

    def for_training(self, schedule_state: ScheduleState) -> Compressor:
        """Pass it on."""
        return replace(self, inner=self.inner.for_training(schedule_state))

    def ended(self, steps: int) -> str:
        """As the one inside."""
        return self.inner.ended(steps)

    def with_layout(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """Pass it on."""
        return replace(self, inner=self.inner.with_layout(matrices))

    def is_shared(self, field: str) -> bool:
        """What is not of the one inside is this rank's own."""
        return field.startswith("inner.") and self.inner.is_shared(field.removeprefix("inner."))

    def widths(self, field: str) -> tuple[int, ...] | None:
        """What is not of the one inside is as long as the parameter."""
        return self.inner.widths(field.removeprefix("inner.")) if field.startswith("inner.") else None


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """What a round does not send is owed, and added to the next (Seide 2014; Stich 2018; Karimireddy 2019).

    State: `residual`, rank-local, of the tensor's shape, in fp32 where that is of two bytes. Nothing is lost:
    the sum of all that was sent plus the residual is the sum of all that was given; with `decay`, less so.

    The optimizer multiplies what arrives by its learning rate of that step, and what waited was made at the
    rate of an earlier one. So what is owed of a gradient is multiplied by lr_then / lr_now when the rate has
    changed: the step that it stands for stays the same. That is EF-signSGD as its paper has it, where lr g is
    what is compressed (Karimireddy et al. 2019, algorithm 1), and dist-EF-SGD (Zheng et al. 2019).

    Attributes:
        rescale: whether what is owed follows the learning rate; off, it stays in units of the gradient.
        decay: what is owed is multiplied by it in every round, in (0, 1]. Less forgets sooner what was not
            sent; SparseLoCo takes 0.95, of progress over many steps (Sarfi et al. 2025, arXiv 2508.15706).
    """

    rescale: bool = True
    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.flag("rescale", self.rescale)
        hint = "write 1.0 to keep all that is owed, or SparseLoCo's 0.95"
        checks.real("decay", self.decay, hint, above=0, most=1)

    @property
    def on_device(self) -> bool:
        """As the one inside."""
        return self.inner.on_device

    def one_shot(self, step: int) -> OneShotUse | None:
        """The one inside, and what it does not say is owed."""
        one_shot = self.inner.one_shot(step)
        return one_shot and one_shot._replace(has_feedback=True)

    def init(self, like: Tensor) -> State:
        """Nothing is owed yet."""
        residual = torch.zeros_like(like, dtype=state_dtype(like.dtype))
        return {"residual": residual, **outer_state(self.inner.init(like), "inner")}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Add what is owed, let the one inside speak, keep what it did not say."""
        if (ctx.rescale and not self.rescale) or self.decay != 1.0:
            factors = ctx.rescale if self.rescale else ()
            ctx = replace(ctx, rescale=_times(self.decay, factors, x.numel()))
        residual, new_residual = state["residual"], ctx.spare("residual", state["residual"])
        inside = ctx.inside("inner")
        if isinstance(self.inner, OneShot):
            mean, sent = yield ReduceEncoded(self.inner, x, inside, residual, new_residual)
            return Outcome(mean, sent, {**state, "residual": new_residual})
        given = add_rescaled(x, residual, ctx.rescale, new_residual)
        if new_residual.dtype != x.dtype:
            given = ctx.scratch("given", x, x.shape, x.dtype).copy_(new_residual)
        if self.inner.hides_nonfinite:
            refuse_overflow(given, ctx)
        done = yield from self.inner.exchange(given, inner_state(state, "inner"), inside)
        if given is new_residual:
            done.sent.subtract_from_(new_residual)
        else:
            new_residual.sub_(done.sent.dense(given))
        sent = lasting(done.sent, x, residual, new_residual, ctx.rescale)
        return done._replace(sent=sent, state={"residual": new_residual, **outer_state(done.state, "inner")})


def _times(decay: float, factors: Factors, numel: int) -> Factors:
    """The factors of a tensor of so many entries, all of which decay too."""
    if decay == 1.0:
        return factors
    found: list[tuple[int, int, float]] = []
    at = 0
    for start, stop, factor in (*factors, (numel, numel, 1.0)):
        found += [(at, start, decay)] if at < start else []
        found += [(start, stop, factor * decay)] if start < stop else []
        at = stop
    return tuple(found)


@dataclass(frozen=True)
class Part:
    """The spans of a flat tensor that one compressor handles: rising, disjoint (start, stop) pairs."""

    compressor: Compressor
    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        checks.compressor("compressor", self.compressor)
        edges = [0, *(edge for span in self.spans for edge in span)]
        if any(a > b for a, b in pairwise(edges)):
            raise ConfigError(
                f"spans={self.spans} overlap, or do not rise: write (start, stop) of each, in order, such as "
                "((0, 10), (50, 60))"
            )

    @property
    def numel(self) -> int:
        """Elements in all spans."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True)
class Partition(PartitionedCompressor):
    """Different compressors for different parameters of one flat tensor; their messages travel together.

    The first part works on the whole tensor in place, with zeros where other parts have their spans: the
    usual case, a few dense biases in a large compressed bucket, costs no copy of the bucket.

    Attributes:
        main: handles everything that no part does. It sees the whole tensor, and counts its entries so.
        parts: each works on its spans, joined. Small ones, else the copies cost.
    """

    main: Compressor
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        checks.compressor("main", self.main)
        if not isinstance(self.parts, tuple) or not all(isinstance(part, Part) for part in self.parts):
            raise ConfigError(
                f"parts={self.parts!r} is no tuple of Part: write (Part(Dense(), ((0, 10),)),), with a comma "
                "behind a single one"
            )

    @property
    def hides_nonfinite(self) -> bool:  # type: ignore[override]
        """If any of them does."""
        return self.main.hides_nonfinite or any(part.compressor.hides_nonfinite for part in self.parts)

    @property
    def on_device(self) -> bool:
        """If all of them are."""
        return self.main.on_device and all(part.compressor.on_device for part in self.parts)

    @property
    def changes(self) -> tuple[int, ...]:
        """Those of all of them."""
        parts = {step for part in self.parts for step in part.compressor.changes}
        return tuple(sorted({*self.main.changes, *parts}))

    def one_shot(self, step: int) -> OneShotUse | None:
        """As the main one, and where the parts have their spans."""
        one_shot = self.main.one_shot(step)
        others = tuple(sorted(span for part in self.parts for span in part.spans))
        return one_shot and one_shot._replace(others=others)

    def inside(self) -> Mapping[str, tuple[Compressor, Spans | None]]:
        """The main one, and each part with its spans."""
        parts = {f"part{i}": (part.compressor, part.spans) for i, part in enumerate(self.parts)}
        return {"main": (self.main, None), **parts}

    def exempts(self, shape: torch.Size) -> bool:
        """The exemption is what this wrapper carries out."""
        return False

    def init(self, like: Tensor) -> State:
        """The states of all of them."""
        state = outer_state(self.main.init(like), "main")
        for i, part in enumerate(self.parts):
            state |= outer_state(part.compressor.init(like.new_empty(part.numel)), f"part{i}")
        return state

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Take the parts out, let all speak at once, put the parts' means back."""
        taken = [self._take(i, part, x, ctx) for i, part in enumerate(self.parts)]
        clean = self._without_parts(x, ctx)
        talks = [
            self.main.exchange(
                clean,
                inner_state(state, "main"),
                ctx.inside("main", of=1 - sum(part.numel for part in self.parts) / x.numel()),
            )
        ]
        for i, (part, piece) in enumerate(zip(self.parts, taken, strict=True)):
            mean = ctx.scratch(f"mean{i}", x, piece.shape, x.dtype)
            inside = ctx.inside(f"part{i}", out=mean, of=part.numel / x.numel())
            if ctx.rescale:
                inside = replace(inside, rescale=_taken(ctx.rescale, part.spans))
            talks.append(part.compressor.exchange(piece, inner_state(state, f"part{i}"), inside))
        main, *others = yield from fuse(talks)
        for mine, done in zip(
            (self.main, *(part.compressor for part in self.parts)), (main, *others), strict=True
        ):
            if self.hides_nonfinite and not mine.hides_nonfinite:
                refuse_overflow(done.mean, ctx)  # the mean of all is not looked at
        for part, other in zip(self.parts, others, strict=True):
            _put(other.mean, part.spans, main.mean)
        self._clear(main.state, x.shape)
        after = outer_state(main.state, "main")
        for i, other in enumerate(others):
            after |= outer_state(other.state, f"part{i}")
        return Outcome(main.mean, _SentInParts(self, main.sent, tuple(o.sent for o in others)), after)

    def _take(self, i: int, part: Part, x: Tensor, ctx: Context) -> Tensor:
        piece = ctx.scratch(f"piece{i}", x, (part.numel,), x.dtype)
        at = 0
        for start, stop in part.spans:
            piece[at : at + stop - start] = x[start:stop]
            at += stop - start
        return piece

    def _clear(self, state: State, shape: torch.Size) -> None:
        """Forget what the main compressor remembers of others' spans: one bit cannot say zero, say."""
        for tensor in state.values():
            for part in self.parts if tensor.shape == shape else ():
                for start, stop in part.spans:
                    tensor[start:stop] = 0

    def _without_parts(self, x: Tensor, ctx: Context) -> Tensor:
        if x is not ctx.out:
            ctx.out.copy_(x)
        for part in self.parts:
            for start, stop in part.spans:
                ctx.out[start:stop] = 0
        return ctx.out


def _taken(factors: Factors, spans: Spans) -> Factors:
    """The factors of these spans, joined."""
    found: list[tuple[int, int, float]] = []
    at = 0
    for start, stop in spans:
        found += [(at + a, at + b, factor) for a, b, factor in cut_factors(factors, start, stop)]
        at += stop - start
    return tuple(found)


def _put(mean: Tensor, spans: tuple[tuple[int, int], ...], out: Tensor) -> None:
    at = 0
    for start, stop in spans:
        out[start:stop] = mean[at : at + stop - start]
        at += stop - start


@dataclass(frozen=True)
class _SentInParts(Transmitted):
    select: Partition
    main: Transmitted
    parts: tuple[Transmitted, ...]

    def subtract_from_(self, new_residual: Tensor) -> None:
        pieces = [torch.cat([new_residual[a:b] for a, b in part.spans]) for part in self.select.parts]
        for part in self.select.parts:
            for start, stop in part.spans:
                new_residual[start:stop] = 0
        self.main.subtract_from_(new_residual)
        for part, piece, sent in zip(self.select.parts, pieces, self.parts, strict=True):
            sent.subtract_from_(piece)
            _put(piece, part.spans, new_residual)

    def dense(self, like: Tensor) -> Tensor:
        whole = self.main.dense(like)
        for part, sent in zip(self.select.parts, self.parts, strict=True):
            _put(sent.dense(like.new_empty(part.numel)), part.spans, whole)
        return whole
