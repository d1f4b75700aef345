"""What an attached session keeps in a checkpoint, and how it comes back."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tacit.contracts import NET, WORLD
from tacit.errors import CheckpointError
from tacit.hooks.ddp import GradientHook
from tacit.hooks.momentum import TakenMomentum
from tacit.hooks.optimizer import RANKS_OWN, OptimizerHook, UnappliedRound
from tacit.hooks.resize import Shares
from tacit.rounds import EveryStep
from tacit.session import Session
from tacit.session.buckets import StateSlice
from tacit.session.state import is_topologys
from tacit.strategy import AnyStrategy, Strategy

VERSION = 3
LATE = "late mean"
DECAY = "velocity of the weight decay"
MET = "last met"
RATES = "learning rates"
"""In whose units stands what is owed; states of before have it not, and then go on from the present rates."""

_log = logging.getLogger("tacit")

_KEYS = {"version", "strategy", "but rounds", "rounds are", "ranks", "nodes", "steps", "rounds"} | {
    "memory",
    "under way",
    "buckets",
    "layouts",
    "topologies",
}


class AtWork(Protocol):
    """What is kept of: one level of a strategy at work."""

    session: Session
    gradient: GradientHook | None
    progress: OptimizerHook | None
    taken: TakenMomentum | None


def save(strategy: AnyStrategy, levels: Sequence[AtWork]) -> dict[str, Any]:
    """The state as a dict of plain values and tensors (copies). A collective call where ranks
    share buckets out.

    Tensors are keyed by parameter, under `shared/` where they are equal on all ranks, under `node{m}/` where
    they are a node's and under `rank{r}/` where they are this rank's own, so that
    torch.distributed.checkpoint keeps each of them apart. No key depends on how buckets are cut.
    """
    return saved(strategy, levels, [level.session.whole_state() for level in levels])


def saved(
    strategy: AnyStrategy, levels: Sequence[AtWork], wholes: Sequence[Mapping[tuple[str, str], StateSlice]]
) -> dict[str, Any]:
    """What `save` gives, of what `Session.gathered` has given for each level."""
    transport = levels[0].session.transport
    state: dict[str, Any] = {
        "version": VERSION,
        "strategy": repr(strategy),
        "but rounds": _but_rounds(strategy),
        "rounds are": [repr(level.session.strategy.rounds) for level in levels],
        "ranks": transport.place(WORLD).peers,
        "nodes": [list(node) for node in transport.nodes],
        "steps": [level.session.step for level in levels],
        "rounds": [level.session.round for level in levels],
        "buckets": [_names(level) for level in levels],
        "topologies": [repr(level.session.strategy.topology) for level in levels],
        # As text: torch.distributed.checkpoint drops what is empty.
        "memory": json.dumps([dict(level.session.schedule_state) for level in levels]),
        "under way": json.dumps([_under_way(level) for level in levels]),
        MET: json.dumps({i: at.progress.last_met for i, at in enumerate(levels) if at.progress is not None}),
        "layouts": [level.gradient.layout if level.gradient is not None else None for level in levels],
        RATES: json.dumps([_rates(level) for level in levels]),
    }
    for i, (level, whole) in enumerate(zip(levels, wholes, strict=True)):
        for (name, field), kept in {**whole, **_of_door(level)}.items():
            state[_key(i, level.session, name, field, kept.shared)] = kept.tensor.clone()
        if level.progress is not None:
            state[_losses(i, level)] = level.progress.facts.losses.clone()
    return state


def join_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The states that all ranks have saved, as one, which any number of ranks can load.

    Raises:
        CheckpointError: there are none, or they are not of one moment of one run.
    """
    each = list(states)
    if not each:
        raise CheckpointError("no states to join: give what every rank's state_dict gave")
    whole = dict(each[0])
    for state in each[1:]:
        for key in ("strategy", "ranks", "steps", "rounds"):
            if state.get(key) != whole.get(key):
                raise CheckpointError(
                    f"the states are not of one moment: {key} is {whole.get(key)} in one and "
                    f"{state.get(key)} in another"
                )
        whole |= state
    return whole


def load(state: Mapping[str, Any], strategy: AnyStrategy, levels: Sequence[AtWork]) -> None:
    """Go on from a saved state.

    Saved by another number of ranks, or where another topology was chosen, what they owed is shared out anew
    (see `resize`), which the log tells.

    Raises:
        CheckpointError: it is another strategy's, another model's or of a newer version, or it is not whole;
            nothing has been changed then.
    """
    _check(state, strategy, levels)
    transport = levels[0].session.transport
    peers, nodes = transport.place(WORLD).peers, [list(node) for node in transport.nodes]
    resized = state["ranks"] != peers or state["nodes"] != nodes
    shares = Shares(state)
    for i, level in enumerate(levels):
        if level.progress is None and level.taken is not None:
            level.taken.decay.expect(shares.names(i, DECAY))
    found = [_found(i, level, state, shares, resized) for i, level in enumerate(levels)]
    taken_over: set[str] = set()
    for i, level in enumerate(levels):
        taken_over |= _resume(i, level, state, found[i])
    rounds = [repr(level.session.strategy.rounds) for level in levels]
    if state["rounds are"] != rounds and transport.place(WORLD).rank == 0:
        _log.warning(
            "a checkpoint with rounds=%s goes on with %s: they are counted anew from step %d",
            *(", ".join(state["rounds are"]), ", ".join(rounds), state["steps"][0]),
        )
    if resized and transport.place(WORLD).rank == 0:
        _log.warning(
            "a checkpoint of %d ranks%s goes on with %d%s: each has got the mean of the old residuals",
            *(state["ranks"], _on(state["nodes"]), peers, _on(nodes)),
        )

    if taken_over and transport.place(WORLD).rank == 0:
        _log.warning(
            "the residuals of the means of %d parameters are now in every rank's residual, as no rank "
            "keeps them apart: the checkpoint was taken with %s, and goes on with %s",
            *(len(taken_over), " | ".join(state["topologies"])),
            " | ".join(str(level.session.strategy.topology) for level in levels),
        )


def _on(nodes: Sequence[Sequence[int]]) -> str:
    return f" on {len(nodes)} nodes" if nodes else ""


def _resume(
    i: int, level: AtWork, state: Mapping[str, Any], found: Mapping[tuple[str, str], Tensor]
) -> set[str]:
    """Returns of which parameters every rank now owes what the topology owed."""
    session = level.session
    buckets = _names(level) if session.strategy.topology.keeps_buckets else state["buckets"][i]
    session.rebucket(buckets, carry=False)
    same = repr(session.strategy.rounds) == state["rounds are"][i]
    given = {key: session.schedule_state[key] for key in session.strategy.rounds.needs}
    schedule_state = (
        json.loads(state["memory"])[i] if same else session.strategy.rounds.start(state["steps"][i])
    )
    session.resume(state["steps"][i], state["rounds"][i], {**schedule_state, **given})
    if session.rescaling is not None and RATES in state:
        session.rescaling.resume(json.loads(state[RATES])[i])
    if level.gradient is not None:
        level.gradient.resume(state["layouts"][i])
    if level.progress is not None:
        ways = [
            UnappliedRound(tuple(buckets), step, apply_at)
            for buckets, step, apply_at in json.loads(state["under way"])[i]
        ]
        level.progress.follow_buckets(ways, json.loads(state.get(MET, "{}")).get(str(i), 0))
        if _losses(i, level) in state:
            level.progress.facts.losses.copy_(state[_losses(i, level)])
    taken_over = session.restore(found)
    for both, kept in _of_door(level).items():
        kept.tensor.copy_(found[both])
    return taken_over


def _of_door(level: AtWork) -> dict[tuple[str, str], StateSlice]:
    """What the progress door keeps; or the gradient door's late means, and the velocity of the decay."""
    if level.progress is not None:
        return level.progress.kept()
    late = None if level.gradient is None else level.gradient.late
    found = {LATE: {} if late is None else late.kept()}
    found[DECAY] = {} if level.taken is None else level.taken.decay.kept()
    return {
        (name, field): StateSlice(each, True, 0, each.numel())
        for field in found
        for name, each in found[field].items()
    }


def _rates(level: AtWork) -> dict[str, list[float]]:
    return {} if level.session.rescaling is None else level.session.rescaling.state()


def _under_way(level: AtWork) -> list[list[Any]]:
    ways = level.progress.under_way if level.progress is not None else []
    return [[list(way.buckets), way.step, way.apply_at] for way in ways]


def _losses(i: int, level: AtWork) -> str:
    return f"rank{level.session.transport.place(WORLD).rank}/{i}//losses"


def _but_rounds(strategy: AnyStrategy) -> str:
    """The strategy as a value, whenever replicas talk."""
    each = [
        replace(level, name="", rounds=EveryStep() if _may_change(level) else level.rounds)
        for level in strategy.levels
    ]
    return repr(each)


def _may_change(level: Strategy) -> bool:
    """Whether a run may go on with other rounds; phases are for the whole of a run."""
    return level.subject == "delta" and not level.rounds.late


def _key(i: int, session: Session, name: str, field: str, shared: bool) -> str:
    """Where a field lies in a checkpoint."""
    if field in RANKS_OWN:
        return f"rank{session.transport.place(WORLD).rank}/{i}/{name}/{field}"
    return f"{_owner(session, shared)}/{i}/{name}/{field}"


def _owner(session: Session, shared: bool) -> str:
    rank, peers = session.transport.place(WORLD)
    if not shared:
        return f"node{session.transport.place(NET).rank}" if session.by_node else f"rank{rank}"
    everywhere = len(session.ranks) == peers
    return "shared" if everywhere else f"shared by {'-'.join(map(str, session.ranks))}"


def _found(
    i: int, level: AtWork, state: Mapping[str, Any], shares: Shares, resized: bool
) -> dict[tuple[str, str], Tensor]:
    """What was saved of all that this rank keeps a part of, and what the topology owed in all."""
    session = level.session
    found = _of_topology(i, session, shares)
    elsewhere = state["topologies"][i] != repr(session.strategy.topology)
    decayed = shares.names(i, DECAY)
    expected = session.widths() | {key: (kept.shared, kept.width) for key, kept in _of_door(level).items()}
    for (name, field), (shared, width) in expected.items():
        if is_topologys(field) and elsewhere and (name, field) not in found:
            continue  # nothing was owed there
        if field == DECAY and name not in decayed:
            found[name, field] = torch.zeros(width)  # nothing decayed when it was saved
            continue
        if resized:
            by_node = session.by_node and field not in RANKS_OWN
            found[name, field] = shares.of(i, name, field, shared, by_node, width)
            continue
        key = _key(i, session, name, field, shared)
        if key not in state or state[key].shape != (width,):
            raise CheckpointError(
                f"the checkpoint {'has another shape for' if key in state else 'lacks'} {key!r}: it is not "
                "whole, or of another model"
            )
        found[name, field] = state[key]
    return found


def _of_topology(i: int, session: Session, shares: Shares) -> dict[tuple[str, str], Tensor]:
    """What the topology owed, if there are those who can owe it now."""
    expected = session.widths()
    found = shares.of_topology(i)
    for (name, field), new_residual in found.items():
        if (name, field) not in expected and bool(new_residual.any()):
            residual = session.residuals(name)
            if not residual or expected[name, residual[0]][1] != new_residual.numel():
                raise CheckpointError(
                    f"the checkpoint holds residuals of the means of {name}, and its compressor here has "
                    "none: put ErrorFeedback around it, or attach what the checkpoint was taken with"
                )
    return found


def _check(state: Mapping[str, Any], strategy: AnyStrategy, levels: Sequence[AtWork]) -> None:
    if not state.keys() >= _KEYS:
        raise CheckpointError(
            "this is no state of a tacit session, or it was cut short: load what state_dict gave"
        )
    if state["version"] > VERSION:
        raise CheckpointError(
            f"the checkpoint is of version {state['version']}, and this tacit reads up to {VERSION}: "
            "update tacit"
        )
    if state["version"] < VERSION:
        raise CheckpointError(
            f"the checkpoint is of version {state['version']}, and this tacit reads version {VERSION}: "
            "train on with the tacit that wrote it, or start without the session's state"
        )
    if state["but rounds"] != _but_rounds(strategy):
        raise CheckpointError(
            f"the checkpoint is of {state['strategy']}, and attached is {strategy!r}: attach the "
            "same strategy, or start without the session's state"
        )
    for i, level in enumerate(levels):
        if json.loads(state["under way"])[i] and state["rounds are"][i] != repr(
            level.session.strategy.rounds
        ):
            raise CheckpointError(
                f"the checkpoint has a round under way, of {state['rounds are'][i]}, and attached is "
                f"{level.session.strategy.rounds}: call session.sync() before you save, or attach the same"
            )
        kept = level.session.strategy.topology.keeps_buckets
        if kept and json.loads(state["under way"])[i] and state["buckets"][i] != _names(level):
            raise CheckpointError(
                "the checkpoint has a round under way, in the buckets of other parameter servers: use as "
                "many, "
                "or call session.sync() before you save"
            )
    saved = {name for buckets in state["buckets"] for bucket in buckets for name in bucket}
    here = {name for level in levels for bucket in _names(level) for name in bucket}
    if saved != here:
        raise CheckpointError(
            f"the checkpoint is of another model: {sorted(saved ^ here)[0]} is in one of them only"
        )


def _names(level: AtWork) -> list[list[str]]:
    return [[param.name for param in bucket.slices] for bucket in level.session.buckets]
