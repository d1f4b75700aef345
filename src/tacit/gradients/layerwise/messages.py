"""Records of gradients that are sent layer by layer: messages, times, and the memory of DDP's buckets."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tacit.exchange.two_jobs import Halves
from tacit.gradients.layerwise.message_plan import LinkUse
from tacit.session.buckets import span_of
from tacit.session.health.device_notes import mark
from tacit.torch_compat import GradBucket

_ROUNDS = 32
"""The rounds that are recorded: more than are measured until the last plan is made."""


@dataclass(eq=False)
class LayerMessage:
    """A message in one round.

    Attributes:
        flat: the span of DDP's bucket that holds its gradients, and then their means.
        missing: how many of its gradients are not yet computed.
        halves: its two halves, if its all-gather is sent later than its reduce-scatter.
        reduced: whether the reduce-scatter is complete, or has failed.
        over: set when it is complete, or has failed; in stream order, when all of it is launched.
        ended: in stream order, an event after it; None on the CPU.
        joined: in stream order, whether training's stream waits for it.
    """

    flat: Tensor
    missing: int
    halves: Halves | None = None
    reduced: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    ended: Any = None
    joined: bool = False

    def filled(self) -> bool:
        """Note that one more gradient is computed. Returns whether it is the last."""
        self.missing -= 1
        return self.missing == 0

    def completed(self, last: bool) -> None:
        """Note that it is complete, or its first half, or that it has failed."""
        self.reduced = True
        if last:
            self.over.set()

    def launched(self) -> None:
        """Note the event after it, in the stream of exchanges."""
        self.ended = mark(self.flat.device)

    def join(self) -> None:
        """Make the current stream wait for it, and for nothing that is launched later."""
        if self.ended is not None and not self.joined:
            self.ended.wait()
        self.joined = True

    def may_leave(self, last: bool) -> bool:
        """Whether it, or its second half, is ready to be sent."""
        return self.reduced if last and self.halves is not None else not self.missing


class GradientTimes:
    """When backward had each gradient, after the first one, for the last rounds.

    Args:
        device: that of the gradients. On a GPU, which is behind the host, events in its stream are noted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted: dict[str, deque[tuple[Any, Any]]] = {}
        self._began: Any = None

    def clear(self) -> None:
        """Forget the rounds so far."""
        self._noted.clear()

    def begin(self) -> None:
        """Note that the first gradient of a backward pass is computed."""
        self._began = self._now()

    def note(self, name: str) -> None:
        """Note that this gradient is computed."""
        self._noted.setdefault(name, deque(maxlen=_ROUNDS)).append((self._began, self._now()))

    def seconds(self) -> dict[str, float]:
        """The median of each gradient. On a GPU it waits until the device has come so far."""
        return {name: median(starmap(_between, pairs)) for name, pairs in self._noted.items()}

    def _now(self) -> Any:
        return mark(self._device) or perf_counter()


def _between(began: Any, ended: Any) -> float:
    if isinstance(ended, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


class LinkTime:
    """The seconds that messages were under way, their number, and the bytes of their gradients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._began = 0.0
        self.clear()

    def clear(self) -> None:
        """Forget all messages so far."""
        self._seconds, self._nbytes, self._messages = 0.0, 0, 0

    def left(self, nbytes: int) -> None:
        """Note that a message of so many bytes is sent."""
        with self._lock:
            if not self._under_way:
                self._began = perf_counter()
            self._under_way += 1
            self._messages += 1
            self._nbytes += nbytes

    def came(self) -> None:
        """Note that a message is complete."""
        with self._lock:
            self._under_way -= 1
            if not self._under_way:
                self._seconds += perf_counter() - self._began

    def seen(self, share: float) -> LinkUse:
        """The use of the link since `clear`; `share`: bytes on the wire for each byte of a gradient."""
        with self._lock:
            return LinkUse(self._seconds, share * self._nbytes, self._messages)


class DdpBuffers:
    """DDP's buckets: the position of each parameter, in memory that stays once buckets stay."""

    def __init__(self) -> None:
        self._now: list[tuple[list[str], Tensor]] = []
        self._before: list[tuple[list[str], int]] = []
        self._positions: dict[str, tuple[int, int]] = {}

    def note(self, names: list[str], bucket: GradBucket) -> None:
        """Note a bucket that DDP passes to its hook."""
        if bucket.index() == 0:
            self._before = [(each, buffer.data_ptr()) for each, buffer in self._now]
            self._now = []
        self._now.append((names, bucket.buffer()))
        self._positions.clear()

    @property
    def are_settled(self) -> bool:
        """Whether the last two backward passes had the same buckets, in the same memory."""
        now = [(names, buffer.data_ptr()) for names, buffer in self._now]
        return bool(now) and now == self._before

    @property
    def layout(self) -> list[list[str]]:
        """The parameters of each bucket, in order."""
        return [names for names, _ in self._now]

    def is_at(self, number: int, buffer: Tensor) -> bool:
        """Whether bucket `number` has the memory of `buffer`."""
        return self._now[number][1].data_ptr() == buffer.data_ptr()

    def contiguous(self, members: Sequence[str], named: Mapping[str, Tensor]) -> Tensor | None:
        """The span of one bucket in which these members lie one after the other; None if there is none.

        `members`: parameters, or parts of them; see `session.buckets.span_of`.
        """
        if not self._positions:
            self._find_positions(named)
        parts = [span_of(each, named) for each in members]
        number, at = self._positions[parts[0][0]]
        at += parts[0][1]
        first = at
        for name, start, stop in parts:
            bucket, begins = self._positions[name]
            if (bucket, begins + start) != (number, at):
                return None
            at += stop - start
        return self._now[number][1][first:at]

    def _find_positions(self, named: Mapping[str, Tensor]) -> None:
        for number, (names, _) in enumerate(self._now):
            start = 0
            for name in names:
                self._positions[name] = number, start
                start += named[name].numel()
