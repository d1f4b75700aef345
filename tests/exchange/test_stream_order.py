"""Streams of a simulated GPU: whatever reads waits for what wrote, and nobody waits for more than that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu import HOST, Event, Future, Gpu, Stream, key, simulated
from torch import Tensor

from in_stream import IN_STREAM
from tacit.algorithms import parse
from tacit.contracts import (
    WORLD,
    AllGather,
    AllGatherInto,
    AllReduce,
    AllToAll,
    AxisRank,
    Collective,
    Permute,
    Posted,
    Read,
)
from tacit.errors import PeerLost
from tacit.exchange import stream_lane
from tacit.exchange.lane import Job
from tacit.exchange.stream_lane import StreamLane
from tacit.gradients import ddp_hook, host_copies
from tacit.gradients.ddp_hook import GradientHook
from tacit.kernels import byte_planes, dispatch, entropy
from tacit.replicas.fragments import fragments
from tacit.replicas.rounds_after_step import OptimizerHook
from tacit.session import Session, Training
from tacit.session.buckets import group_names
from tacit.session.device_rounds import DeviceRounds
from tacit.session.health.device_notes import BucketHealth, DeviceReport, mark
from tacit.session.health.failure import SessionFailure
from tacit.session.narrow_states import NarrowStates
from tacit.session.session_lanes import Lanes
from tacit.strategy import Strategy

SHAPES = {"a": (30, 20), "b": (30,), "c": (12, 30), "d": (12,), "e": (5, 12), "f": (5,)}
BUCKETS = [["f", "e"], ["d", "c"], ["b", "a"]]
LR = 0.1
STEPS = 6

GRADIENTS = [
    "dense",
    "bf16",
    "topk:ratio=0.1",
    "topk:ratio=0.1,residual_bits=16",
    "dgc:ratio=0.1",
    "onebit-adam:freeze_step=3,refresh=1",
    "powersgd",
    "efsign",
    "qsgd",
    "int8",
    "signsgd",
    "threshold:tau=0.3,capacity=0.1",
    "gtopk:ratio=0.1",
    "uneven:rates=1000/100",
]
PROGRESS = [
    "localsgd:sync_every=2",
    "diloco:sync_every=2,bits=4",
    "diloco:sync_every=2,anchor_bits=16",
    "slowmo:sync_every=2",
    "easgd:sync_every=2",
    "overlap-localsgd:sync_every=2",
    "streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=1,bits=4",
    "gossip:graph=ring",
    "sgp:late=1",
    "wagma:global_every=2",
    "choco",
    "lowbit:bits=2,entropy=true,sync_every=2",
]
ASKS = {"lag": 1, "laq": 1, "three-lc": 2, "int8:entropy=true": 1, "topk:ratio=0.1,entropy=true": 1}
"""Of gradients, too: how often the host must know whether there is anything to send, or how much."""
ELSEWHERE = (
    *("ddp", "pipesgd"),  # nothing is exchanged; and a case below
    *("fusion", "priority", "dear"),  # test_layerwise_streams
    *("adacomm", "qsr"),  # they exchange words of the host too, for which this twin has no lane
    *("daso", "ednncomm", "postlocal"),  # by nodes, of which it has none; and as `localsgd`
)
SEEN = {text.partition(":")[0] for text in (*GRADIENTS, *PROGRESS, *ASKS, *ELSEWHERE)}
OTHERS = [text for text in IN_STREAM if text.partition(":")[0] not in SEEN]
"""All else of the registry; of those with several levels, the last one's rounds."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setenv("TACIT_KERNELS", "reference")
    dispatch.find_backend.cache_clear()
    dispatch.active_backend.cache_clear()
    with simulated(monkeypatch) as found:
        monkeypatch.setattr(dispatch, "run_opaque", lambda name, _, *given: KERNELS[name](*given))
        yield found
    dispatch.find_backend.cache_clear()
    dispatch.active_backend.cache_clear()


@torch.library.custom_op("tacit_simulated::entropy", mutates_args=("message",))
def coded(codes: Tensor, bits: int, numel: int, message: Tensor) -> Tensor:
    """A kernel: of what it does inside, a stream sees nothing."""
    return entropy._encode_by_host(codes, bits, numel, message)


@torch.library.custom_op("tacit_simulated::entropy_back", mutates_args=("codes",))
def decoded(messages: Tensor, lengths: Tensor, bits: int, numel: int, codes: Tensor) -> Tensor:
    return entropy._decode_by_host(messages, lengths, bits, numel, codes)


@torch.library.custom_op("tacit_simulated::planes", mutates_args=("message",))
def planes_coded(planes: Tensor, message: Tensor, at: Tensor) -> Tensor:
    return byte_planes._encode_by_host(planes, message, at)


@torch.library.custom_op("tacit_simulated::planes_back", mutates_args=("planes",))
def planes_decoded(messages: Tensor, lengths: Tensor, at: Tensor, planes: Tensor) -> Tensor:
    return byte_planes._decode_by_host(messages, lengths, at, planes)


KERNELS = {
    "entropy.encode_codes": coded,
    "entropy.decode_codes": decoded,
    "byte_planes.encode": planes_coded,
    "byte_planes.decode": planes_decoded,
}


class Twin:
    """A transport in order, to one peer that says what this rank says."""

    nodes: tuple[tuple[int, ...], ...] = ()

    def open(self, stages: Mapping[str, int]) -> None:
        pass

    def ranks(self, axis: str) -> list[int]:
        return [0, 1]

    def place(self, axis: str = WORLD) -> AxisRank:
        return AxisRank(0, 2)

    def global_rank(self, replica: int) -> int:
        return replica

    def post(self, request: Collective, stage: int, key: str) -> Posted:
        if isinstance(request, AllGather):
            return Now([tuple(x.clone() for x in request.payload) for _ in range(2)])
        if isinstance(request, Permute):
            return Now(tuple(x.clone() for x in request.payload))
        if isinstance(request, AllToAll) and request.arriving:
            return Now([tuple(x + 0 for x in each) for each in request.arriving])
        if isinstance(request, AllToAll):
            return Now([tuple(x.clone() for x in request.payloads[0]) for _ in range(2)])
        if isinstance(request, AllGatherInto):
            request.x.add_(0)
            return Now(request.x)
        assert isinstance(request, AllReduce)
        for x in request.payload:
            x.add_(0)
        return Now(request.payload)


class Now:
    def __init__(self, found: Any) -> None:
        self.found, self.sent = found, 0

    def on_done(self, call: Callable[[], None]) -> None:
        call()

    def answer(self) -> Any:
        return self.found


# ---- the checker itself -------------------------------------------------------------------------------


def test_what_no_event_orders_is_a_race(gpu: Gpu) -> None:
    x = torch.zeros(4, device=gpu.device)
    other = torch.cuda.Stream(gpu.device)
    with torch.cuda.stream(other):
        x.mul(2.0)
    assert gpu.races == ["mul on stream 1 reads what zeros on main writes"]


def test_memory_beside_it_is_none_and_what_waits_is_none(gpu: Gpu) -> None:
    x = torch.zeros(4, device=gpu.device)
    event = torch.cuda.current_stream().record_event()
    x[:2].add_(1.0)
    other = torch.cuda.Stream(gpu.device)
    event.wait(other)
    with torch.cuda.stream(other):
        x[2:].add_(1.0)
    assert not gpu.races
    torch.cuda.current_stream().wait_stream(other)
    x.add_(1.0)
    assert not gpu.races


def test_a_write_waits_for_who_reads(gpu: Gpu) -> None:
    x, other = torch.zeros(4, device=gpu.device), torch.cuda.Stream(gpu.device)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x.mul(2.0)
    x.add_(1.0)
    assert gpu.races == ["add_ on main writes what mul on stream 1 reads"]


def test_the_host_reads_pinned_memory_when_it_has_waited(gpu: Gpu) -> None:
    x = torch.zeros(4, device=gpu.device)
    there = torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)
    event = mark(gpu.device)
    there.sum()
    assert gpu.races == ["sum on host reads what copy_ on main writes"]
    event.synchronize()
    there.sum()
    assert len(gpu.races) == 1


# ---- StreamLane, HostCopies, Pending ------------------------------------------------------------------


def explained(error: BaseException) -> BaseException:
    return RuntimeError(f"explained: {error}")


def test_a_lane_waits_for_who_submits_and_who_joins_waits_for_the_lane(gpu: Gpu) -> None:
    lane = StreamLane(Twin(), explained, gpu.device)
    x = torch.zeros(4, device=gpu.device)

    def talk() -> Iterator[Any]:
        gpu.log.append(("open", gpu.current.name))
        yield AllReduce((x,), WORLD)
        gpu.log.append(("answered", gpu.current.name))

    lane.submit(Job("bucket", talk, lambda _, __: gpu.log.append(("landed", gpu.current.name)), pytest.fail))
    ours = lane.stream.name
    assert gpu.log == [("wait", ours, "main"), ("open", ours), ("answered", ours), ("landed", ours)]
    gpu.log.clear()
    lane.flush()
    assert gpu.log == [], "the host waits for nothing"
    lane.join()
    assert gpu.log == [("wait", "main", ours)]
    x.add_(1.0)
    lane.close()
    assert gpu.log[1:] == [("synchronize", ours)]
    assert not gpu.races


def test_a_failure_in_a_lane_ends_all_that_comes_later(gpu: Gpu) -> None:
    lane, errors = StreamLane(Twin(), explained, gpu.device), list[BaseException]()

    def broken() -> Iterator[Any]:
        yield AllReduce((torch.zeros(1, device=gpu.device),), WORLD)
        raise ConnectionError("the wire is cut")

    for _ in range(2):
        lane.submit(Job("bucket", broken, lambda _, __: pytest.fail("it landed"), errors.append))
    assert [str(error) for error in errors] == ["explained: the wire is cut"] * 2
    assert errors[0] is errors[1]
    assert gpu.current is gpu.main


def test_a_failure_while_the_host_waits_ends_all_that_wait(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    lane, errors = StreamLane(Twin(), explained, gpu.device), list[BaseException]()

    def reads() -> Iterator[Any]:
        yield Read(torch.zeros(1, device=gpu.device))

    def broken(_: object) -> None:
        raise ConnectionError("the wire is cut")

    monkeypatch.setattr(stream_lane._Copied, "wait", broken)
    for _ in range(2):
        lane.submit(Job("bucket", reads, lambda _, __: pytest.fail("it landed"), errors.append))
    lane.settle()
    assert [str(error) for error in errors] == ["explained: the wire is cut"] * 2


def test_copies_come_down_behind_the_gradient_and_are_ready_behind_themselves(gpu: Gpu) -> None:
    both = host_copies.HostCopies(gpu.device)
    here, there = torch.ones(4, device=gpu.device), torch.empty(4, pin_memory=True)
    down, up = both._down.name, both._up.name
    both.down(here, there)
    ready = both.arrived()
    assert gpu.log == [("wait", down, "main"), ("record", down)]
    ready()
    there.add_(1.0)  # on the host
    both.up([(here, there)])
    with both.inside():
        assert gpu.current.name == up
        future = Future(gpu)
        future.set_result(here)
    future.wait()
    assert (here + 0).tolist() == [2.0] * 4
    assert not gpu.races


def test_what_is_not_ready_is_a_race(gpu: Gpu) -> None:
    both = host_copies.HostCopies(gpu.device)
    here, there = torch.ones(4, device=gpu.device), torch.empty(4, pin_memory=True)
    both.down(here, there)
    there.add_(1.0)
    assert "add_ on host writes what copy_ on stream 1 writes" in gpu.races


def healthy(gpu: Gpu, ranks: int = 2) -> BucketHealth:
    named = {"w": torch.zeros(4, 3, device=gpu.device)}
    session = Session(parse("topk"), named, Twin(), [["w"]], in_stream=True)
    return BucketHealth(session.buckets[0], torch.zeros(2 * ranks, device=gpu.device), ranks, 0)


def test_a_report_is_read_behind_the_event_that_is_behind_its_copy(gpu: Gpu) -> None:
    health = healthy(gpu)
    gpu.log.clear()
    gpu.waited.clear()
    lane = torch.cuda.Stream(gpu.device)
    lane.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(lane):
        health.note_given(torch.ones(12, device=gpu.device))
        pending = DeviceReport([(0, health)], mark(gpu.device))
    assert gpu.log[-1] == ("record", lane.name)
    assert pending._ended.clock == gpu.clock(lane.name)
    assert not gpu.waited
    assert not pending.done
    pending.read()
    assert gpu.waited == [f"an event of {lane.name}"]
    assert pending.done
    assert not gpu.races


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_an_overflow_of_one_of_many_is_reported(gpu: Gpu, ranks: int) -> None:
    """Ranks tell it by a mean; codecs cap their scales at 3.4e38."""
    health = healthy(gpu, ranks)
    health.overflow.fill_(3.4e38)
    health.nonfinite_flags.div_(ranks)
    found = DeviceReport([(0, health)], None).read()
    assert found[0].overflow == [0]


def test_what_is_too_large_behind_a_lost_peer_is_that_peer(gpu: Gpu) -> None:
    """A collective that another rank has given up ends here without an error, and with any numbers."""
    named = {"w": torch.zeros(4, 3, device=gpu.device)}
    session = Session(parse("topk"), named, Twin(), [["w"]], in_stream=True)
    told: list[PeerLost] = []
    session.failure.report_to(lambda error: error, alarm=lambda: told.pop() if told else None)
    session.submit(0, torch.ones(12, device=gpu.device), lambda: None)
    assert isinstance(session.pending, DeviceRounds)
    report = session.pending._unverified[0].device_report
    assert report is not None
    report._host.fill_(3.4e38)
    told.append(PeerLost("rank 1 did not answer in round 0"))
    with pytest.raises(PeerLost, match="rank 1 did not answer"):
        session.pending.verify()
    with pytest.raises(PeerLost, match="rank 1 did not answer"):
        session.failure.raise_first()


# ---- whole steps --------------------------------------------------------------------------------------


class Bucket:
    """As DDP's."""

    def __init__(self, i: int, parameters: list[Tensor], buffer: Tensor) -> None:
        self._i, self._parameters, self._buffer = i, parameters, buffer

    def index(self) -> int:
        return self._i

    def is_last(self) -> bool:
        return self._i == len(BUCKETS) - 1

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def buffer(self) -> Tensor:
        return self._buffer


class Backward:
    """DDP's buckets, and the optimizer, on the main stream; exchanges as the session has them."""

    def __init__(self, gpu: Gpu, algorithm: str, patch: pytest.MonkeyPatch, in_stream: bool = True) -> None:
        self.gpu = gpu
        strategy = parse(algorithm).levels[-1]
        self.strategy: Strategy = strategy.for_training({"steps_per_epoch": 5.0, "epochs": 4.0})
        self.named = {name: torch.zeros(shape, device=gpu.device) for name, shape in SHAPES.items()}
        parts = fragments(self.named, self.strategy.parts)
        buckets = [bucket for part in parts for bucket in group_names(part, self.named, 1000)]
        self.session = Session(
            *(self.strategy, self.named, Twin(), buckets),
            training=Training(rates=self.rates),
            device=None if in_stream else torch.device("cpu"),
            in_stream=in_stream,
        )
        self._queued: list[Callable[[], None]] = []
        patch.setattr(ddp_hook, "_future", lambda buffer: Future(gpu))
        patch.setattr(ddp_hook, "at_end_of_backward", self._queued.append)
        self.buffers = [
            torch.zeros(sum(self.named[name].numel() for name in names), device=gpu.device)
            for names in BUCKETS
        ]
        self.gradients = [torch.zeros_like(buffer) for buffer in self.buffers]
        gradients = self.strategy.subject == "gradient"
        self.gradient = GradientHook(self.session, self.named) if gradients else None
        self.progress = None if gradients else OptimizerHook(self.session, self.named, rates=self.rates)

    def rates(self) -> dict[str, float]:
        return dict.fromkeys(self.named, LR)

    def backward(self, until: int = len(BUCKETS)) -> None:
        """`until`: it fails before this bucket."""
        futures = []
        for i, (names, buffer) in enumerate(zip(BUCKETS, self.buffers, strict=True)):
            if i == until:
                return
            buffer.copy_(torch.linspace(-1, 1, buffer.numel(), device=self.gpu.device))
            if self.gradient is not None:
                bucket: Any = Bucket(i, [self.named[name] for name in names], buffer)
                futures.append(self.gradient(bucket))
        for future in futures:
            future.wait()
        for gradient, buffer in zip(self.gradients, self.buffers, strict=True):
            gradient.copy_(buffer)  # as DDP does, where gradients are no views of its buckets
        while self._queued:
            self._queued.pop(0)()

    def step(self) -> None:
        if self.gradient is not None and not self.session.strategy.late:
            self.session.pending.check()
        for names, gradient in zip(BUCKETS, self.gradients, strict=True):
            at = 0
            for name in names:
                p = self.named[name]
                p.sub_(gradient[at : at + p.numel()].view(p.shape), alpha=LR)
                at += p.numel()
        if self.progress is not None:
            self.progress.after_step()
        else:
            self.session.commit_checked()
            self.session.advance()

    def train(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.backward()
            self.step()

    def close(self) -> None:
        self.session.flush()
        for p in self.named.values():
            p.add(0)
        if self.progress is not None:
            self.progress.sync()
        self.session.close()


@pytest.mark.parametrize("algorithm", [*GRADIENTS, "pipesgd", *ASKS, *PROGRESS, *OTHERS])
def test_in_whole_steps_nothing_races(algorithm: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with gradients of this step the host waits once, for the notes; once more where it must know."""
    model = Backward(gpu, algorithm, monkeypatch)
    model.train(STEPS - 1)
    gpu.waited.clear()
    model.backward()
    in_backward = [*gpu.waited]
    model.step()
    if model.gradient is not None and algorithm != "pipesgd":
        lane = model.session.lanes.buckets.stream.name  # type: ignore[union-attr]
        asked = [f"an event of {lane}"] * ASKS.get(algorithm, 0)
        assert in_backward == asked
        assert gpu.waited == [*asked, f"an event of {lane}"]
    model.close()
    assert not gpu.races, "\n".join(dict.fromkeys(gpu.races))
    assert model.session.round >= 2
    assert any(each.startswith("stream") for each in gpu.clocks), "nothing ran beside"


@pytest.mark.parametrize("algorithm", ["dense", "topk:ratio=0.1", "pipesgd"])
def test_on_copies_on_the_host_nothing_races(
    algorithm: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Backward(gpu, algorithm, monkeypatch, in_stream=False)
    model.train()
    model.close()
    assert not gpu.races, "\n".join(dict.fromkeys(gpu.races))
    assert model.session.buckets[0].device.type == "cpu"
    assert {"stream 1", "stream 2"} & gpu.clocks.keys()


def test_a_round_of_lengths_waits_once_for_each_message(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all buckets together: two messages in two phases."""
    model = Backward(gpu, "lowbit:bits=2,entropy=true,topology=two-phase,sync_every=1", monkeypatch)
    model.backward()
    model.step()
    gpu.waited.clear()
    model.backward()
    assert gpu.waited == []
    model.step()
    lane = model.session.lanes.buckets.stream.name  # type: ignore[union-attr]
    assert gpu.waited[:2] == [f"an event of {lane}"] * 2
    assert len(model.session.buckets) > 1
    model.session.close()


def test_a_round_that_is_given_up_launches_nothing_later(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buckets wait for their lengths, and its last one never comes."""
    model = Backward(gpu, "topk:ratio=0.1,entropy=true", monkeypatch)
    model.backward(until=2)
    model.session.pending.begin_anew()
    late = list[str]()
    monkeypatch.setattr(Twin, "post", lambda self, request, stage, key: late.append(key))
    model.session.lanes.settle()
    assert late == []
    model.session.close()


STATES = [
    each for each in GRADIENTS if each.partition(":")[0] not in ("dense", "bf16", "qsgd", "signsgd", "uneven")
]


@pytest.mark.parametrize("algorithm", STATES)
def test_second_copies_are_of_a_step_alone_and_nothing_uses_them_when_they_go(
    algorithm: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Backward(gpu, algorithm, monkeypatch)
    for _ in range(STEPS):
        model.backward()
        store: Any = model.session.store
        second = [x for work in store._workspaces for x in work.spares.values()]
        old = [key(x.inner) for state in store._states for x in state.values()]
        assert len(second) == len(old) > 0
        model.step()
        assert not any(work.spares for work in store._workspaces)
        assert not store._replaced
        gone = {*old} - {key(x.inner) for state in store._states for x in state.values()}
        assert gone
        for each in (access for memory in gone for access in gpu.schedule_state[memory]):
            assert each.who == "main" or gpu.clock(HOST)[each.who] >= each.tick
    model.session.close()


def test_what_goes_when_an_exchange_is_launched_is_of_its_stream(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Backward(gpu, "int8:residual_bits=16", monkeypatch)
    where, make_room = [], NarrowStates.make_room
    monkeypatch.setattr(
        NarrowStates, "make_room", lambda *given: where.append(gpu.current) or make_room(*given)
    )
    for _ in range(STEPS):
        model.backward()
        model.step()
    assert {*where} == {model.session.lanes.buckets.stream}  # type: ignore[union-attr]
    model.session.close()


def test_a_late_mean_is_not_waited_for_in_the_backward_that_sends(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Backward(gpu, "pipesgd", monkeypatch)
    for _ in range(3):
        model.backward()
        model.step()
    model.backward()
    lane = model.session.lanes.buckets.stream.name  # type: ignore[union-attr]
    assert not gpu.covers("main", gpu.clock(lane)), "the optimizer would wait for the round of its own step"
    model.session.close()


def test_to_apply_one_fragment_is_not_to_wait_for_the_next(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = "streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=3"
    model, overlapped = Backward(gpu, algorithm, monkeypatch), 0
    for _ in range(12):
        model.backward()
        model.step()
        for flight in model.session.pending._unverified:
            assert flight.device_report is not None
            overlapped += 1
            assert not gpu.covers("main", flight.device_report._ended.clock)
    assert overlapped > 12
    model.session.close()


# ---- each wait is needed ------------------------------------------------------------------------------


def submit_without_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stream, "wait_stream", lambda self, other: None)


def set_outside(patch: pytest.MonkeyPatch) -> None:
    """The future notes a moment of the main stream."""
    completed = ddp_hook._DdpBucket.completed

    def outside(self: Any) -> None:
        self.inside = lambda: torch.cuda.stream(None)
        completed(self)

    patch.setattr(ddp_hook._DdpBucket, "completed", outside)


def future_without_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Future, "wait", lambda self: self.found)


def no_join(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stream_lane.StreamLane, "join", lambda self: None)


def event_without_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Event, "synchronize", lambda self: None)


@pytest.mark.parametrize(
    ("algorithm", "left_out", "race"),
    [
        ("topk:ratio=0.1", submit_without_waiting, "on main writes"),
        ("dense", set_outside, "on main"),
        ("dense", future_without_waiting, "on main"),
        ("dense", event_without_waiting, f"on {HOST} reads"),
    ],
)
def test_a_wait_that_is_left_out_is_found(
    algorithm: str,
    left_out: Callable[[pytest.MonkeyPatch], None],
    race: str,
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Backward(gpu, algorithm, monkeypatch)
    left_out(monkeypatch)
    model.train(4)
    model.close()
    assert any(race in each for each in gpu.races), gpu.races


def test_a_device_that_stands_still_is_overdue() -> None:
    lanes = Lanes(Twin(), torch.device("cpu"), True, SessionFailure(), "topk")
    assert not lanes.overdue(0)
    lane: Any = lanes.buckets
    lane.submitted_at = time.monotonic() - 5
    assert not lanes.overdue(4)
    asked = []
    lane.stream = SimpleNamespace(query=lambda: bool(asked.append(1)))
    assert lanes.overdue(4)
    assert not lanes.overdue(6)
    assert len(asked) == 1, "a stream is asked only where it is late"
    lane.stream = SimpleNamespace(query=lambda: True)
    assert not lanes.overdue(4)
