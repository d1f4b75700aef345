"""The progress door: after `optimizer.step`, where replicas have moved on their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tacit import ranges
from tacit.contracts import NODE, Landing, State
from tacit.doors.facts import Facts
from tacit.doors.flat import flat_view
from tacit.errors import AttachError
from tacit.exchanges import say
from tacit.lots import Kept
from tacit.session import Flight, Session

COMMON = "last common point"
MERGE = "merge."
MEAN, MINE = "arrived", "sent"
"""The state fields of a round that is under way: its mean, once it is there, and this rank's own part."""


@dataclass(frozen=True, eq=False)
class UnderWay:
    """A round that has left, and has not been applied.

    Attributes:
        lots: that travel in it.
        step: that it followed; `lands`: after which it is applied.
        flight: None where it had arrived before a checkpoint.
    """

    lots: tuple[int, ...]
    step: int
    lands: int
    flight: Flight | None = None


class ProgressDoor:
    """Keeps the common point of every lot, and moves it by what the peers agreed on.

    A round leaves with this rank's progress since the common point; when it lands, at once or some steps
    later, the strategy's merge applies its mean to the common point and to the parameters as they are then.

    Args:
        session: exchanges the progress; its lots are those of the parts, one part after the other.
        named: the parameters; buffers that are averaged with them come behind.
        trained: the names of the parameters; nobody else keeps the buffers equal.
        share: how much this rank counts for in the mean; 1 on average over the ranks.
        lr: reads the present learning rate.
    """

    def __init__(
        self,
        session: Session,
        named: Mapping[str, Tensor],
        trained: Collection[str],
        share: float = 1.0,
        lr: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._session = session
        self._named, self._trained = named, frozenset(trained)
        self._share, self._lr = share, lr
        self.facts = Facts(session, lr)
        self.landed: Callable[[list[str]], None] = lambda names: None
        """Called with the names to which a round's answer has just been applied."""
        self.follow_lots()

    def follow_lots(self, under_way: Iterable[UnderWay] = ()) -> None:
        """Take the present parameters as the common point, in the session's present lots."""
        session, lots = self._session, self._session.lots
        self._places = [
            [(flat_view(self._named[slot.name].detach()), slot.start, slot.stop) for slot in lot.slots]
            for lot in lots
        ]
        rounds, merge = session.strategy.rounds, session.strategy.merge
        self._late = session.strategy.overlap.lands(0) > 0 or rounds.late
        keeps = merge.sees_mine or (self._late and merge.needs_mine)
        self._unsent = merge.keeps_unsent
        self._then = [lot.like(lot.device) for lot in lots]
        self._flat = [torch.zeros_like(then) for then in self._then]
        self._mine = [torch.zeros_like(then) if keeps else None for then in self._then]
        self._states: list[State] = [merge.init(then) for then in self._then]
        largest = {lot.dtype: lot for lot in sorted(lots, key=lambda lot: lot.numel)}
        self._now = {dtype: lot.like(lot.device) for dtype, lot in largest.items()}
        self._before = {dtype: torch.empty_like(now) for dtype, now in self._now.items() if rounds.late}
        self._parts = _parts(session, self._named)
        for i, then in enumerate(self._then):
            self._read(i, then)
        self._met_at: int | None = None
        self.under_way: list[UnderWay] = list(under_way)

    # ---- steps ----------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """To be called after every attempt of the optimizer."""
        self._session.raise_failure()
        self.turn(self._session.step)
        self._session.step += 1

    def stirs(self, step: int) -> bool:
        """Whether a round leaves or lands after this step, or replicas begin to move on their own."""
        rounds, memory = self._session.strategy.rounds, self._session.memory
        if rounds.sleeps(step, memory):
            return not rounds.sleeps(step + 1, memory)
        return any(way.lands <= step for way in self.under_way) or bool(self._due(step))

    def turn(self, step: int) -> None:
        """Let land what is to land after this step, and leave what is due."""
        if not self.stirs(step):
            return
        if self._session.strategy.rounds.sleeps(step, self._session.memory):
            self._start_here()
            return
        with ranges.within(self._session.strategy.name, "sync"):
            due = self._due(step)
            if not (due and self._session.strategy.rounds.late):
                self._land_until(step)
            if due:
                self._round(step, due)

    def _due(self, step: int) -> list[int]:
        rounds, memory = self._session.strategy.rounds, self._session.memory
        parts = enumerate(self._parts)
        return [part for part, lots in parts if lots and rounds.due(step, memory, part)]

    def _start_here(self) -> None:
        """Take the present parameters, which are equal on all ranks, for the common point."""
        for lot, then in zip(self._session.lots, self._then, strict=True):
            for slot in lot.slots:
                if slot.name in self._trained:
                    then[slot.start : slot.stop] = flat_view(self._named[slot.name].detach())

    def sync(self) -> None:
        """A round of all parts, now: afterwards every replica stands at the common point.

        That is the mean of the replicas, or what the merge has in its place. What is under way lands first.
        None where no step was taken since the last time.

        Raises:
            RoundError: the round failed; no parameter has changed.
        """
        session = self._session
        if session.step == self._met_at:
            return
        with ranges.within(session.strategy.name, "sync"):
            last = session.step - 1
            self._land_until(last, every=True)
            if session.strategy.rounds.sleeps(session.step, session.memory):
                self._start_here()
            if self._unsent:
                self._meet()
            else:
                self._meet_in_a_round(last)
        self._met_at = session.step

    def _meet(self) -> None:
        """Average the replicas densely, with what they have not said."""
        session = self._session
        for i, (lot, then) in enumerate(zip(session.lots, self._then, strict=True)):
            self._read(i, then)
            session.ask(partial(say, then, session.strategy.topology.scope), lot.name)
            self._write(i, then)

    def _meet_in_a_round(self, last: int) -> None:
        way = self._leave(last, range(len(self._session.lots)), lands=last)
        if way.flight is not None:
            self._session.wait(way.flight)
        for i, then in enumerate(self._then):
            self._settle(i, then)
            self._write(i, then)
        self._end(way)

    def _settle(self, i: int, then: Tensor) -> None:
        if self._session.agree(i, self._flat[i]):
            then.copy_(self._flat[i])
        else:
            self._session.strategy.merge.settle_(then, self._flat[i])

    def enter(self, bring: Callable[[str, Tensor], Tensor]) -> None:
        """Go on from what a server has; `bring` tells it of a lot, and says what it has of it."""
        for i, lot in enumerate(self._session.lots):
            self._then[i].copy_(bring(lot.name, self._then[i]))
            self._write(i, self._then[i])

    # ---- rounds ---------------------------------------------------------------------------------------

    def _round(self, step: int, due: Sequence[int]) -> None:
        session, rounds = self._session, self._session.strategy.rounds
        lots = [i for part in due for i in self._parts[part]]
        read: set[int] = set()
        for way in [way for way in self.under_way if set(way.lots) & set(lots)]:
            self._land(way, step, leaves=rounds.late)
            read |= set(way.lots) if rounds.late else set()
        if rounds.late:
            self.facts.tell_times(step)
        lands = rounds.lands(step, session.memory) if rounds.late else session.strategy.overlap.lands(step)
        way = self._leave(step, lots, lands, read)
        self.facts.tell(step, way.flight, [self._flat[i] for i in lots])
        if way.lands <= step:
            self._land(way, step)
            everything = len(lots) == len(session.lots)
            self._met_at = step + 1 if everything and session.strategy.merge.meets else None

    def _leave(self, step: int, lots: Sequence[int], lands: int, read: Collection[int] = ()) -> UnderWay:
        """Start a round. `read`: the lots whose progress is there already."""
        session = self._session
        for i in lots:
            flat, mine = self._flat[i], self._mine[i]
            if i not in read:
                self._read(i, flat)
                flat.sub_(self._then[i])
            if mine is not None:
                mine.copy_(flat)
        self.facts.measure([self._flat[i] for i in lots])
        flight = session.begin(lots)
        for i in lots:
            if self._share != 1.0:
                self._flat[i].mul_(self._share)
            session.submit(i, self._flat[i], lambda: None, self._mine[i] if self._unsent else None)
        way = UnderWay(tuple(lots), step, lands, flight)
        self.under_way.append(way)
        return way

    def _land_until(self, step: int, every: bool = False) -> None:
        for way in [way for way in self.under_way if every or way.lands <= step]:
            self._land(way, step)

    def _land(self, way: UnderWay, step: int, leaves: bool = False) -> None:
        """Apply an answer. `leaves`: what leaves next is the progress as it was before."""
        session = self._session
        if way.flight is not None:
            with self.facts.waits():
                session.wait(way.flight)
        lag = max(0, step - way.step)
        at = Landing(len(session.ranks), lag, self._lr(), session.parties)
        session.tally.applied(at.lag)
        self.facts.flown(way.flight, at.lag)
        parted = at.lag > 0 and session.by_node and session.strategy.rounds.parted(step, session.memory)
        for i in way.lots:
            then = self._then[i]
            now = self._now[then.dtype][: len(then)]
            self._read(i, now)
            if leaves:
                before = self._before[then.dtype][: len(then)].copy_(now)
            if parted:
                session.ask(partial(say, now, NODE), "node")
            session.strategy.merge.apply_(now, then, self._flat[i], self._mine[i], self._states[i], at)
            self._write(i, now)
            if leaves:
                torch.sub(before, then, out=self._flat[i])
        self._end(way)

    def _end(self, way: UnderWay) -> None:
        self.under_way.remove(way)
        self.landed([slot.name for i in way.lots for slot in self._session.lots[i].slots])

    def _read(self, i: int, flat: Tensor) -> None:
        for p, start, stop in self._places[i]:
            flat[start:stop] = p

    def _write(self, i: int, flat: Tensor) -> None:
        with torch.no_grad():
            for p, start, stop in self._places[i]:
                p.copy_(flat[start:stop])

    # ---- what it keeps --------------------------------------------------------------------------------

    def kept(self) -> dict[tuple[str, str], Kept]:
        """All that it keeps, by (parameter, field), as views; of what may be under way, all the time.

        torch.distributed.checkpoint loads into what is there.
        """
        found = self._fields(enumerate(self._then), COMMON)
        for i, state in enumerate(self._states):
            for field, tensor in state.items():
                found |= self._fields([(i, tensor)], MERGE + field)
        if self._late:
            found |= self._fields(enumerate(self._flat), MEAN)
            found |= self._fields([(i, each) for i, each in enumerate(self._mine) if each is not None], MINE)
        return found

    def _fields(self, tensors: Iterable[tuple[int, Tensor]], field: str) -> dict[tuple[str, str], Kept]:
        return {
            (slot.name, field): Kept(flat[slot.start : slot.stop], field != MINE, 0, slot.stop - slot.start)
            for i, flat in tensors
            for slot in self._session.lots[i].slots
        }


def _parts(session: Session, named: Mapping[str, Tensor]) -> list[list[int]]:
    """The lots of each part."""
    cut = enumerate(fragments(named, session.strategy.rounds.parts))
    homes = {name: part for part, names in cut for name in names}
    parts: list[list[int]] = [[] for _ in range(session.strategy.rounds.parts)]
    for i, lot in enumerate(session.lots):
        parts[homes[lot.slots[0].name]].append(i)
    return parts


def fragments(named: Mapping[str, Tensor], count: int) -> list[list[str]]:
    """The names in `count` parts of about equal size: neighbours together, the last layers first.

    Raises:
        AttachError: there are fewer names than parts.
    """
    if len(named) < count:
        raise AttachError(
            f"a model of {len(named)} parameters cannot be cut into {count} fragments: write fewer"
        )
    total, done = sum(p.numel() for p in named.values()), 0
    parts: list[list[str]] = [[]]
    for i, (name, p) in enumerate(reversed([*named.items()])):
        must = len(named) - i == count - len(parts)  # each of those left has a part of its own
        if parts[-1] and len(parts) < count and (must or done + p.numel() / 2 > total * len(parts) / count):
            parts.append([])
        parts[-1].append(name)
        done += p.numel()
    return parts


class OwnBuffers:
    """Takes over DDP's broadcast of buffers, which is a barrier across all nodes before every forward."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp: Any = ddp
        self._before = ddp.broadcast_buffers
        self._ddp.broadcast_buffers = False

    def restore(self) -> None:
        """Hand it back."""
        self._ddp.broadcast_buffers = self._before
