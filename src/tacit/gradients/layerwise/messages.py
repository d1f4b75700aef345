"""What gradients that leave layer by layer are noted by: messages, times, and where DDP keeps gradients."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor

from tacit.exchange.halves import Halves
from tacit.gradients.layerwise.message_plan import LinkUse
from tacit.session.buckets import stretch_of
from tacit.torch_compat import GradBucket

_ROUNDS = 32
"""More than are looked at until the last plan is made."""


@dataclass(eq=False)
class LayerMessage:
    """A message in one round.

    Attributes:
        flat: where in DDP's bucket its gradients lie, and then their means.
        missing: how many of its gradients are not there.
        halves: where its all-gather leaves later than its reduce-scatter.
        reduced: whether the first of these is complete, or has failed.
        over: set when it is complete, or has failed.
    """

    flat: Tensor
    missing: int
    halves: Halves | None = None
    reduced: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    def filled(self) -> bool:
        """One more gradient is there; returns whether it is the last."""
        self.missing -= 1
        return self.missing == 0

    def completed(self, last: bool) -> None:
        """It is, or the first of its halves, or has failed."""
        self.reduced = True
        if last:
            self.over.set()

    def may_leave(self, last: bool) -> bool:
        """Whether it is ready, or its second half."""
        return self.reduced if last and self.halves is not None else not self.missing


@dataclass(eq=False)
class GradientTimes:
    """When backward had each gradient: seconds from the first one on, of the last rounds."""

    ready: dict[str, deque[float]] = field(default_factory=dict)
    began: float = 0.0

    def clear(self) -> None:
        """Forget the rounds so far."""
        self.ready.clear()

    def begin(self) -> None:
        """The first gradient of a backward pass is there."""
        self.began = perf_counter()

    def note(self, name: str) -> None:
        """This one is."""
        self.ready.setdefault(name, deque(maxlen=_ROUNDS)).append(perf_counter() - self.began)


class LinkTime:
    """For how long messages were under way, how many, and of how many bytes of gradients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._began = 0.0
        self.clear()

    def clear(self) -> None:
        """Forget what was."""
        self._seconds, self._nbytes, self._messages = 0.0, 0, 0

    def left(self, nbytes: int) -> None:
        """A message of so many bytes leaves."""
        with self._lock:
            if not self._under_way:
                self._began = perf_counter()
            self._under_way += 1
            self._messages += 1
            self._nbytes += nbytes

    def came(self) -> None:
        """One is complete."""
        with self._lock:
            self._under_way -= 1
            if not self._under_way:
                self._seconds += perf_counter() - self._began

    def seen(self, share: float) -> LinkUse:
        """What was under way since it was cleared; `share`: bytes on the wire for each of a gradient."""
        with self._lock:
            return LinkUse(self._seconds, share * self._nbytes, self._messages)


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

    def stretch(self, members: Sequence[str], named: Mapping[str, Tensor]) -> Tensor | None:
        """Where these lie one behind the other, in one bucket; None if they do not.

        `members`: parameters, or stretches of them; see `session.buckets.stretch_of`.
        """
        if not self._places:
            self._find_places(named)
        parts = [stretch_of(each, named) for each in members]
        number, at = self._places[parts[0][0]]
        at += parts[0][1]
        first = at
        for name, start, stop in parts:
            bucket, begins = self._places[name]
            if (bucket, begins + start) != (number, at):
                return None
            at += stop - start
        return self._now[number][1][first:at]

    def _find_places(self, named: Mapping[str, Tensor]) -> None:
        for number, (names, _) in enumerate(self._now):
            start = 0
            for name in names:
                self._places[name] = number, start
                start += named[name].numel()
