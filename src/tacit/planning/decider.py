"""How a strategy is chosen: the decider, the session that it gets, its choice, and how all ranks learn it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from tacit import checks, described
from tacit.errors import ConfigError, DecisionError, of_ranks
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.planning.candidates import Candidates
from tacit.strategy import AutoStrategy
from tacit.timelines import Timeline
from tacit.transports.process_groups import rank_in

FromAll = Callable[[Tensor], Tensor]
"""Gathers a tensor of each rank: one row a rank, in the same order on all of them. A collective call."""


@dataclass(frozen=True)
class Choice:
    """The chosen strategy, and the reasons.

    Attributes:
        algorithm: the strategy's text, such as "topk:ratio=0.01" or "ddp".
        reason: one line for people: what was chosen, why, and what it is expected to bring.
        seconds: the predicted seconds of a step.
        considered: every candidate, and its predicted seconds of a step; None: they cannot be predicted.
    """

    algorithm: str
    reason: str
    seconds: float
    considered: tuple[tuple[str, float | None], ...] = ()

    def __post_init__(self) -> None:
        checks.real("seconds", self.seconds, "write the seconds that a step is predicted to take", above=0.0)

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON; numbers that are not finite are None."""
        return {**asdict(self), "considered": [[text, _finite(each)] for text, each in self.considered]}


class ChoosingSession(Protocol):
    """The session whose strategy a decider chooses.

    Attributes:
        strategy: says which strategies may be chosen.
        ranks: the ranks of the world that train the model, in order.
    """

    strategy: AutoStrategy
    ranks: list[int]

    @property
    def options(self) -> AttachSpec:
        """What is at work, and on what: model, optimizers, parameters by name, process group."""

    @property
    def levels(self) -> Sequence[Level]:
        """The levels of the strategy at work; their sessions know the times of rounds and steps."""

    def candidates(self) -> Candidates:
        """The strategies that may be chosen here; and the others, with reasons. No collective call."""

    def from_all(self, mine: Tensor) -> Tensor:
        """Gather a tensor (on the host, of one shape) from all `ranks`, one row each. A collective call."""

    def timeline(self) -> Timeline:
        """When this rank computed and waited."""


class Decider(Protocol):
    """Chooses a strategy by what was measured.

    Attributes:
        steps: how many steps of plain averages are to be measured before it is asked.
    """

    steps: int

    def begin(self, session: ChoosingSession) -> None:
        """Begin to measure steps; called on every rank after the same step."""

    def measure(self, session: ChoosingSession) -> int | None:
        """Evaluate the measured steps, and measure more; called on every rank after the same step.

        It may call collectives, as nothing is under way.

        Returns:
            How many further steps it wants to see before it is called again. None or 0: it can decide.
        """

    def decide(self) -> Choice:
        """Choose; called on the first rank only."""


def measured(decider: Decider, session: ChoosingSession) -> int:
    """Measure on all ranks. A collective call.

    Args:
        decider: this rank's; the same on all ranks.
        session: at work, with nothing under way.

    Returns:
        The number of further steps that a rank wants to see first; equal on all ranks.

    Raises:
        DecisionError: a rank could not measure; all ranks raise it.
    """
    name, error, more = type(decider).__name__, None, 0
    try:
        more = decider.measure(session) or 0
        checks.whole(f"{name}.measure()", more, 0, None, "return a number of further steps, or None")
    except Exception as raised:
        error = raised
    failures = from_all_texts(session.from_all, "" if error is None else _words(error))
    if any(failures):
        found = {rank: each for rank, each in zip(session.ranks, failures, strict=True) if each}
        _refuse(f"{name} could not measure on {of_ranks(found)}: {next(iter(found.values()))}", error)
    return int(session.from_all(torch.tensor([more])).max())


def decided(decider: Decider, session: ChoosingSession) -> Choice:
    """Choose on the first rank, for all. A collective call; arguments as of `measured`.

    Raises:
        DecisionError: the first rank could not choose; all ranks raise it.
    """
    error, text = None, ""
    if rank_in() == session.ranks[0]:
        try:
            text = json.dumps({"choice": _checked(decider.decide()).to_json()})
        except Exception as raised:
            error = raised
            text = json.dumps({"error": _words(raised)})
    told = json.loads(from_all_texts(session.from_all, text)[0])
    if "error" in told:
        name = type(decider).__name__
        _refuse(f"{name} could not choose on rank {session.ranks[0]}: {told['error']}", error)
    choice: Choice = described.read(told["choice"], Choice)
    return choice


def _checked(choice: object) -> Choice:
    if not isinstance(choice, Choice):
        raise ConfigError(f"decide() gave {choice!r:.60}, which is no Choice")
    return choice


def _refuse(why: str, cause: Exception | None) -> NoReturn:
    raise DecisionError(
        f"auto: {why}. Name an algorithm in its place, such as 'dense', or go on without tacit"
    ) from cause


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def from_all_texts(from_all: FromAll, mine: str) -> list[str]:
    """Gather a text from each rank, in the order of `from_all`. A collective call."""
    data = mine.encode()
    sizes = from_all(torch.tensor([len(data)])).view(-1).tolist()
    if not any(sizes):
        return [""] * len(sizes)
    row = torch.zeros(max(sizes), dtype=torch.uint8)
    row[: len(data)] = torch.tensor([*data], dtype=torch.uint8)
    rows = from_all(row)
    return [bytes(each[:size].tolist()).decode() for each, size in zip(rows, sizes, strict=True)]
