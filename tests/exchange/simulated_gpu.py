"""A GPU that is none: tensors that say they are on it, streams that are names, and who waits for whom.

What is launched runs at once, on the CPU. Each stream and the host have a vector clock; whatever reads must
come behind what wrote the same memory, and whatever writes behind what wrote or read it, as far as events,
waiting streams and the host say so. Two that nothing orders are noted in `Gpu.races`.

Usage: `with simulated(monkeypatch) as gpu: ...`; tensors on the device are made by `device=gpu.device`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tacit.kernels import thread_scratch

HOST = "host"
SHAPES = (
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_empty",
    "new_zeros",
    "new_full",
    "new_ones",
)
"""What looks at the shape of what it is given, and not at its values."""
READ = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select")
"""What the host waits for."""

Clock = dict[str, int]


def join(mine: Clock, other: Clock) -> None:
    """From now on mine comes behind the other."""
    for who, tick in other.items():
        mine[who] = max(mine.get(who, 0), tick)


@dataclass(frozen=True)
class Access:
    """Bytes `start` to `stop` of some memory were read or written."""

    start: int
    stop: int
    who: str
    tick: int
    wrote: bool
    what: str


@dataclass
class Gpu:
    """What was launched, and what has been found.

    Attributes:
        clocks: of each stream, and of the host.
        log: what streams and events were asked to do, in order.
        races: what nothing has ordered.
        waited: what the host has waited for.
        memory: what was done to it last; `pinned`: where copies are not waited for; `ours`: on the device.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))
    clocks: dict[str, Clock] = field(default_factory=dict)
    log: list[tuple[str, ...]] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    waited: list[str] = field(default_factory=list)
    schedule_state: dict[int, list[Access]] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    ours: set[int] = field(default_factory=set)
    here: threading.local = field(default_factory=threading.local)
    lock: Any = field(default_factory=threading.RLock)
    count: int = 0

    def __post_init__(self) -> None:
        self.main = Stream(self, name="main")

    @property
    def current(self) -> Stream:
        """The stream of this thread."""
        return getattr(self.here, "stream", self.main)

    def clock(self, who: str) -> Clock:
        """Of a stream, or of the host."""
        return self.clocks.setdefault(who, {who: 0})

    def launch(self, who: str) -> int:
        """Something runs there, behind what the host knows of; when."""
        clock = self.clock(who)
        join(clock, self.clock(HOST))
        clock[who] += 1
        return clock[who]

    def covers(self, who: str, other: Clock) -> bool:
        """Whether it comes behind all of the other."""
        mine = self.clock(who)
        return all(mine.get(each, 0) >= tick for each, tick in other.items())

    def touch(self, x: Tensor, who: str, tick: int, wrote: bool, what: str) -> None:
        """These values are read or written."""
        if not x.numel() or x.is_meta:
            return
        start = x.storage_offset() * x.element_size()
        extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        stop = start + extent * x.element_size()
        clock, found = self.clock(who), self.schedule_state.setdefault(key(x), [])
        for each in found:
            meets = each.start < stop and start < each.stop and (wrote or each.wrote)
            if meets and clock.get(each.who, 0) < each.tick:
                verb, theirs = ("writes", "reads")[not wrote], ("writes", "reads")[not each.wrote]
                self.races.append(f"{what} on {who} {verb} what {each.what} on {each.who} {theirs}")
        if wrote:
            found[:] = [each for each in found if each.start < start or each.stop > stop]
        else:  # a later read of the same stream stands for those before it
            found[:] = [
                each
                for each in found
                if each.wrote or (each.who, each.start, each.stop) != (who, start, stop)
            ]
        found.append(Access(start, stop, who, tick, wrote, what))

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation on the CPU, and note what it touches."""
        with self.lock:
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        given = dict(kwargs)
        theirs = {id(each.inner): each for each in flat_tensors((args, given)) if isinstance(each, OnGpu)}
        target = given.get("device")
        target = None if target is None else torch.device(target).type
        there = bool(theirs) if target is None else target == "cuda"
        pinned = bool(given.pop("pin_memory", False))
        if target is not None:
            given["device"] = torch.device("cpu") if target == "cuda" else given["device"]
        inner, inner_given = each_tensor(
            (tuple(args), given), lambda x: x.inner if isinstance(x, OnGpu) else x
        )
        if name == "copy_":
            there = isinstance(args[0], OnGpu)
        crosses = name in ("copy_", "_to_copy") and there != any(
            isinstance(x, OnGpu) for x in (args[1:2] if name == "copy_" else args[:1])
        )
        on_gpu = there or crosses
        who = self.current.name if on_gpu else HOST
        tick = self.launch(who)
        reads, writes = _touched(func, name, inner, inner_given)
        on_host = [x for x in reads if on_gpu and id(x) not in theirs]
        if crosses and not there:  # down: waited for, but where it goes into pinned memory
            asynchronous = (
                bool(args[2]) if name == "copy_" and len(args) > 2 else bool(given.get("non_blocking"))
            )
            asynchronous &= name == "copy_" and key(inner[0]) in self.pinned
        else:
            asynchronous = False
        for x in on_host:
            if key(x) in self.ours:  # made inside torch, of what was freed
                self._allocated(key(x))
            if key(x) not in self.pinned:  # a number, or staged by the driver: the host reads it now
                self.touch(x, HOST, self.launch(HOST), False, name)
                reads = [each for each in reads if each is not x]
        for x in reads:
            self.touch(x, who, tick, False, name)
        for x in writes:
            self.touch(x, who, tick, True, name)
        if (on_gpu and name in READ) or (crosses and not there and not asynchronous):
            self.waited.append(name)
            join(self.clock(HOST), self.clock(who))
        known = {key(x) for x in flat_tensors((inner, inner_given))}
        out = func(*inner, **inner_given)
        for x in flat_tensors(out):
            if key(x) not in known:
                self._allocated(key(x))
                if there:
                    self.ours.add(key(x))
                if pinned:
                    self.pinned.add(key(x))
                if "empty" not in name:
                    self.touch(x, who, tick, True, name)
        return each_tensor(out, lambda x: _wrapped(x, theirs, self, there))

    def _allocated(self, at: int) -> None:
        self.schedule_state[at] = []
        self.pinned.discard(at)
        self.ours.discard(at)


def _wrapped(x: Tensor, theirs: Mapping[int, OnGpu], gpu: Gpu, there: bool) -> Tensor:
    if id(x) in theirs:
        return theirs[id(x)]
    return OnGpu(x, gpu) if there else x


def key(x: Tensor) -> int:
    """Of the memory in which it lies."""
    return x.untyped_storage().data_ptr()


def flat_tensors(x: Any) -> list[Tensor]:
    """All tensors in it."""
    found: list[Tensor] = []
    each_tensor(x, lambda each: found.append(each) or each)  # type: ignore[func-returns-value]
    return found


def each_tensor(x: Any, call: Callable[[Tensor], Tensor]) -> Any:
    """The same with the call's answer in place of each tensor; torch's own takes most of the tests' time."""
    if isinstance(x, Tensor):
        return call(x)
    if isinstance(x, dict):
        return {name: each_tensor(value, call) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return type(x)([each_tensor(value, call) for value in x])
    return x


def _touched(
    func: Any, name: str, args: Sequence[Any], given: Mapping[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """What an operation reads, and what it overwrites, by its schema."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for i, (label, is_write, is_out, is_view) in enumerate(_arguments(func)):
        value = args[i] if i < len(args) else given.get(label)
        if value is None or isinstance(value, int | float | torch.dtype | torch.device):
            continue
        tensors = flat_tensors(value)
        if is_write:
            writes += tensors
            if not (is_out or name in ("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_")):
                reads += tensors
        elif not is_view and name not in SHAPES and name != "_unsafe_view":
            reads += tensors
    return reads, writes


@cache
def _arguments(func: Any) -> list[tuple[str, bool, bool, bool]]:
    """Of its schema: name, whether it is overwritten, whether only that, whether the result may lie in it."""
    return [
        (each.name, bool(each.alias_info and each.alias_info.is_write), each.is_out, bool(each.alias_info))
        for each in func._schema.arguments
    ]


class OnGpu(Tensor):
    """A tensor on the CPU that says it is on a GPU."""

    inner: Tensor
    gpu: Gpu

    @staticmethod
    def __new__(cls, inner: Tensor, gpu: Gpu) -> OnGpu:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="cpu",  # a build without CUDA knows no other, so it is said below
        )

    def __init__(self, inner: Tensor, gpu: Gpu) -> None:
        self.inner, self.gpu = inner, gpu

    __torch_function__ = torch._C._disabled_torch_function_impl

    device = property(lambda self: self.gpu.device)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def cpu(self, *_: object) -> Tensor:
        return torch.ops.aten._to_copy(self, device=torch.device("cpu"))  # type: ignore[no-any-return]

    def to(self, *args: Any, **given: Any) -> Tensor:
        kinds = [x for x in (*args, *given.values()) if isinstance(x, str | torch.device)]
        if any(torch.device(each).type == "cpu" for each in kinds):
            return self.cpu().to(*args, **given)
        dtype = [x for x in (*args, *given.values()) if isinstance(x, torch.dtype)]
        return Tensor.to(self, *dtype) if dtype else self

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return f"OnGpu({self.inner!r})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        gpu = next(x.gpu for x in flat_tensors((args, dict(kwargs or {}))) if isinstance(x, OnGpu))
        return gpu.run(func, args, kwargs or {})


class _Launches(TorchDispatchMode):
    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._gpu.run(func, args, kwargs or {})


class Stream:
    """As `torch.cuda.Stream`."""

    def __init__(self, gpu: Gpu, device: object = None, name: str = "") -> None:
        gpu.count += 1
        self.gpu, self.name, self.cuda_stream = gpu, name or f"stream {gpu.count - 1}", gpu.count

    def wait_stream(self, other: Stream) -> None:
        """What comes here waits for what is there."""
        self.gpu.log.append(("wait", self.name, other.name))
        join(self.gpu.clock(self.name), self.gpu.clock(other.name))

    def record_event(self) -> Event:
        """A moment of this stream."""
        event = Event(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits."""
        self.gpu.log.append(("synchronize", self.name))
        join(self.gpu.clock(HOST), self.gpu.clock(self.name))


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, gpu: Gpu, **_: object) -> None:
        self.gpu = gpu
        self.clock: Clock = {}
        self.on = ""

    def record(self, stream: Stream | None = None) -> None:
        """Here is that moment."""
        stream = stream or self.gpu.current
        self.clock, self.on = dict(self.gpu.clock(stream.name)), stream.name
        self.gpu.log.append(("record", stream.name))

    def wait(self, stream: Stream | None = None) -> None:
        """What comes to the stream waits for it."""
        join(self.gpu.clock((stream or self.gpu.current).name), self.clock)

    def synchronize(self) -> None:
        """The host waits."""
        self.gpu.log.append(("synchronize", f"an event of {self.on}"))
        self.gpu.waited.append(f"an event of {self.on}")
        join(self.gpu.clock(HOST), self.clock)

    def query(self) -> bool:
        """Whether it is over, as far as the host knows."""
        return self.gpu.covers(HOST, self.clock)

    def elapsed_time(self, other: Event) -> float:
        """Nothing takes time."""
        return 0.0


class Future:
    """As a `torch.futures.Future` that knows of the device: who waits for it waits on its stream."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.event, self.found = gpu, Event(gpu), None
        self.given = threading.Event()

    def set_result(self, found: Any) -> None:
        """It was written by what the present stream has launched."""
        self.event.record()
        self.found = found
        self.given.set()

    def wait(self) -> Any:
        """The host waits until it is given, and the present stream for what wrote it."""
        assert self.given.wait(20)
        self.event.wait()
        return self.found


@contextmanager
def simulated(patch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Inside the block `torch.cuda` has streams and events, and tensors can be made on `gpu.device`."""
    gpu = Gpu()

    @contextmanager
    def stream(chosen: Stream | None) -> Iterator[None]:
        before = gpu.current
        gpu.here.stream = chosen or before
        try:
            yield
        finally:
            gpu.here.stream = before

    names: dict[str, Callable[..., Any]] = {
        "Stream": lambda device=None: Stream(gpu, device),
        "Event": lambda **options: Event(gpu, **options),
        "current_stream": lambda device=None: gpu.current,
        "stream": stream,
        "is_current_stream_capturing": lambda: False,
    }
    for name, each in names.items():
        patch.setattr(torch.cuda, name, each)
    if not torch.cuda.is_available():
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
    patch.setattr(thread_scratch._BUFFERS, "kept", thread_scratch._Kept())
    with _Launches(gpu):
        yield gpu
