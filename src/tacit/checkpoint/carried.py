"""A session's state from one period of training to the next, where the members are others."""

from __future__ import annotations

import io
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from tacit.checkpoint import session_state
from tacit.checkpoint.resize import KEY
from tacit.contracts import WORLD, Request
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.model.trained_model import local, sharded_as
from tacit.replicas.rounds_after_step import OptimizerHook
from tacit.session.bucket_states import is_topologys

T = TypeVar("T")


@dataclass(frozen=True)
class CarriedState:
    """What a member knows at the end of a period.

    Attributes:
        session: what `session_state.save` gives; of state that ranks divide, this rank's part.
        model: parameters and buffers, by name, of sharded ones this rank's part; empty if they are in the
            model.
        optimizers: the state of each optimizer, as torch's `state_dict` has it; of shards as well.
        moved: how far the parameters of each level are from the common point.
    """

    session: Mapping[str, Any]
    model: Mapping[str, Tensor] = field(default_factory=dict)
    optimizers: Sequence[Mapping[int, Any]] = ()
    moved: Sequence[Mapping[tuple[str, str], Tensor]] = ()

    def to_bytes(self) -> bytes:
        """For a newcomer; `of_bytes` reads it."""
        file = io.BytesIO()
        whole = {"session": dict(self.session), "model": dict(self.model), "optimizers": [*self.optimizers]}
        torch.save(whole, file)
        return file.getvalue()

    @staticmethod
    def of_bytes(message: bytes) -> CarriedState:
        """What another member sends; nothing in it is run."""
        return CarriedState(**torch.load(io.BytesIO(message), map_location="cpu", weights_only=True))


def present(spec: AttachSpec, levels: Sequence[Level]) -> CarriedState:
    """The present state, also after a round that failed; no collective call. Nothing may be under way."""
    for level in levels:
        if level.progress is not None:
            level.progress.settle_failed()
    wholes = [_by_itself(level.session.store.gathered()) for level in levels]
    moved = [{} if level.progress is None else level.progress.moved() for level in levels]
    return CarriedState(session_state.saved(spec.strategy, levels, wholes), moved=moved)


def with_replica(
    state: CarriedState, spec: AttachSpec, levels: Sequence[Level], newcomer: bool
) -> CarriedState:
    """The state with this replica's model and optimizers, for another member.

    Others wait for it, so what need not travel is left out: what this rank alone had not sent, and what is of
    no use to other members; parameters, where the other one begins at the common point, which the state has;
    where the optimizers' states are each replica's own, as with local steps, those of one that has its own,
    and half of their bits. A variance that all keep in common travels in half of the bits, too, but to all.
    """
    step, mixing = state.session["steps"][-1], _mixing(levels)
    useless = {key for key in state.session if _is_of_a_rank(key) or _begins_anew(key, mixing)}
    session = {key: value for key, value in state.session.items() if key not in useless}
    known = spec.named if common_points(levels, step) else {}
    whole = spec.model.module.state_dict()
    model = {name: local(each.detach()).clone() for name, each in whole.items() if name not in known}
    local_momenta = all(level.strategy.momentum == "local" for level in levels)
    apart = local_momenta and bool(_step_alone(levels, step))
    own = apart and all(level.strategy.renewals is None for level in levels)
    optimizers = [
        {
            i: {field: _sent(value, halved=apart) for field, value in of.items()}
            for i, of in each.state_dict()["state"].items()
        }
        for each in (() if own and not newcomer else spec.optimizers)
    ]
    return CarriedState(session, model, optimizers)


def _is_of_a_rank(key: str) -> bool:
    """Whether it is state that one rank alone has, by its key."""
    match = KEY.fullmatch(key)
    return match is not None and match["owner"].startswith("rank")


def _mixing(levels: Sequence[Level]) -> list[set[tuple[str, str]]]:
    return [level.session.store.mixing for level in levels]


def _begins_anew(key: str, mixing: Sequence[set[tuple[str, str]]]) -> bool:
    """Whether it is state that other members cannot go on with: what a rank keeps for all, or of others."""
    match = KEY.fullmatch(key)
    return match is not None and (
        is_topologys(match["field"]) or (match["name"], match["field"]) in mixing[int(match["level"])]
    )


def take(
    state: CarriedState,
    spec: AttachSpec,
    levels: Sequence[Level],
    step: int,
    unacted: bool,
    own: bool,
    late: CarriedState | None = None,
    schedule: str = "",
) -> None:
    """Go on from a state, after `step` steps.

    What this rank alone had not sent stays its own; what it kept for all ranks, such as the residual of a
    mean, begins anew, as others keep it now. Answers that came in the period before and that are due by then
    are applied: some members have applied them there, and what a round exchanges depends on it.

    Args:
        unacted: whether what follows the last step is still to come.
        own: whether it is this member's; else it is another one's, of which this one takes what is common,
            and begins where all agree.
        late: this member's, if others have ended rounds without it: its own steps are added to that.
        schedule: the schedules' state of those that are furthest, if there is one: where rounds follow
            measurements, some members may have seen the last ones, and others not.
    """
    fresh = present(spec, levels).session
    rank, peers = levels[0].session.transport.place(WORLD)
    mixing = _mixing(levels)
    session = {**state.session, "ranks": peers, "steps": [step - unacted for _ in levels]}
    session["topologies"] = fresh["topologies"]
    session["schedule_state"] = schedule or session["schedule_state"]
    tensors = {key: value for key, value in fresh.items() if KEY.fullmatch(key)}
    for key, value in state.session.items():
        if KEY.fullmatch(key) is None:
            continue
        del session[key]
        ranks_own = _is_of_a_rank(key)
        if not _begins_anew(key, mixing) and (own or not ranks_own):
            tensors[f"rank{rank}/{key.partition('/')[2]}" if ranks_own else key] = value
    if not own:
        _put(state, spec)
    session_state.load({**session, **tensors}, spec.strategy, levels)
    for level in levels:
        if level.progress is not None:
            level.progress.catch_up(step - 1, state.session["ranks"])
    for i, progress in common_points(levels, step - unacted).items() if not own else ():
        progress.go_to_anchor({} if late is None else late.moved[i])


def _sent(value: Any, halved: bool) -> Any:
    """A field of an optimizer's state as it travels; the optimizer that loads it has it in 32 bits again."""
    mine = local(value)
    whole = torch.is_tensor(mine) and mine.dim() and mine.dtype == torch.float32
    if halved and whole:
        mine = mine.bfloat16()
    return mine.clone() if torch.is_tensor(mine) else mine  # of a view the whole memory would travel


def _step_alone(levels: Sequence[Level], step: int) -> dict[int, OptimizerHook]:
    """The hooks of levels, by number, between whose rounds replicas differ after so many steps."""
    if levels[0].progress is None and levels[0].session.schedule.always:  # gradients of all, as with `snoo`
        return {}
    return {
        i: level.progress
        for i, level in enumerate(levels)
        if level.progress is not None and not level.session.schedule.inactive(step)
    }


def common_points(levels: Sequence[Level], step: int) -> dict[int, OptimizerHook]:
    """Those of levels that have a point at which all replicas agree when a round has ended."""
    return {
        i: progress
        for i, progress in _step_alone(levels, step).items()
        if not levels[i].strategy.topology.mixes
    }


def _put(state: CarriedState, spec: AttachSpec) -> None:
    """Overwrite model and optimizers' state with another member's."""
    here = spec.model.module.state_dict()
    with torch.no_grad():
        for name, value in state.model.items():
            local(here[name]).copy_(value)
    for optimizer, found in zip(spec.optimizers, state.optimizers, strict=bool(state.optimizers)):
        _give(optimizer, found)


def _give(optimizer: Optimizer, found: Mapping[int, Any]) -> None:
    """Set its state, and leave its learning rates and the like as they are."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {i: {name: sharded_as(params[i], each) for name, each in of.items()} for i, of in found.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _by_itself(exchange: Generator[Request, Any, T]) -> T:
    """Run an exchange whose every request is answered by what this rank has."""
    try:
        request: Any = next(exchange)
        while True:
            request = exchange.send(request.x)
    except StopIteration as end:
        answer: T = end.value
        return answer
