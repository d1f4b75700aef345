"""Laws for compressors, topologies, schedules and merges that you have written.

Each check runs ranks inside this process, without a network. It raises an `AssertionError` that names the
law, the topology, the type and the number of ranks. Call them from a test::

    from tacit.testing import check_compressor

    def test_my_codec() -> None:
        check_compressor(MyCodec())
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tacit.compressors import BF16, Dense, ErrorFeedback, PowerSGD, Sign, TopK
from tacit.contracts import (
    SERVER,
    WORLD,
    Application,
    Collective,
    Compressor,
    Context,
    Merge,
    Payload,
    PushPull,
    Request,
    Topology,
)
from tacit.errors import ConfigError, NonFinite, TacitError
from tacit.parameter_server.averaging_service import AveragingService, AveragingState
from tacit.parameter_server.messages import Message
from tacit.parameter_server.protocol import FrameKind
from tacit.parameter_server.service import Sender
from tacit.session import Session
from tacit.session.buckets import fitting, make_buckets
from tacit.strategy import Strategy
from tacit.topologies import Auto, Flat, Hierarchical, Star, TwoPhase
from tacit.transports.loopback import Answer, Loopback, Seat

SHAPES = {"weight": (24, 18), "bias": (24,), "deep": (8, 6, 3, 3), "last": (7, 24)}
"""The parameters of the model on which compressors are tried."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
WORLDS = (1, 2, 3, 4)
ROUNDS = 4
TOPOLOGIES: tuple[Topology, ...] = (Flat(), TwoPhase(), Auto(), Hierarchical(), Star())
COMPRESSORS: tuple[Compressor, ...] = (
    Dense(),
    BF16(),
    ErrorFeedback(TopK(ratio=0.1)),
    ErrorFeedback(Sign()),
    ErrorFeedback(PowerSGD(rank=1)),
)


@dataclass(frozen=True)
class Checked:
    """What a check has tried.

    Attributes:
        accepted: the values under which all laws hold.
        refused: those that were refused when they were put together, and the sentence that said so.
    """

    accepted: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


# ---- compressors and topologies -----------------------------------------------------------------------


def check_compressor(
    compressor: Compressor,
    *,
    topologies: Iterable[Topology] = TOPOLOGIES,
    dtypes: Iterable[torch.dtype] = DTYPES,
    worlds: Iterable[int] = WORLDS,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> Checked:
    """Hold a compressor to the laws, under every topology that takes it.

    Alone: it leaves what it is given as it is, and gives the same in place. Under each topology, in each
    type, with each number of ranks: all ranks get the same bits, and finite ones; no more bytes are sent than
    the dry run foretold; where it is under `ErrorFeedback`, what was given has arrived or is in a residual;
    and a NaN of one rank is an error that names the parameter.

    Args:
        shapes: of the model's parameters, by name.

    Returns:
        The topologies that were tried, and those that refused it.

    Raises:
        AssertionError: a law does not hold; or every topology refused it.
    """
    kinds, counts = tuple(dtypes), tuple(worlds)
    for dtype in kinds:
        with _naming(compressor, "alone", dtype):
            _check_alone(compressor, dtype, shapes)
    accepted, refused = [], {}
    for topology in topologies:
        try:
            strategy = Strategy(compressor=compressor, topology=topology)
            _Group(strategy, max(counts), kinds[0], shapes)
        except ConfigError as error:
            refused[str(topology)] = str(error)
            continue
        for dtype in kinds:
            for world in counts:
                with _naming(compressor, topology, dtype, world):
                    _check_pair(strategy, world, dtype, shapes)
        accepted.append(str(topology))
    assert accepted, f"every topology refused {compressor}: {refused}"
    return Checked(tuple(accepted), refused)


def check_topology(
    topology: Topology,
    *,
    compressors: Iterable[Compressor] = COMPRESSORS,
    dtypes: Iterable[torch.dtype] = DTYPES,
    worlds: Iterable[int] = WORLDS,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> Checked:
    """Hold a topology to the laws of `check_compressor`, with every compressor that it takes.

    Returns:
        The compressors that were tried, and those that it refused.

    Raises:
        AssertionError: a law does not hold; or it refused all compressors.
    """
    accepted, refused = [], {}
    for compressor in compressors:
        try:
            check = check_compressor(
                compressor, topologies=[topology], dtypes=dtypes, worlds=worlds, shapes=shapes
            )
        except AssertionError as error:
            if "every topology refused" not in str(error):
                raise
            refused[str(compressor)] = str(error)
        else:
            accepted += [str(compressor)] * len(check.accepted)
    assert accepted, f"{topology} refused every compressor: {refused}"
    return Checked(tuple(accepted), refused)


def _check_alone(compressor: Compressor, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]) -> None:
    named = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    (bucket,) = make_buckets([[*named]], named, fitting(compressor, named))
    compressor, numel = bucket.compressor, bucket.numel
    xs = [_tensor(numel, dtype, seed) for seed in range(3)]
    outcomes = []
    for in_place in (False, True):
        given = [x.clone() for x in xs]
        outs = given if in_place else [torch.full_like(x, torch.nan) for x in xs]
        states = [compressor.init(torch.empty(numel, dtype=dtype)) for _ in xs]
        before = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
        exchanges = [
            Flat().conduct(
                x, compressor, state, Context(out, _Workspace(), peers=3, rank=rank, name="checked")
            )
            for rank, (x, state, out) in enumerate(zip(given, states, outs, strict=True))
        ]
        outcomes.append(Loopback(3).run(exchanges)[0].mean.clone())
        if not in_place:
            assert all(map(torch.equal, given, xs)), "what was given to exchange() has changed"
        for state, old in zip(states, before, strict=True):
            changed = [name for name in old if not torch.equal(state[name], old[name])]
            assert not changed, f"exchange() has changed {changed} of the state that it was given"
    assert torch.equal(*outcomes), "where the mean overwrites what was given, it is another one"


def _check_pair(
    strategy: Strategy, world: int, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    group = _Group(strategy, world, dtype, shapes)
    given, arrived = (
        torch.zeros(group.numel, dtype=torch.float64),
        torch.zeros(group.numel, dtype=torch.float64),
    )
    for seed in range(ROUNDS):
        before = list(group.net.sent)
        xs = group.tensors(seed)
        true = torch.stack([x.double() for x in xs]).mean(0)
        mean = group.exchange(xs)
        assert bool(mean.isfinite().all()), "the mean is not finite"
        for rank, session in enumerate(group.sessions):
            most = sum(cost.sent.total() for cost in session.store.costs)
            sent = group.net.sent[rank] - before[rank]
            assert sent <= most, f"rank {rank} sent {sent} bytes, and the dry run foretold {most}"
        given += true
        arrived += mean.double()
    if dtype != torch.bfloat16 and group.keeps_residuals:
        lost = (given - arrived - group.residual()).abs().max()
        largest = given.abs().max()
        assert lost <= 1e-4 * largest, f"{float(lost):.3g} is neither arrived nor in a residual"
    if world > 1:
        _check_nan(_Group(strategy, world, dtype, shapes))


def _check_nan(group: _Group) -> None:
    xs = group.tensors(0)
    xs[-1][0] = torch.nan
    told = ""
    try:
        group.exchange(xs)
    except NonFinite as error:
        told = str(error)
    except TacitError:
        return  # an overflow, or a payload that a peer has refused: no rank has applied anything
    assert told, f"a NaN in {group.first} on one rank was not seen: hides_nonfinite must be True"
    assert group.first in told, f"a NaN in {group.first} is told as: {told}"


# ---- merges -------------------------------------------------------------------------------------------


def check_merge(merge: Merge, *, dtypes: Iterable[torch.dtype] = (torch.float32, torch.float64)) -> None:
    """Hold a merge to its laws, for answers that come at once and for late ones.

    The anchor and the state are the same bits on all ranks, whatever each rank's own parameters are; all is
    finite; where `merge.meets` and the answer comes at once, every replica is at the anchor.

    Raises:
        AssertionError: a law does not hold.
    """
    for dtype in dtypes:
        for lag in (0, 3):
            with _naming(merge, f"lag={lag}", dtype):
                _check_merge(merge, dtype, lag)


def _check_merge(merge: Merge, dtype: torch.dtype, lag: int, peers: int = 3, numel: int = 50) -> None:
    anchors = [_tensor(numel, dtype, 0) for _ in range(peers)]
    states = [merge.init(anchor) for anchor in anchors]
    where = Application(peers=peers, lag=lag, lr=0.1, parties=peers)
    for seed in range(3):
        deltas = [_tensor(numel, dtype, 10 * seed + rank) for rank in range(peers)]
        mean = torch.stack(deltas).mean(0)
        for rank in range(peers):
            params = anchors[rank] + deltas[rank] + lag * _tensor(numel, dtype, 100 + rank)
            needed = merge.sees_local_delta or (lag > 0 and merge.needs_local_delta)
            own = deltas[rank].clone() if needed else None
            merge.apply_(params, anchors[rank], mean.clone(), own, states[rank], where)
            assert bool(params.isfinite().all()), "the parameters are not finite"
            if merge.meets and not lag:
                assert torch.equal(params, anchors[rank]), "it meets, and a replica is not at the anchor"
        assert all(torch.equal(anchor, anchors[0]) for anchor in anchors), "the anchors of ranks differ"
        for name in states[0]:
            assert all(torch.equal(state[name], states[0][name]) for state in states), f"{name} differs"
        for anchor in anchors:
            merge.consolidate_(anchor, mean.clone())
        assert all(torch.equal(anchor, anchors[0]) for anchor in anchors), "consolidate_ makes ranks differ"


# ---- ranks in this process ----------------------------------------------------------------------------


class _Workspace:
    """Buffers that are made when they are asked for, full of what must not be read."""

    def spare(self, field: str, like: Tensor) -> Tensor:
        return torch.full_like(like, torch.nan if like.is_floating_point() else 77)

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=like.device)


class _Rank(Seat):
    """A rank that also has a parameter server."""

    def ranks(self, axis: str) -> list[int]:
        return super().ranks(WORLD if axis == SERVER else axis)


class _Group:
    """Sessions of all ranks of a world with one strategy, and a server that averages where it has one."""

    def __init__(
        self, strategy: Strategy, world: int, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        by_node = strategy.topology.scope != strategy.topology.meets
        nodes = 2 if by_node and world % 2 == 0 else 1
        self.net = Loopback.of_nodes(nodes, world // nodes) if by_node else Loopback(world)
        named = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        self._strategy, self._dtype = strategy, dtype
        self.sessions = [Session(strategy, named, _Rank(self.net, rank), [[*named]]) for rank in range(world)]
        self.first = next(iter(named))
        self.numel = sum(p.numel() for p in named.values())
        (bucket,) = self.sessions[0].buckets
        self._service = AveragingService(world, bucket.name)
        self._served: AveragingState = self._service.start()
        for rank in range(world):
            _, self._served = self._service.on(Sender(rank, 1), Message(FrameKind.ENTER), self._served)
        self._asked: dict[int, Answer] = {}
        self._pushes = 0

    @property
    def keeps_residuals(self) -> bool:
        """Whether each parameter's compressor keeps what it does not send, or sends all of it exactly."""
        chosen = self.sessions[0].buckets[0].chosen
        uses = [each.one_shot(0) for each in chosen]
        exact = [isinstance(each, Dense) for each in chosen]
        owing = [use is not None and use.has_feedback for use in uses]
        return any(owing) and all(a or b for a, b in zip(owing, exact, strict=True))

    def tensors(self, seed: int) -> list[Tensor]:
        """One gradient a rank."""
        return [_tensor(self.numel, self._dtype, 97 * seed + rank) for rank in range(len(self.sessions))]

    def exchange(self, xs: list[Tensor]) -> Tensor:
        """One round; the mean, which must be the same bits on all ranks."""
        self._pushes = self._served.number
        outcomes = self._run([session.open(0, x) for session, x in zip(self.sessions, xs, strict=True)])
        for session, outcome in zip(self.sessions, outcomes, strict=True):
            session.complete(0, outcome)
        assert all(torch.equal(x, xs[0]) for x in xs), "ranks have got different means"
        return xs[0]

    def residual(self) -> Tensor:
        """What has been given and has not arrived, in units of the mean."""
        total = torch.zeros(self.numel, dtype=torch.float64)
        parties = self.sessions[0].context.coordinate.here.peers
        starts = {each.name: each.start for each in self.sessions[0].buckets[0].slices}
        for session in self.sessions:
            for (name, kind), kept in session.store.named_state().items():
                if kind.startswith("topology.") or kind in session.store.residuals(name):
                    start = starts[name] + kept.start
                    share = 1.0 if kind.startswith("topology.") else 1.0 / parties
                    total[start : start + kept.tensor.numel()] += share * kept.tensor.double()
        return total

    def _run(self, exchanges: Sequence[Generator[Request, Any, Any]]) -> list[Any]:
        """Drive one exchange a rank to the end."""
        results: dict[int, Any] = {}
        waiting: dict[int, Answer] = {}
        stages = [Counter[str]() for _ in exchanges]
        ready: dict[int, Any] = dict.fromkeys(range(len(exchanges)))
        while ready:
            for rank, answer in ready.items():
                try:
                    request = exchanges[rank].send(answer)
                except StopIteration as end:
                    results[rank] = end.value
                    continue
                assert isinstance(request, Collective), f"a {type(request).__name__} reached the transport"
                stages[rank][request.axis] += 1
                waiting[rank] = self._post(rank, request, stages[rank][request.axis])
            ready = {rank: each.answer() for rank, each in waiting.items() if each.done}
            for rank in ready:
                del waiting[rank]
        assert not waiting, f"ranks {sorted(waiting)} wait for others that have ended, or ask something else"
        return [results[rank] for rank in range(len(exchanges))]

    def _post(self, rank: int, request: Collective, stage: int) -> Answer:
        if not isinstance(request, PushPull):
            return self.net.post(rank, request, (stage, 0))
        self._asked[rank] = answer = Answer()
        push = Message(
            FrameKind.PUSH, stage + self._pushes, _copies(request.payloads), request.pieces, request.pulls
        )
        replies, self._served = self._service.on(Sender(rank, 1), push, self._served)
        for reply in replies:
            if reply.refused is not None:
                raise reply.refused
            self._asked[reply.to.worker].give(_copies(reply.payloads))
        return answer


def _copies(payloads: Iterable[Payload]) -> tuple[Payload, ...]:
    return tuple(tuple(part.clone() for part in payload) for payload in payloads)


def _tensor(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Heavy-tailed, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) ** 3).to(dtype)


@contextmanager
def _naming(*what: object) -> Iterator[None]:
    """Say under which circumstances a law does not hold."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{', '.join(map(str, what))}: {error}") from error
