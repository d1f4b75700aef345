"""What members agree on: who takes part in a period of training, and what each said of itself."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from tacit import described
from tacit.described import Between, Whole

GONE = "gone"
"""What a member that has left waits for."""


@dataclass(frozen=True)
class RankArrival:
    """What a rank of a member says of itself.

    Attributes:
        round: how many rounds it has finished.
        acted: whether what follows the member's last step is over.
        address: where those that watch it connect to; "": nowhere.
        port: of that address.
        schedule: the state of its rounds' schedules, as in a checkpoint; "": it has none yet.
    """

    round: Whole = 0
    acted: bool = True
    address: str = ""
    port: Whole = 0
    schedule: str = ""


@dataclass(frozen=True)
class MemberArrival:
    """What a member says of itself when it arrives for a period.

    Attributes:
        id: unique to this replica, as long as it lives.
        name: for logs and errors.
        ready: whether it has a state of the period before; else it takes that of another.
        step: how many steps it has taken, with the one in hand.
        closing: whether it has no more steps to take.
        known: the number of the last period that it knows of.
        weight: of it in means; 0: none was given.
        says: what its sampler says of the samples that it has taken.
        ranks: what each of its ranks says; it has one, or as many as FSDP2 shards it among.
    """

    id: str
    name: str
    ready: bool = False
    step: Whole = 0
    closing: bool = False
    known: Whole = 0
    weight: Annotated[float, Between(0)] = 0.0
    says: dict[str, Any] = field(default_factory=dict)
    ranks: list[RankArrival] = field(default_factory=lambda: [RankArrival()])

    def progress(self, rank: int) -> tuple[int, int, bool]:
        """How far a rank of it is, for comparisons."""
        return self.ranks[rank].round, self.step, self.ranks[rank].acted


@dataclass(frozen=True)
class Period:
    """A time in which the same members take part.

    Attributes:
        number: from 1.
        members: in the order of their ranks.
        sources: for each rank of a member whose state those of the others take, if they have not come as far.
        said: what the sampler of each member of the period before has said last, also of one that is gone.
        lost: how many steps those that are gone had taken since their last rounds.
    """

    number: Whole = 0
    members: list[MemberArrival] = field(default_factory=list)
    sources: list[Whole] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)
    lost: Whole = 0

    def place_of(self, id: str) -> int:
        """The rank of a member, or -1."""
        return next((i for i, each in enumerate(self.members) if each.id == id), -1)

    def behind(self, rank: int) -> list[int]:
        """The members of which this rank takes the source's state, by their places."""
        source = self.sources[rank]
        round = self.members[source].ranks[rank].round
        return [
            place
            for place, each in enumerate(self.members)
            if place != source and not (each.ready and each.ranks[rank].round == round)
        ]

    def givers(self, rank: int) -> dict[int, int]:
        """Whose state each member takes that this rank's source is ahead of, by their places.

        All that are exactly where the source is share this out.
        """
        behind, source = self.behind(rank), self.members[self.sources[rank]]
        able = [
            place
            for place, each in enumerate(self.members)
            if each is source
            or (place not in behind and each.ready and each.progress(rank) == source.progress(rank))
        ]
        return {place: able[i % len(able)] for i, place in enumerate(behind)}

    def reached(self, rank: int) -> tuple[int, bool]:
        """The step after which all go on, and whether what follows it is still to come on this rank."""
        step, source = max(self.members[each].step for each in self.sources), self.members[self.sources[rank]]
        return step, source.step == step and not source.ranks[rank].acted

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
        period: the number of the period that it is in.
        step: how many steps it has taken.
        waits: what it waits for all others to do: "close" or "sync"; "": nothing.
        says: as in `MemberArrival`.
        begun: how many rounds it has begun.
        in_round: whether one of them is under way.
        unsent: how many steps it has taken since its last finished round.
        extra: how many it has taken beyond its periods, which `step` does not count.
    """

    beat: Whole = 0
    period: Whole = 0
    step: Whole = 0
    waits: str = ""
    says: dict[str, Any] = field(default_factory=dict)
    begun: Whole = 0
    in_round: bool = False
    unsent: Whole = 0
    extra: Whole = 0


def following(
    now: Period, there: Mapping[str, MemberArrival], gone: Mapping[str, Life | None], most: int
) -> Period:
    """The period after `now`: those of its members that have arrived, in its order, then the newcomers.

    A round may have ended on some ranks of a member, and failed on others, so each rank has a source. Where
    answers are applied late the sources may have taken unequal numbers of steps.
    """
    old = [there[each.id] for each in now.members if each.id in there]
    ready = [each for each in old if each.ready]
    ranks = range(max((len(each.ranks) for each in there.values()), default=1))
    firsts = [max(ready, key=lambda each: each.progress(rank)) for rank in ranks] if ready else []
    # Whoever has closed behind one that has not acted would miss its next round.
    passed = any(not each.ranks[rank].acted for rank, each in enumerate(firsts))
    stay = [each for each in old if not (each.closing and passed)]
    new = [each for id, each in there.items() if now.place_of(id) < 0 and not each.closing]
    by_name: dict[str, MemberArrival] = {}
    for each in (*stay, *new):
        by_name.setdefault(each.name, each)  # the second one of a name is refused once the first is at work
    members = [*by_name.values()][:most]
    last = {id: life.says for id, life in gone.items() if life is not None}
    last |= {id: each.says for id, each in there.items()}
    # What was said of a training whose state nobody has any more is not of the one that begins.
    said = [last[each.id] for each in now.members if each.id in last] if ready else []
    sources = [members.index(each) if each in members else 0 for each in firsts] or [0 for _ in ranks]
    lost = sum(life.unsent for life in gone.values() if life is not None)
    # A store that was started again may have got the record before one that some had read already.
    number = max([now.number, *(each.known for each in there.values())]) + 1
    return Period(number, members, sources, said, lost)


def form() -> str:
    """A checksum of what these texts consist of: versions of tacit with others cannot read each other's."""
    kinds = [
        f"{each.name}: {each.type}"
        for of in (Period, MemberArrival, RankArrival, Life)
        for each in fields(of)
    ]
    return f"{zlib.crc32(' '.join(kinds).encode()):08x}"
