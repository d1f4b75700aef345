"""What runs in a device's stream never waits for it, and does what it does on the host; found without one."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from host_sync import NoHostSync, looking, unsynchronized
from laws import Bench, Peers, tensors
from table import NUMEL, TABLE, Row
from torch import Tensor

from cases import for_each
from tacit.compressors import (
    BF16,
    FP16,
    LAG,
    QSGD,
    Cascade,
    Clip,
    Dense,
    DifferenceCopy,
    ErrorFeedback,
    MajoritySign,
    OuterMix,
    PowerSGD,
    PublicCopy,
    PushSum,
    RandomK,
    Scheduled,
    Sign,
    TopK,
    Tracking,
)
from tacit.contracts import (
    NET,
    AxisRank,
    Compressor,
    Context,
    Exchange,
    Outcome,
    Read,
    State,
    Topology,
    flags,
)
from tacit.errors import Overflow
from tacit.exchange.finite_checks import OVERFLOWN
from tacit.kernels import dispatch
from tacit.kernels.dispatch import emulated_device
from tacit.prediction import MP2, LeastSquares, PredictiveCoding
from tacit.topologies import (
    Auto,
    Decoupled,
    Directed,
    Flat,
    GlobalTopK,
    Gossip,
    Groups,
    Hierarchical,
    Pairs,
    Star,
    TwoPhase,
    Uneven,
)
from tacit.transports.loopback import Loopback

ON_HOST = {
    # What is sorted, and in how many parts, is looked at.
    "topk 30% in parts + ef",
    # What is chosen is looked at, or drawn, on the host.
    "adacomp + ef",
    "adacomp of small bins, full, + ef",
    "chunks + ef",
    "count sketch + ef",
    "oktopk 1% + ef",
    "sampled entries",
    "sampled spectrum",
    # These predictors were written for the host.
    "predicted",
    "predicted + ef",
    "predicted, at first",
    "predicted, small ones whole",
    "predicted, at random",
    "predicted, by layers",
    "predicted, in bf16",
    "predicted, the largest sent",
    "nowcast",
}
ROUNDED = PowerSGD, MP2, LAG
"""They add up otherwise."""
ROWS = {name: row for name, row in TABLE.items() if name not in ON_HOST}
LONG = 2100
"""Entries of which each of four ranks gets a stretch."""
TYPES = [torch.float32, torch.bfloat16, torch.float64]

every_type = for_each("dtype", TYPES)


def overflown(health: Tensor) -> bool:
    """As a session reads it."""
    return not float(health) < OVERFLOWN


class DeviceBench(Bench):
    """Buffers where the tensors are."""

    def scratch(self, key: str, like: Tensor, shape: object, dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=like.device)  # type: ignore[call-overload]


class Devices(Peers):
    """Ranks that are told what a session tells them, on a device; in nodes of two where the topology asks.

    Attributes:
        watched: whether they have `Context.health`.
        health: of each rank, in the last round.
    """

    def __init__(
        self,
        compressor: Compressor,
        peers: int,
        numel: int,
        topology: Topology,
        dtype: torch.dtype,
        watched: bool,
        where: str = "cpu",
    ) -> None:
        super().__init__(compressor, peers, numel, topology, dtype)
        self.watched = watched
        self.near = [AxisRank(rank % 2, 2) for rank in range(peers)]
        if isinstance(topology, Hierarchical):
            self.net = Loopback.of_nodes(peers // 2, 2)
        like = torch.empty(numel, dtype=dtype, device=where)
        self.states = [self._first(rank, like) for rank in range(peers)]
        self.health = [torch.zeros(1) for _ in range(peers)]

    def exchange(self, xs: list[Tensor], in_place: bool = False, step: int = 0) -> list[Outcome]:
        """The host looks where an exchange asks it to: for the lengths, once in each phase."""
        self.looks = 0
        outcomes = super().exchange(xs, in_place, step)
        assert self.looks <= 2 * len(xs)
        return outcomes

    def conduct(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        answer: Any = None
        exchange = super().conduct(x, state, ctx)
        while True:
            try:
                request = exchange.send(answer)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            if isinstance(request, Read):
                self.looks += 1
                with looking():
                    answer = request.numbers.tolist()
            else:
                answer = yield request

    def _first(self, rank: int, like: Tensor) -> State:
        here, peers = AxisRank(rank, len(self.near)), len(self.near)
        if isinstance(self.topology, Hierarchical):
            start, stop = self.topology.spans(range(len(like) + 1), self.near[rank])[rank % 2]
            like, here = like[start:stop], AxisRank(rank // 2, peers // 2)
        kept = self.topology.keeps(len(like), self.compressor, here)
        second = {field: like.new_zeros(stop - start) for field, (start, stop) in kept.items()}
        return {**self.compressor.init(like), **second}

    def _context(self, rank: int, out: Tensor) -> Context:
        ctx = replace(super()._context(rank, out), work=DeviceBench())
        if isinstance(self.topology, Hierarchical):
            spans = self.topology.spans(range(len(out) + 1), self.near[rank])
            places = {
                "rank": rank // 2,
                "peers": len(self.near) // 2,
                "near": self.near[rank],
                "spans": spans,
            }
            ctx = replace(ctx, **places)  # type: ignore[arg-type]
        if not self.watched:
            return ctx
        health, numbers, finite_probe = (
            out.new_zeros(n, dtype=torch.float32) for n in (1, len(self.near), 4)
        )
        self.health[rank] = health
        return replace(
            ctx,
            nonfinite_flags=flags(numbers, ((0, len(self.near)),), ctx.rank, ctx.peers),
            finite_probe=finite_probe,
            replicas=len(self.near),
            health=health,
        )


@pytest.fixture(autouse=True)
def _kernels_are_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entropy coders of a GPU have no version in torch: the host's stand for them."""

    def unseen(name: str, by_host: Callable[..., Tensor], *given: object) -> Tensor:
        with looking():
            return by_host(*given)

    if torch.cuda.is_available():
        return
    monkeypatch.setattr(dispatch, "run_opaque", unseen)


@contextmanager
def device() -> Iterator[None]:
    """The tensors made before it are a GPU's, and nobody waits for it."""
    with ExitStack() as inside:
        inside.enter_context(emulated_device())
        inside.enter_context(NoHostSync())
        yield


def run(
    compressor: Compressor,
    peers: int,
    numel: int,
    topology: Topology,
    dtype: torch.dtype,
    on_device: bool,
) -> list[list[Outcome]]:
    """The outcomes of three rounds, by round and rank."""
    group = Devices(compressor, peers, numel, topology, dtype, watched=on_device)
    found = []
    for seed in range(3):
        xs = [x.to(dtype) for x in tensors(peers, numel, seed)]
        with device() if on_device else ExitStack():
            found.append(group.exchange(xs))
        assert not any(map(overflown, group.health)), "overflow was noted, and there is none"
    return found


def inside(part: object) -> Iterator[object]:
    """A compressor, and all that it is made of."""
    yield part
    for each in part if isinstance(part, tuple) else ():
        yield from inside(each)
    for field in fields(part) if is_dataclass(part) else ():
        yield from inside(getattr(part, field.name))


def has(compressor: Compressor, *kinds: type) -> bool:
    return any(isinstance(part, kinds) for part in inside(compressor))


def test_these_rows_run_on_a_device_and_no_others() -> None:
    on_device = {name for name, row in TABLE.items() if row.compressor.on_device and row.topology.on_device}
    assert on_device == set(ROWS)


def test_a_part_that_does_not_makes_the_whole_not() -> None:
    away = TABLE["adacomp + ef"].compressor
    assert not away.on_device
    assert not any(
        each.on_device
        for each in (
            ErrorFeedback(away),
            Clip(away, 1.0),
            Cascade(Dense(), away),
            Cascade(away, Dense()),
            Scheduled(((3, away),), Dense()),
            Scheduled(((3, Dense()),), away),
        )
    )


def test_which_topologies_run_on_a_device() -> None:
    assert all(
        each.on_device
        for each in (Flat(), TwoPhase(), Auto(), Hierarchical(), GlobalTopK(), Uneven(), Decoupled())
    )
    assert not any(each.on_device for each in (Star(), Pairs(), Auto(at_servers=True)))


def agree(
    on_host: list[list[Outcome]],
    on_device: list[list[Outcome]],
    to_the_bit: bool,
    dtype: torch.dtype,
    by_stretch: bool,
) -> None:
    """The same means, states, and what was sent, where it is not of a stretch."""

    def tensors_of(outcome: Outcome) -> Mapping[str, Tensor]:
        sent = {} if by_stretch else {"sent": outcome.sent.dense(outcome.mean)}
        return {"mean": outcome.mean, **sent, **outcome.state}

    near = {"rtol": 2**-6, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-4}
    for one, other in zip(on_host, on_device, strict=True):
        for here, there in zip(one, other, strict=True):
            with emulated_device():  # positions of lists of a fixed length may be absent
                found = tensors_of(there)
            for name, expected in tensors_of(here).items():
                if to_the_bit:
                    assert torch.equal(found[name], expected), name
                else:
                    torch.testing.assert_close(found[name], expected, **near)


def lawful(rows: list[list[Outcome]], rounding: float) -> None:
    """All ranks have the same mean, which is that of what was sent."""
    for outcomes in rows:
        assert all(torch.equal(each.mean, outcomes[0].mean) for each in outcomes)
        sent = torch.stack([each.sent.dense(each.mean) for each in outcomes]).double()
        error = (outcomes[0].mean.double() - sent.mean(0)).abs()
        assert bool((error <= rounding * sent.abs().mean(0) + 1e-6).all())


def hold(row: Row, peers: int, numel: int, topology: Topology, dtype: torch.dtype) -> None:
    there = run(row.compressor, peers, numel, topology, dtype, on_device=True)
    if has(row.compressor, RandomK):  # draws its positions otherwise
        lawful(there, max(row.rounding, 4 * torch.finfo(dtype).eps))
        return
    here = run(row.compressor, peers, numel, topology, dtype, on_device=False)
    agree(here, there, not has(row.compressor, *ROUNDED), dtype, by_stretch=False)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_a_device_does_what_the_host_does_and_nobody_waits(row: Row) -> None:
    hold(row, 3, NUMEL, row.topology, torch.float32)


@pytest.mark.parametrize("name", ROWS)
def test_in_other_types_too(name: str) -> None:
    """In turns, X and X + ef, which follow each other, with the one and the other."""
    place = [*ROWS].index(name)
    hold(ROWS[name], 3, NUMEL, ROWS[name].topology, TYPES[1 + (place + place // 2) % 2])


MIXING: dict[str, tuple[Compressor, Topology]] = {
    "ring": (Dense(), Gossip("ring")),
    "one peer": (BF16(), Gossip("one-peer")),
    "all now and then": (Dense(), Gossip(global_every=2)),
    "given weights": (Dense(), Gossip(((0.5, 0.5, 0.0), (0.5, 0.25, 0.25), (0.0, 0.25, 0.75)))),
    "butterfly": (Dense(), Groups(2, global_every=2)),
    "drawn": (BF16(), Groups(2, "random")),
    "one way": (PushSum(), Directed()),
    "outer": (OuterMix(), Groups(2, "random", equal=True)),
    "tracking": (Tracking(), Gossip("ring")),
    "choco": (PublicCopy(TopK(ratio=0.1)), Gossip("ring")),
    "dcd": (DifferenceCopy(QSGD(bits=8)), Gossip("ring")),
}
"""Those whose answers differ from rank to rank; of each kind of message, and of what is kept of it."""


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_too(name: str) -> None:
    compressor, topology = MIXING[name]
    assert compressor.on_device
    assert topology.on_device
    peers = 3 if name == "given weights" else 4
    here, there = (
        run(compressor, peers, NUMEL, topology, torch.float32, on_device=where) for where in (False, True)
    )
    agree(here, there, True, torch.float32, by_stretch=True)


@for_each("topology", [Uneven(), Uneven(rates=(3e9, 1e9, 1e8, 1e9)), Decoupled()])
@for_each("compressor", [Dense(), BF16()])
def test_other_ways_to_add_up_too(topology: Topology, compressor: Compressor) -> None:
    here, there = (
        run(compressor, 4, LONG, topology, torch.float32, on_device=where) for where in (False, True)
    )
    agree(here, there, True, torch.float32, by_stretch=False)


@for_each("peers", [2, 3, 4, 6])
def test_a_tree_of_any_number_of_ranks_too(peers: int) -> None:
    for row in ROWS.values():
        if row.topology == GlobalTopK():
            here, there = (
                run(row.compressor, peers, NUMEL, row.topology, torch.float32, on_device=where)
                for where in (False, True)
            )
            agree(here, there, True, torch.float32, by_stretch=False)


FEW = ("topk 1% + ef", "sign + ef", "majority", "qsgd", "int8 + ef", "bf16", "randomk 5%")
"""One of each kind of payload: the tests above have run the others' codecs."""


@pytest.mark.parametrize("name", FEW)
def test_in_two_phases_too(name: str) -> None:
    hold(ROWS[name], 4, LONG, TwoPhase(), torch.float32)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in FEW])
def test_in_two_phases_all_others_too(name: str) -> None:
    hold(ROWS[name], 4, LONG, TwoPhase(), torch.float32)


ALONE = {
    name: row
    for name, row in ROWS.items()
    if not (has(row.compressor, PowerSGD, MP2) or "biases" in name or "a third" in name)
}
"""Those that are not told where parameters lie."""


def hold_by_nodes(row: Row, by: str, far: Flat | TwoPhase) -> None:
    topology = Hierarchical(by=by, far=far)  # type: ignore[arg-type]
    there = run(row.compressor, 4, LONG, topology, torch.float32, on_device=True)
    if not has(row.compressor, RandomK):
        here = run(row.compressor, 4, LONG, topology, torch.float32, on_device=False)
        agree(here, there, not has(row.compressor, *ROUNDED), torch.float32, by_stretch=True)


BY_NODES = [(by, far) for by in ("slices", "leaders") for far in (Flat(NET), TwoPhase(NET))]


@for_each("by, far", BY_NODES)
@pytest.mark.parametrize("name", FEW)
def test_by_nodes_too(name: str, by: str, far: Flat | TwoPhase) -> None:
    hold_by_nodes(ALONE[name], by, far)


@pytest.mark.parametrize("name", [name for name in ALONE if name not in FEW])
def test_by_nodes_all_others_too(name: str) -> None:
    """In turns: the ways do not know what is in a row, and those above have each kind of payload in all."""
    hold_by_nodes(ALONE[name], *BY_NODES[[*ALONE].index(name) % len(BY_NODES)])


def same_on_both(compressor: Compressor, xs: list[Tensor]) -> None:
    """The same outcomes of two rounds of these tensors, to the bit."""
    here, there = (
        Devices(compressor, len(xs), len(xs[0]), Flat(), xs[0].dtype, watched) for watched in (False, True)
    )
    for _ in range(2):
        expected = here.exchange([x.clone() for x in xs])
        with device():
            found = there.exchange([x.clone() for x in xs])
        agree([expected], [found], True, xs[0].dtype, by_stretch=False)


@every_type
@pytest.mark.parametrize("large", [1024, 1 << 20])
def test_zeros_vote_as_on_the_host(large: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tacit.compressors.majority.LARGE", large)
    xs = [x.to(dtype) for x in tensors(3, 3000)]
    for x in xs:
        x[::7] = 0
        x[64:320] = 0
        x[2990:] = 0
    same_on_both(MajoritySign(), xs)


@for_each("scale", [1e-30, 1.0, 1e30, math.inf, math.nan])
@every_type
def test_a_clip_needs_no_look_at_the_norm(scale: float, dtype: torch.dtype) -> None:
    xs = [x.to(dtype) for x in tensors(2, NUMEL)]
    if math.isfinite(scale):
        same_on_both(Clip(Dense(), max_norm=2.0), [x * scale for x in xs])
    else:
        xs[0][7] = scale
        group = Devices(Clip(Dense(), max_norm=2.0), 2, NUMEL, Flat(), dtype, watched=True)
        with device():
            mean = group.exchange(xs)[0].mean
        assert not bool(mean[7].isfinite())


def test_all_ranks_of_a_device_draw_alike_and_anew_in_each_round() -> None:
    group = Devices(RandomK(ratio=0.1), 3, NUMEL, Flat(), torch.float32, watched=True)
    seen = []
    for seed in range(2):
        xs = tensors(3, NUMEL, seed)
        with device():
            outcomes = group.exchange(xs)
        seen.append([each.sent.index for each in outcomes])  # type: ignore[attr-defined]
    assert all(torch.equal(index, each[0]) for each in seen for index in each)
    assert not torch.equal(seen[0][0], seen[1][0])
    for index in (seen[0][0], seen[1][0]):  # one of each ten
        assert torch.equal(index // 10, torch.arange(100))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@every_type
@for_each("topology", [Flat(), TwoPhase()], ids=["flat", "two-phase"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_on_a_gpu_nobody_waits(row: Row, topology: Topology, dtype: torch.dtype) -> None:
    numel = NUMEL if topology == Flat() else LONG
    group = Devices(row.compressor, 3, numel, topology, dtype, watched=True, where="cuda")
    for seed in range(3):
        xs = [x.to("cuda", dtype) for x in tensors(3, numel, seed)]
        with unsynchronized():
            outcomes = group.exchange(xs)
        assert all(torch.equal(each.mean, outcomes[0].mean) for each in outcomes)
        assert bool(outcomes[0].mean.isfinite().all())
        assert not any(map(overflown, group.health))
        # Where a prediction and what is sent beside it cancel, a rounding counts for more.
        cancels = seed and has(row.compressor, PredictiveCoding) and not has(row.compressor, LeastSquares)
        if topology == Flat() and dtype == torch.float32 and not (row.votes or cancels):
            lawful([outcomes], max(row.rounding, 1e-6))


# ---- what overflows -----------------------------------------------------------------------------------


def everywhere(value: float) -> Callable[[], Tensor]:
    return lambda: torch.full((NUMEL,), value)


def with_one(value: float, dtype: torch.dtype) -> Callable[[], Tensor]:
    def made() -> Tensor:
        x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0), dtype=dtype)
        x[77] = value
        return x

    return made


OVERFLOWS: dict[str, tuple[Compressor, Callable[[], Tensor]]] = {
    "a residual of fp32": (ErrorFeedback(TopK(ratio=0.01)), everywhere(3e38)),
    "a residual given in fp16": (
        ErrorFeedback(TopK(ratio=0.01)),
        lambda: torch.full((NUMEL,), 6e4, dtype=torch.float16),
    ),
    "a residual given in fp16, of signs": (
        ErrorFeedback(Cascade(TopK(ratio=0.01), Sign())),
        lambda: torch.full((NUMEL,), 6e4, dtype=torch.float16) * torch.linspace(-1, 1, NUMEL).half(),
    ),
    "a value in fp16": (TopK(ratio=0.01, values=FP16()), with_one(1e5, torch.float32)),
    "a value of fp64 in bf16": (TopK(ratio=0.01, values=BF16()), with_one(1e39, torch.float64)),
    "a multiple": (RandomK(ratio=0.5, unbiased=True), everywhere(3e38)),
}


def rounds(compressor: Compressor, make: Callable[[], Tensor], on_device: bool) -> list[list[float]]:
    """The health of both ranks after each of four rounds."""
    x = make()
    group = Devices(compressor, 2, NUMEL, Flat(), x.dtype, watched=on_device)
    found = []
    for _ in range(4):
        with device() if on_device else ExitStack():
            group.exchange([x.clone(), x.clone()])
        found.append([overflown(each) for each in group.health])
    return found


@pytest.mark.parametrize(("compressor", "make"), OVERFLOWS.values(), ids=OVERFLOWS.keys())
def test_what_overflows_is_noted_and_not_raised(compressor: Compressor, make: Callable[[], Tensor]) -> None:
    with pytest.raises(Overflow):
        rounds(compressor, make, on_device=False)
    health = rounds(compressor, make, on_device=True)
    assert health[-1] == [True, True]
