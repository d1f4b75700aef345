"""A GPU that is none: tensors of the CPU stand for its, and a made clock for its events.

What is launched takes the host some time, and the GPU some more by its bytes, whether it is a kernel or a
collective. Only `torch.cuda` and the clocks are replaced: the code that a GPU runs is the code that runs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tacit.kernels.dispatch import emulated_device

_TICK = 2.0**-30
"""Seconds; all times are multiples of it, so that sums and differences of them are exact."""
LAUNCH = 10_737 * _TICK
"""The host's seconds for each operator: ten microseconds."""
_BYTES = 1e9
"""A second that the GPU reads or writes."""


class Stream:
    """As `torch.cuda.Stream`: what comes to it begins when all before it has ended."""

    def __init__(self, gpu: "Gpu") -> None:
        self._gpu, self.now = gpu, 0.0

    def wait_stream(self, other: "Stream") -> None:
        """What comes here waits for what is there."""
        self.now = max(self.now, other.now)

    def query(self) -> bool:
        """Whether it has run all."""
        return self.now <= self._gpu.host

    def synchronize(self) -> None:
        """The host waits."""
        self._gpu.host = max(self._gpu.host, self.now)


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, gpu: "Gpu") -> None:
        self._gpu, self.at = gpu, 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Here is that moment: the stream has done what was launched."""
        stream = stream or self._gpu.current
        self.at = stream.now = max(stream.now, self._gpu.host)

    def synchronize(self) -> None:
        """The host waits."""
        self._gpu.host = max(self._gpu.host, self.at)

    def query(self) -> bool:
        """Whether it is over."""
        return self.at <= self._gpu.host

    def elapsed_time(self, later: "Event") -> float:
        """Milliseconds."""
        return 1e3 * (later.at - self.at)


class Gpu(TorchDispatchMode):
    """The clocks of a host and of a GPU's streams, in seconds; each operator moves them on.

    Attributes:
        wire: bytes a second of a collective.
    """

    def __init__(self, wire: float = 1e9) -> None:
        super().__init__()
        self.host, self.wire = 0.0, wire
        self.current = Stream(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        nbytes = sum(each.nbytes for each in _tensors([args, found]) if not each.is_meta)
        of_wire = func.namespace == "c10d"
        self.host += LAUNCH
        seconds = _TICK * round(nbytes / (self.wire if of_wire else _BYTES) / _TICK)
        self.current.now = max(self.current.now, self.host) + seconds
        return found

    def sleep(self, cycles: int) -> None:
        """As `torch.cuda._sleep`."""
        self.current.now = max(self.current.now, self.host) + _TICK * round(cycles / 2e9 / _TICK)

    @contextmanager
    def inside(self, stream: Stream | None) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


@contextmanager
def made_gpu(wire: float = 1e9) -> Iterator[Gpu]:
    """Inside the block tensors stand for a GPU's, and the clocks of moments are made ones."""
    gpu = Gpu(wire)
    read: Callable[[], float] = lambda: gpu.host  # noqa: E731
    clocks = SimpleNamespace(perf_counter=read, process_time=read, thread_time=read)
    names: dict[str, Any] = {
        "Event": lambda **_: Event(gpu),
        "Stream": lambda device=None: Stream(gpu),
        "stream": gpu.inside,
        "_sleep": gpu.sleep,
        "current_stream": lambda device=None: gpu.current,
        "get_device_name": lambda device=None: "a made GPU",
        "get_device_capability": lambda device=None: (7, 0),
    }
    with ExitStack() as stack:
        for name, each in names.items():
            stack.enter_context(patch.object(torch.cuda, name, each))
        for module in ("tacit.moments", "tacit.planning.step_timer"):
            stack.enter_context(patch(f"{module}.time", clocks))
        # By the made clock small messages show as much, and they travel in earnest.
        stack.enter_context(patch("tacit.transports.gpu_rings._BYTES", 1 << 16))
        # By the device's type it would have none.
        stack.enter_context(patch("tacit.exchange.stream_lane.stream_on", lambda device: Stream(gpu)))
        stack.enter_context(emulated_device())
        stack.enter_context(gpu)
        yield gpu
