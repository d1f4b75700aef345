"""Notes that a device makes of NaN and overflow in rounds for which the host does not wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.exchange.finite_checks import OVERFLOWN, measure_
from tacit.session.buckets import Bucket
from tacit.torch_compat import largest_of_each

MEANS = 4
"""The number of `AllReduce`s of an exchange that are distinguished when ranks find out which had a NaN first.
"""


class BucketHealth:
    """The notes of one bucket, written on the device during its exchange, and read when the round is over.

    Args:
        nonfinite_flags: numbers by which ranks report NaN, idle parameters and overflow; see
            `Plan.nonfinite_flags`.
        ranks: the number of ranks.
        me: the index of this one.

    Attributes:
        overflow: one number, the largest magnitude on this rank of what may overflow.
        finite_probe: the largest magnitude of this rank's input to each mean (`watched`, in
            exchange/joined_requests.py).
    """

    def __init__(self, bucket: Bucket, nonfinite_flags: Tensor, ranks: int, me: int) -> None:
        self.bucket, self.nonfinite_flags, self.ranks, self._me = bucket, nonfinite_flags, ranks, me
        self.overflow = nonfinite_flags[len(nonfinite_flags) - ranks + me :][:1]
        self._spans = [slice(param.start, param.stop) for param in bucket.slices if param.stop > param.start]
        self._slots = [i for i, param in enumerate(bucket.slices) if param.stop > param.start]
        self._beside = torch.zeros(
            MEANS + 1 + len(self._spans), device=nonfinite_flags.device, dtype=torch.float32
        )
        self.finite_probe, self._mean = self._beside[:MEANS], self._beside[MEANS : MEANS + 1]
        self._given = self._beside[MEANS + 1 :]
        self._idle = torch.zeros(len(bucket.slices), pin_memory=nonfinite_flags.is_cuda, dtype=torch.float32)
        self._views: tuple[int, list[Tensor]] = 0, []

    def begin(self, idle: Callable[[], Sequence[float]] | None) -> None:
        """Reset the notes for a round. `idle`: 1 for parameters without a gradient, if ranks must know."""
        self.nonfinite_flags.zero_()
        if idle is not None:
            self._idle.copy_(torch.tensor(idle(), dtype=torch.float32))
            self.nonfinite_flags[self.ranks : self.ranks + len(self._idle)].copy_(
                self._idle, non_blocking=True
            )

    def note_given(self, x: Tensor) -> None:
        """Note the largest magnitude of each parameter in `x` (flat), and report the largest of all."""
        if not self._spans:
            return
        if self._views[0] != x.data_ptr():
            self._views = x.data_ptr(), [x[span] for span in self._spans]
        norms = largest_of_each(self._views[1])
        if x.dtype == self._given.dtype:
            torch.stack(norms, out=self._given)
        else:
            self._given.copy_(torch.stack(norms))
        torch.amax(self._given, 0, True, out=self.nonfinite_flags[self._me : self._me + 1])

    def note_mean(self, mean: Tensor) -> None:
        """Note the largest magnitude of a mean; it is the same on all ranks."""
        measure_(mean, self._mean)

    @property
    def reports_idle(self) -> bool:
        """Whether the ranks report which parameters had no gradient."""
        return len(self.nonfinite_flags) > 2 * self.ranks

    @property
    def broken(self) -> Tensor:
        """Whether a rank's tensor or the mean is not finite; on the device."""
        return torch.cat([self.nonfinite_flags[: self.ranks], self._mean]).isfinite().all().logical_not()

    def numbers(self) -> tuple[Tensor, Tensor]:
        """All notes, as two tensors."""
        return self.nonfinite_flags, self._beside

    def report(self, nonfinite_flags: Tensor, beside: Tensor) -> HealthReport:
        """The report that the numbers encode, on the host."""
        given = beside[MEANS + 1 :].isfinite().logical_not().nonzero().view(-1).tolist()
        over = (nonfinite_flags[len(nonfinite_flags) - self.ranks :] * self.ranks).lt(OVERFLOWN).logical_not()
        return HealthReport(
            nonfinite_flags[: self.ranks].isfinite().logical_not().nonzero().view(-1).tolist(),
            nonfinite_flags[self.ranks : len(nonfinite_flags) - self.ranks],
            self._slots[given[0]] if given else None,
            over.nonzero().view(-1).tolist(),
            beside[:MEANS],
            not bool(beside[MEANS].isfinite()),
        )


@dataclass(frozen=True)
class HealthReport:
    """The notes of one bucket, on the host.

    Attributes:
        given: the indices of the ranks whose tensor was not finite.
        idle: for each parameter, the share of the ranks on which it had no gradient.
        first: the index of the first of the bucket's parameters that was not finite on this rank.
        overflow: the indices of the ranks on which an entry became too large on the way.
        finite_probe: one number for each mean: not finite if this rank's input to it was not.
        mean: whether the mean is not finite.
    """

    given: list[int]
    idle: Tensor
    first: int | None
    overflow: list[int]
    finite_probe: Tensor
    mean: bool

    @property
    def wrong(self) -> bool:
        """Whether anything was not finite, or too large."""
        return bool(self.given or self.overflow or self.mean)


class DeviceReport:
    """The notes of a round, copied to the host after all that the round has launched."""

    def __init__(self, buckets: Sequence[tuple[int, BucketHealth]], began: Any) -> None:
        self._buckets, self._began = buckets, began
        self._idle = any(health.reports_idle for _, health in buckets)
        flat = (
            torch.cat([each for _, health in buckets for each in health.numbers()])
            if buckets
            else torch.zeros(0, dtype=torch.float32)
        )
        self._ended: Any = None
        self._waited: Any = None
        self._host = flat
        if flat.is_cuda:
            self._host = torch.empty(flat.shape, pin_memory=True, dtype=torch.float32).copy_(
                flat, non_blocking=True
            )
            self._ended = mark(flat.device)

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to report: no number reaches the share of one rank in a mean.

        To be read only once it is `done`.
        """
        ranks = max((health.ranks for _, health in self._buckets), default=1)
        return not self._idle and bool(self._host.abs().lt(OVERFLOWN / ranks).all())

    @property
    def done(self) -> bool:
        """Whether the device has made the copy."""
        return self._ended is None or bool(self._ended.query())

    def waits(self, mark: Any) -> None:
        """Note the event from which on training's stream waits for the round."""
        self._waited = mark

    def seconds(self) -> tuple[float, float] | None:
        """The seconds that the round took on the device, and that training waited; None before it is done."""
        if self._ended is None or self._began is None:
            return None
        took = self._began.elapsed_time(self._ended) / 1e3
        waited = 0.0
        if self._waited is not None and self._waited.query():  # else training never waited
            waited = max(0.0, self._waited.elapsed_time(self._ended) / 1e3)
        return took, min(took, waited)

    def read(self) -> dict[int, HealthReport]:
        """The reports by bucket, where there is something to report; waits until the copy is made."""
        if self._ended is not None:
            self._ended.synchronize()
        found: dict[int, HealthReport] = {}
        at = 0
        if self.quiet:
            return found
        for i, health in self._buckets:
            nonfinite_flags, beside = (len(each) for each in health.numbers())
            found[i] = health.report(
                self._host[at : at + nonfinite_flags],
                self._host[at + nonfinite_flags : at + nonfinite_flags + beside],
            )
            at += nonfinite_flags + beside
        return found


def mark(device: torch.device) -> Any:
    """An event of the current stream; None on the CPU."""
    if device.type != "cuda":
        return None
    cuda: Any = torch.cuda
    event = cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
