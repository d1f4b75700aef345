"""The progress door: after `optimizer.step`, where replicas have moved on their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from tacit import ranges
from tacit.contracts import NODE, Landing, State
from tacit.doors.buffers import Buffers
from tacit.doors.facts import Facts
from tacit.doors.replica import Replica, wide_like
from tacit.errors import AttachError
from tacit.exchanges import say
from tacit.lots import Kept, Slot
from tacit.session import Flight, Session

COMMON = "last common point"
MERGE = "merge."
MEAN, MINE = "arrived", "sent"
"""The state fields of a round that is under way: its mean, once it is there, and this rank's own part."""
PUT = "put"
"""Where a replica that keeps something of its own was put, before it was rounded to the parameters' type."""
RANKS_OWN = (MINE, PUT)
"""Fields that each rank has its own of."""


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
        named: the parameters, looked up anew in each round; where nobody waits for others, buffers too.
        share: how much this rank counts for in the mean; 1 on average over the ranks.
        rates: reads the present learning rate of each parameter.
        buffers: averaged beside the parameters.
        variances: names of what is never below zero, and may be so at a server.
    """

    def __init__(
        self,
        session: Session,
        named: Mapping[str, Tensor],
        share: float = 1.0,
        rates: Callable[[], Mapping[str, float]] = dict,
        buffers: Buffers | None = None,
        variances: Collection[str] = (),
    ) -> None:
        self._session = session
        self._named, self._share, self._rates = named, share, rates
        self._buffers, self._variances = buffers, frozenset(variances)
        self.facts = Facts(session, lambda: max(rates().values(), default=0.0))
        self.landed: Callable[[list[str]], None] = lambda names: None
        """Called with the names to which a round's answer has just been applied."""
        self.follow_lots()

    def follow_lots(self, under_way: Iterable[UnderWay] = (), met: int = 0) -> None:
        """Take the present parameters as the common point, in the session's present lots.

        `met`: after how many steps they were last equal on all ranks, by the checkpoint that is loaded.
        """
        session, lots = self._session, self._session.lots
        rounds, merge = session.strategy.rounds, session.strategy.merge
        self._late = session.strategy.overlap.lands(0) > 0 or rounds.late
        keeps = merge.sees_mine or (self._late and merge.needs_mine)
        self._unsent = merge.keeps_unsent
        self._then = [wide_like(lot) for lot in lots]
        self._replica = Replica(lots, self._named, self._then, stays=merge.meets and not self._late)
        self._flat = [torch.zeros_like(lot.like(lot.device)) for lot in lots]
        self._mine = [torch.zeros_like(then) if keeps else None for then in self._then]
        self._owed = [
            None if not self._unsent else mine if flat.dtype == then.dtype else torch.zeros_like(flat)
            for flat, mine, then in zip(self._flat, self._mine, self._then, strict=True)
        ]
        self._states: list[State] = [merge.init(then) for then in self._then]
        largest = {lot.dtype: lot for lot in sorted(lots, key=lambda lot: lot.numel)}
        self._before = {dtype: wide_like(lot) for dtype, lot in largest.items() if rounds.late}
        self._parts = _parts(session, self._named)
        if self._buffers is not None:
            self._buffers.forget()
        self._met_at: int | None = None
        self._met_before = met
        self._same_at: int | None = None
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
        for i, then in enumerate(self._then):
            self._replica.stand(i, then)

    @property
    def apart(self) -> int | None:
        """How many steps the replicas have taken since they were equal; None where they are."""
        session = self._session
        met = self.last_met
        if session.step == met or session.strategy.rounds.sleeps(session.step, session.memory):
            return None
        return session.step - met

    @property
    def last_met(self) -> int:
        """After how many steps the replicas were last equal, as far as that is known."""
        return self._met_before if self._met_at is None else self._met_at

    def sync(self) -> None:
        """A round of all parts, now: afterwards every replica stands at the common point.

        That is the mean of the replicas, or what the merge has in its place. What is under way lands first.
        None where no step was taken since the last time.

        Raises:
            RoundError: the round failed; no parameter has changed.
        """
        session = self._session
        if session.step != self._met_at:
            with ranges.within(session.strategy.name, "sync"):
                self._sync()
            self._met_at = session.step
        if self._buffers is not None and session.step != self._same_at:
            self._buffers.meet_others()
            self._same_at = session.step

    def _sync(self) -> None:
        session, last = self._session, self._session.step - 1
        self._land_until(last, every=True)
        if session.strategy.rounds.sleeps(session.step, session.memory):
            self._start_here()
        if self._unsent:
            self._meet()
        else:
            self._meet_in_a_round(last)

    def _meet(self) -> None:
        """Average the replicas densely, with what they have not said."""
        session, scope = self._session, self._session.strategy.topology.scope
        for i, (lot, then) in enumerate(zip(session.lots, self._then, strict=True)):
            self._replica.progress(i, then, self._flat[i])
            session.ask(partial(say, self._flat[i], scope), lot.name, of=self._flat[i])
            self._replica.write(i, then.add_(self._replica.widened(i, self._flat[i])))
        if self._buffers is not None:
            self._buffers.meet()

    def _meet_in_a_round(self, last: int) -> None:
        way = self._leave(last, range(len(self._session.lots)), lands=last)
        if way.flight is not None:
            self._session.wait(way.flight)
        agreed = self._session.agree(self._flat)
        for i, then in enumerate(self._then):
            if agreed:
                then.copy_(self._flat[i])
            else:
                self._session.strategy.merge.settle_(then, self._replica.widened(i, self._flat[i]))
            self._replica.write(i, then)
        if self._buffers is not None:
            self._buffers.land(lag=0)
        self._end(way)

    def enter(self, bring: Callable[[str, Tensor], Tensor]) -> None:
        """Go on from what a server has; `bring` tells it of a lot, and says what it has of it."""
        for i, lot in enumerate(self._session.lots):
            self._replica.read(i, self._flat[i])
            self._then[i].copy_(bring(lot.name, self._flat[i]))
            self._replica.write(i, self._then[i])

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
        session, beside = self._session, self._beside(lots)
        if beside is not None:
            beside.collect()
        for i in lots:
            exact = self._flat[i] if i in read else self._replica.progress(i, self._then[i], self._flat[i])
            self._note_mine(i, exact)
        self.facts.measure([self._flat[i] for i in lots])
        flight = session.begin(lots)
        if beside is not None:
            beside.leave(flight)
        for i in lots:
            if self._share != 1.0:
                self._flat[i].mul_(self._share)
            session.submit(i, self._flat[i], lambda: None, self._owed[i])
        way = UnderWay(tuple(lots), step, lands, flight)
        self.under_way.append(way)
        return way

    def _note_mine(self, i: int, exact: Tensor) -> None:
        """Keep this rank's part, if the merge asks for it: what is sent, or what in the end is not."""
        mine, owed = self._mine[i], self._owed[i]
        if mine is None:
            return
        if owed is None or owed is mine:
            mine.copy_(self._flat[i])
        else:
            owed.copy_(self._flat[i])
            torch.sub(exact, self._replica.widened(i, owed), out=mine)  # rounding keeps it back

    def _beside(self, lots: Iterable[int]) -> Buffers | None:
        """The buffers, if they travel with these lots: they do with those of the last part."""
        return self._buffers if set(self._parts[-1]) & set(lots) else None

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
        rates = self._rates()
        at = Landing(len(session.ranks), lag, max(rates.values(), default=0.0), session.parties)
        session.tally.applied(at.lag)
        self.facts.flown(way.flight, at.lag)
        parted = at.lag > 0 and session.by_node and session.strategy.rounds.parted(step, session.memory)
        for i in way.lots:
            then, now = self._then[i], self._replica.now(i)
            if leaves:
                before = self._before[session.lots[i].dtype][: len(then)].copy_(now)
            if parted:
                self._meet_mates(i, now)
            self._apply(i, now, at, rates)
            self._replica.write(i, now)
            if leaves:
                self._flat[i].copy_(before.sub_(then))
        if (beside := self._beside(way.lots)) is not None:
            beside.land(at.lag)
        self._end(way)

    def _meet_mates(self, i: int, now: Tensor) -> None:
        """Overwrite `now` with the mean of the replicas of this node, which have drifted apart."""
        then = self._then[i]
        apart = self._replica.narrowed(i, now.sub_(then))
        self._session.ask(partial(say, apart, NODE), "node", of=apart)
        torch.add(then, self._replica.widened(i, apart), out=now)

    def _apply(self, i: int, now: Tensor, at: Landing, rates: Mapping[str, float]) -> None:
        """Have the merge apply the answer about a lot; if it goes by the learning rate, rate by rate."""
        merge, state, lot = self._session.strategy.merge, self._states[i], self._session.lots[i]
        mine, owed = self._mine[i], self._owed[i]
        if mine is not None and owed is not None and owed is not mine:
            mine.add_(self._replica.widened(i, owed))
        mean, then = self._replica.widened(i, self._flat[i]), self._then[i]
        for start, stop, lr in _runs(lot.slots, rates) if merge.by_rate else [(0, lot.numel, at.lr)]:
            cut = slice(start, stop)
            merge.apply_(
                now[cut],
                then[cut],
                mean[cut],
                None if mine is None else mine[cut],
                {field: each[cut] for field, each in state.items()},
                at._replace(lr=lr),
            )
        for slot in lot.slots:
            if slot.name in self._variances:
                now[slot.start : slot.stop].clamp_(min=0.0)

    def _end(self, way: UnderWay) -> None:
        self.under_way.remove(way)
        self.landed([slot.name for i in way.lots for slot in self._session.lots[i].slots])

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
            found |= self._fields(enumerate(self._mine), MINE)
        if self._late or not self._session.strategy.merge.meets:
            found |= self._fields(enumerate(self._replica.put), PUT)
        return found if self._buffers is None else found | self._buffers.kept()

    def _fields(
        self, tensors: Iterable[tuple[int, Tensor | None]], field: str
    ) -> dict[tuple[str, str], Kept]:
        shared = field not in RANKS_OWN
        return {
            (slot.name, field): Kept(flat[slot.start : slot.stop], shared, 0, slot.stop - slot.start)
            for i, flat in tensors
            if flat is not None
            for slot in self._session.lots[i].slots
        }


def _runs(slots: Sequence[Slot], rates: Mapping[str, float]) -> Iterator[tuple[int, int, float]]:
    """Stretches of a lot whose parameters have one learning rate."""
    for lr, run in groupby(slots, lambda slot: rates.get(slot.name, 0.0)):
        same = list(run)
        yield same[0].start, same[-1].stop, lr


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
