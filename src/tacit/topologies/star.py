"""Parameter servers: every worker pushes to them, and pulls from them (Li et al., OSDI 2014)."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from tacit import checks
from tacit.contracts import (
    AdaptiveRounds,
    AllReduce,
    Compressor,
    Context,
    Exact,
    Exchange,
    Matrix,
    Merge,
    OneShot,
    OneShotUse,
    Outcome,
    Overlap,
    Payload,
    PayloadSpec,
    PushPull,
    ReduceEncoded,
    Request,
    Rounds,
    ServerTopology,
    Spans,
    State,
)
from tacit.errors import ConfigError
from tacit.exchange.error_feedback import encoded, transmitted, withheld_
from tacit.exchange.joined_requests import as_asked, conducted, leaves

# ---- consistency: when the server answers -------------------------------------------------------------


@dataclass(frozen=True)
class Synchronous:
    """The server answers when all workers have pushed in a round (BSP).

    Attributes:
        backup_workers: how many of them a round does not wait for (Chen et al. 2016). Their late pushes are
            dropped, and they get the answer of that round.
    """

    backup_workers: int = 0

    in_rounds: ClassVar[bool] = True
    bound: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        hint = "write how many workers a round need not wait for, such as 1"
        checks.whole("backup_workers", self.backup_workers, 0, None, hint)


@dataclass(frozen=True)
class Asynchronous:
    """The server answers at once (Downpour: Dean et al. 2012; as Hogwild, on a network)."""

    in_rounds: ClassVar[bool] = False
    bound: ClassVar[int | None] = None


@dataclass(frozen=True)
class StaleSynchronous:
    """The server answers when no worker is more than `bound` steps behind (SSP: Ho et al. 2013).

    Attributes:
        bound: how many steps a worker may be ahead of the slowest; 0 waits for all, after each push.
    """

    bound: int = 3

    in_rounds: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.whole("bound", self.bound, 0, None, "write how many steps a worker may be ahead, such as 3")


Consistency: TypeAlias = Synchronous | Asynchronous | StaleSynchronous


# ---- what the server does with a push -----------------------------------------------------------------


@dataclass(frozen=True)
class DelayedNesterov:
    """The server steps by each worker's progress at once, and by its momentum after so many of them.

    The outer optimizer of asynchronous DiLoCo (Liu et al. 2024, arXiv 2401.09135): plain momentum would be
    applied as often as there are workers, to progress that is late.

    Attributes:
        lr: of the outer step.
        momentum: from 0 to below 1.
        delay: how many pushes there are between two steps of the momentum, each of which counts 1 / delay;
            None: the number of workers.
    """

    lr: float = 0.7
    momentum: float = 0.9
    delay: int | None = None

    def __post_init__(self) -> None:
        checks.real("lr", self.lr, "write 0.7", above=0)
        checks.real("momentum", self.momentum, "write 0.9, or 0 for none", least=0, below=1)
        if self.delay is not None:
            hint = "write after how many pushes the momentum steps, or leave it out: as many as workers"
            checks.whole("delay", self.delay, 1, None, hint)


# ---- the topology -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Star(ServerTopology):
    """Workers exchange with parameter servers only, which are no ranks of the world.

    Bytes a worker: what it pushes, and what it pulls; a server carries those of all P workers. The launcher
    starts the servers (`tacit run --servers 2`), and passes their addresses to the workers.

    With `Synchronous()` the server only averages: gradients are pushed in backward and the mean comes back,
    equal on all workers. Otherwise it keeps the parameters, and each worker its optimizer: a worker pushes
    the change by its step, of which the server adds the share 1/P (so that P pushes move as far as one
    synchronous step), and goes on from the parameters as they are then. With `optimizer="server"` it
    pushes its gradient, and the server steps.

    Attributes:
        consistency: when the server answers.
        pull: compresses answers. If the server averages, wrap it in `ErrorFeedback` to add the error of one
            answer to the next. Where it keeps parameters, the answer is their difference to the worker's, so
            that nothing is lost either way (Yan et al. 2020), and the server has a copy for each worker; with
            merge=CommonPoint() replicas keep what they have not sent. None: dense; where sparse entries were
            pushed, their union; under `MeanFeedback` compressed as the pushes are, with the error of one
            answer added to the next.
        optimizer: whose optimizer steps: that of each "worker", or that of the "server", which is SGD, Adam
            or AdamW as the workers' is.
        compensation: lambda of DC-ASGD (Zheng et al. 2017): a gradient g that was taken at w_old counts as
            g + lambda g g (w - w_old). 0: as it is. Needs optimizer="server".
        by_staleness: divide a push by how many others were applied since its worker pulled (Zhang, Gupta,
            Lian & Liu 2016).
        deadline: seconds after which a worker stops sending a push (bounded loss: MLT, Wang et al., NSDI
            2024), if the server averages: what has not left stays in its residual. The largest entries have
            left, and the answer, by a `pull` that is in parts too, has as many parts as the push that has
            most. Needs `ErrorFeedback(InParts(TopK()))`. None: all is sent, however long it takes.
        outer: steps by what `Asynchronous()` workers push. None: the server adds the share 1/P of it.
    """

    consistency: Consistency = Synchronous()
    pull: Compressor | None = None
    optimizer: Literal["worker", "server"] = "worker"
    compensation: float = 0.0
    by_staleness: bool = False
    deadline: float | None = None
    outer: DelayedNesterov | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.consistency, Consistency):
            raise ConfigError(
                f"consistency={self.consistency!r} is not known: write Synchronous(), Asynchronous() or "
                "StaleSynchronous(bound=3)"
            )
        checks.one_of("optimizer", self.optimizer, ("worker", "server"))
        checks.real("compensation", self.compensation, "write DC-ASGD's lambda, such as 0.04", least=0)
        checks.flag("by_staleness", self.by_staleness)
        if self.deadline is not None:
            hint = "write the seconds after which no more of a push is sent, such as 0.3, or leave it out"
            checks.real("deadline", self.deadline, hint, above=0)
            if not self.averages:
                raise ConfigError(
                    f"deadline={self.deadline:g} with consistency={self.consistency}, "
                    f"optimizer={self.optimizer!r} is not possible: {hint.rpartition(', or ')[2]}, or write "
                    "Synchronous() and optimizer='worker'"
                )
        alone = self.consistency == Asynchronous() and self.optimizer == "worker" and not self.by_staleness
        if self.outer is not None and not alone:
            raise ConfigError(
                f"outer={self.outer} with consistency={self.consistency}, optimizer={self.optimizer!r}, "
                f"by_staleness={self.by_staleness} is not possible, as the server steps by each push as it "
                "comes: write Asynchronous() and optimizer='worker', and leave by_staleness out"
            )
        if self.pull is not None:
            checks.compressor("pull", self.pull)
            _one_shot(self.pull)
            if self.pull.with_layout((Matrix(0, 1, 1),)) != self.pull:
                raise ConfigError(
                    f"pull={self.pull} goes by where rows lie, which a server does not know: write a "
                    "compressor such as QSGD() or TopK(ratio=0.01), or leave pull out"
                )
        waits = self.consistency.in_rounds
        if waits and (self.compensation or self.by_staleness):
            raise ConfigError(
                f"compensation={self.compensation:g}, by_staleness={self.by_staleness} with "
                f"consistency={self.consistency} would do nothing, as no push is stale: leave them out, or "
                "write Asynchronous() or StaleSynchronous()"
            )
        if self.compensation and self.optimizer == "worker":
            raise ConfigError(
                f"compensation={self.compensation:g} needs gradients, and with optimizer='worker' deltas are "
                "pushed: write optimizer='server'"
            )

    @cached_property
    def averages(self) -> bool:
        """Whether the server only averages; otherwise it keeps the parameters."""
        return self.consistency == Synchronous() and self.optimizer == "worker"

    @property
    def counts_all(self) -> bool:
        """False with backup workers, whose late pushes are dropped, where stale ones count less, or outer."""
        return self.averages or not (self.consistency.in_rounds or self.by_staleness or self.outer)

    @property
    def has_feedback(self) -> bool:
        """Whether answers have error feedback."""
        return self.averages and self.pull is not None and _one_shot(self.pull).has_feedback

    def admit(self, subject: str, rounds: Rounds, merge: Merge, overlap: Overlap) -> None:
        """Require gradients where the server steps, deltas where workers do; either if it only averages."""
        wanted = "delta" if self.independent and self.optimizer == "worker" else "gradient"
        if subject != wanted and not (self.averages and subject == "delta"):
            raise ConfigError(
                f"subject={subject!r} with {self} is not possible: the server "
                f"{'averages gradients' if self.averages else 'takes ' + wanted}; write subject={wanted!r}"
            )
        if self.independent and isinstance(rounds, AdaptiveRounds):
            raise ConfigError(
                f"rounds={rounds} need measurements of all workers, and with {self} nobody waits for "
                "others: write Every(8)"
            )
        if subject == "gradient" and self.independent and overlap.apply_at(0):
            raise ConfigError(
                f"overlap={overlap} with {self} is not possible, as the next step starts from the "
                "server's answer: leave it out, or write optimizer='worker'"
            )

    def summary(self, compressors: Sequence[Compressor]) -> str:
        """A few words for `Attached.active_path`."""
        return "parameter servers"

    def collectives(self, compressors: Sequence[Compressor]) -> str:
        """A push to the server and a pull from it."""
        return "push and pull, by parameter servers"

    def check(self, compressor: Compressor) -> None:
        """Refuse compressors with several messages where the server keeps parameters."""
        if not self.averages or self.pull is not None:
            super().check(compressor)
        one_shot = compressor.one_shot(0)
        if self.deadline is not None and not (one_shot and one_shot.codec.partial and one_shot.has_feedback):
            raise ConfigError(
                f"{compressor} with deadline={self.deadline:g} is not possible, as what is not sent in time "
                "must be the least, and must not be lost: write ErrorFeedback(InParts(TopK(ratio=0.01)))"
            )
        if not self.averages and one_shot is not None and one_shot.is_predicted:
            raise ConfigError(
                f"{compressor} sends errors of a prediction, which the server of {self} cannot make: leave "
                "the prediction out, or write consistency=Synchronous() and optimizer='worker'"
            )
        if self.independent and one_shot is None:
            raise ConfigError(
                f"{compressor} sends several messages a round, and {self.consistency} answers each one "
                "alone: use a one-shot compressor, such as TopK, or consistency=Synchronous()"
            )

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Run the compressor's exchange; simultaneous requests share one push, which the server answers."""
        exchange = compressor.exchange(x, state, ctx)
        if self.averages:
            return self._averaged(conducted(exchange, flags=ctx.nonfinite_flags), ctx)
        return self._kept(exchange, x, compressor, state, ctx)

    def agree(self, x: Tensor) -> Generator[Request, Any, None]:
        """Wait until all workers have pushed, and take the resulting parameters."""
        pull = PayloadSpec(None, x.numel(), x.dtype)
        (answer,) = yield PushPull((), (), (pull,), do="meet")
        _read(pull, answer, x)

    # ---- the server averages --------------------------------------------------------------------------

    def _averaged(self, exchange: Exchange, ctx: Context) -> Exchange:
        answer: Any = None
        while True:
            try:
                request = exchange.send(answer)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            asked = leaves(request)
            payloads: list[Payload] = []
            forms: list[_Form] = []
            for each in asked:
                self._push(each, ctx, payloads, forms)
            pieces, pulls = _formats(tuple(forms), self.pull, ctx.peers)
            whole = [()] * len(pieces) if self.deadline is None else [*map(_whole, pieces, payloads)]
            came = yield PushPull(tuple(payloads), pieces, pulls, lr=ctx.lr, seconds=self.deadline)
            replies = zip(pulls, came, payloads, whole, strict=True)
            answer = as_asked(request, iter([_answer(each, replies) for each in asked]))

    def _push(self, request: Request, ctx: Context, payloads: list[Payload], forms: list[_Form]) -> None:
        """Append the payloads of a request, and their forms."""
        if isinstance(request, ReduceEncoded):
            payload, x = encoded(request), request.x
            if ctx.finite_probe is not None:
                _add_up(ctx.finite_probe, payload)
            payloads.append(payload)
            forms.append((request.codec, x.numel(), x.dtype, request.has_mean_feedback))
        elif isinstance(request, AllReduce):
            if request.finite_probe is not None:
                _add_up(request.finite_probe, request.payload)
            for x in request.payload:
                payloads.append((x,))
                forms.append((None, x.numel(), x.dtype, False))
        else:
            raise ConfigError(
                f"a compressor wants a {type(request).__name__} of its peers, and {self} has none to offer: "
                "leave the topology out, or use a compressor that sends one message or adds up on the way"
            )

    # ---- the server keeps the parameters --------------------------------------------------------------

    def _kept(
        self, exchange: Exchange, x: Tensor, compressor: Compressor, state: State, ctx: Context
    ) -> Exchange:
        if not x.is_meta and ctx.knows_of_nonfinite:
            exchange.close()
            return Outcome(x, Exact(x), state)  # nothing is pushed: the session reports what is not finite
        request = next(exchange)
        wanted = [each for each in leaves(request) if isinstance(each, ReduceEncoded)]
        spans = [_spans(compressor, each) for each in wanted]
        payloads = tuple(map(encoded, wanted))
        pieces = tuple(
            PayloadSpec(each.codec, each.x.numel(), x.dtype, spans=mine)
            for each, mine in zip(wanted, spans, strict=True)
        )
        (answer,) = yield PushPull(payloads, pieces, (self.back(x),), lr=ctx.lr)
        sent = [*map(transmitted, wanted, payloads)]
        _read(self.back(x), answer, ctx.out)
        for each, mine in zip(wanted, spans, strict=True):
            if mine is not None:
                torch.cat([ctx.out[a:b] for a, b in mine], out=each.ctx.out)
        answers = [(each.ctx.out, given) for each, given in zip(wanted, sent, strict=True)]
        try:
            exchange.send(as_asked(request, iter(answers)))
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        raise AssertionError(f"{compressor} sends several messages")

    def back(self, x: Tensor) -> PayloadSpec:
        """The format in which the parameters `x` of a bucket come back."""
        return PayloadSpec(None if self.pull is None else _one_shot(self.pull).codec, x.numel(), x.dtype)


_Form: TypeAlias = tuple[OneShot | None, int, torch.dtype, bool]
"""The codec of a pushed payload, the number and type of its entries, and whether the server compresses the
mean in the same way, and adds the error of an answer to the next one."""


@lru_cache(1 << 10)
def _formats(
    forms: tuple[_Form, ...], pull: Compressor | None, peers: int
) -> tuple[tuple[PayloadSpec, ...], tuple[PayloadSpec, ...]]:
    """How payloads are read, and how the answers are: the very same objects for every push of a bucket.

    `pull` is for the largest answer; the others come as they were pushed.
    """
    pieces = tuple(PayloadSpec(codec, numel, dtype) for codec, numel, dtype, _ in forms)
    pulls = []
    for piece, (codec, numel, _, has_mean_feedback) in zip(pieces, forms, strict=True):
        if has_mean_feedback and pull is None:
            pulls.append(replace(piece, has_feedback=True))
        else:
            pulls.append(replace(piece, codec=None if codec is None else codec.of_sums(numel, peers)))
    if pull is not None:
        main = max(range(len(pulls)), key=lambda i: pulls[i].numel)
        back = _one_shot(pull)
        pulls[main] = replace(pulls[main], codec=back.codec, has_feedback=back.has_feedback)
    return pieces, tuple(pulls)


def _whole(piece: PayloadSpec, payload: Payload) -> Payload:
    """A copy of a payload of which a part may be left out; else empty."""
    return tuple(map(torch.clone, payload)) if piece.codec is not None and piece.codec.partial else ()


def _answer(request: Request, replies: Iterator[tuple[PayloadSpec, Payload, Payload, Payload]]) -> Any:
    """The answer to a request that was pushed.

    Args:
        replies: how each is read, what came, what was pushed, and what was to be pushed where that differs.
    """
    if isinstance(request, AllReduce):
        for x in request.payload:
            pull, payload, *_ = next(replies)
            _read(pull, payload, x.view(-1))
        return request.payload
    assert isinstance(request, ReduceEncoded)
    pull, payload, pushed, whole = next(replies)
    if whole and request.new_residual is not None:
        withheld_(request.codec, whole, pushed, request.new_residual, request.x.dtype)
    sent, out = transmitted(request, pushed), request.ctx.out
    _read(pull, payload, out)
    return out, sent


def _read(piece: PayloadSpec, payload: Payload, out: Tensor) -> None:
    if piece.codec is None:
        out.copy_(payload[0].view_as(out))
    else:
        piece.codec.decode_(payload, out)


def _add_up(finite_probe: Tensor, payload: Payload) -> None:
    for part in payload:
        if part.is_floating_point():
            finite_probe.add_(part.sum())


def _one_shot(pull: Compressor) -> OneShotUse:
    """The codec of the server's answers, and whether it keeps the residual.

    Raises:
        ConfigError: it is neither one-shot nor a one-shot compressor in `ErrorFeedback`.
    """
    one_shot = pull.one_shot(0)
    if one_shot is None or one_shot.is_predicted or pull.changes or pull.takes_momentum is not None:
        raise ConfigError(
            f"pull={pull} is not one-shot, and a server sends all workers one message: write a compressor "
            "such as QSGD(), or ErrorFeedback(TopK(ratio=0.01))"
        )
    return one_shot


def _spans(compressor: Compressor, request: ReduceEncoded) -> Spans | None:
    """The spans of the bucket that a request is about; None: all of it."""
    _, spans = compressor.inside().get(request.ctx.prefix.partition(".")[0], (None, None))
    return spans
