"""What a check of `gpu.py` is, and how its parts take time on a GPU; and on a CPU, in its small form."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._autograd import DeviceType

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Where and for how long a check runs.

    Attributes:
        device: a GPU; or the CPU, where all is small and only shows that the check works.
        seconds: that it may take.
        found: what earlier checks found, by their names.
    """

    device: torch.device = CUDA
    seconds: float = 60.0
    found: Mapping[str, Any] = field(default_factory=dict)

    @property
    def small(self) -> bool:
        """Whether it is the CPU's form, whose figures mean nothing."""
        return self.device.type == "cpu"


@dataclass(frozen=True)
class Check:
    """One thing that is measured.

    Attributes:
        name: "PART: WHAT", or "PART".
        seconds: that it takes on one H200, about, with what it needs before it begins.
        shows: what a reader of docs/gpus.md learns by it.
        run: returns what was found, as JSON can hold it; "verdicts" in it, if it has goals.
        fills: whether it takes all the time that is left; `seconds` are then the least that it needs.
    """

    name: str
    seconds: int
    shows: str
    run: Callable[[Setting], Row]
    fills: bool = False


def verdict(what: str, found: float, most: float) -> Row:
    """Whether a figure is at most what it should be."""
    return {"what": what, "is": found, "goal": most, "met": found <= most}


def milliseconds(call: Callable[[], object], times: int, device: torch.device) -> float:
    """A call's, on the device, in one block of so many calls."""
    if device.type == "cpu":
        begun = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - begun) * 1000 / times
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / times


def microseconds(call: Callable[[], object], device: torch.device) -> float:
    """A call's, on the device: the median of five blocks."""
    times = 2 if device.type == "cpu" else 20
    return 1000 * statistics.median(milliseconds(call, times, device) for _ in range(5))


def synchronize(device: torch.device) -> None:
    """Wait for what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def on_the_device(
    call: Callable[[], object], times: int, device: torch.device
) -> list[tuple[float, float, str]]:
    """What the device does in so many calls, in order: (begin, duration) in ms, and its name."""
    activities = torch.profiler.ProfilerActivity
    kind = activities.CPU if device.type == "cpu" else activities.CUDA
    synchronize(device)
    with torch.profiler.profile(activities=[kind]) as profiler:
        for _ in range(times):
            call()
        synchronize(device)
    assert profiler.profiler is not None
    return sorted(
        (event.start_ns() / 1e6, event.duration_ns() / 1e6, event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == (DeviceType.CPU if device.type == "cpu" else DeviceType.CUDA)
    )
