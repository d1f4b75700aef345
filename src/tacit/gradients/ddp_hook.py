"""Gradients: DDP's communication hook.

torch takes one hook for a DDP object's whole life, so the hook is a dispatcher: it calls the session that is
attached now, or averages as plain DDP does where none is.
"""

# No `from __future__ import annotations` here: DDP checks the hook's annotations as objects.
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tacit import ranges
from tacit.errors import AttachError, TacitError
from tacit.gradients.bucket_layout import Piece, SliceCopy, Whole, pieces
from tacit.model.frozen_check import misfit, sparse
from tacit.model.not_copied import NotCopied, OnlyHere
from tacit.model.torch_modes import shielded
from tacit.session import Session
from tacit.session.buckets import divided
from tacit.torch_compat import GradBucket, at_end_of_backward, in_join, is_profiling
from tacit.transports.process_groups import sum_

if TYPE_CHECKING:
    from tacit.gradients.delayed import DelayedMeans
    from tacit.gradients.host_copies import HostCopies
    from tacit.gradients.unused_parameters import UsedParameters

BucketFuture = torch.futures.Future[Tensor]
Answer = Callable[[GradBucket], BucketFuture]

UNSEEN = 10
"""Backward passes without a step, after which it is looked whether parameters have moved all the same."""
SETTLED = 3
"""The round from which buckets are DDP's buckets. DDP fills one bucket in its first iteration and others from
the second on; changing at a fixed round is the same whether or not a run was resumed before it."""


@dataclass
class HookDispatcher(NotCopied):
    """The one hook of a DDP object, which calls a function that can be replaced."""

    answer: Answer

    def use(self, answer: Answer) -> None:
        """Answer by this function from now on."""
        self.answer = shielded(answer)

    @staticmethod
    def of(ddp: DistributedDataParallel) -> "HookDispatcher":
        """The dispatcher of this DDP object; registers it on first use.

        Raises:
            AttachError: the object has a foreign communication hook.
        """
        if ddp not in _DISPATCHERS:
            dispatcher = HookDispatcher(plain_mean(ddp.process_group))
            try:
                ddp.register_comm_hook(dispatcher, OnlyHere(_hook, allreduce_hook))
            except RuntimeError as error:
                raise AttachError(
                    "this DDP object has a communication hook already, and torch takes only one: attach "
                    f"before, or instead of, register_comm_hook ({error})"
                ) from error
            _DISPATCHERS[ddp] = dispatcher
        return _DISPATCHERS[ddp]

    @staticmethod
    def unregistered(ddp: DistributedDataParallel) -> "HookDispatcher":
        """A dispatcher for this DDP object whose hook the user registers.

        Raises:
            AttachError: the object has tacit's hook already.
        """
        if ddp in _DISPATCHERS:
            raise AttachError(
                "this DDP object keeps the hook of an earlier attach, and torch takes one for its life: "
                "write tacit.attach again, or make another DistributedDataParallel"
            )
        return HookDispatcher(plain_mean(ddp.process_group))


_DISPATCHERS: WeakKeyDictionary[DistributedDataParallel, HookDispatcher] = WeakKeyDictionary()


def _hook(dispatcher: HookDispatcher, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return dispatcher.answer(bucket)  # DDP wants this parameter to be called `bucket`


def plain_mean(group: dist.ProcessGroup) -> Answer:
    """What DDP does without a hook."""

    def answer(ddp_bucket: GradBucket) -> BucketFuture:
        return sum_(ddp_bucket.buffer().div_(group.size()), group)

    return answer


def no_exchange(ddp_bucket: GradBucket) -> BucketFuture:
    """The answer without an exchange: every replica keeps its gradient."""
    return _now(ddp_bucket.buffer())


def _now(value: Tensor) -> BucketFuture:
    future = _future(value)
    future.set_result(value)
    return future


def _future(value: Tensor) -> BucketFuture:
    """A future for the tensor. It must know the device of a tensor on a GPU, so that streams wait for it."""
    if not value.is_cuda:
        return torch.futures.Future()
    future: BucketFuture = torch.futures.Future(devices=[value.device])
    return future


# ---- counting and checking backward passes ---------------------------------------------------------------


class SyncedBackwards:
    """Answers DDP's hook, counts the backward passes in which DDP synchronises, and has them checked.

    Args:
        ddp: the model, if it is DDP's.

    Attributes:
        begun: how many there were.
        since: how many there were since the last step, or since one was discarded.
    """

    def __init__(self, ddp: DistributedDataParallel | None) -> None:
        self._ddp = ddp
        self._answer: Answer = no_exchange
        self._look: Callable[[], None] | None = None
        self._refused: Callable[[TacitError], None] | None = None
        self._ended: Callable[[], None] | None = None
        self.begun = self.since = self._stepped_at = 0

    def answer_by(self, answer: Answer, ended: Callable[[], None] | None) -> None:
        """Answer by this function; `ended` is called when the graph of a backward is done."""
        self._answer, self._ended = answer, ended

    def look(self, unseen: Callable[[], None], refused: Callable[[TacitError], None]) -> None:
        """Call `unseen` in the tenth backward without a step, the twentieth and so on.

        `refused` is given what `unseen`, and the answer, raise.
        """
        self._look, self._refused = unseen, refused

    def __call__(self, bucket: GradBucket) -> BucketFuture:
        """DDP's communication hook: a future with the bucket."""
        first = bucket.index() == 0
        if first:
            if self._ddp is not None and in_join(self._ddp):
                raise joined()
            self.begun += 1
            self.since += 1
        try:
            if first and self._look is not None and (self.begun - self._stepped_at) % UNSEEN == 0:
                self._look()
            if self._ended is not None and bucket.is_last():
                at_end_of_backward(self._ended)
            return self._answer(bucket)
        except TacitError as error:
            if self._refused is not None:
                self._refused(error)
            raise

    def stepped(self) -> None:
        """Note a step."""
        self.since, self._stepped_at = 0, self.begun

    def discarded(self) -> None:
        """Note that a step is discarded, in place of `stepped`."""
        self.since = 0


def refuse_capture(algorithm: str) -> None:
    """Refuse a backward that a CUDA graph captures.

    Raises:
        AttachError: one does.
    """
    if torch.cuda.is_current_stream_capturing():
        raise AttachError(
            f"a CUDA graph is being captured, and its replays would not exchange by {algorithm!r}, as they "
            "run no Python: capture without backward, or attach a strategy that averages parameters, such as "
            "'diloco', whose rounds are outside of the graph"
        )


def joined() -> AttachError:
    """The error for torch's `Join`: a rank without data would call the hook outside of backward."""
    return AttachError(
        "torch's Join context (model.join()) is at work on this model, and only plain 'ddp' can work "
        "with it: give every rank the same number of batches (DistributedSampler(..., drop_last=True)), "
        "or attach 'ddp'. After such a context, write Join([model], enable=False): torch leaves it on"
    )


# ---- from buckets to buckets -----------------------------------------------------------------------------


@dataclass
class _Staged:
    """A bucket of the session that is copied together from one or more of DDP's buckets."""

    flat: Tensor
    missing: int
    pieces: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    waiting: list["_DdpBucket"] = field(default_factory=list)

    def complete_with(self, slices: int) -> bool:
        """Note that so many more parameters have been copied; returns whether these were the last."""
        self.missing -= slices
        return self.missing == 0


@dataclass(eq=False)
class _DdpBucket:
    """A bucket of DDP that waits for the session's buckets in which its parameters travel."""

    buffer: Tensor
    future: BucketFuture
    open: int
    inside: Callable[[], AbstractContextManager[object]]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def completed(self) -> None:
        with self.lock:  # called by the lane and by backward
            self.open -= 1
            last = self.open == 0
        if last:
            with self.inside():  # the stream on which the answer was written last
                self.future.set_result(self.buffer)


def _host_copies(session: Session, named: Mapping[str, Tensor]) -> "HostCopies | None":
    """The copies between a GPU and the host; None if none are needed."""
    if not any(p.is_cuda for p in named.values()):
        return None
    from tacit.gradients.host_copies import HostCopies

    return HostCopies.of(session, named)


def _delayed_means(session: Session) -> "DelayedMeans | None":
    if not session.strategy.late:
        return None
    from tacit.gradients.delayed import DelayedMeans

    return DelayedMeans(session)


class GradientHook:
    """Cuts DDP's buckets into the session's, and answers each of DDP's when those are complete.

    Args:
        session: exchanges the buckets.
        named: the parameters.
        used: notes which of them had a gradient.
        modules: for FSDP2, whose layout is fixed: for each module its parameters, with the number of entries
            that each has in torch's flat gradient, padding included. Empty for DDP, whose buckets change and
            have no gaps.
        share: the weight of this rank in the mean; 1 on average over the ranks.
    """

    def __init__(
        self,
        session: Session,
        named: dict[str, Tensor],
        used: "UsedParameters | None" = None,
        modules: Sequence[Mapping[str, int]] = (),
        share: float = 1.0,
    ) -> None:
        self._session, self._share = session, share
        self._used = used
        self.fixed = [[*each] for each in modules]
        """The parameters that torch passes in one call, if that never changes; a rank may have no entry of
        some.
        """
        self._widths = {name: p.numel() for name, p in named.items()}
        for each in modules:
            self._widths |= each
        self._names = {id(p): name for name, p in named.items()}
        self._copies = _host_copies(session, named)
        self._routes: dict[tuple[int, ...], tuple[int, list[Piece]]] = {}
        self._routed = session.buckets
        self._staged: dict[int, _Staged] = {}
        self._flats: dict[int, Tensor] = {}
        self._seen: list[list[str]] = []
        self._fresh = False
        self._arrived: set[int] = set()
        self.layout: list[list[str]] | None = None
        """DDP's buckets as they were last seen, until the session has taken them over."""
        self.late = _delayed_means(session)
        """If means are applied a step late: their buffers. All buckets are copied then."""
        self._counts_steps = self._communicates = False
        self._always = session.schedule.always
        self._inside = session.lanes.inside if self._copies is None else self._copies.inside
        self._waiting: AbstractContextManager[object] | None = None
        self._done = after_backward(self._ended, self._wait)

    def count_steps(self) -> None:
        """Count the end of each backward as a step, as no optimizer is known."""
        self._counts_steps = True

    def __call__(self, ddp_bucket: GradBucket) -> BucketFuture:
        """The hook's answer: a future that holds the bucket, with means in place of gradients."""
        session, buffer, last = self._session, ddp_bucket.buffer(), ddp_bucket.is_last()
        if session.failure.error is not None:
            session.failure.raise_first()
        if buffer.is_cuda:
            refuse_capture(session.strategy.name)
        first = ddp_bucket.index() == 0
        if first:
            self._communicates = self._always or session.communicates()
        if not self._communicates:
            return no_exchange(ddp_bucket)
        parameters = ddp_bucket.parameters()
        if buffer.is_sparse:
            raise sparse(self._names.get(id(parameters[0]), "a parameter"), session.strategy.name)
        if first:
            self._begin()
        if self._share != 1.0:
            buffer.mul_(self._share)
        key = tuple(map(id, parameters))
        if key not in self._routes:
            self._routes[key] = self._route(parameters, buffer.dtype)
        buckets, route = self._routes[key]
        self._arrived.update(key)
        if last and len(self._arrived) < len(self._names):
            raise misfit([name for i, name in self._names.items() if i not in self._arrived], "unfrozen")
        if not self.fixed and session.pending.finished < SETTLED:
            self._note(parameters, last)
        late, inside = self.late is not None and self.late.late, self._inside
        if late:  # DDP gets the mean of the step before, which is there
            buckets, inside = 0, nullcontext
        waiting = _DdpBucket(buffer, _future(buffer), 1 + buckets, inside)
        for part in route:
            if isinstance(part, Whole):
                session.submit(part.bucket, buffer[part.start : part.stop], waiting.completed)
            else:
                self._stage(part, waiting)
        if last:
            if not late:
                session.pending.wait_from_now()
            at_end_of_backward(self._done)
        waiting.completed()
        return waiting.future

    def resume(self, layout: list[list[str]] | None) -> None:
        """Go on from a checkpoint. The single bucket of DDP's next iteration is not its final layout."""
        self.layout, self._fresh = layout, True
        if self.late is not None:
            self.late.resume()

    def _wait(self) -> None:
        if is_profiling():
            self._waiting = ranges.within(self._session.strategy.name, "wait")
            self._waiting.__enter__()

    def _ended(self) -> None:
        if self._waiting is not None:
            self._waiting.__exit__(None, None, None)
            self._waiting = None
        if self._session.failure.error is not None:
            self._session.failure.raise_first()
        self._staged.clear()  # a level may not exchange again for a long time
        if self._used is not None:
            self._used.clear()
        if self._counts_steps:
            self._session.pending.verify()
            self._session.advance()
            self._session.stats.stepped(self._session.step)

    def _begin(self) -> None:
        session = self._session
        if self.late is not None:
            self.late.begin()
        session.pending.begin_anew()
        self._staged.clear()
        self._seen = []
        self._arrived = set()
        if self.layout is not None and session.strategy.server is None and session.round >= SETTLED:
            session.rebucket(divided(self.layout, session.context.tensors, session.context.topology))
            self.layout = None
        if self._routed is not session.buckets:
            self._routed = session.buckets
            self._routes.clear()
            self._flats.clear()
            if self.late is not None:
                self.late.follow_buckets()

    def _note(self, parameters: list[Tensor], last: bool) -> None:
        """Note DDP's layout, which is final in the round before the session takes over DDP's buckets."""
        if self._fresh:
            self._fresh = not last
            return
        self._seen.append([self._names[id(p)] for p in parameters])
        if last:
            self.layout = self._seen

    def _route(self, parameters: list[Tensor], dtype: torch.dtype) -> tuple[int, list[Piece]]:
        """How many of the session's buckets have these parameters, and the spans or copies that make them."""
        places, start = {}, 0
        strange = [f"a parameter of shape {tuple(p.shape)}" for p in parameters if id(p) not in self._names]
        if strange:
            raise misfit(strange, "frozen")
        for p in parameters:
            places[self._names[id(p)]] = start
            start += self._widths[self._names[id(p)]]
        copied = self.late is not None or self._copies is not None
        route = [
            part
            for i, bucket in enumerate(self._session.buckets)
            for part in pieces(i, bucket, places, copied or bucket.dtype != dtype)
        ]
        return len({part.bucket for part in route}), route

    def _flat(self, i: int) -> Tensor:
        """The buffer of a bucket; the same in all rounds if the session never takes over DDP's buckets."""
        if self.late is not None:
            return self.late.flats[i]
        bucket = self._session.buckets[i]
        if self._session.strategy.server is None and self._copies is None:
            return bucket.like(bucket.device)
        if i not in self._flats:
            self._flats[i] = (
                bucket.like(bucket.device) if self._copies is None else self._copies.pinned(bucket)
            )
        return self._flats[i]

    def _stage(self, part: SliceCopy, ddp_bucket: _DdpBucket) -> None:
        bucket = self._session.buckets[part.bucket]
        staged = self._staged.get(part.bucket)
        if staged is None:
            staged = self._staged[part.bucket] = _Staged(self._flat(part.bucket), len(bucket.slices))
        here = ddp_bucket.buffer[part.start : part.start + part.numel]
        if self.late is not None and self.late.late:
            self.late.swap_(part.bucket, part.to, here)
        else:
            there = staged.flat[part.to : part.to + part.numel]
            self._copy(here, there)
            staged.pieces.append((here, there))
            if ddp_bucket not in staged.waiting:
                staged.waiting.append(ddp_bucket)
        if staged.complete_with(part.slices):
            ready = None if self._copies is None else self._copies.arrived()
            self._session.submit(part.bucket, staged.flat, lambda: self._unstage(staged), ready=ready)

    def _copy(self, here: Tensor, there: Tensor) -> None:
        if self._copies is None:
            there.copy_(here)
        else:
            self._copies.down(here, there)

    def _unstage(self, staged: _Staged) -> None:
        if self._copies is None:
            with self._session.lanes.inside():
                for here, there in staged.pieces:
                    here.copy_(there)
        else:
            self._copies.up(staged.pieces)
        for ddp_bucket in staged.waiting:
            ddp_bucket.completed()


def after_backward(call: Callable[[], None], before: Callable[[], None] | None = None) -> Callable[[], None]:
    """What `at_end_of_backward` is to call, so that `call` is called after DDP has taken all answers.

    The thread of backward calls it, and raises its errors. `before` is called when the graph is done, before
    DDP waits for the answers.
    """
    call = shielded(call)

    def done() -> None:
        at_end_of_backward(call)
        if before is not None:
            before()

    return done
