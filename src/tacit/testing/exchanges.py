"""Laws for compressors and topologies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from tacit import checks
from tacit.compressors import BF16, Dense, ErrorFeedback, PowerSGD, Sign, TopK
from tacit.contracts import (
    Compressor,
    Context,
    Topology,
)
from tacit.errors import ConfigError, NonFinite, TacitError
from tacit.session import Session
from tacit.session.buckets import fitting, make_buckets
from tacit.strategy import Strategy
from tacit.testing.ranks import FreshBuffers, RanksInProcess, heavy_tailed, naming
from tacit.topologies import Auto, Flat, Hierarchical, Star, TwoPhase
from tacit.transports.loopback import Loopback

SHAPES = {"weight": (24, 18), "bias": (24,), "deep": (8, 6, 3, 3), "last": (7, 24)}
"""The parameters of the model on which compressors are tried."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
WORLDS = (1, 2, 3, 4)
ROUNDS = 4
LATER = (1, 10, 100, 10_000)
"""Steps at which payloads must have the shapes that they had at first."""
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


def check_compressor(
    compressor: Compressor,
    *,
    topologies: Iterable[Topology] = TOPOLOGIES,
    dtypes: Iterable[torch.dtype] = DTYPES,
    worlds: Iterable[int] = WORLDS,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    conserves: bool | None = None,
) -> Checked:
    """Check a compressor against the laws, under every topology that accepts it.

    By itself: it does not change its input, gives the same result in place, and decodes over whatever was in
    the output. Under each topology, in each type, with each number of ranks: all ranks get the same bits, and
    finite ones; no more bytes are sent than the dry run predicted; a step that is taken back leaves no trace;
    under `ErrorFeedback` all of the input has arrived or is in a residual; and a NaN of one rank is an error
    that names the parameter. Where a session would choose among topologies that have obeyed already,
    only the last law is tried once more.

    Args:
        shapes: of the model's parameters, by name.
        conserves: whether all of the input has arrived or is in a residual. By default this is checked under
            `ErrorFeedback`; say False if some is lost on purpose, such as by a residual that decays.

    Returns:
        The topologies that were tried, and those that refused it.

    Raises:
        AssertionError: a law does not hold; or every topology refused it.
        ConfigError: it is no compressor.
    """
    trial = _Trial(tuple(dtypes), tuple(worlds), shapes, conserves)
    checks.compressor("compressor", compressor)
    trial.alone(compressor)
    checked = _sorted({str(each): trial.refused(compressor, each) for each in topologies})
    assert checked.accepted, f"every topology refused {compressor}: {checked.refused}"
    return checked


def check_topology(
    topology: Topology,
    *,
    compressors: Iterable[Compressor] = COMPRESSORS,
    dtypes: Iterable[torch.dtype] = DTYPES,
    worlds: Iterable[int] = WORLDS,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> Checked:
    """Check a topology against the laws of `check_compressor`, with each compressor that it accepts.

    Returns:
        The compressors that were tried, and those that it refused.

    Raises:
        AssertionError: a law does not hold; or it refused all compressors.
    """
    trial = _Trial(tuple(dtypes), tuple(worlds), shapes)
    checked = _sorted({str(each): trial.refused(each, topology) for each in compressors})
    assert checked.accepted, f"{topology} refused every compressor: {checked.refused}"
    return checked


def _sorted(tried: Mapping[str, str | None]) -> Checked:
    """The combinations that were tried, sorted into accepted and refused (with the refusal's sentence)."""
    refused = {name: why for name, why in tried.items() if why is not None}
    return Checked(tuple(name for name in tried if name not in refused), refused)


@dataclass(frozen=True)
class _Trial:
    """In which types, with how many ranks, and on which parameters the laws are tried."""

    dtypes: tuple[torch.dtype, ...]
    worlds: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]
    conserves: bool | None = None
    held: set[tuple[Compressor, Topology]] = field(default_factory=set)
    """The topologies that have obeyed all laws: where a session would choose among these, they are not tried
    again.
    """

    def alone(self, compressor: Compressor) -> None:
        """Check the laws that need no topology."""
        for dtype in self.dtypes:
            with naming(compressor, "alone", dtype):
                _check_alone(compressor, dtype, self.shapes)

    def refused(self, compressor: Compressor, topology: Topology) -> str | None:
        """Check the laws of both together; or return the sentence by which one refuses the other."""
        with naming(compressor, topology):
            try:
                strategy = Strategy(compressor=compressor, topology=topology)
                group = RanksInProcess(strategy, max(self.worlds), self.dtypes[0], self.shapes)
            except ConfigError as error:
                return str(error)
        if not {(compressor, each) for each in group.candidates} <= self.held:
            for dtype in self.dtypes:
                for world in self.worlds:
                    with naming(compressor, topology, dtype, world):
                        _check_pair(strategy, world, dtype, self.shapes, self.conserves)
        if max(self.worlds) > 1:
            with naming(compressor, topology, "NaN"):
                _check_nan(group)
        self.held.add((compressor, topology))
        return None


def _check_alone(compressor: Compressor, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]) -> None:
    named = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    (bucket,) = make_buckets([[*named]], named, fitting(compressor, named))
    compressor, numel = bucket.compressor, bucket.numel
    xs = [heavy_tailed(numel, dtype, seed) for seed in range(3)]
    outcomes = []
    for in_place in (False, True):
        given = [x.clone() for x in xs]
        outs = given if in_place else [torch.full_like(x, torch.nan) for x in xs]
        states = [compressor.init(torch.empty(numel, dtype=dtype)) for _ in xs]
        before = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
        exchanges = [
            Flat().conduct(
                x, compressor, state, Context(out, FreshBuffers(), peers=3, rank=rank, name="checked")
            )
            for rank, (x, state, out) in enumerate(zip(given, states, outs, strict=True))
        ]
        outcomes.append(Loopback(3).run(exchanges)[0].mean.clone())
        if not in_place:
            assert all(map(torch.equal, given, xs)), "the input of exchange() has changed"
        for state, old in zip(states, before, strict=True):
            changed = [name for name in old if not torch.equal(state[name], old[name])]
            assert not changed, f"exchange() has changed {changed} of the state that it was given"
    assert torch.equal(*outcomes), "the mean is another one where it overwrites the input"
    one_shot = compressor.one_shot(0)
    if one_shot is not None and not one_shot.is_predicted:
        context = Context(xs[0].clone(), FreshBuffers(), peers=3, rank=0, name="checked")
        payload = one_shot.codec.encode(xs[0].clone(), context)
        for step in LATER:
            later = Context(
                xs[0].clone(), FreshBuffers(), peers=3, rank=0, step=step, round=step, name="checked"
            )
            again = one_shot.codec.encode(xs[0].clone(), later)
            assert [(part.shape, part.dtype) for part in again] == [
                (part.shape, part.dtype) for part in payload
            ], f"a payload has other shapes after {step} steps: write Scheduled for what changes with steps"
        decoded = [torch.full_like(xs[0], before) for before in (torch.nan, 77)]
        for out in decoded:
            one_shot.codec.decode_(payload, out)
        assert torch.equal(*decoded), "decode_() does not overwrite all of its output"


def _check_pair(
    strategy: Strategy,
    world: int,
    dtype: torch.dtype,
    shapes: Mapping[str, tuple[int, ...]],
    conserves: bool | None,
) -> None:
    group = RanksInProcess(strategy, world, dtype, shapes)
    given, arrived = torch.zeros((2, group.numel), dtype=torch.float64)
    for seed in range(ROUNDS):
        before = list(group.net.sent)
        xs = group.tensors(seed)
        true = torch.stack([x.double() for x in xs]).mean(0)
        mean = group.exchange(xs)
        assert bool(mean.isfinite().all()), "the mean is not finite"
        for rank, session in enumerate(group.sessions):
            most = sum(cost.sent.total() for cost in session.store.costs)
            sent = group.net.sent[rank] - before[rank]
            assert sent <= most, f"rank {rank} sent {sent} bytes, and the dry run predicted {most}"
        given += true
        arrived += mean.double()
    _check_taken_back(group)
    keeps = group.keeps_residuals if conserves is None else conserves
    if dtype != torch.bfloat16 and keeps:
        lost = (given - arrived - group.residual()).abs().max()
        largest = given.abs().max()
        assert lost <= group.rounding * largest, f"{float(lost):.3g} has neither arrived nor is in a residual"


def _check_taken_back(group: RanksInProcess) -> None:
    for session in group.sessions:
        session.advance()
    before = [_state(session) for session in group.sessions]
    group.exchange(group.tensors(ROUNDS))
    for session, old in zip(group.sessions, before, strict=True):
        session.take_back()
        now = _state(session)
        changed = [key for key in old if not torch.equal(now[key], old[key])]
        assert not changed, (
            f"a step that was taken back has changed {changed}: states must be left as they are"
        )


def _state(session: Session) -> dict[tuple[str, str], torch.Tensor]:
    return {key: kept.tensor.clone() for key, kept in session.store.named_state().items()}


def _check_nan(group: RanksInProcess) -> None:
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
    assert group.first in told, f"a NaN in {group.first} is reported as: {told}"
