"""Records when each planned message of `fusion` and `priority` was ready, sent and complete.

Nothing is recorded until the timeline is first asked for.
"""

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
from tacit.session.round_costs import KEPT
from tacit.timelines import PlannedMessage, Span


class MessageInRound(Protocol):
    """A planned message in one round: a new object in every round."""

    flat: Tensor


@dataclass(eq=False)
class _Times:
    """The times of one message in one round, by `time.perf_counter`.

    Attributes:
        step: the number of steps before the round.
        names: the message's parameters, in the order of backward.
        at: "ready", "left" (sent) and "came" (complete) -> the time.
        waits: the spans in which training waited for the message.
    """

    step: int
    nbytes: int
    names: Sequence[str]
    at: dict[str, float] = field(default_factory=dict)
    waits: list[Span] = field(default_factory=list)


class MessageLog:
    """The times of the messages of the last rounds, as `Attached.timeline` reports them.

    A message is identified by its object, which is another in every round. The methods may be called by the
    threads of training and of the lane: no two threads note the same event of a message.
    """

    def __init__(self) -> None:
        self._rounds: deque[list[_Times]] | None = None
        self._of: dict[object, _Times] = {}
        self._turns: Mapping[str, int] = {}

    def begin(self) -> None:
        """Record from the next round on; before, all other methods do nothing."""
        if self._rounds is None:
            self._rounds = deque(maxlen=KEPT)

    def order_by(self, turns: Mapping[str, int]) -> None:
        """Set the order in which a forward pass uses the parameters; by default backward's, reversed.

        Args:
            turns: parameter -> its position in a forward pass, from 0.
        """
        self._turns = turns

    def next_round(self, step: int, messages: Sequence[MessageInRound], plan: MessagePlan | None) -> None:
        """Begin to record a round.

        Args:
            step: the number of steps before it.
            messages: one object for each message of the plan, in the order in which they are sent.
            plan: the plan; None: there is none yet, and nothing is recorded.
        """
        if self._rounds is None or plan is None:
            return
        pairs = zip(messages, plan.messages, strict=True)
        self._of = {each: _Times(step, each.flat.nbytes, names) for each, names in pairs}
        self._rounds.append([*self._of.values()])

    def ready(self, message: object) -> None:
        """Record that backward has computed the message's last gradient."""
        self._note(message, "ready")

    def left(self, message: object) -> None:
        """Record that the message is sent."""
        self._note(message, "left")

    def came(self, message: object) -> None:
        """Record that the message's mean is complete."""
        self._note(message, "came")

    def _note(self, message: object, what: str) -> None:
        if (times := self._of.get(message)) is not None:
            times.at.setdefault(what, perf_counter())  # only the first of two halves counts

    def wait_for(self, message: object, over: Event) -> None:
        """Wait for `over`, which is set when the message is complete, and record the wait."""
        times = None if over.is_set() else self._of.get(message)
        if times is None:
            over.wait()
            return
        since = perf_counter()
        over.wait()
        times.waits.append(Span(since, perf_counter()))

    def messages(self) -> list[PlannedMessage]:
        """The complete messages, round by round, in the order in which a forward pass needs them."""
        return [
            PlannedMessage(times.step, turn, _called(names), times.nbytes, **times.at, waits=(*times.waits,))
            for each in tuple(self._rounds or ())
            for turn, (times, names) in enumerate(self._by_turn(each))
            if "came" in times.at
        ]

    def _by_turn(self, times: Sequence[_Times]) -> list[tuple[_Times, list[str]]]:
        """The messages of a round with their parameters, both in the order of a forward pass."""
        late = len(self._turns)
        backward = [name for each in times for name in each.names]
        turns = {
            name: (self._turns.get(parameter_of(name, self._turns), late), -i)
            for i, name in enumerate(backward)
        }
        sorted_names = [(each, sorted(each.names, key=turns.__getitem__)) for each in times]
        return sorted(sorted_names, key=lambda pair: turns[pair[1][0]])


def _called(names: Sequence[str]) -> str:
    """A name for a message: its first parameter, and the number of others."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
