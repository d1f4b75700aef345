"""An attached session in a checkpoint: how it is saved, joined and loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from tacit import described
from tacit.checkpoint import saved_values
from tacit.checkpoint.own_replica import OwnReplica
from tacit.checkpoint.resize import SavedShares, topology_residuals
from tacit.checkpoint.saved_values import LAST_EQUAL, VERSION, SavedValues, refusing, state_of
from tacit.checkpoint.sharded_state import refuse_shards
from tacit.contracts import NET, WORLD
from tacit.errors import CheckpointError
from tacit.gradients.ddp_hook import GradientHook
from tacit.gradients.layerwise.hook import LayerwiseHook
from tacit.optimizer_hooks.kept_variance import KeptVariance
from tacit.optimizer_hooks.scaled_variance import ScaledVariance
from tacit.optimizer_hooks.taken_momentum import Taken
from tacit.replicas.rounds_after_step import OptimizerHook
from tacit.replicas.rounds_under_way import RANKS_OWN, UnappliedRound
from tacit.rounds import EveryStep
from tacit.session import Session
from tacit.session.bucket_states import is_topologys
from tacit.session.buckets import StateSlice, parameter_of
from tacit.strategy import AnyStrategy, Strategy

DELAYED = "delayed_mean"
DECAY = "weight_decay_momentum"
"""The fields of a parameter whose gradient is exchanged, besides the compressor's state."""
VARIANCES = "variances"
RATES = "learning_rates"
"""Keys that some states lack: then no variance was changed, and residuals are in units of the present rates.
"""

_log = logging.getLogger("tacit")


class ActiveLevel(Protocol):
    """The part of a level that a checkpoint needs."""

    session: Session
    gradient: GradientHook | LayerwiseHook | None
    progress: OptimizerHook | None
    taken: Taken | None


def save(strategy: AnyStrategy, levels: Sequence[ActiveLevel]) -> dict[str, Any]:
    """The state as a dict of plain values and tensors (copies). A collective call if ranks divide buckets.

    Tensors are keyed by parameter: under `shared/` if they are equal on all ranks, under `node{m}/` if a node
    has them, and under `rank{r}/` if they are this rank's, so that torch.distributed.checkpoint saves each of
    them. No key depends on how buckets are cut.
    """
    return saved(strategy, levels, [level.session.whole_state() for level in levels])


def saved(
    strategy: AnyStrategy,
    levels: Sequence[ActiveLevel],
    wholes: Sequence[Mapping[tuple[str, str], StateSlice]],
) -> dict[str, Any]:
    """The result of `save`, from `Session.gathered` of each level; no collective call."""
    transport = levels[0].session.transport
    state: dict[str, Any] = {
        "version": VERSION,
        "strategy": repr(strategy),
        "strategy_without_rounds": _without_rounds(strategy),
        "schedules": [repr(level.session.strategy.rounds) for level in levels],
        "ranks": transport.place(WORLD).peers,
        "nodes": [list(node) for node in transport.nodes],
        "steps": [level.session.step for level in levels],
        "rounds": [level.session.round for level in levels],
        "buckets": [_names(level) for level in levels],
        "topologies": [repr(level.session.strategy.topology) for level in levels],
        # As text: torch.distributed.checkpoint drops empty values.
        "schedule_state": json.dumps([dict(level.session.schedule.state) for level in levels]),
        "pending_rounds": json.dumps([_pending_rounds(level) for level in levels]),
        LAST_EQUAL: json.dumps(
            {i: at.progress.last_equal for i, at in enumerate(levels) if at.progress is not None}
        ),
        "layouts": [level.gradient.layout if level.gradient is not None else None for level in levels],
        RATES: json.dumps([_rates(level) for level in levels]),
    }
    variances = {i: each.saved_state() for i, at in enumerate(levels) if (each := _variance(at)) is not None}
    if variances:
        state[VARIANCES] = json.dumps(variances)
    for i, (level, whole) in enumerate(zip(levels, wholes, strict=True)):
        for (name, field), kept in {**whole, **_of_hook(level)}.items():
            state[_key(i, level.session, name, field, kept.shared)] = kept.tensor.reshape(-1).clone()
        if level.progress is not None:
            state[_losses(i, level)] = level.progress.observations.losses.clone()
    return state


def join_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states that all ranks have saved into one, which any number of ranks can load.

    Raises:
        CheckpointError: there are none, or they are not of one step of one run.
    """
    each = [state_of(state) for state in states]
    if not each:
        raise CheckpointError("no states to join: give what every rank's state_dict gave")
    whole, sums = dict(each[0]), dict[str, int]()
    refuse_shards(whole)
    for state in each:
        for key in ("strategy", "ranks", "steps", "rounds"):
            if state.get(key) != whole.get(key):
                raise CheckpointError(
                    f"the states are not of one moment: {key} is {whole.get(key)} in one and "
                    f"{state.get(key)} in another"
                )
        with refusing():
            sums |= saved_values.sums_of(state)
        whole |= state
    return saved_values.with_sums(whole, sums) if sums else whole


def load(
    state: Mapping[str, Any],
    strategy: AnyStrategy,
    levels: Sequence[ActiveLevel],
    own: OwnReplica | None = None,
    fits: Callable[[int], None] = lambda _: None,
    shard: int | None = None,
) -> None:
    """Go on from a saved state.

    `own`: this rank's replica. `fits`: called with the state's step before anything changes.
    `shard`: the number of this rank's shard; None: the model is not sharded.

    If it was saved by another number of ranks, or with another topology, the residuals are divided again (see
    `resize`), and the log says so.

    Raises:
        CheckpointError: it is of another strategy, another model or a newer version, or not whole; nothing
            has been changed then.
    """
    state = state_of(state)
    values = saved_values.read(state)
    _check(values, strategy, levels)
    transport = levels[0].session.transport
    peers, nodes = transport.place(WORLD).peers, [list(node) for node in transport.nodes]
    resized = values.ranks != peers or values.nodes != nodes
    with refusing():
        shares = SavedShares(state, values)
        found = [_found(i, level, state, values, shares, resized) for i, level in enumerate(levels)]
        for i, level in enumerate(levels):
            saved_values.check_level(values, i, level.session)
            named = level.session.context.tensors
            if not _keeps(level, resized):
                saved_values.check_buckets(values.buckets[i], named)
            if (layout := values.layouts[i]) is not None:
                saved_values.check_buckets(layout, named)
        mine = {} if own is None else own.found(state, values.ranks)
        shares.refuse_others(len(levels) - 1)
    fits(values.steps[-1])
    for i, level in enumerate(levels):
        if level.progress is None and level.taken is not None:
            level.taken.expect(shares.names(i, DECAY))
    taken_over: set[str] = set()
    for i, level in enumerate(levels):
        taken_over |= _resume(i, level, values, found[i], resized)
    if own is not None:
        own.take(mine)
    rounds = [repr(level.session.strategy.rounds) for level in levels]
    if values.schedules != rounds and transport.place(WORLD).rank == 0:
        _log.warning(
            "a checkpoint with rounds=%s goes on with %s: they are counted anew from step %d",
            *(", ".join(values.schedules), ", ".join(rounds), values.steps[0]),
        )
    if resized and transport.place(WORLD).rank == 0 and not shard:
        _log.warning(
            "a checkpoint of %d %s%s goes on with %d%s: each has got the mean of the old residuals",
            *(values.ranks, "ranks" if shard is None else "replicas", _on(values.nodes), peers, _on(nodes)),
        )
    begun_anew = {name for level in levels for name, _ in level.session.store.mixing} if resized else set()
    if begun_anew and transport.place(WORLD).rank == 0:
        _log.warning(
            "what %d ranks knew of each other's replicas (of %d parameters) is of no use to %d: it begins "
            "anew at the anchor, which is equal on all of them",
            *(values.ranks, len(begun_anew), peers),
        )
    if taken_over and transport.place(WORLD).rank == 0:
        _log.warning(
            "the residuals of the means of %d parameters are now in every rank's residual, as no rank "
            "keeps them apart: the checkpoint was taken with %s, and goes on with %s",
            *(len(taken_over), " | ".join(values.topologies)),
            " | ".join(str(level.session.strategy.topology) for level in levels),
        )


def _on(nodes: Sequence[Sequence[int]]) -> str:
    return f" on {len(nodes)} nodes" if nodes else ""


def _resume(
    i: int, level: ActiveLevel, values: SavedValues, found: Mapping[tuple[str, str], Tensor], resized: bool
) -> set[str]:
    """Load a level's state. Returns the parameters whose residuals now include the topology's."""
    session, rounds = level.session, level.session.strategy.rounds
    session.rebucket(_own(session) if _keeps(level, resized) else values.buckets[i], carry=False)
    same = repr(rounds) == values.schedules[i]
    given = {key: session.schedule.state[key] for key in rounds.needs}
    schedule_state = values.schedule_state[i] if same else rounds.start(values.steps[i])
    session.resume(values.steps[i], values.rounds[i], {**schedule_state, **given})
    if session.rescaling is not None and values.learning_rates is not None:
        session.rescaling.resume(values.learning_rates[i])
    if level.gradient is not None:
        level.gradient.resume(None if _planned_anew(level, resized) else values.layouts[i])
    if level.progress is not None:
        ways = [UnappliedRound(tuple(which), step, at) for which, step, at in values.pending_rounds[i]]
        level.progress.follow_buckets(ways, values.last_equal_of(i))
        level.progress.writes.resume()
        if (variance := _variance(level)) is not None:
            variance.resume(values.variances.get(str(i), {}))
        if (losses := found.get(("", "losses"))) is not None:
            level.progress.observations.losses.copy_(losses)
    taken_over = session.store.restore(found)
    for both, kept in _of_hook(level).items():
        kept.tensor.copy_(found[both].view(kept.tensor.shape))
    return taken_over


def _planned_anew(level: ActiveLevel, resized: bool) -> bool:
    layerwise = level.gradient is not None and level.session.strategy.overlap.layerwise
    return resized and layerwise  # the plan was for other links


def _keeps(level: ActiveLevel, resized: bool) -> bool:
    """Whether the level keeps its buckets, whatever those of the checkpoint are."""
    fixed = level.gradient is not None and bool(level.gradient.fixed)
    fixed = fixed or not level.session.buckets  # as with "ddp"
    return fixed or _planned_anew(level, resized) or level.session.strategy.server is not None


def _of_hook(level: ActiveLevel) -> dict[tuple[str, str], StateSlice]:
    """The state of the level's hook: anchors, means, the decay's momentum."""
    if level.progress is not None:
        return level.progress.saved_state()
    delayed = None if level.gradient is None else level.gradient.late
    found = {DELAYED: {} if delayed is None else delayed.saved_state()}
    found[DECAY] = {} if level.taken is None else level.taken.saved_state()
    return {
        (name, field): StateSlice(each, True, 0, each.numel())
        for field in found
        for name, each in found[field].items()
    }


def _rates(level: ActiveLevel) -> dict[str, list[float]]:
    return {} if level.session.rescaling is None else level.session.rescaling.state()


def _variance(level: ActiveLevel) -> ScaledVariance | KeptVariance | None:
    return None if level.progress is None else level.progress.variance


def _pending_rounds(level: ActiveLevel) -> list[list[Any]]:
    ways = level.progress.under_way if level.progress is not None else []
    return [[list(way.buckets), way.step, way.apply_at] for way in ways]


def _losses(i: int, level: ActiveLevel) -> str:
    return f"rank{level.session.transport.place(WORLD).rank}/{i}//losses"


def _without_rounds(strategy: AnyStrategy) -> str:
    """The strategy's text without what may change when the run goes on: names, rounds, variances."""
    each = [
        replace(level, name="", variance="local", rounds=EveryStep() if _may_change(level) else level.rounds)
        for level in strategy.levels
    ]
    return repr(each)


def _may_change(level: Strategy) -> bool:
    """Whether a run may go on with other rounds; phases are planned for a whole run."""
    return level.subject == "delta" and not level.rounds.phased


def _key(i: int, session: Session, name: str, field: str, shared: bool) -> str:
    """The key of a tensor in a checkpoint."""
    if field in RANKS_OWN:
        return f"rank{session.transport.place(WORLD).rank}/{i}/{name}/{field}"
    return f"{_owner(session, shared)}/{i}/{name}/{field}"


def _owner(session: Session, shared: bool) -> str:
    rank, peers = session.transport.place(WORLD)
    if not shared:
        return f"node{session.transport.place(NET).rank}" if session.context.by_node else f"rank{rank}"
    everywhere = len(session.ranks) == peers
    return "shared" if everywhere else f"shared by {'-'.join(map(str, session.ranks))}"


def _found(
    i: int,
    level: ActiveLevel,
    state: Mapping[str, Any],
    values: SavedValues,
    shares: SavedShares,
    resized: bool,
) -> dict[tuple[str, str], Tensor]:
    """The saved tensors of which this rank keeps a part, and the topology's residuals.

    Raises:
        CheckpointError: one is missing, or of another shape.
        ValueError: one cannot have been saved.
    """
    session = level.session
    found = topology_residuals(i, session, shares)
    elsewhere = values.topologies[i] != repr(session.strategy.topology)
    decayed, mixing = shares.names(i, DECAY), session.store.mixing
    here = session.store.named_state() | _of_hook(level)
    widths = session.store.widths() | {
        (name, DECAY): (True, session.context.tensors[name].numel())
        for name in decayed & session.context.tensors.keys()
    }
    widths |= {key: (kept.shared, kept.width) for key, kept in _of_hook(level).items()}
    losses = [("", "losses")] if level.progress is not None else []
    shares.expect(i, [*widths, *losses], session.context.tensors)
    for (name, field), (shared, width) in widths.items():
        like = here[name, field].tensor if (name, field) in here else None
        if is_topologys(field) and elsewhere and (name, field) not in found:
            continue  # the checkpoint has no such residual
        if not width or (field == DECAY and name not in decayed):
            found[name, field] = torch.zeros(
                width, dtype=torch.float32
            )  # an empty shard; nothing decayed when it was saved
            continue
        if resized and (name, field) in mixing:
            continue  # it starts from zero
        key = _key(i, session, name, field, shared)
        if resized:
            by_node = session.context.by_node and field not in RANKS_OWN
            found[name, field] = saved_values.expected(
                shares.state_of(i, name, field, shared, by_node, width), key, like
            )
            continue
        if key not in state and key.startswith("rank"):
            raise CheckpointError(
                f"the checkpoint lacks {key!r}, so it is another rank's, or not whole: load on every rank "
                "what it has saved itself, or all states joined by join_states. To a framework that writes "
                "what rank 0 has, give tacit.integrations.AllRanks(session) in the session's place"
            )
        if key not in state or state[key].shape != (width,):
            raise CheckpointError(
                f"the checkpoint {'has another shape for' if key in state else 'lacks'} {key!r}: it is not "
                "whole, or of another model"
            )
        found[name, field] = saved_values.expected(state[key], key, like)
    if level.progress is not None and (key := _losses(i, level)) in state:
        found["", "losses"] = described.tensor(state[key], key, (2,), described.FLOATS, finite=False)
    return found


def _check(values: SavedValues, strategy: AnyStrategy, levels: Sequence[ActiveLevel]) -> None:
    if values.strategy_without_rounds != _without_rounds(strategy) or len(values.steps) != len(levels):
        theirs, ours = _told_apart(values.strategy, strategy)
        raise CheckpointError(
            f"attach the same strategy, or start without the session's state: the checkpoint is of {theirs}, "
            f"and attached is {ours}"
        )
    for i, level in enumerate(levels):
        under_way, rounds = values.pending_rounds[i], level.session.strategy.rounds
        if under_way and values.schedules[i] != repr(rounds):
            raise CheckpointError(
                f"the checkpoint has a round under way, of {values.schedules[i]}, and attached is "
                f"{rounds}: call session.sync() before you save, or attach the same"
            )
        kept = level.session.strategy.server is not None
        if kept and under_way and values.buckets[i] != _names(level):
            raise CheckpointError(
                "the checkpoint has a round under way, in the buckets of other parameter servers: use as "
                "many, or call session.sync() before you save"
            )
    here = {name for level in levels if level.session.buckets for name in level.session.context.tensors}
    saved = {parameter_of(each, here) for level in values.buckets for bucket in level for each in bucket}
    if saved != here:
        raise CheckpointError(
            f"the checkpoint is of another model: {sorted(saved ^ here)[0]} is in one of them only"
        )


def _told_apart(saved: str, strategy: AnyStrategy) -> tuple[str, str]:
    """Both names; where they are equal, or the saved one is not known, also the first part that differs."""
    name = saved.rpartition("name=")[2].rstrip(")")
    if name.startswith("'") and name != repr(strategy.name):
        return name, repr(strategy.name)
    parts = zip_longest(saved.split(", "), repr(strategy).split(", "), fillvalue="nothing more")
    theirs, ours = next((pair for pair in parts if pair[0] != pair[1]), (saved, repr(strategy)))
    which = name if name == repr(strategy.name) else "one"
    return f"{which} with {theirs:.200}", f"{which} with {ours:.200}"


def _names(level: ActiveLevel) -> list[list[str]]:
    """The members of each bucket; for a sharded model equal on all ranks."""
    if level.gradient is not None and level.gradient.fixed:
        return level.gradient.fixed
    return _own(level.session)


def _own(session: Session) -> list[list[str]]:
    return [[*bucket.members] for bucket in session.buckets]
