"""The hook of `fusion` and `priority`: sends gradients as soon as backward has them, in planned messages."""

# No `from __future__ import annotations` here: DDP checks the hook's annotations as objects.
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tacit import ranges
from tacit.errors import AttachError
from tacit.exchange.two_jobs import Halves
from tacit.gradients.ddp_hook import (
    SETTLED,
    BucketFuture,
    GradientHook,
    after_backward,
    no_exchange,
    refuse_capture,
)
from tacit.gradients.layerwise.message_plan import MessagePlan
from tacit.gradients.layerwise.message_times import MessageLog
from tacit.gradients.layerwise.messages import DdpBuffers, GradientTimes, LayerMessage, LinkTime
from tacit.model.not_copied import OnlyHere
from tacit.model.torch_modes import shielded
from tacit.session import Session
from tacit.session.buckets import parameter_of
from tacit.torch_compat import GradBucket, at_end_of_backward, behind_accumulation, is_profiling


class LayerwiseHook:
    """Sends gradients as soon as they are computed, directly from DDP's buckets.

    Until there is a plan it sends DDP's buckets. Then a message is sent when DDP has copied the last of its
    gradients into a bucket, even if the bucket is not full; DDP's communication hook, which is called when
    the bucket is full, answers at once. Means are waited for when backward ends.

    In stream order (on a GPU) the thread of backward launches each message, and whoever uses a mean makes its
    stream wait for the event after that message; the host waits for none.

    Args:
        session: exchanges the messages.
        model: DDP's.
        named: the parameters.

    Attributes:
        into_forward: whether means may arrive as late as the next forward pass.
        times: when each gradient was computed.
        link: for how long messages were under way.
        log: the times of each message, recorded once the timeline is asked for.
        buffers: DDP's buckets.
        fixed, late: as of `GradientHook`; empty and None here.
    """

    def __init__(self, session: Session, model: DistributedDataParallel, named: Mapping[str, Tensor]) -> None:
        overlap = session.strategy.overlap
        self._session, self._model, self._named = session, model, dict(named)
        self._names = {id(p): name for name, p in named.items()}
        self._by_buckets = GradientHook(session, self._named)
        self._credit = math.inf if overlap.credit is None else 1e6 * overlap.credit
        self._lock = threading.RLock()
        self._plan: MessagePlan | None = None
        self._flats: list[Tensor] = []
        self._split = overlap.split
        self._order: list[tuple[int, bool]] = []
        self._messages: list[LayerMessage] = []
        self._places: dict[str, list[int]] = {}
        self._arrived: set[str] = set()
        self._next = self._under_way = 0
        self._leaving = self._open = self._communicates = False
        self._in_stream = session.context.in_stream
        self._kept: tuple[Callable[[], None], Callable[[], None]] | None = None
        self.into_forward = overlap.into_forward
        self.times = GradientTimes(session.lanes.device)
        self.link = LinkTime()
        self.log = MessageLog()
        self.buffers = DdpBuffers()
        self.fixed: list[list[str]] = []
        self.late = None
        self._waiting: AbstractContextManager[object] | None = None
        self._done = after_backward(self._ended, self._wait)
        self._handles = [behind_accumulation(p, self._noting(name)) for name, p in named.items()]
        self._handles.append(model.module.register_forward_pre_hook(OnlyHere(self._before_forward)))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def keep_means(self, begins: Callable[[], None], ended: Callable[[], None]) -> None:
        """Do not wait for means when backward ends, but hold them here.

        `begins` is called before a backward overwrites them; `ended`, when it has ended, and may call
        `give_means`.
        """
        self._kept = begins, ended

    # ---- the plan ---------------------------------------------------------------------

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan, at work or not."""
        return self._plan is not None

    @property
    def is_at_work(self) -> bool:
        """Whether gradients are sent by a plan."""
        return bool(self._flats)

    @property
    def layout(self) -> list[list[str]] | None:
        """The planned messages' members, in the order of sending; without a plan, as of `GradientHook`."""
        return self._by_buckets.layout if self._plan is None else [[*each] for each in self._plan.messages]

    def use(self, plan: MessagePlan) -> None:
        """Send these messages, in this order, from the next backward on in which that is possible."""
        self._plan = plan
        self._flats = []

    def resume(self, layout: list[list[str]] | None) -> None:
        """Go on from a checkpoint. The session has its buckets already, which are the messages of a plan."""
        self._flats, self._plan = [], None
        if layout is not None and self._session.round > SETTLED:
            self._plan, layout = MessagePlan(tuple(tuple(each) for each in layout)), None
        self._by_buckets.resume(layout)

    def _try_plan(self) -> None:
        """Begin to send by the plan, if DDP's buckets no longer change."""
        if self._plan is None or self._flats or not self.buffers.are_settled:
            return
        found = [self.buffers.contiguous(names, self._named) for names in self._plan.messages]
        flats = [flat for flat in found if flat is not None]
        if len(flats) < len(found):
            self._plan = None  # the plan is for other buckets: DDP was made with another bucket_cap_mb
            return
        session = self._session
        if [bucket.members for bucket in session.buckets] != [*self._plan.messages]:
            session.rebucket(self._plan.messages)
        self._flats = flats
        each = range(len(flats))
        self._order = [(i, not self._split) for i in each]
        if self._split:  # all-gathers in the order of the next forward pass
            self._order += [(i, True) for i in reversed(each)]
        self._places = {name: [] for name in self._named}
        for i, members in enumerate(self._plan.messages):
            for name in dict.fromkeys(parameter_of(each, self._named) for each in members):
                self._places[name].append(i)

    # ---- in backward ----------------------------------------------------------------------------------

    def _before_forward(self, *_: object) -> None:
        self._open = False  # drops a backward that has failed

    def _noting(self, name: str) -> Callable[[], None]:
        def accumulated() -> None:
            # DDP's flag from the last forward pass: False within `no_sync`.
            if self._model.require_forward_param_sync:
                self._begin()
                if self._communicates:
                    if not (self._in_stream and self.is_planned):  # it is planned once, and events cost time
                        self.times.note(name)
                    self._arrive(name)

        return accumulated

    def __call__(self, ddp_bucket: GradBucket) -> BucketFuture:
        """DDP's communication hook: a future with the bucket."""
        self._begin()
        parameters = ddp_bucket.parameters()
        if ddp_bucket.is_last():  # some of the bucket's parameters are still to be noted
            at_end_of_backward(self._done)
        if not self._flats:
            answer = self._by_buckets(ddp_bucket)
            if self._communicates and not self._in_stream:
                self.link.left(ddp_bucket.buffer().nbytes)
                answer.add_done_callback(lambda _: self.link.came())
            self.buffers.note([self._names[id(p)] for p in parameters], ddp_bucket)
            return answer
        if not self._communicates:
            return no_exchange(ddp_bucket)
        if not self.buffers.is_at(ddp_bucket.index(), ddp_bucket.buffer()):
            raise AttachError(
                f"DDP has made other buckets, and {self._session.strategy.name!r} sends gradients from where "
                "they lie in them: close the session, and attach again"
            )
        for p in parameters:
            self._arrive(self._names[id(p)])
        return no_exchange(ddp_bucket)

    def _begin(self) -> None:
        """Begin a backward, with its first gradient or with DDP's first bucket."""
        if not self._open:
            self._opened()

    @shielded
    def _opened(self) -> None:
        session = self._session
        session.failure.raise_first()
        if session.lanes.device.type == "cuda":
            refuse_capture(session.strategy.name)
        self._open, self._communicates = True, session.communicates()
        if not self._communicates:
            return
        if self._kept is not None:
            self._kept[0]()
        for message in self._messages:
            message.over.wait()
        self.settle()
        session.failure.raise_first()
        session.pending.begin_anew()  # before the plan: rounds are committed to the buckets that they had
        self._try_plan()
        self.times.begin()
        if self._flats:
            shapes = zip(self._flats, session.buckets, strict=True)
            self._messages = [
                LayerMessage(flat, len(bucket.names), Halves() if self._split else None)
                for flat, bucket in shapes
            ]
            self.log.next_round(session.step, self._messages, self._plan)
            self._arrived = set()
            self._next = self._under_way = 0

    def _arrive(self, name: str) -> None:
        """Note that DDP has copied this gradient into its bucket."""
        if name in self._arrived or not self._flats:
            return
        self._arrived.add(name)
        filled = [self._messages[i] for i in self._places[name] if self._messages[i].filled()]
        for message in filled:
            self.log.ready(message)
        if filled:
            self._leave()

    @shielded
    def _leave(self) -> None:
        """Send the messages that are ready, in the planned order."""
        with self._lock:  # called by backward and by the lane
            if self._leaving:  # by a message that was complete when it was submitted
                return
            self._leaving = True
            try:
                while (leaves := self._next_to_leave()) is not None:
                    self._send(*leaves)
            finally:
                self._leaving = False

    def _next_to_leave(self) -> tuple[int, bool] | None:
        """The next message and whether it is its last half, if it may leave now."""
        if self._next == len(self._order):
            return None
        i, last = self._order[self._next]
        full = self._under_way > 0 and self._under_way + self._size(i) > self._credit
        return (i, last) if not full and self._messages[i].may_leave(last) else None

    def _size(self, i: int) -> int:
        """The bytes of a message, or of its half."""
        return self._flats[i].nbytes // (1 + self._split)

    def _send(self, i: int, last: bool) -> None:
        message, size = self._messages[i], self._size(i)
        self.link.left(size)
        self.log.left(message)
        self._next += 1
        self._under_way += size
        completed = self._completed(message, last, size)
        self._session.submit(i, message.flat, completed, halves=message.halves)
        self._session.lanes.settle()  # others may not leave before it has ended

    def _completed(self, message: LayerMessage, last: bool, size: int) -> Callable[[], None]:
        def completed() -> None:
            if last:
                self.log.came(message)
                message.launched()
            message.completed(last)
            with self._lock:
                self._under_way -= size
            self.link.came()
            self._leave()

        return completed

    def _wait(self) -> None:
        if is_profiling():
            self._waiting = ranges.within(self._session.strategy.name, "wait")
            self._waiting.__enter__()

    def _ended(self) -> None:
        """Note that backward is over, and that DDP has its answers."""
        self._open = False
        try:
            if self._communicates and self._kept is not None:
                self._kept[1]()
            elif self._communicates:
                self.give_means()
        finally:
            if self._waiting is not None:
                self._waiting.__exit__(None, None, None)
                self._waiting = None

    def give_means(self) -> None:
        """Wait for the means, and make them the gradients, as DDP's hook does when it waits itself."""
        if not self._flats:
            return
        self.wait_for(self._named)
        if self._model.gradient_as_bucket_view:
            return
        for name, p in self._named.items():  # which DDP has filled from its buckets before the means came
            if p.grad is not None:
                p.grad.copy_(self.mean(name))

    # ---- means --------------------------------------------------------------------------------

    def wait_for(self, names: Iterable[str]) -> None:
        """Wait until the means of these parameters are complete.

        Raises:
            RoundError: the round failed.
        """
        waiting = {i for name in names for i in self._places[name]}
        if self._in_stream:
            self._session.pending.wait_from_now()
            for i in waiting:
                self._messages[i].join()
            self._session.failure.raise_first()
            return
        with self._session.pending.waited_for():
            for i in waiting:
                self.log.wait_for(self._messages[i], self._messages[i].over)
        self._session.failure.raise_first()

    def settle(self) -> None:
        """In stream order: make the current stream wait for all messages, before backward overwrites them."""
        if self._in_stream:
            for message in self._messages:
                message.join()

    def check(self) -> None:
        """In stream order: wait for the device, and read what it has noted of the means.

        Raises:
            NonFinite, Overflow: see `PendingRounds.check`.
        """
        self._session.pending.check()

    def is_here(self, name: str) -> bool:
        """Whether the parameter's mean is complete; in stream order, whether the stream waits for it."""
        messages = [self._messages[i] for i in self._places[name]]
        return all(each.joined if self._in_stream else each.over.is_set() for each in messages)

    def mean(self, name: str) -> Tensor:
        """The mean of the parameter's gradients: a view, of its shape and layout."""
        flat = self.buffers.contiguous([name], self._named)
        assert flat is not None, "a parameter lies in one of DDP's buckets"
        return laid_out(flat, self._named[name])


def laid_out(flat: Tensor, p: Tensor) -> Tensor:
    """A view of `flat` with the layout of DDP's gradient of `p`: its memory order, if that has no gaps."""
    step = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != step:
            return flat.view(p.shape)
        step *= size
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset())
