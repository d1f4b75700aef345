"""Training with a `torch.amp.GradScaler`: all replicas skip a step that overflows, and count equal steps.

A scaler does not call `optimizer.step` if it has found infinity, and torch has no hook for that: replicas
that step alone would each count other steps, and wait for each other in different rounds. So backward passes
in which DDP synchronises are counted, which are equal on all replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from tacit.contracts import WORLD
from tacit.exchange.joined_requests import average_, gather
from tacit.gradients.ddp_hook import Answer, BucketFuture, after_backward
from tacit.levels.level import Level
from tacit.session import Session
from tacit.torch_compat import GradBucket, at_end_of_backward, scale_on_device


class ScaledSteps:
    """Counts the attempts of a scaled optimizer, and runs the rounds after them.

    An attempt is a backward pass in which DDP synchronises. If a round follows, the ranks first exchange in
    that backward whether a gradient has overflowed. If none has, all of them will step, and the round runs
    after the step. If one has, all gradients are made infinite, so that every scaler skips this step and
    lowers its factor, and the round runs at once. So no rank waits for a step that another one skips.

    Args:
        scaler: scales the loss, and so every gradient.
        levels: of the strategy, near to far.
        named: the parameters whose gradients are scaled.
        optimizers: step the parameters.
    """

    def __init__(
        self,
        scaler: GradScaler,
        levels: Sequence[Level],
        named: dict[str, Tensor],
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self._scaler, self._levels, self._named = scaler, levels, named
        self._optimizers = optimizers
        self._near = levels[0].session if levels[0].gradient is not None else None
        self._due: list[Level] = []
        self._held: list[tuple[Level, int]] = []
        self._overflow = self._near_communicates = False
        if self._near is not None:
            # On a device it stays there: reading it would wait for all that was launched.
            in_stream = self._near.context.in_stream
            self._near.nonfinite.use_scale(scale_on_device(scaler) if in_stream else scaler.get_scale)  # type: ignore[arg-type]

    def around(self, answer: Answer) -> Answer:
        """Wrap the answer to DDP's hook, to count an attempt when backward ends."""
        ended = after_backward(self._end)

        def counted(bucket: GradBucket) -> BucketFuture:
            if bucket.index() == 0:
                self._begin()
            if self._due and not self._near_communicates and not self._overflow:
                self._overflow = not bool(bucket.buffer().isfinite().all())
            future = answer(bucket)
            if bucket.is_last():
                at_end_of_backward(ended)
            return future

        return counted

    def after_step(self) -> None:
        """Run the round after a step that was taken."""
        for level in self._levels:
            level.session.failure.raise_first()
        self._hold_rounds()
        for level in self._levels:
            level.note_writes()

    def consolidate(self) -> None:
        """Set all scalers to the smallest factor, as plain DDP needs them equal. A collective call."""
        if self._levels[-1].steps_alone:
            _equalize(self._scaler, self._levels[-1].session)

    def _begin(self) -> None:
        self._hold_rounds()  # no step since, as when gradients accumulate without `no_sync`
        self._overflow = False
        self._near_communicates = self._near is not None and self._near.communicates()
        self._due = [level for level in self._levels if level.acts_after(level.session.step)]

    def _end(self) -> None:
        overflow = self._overflow
        if self._near is not None and self._near_communicates:
            if self._near.context.in_stream and not self._due:
                self._spoil_if(self._near.pending.broken)
            else:
                self._near.pending.verify()
                overflow = self._near.pending.skipped
        for level in self._due:
            overflow = _anywhere(overflow, level)
        self._held = [(level, level.session.step) for level in self._due]
        for level in self._levels:
            level.session.advance()
        if overflow:
            self._spoil()
        if overflow and self._due:
            self._hold_rounds()

    def _hold_rounds(self) -> None:
        held, self._held = self._held, []
        for level, step in held:
            level.act(step)
            level.note_writes()

    @torch.no_grad()
    def _spoil_if(self, broken: Tensor | None) -> None:
        """If `broken` on the device, make one gradient entry of each optimizer infinite: that is enough."""
        if broken is None:
            return
        infinite = torch.zeros_like(broken, dtype=torch.float32).masked_fill_(broken, math.inf)
        for optimizer in self._optimizers:
            held = [
                p
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None and p.numel()
            ]
            for p in held[:1]:
                p.grad[(0,) * p.dim()].add_(infinite.to(p.grad.dtype))

    @torch.no_grad()
    def _spoil(self) -> None:
        for p in self._named.values():
            if p.grad is not None:
                p.grad.fill_(math.inf)


def _anywhere(overflow: bool, level: Level) -> bool:
    """Whether `overflow` is True on any rank of this level's rounds."""
    flag = torch.tensor([float(overflow)], dtype=torch.float32)
    level.session.ask(lambda: average_(flag, level.strategy.topology.scope), "overflow")
    return bool(flag > 0)


def _equalize(scaler: GradScaler, session: Session) -> None:
    state = scaler.state_dict()
    mine = torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float64)
    all_ = torch.stack(session.drive(gather(mine, WORLD), key="scaler"))
    scale, tracker = all_.amin(0).tolist()
    scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": int(tracker)})
