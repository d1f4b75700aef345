"""What members agree on: who takes part in a period of training, and what each said of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from tacit import described
from tacit.described import Whole

GONE = "gone"
"""What a member that has left waits for."""


@dataclass(frozen=True)
class MemberArrival:
    """What a member says of itself when it arrives for a period.

    Attributes:
        id: unique to this process.
        name: for logs and errors.
        ready: whether it has a state of the period before; else it takes that of another.
        round: how many rounds it has finished.
        step: how many steps it has taken, with the one in hand.
        acted: whether what follows that step is over.
        closing: whether it has no more steps to take.
        says: what its sampler says of the samples that it has taken.
        address: where those that watch it connect to; "": nowhere.
        port: of that address.
    """

    id: str
    name: str
    ready: bool = False
    round: Whole = 0
    step: Whole = 0
    acted: bool = True
    closing: bool = False
    says: dict[str, Any] = field(default_factory=dict)
    address: str = ""
    port: Whole = 0

    @property
    def progress(self) -> tuple[int, int, bool]:
        """How far it is, for comparisons."""
        return self.round, self.step, self.acted


@dataclass(frozen=True)
class Period:
    """A time in which the same members take part.

    Attributes:
        number: from 1.
        members: in the order of their ranks.
        source: the rank whose state the others take, if they have not come as far.
        said: what the sampler of each member of the period before has said last, also of one that is gone.
    """

    number: Whole = 0
    members: list[MemberArrival] = field(default_factory=list)
    source: Whole = 0
    said: list[dict[str, Any]] = field(default_factory=list)

    def place_of(self, id: str) -> int:
        """The rank of a member, or -1."""
        return next((i for i, each in enumerate(self.members) if each.id == id), -1)

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> Period:
        """From `to_text`; the empty text is the time before the first period."""
        found: Period = described.read(text, Annotated[Period, described.JSON], "the members' record")
        return found


@dataclass(frozen=True)
class Life:
    """A member's sign of life.

    Attributes:
        beat: counts them.
        step: how many steps it has taken.
        waits: what it waits for all others to do: "close" or "sync"; "": nothing.
        says: as in `MemberArrival`.
        begun: how many rounds it has begun.
        in_round: whether one of them is under way.
    """

    beat: Whole = 0
    step: Whole = 0
    waits: str = ""
    says: dict[str, Any] = field(default_factory=dict)
    begun: Whole = 0
    in_round: bool = False


def following(
    now: Period, there: Mapping[str, MemberArrival], gone: Mapping[str, Life | None], most: int
) -> Period:
    """The period after `now`: those of its members that have arrived, in its order, then the newcomers."""
    old = [there[each.id] for each in now.members if each.id in there]
    first = max((each for each in old if each.ready), key=lambda each: each.progress, default=None)
    passed = first is not None and not first.acted  # whoever has closed behind it would miss its next round
    stay = [each for each in old if not (each.closing and passed)]
    new = [each for id, each in there.items() if now.place_of(id) < 0 and not each.closing]
    members = [*stay, *new][:most]
    last = {id: life.says for id, life in gone.items() if life is not None}
    last |= {id: each.says for id, each in there.items()}
    said = [last[each.id] for each in now.members if each.id in last]
    source = members.index(first) if first is not None and first in members else 0
    return Period(now.number + 1, members, source, said)
