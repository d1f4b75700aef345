"""The plain values of a session's state, and the checksums of its tensors.

The checksums are in the text of `last_equal`, as torch.distributed.checkpoint refuses an older checkpoint if
a key is new. It saves the text of one rank. If each rank has a separate text (see `own_replica`), the
checksums of tensors that are not shared are there, so that those of all ranks are saved. Files that ranks
save by torch.save, and what `join_states` makes of them, have the checksums of all tensors. A sharded model's
state has none: a rank has shards, which another layout cuts differently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Annotated, Any, TypeAlias, TypedDict

from torch import Tensor

from tacit import described
from tacit.described import JSON, Between, Duration, Positive, Whole
from tacit.errors import CheckpointError
from tacit.session import Session
from tacit.session.buckets import parameter_of, span_of

VERSION = 4
LAST_EQUAL = "last_equal"
CHECKSUMS = "checksums"
CHOICE = "auto"
"""The key of the text with the choice of `auto`; other sessions ignore it."""
OWN_OF = "own of "
"""The prefix of the key of a rank's text about its replica; the rank's name follows."""
_MOST_RANKS = 1 << 20

Buckets: TypeAlias = list[list[str]]


class ScaledSquares(TypedDict):
    """The state of `ScaledVariance.saved_state`."""

    replicas: Positive
    squares: dict[str, tuple[Duration, Duration, Annotated[int, Between(-1, 1 << 53)]]]


class KeptSince(TypedDict):
    """The state of `KeptVariance.saved_state`."""

    since: dict[str, Whole]


class OwnText(TypedDict):
    """The text of a rank about its replica.

    Attributes:
        listed: each (parameter or buffer, field) of its replica; with its number, if it is no tensor.
        checksums: the checksums of tensors that are not shared, by key.
    """

    listed: list[tuple[str, str, float | None]]
    checksums: dict[str, Whole]


@dataclass(frozen=True)
class SavedValues:
    """The plain values of a state, and their types; a list has a value for each level.

    Attributes:
        nodes: the ranks of each node; empty if it does not matter.
        layouts: DDP's buckets, if the session has not taken them over yet.
        pending_rounds: for each round under way its buckets, its step, and the step after which it is
            applied.
        last_equal: for each level whose replicas step alone: the number of steps after which they were last
            equal. It also has the checksums, by the keys of the tensors.
        variances: for each level that scales or freezes Adam's variance: its state.
        learning_rates: for each parameter the rate in whose units its residual is, and the largest so far.
    """

    version: int
    strategy: str
    strategy_without_rounds: str
    schedules: list[str]
    ranks: Annotated[int, Between(1, _MOST_RANKS)]
    nodes: list[list[Annotated[int, Between(0, _MOST_RANKS)]]]
    steps: list[Whole]
    rounds: list[Whole]
    buckets: list[Buckets]
    layouts: list[Buckets | None]
    topologies: list[str]
    schedule_state: Annotated[list[dict[str, float]], JSON]
    pending_rounds: Annotated[list[list[tuple[list[Whole], Whole, Whole]]], JSON]
    last_equal: Annotated[dict[str, Whole | dict[str, Whole]], JSON] = field(default_factory=dict)
    variances: Annotated[dict[str, ScaledSquares | KeptSince], JSON] = field(default_factory=dict)
    learning_rates: Annotated[list[dict[str, tuple[Duration, Duration]]], JSON] | None = None

    def last_equal_of(self, level: int) -> int:
        """The number of steps after which the replicas of a level were last equal."""
        found = self.last_equal.get(str(level), 0)
        return found if isinstance(found, int) else 0


def read(state: Mapping[str, Any]) -> SavedValues:
    """Read the values of a state, and check its tensors against their checksums.

    Raises:
        CheckpointError: it is no state of a session, or it is damaged.
    """
    names = [each.name for each in fields(SavedValues)]
    with refusing():
        found = {name: state[name] for name in names if name in state}
        values: SavedValues = described.read(found, SavedValues, "the state")
        levels = len(values.schedules)
        for name in (
            "steps",
            "rounds",
            "buckets",
            "layouts",
            "topologies",
            "schedule_state",
            "pending_rounds",
        ):
            if len(getattr(values, name)) != levels:
                raise ValueError(f"it has {levels} levels, and {name} of {len(getattr(values, name))}")
        if values.learning_rates is not None and len(values.learning_rates) != levels:
            raise ValueError(f"it has {levels} levels, and learning_rates of {len(values.learning_rates)}")
        if values.nodes and sum(map(len, values.nodes)) != values.ranks:
            raise ValueError(f"it has {values.ranks} ranks, and nodes of {sum(map(len, values.nodes))}")
        if any(isinstance(each, int) == (key == CHECKSUMS) for key, each in values.last_equal.items()):
            raise ValueError(f"{LAST_EQUAL} is {state[LAST_EQUAL]:.60}")
        owned = [own_text(state, key)["checksums"] for key in state if key.startswith(OWN_OF)]
        for key, told in chain(sums_of(state).items(), *(each.items() for each in owned)):
            if key in state and described.checksum(described.tensor(state[key], key, finite=False)) != told:
                raise ValueError(f"{key!r} is not what was saved")
    return values


@contextmanager
def refusing() -> Iterator[None]:
    """Turn an error of reading in the block into one that says that the state is damaged.

    Raises:
        CheckpointError: names the damaged value.
    """
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(
            f"this is no state of a tacit session, or it was damaged or cut short ({error}): load what "
            "state_dict gave, or an earlier checkpoint"
        ) from error


def state_of(saved: object) -> dict[str, Any]:
    """The saved state, if it is one of a session of this version.

    Raises:
        CheckpointError: it is no state, or of another version.
    """
    with refusing():
        plain: dict[str, Any] = described.read(saved, dict[str, Any], "the state")
        version = described.read(plain.get("version", VERSION), int, "version")
    if version != VERSION:
        older = "train on with the tacit that wrote it, or start without the session's state"
        raise CheckpointError(
            f"the checkpoint is of version {version}, and this tacit reads version {VERSION}: "
            + ("update tacit" if version > VERSION else older)
        )
    return plain


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with the checksums of its tensors."""
    sums = {key: described.checksum(x) for key, x in state.items() if isinstance(x, Tensor)}
    found = dict(state)
    for key in (key for key in state if key.startswith(OWN_OF)):
        mine = {each: sums.pop(each) for each in [*sums] if not each.startswith("shared/")}
        found[key] = json.dumps({**own_text(state, key), CHECKSUMS: mine})
    return with_sums(found, sums)


def own_text(state: Mapping[str, Any], key: str) -> OwnText:
    """The text of a rank about its replica.

    Raises:
        ValueError: the text is damaged.
    """
    found: OwnText = described.read(state[key], Annotated[OwnText, JSON], key)
    return found


def with_sums(state: Mapping[str, Any], sums: Mapping[str, int]) -> dict[str, Any]:
    """The state with these checksums."""
    told = json.loads(state.get(LAST_EQUAL, "{}"))
    return {**state, LAST_EQUAL: json.dumps({**told, CHECKSUMS: sums})}


def sums_of(state: Mapping[str, Any]) -> dict[str, int]:
    """The checksums of the state's tensors; none in older states.

    Raises:
        ValueError: their text is damaged.
    """
    kind = Annotated[dict[str, Whole | dict[str, Whole]], JSON]
    sums = described.read(state.get(LAST_EQUAL, "{}"), kind, LAST_EQUAL).get(CHECKSUMS, {})
    return {key: told for key, told in sums.items() if key in state} if isinstance(sums, dict) else {}


def check_buckets(buckets: Sequence[Sequence[str]], named: Mapping[str, Tensor]) -> None:
    """Check that each entry of these parameters is in exactly one bucket.

    Raises:
        ValueError: it is not.
    """
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in named}
    for bucket in buckets:
        types = set()
        for member in bucket:
            if parameter_of(member, named) not in named:
                raise ValueError(f"its buckets have {member!r:.60}, which is no parameter here")
            name, start, stop = span_of(member, named)
            spans[name].append((start, stop))
            types.add((named[name].dtype, named[name].device))
        if len(types) > 1:
            raise ValueError(f"a bucket of it has parameters of {len(types)} types")
    for name, found in spans.items():
        ends = [0, *(stop for _, stop in sorted(found))]
        if [start for start, _ in sorted(found)] != ends[:-1] or ends[-1] != named[name].numel():
            raise ValueError(f"its buckets do not hold each entry of {name!r} once")


def check_level(values: SavedValues, i: int, session: Session) -> None:
    """Check the counters and the schedule state of a level in a state of the attached strategy.

    Raises:
        ValueError: a value is impossible.
    """
    steps, state = values.steps[i], values.schedule_state[i]
    if values.schedules[i] == repr(session.strategy.rounds):
        lacking = sorted(session.strategy.rounds.start().keys() - state.keys())
        if lacking:
            raise ValueError(f"schedule_state lacks {lacking[0]!r}")
        if state.get("period", 1) < 1 or min(state.get("delay", 0), state.get("local", 0)) < 0:
            raise ValueError(f"schedule_state has rounds that cannot be: {state}")
    for buckets, step, _ in values.pending_rounds[i]:
        if step > steps or max(buckets, default=-1) >= len(values.buckets[i]):
            raise ValueError(f"a round is under way of step {step} of {steps}, and of the buckets {buckets}")


def expected(value: Any, key: str, like: Tensor | None) -> Tensor:
    """The tensor of a state, if it has the shape and type of `like`; None: this rank has no such tensor.

    Raises:
        ValueError: it has another shape or type.
    """
    finite = not key.rpartition("/")[2].startswith("buffer_")  # a mask may hold infinities
    if like is None:
        return described.tensor(value, key, finite=finite)
    dtypes = described.FLOATS if like.is_floating_point() else (like.dtype,)
    found = described.tensor(value, key, dtypes=dtypes, finite=finite).to(like.dtype)
    return described.tensor(found, f"{key} in {like.dtype}", finite=finite)
