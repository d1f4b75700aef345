"""Gradients whose mean is applied a step late, while the next one is under way (Pipe-SGD)."""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.errors import AttachError
from tacit.kernels.dispatch import on_host
from tacit.session import Session

BLOCK = 1 << 16
"""Elements exchanged at a time: they stay in the second-level cache in between."""


class DelayedMeans:
    """A buffer for each bucket, which holds the gradient under way, and then its mean.

    A backward first waits for the round of the one before it. From then on, whenever DDP has filled a bucket,
    its gradient goes into the buffer and is exchanged, and the mean that was there goes to DDP. So one round
    is under way at a time, and every exchange starts from the state of the one before it.

    Waiting at the beginning costs little: if rounds take longer than computing, the link would be busy until
    then anyway. The first step, and those of a warm-up, are synchronous: DDP gets that step's mean, which
    stays in the buffer. So the first late step applies the mean of the step before it once more, as x_{t+1} =
    x_t - lr g_{t-1} has it. The mean that is under way when training ends is not applied.

    Attributes:
        flats: the buffers, one a bucket.
        late: whether the backward under way gets the means of the one before it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._buckets = session.buckets
        self._began_at: int | None = None
        self.late = False
        self._allocate()

    def _allocate(self) -> None:
        self.flats = [bucket.like(bucket.device).zero_() for bucket in self._buckets]
        kinds = {(flat.dtype, flat.device) for flat in self.flats}
        self._blocks = {kind: torch.empty(BLOCK, dtype=kind[0], device=kind[1]) for kind in kinds}

    def begin(self) -> None:
        """Wait for the round under way, as a backward begins.

        Raises:
            RoundError: it failed.
            AttachError: the means of that round would be taken for gradients of this step.
        """
        session = self._session
        session.flush()
        sync = session.schedule.sync_at(session.step)
        self.late = session.step > 0 and sync.apply_at > session.step
        if self.late and session.step == self._began_at:
            step = session.nonfinite.global_step(session.step)
            raise AttachError(
                f"a second backward in step {step}, with no optimizer.step since the first: "
                f"{session.strategy.name!r} gives a step the mean of the step before, and accumulating would "
                "mix the two. Write `with model.no_sync():` around all backward passes of a step but the last"
            )
        self._began_at = session.step

    def swap_(self, i: int, start: int, gradient: Tensor) -> None:
        """Swap a gradient with the mean that lies in the buffer of bucket `i` at `start`."""
        mean = self.flats[i][start : start + gradient.numel()]
        if not on_host(gradient):
            between = mean.clone()
            mean.copy_(gradient)
            gradient.copy_(between)
            return
        block = self._blocks[mean.dtype, mean.device]
        for at in range(0, gradient.numel(), BLOCK):
            ours, theirs = mean[at : at + BLOCK], gradient[at : at + BLOCK]
            between = block[: ours.numel()].copy_(ours)
            ours.copy_(theirs)
            theirs.copy_(between)

    def follow_buckets(self) -> None:
        """Move the means into the session's present buckets. Not while a round is under way."""
        before = self.saved_state()
        self._buckets = self._session.buckets
        self._allocate()
        for name, mean in self.saved_state().items():
            mean.copy_(before[name])

    def resume(self) -> None:
        """Start anew after a checkpoint was loaded, which may be of another step."""
        self._began_at = None
        self.follow_buckets()

    def saved_state(self) -> dict[str, Tensor]:
        """The latest means, for a checkpoint: views by parameter, equal on all ranks."""
        buckets = zip(self._buckets, self.flats, strict=True)
        return {
            param.name: flat[param.start : param.stop] for bucket, flat in buckets for param in bucket.slices
        }
