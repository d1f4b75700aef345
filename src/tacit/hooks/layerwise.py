"""Gradients that leave as soon as backward has them, in messages of tacit's own and in a planned order."""

# No `from __future__ import annotations` here: DDP checks the hook's annotations as objects.
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tacit import ranges
from tacit.contracts import LayerwiseOverlap
from tacit.errors import AttachError
from tacit.foresight.messages import MessagePlan
from tacit.hooks.ddp import BucketFuture, after_backward, no_exchange
from tacit.hooks.frozen_check import misfit, sparse
from tacit.session import Session
from tacit.session.buckets import Bucket, ParamSlice
from tacit.session.pending import PendingRound
from tacit.torch_compat import GradBucket


@dataclass(eq=False)
class LayerMessage:
    """A bucket of the session in one round.

    Attributes:
        flat: the gradients, and then their mean.
        missing: how many of its gradients are not there.
        over: set when it is complete, or has failed.
    """

    flat: Tensor
    missing: int
    over: threading.Event = field(default_factory=threading.Event)

    def filled(self) -> bool:
        """One more gradient is there; returns whether it is the last."""
        self.missing -= 1
        return self.missing == 0


@dataclass(eq=False)
class GradientTimes:
    """When backward had each gradient, in seconds from the first one on, in the rounds since it was made."""

    ready: dict[str, list[float]] = field(default_factory=dict)
    began: float = 0.0

    def begin(self) -> None:
        """The first gradient of a backward pass is there."""
        self.began = perf_counter()

    def clear(self) -> None:
        """Forget the rounds so far."""
        self.ready.clear()

    def note(self, name: str) -> None:
        """This one is."""
        self.ready.setdefault(name, []).append(perf_counter() - self.began)


class LayerwiseHook:
    """Takes each parameter's gradient by a hook of its own, and gives back the means when backward ends.

    DDP's own hook comes later, when a bucket of DDP is full: of parameters that had no gradient on this rank
    it gives what DDP puts in their place.

    Args:
        session: exchanges the messages.
        model: DDP's.
        named: the parameters.

    Attributes:
        into_forward: whether means may come as late as the next forward pass.
        times: when gradients were there.
        fixed, late: see `GradientHook`; nothing here is either.
    """

    def __init__(
        self,
        session: Session,
        model: DistributedDataParallel,
        named: Mapping[str, Tensor],
    ) -> None:
        assert isinstance(session.strategy.overlap, LayerwiseOverlap)
        self._session, self._model, self._named = session, model, dict(named)
        self._names = {id(p): name for name, p in named.items()}
        credit = session.strategy.overlap.credit
        self._credit = math.inf if credit is None else 1e6 * credit
        self.into_forward = session.strategy.overlap.into_forward
        self._lock = threading.RLock()
        self._plan: MessagePlan | None = None
        self._followed: list[Bucket] | None = None
        self._order: list[int] = []
        self._places: dict[str, tuple[int, ParamSlice]] = {}
        self._flats: list[Tensor] = []
        self._messages: dict[int, LayerMessage] = {}
        self._taken: set[str] = set()
        self._arrived: set[str] = set()
        self._next = self._under_way = 0
        self._open = self._communicates = False
        self._round: PendingRound | None = None
        self._kept: tuple[Callable[[], None], Callable[[], None]] | None = None
        self.times = GradientTimes()
        self.fixed: list[list[str]] = []
        self.late = None
        self._handles = []
        for p in named.values():
            self._handles.append(p.register_post_accumulate_grad_hook(self._accumulated))  # type: ignore[no-untyped-call]
        self._handles.append(model.module.register_forward_pre_hook(self._before_forward))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def keep_means(self, begins: Callable[[], None], ended: Callable[[], None]) -> None:
        """Leave the means here when backward ends, from the next one on, and wait for none.

        `begins` is called before a backward overwrites them; `ended`, when it has ended.
        """
        self._kept = begins, ended

    # ---- which messages there are ---------------------------------------------------------------------

    @property
    def layout(self) -> list[list[str]] | None:
        """The messages in the order in which they leave, once that is planned."""
        return None if self._plan is None else [[*each] for each in self._plan.messages]

    def use(self, plan: MessagePlan) -> None:
        """Send these messages from the next backward on, in this order."""
        self._plan, self._followed = plan, None

    def resume(self, layout: list[list[str]] | None) -> None:
        """Go on from a checkpoint; the session has its buckets already."""
        self._plan = None if layout is None else MessagePlan(tuple(tuple(each) for each in layout))
        self._followed = None

    def _follow_buckets(self) -> None:
        """Send the session's buckets, in the planned order, or in the one in which they are numbered."""
        session, plan = self._session, self._plan
        if self._followed is session.buckets:
            return
        now = {tuple(param.name for param in bucket.slices) for bucket in session.buckets}
        if plan is not None and now != {*plan.messages}:
            session.rebucket(plan.messages)
        self._followed = session.buckets
        numbers = {bucket.names: i for i, bucket in enumerate(session.buckets)}
        self._order = [*numbers.values()] if plan is None else [numbers[frozenset(m)] for m in plan.messages]
        self._places = {
            param.name: (i, param) for i, bucket in enumerate(session.buckets) for param in bucket.slices
        }
        self._flats = [bucket.like(bucket.device) for bucket in session.buckets]

    # ---- in backward ----------------------------------------------------------------------------------

    def _before_forward(self, *_: object) -> None:
        self._open = False  # a backward that has failed is not gone on with

    def _accumulated(self, p: Tensor) -> None:
        """The gradient of `p` is there, and DDP's hook is still to be called."""
        # As DDP itself has noted in the last forward pass: not within `no_sync`.
        if not self._model.require_forward_param_sync:
            return
        self._begin()
        name = self._names[id(p)]
        if not self._communicates or p.grad is None or p.grad.is_sparse:
            return
        if name in self._taken:
            raise AttachError(
                f"{name} has had two gradients in one backward, as reentrant checkpointing does: "
                f"{self._session.strategy.name!r} sends each as soon as it is there. Write "
                "checkpoint(..., use_reentrant=False), or attach an algorithm that goes by DDP's buckets"
            )
        self.times.note(name)
        self._take(name, p.grad)

    def __call__(self, ddp_bucket: GradBucket) -> BucketFuture:
        """The hook's answer: what is in the bucket; means come when backward ends."""
        self._begin()
        if not self._communicates:
            return no_exchange(ddp_bucket)
        parameters, buffer, start = ddp_bucket.parameters(), ddp_bucket.buffer(), 0
        if buffer.is_sparse:
            raise sparse(self._names.get(id(parameters[0]), "a parameter"), self._session.strategy.name)
        for p in parameters:
            if id(p) not in self._names:
                raise misfit([f"a parameter of shape {tuple(p.shape)}"], "frozen")
            name = self._names[id(p)]
            self._arrived.add(name)
            if name not in self._taken:
                self._take(name, laid_out(buffer[start : start + p.numel()], p))
            start += p.numel()
        if ddp_bucket.is_last():
            if len(self._arrived) < len(self._names):
                raise misfit([name for name in self._named if name not in self._arrived], "unfrozen")
            self._open = False
            after_backward(self._ended, self._wait)
        return no_exchange(ddp_bucket)

    def _begin(self) -> None:
        session = self._session
        session.failure.raise_first()
        if self._open:
            return
        self._open, self._communicates = True, session.communicates()
        if not self._communicates:
            return
        if self._kept is not None:
            self._kept[0]()
        if self._round is not None:
            self._round.over.wait()
        session.failure.raise_first()
        session.discard()
        self._follow_buckets()
        flats = zip(session.buckets, self._flats, strict=True)
        self._messages = {i: LayerMessage(flat, len(bucket.slices)) for i, (bucket, flat) in enumerate(flats)}
        self._taken, self._arrived = set(), set()
        self._next = self._under_way = 0
        self._round = session.begin()
        self.times.begin()

    def _take(self, name: str, gradient: Tensor) -> None:
        self._taken.add(name)
        i, place = self._places[name]
        message = self._messages[i]
        laid_out(message.flat[place.start : place.stop], self._named[name]).copy_(gradient.detach())
        if message.filled():
            self._leave()

    def _leave(self) -> None:
        """Send what is ready and has its turn."""
        with self._lock:  # called by backward and by the lane
            while self._next < len(self._order):
                i = self._order[self._next]
                message = self._messages[i]
                size = message.flat.nbytes
                full = self._under_way > 0 and self._under_way + size > self._credit
                if message.missing or full:
                    return
                self._next += 1
                self._under_way += size
                self._session.submit(i, message.flat, self._completed(message))

    def _completed(self, message: LayerMessage) -> Callable[[], None]:
        def completed() -> None:
            message.over.set()
            with self._lock:
                self._under_way -= message.flat.nbytes
            self._leave()

        return completed

    def _wait(self) -> None:
        self._waiting = ranges.within(self._session.strategy.name, "wait")
        self._waiting.__enter__()

    def _ended(self) -> None:
        """Backward is over, and DDP has its answers."""
        try:
            if self._kept is not None:
                self._kept[1]()
            else:
                self.wait_for(self._named)
                self._give_means()
        finally:
            self._waiting.__exit__(None, None, None)

    def _give_means(self) -> None:
        for name, p in self._named.items():
            p.grad = self.mean(name)

    # ---- what has come --------------------------------------------------------------------------------

    def wait_for(self, names: Iterable[str]) -> None:
        """Wait until the means of these parameters are here.

        Raises:
            RoundError: the round failed.
        """
        waiting = {i: self._messages[i] for i in (self._places[name][0] for name in names)}
        with self._session.pending.waited_for():
            for message in waiting.values():
                message.over.wait()
        self._session.failure.raise_first()
        self._session.lanes.join()

    def is_here(self, name: str) -> bool:
        """Whether the mean is."""
        return self._messages[self._places[name][0]].over.is_set()

    def mean(self, name: str) -> Tensor:
        """The mean of the parameter's gradients: a view, of its shape and layout."""
        i, place = self._places[name]
        return laid_out(self._messages[i].flat[place.start : place.stop], self._named[name])


def laid_out(flat: Tensor, p: Tensor) -> Tensor:
    """A view of `flat` as DDP lays a gradient of `p` out: in the order of its memory, if that has no gaps."""
    step = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != step:
            return flat.view(p.shape)
        step *= size
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset())
