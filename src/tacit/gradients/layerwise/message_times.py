"""When the planned messages of `fusion` and `priority` were ready, left and came, once somebody asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from time import perf_counter
from typing import Protocol

from torch import Tensor

from tacit.gradients.layerwise.message_plan import MessagePlan
from tacit.session.buckets import parameter_of
from tacit.session.stats import KEPT
from tacit.timelines import PlannedMessage, Span

__all__ = ["MessageLog"]


class MessageInRound(Protocol):
    """A message in one round."""

    flat: Tensor


@dataclass(eq=False)
class _Times:
    """Of one message in one round, as `perf_counter` has them."""

    step: int
    nbytes: int
    names: Sequence[str]
    at: dict[str, float] = field(default_factory=dict)
    waits: list[Span] = field(default_factory=list)


class MessageLog:
    """Notes when messages were where, in the last rounds; nothing before `begin`.

    Messages are told apart as objects, one for each round. Training and the lane call it, each of its own.
    """

    def __init__(self) -> None:
        self._rounds: deque[list[_Times]] | None = None
        self._of: dict[object, _Times] = {}
        self._turns: Mapping[str, int] = {}

    def begin(self) -> None:
        """Note from the next round on."""
        if self._rounds is None:
            self._rounds = deque(maxlen=KEPT)

    def order_by(self, turns: Mapping[str, int]) -> None:
        """In which order the next forward pass needs the parameters; else backward's order, reversed."""
        self._turns = turns

    def next_round(self, step: int, messages: Sequence[MessageInRound], plan: MessagePlan | None) -> None:
        """These messages of this plan are the next to leave, in this order."""
        if self._rounds is None or plan is None:
            return
        pairs = zip(messages, plan.messages, strict=True)
        self._of = {each: _Times(step, each.flat.nbytes, names) for each, names in pairs}
        self._rounds.append([*self._of.values()])

    def ready(self, message: object) -> None:
        """Its last gradient is there."""
        self._note(message, "ready")

    def left(self, message: object) -> None:
        """It has its turn."""
        self._note(message, "left")

    def came(self, message: object) -> None:
        """Its mean is here."""
        self._note(message, "came")

    def _note(self, message: object, what: str) -> None:
        if (times := self._of.get(message)) is not None:
            times.at.setdefault(what, perf_counter())  # of two halves, the first that leaves

    def wait_for(self, message: object, over: Event) -> None:
        """Wait until it is over."""
        times = None if over.is_set() else self._of.get(message)
        if times is None:
            over.wait()
            return
        since = perf_counter()
        over.wait()
        times.waits.append(Span(since, perf_counter()))

    def messages(self) -> list[PlannedMessage]:
        """All that have come, round by round, by the turn in which the next forward pass needs them."""
        return [
            PlannedMessage(times.step, turn, _called(names), times.nbytes, **times.at, waits=(*times.waits,))
            for each in tuple(self._rounds or ())
            for turn, (times, names) in enumerate(self._by_turn(each))
            if "came" in times.at
        ]

    def _by_turn(self, times: Sequence[_Times]) -> list[tuple[_Times, list[str]]]:
        """The messages of a round with their parameters, both in the order of the next forward pass."""
        late = len(self._turns)
        backward = [name for each in times for name in each.names]
        turns = {
            name: (self._turns.get(parameter_of(name, self._turns), late), -i)
            for i, name in enumerate(backward)
        }
        sorted_names = [(each, sorted(each.names, key=turns.__getitem__)) for each in times]
        return sorted(sorted_names, key=lambda pair: turns[pair[1][0]])


def _called(names: Sequence[str]) -> str:
    """A message by the parameter of it that is needed first, and how many others it has."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
