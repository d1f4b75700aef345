"""Compressors around compressors: error feedback, and different compressors for different spans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

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
    ReduceEncoded,
    ScheduleState,
    Spans,
    State,
    Transmitted,
    add_rescaled,
    cut_factors,
    state_dtype,
)
from tacit.errors import ConfigError
from tacit.exchange.error_feedback import lasting
from tacit.exchange.finite_checks import finite, refuse_overflow
from tacit.exchange.joined_requests import fuse
from tacit.torch_compat import copy_each_, zero_each_


def inner_state(state: State, part: str) -> dict[str, Tensor]:
    """The state fields of the inner compressor, by its names."""
    prefix = part + "."
    found = {}
    for name, tensor in state.items():
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = tensor
    return found


def outer_state(state: State, part: str) -> dict[str, Tensor]:
    """The state of an inner compressor as fields of the wrapper's: `part.` before each name."""
    found = {}
    for name, tensor in state.items():
        found[f"{part}.{name}"] = tensor
    return found


@dataclass(frozen=True)
class Wrapper(Compressor):
    """A compressor around another one, `inner`, whose state fields are prefixed by `inner.`.

    State fields of the wrapper itself are rank-local, and as long as the parameters.
    """

    inner: Compressor

    def __post_init__(self) -> None:
        checks.compressor("inner", self.inner)

    @cached_property
    def hides_nonfinite(self) -> bool:  # type: ignore[override]
        """As of the inner compressor."""
        return self.inner.hides_nonfinite

    @property
    def needs_server(self) -> bool:
        return self.inner.needs_server

    def exempts(self, shape: torch.Size) -> bool:
        return self.inner.exempts(shape)

    def exempted(self) -> Compressor | None:
        return self.inner.exempted()

    @property
    def takes_momentum(self) -> Momentum | None:
        return self.inner.takes_momentum

    @property
    def changes(self) -> tuple[int, ...]:
        return self.inner.changes

    def one_shot(self, step: int) -> OneShotUse | None:
        return self.inner.one_shot(step)

    def for_model(self, matrices: tuple[Matrix, ...]) -> Compressor:
        return replace(self, inner=self.inner.for_model(matrices))

    def for_training(self, schedule_state: ScheduleState) -> Compressor:
        return replace(self, inner=self.inner.for_training(schedule_state))

    def ended(self, steps: int) -> str:
        return self.inner.ended(steps)

    def with_layout(self, matrices: tuple[Matrix, ...]) -> Compressor:
        return replace(self, inner=self.inner.with_layout(matrices))

    def is_shared(self, field: str) -> bool:
        return field.startswith("inner.") and self.inner.is_shared(field.removeprefix("inner."))

    def widths(self, field: str) -> tuple[int, ...] | None:
        return self.inner.widths(field.removeprefix("inner.")) if field.startswith("inner.") else None


@dataclass(frozen=True)
class Feedback(Wrapper):
    """Base of wrappers that add the errors of one round, of payloads or of means, to the next."""

    @property
    def on_device(self) -> bool:
        return self.inner.on_device

    @property
    def shows_nonfinite(self) -> bool:  # type: ignore[override]
        """As of the inner compressor, if that encodes once; else False."""
        return isinstance(self.inner, OneShot) and self.inner.shows_nonfinite

    def exempted(self) -> Compressor | None:
        """That of the inner compressor; wrapped too if it is lossy."""
        inner = self.inner.exempted()
        return replace(self, inner=inner) if isinstance(inner, OneShot) and not inner.linear else inner


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """Add the error of each round to the next (Seide 2014; Stich 2018; Karimireddy 2019).

    State: `residual`, rank-local, of the tensor's shape, in fp32 where that is of two bytes. Nothing is lost:
    the sum of all that was sent plus the residual is the sum of all inputs; with `decay`, less so.

    The optimizer multiplies the mean by the learning rate of its step, and the residual is from steps with an
    earlier rate. So the residual of a gradient is multiplied by lr_then / lr_now when the rate has
    changed: its effect on the parameters stays the same. That is EF-signSGD as in its paper, where lr g is
    compressed (Karimireddy et al. 2019, algorithm 1), and dist-EF-SGD (Zheng et al. 2019).

    Attributes:
        rescale: whether the residual follows the learning rate; off, it stays in units of the gradient.
        decay: the residual is multiplied by it in every round, in (0, 1]. Less forgets sooner what was not
            sent; SparseLoCo takes 0.95, of deltas of many steps (Sarfi et al. 2025, arXiv 2508.15706).
    """

    rescale: bool = True
    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.flag("rescale", self.rescale)
        hint = "write 1.0 to keep the whole residual, or SparseLoCo's 0.95"
        checks.real("decay", self.decay, hint, above=0, most=1)

    def one_shot(self, step: int) -> OneShotUse | None:
        """That of the inner compressor, with error feedback."""
        one_shot = self.inner.one_shot(step)
        return one_shot and one_shot._replace(has_feedback=True)

    def init(self, like: Tensor) -> State:
        """The inner compressor's state, and a residual of zeros."""
        residual = like.new_zeros(like.shape, dtype=state_dtype(like.dtype))
        return {"residual": residual, **outer_state(self.inner.init(like), "inner")}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Add the residual, run the inner exchange, and store the error as the new residual."""
        if (ctx.rescale and not self.rescale) or self.decay != 1.0:
            factors = ctx.rescale if self.rescale else ()
            ctx = replace(ctx, rescale=times(self.decay, factors, x.numel()))
        residual, new_residual = state["residual"], ctx.spare("residual", state["residual"])
        inside = ctx.inside("inner")
        if isinstance(self.inner, OneShot):
            mean, sent = yield ReduceEncoded(self.inner, x, inside, residual, new_residual)
            return Outcome(mean, sent, {**state, "residual": new_residual})
        if self._adds_itself(x, residual, ctx):
            done = yield from self.inner.exchange_with_feedback(
                x, residual, new_residual, inner_state(state, "inner"), inside
            )
            return done._replace(state={"residual": new_residual, **outer_state(done.state, "inner")})
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

    def _adds_itself(self, x: Tensor, residual: Tensor, ctx: Context) -> bool:
        """Whether the inner compressor adds the residual itself, and subtracts what it sends."""
        plain = not ctx.rescale and residual.dtype == x.dtype
        return plain and self.inner.adds_residual and not self.inner.hides_nonfinite


def times(decay: float, factors: Factors, numel: int) -> Factors:
    """The factors of a tensor of `numel` entries, each multiplied by `decay`."""
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

    @cached_property
    def numel(self) -> int:
        """The number of elements in all spans."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True)
class Partition(Compressor):
    """Different compressors for different parameters of one flat tensor; they share messages where possible.

    The first part works on the whole tensor in place, with zeros where other parts have their spans: the
    usual case, a few dense biases in a large compressed bucket, costs no copy of the bucket.

    Attributes:
        main: handles everything that no part does. It gets the whole tensor, and counts all of its entries.
        parts: each works on its spans, joined. They should be small, as they are copied.
    """

    main: Compressor
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        checks.compressor("main", self.main)
        if not isinstance(self.parts, tuple) or not all(isinstance(part, Part) for part in self.parts):
            raise ConfigError(
                f"parts={self.parts!r} is no tuple of Part: write (Part(Dense(), ((0, 10),)),), with a comma "
                f"after a single one"
            )

    @cached_property
    def hides_nonfinite(self) -> bool:  # type: ignore[override]
        """Whether any part does."""
        return self.main.hides_nonfinite or any(part.compressor.hides_nonfinite for part in self.parts)

    @property
    def shows_nonfinite(self) -> bool:  # type: ignore[override]
        """As of `main`, which gets zeros in the parts' spans; those are checked here."""
        return self.main.shows_nonfinite

    @property
    def sent_lasts(self) -> bool:  # type: ignore[override]
        return self.main.sent_lasts and all(part.compressor.sent_lasts for part in self.parts)

    @property
    def on_device(self) -> bool:
        return self.main.on_device and all(part.compressor.on_device for part in self.parts)

    @property
    def changes(self) -> tuple[int, ...]:
        parts = {step for part in self.parts for step in part.compressor.changes}
        return tuple(sorted({*self.main.changes, *parts}))

    def one_shot(self, step: int) -> OneShotUse | None:
        """The codec of `main`, with the spans of the parts as `others`."""
        one_shot = self.main.one_shot(step)
        others = tuple(sorted(span for part in self.parts for span in part.spans))
        return one_shot and one_shot._replace(others=others)

    def inside(self) -> Mapping[str, tuple[Compressor, Spans | None]]:
        """`main`, and each part with its spans."""
        parts = {f"part{i}": (part.compressor, part.spans) for i, part in enumerate(self.parts)}
        return {"main": (self.main, None), **parts}

    def counted_(self, x: Tensor, state: State) -> None:
        """Overwrite the spans of parts that send a weight; see `Compressor.counted_`."""
        for part, (inside, spans) in self.inside().items():
            if inside.weighed:
                spans = spans or ((0, len(x)),)
                mine = torch.cat([x[start:stop] for start, stop in spans])
                inside.counted_(mine, inner_state(state, part))
                for start, stop in spans:
                    x[start:stop], mine = mine[: stop - start], mine[stop - start :]

    def exempts(self, shape: torch.Size) -> bool:
        """No parameter: those that are exempt are in `parts`."""
        return False

    def init(self, like: Tensor) -> State:
        """The states of `main` and of all parts."""
        state = outer_state(self.main.init(like), "main")
        for i, part in enumerate(self.parts):
            state |= outer_state(part.compressor.init(like.new_empty(part.numel)), f"part{i}")
        return state

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Copy the parts out, run all exchanges at once, copy the parts' means back."""
        taken = [self._take(i, part, x, ctx) for i, part in enumerate(self.parts)]
        if ctx.look is not None and not all(map(finite, taken)):
            ctx.look()
        self.clear_parts_(x)
        inside = ctx.inside("main", of=1 - self._numel / x.numel())
        talks: list[Any] = [self.main.exchange(x, inner_state(state, "main"), inside)]
        for i, (part, piece) in enumerate(zip(self.parts, taken, strict=True)):
            # Where the mean may overwrite `x`, it may overwrite what was taken from it: no copy to send.
            mean = piece if x is ctx.out else ctx.scratch(f"mean{i}", x, piece.shape, x.dtype)
            inside = ctx.inside(f"part{i}", out=mean, of=part.numel / x.numel())
            if ctx.rescale:
                inside = replace(inside, rescale=_taken(ctx.rescale, part.spans))
            if isinstance(part.compressor, OneShot):  # its exchange is this request
                talks.append(ReduceEncoded(part.compressor, piece, inside))
            else:
                talks.append(part.compressor.exchange(piece, inner_state(state, f"part{i}"), inside))
        try:
            outcomes = yield from fuse(talks)
        finally:
            if x is not ctx.out:
                for part, piece in zip(self.parts, taken, strict=True):
                    _put(piece, part.spans, x)
        outcomes = [each if isinstance(each, Outcome) else Outcome(each[0], each[1], {}) for each in outcomes]
        for i in self._shown:
            refuse_overflow(outcomes[i].mean, ctx)  # later only the whole mean is checked
        main, others = outcomes[0], outcomes[1:]
        known, sent = main.finite, []
        after = outer_state(main.state, "main")
        for i, (part, other) in enumerate(zip(self.parts, others, strict=True)):
            _put(other.mean, part.spans, main.mean)
            known = known and (other.finite or finite(other.mean))
            after |= outer_state(other.state, f"part{i}")
            sent.append(other.sent)
        for tensor in main.state.values():  # as a sign cannot encode zero
            if tensor.shape == x.shape:
                self.clear_parts_(tensor)
        return Outcome(main.mean, _SentInParts(self, main.sent, tuple(sent)), after, known)

    @cached_property
    def _numel(self) -> int:
        """Entries in all parts."""
        return sum(part.numel for part in self.parts)

    @cached_property
    def _shown(self) -> tuple[int, ...]:
        """The numbers of the outcomes that show NaN although others hide it; 0 is that of `main`."""
        each = (self.main, *(part.compressor for part in self.parts))
        return tuple(i for i, mine in enumerate(each) if self.hides_nonfinite and not mine.hides_nonfinite)

    def _take(self, i: int, part: Part, x: Tensor, ctx: Context) -> Tensor:
        piece = ctx.scratch(f"piece{i}", x, (part.numel,), x.dtype)
        if x.is_meta:  # with out= on meta, here and elsewhere, torch imports its compiler for a second
            return piece
        return torch.cat([x[start:stop] for start, stop in part.spans], out=piece)

    def clear_parts_(self, x: Tensor) -> None:
        """Zero `x` (flat) in the parts' spans."""
        found = []
        for part in self.parts:
            for start, stop in part.spans:
                found.append(x[start:stop])
        zero_each_(found)


def _taken(factors: Factors, spans: Spans) -> Factors:
    """The factors of these spans, joined."""
    found: list[tuple[int, int, float]] = []
    at = 0
    for start, stop in spans:
        found += [(at + a, at + b, factor) for a, b, factor in cut_factors(factors, start, stop)]
        at += stop - start
    return tuple(found)


def _put(mean: Tensor, spans: tuple[tuple[int, int], ...], out: Tensor) -> None:
    sizes, places = [], []
    for start, stop in spans:
        sizes.append(stop - start)
        places.append(out[start:stop])
    copy_each_(places, [*torch.split(mean, sizes)])


@dataclass(frozen=True)
class _SentInParts(Transmitted):
    select: Partition
    main: Transmitted
    parts: tuple[Transmitted, ...]

    def subtract_from_(self, new_residual: Tensor) -> None:
        pieces = [torch.cat([new_residual[a:b] for a, b in part.spans]) for part in self.select.parts]
        self.select.clear_parts_(new_residual)
        self.main.subtract_from_(new_residual)
        for part, piece, sent in zip(self.select.parts, pieces, self.parts, strict=True):
            sent.subtract_from_(piece)
            _put(piece, part.spans, new_residual)

    def dense(self, like: Tensor) -> Tensor:
        whole = self.main.dense(like)
        for part, sent in zip(self.select.parts, self.parts, strict=True):
            _put(sent.dense(like.new_empty(part.numel)), part.spans, whole)
        return whole
