"""The service that keeps a bucket's parameters: asynchronous, stale-synchronous, or with backup workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from tacit.contracts import Payload, PayloadSpec, ServerTopology, State, state_dtype
from tacit.errors import PayloadError, PeerLost, TacitError
from tacit.stores.messages import Message
from tacit.stores.protocol import FrameKind
from tacit.stores.server.optimizers import ServerOptimizer
from tacit.stores.server.payloads import BufferWorkspace, add_, check_entries, check_payloads
from tacit.stores.service import (
    Reply,
    SavedState,
    Sender,
    Service,
    WorkerRecord,
    WorkerRecords,
    with_record,
    without_worker,
)
from tacit.topologies.star import Synchronous

T = TypeVar("T")
Asked = tuple[Sender, int]
"""Whom a reply is for, and to which message."""


@dataclass(frozen=True)
class ServiceState:
    """The parameters, and the waiting workers.

    Attributes:
        records: the workers.
        x: the parameters, in fp32 at least; None before the first worker has brought them.
        taken: for each worker that has pulled, the parameters that it has: in its type if they come back
            whole, else in that of `x`.
        version: the number of updates.
        optimizer: the state of the server's optimizer.
        pushed: with rounds, the sum of this round's pushes.
        stale: age in updates -> the number of pushes.
        late: the number of dropped pushes, which came after their round, or the round had no more workers.
        waiting: pushes that were taken and not yet answered, with their staleness.
        entering: workers that wait for the parameters.
        meeting: workers that wait for all others.
        bringing: the worker that is to send the parameters.
    """

    records: WorkerRecords
    x: Tensor | None = None
    taken: Mapping[int, Tensor] = field(default_factory=dict)
    version: int = 0
    optimizer: State = field(default_factory=dict)
    pushed: Mapping[Sender, Message] = field(default_factory=dict)
    stale: Mapping[int, int] = field(default_factory=dict)
    late: int = 0
    waiting: Mapping[int, tuple[Sender, int, int]] = field(default_factory=dict)
    entering: Mapping[int, Asked] = field(default_factory=dict)
    meeting: Mapping[int, Asked] = field(default_factory=dict)
    bringing: int | None = None


@dataclass(frozen=True)
class ParameterService(Service[ServiceState]):
    """Applies pushes to the parameters of one bucket, and answers with these.

    A push counts 1/P with P workers; in a round, 1 / (how many are counted). It is stale by the updates that
    were applied since its worker pulled. With rounds, a push that was computed on an older version than the
    present one is dropped, and answered at once. One on the present version counts. It is also answered at
    once if its worker has taken fewer steps than there were rounds: a worker that is behind does not wait, as
    the others may wait for it in a collective of the user.

    Attributes:
        workers: the number of workers.
        star: when to answer, and how to count a push.
        back: the format in which the parameters come back.
        optimizer: steps with each push; None: pushes are added.
        name: the bucket's name; part of the seed of random numbers.
    """

    workers: int
    star: ServerTopology
    back: PayloadSpec
    optimizer: ServerOptimizer | None = None
    name: str = ""
    work: tuple[BufferWorkspace, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "work", tuple(BufferWorkspace() for _ in range(self.workers + 1)))

    def start(self) -> ServiceState:
        return ServiceState((WorkerRecord(),) * self.workers)

    @property
    def numel(self) -> int:
        return self.back.numel

    def on(
        self, sender: Sender, message: Message, state: ServiceState
    ) -> tuple[Sequence[Reply], ServiceState]:
        """Take a message; whoever need not wait any longer is answered."""
        asked = sender, message.sequence
        try:
            match message.kind:
                case FrameKind.ENTER:
                    state = self._enter(asked, None, state)
                case FrameKind.OFFER:
                    state = self._enter(asked, message.payloads[0][0], state)
                case FrameKind.PUSH:
                    state = self._push(sender, message, state)
                case FrameKind.MEET | FrameKind.PULL:
                    record = state.records[sender.worker]
                    record.check(sender, record.clock + 1)
                    state = replace(state, meeting={**state.meeting, sender.worker: asked})
                case other:
                    raise AssertionError(f"a parameter service was sent {other.name}")
        except TacitError as error:
            return [Reply(*asked, refused=error)], state
        return self._release(state)

    def leave(self, sender: Sender, why: str, state: ServiceState) -> tuple[Sequence[Reply], ServiceState]:
        """Nobody waits for it any more; what it has pushed in the round still counts."""
        records = without_worker(state.records, sender, why)
        if records is not None:
            bringing = None if state.bringing == sender.worker else state.bringing
            state = self._forget(sender.worker, replace(state, records=records, bringing=bringing))
        return self._release(state)

    # ---- coming and going -----------------------------------------------------------------------------

    def _enter(self, asked: Asked, offer: Tensor | None, state: ServiceState) -> ServiceState:
        (worker, incarnation), _ = asked
        if offer is not None:
            if offer.numel() != self.back.numel or offer.dtype != self.back.dtype:
                raise PayloadError(
                    f"worker {worker} brings {offer.numel()} entries of {offer.dtype} for {self.name}, and "
                    f"{self.back.numel} of {self.back.dtype} were expected"
                )
            if state.x is None:
                x = offer.to(state_dtype(offer.dtype), copy=True)
                state = replace(
                    state, x=x, optimizer={} if self.optimizer is None else self.optimizer.init(x)
                )
            bringing = None if state.bringing == worker else state.bringing
            state = replace(state, bringing=bringing)
        others = [r.clock for w, r in enumerate(state.records) if r.present and r.incarnation and w != worker]
        before = state.records[worker]
        record = before.entered(incarnation)
        ahead = self.star.consistency.bound is not None
        if ahead and before.incarnation and before.incarnation != incarnation and others:
            # Nobody has to wait until it has caught up.
            record = replace(record, clock=max(record.clock, min(others)))
        if self.star.consistency.in_rounds:
            record = replace(record, clock=max(record.clock, state.version))
        return self._forget(
            worker,
            replace(
                state,
                records=with_record(state.records, worker, record),
                entering={**state.entering, worker: asked},
            ),
            but_entering=True,
        )

    @staticmethod
    def _forget(worker: int, state: ServiceState, but_entering: bool = False) -> ServiceState:
        """Drop the messages that the worker waits for an answer to; `but_entering`: all but its ENTER."""
        return replace(
            state,
            waiting=_without(state.waiting, worker),
            meeting=_without(state.meeting, worker),
            entering=state.entering if but_entering else _without(state.entering, worker),
        )

    # ---- pushes ---------------------------------------------------------------------------------------

    def _push(self, sender: Sender, push: Message, state: ServiceState) -> ServiceState:
        worker, record = sender.worker, state.records[sender.worker]
        record.check(sender, push.sequence)
        check_payloads(push)
        check_entries(push, self.back.numel)
        if state.x is None:
            raise PayloadError(f"worker {worker} pushes to {self.name} before it has entered: enter first")
        stale = state.version - record.pulled
        asked = {**state.waiting, worker: (sender, push.sequence, stale)}
        records = with_record(state.records, worker, replace(record, clock=push.sequence))
        if self.star.consistency.in_rounds:
            if stale or sender in state.pushed:  # of each worker, one counts in a round
                return replace(state, records=records, waiting=asked, late=state.late + 1)
            self._add_(push, self._scratch(state.x), 1.0)  # what cannot be read is refused now
            if push.sequence <= state.version:  # answered at once, and its next push lies where this does
                push = replace(push, payloads=tuple(tuple(x.clone() for x in each) for each in push.payloads))
            return replace(state, records=records, waiting=asked, pushed={**state.pushed, sender: push})
        weight = 1 / self.workers / (max(1, stale) if self.star.by_staleness else 1)
        optimizer = self._apply(state, [push], weight, worker)
        counts = {**state.stale, stale: state.stale.get(stale, 0) + 1}
        version = state.version + 1
        return replace(
            state, records=records, waiting=asked, version=version, stale=counts, optimizer=optimizer
        )

    def _apply(self, state: ServiceState, pushes: Sequence[Message], weight: float, worker: int = 0) -> State:
        """Move the parameters, and return the new state of the optimizer."""
        assert state.x is not None
        if self.optimizer is None:
            for push in pushes:
                self._add_(push, state.x, weight)
            return state.optimizer
        g = self._scratch(state.x)
        if self.star.compensation:
            self._add_(pushes[0], g, 1.0)
            drift = self.work[-1].scratch("drift", g, g.shape, g.dtype)
            torch.sub(state.x, state.taken[worker], out=drift)
            g.add_(drift.mul_(g).mul_(g), alpha=self.star.compensation).mul_(weight)
        else:
            for push in pushes:
                self._add_(push, g, weight)
        self.optimizer.apply_(state.x, g, state.optimizer, pushes[-1].lr)
        return state.optimizer

    def _scratch(self, x: Tensor) -> Tensor:
        return self.work[-1].scratch("gradient", x, x.shape, x.dtype).zero_()

    def _add_(self, push: Message, out: Tensor, weight: float) -> None:
        """Add `weight` times a push to `out`, which may be of a wider type than what is pushed."""
        if out.dtype == self.back.dtype:
            add_(push, out, weight)
            return
        said = self.work[-1].scratch("said", out, out.shape, self.back.dtype).zero_()
        add_(push, said, 1.0)
        out.add_(said, alpha=weight)

    # ---- answers --------------------------------------------------------------------------------------

    def _release(self, state: ServiceState) -> tuple[Sequence[Reply], ServiceState]:
        """Answer all that need not wait."""
        replies: list[Reply] = []
        state = self._end_round(state, replies)
        state = self._let_in(state, replies)
        for worker in [worker for worker in state.waiting if self._may_go_on(worker, state)]:
            sender, sequence, stale = state.waiting[worker]
            state, payloads = self._pulled(worker, state)
            state = replace(state, waiting=_without(state.waiting, worker))
            replies.append(Reply(sender, sequence, payloads, stale=stale))
        present = {worker for worker, record in enumerate(state.records) if record.present}
        if present and present <= state.meeting.keys():
            for worker, (sender, sequence) in sorted(state.meeting.items()):
                state, whole = self._whole(worker, state)
                replies.append(Reply(sender, sequence, (whole,)))
            state = replace(state, meeting={})
        return replies, state

    def _end_round(self, state: ServiceState, replies: list[Reply]) -> ServiceState:
        if not isinstance(self.star.consistency, Synchronous) or not state.pushed:
            return state
        here = {worker for worker, record in enumerate(state.records) if record.present}
        present, needed = len(here), self.workers - self.star.consistency.backup_workers
        nobody_else = here - state.meeting.keys() <= {sender.worker for sender in state.pushed}
        if len(state.pushed) >= needed or (nobody_else and present >= needed):
            pushes = [state.pushed[sender] for sender in sorted(state.pushed)]
            optimizer = self._apply(state, pushes, 1 / len(pushes))
            stale = {**state.stale, 0: state.stale.get(0, 0) + len(pushes)}
            return replace(state, version=state.version + 1, pushed={}, stale=stale, optimizer=optimizer)
        if present >= needed:
            return state
        why = "; ".join(record.why for record in state.records if not record.present)
        lost = PeerLost(f"{why}: {present} workers are left, and a round takes {needed}")
        stuck = [asked for asked in state.waiting.values() if asked[0] in state.pushed]
        replies += [Reply(sender, sequence, refused=lost) for sender, sequence, _ in stuck]
        waiting = {worker: asked for worker, asked in state.waiting.items() if asked not in stuck}
        return replace(state, pushed={}, waiting=waiting, late=state.late + len(state.pushed))

    def _let_in(self, state: ServiceState, replies: list[Reply]) -> ServiceState:
        if state.x is None:
            if state.bringing is None and state.entering:
                worker = min(state.entering)
                sender, sequence = state.entering[worker]
                replies.append(Reply(sender, sequence, offer=True))
                return replace(state, bringing=worker, entering=_without(state.entering, worker))
            return state
        for worker, (sender, sequence) in sorted(state.entering.items()):
            state, whole = self._whole(worker, state)
            replies.append(Reply(sender, sequence, (whole,), clock=state.records[worker].clock))
        return replace(state, entering={})

    def _may_go_on(self, worker: int, state: ServiceState) -> bool:
        if self.star.consistency.in_rounds:
            return (
                state.waiting[worker][0] not in state.pushed or state.records[worker].clock <= state.version
            )
        bound = self.star.consistency.bound
        return bound is None or state.records[worker].clock - _slowest_clock(state) <= bound

    def _whole(self, worker: int, state: ServiceState) -> tuple[ServiceState, Payload]:
        """The parameters as they are; the worker has them from now on."""
        assert state.x is not None
        taken, plain = state.taken.get(worker), self.back.codec is None
        whole = state.x.to(self.back.dtype, copy=True) if taken is None or not plain else taken.copy_(state.x)
        return self._has(worker, whole if plain else whole.to(state.x.dtype, copy=True), state), (whole,)

    def _pulled(self, worker: int, state: ServiceState) -> tuple[ServiceState, tuple[Payload, ...]]:
        """The parameters, or how they differ from what the worker has."""
        if self.back.codec is None:
            state, whole = self._whole(worker, state)
            return state, (whole,)
        assert state.x is not None
        taken, work = state.taken[worker], self.work[worker]
        apart = work.scratch("apart", taken, taken.shape, taken.dtype)
        said = work.scratch("said", taken, taken.shape, self.back.dtype)
        said.copy_(torch.sub(state.x, taken, out=apart))
        ctx = work.context(said, f"{self.name}/{worker}", state.version)
        payload = self.back.codec.encode(said, ctx)
        self.back.codec.decode_(payload, said)
        taken.add_(said)  # as the worker does, to the bit
        return self._has(worker, taken, state), (payload,)

    @staticmethod
    def _has(worker: int, taken: Tensor, state: ServiceState) -> ServiceState:
        records = with_record(state.records, worker, replace(state.records[worker], pulled=state.version))
        return replace(state, records=records, taken={**state.taken, worker: taken})

    # ---- for the process ------------------------------------------------------------------------------

    def missing(self, state: ServiceState) -> set[int]:
        """Those for whom others wait, and which do not wait themselves."""
        present = {worker for worker, record in enumerate(state.records) if record.present}
        found: set[int] = set()
        if state.entering and state.bringing is not None:
            found.add(state.bringing)
        if state.meeting:
            found |= present - state.meeting.keys()
        if state.waiting and self.star.consistency.bound is not None:
            slowest = _slowest_clock(state)
            found |= {worker for worker in present if state.records[worker].clock == slowest}
        if state.pushed and state.waiting:
            found |= present - {sender.worker for sender in state.pushed}
        return found - state.waiting.keys() - state.meeting.keys()

    def save(self, state: ServiceState) -> SavedState:
        """The parameters, the optimizer's state, and the clocks."""
        kept = {} if state.x is None else {"x": state.x.clone()}
        return {
            **kept,
            "version": state.version,
            "clocks": [record.clock for record in state.records],
            "optimizer": {name: tensor.clone() for name, tensor in state.optimizer.items()},
            "stale": dict(state.stale),
            "late": state.late,
        }

    def load(self, saved: SavedState) -> ServiceState:
        """Go on from there; workers have to enter anew, and pushes of an unfinished round are gone."""
        x = saved.get("x")
        return ServiceState(
            tuple(WorkerRecord(clock=clock) for clock in saved["clocks"]),
            x=None if x is None else x.to(state_dtype(x.dtype)),
            version=saved["version"],
            optimizer={name: each.to(state_dtype(each.dtype)) for name, each in saved["optimizer"].items()},
            stale=saved["stale"],
            late=saved["late"],
        )

    def staleness(self, state: ServiceState) -> tuple[Mapping[int, int], int]:
        return dict(state.stale), state.late


def _slowest_clock(state: ServiceState) -> int:
    """The least clock of the workers that may still push; one that meets has nothing more to push for now."""
    return min(
        record.clock
        for worker, record in enumerate(state.records)
        if record.present and worker not in state.meeting
    )


def _without(asked: Mapping[int, T], worker: int) -> Mapping[int, T]:
    return {each: whom for each, whom in asked.items() if each != worker}
