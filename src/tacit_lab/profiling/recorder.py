"""Takes notes of a rank's threads after each step of its optimizer, and makes a profile of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tacit_lab.profiling import instruments, threads
from tacit_lab.profiling.profile import RankProfile, ThreadProfile
from tacit_lab.profiling.stages import StageClock, cpu_ns

SKIPPED = 5
"""So many steps at the beginning are left out, or half of all if those are fewer: buffers are made, buckets
settle and kernels are compiled in them."""
MOST = 50
"""So many steps are measured at the most."""
_OWN = "the profile itself"
_REPEATED = 1000


@dataclass(frozen=True)
class _Snapshot:
    """All threads after one step: their stages in ns, and how often all have changed their stage."""

    wall: int
    process: int
    stages: Mapping[int, Mapping[str, int]]
    changes: int


class ProfileRecorder:
    """Profiles this process.

    Args:
        skipped, most: How many steps are left out and measured.

    Attributes:
        clock: Takes the time of stages.
    """

    def __init__(self, skipped: int = SKIPPED, most: int = MOST) -> None:
        self.clock = StageClock()
        self._skipped, self._most = skipped, most
        self._snapshots: list[_Snapshot] = []
        self._optimizer: Optimizer | None = None
        self._main: int | None = None
        self._names: dict[int, str] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it steps of an optimizer are seen, and those of the first one are counted."""
        before = register_optimizer_step_pre_hook(lambda optimizer, *_: self.clock.enter("optimizer"))
        after = register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def instrument(self) -> None:
        """Time the stages of tacit and of a training loop; for good."""
        instruments.replace(self.clock)
        for owner, name, stage in (
            (DistributedDataParallel, "forward", "forward"),
            (torch.Tensor, "backward", "backward"),
            (Optimizer, "zero_grad", "zero_grad"),
        ):
            setattr(owner, name, self.clock.timed(getattr(owner, name), stage))

    def _stepped(self, optimizer: Optimizer) -> None:
        self.clock.leave()
        self._optimizer = self._optimizer or optimizer
        if optimizer is self._optimizer and len(self._snapshots) <= self._skipped + self._most:
            with self.clock.within(_OWN):
                self._take()

    def _take(self) -> None:
        tids = threads.running()
        self._main = self._main or threading.get_native_id()
        self._names |= threads.names([tid for tid in tids if tid not in self._names], self._main)
        stages: dict[int, Mapping[str, int]] = {}
        # The clocks last and side by side, so that they belong together.
        wall, process = time.monotonic_ns(), time.process_time_ns()
        for tid in tids:
            with suppress(OSError):
                stages[tid] = self.clock.of(tid, cpu_ns)
        changes = sum(thread.changes for thread in [*self.clock.threads.values()])
        self._snapshots.append(_Snapshot(wall, process, stages, changes))

    def profile(self, rank: int) -> RankProfile | None:
        """The profile of the measured steps; None where the optimizer made fewer than two."""
        count = len(self._snapshots) - 1
        if count < 1:
            return None
        skip = min(self._skipped, count // 2)
        kept = self._snapshots[skip:]
        spans = [*pairwise(kept)]
        named = threads.numbered(self._names)
        found = [
            ThreadProfile(
                named[tid],
                tuple(
                    _since(after.stages.get(tid, {}), before.stages.get(tid, {})) for before, after in spans
                ),
            )
            for tid in sorted(named)
            if tid in kept[-1].stages
        ]
        return RankProfile(
            rank=rank,
            first=skip + 2,
            wall_ns=tuple(after.wall - before.wall for before, after in spans),
            process_ns=tuple(after.process - before.process for before, after in spans),
            threads=tuple(found),
            timing_ns=round((kept[-1].changes - kept[0].changes) * _cost_of_a_change()),
        )


def _cost_of_a_change() -> float:
    """Processor time of entering a stage, or of leaving it, in ns."""
    clock = StageClock()
    before = time.thread_time_ns()
    for _ in range(_REPEATED):
        with clock.within(_OWN):
            pass
    return (time.thread_time_ns() - before) / _REPEATED / 2


def _since(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """What was added, of the stages that have any of it."""
    added = {stage: spent - before.get(stage, 0) for stage, spent in after.items()}
    return {stage: spent for stage, spent in added.items() if spent}
