"""The service that keeps a bucket's parameters: asynchronous, stale-synchronous, or with backup workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tacit.contracts import Message, Payload, PayloadSpec, Reply, Sender, Service, State, state_dtype
from tacit.errors import PayloadError, PeerLost, TacitError
from tacit.server.desks import (
    Desk,
    Desks,
    Enter,
    Gone,
    Meet,
    Push,
    Saved,
    Work,
    add_,
    changed,
    check,
    check_places,
    leaves,
)
from tacit.server.rules import Rule
from tacit.topologies.star import StaleSynchronous, Star, Synchronous

T = TypeVar("T")
Asked = tuple[Sender, int]
"""Whom a reply is for, and to which message."""


@dataclass(frozen=True)
class Books:
    """What is kept, and who waits for what.

    Attributes:
        desks: the workers.
        x: the parameters, in fp32 at least; None before the first worker has brought them.
        taken: what each worker has of them, in its own type, where that is remembered, and is on its way to
            it.
        version: how many updates there were.
        rule: the state of the server's optimizer.
        pushed: with rounds, what has been pushed in this one.
        stale: how many pushes were so many updates old; `late`, how many were dropped: they came after their
            round, or it had no more workers.
        waiting: pushes that were taken and not yet answered, and how stale they were.
        entering: workers that wait for the parameters; `meeting`, those that wait for all others.
        bringing: the worker that was asked for the parameters.
    """

    desks: Desks
    x: Tensor | None = None
    taken: Mapping[int, Tensor] = field(default_factory=dict)
    version: int = 0
    rule: State = field(default_factory=dict)
    pushed: Mapping[Sender, Push] = field(default_factory=dict)
    stale: Mapping[int, int] = field(default_factory=dict)
    late: int = 0
    waiting: Mapping[int, tuple[Sender, int, int]] = field(default_factory=dict)
    entering: Mapping[int, Asked] = field(default_factory=dict)
    meeting: Mapping[int, Asked] = field(default_factory=dict)
    bringing: int | None = None


@dataclass(frozen=True)
class Keeper(Service[Books]):
    """Applies what workers push to the parameters of one bucket, and answers with these.

    A push counts 1/P with P workers; in a round, 1 / (how many are counted). It is stale by the updates that
    were applied since its worker pulled. With rounds, a push that was worked out on an older version than the
    present one is dropped, and answered at once. One that is on the present version counts, and is answered
    at once too where its worker has taken fewer steps than there were rounds: whoever is behind waits for
    nobody, as the others may wait for it, in a collective of the user's.

    Attributes:
        workers: how many there are.
        star: when to answer, and how to count a push.
        back: how the parameters come back.
        rule: the server's optimizer; None: what is pushed is added.
        name: of the bucket; part of the seed of what is drawn.
    """

    workers: int
    star: Star
    back: PayloadSpec
    rule: Rule | None = None
    name: str = ""
    work: tuple[Work, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "work", tuple(Work() for _ in range(self.workers + 1)))

    def start(self) -> Books:
        """All workers are expected."""
        return Books((Desk(),) * self.workers)

    def on(self, sender: Sender, message: Message, state: Books) -> tuple[Sequence[Reply], Books]:
        """Take a message; whoever need not wait any longer is answered."""
        asked = sender, message.sequence
        try:
            match message.content:
                case Enter(offer):
                    state = self._enter(asked, offer, state)
                case Push() as push:
                    state = self._push(sender, message, push, state)
                case Meet():
                    self._check_life(sender, state)
                    state = replace(state, meeting={**state.meeting, sender.worker: asked})
                case Gone(why):
                    state = self._gone(sender, why, state)
                case other:
                    raise AssertionError(f"a keeper was sent {other}")
        except TacitError as error:
            return [Reply(*asked, refused=error)], state
        return self._release(state)

    # ---- coming and going -----------------------------------------------------------------------------

    def _enter(self, asked: Asked, offer: Tensor | None, state: Books) -> Books:
        (worker, incarnation), _ = asked
        if offer is not None:
            if offer.numel() != self.back.numel or offer.dtype != self.back.dtype:
                raise PayloadError(
                    f"worker {worker} brings {offer.numel()} entries of {offer.dtype} for {self.name}, and "
                    f"{self.back.numel} of {self.back.dtype} were expected"
                )
            if state.x is None:
                x = offer.to(state_dtype(offer.dtype), copy=True)
                state = replace(state, x=x, rule={} if self.rule is None else self.rule.init(x))
            bringing = None if state.bringing == worker else state.bringing
            state = replace(state, bringing=bringing)
        others = [d.clock for w, d in enumerate(state.desks) if d.present and d.incarnation and w != worker]
        before = state.desks[worker]
        desk = replace(before, incarnation=incarnation, present=True, why="")
        ahead = isinstance(self.star.consistency, StaleSynchronous)
        if ahead and before.incarnation and before.incarnation != incarnation and others:
            desk = replace(
                desk, clock=max(desk.clock, min(others))
            )  # nobody has to wait until it has caught up
        if isinstance(self.star.consistency, Synchronous):
            desk = replace(desk, clock=max(desk.clock, state.version))
        return self._forget(
            worker,
            replace(
                state,
                desks=changed(state.desks, worker, desk),
                entering={**state.entering, worker: asked},
            ),
            but_entering=True,
        )

    def _check_life(self, sender: Sender, state: Books) -> None:
        desk = state.desks[sender.worker]
        desk.check(sender, Message(desk.clock + 1, None))

    def _gone(self, sender: Sender, why: str, state: Books) -> Books:
        desks = leaves(state.desks, sender, why)
        if desks is None:
            return state
        bringing = None if state.bringing == sender.worker else state.bringing
        return self._forget(sender.worker, replace(state, desks=desks, bringing=bringing))

    @staticmethod
    def _forget(worker: int, state: Books, but_entering: bool = False) -> Books:
        """Whoever it was does not wait any more; what it has pushed in the round still counts."""

        return replace(
            state,
            waiting=_but(state.waiting, worker),
            meeting=_but(state.meeting, worker),
            entering=state.entering if but_entering else _but(state.entering, worker),
        )

    # ---- pushes ---------------------------------------------------------------------------------------

    def _push(self, sender: Sender, message: Message, push: Push, state: Books) -> Books:
        worker, desk = sender.worker, state.desks[sender.worker]
        desk.check(sender, message)
        check(push, self.work[worker])
        check_places(push, self.back.numel)
        if state.x is None:
            raise PayloadError(f"worker {worker} pushes to {self.name} before it has entered: enter first")
        stale = state.version - desk.pulled
        asked = {**state.waiting, worker: (sender, message.sequence, stale)}
        desks = changed(state.desks, worker, replace(desk, clock=message.sequence))
        if isinstance(self.star.consistency, Synchronous):
            if stale or sender in state.pushed:  # of each worker, one counts in a round
                return replace(state, desks=desks, waiting=asked, late=state.late + 1)
            self._add_(push, self._scratch(state.x), 1.0)  # what cannot be read is refused now
            if message.sequence <= state.version:  # answered at once, and its next push lies where this does
                push = replace(push, payloads=tuple(tuple(x.clone() for x in each) for each in push.payloads))
            return replace(state, desks=desks, waiting=asked, pushed={**state.pushed, sender: push})
        weight = 1 / self.workers / (max(1, stale) if self.star.by_staleness else 1)
        rule = self._apply(state, [push], weight, worker)
        counts = {**state.stale, stale: state.stale.get(stale, 0) + 1}
        return replace(state, desks=desks, waiting=asked, version=state.version + 1, stale=counts, rule=rule)

    def _apply(self, state: Books, pushes: Sequence[Push], weight: float, worker: int = 0) -> State:
        """Move the parameters; the rule's new state."""
        assert state.x is not None
        if self.rule is None:
            for push in pushes:
                self._add_(push, state.x, weight)
            return state.rule
        g = self._scratch(state.x)
        if self.star.compensation:
            self._add_(pushes[0], g, 1.0)
            independent = self.work[-1].scratch("apart", g, g.shape, g.dtype)
            torch.sub(state.x, state.taken[worker], out=independent)
            g.add_(independent.mul_(g).mul_(g), alpha=self.star.compensation).mul_(weight)
        else:
            for push in pushes:
                self._add_(push, g, weight)
        self.rule.apply_(state.x, g, state.rule, pushes[-1].lr)
        return state.rule

    def _scratch(self, x: Tensor) -> Tensor:
        return self.work[-1].scratch("gradient", x, x.shape, x.dtype).zero_()

    def _add_(self, push: Push, out: Tensor, weight: float) -> None:
        """Add `weight` times a push to `out`, which may be of a wider type than what is pushed."""
        if out.dtype == self.back.dtype:
            add_(push, out, weight)
            return
        said = self.work[-1].scratch("said", out, out.shape, self.back.dtype).zero_()
        add_(push, said, 1.0)
        out.add_(said, alpha=weight)

    # ---- answers --------------------------------------------------------------------------------------

    def _release(self, state: Books) -> tuple[Sequence[Reply], Books]:
        """Answer all that need not wait."""
        replies: list[Reply] = []
        state = self._end_round(state, replies)
        state = self._let_in(state, replies)
        for worker in [worker for worker in state.waiting if self._may_go_on(worker, state)]:
            sender, sequence, stale = state.waiting[worker]
            state, payloads = self._pulled(worker, state)
            state = replace(state, waiting=_but(state.waiting, worker))
            replies.append(Reply(sender, sequence, payloads, facts={"stale": stale}))
        present = {worker for worker, desk in enumerate(state.desks) if desk.present}
        if present and present <= state.meeting.keys():
            for worker, (sender, sequence) in sorted(state.meeting.items()):
                state, whole = self._whole(worker, state)
                replies.append(Reply(sender, sequence, (whole,)))
            state = replace(state, meeting={})
        return replies, state

    def _end_round(self, state: Books, replies: list[Reply]) -> Books:
        if not isinstance(self.star.consistency, Synchronous) or not state.pushed:
            return state
        here = {worker for worker, desk in enumerate(state.desks) if desk.present}
        present, needed = len(here), self.workers - self.star.consistency.backup_workers
        nobody_else = here - state.meeting.keys() <= {sender.worker for sender in state.pushed}
        if len(state.pushed) >= needed or (nobody_else and present >= needed):
            pushes = [state.pushed[sender] for sender in sorted(state.pushed)]
            rule = self._apply(state, pushes, 1 / len(pushes))
            stale = {**state.stale, 0: state.stale.get(0, 0) + len(pushes)}
            return replace(state, version=state.version + 1, pushed={}, stale=stale, rule=rule)
        if present >= needed:
            return state
        why = "; ".join(desk.why for desk in state.desks if not desk.present)
        lost = PeerLost(f"{why}: {present} workers are left, and a round takes {needed}")
        stuck = [asked for asked in state.waiting.values() if asked[0] in state.pushed]
        replies += [Reply(sender, sequence, refused=lost) for sender, sequence, _ in stuck]
        waiting = {worker: asked for worker, asked in state.waiting.items() if asked not in stuck}
        return replace(state, pushed={}, waiting=waiting, late=state.late + len(state.pushed))

    def _let_in(self, state: Books, replies: list[Reply]) -> Books:
        if state.x is None:
            if state.bringing is None and state.entering:
                worker = min(state.entering)
                sender, sequence = state.entering[worker]
                replies.append(Reply(sender, sequence, facts={"offer": 1}))
                return replace(state, bringing=worker, entering=_but(state.entering, worker))
            return state
        for worker, (sender, sequence) in sorted(state.entering.items()):
            state, whole = self._whole(worker, state)
            replies.append(Reply(sender, sequence, (whole,), facts={"clock": state.desks[worker].clock}))
        return replace(state, entering={})

    def _may_go_on(self, worker: int, state: Books) -> bool:
        if isinstance(self.star.consistency, Synchronous):
            return state.waiting[worker][0] not in state.pushed or state.desks[worker].clock <= state.version
        if isinstance(self.star.consistency, StaleSynchronous):
            return state.desks[worker].clock - _slowest(state) <= self.star.consistency.bound
        return True

    def _whole(self, worker: int, state: Books) -> tuple[Books, Payload]:
        """The parameters as they are; the worker has them from now on."""
        assert state.x is not None
        taken = state.taken.get(worker)
        taken = state.x.to(self.back.dtype, copy=True) if taken is None else taken.copy_(state.x)
        return self._has(worker, taken, state), (taken,)

    def _pulled(self, worker: int, state: Books) -> tuple[Books, tuple[Payload, ...]]:
        """The parameters, or how they differ from what the worker has."""
        if self.back.codec is None:
            state, whole = self._whole(worker, state)
            return state, (whole,)
        assert state.x is not None
        taken, work = state.taken[worker], self.work[worker]
        independent = work.scratch("apart", taken, taken.shape, taken.dtype)
        if independent.dtype == state.x.dtype:
            torch.sub(state.x, taken, out=independent)
        else:
            wide = work.scratch("wide", taken, taken.shape, state.x.dtype)
            independent.copy_(torch.sub(state.x, taken, out=wide))
        ctx = work.context(independent, f"{self.name}/{worker}", state.version)
        payload = self.back.codec.encode(independent, ctx)
        self.back.codec.decode_add_(payload, taken, 1.0)
        return self._has(worker, taken, state), (payload,)

    @staticmethod
    def _has(worker: int, taken: Tensor, state: Books) -> Books:
        desk = replace(state.desks[worker], pulled=state.version)
        return replace(state, desks=changed(state.desks, worker, desk), taken={**state.taken, worker: taken})

    # ---- for the host ---------------------------------------------------------------------------------

    def missing(self, state: Books) -> set[int]:
        """For whom others wait."""
        present = {worker for worker, desk in enumerate(state.desks) if desk.present}
        found: set[int] = set()
        if state.entering and state.bringing is not None:
            found.add(state.bringing)
        if state.meeting:
            found |= present - state.meeting.keys()
        if state.waiting and isinstance(self.star.consistency, StaleSynchronous):
            slowest = _slowest(state)
            found |= {worker for worker in present if state.desks[worker].clock == slowest}
        if state.pushed and state.waiting:
            found |= present - {sender.worker for sender in state.pushed}
        return found - state.waiting.keys() - state.meeting.keys()

    def save(self, state: Books) -> Saved:
        """What a restarted server needs."""
        kept = {} if state.x is None else {"x": state.x.clone()}
        return {
            **kept,
            "version": state.version,
            "clocks": [desk.clock for desk in state.desks],
            "rule": {name: tensor.clone() for name, tensor in state.rule.items()},
            "stale": dict(state.stale),
            "late": state.late,
        }

    def load(self, saved: Mapping[str, Any]) -> Books:
        """Go on from there; workers have to enter anew, and pushes of an unfinished round are gone."""
        x = saved.get("x")
        return Books(
            tuple(Desk(clock=clock) for clock in saved["clocks"]),
            x=None if x is None else x.to(state_dtype(x.dtype)),
            version=saved["version"],
            rule={name: each.to(state_dtype(each.dtype)) for name, each in saved["rule"].items()},
            stale=saved["stale"],
            late=saved["late"],
        )

    def facts(self, state: Books) -> Mapping[str, Any]:
        """What it can tell of the pushes."""
        return {"stale": dict(state.stale), "late": state.late}


def _slowest(state: Books) -> int:
    """The least clock of those that may still push; who meets has nothing more to push for now.

    Whoever waits for a push is one of them.
    """
    may = [
        desk.clock for worker, desk in enumerate(state.desks) if desk.present and worker not in state.meeting
    ]
    return min(may)


def _but(asked: Mapping[int, T], worker: int) -> Mapping[int, T]:
    return {each: whom for each, whom in asked.items() if each != worker}
