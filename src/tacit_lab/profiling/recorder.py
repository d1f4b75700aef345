"""Takes notes of a rank's threads after each step of its optimizer, and makes a profile of them."""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tacit_lab.profiling import instruments, threads
from tacit_lab.profiling.causes import cause
from tacit_lab.profiling.profile import RankProfile, ThreadProfile
from tacit_lab.profiling.sampler import Denied, Sample, Sampler
from tacit_lab.profiling.stages import UNATTRIBUTED, Moment, StageClock, cpu_ns
from tacit_lab.profiling.symbols import COMPILED, NOWHERE, Frame, Symbols

__all__ = ["MOST", "SKIPPED", "ProfileRecorder", "SortedSamples", "short", "sort_samples"]

SKIPPED = 5
"""So many steps at the beginning are left out, or half of all if those are fewer: buffers are made, buckets
settle and kernels are compiled in them."""
MOST = 50
"""So many steps are measured at the most."""
_OWN = "the profile itself"
_LONGEST = 80
_REPEATED = 1000


@dataclass(frozen=True)
class _Snapshot:
    """All threads behind one step: their stages in ns, and their counts."""

    wall: int
    process: int
    stages: Mapping[int, Mapping[str, int]]
    counts: Mapping[int, threads.Counts]


class ProfileRecorder:
    """Profiles this process.

    Args:
        skipped, most: How many steps are left out and measured.
        sampled: Whether the kernel is asked for samples.

    Attributes:
        clock: Takes the time of stages.
    """

    def __init__(self, skipped: int = SKIPPED, most: int = MOST, sampled: bool = True) -> None:
        self.clock = StageClock()
        self._skipped, self._most = skipped, most
        self._snapshots: list[_Snapshot] = []
        self._optimizer: Optimizer | None = None
        self._main: int | None = None
        self._names: dict[int, str] = {}
        self._notes: list[str] = []
        self._sampler: Sampler | None = None
        if sampled:
            try:
                self._sampler = Sampler()
            except Denied as denied:
                self._notes.append(f"causes are not told apart: {denied}")
            else:
                if not self._sampler.sees_kernel:
                    self._notes.append(
                        "what the kernel does for a thread is not told apart: write sysctl "
                        "kernel.perf_event_paranoid=1 as root"
                    )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it steps of an optimizer are seen, and those of the first one are counted."""
        before = register_optimizer_step_pre_hook(lambda optimizer, *_: self.clock.enter("optimizer"))
        after = register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))
        if self._sampler is not None:
            self._sampler.start()
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._stop()

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
            if len(self._snapshots) > self._skipped + self._most:
                self._stop()

    def _stop(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler.take()

    def _take(self) -> None:
        tids = threads.running()
        self._main = self._main or threading.get_native_id()
        self._names |= threads.names([tid for tid in tids if tid not in self._names], self._main)
        counts: dict[int, threads.Counts] = {}
        for tid in tids:
            with suppress(OSError):
                counts[tid] = threads.counts(tid)
        stages: dict[int, Mapping[str, int]] = {}
        # The clocks last and side by side, so that they belong together.
        wall, process = time.monotonic_ns(), time.process_time_ns()
        for tid in tids:
            with suppress(OSError):
                stages[tid] = self.clock.of(tid, cpu_ns)
        self._snapshots.append(_Snapshot(wall, process, stages, counts))
        if self._sampler is not None:
            self._sampler.take()

    def profile(self, rank: int) -> RankProfile | None:
        """The profile of the measured steps; None where the optimizer made fewer than two."""
        count = len(self._snapshots) - 1
        if count < 1:
            return None
        skip = min(self._skipped, count // 2)
        kept = self._snapshots[skip:]
        spans = [*pairwise(kept)]
        sampled = self._sampled(kept[0].wall, kept[-1].wall)
        named = threads.numbered(self._names)
        found = [
            ThreadProfile(
                named[tid],
                tuple(
                    _since(after.stages.get(tid, {}), before.stages.get(tid, {})) for before, after in spans
                ),
                kept[-1].counts.get(tid, threads.Counts()) - kept[0].counts.get(tid, threads.Counts()),
                sampled.causes.get(tid, {}),
            )
            for tid in sorted(named)
            if tid in kept[-1].stages
        ]
        notes = [*self._notes]
        if self._sampler is not None and self._sampler.lost:
            notes.append(f"{self._sampler.lost} samples of rank {rank} found no room")
        return RankProfile(
            rank=rank,
            first=skip + 2,
            wall_ns=tuple(after.wall - before.wall for before, after in spans),
            process_ns=tuple(after.process - before.process for before, after in spans),
            threads=tuple(found),
            stacks={
                f"{named[tid]};{rest}": number
                for (tid, rest), number in sampled.stacks.items()
                if tid in named
            },
            timing_ns=self._timing_ns(kept[0].wall, kept[-1].wall),
            notes=tuple(notes),
        )

    def _timing_ns(self, begun: int, ended: int) -> int:
        moments = [each.at for thread in self.clock.threads.values() for each in thread.moments]
        return round(sum(begun <= at < ended for at in moments) * _cost_of_a_moment())

    def _sampled(self, begun: int, ended: int) -> SortedSamples:
        samples = [] if self._sampler is None else self._sampler.samples()
        within = [each for each in samples if begun <= each.at < ended and each.addresses]
        moments = {tid: thread.moments for tid, thread in self.clock.threads.items()}
        return sort_samples(within, moments, Symbols().frame)


# ---- samples ------------------------------------------------------------------------------------------


def _cost_of_a_moment() -> float:
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


@dataclass(frozen=True)
class SortedSamples:
    """How many samples there were, by the system's number of the thread.

    Attributes:
        causes: By thread, stage and cause.
        stacks: By thread and chain of names: the stage, and functions from the outermost on, with semicolons.
    """

    causes: Mapping[int, Mapping[str, Mapping[str, int]]]
    stacks: Mapping[tuple[int, str], int]


def sort_samples(
    samples: Sequence[Sample], moments: Mapping[int, Sequence[Moment]], frame: Callable[[int], Frame]
) -> SortedSamples:
    """Give each sample to the stage in which its thread was.

    Args:
        moments: When each thread has changed its stage, in order.
        frame: What is at an address.
    """
    causes: dict[int, dict[str, dict[str, int]]] = {}
    stacks: dict[tuple[int, str], int] = defaultdict(int)
    times = {tid: [moment.at for moment in changes] for tid, changes in moments.items()}
    for sample in samples:
        place = bisect_right(times.get(sample.tid, ()), sample.at)
        stage = moments[sample.tid][place - 1].stage if place else UNATTRIBUTED
        found = [frame(address) for address in sample.addresses]
        frames = [found[0], *(each for each in found[1:] if each.file not in (NOWHERE, COMPILED))]
        causes.setdefault(sample.tid, {}).setdefault(stage, defaultdict(int))[cause(stage, frames)] += 1
        stacks[sample.tid, ";".join([stage, *map(short, reversed(frames))])] += 1
    plain = {tid: {stage: dict(found) for stage, found in stages.items()} for tid, stages in causes.items()}
    return SortedSamples(plain, dict(stacks))


def short(frame: Frame) -> str:
    """The function's name without its parameters, or the file that it is in."""
    name, depth = "", 0
    for letter in re.sub(r" \[clone .*", "", frame.name.replace("(anonymous namespace)::", "")):
        depth += letter in "<("
        if not depth:
            name += letter
        depth -= letter in ">)"
    name = name.removesuffix(" const").rpartition(" ")[2].replace(";", ",") or frame.file or "unknown"
    # A loop over tensors: what it does is only in its parameters.
    loop = re.search(r"\w+_kernel(?=\w*\()", frame.name) if name.endswith("callback_fn") else None
    return (f"{name} of {loop[0]}" if loop else name)[-_LONGEST:]
