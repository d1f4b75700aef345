"""Gradients that leave as soon as backward has them, in messages of tacit's own and in a planned order."""

# No `from __future__ import annotations` here: DDP checks the hook's annotations as objects.
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tacit import ranges
from tacit.contracts import LayerwiseOverlap
from tacit.errors import AttachError
from tacit.foresight.messages import MessagePlan
from tacit.hooks.ddp import SETTLED, BucketFuture, GradientHook, after_backward, no_exchange
from tacit.hooks.message_times import MessageLog
from tacit.session import Session
from tacit.torch_compat import GradBucket, behind_accumulation


@dataclass(eq=False)
class LayerMessage:
    """A message in one round.

    Attributes:
        flat: where in DDP's bucket its gradients lie, and then their means.
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
    """When backward had each gradient: seconds from the first one on, of each round since it was cleared."""

    ready: dict[str, list[float]] = field(default_factory=dict)
    began: float = 0.0

    def clear(self) -> None:
        """Forget the rounds so far."""
        self.ready.clear()

    def begin(self) -> None:
        """The first gradient of a backward pass is there."""
        self.began = perf_counter()

    def note(self, name: str) -> None:
        """This one is."""
        self.ready.setdefault(name, []).append(perf_counter() - self.began)


class LinkTime:
    """For how long messages were under way, of how many bytes."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what was."""
        self._seconds, self._nbytes, self._began = 0.0, 0, 0.0

    def left(self, nbytes: int, first: bool) -> None:
        """A message of so many bytes leaves; `first`: nothing else is under way."""
        self._nbytes += nbytes
        if first:
            self._began = perf_counter()

    def idle(self) -> None:
        """Nothing is under way any more."""
        self._seconds += perf_counter() - self._began

    @property
    def rate(self) -> float:
        """Bytes of gradients a second."""
        return self._nbytes / self._seconds if self._seconds else math.inf


class DdpBuffers:
    """DDP's buckets: which parameters lie where, in memory that it keeps once it has settled."""

    def __init__(self) -> None:
        self._now: list[tuple[list[str], Tensor]] = []
        self._before: list[tuple[list[str], int]] = []
        self._places: dict[str, tuple[int, int]] = {}

    def note(self, names: list[str], bucket: GradBucket) -> None:
        """DDP gives this bucket to its hook."""
        if bucket.index() == 0:
            self._before = [(each, buffer.data_ptr()) for each, buffer in self._now]
            self._now = []
        self._now.append((names, bucket.buffer()))
        self._places.clear()

    @property
    def are_settled(self) -> bool:
        """Whether two backward passes one after the other had the same."""
        now = [(names, buffer.data_ptr()) for names, buffer in self._now]
        return bool(now) and now == self._before

    @property
    def layout(self) -> list[list[str]]:
        """The parameters of each, in order."""
        return [names for names, _ in self._now]

    def is_at(self, number: int, buffer: Tensor) -> bool:
        """Whether bucket `number` lies there."""
        return self._now[number][1].data_ptr() == buffer.data_ptr()

    def stretch(self, names: Sequence[str], named: Mapping[str, Tensor]) -> Tensor | None:
        """Where these parameters lie one behind the other, in one bucket; None if they do not."""
        if not self._places:
            for number, (each, _) in enumerate(self._now):
                start = 0
                for name in each:
                    self._places[name] = number, start
                    start += named[name].numel()
        number, first = self._places[names[0]]
        at = first
        for name in names:
            if self._places[name] != (number, at):
                return None
            at += named[name].numel()
        return self._now[number][1][first:at]


class LayerwiseHook:
    """Sends gradients from where they lie in DDP's buckets, as soon as they are there.

    Until there is a plan it goes by DDP's buckets. Then a message leaves when DDP has copied the last of its
    gradients into its bucket, though the bucket be not full; and DDP's own hook, which comes when it is,
    answers at once. Means are waited for when backward ends.

    Args:
        session: exchanges the messages.
        model: DDP's.
        named: the parameters.

    Attributes:
        into_forward: whether means may come as late as the next forward pass.
        times: when gradients were there.
        link: when messages were under way.
        log: when each message was where, once asked for.
        buffers: DDP's buckets.
        fixed, late: see `GradientHook`; nothing here is either.
    """

    def __init__(self, session: Session, model: DistributedDataParallel, named: Mapping[str, Tensor]) -> None:
        overlap = session.strategy.overlap
        assert isinstance(overlap, LayerwiseOverlap)
        self._session, self._model, self._named = session, model, dict(named)
        self._names = {id(p): name for name, p in named.items()}
        self._by_buckets = GradientHook(session, self._named)
        self._credit = math.inf if overlap.credit is None else 1e6 * overlap.credit
        self._lock = threading.RLock()
        self._plan: MessagePlan | None = None
        self._flats: list[Tensor] = []
        self._messages: list[LayerMessage] = []
        self._places: dict[str, int] = {}
        self._arrived: set[str] = set()
        self._next = self._under_way = 0
        self._open = self._communicates = False
        self._kept: tuple[Callable[[], None], Callable[[], None]] | None = None
        self.into_forward = overlap.into_forward
        self.times = GradientTimes()
        self.link = LinkTime()
        self.log = MessageLog()
        self.buffers = DdpBuffers()
        self.fixed: list[list[str]] = []
        self.late = None
        self._handles = [behind_accumulation(p, self._noting(name)) for name, p in named.items()]
        self._handles.append(model.module.register_forward_pre_hook(self._before_forward))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def keep_means(self, begins: Callable[[], None], ended: Callable[[], None]) -> None:
        """Leave the means here when backward ends, and wait for none.

        `begins` is called before a backward overwrites them; `ended`, when it has ended. It may `give_means`.
        """
        self._kept = begins, ended

    # ---- which messages there are ---------------------------------------------------------------------

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan, be it at work or not."""
        return self._plan is not None

    @property
    def is_at_work(self) -> bool:
        """Whether gradients leave by a plan."""
        return bool(self._flats)

    @property
    def layout(self) -> list[list[str]] | None:
        """The planned messages, in the order in which they leave; before, see `GradientHook`."""
        return self._by_buckets.layout if self._plan is None else [[*each] for each in self._plan.messages]

    def use(self, plan: MessagePlan) -> None:
        """Send these messages, in this order, from the next backward on in which that is possible."""
        self._plan = plan
        self._flats = []

    def resume(self, layout: list[list[str]] | None) -> None:
        """Go on from a checkpoint; the session has its buckets already, which are the messages of a plan."""
        self._flats, self._plan = [], None
        if layout is not None and self._session.round > SETTLED:
            self._plan, layout = MessagePlan(tuple(tuple(each) for each in layout)), None
        self._by_buckets.resume(layout)

    def _try_plan(self) -> None:
        """Begin to send by the plan, where DDP has settled on its buckets."""
        if self._plan is None or self._flats or not self.buffers.are_settled:
            return
        found = [self.buffers.stretch(names, self._named) for names in self._plan.messages]
        flats = [flat for flat in found if flat is not None]
        if len(flats) < len(found):
            self._plan = None  # of other buckets: DDP was made with another bucket_cap_mb
            return
        session = self._session
        if [tuple(s.name for s in bucket.slices) for bucket in session.buckets] != [*self._plan.messages]:
            session.rebucket(self._plan.messages)
        self._flats = flats
        self._places = {name: i for i, names in enumerate(self._plan.messages) for name in names}

    # ---- in backward ----------------------------------------------------------------------------------

    def _before_forward(self, *_: object) -> None:
        self._open = False  # a backward that has failed is not gone on with

    def _noting(self, name: str) -> Callable[[], None]:
        def accumulated() -> None:
            # As DDP itself has noted in the last forward pass: not within `no_sync`.
            if self._model.require_forward_param_sync:
                self._begin()
                if self._communicates:
                    self.times.note(name)
                    self._arrive(name)

        return accumulated

    def __call__(self, ddp_bucket: GradBucket) -> BucketFuture:
        """The hook's answer."""
        self._begin()
        parameters = ddp_bucket.parameters()
        if ddp_bucket.is_last():  # of its own parameters some are still to be noted
            after_backward(self._ended, self._wait)
        if not self._flats:
            answer = self._by_buckets(ddp_bucket)
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
        """A backward begins: its first gradient is there, or DDP's first bucket."""
        if self._open:
            return
        session = self._session
        session.failure.raise_first()
        self._open, self._communicates = True, session.communicates()
        if not self._communicates:
            return
        if self._kept is not None:
            self._kept[0]()
        for message in self._messages:
            message.over.wait()
        session.failure.raise_first()
        self._try_plan()
        self.times.begin()
        if self._flats:
            session.pending.verify()
            session.discard()
            shapes = zip(self._flats, session.buckets, strict=True)
            self._messages = [LayerMessage(flat, len(bucket.slices)) for flat, bucket in shapes]
            self.log.next_round(session.step, self._messages, self._plan)
            self._arrived = set()
            self._next = self._under_way = 0

    def _arrive(self, name: str) -> None:
        """DDP has copied this gradient into its bucket."""
        if name in self._arrived or not self._flats:
            return
        self._arrived.add(name)
        if self._messages[self._places[name]].filled():
            self.log.ready(self._messages[self._places[name]])
            self._leave()

    def _leave(self) -> None:
        """Send what is ready and has its turn."""
        with self._lock:  # called by backward and by the lane
            while self._next < len(self._messages):
                message = self._messages[self._next]
                size = message.flat.nbytes
                full = self._under_way > 0 and self._under_way + size > self._credit
                if message.missing or full:
                    return
                self.link.left(size, first=not self._under_way)
                self.log.left(message)
                self._next += 1
                self._under_way += size
                self._session.submit(self._next - 1, message.flat, self._completed(message))

    def _completed(self, message: LayerMessage) -> Callable[[], None]:
        def completed() -> None:
            self.log.came(message)
            message.over.set()
            with self._lock:
                self._under_way -= message.flat.nbytes
                if not self._under_way:
                    self.link.idle()
            self._leave()

        return completed

    def _wait(self) -> None:
        self._waiting = ranges.within(self._session.strategy.name, "wait")
        self._waiting.__enter__()

    def _ended(self) -> None:
        """Backward is over, and DDP has its answers."""
        self._open = False
        try:
            if self._communicates and self._kept is not None:
                self._kept[1]()
            elif self._communicates:
                self.give_means()
        finally:
            self._waiting.__exit__(None, None, None)

    def give_means(self) -> None:
        """Wait for the means, and have them be the gradients; where DDP's own hook waits, they are."""
        if not self._flats:
            return
        self.wait_for(self._named)
        if self._model.gradient_as_bucket_view:
            return
        for name, p in self._named.items():  # which DDP has given what was in its buckets before
            if p.grad is not None:
                p.grad.copy_(self.mean(name))

    # ---- what has come --------------------------------------------------------------------------------

    def wait_for(self, names: Iterable[str]) -> None:
        """Wait until the means of these parameters are here.

        Raises:
            RoundError: the round failed.
        """
        waiting = {self._places[name] for name in names}
        with self._session.pending.waited_for():
            for i in waiting:
                self.log.wait_for(self._messages[i], self._messages[i].over)
        self._session.failure.raise_first()

    def is_here(self, name: str) -> bool:
        """Whether the mean is."""
        return self._messages[self._places[name]].over.is_set()

    def mean(self, name: str) -> Tensor:
        """The mean of the parameter's gradients: a view, of its shape and layout."""
        i = self._places[name]
        param = next(each for each in self._session.buckets[i].slices if each.name == name)
        return laid_out(self._flats[i][param.start : param.stop], self._named[name])


def laid_out(flat: Tensor, p: Tensor) -> Tensor:
    """A view of `flat` as DDP lays a gradient of `p` out: in the order of its memory, if that has no gaps."""
    step = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != step:
            return flat.view(p.shape)
        step *= size
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset())
