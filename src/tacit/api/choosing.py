"""`auto` at work: it measures steps, lets a decider choose a strategy, goes on with that, and watches it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer

from tacit import checks, described
from tacit.api.at_work import AtWork
from tacit.checkpoint import saved_values
from tacit.checkpoint.saved_values import CHOICE, refusing, state_of
from tacit.contracts import WORLD
from tacit.described import JSON, Duration, Whole
from tacit.errors import AttachError, CheckpointError, ConfigError, DecisionError
from tacit.exchange.joined_requests import gather
from tacit.levels.spec import AttachSpec
from tacit.optimizer_hooks.global_hooks import StepsHandle, after_steps
from tacit.planning.candidates import CandidateCheck, Candidates
from tacit.planning.decider import Choice, ChoosingSession, Decider, decided, measured
from tacit.session import in_turn
from tacit.strategy import AutoStrategy
from tacit.timelines import Timeline, one_after_another
from tacit.transports.process_groups import gathered, rank_in, ranks_of

_log = logging.getLogger("tacit")

BLOCKS = 5
"""The least number of periods of the strategy over whose median the time of a step is taken."""


class _SavedChoice(TypedDict):
    """The choice, as a checkpoint stores it.

    Attributes:
        begun: after how many steps the strategy at work was attached.
        due: after how many steps it is examined again; None: never.
    """

    begun: Whole
    due: Whole | Duration | None
    choice: Choice | None


@dataclass(frozen=True)
class _Ended:
    """What is kept of a strategy that was at work before: its numbers and its timeline.

    Attributes:
        begun: after how many steps it was attached.
    """

    begun: int
    metrics: Mapping[str, float]
    timeline: Timeline


class Choosing:
    """Strategies at work one after another, by a decider's choice; it reports what `AtWork` does.

    After a step that is the same on all ranks, the strategy at work is ended as `close` ends it, and the
    chosen one is attached.

    Args:
        first: the strategy that is at work while steps are measured.
        given: the arguments of the user's `attach`.
        strategy: the strategies that may be chosen, and how they are watched.
        decider: chooses; the same on all ranks.

    Attributes:
        now: the strategy at work.
        choice: the chosen strategy with the reasons; None before.
        ranks: the ranks of the world that train the model.
    """

    def __init__(self, first: AtWork, given: AttachSpec, strategy: AutoStrategy, decider: Decider) -> None:
        self.now, self._strategy, self._decider = first, strategy, decider
        self.choice: Choice | None = None
        self._ended: tuple[_Ended, ...] = ()
        self._begun, self._due, self._measuring = 0, float(decider.steps), True
        self._observes = False
        self._handle: StepsHandle | None = None
        self._check = CandidateCheck(given)
        found = _ranks(given)
        self.ranks = sorted(found)
        self._order = [found.index(rank) for rank in self.ranks]

    def begin(self, session: ChoosingSession, closed: Callable[[], bool], leave: Callable[[], None]) -> None:
        """Begin to measure.

        Args:
            session: for the decider.
            closed: whether the session has ended.
            leave: ends it without the other ranks.
        """
        self._session, self._closed, self._leave = session, closed, leave
        self._decider.begin(session)
        # After the optimizer's hooks: torch does not iterate over them any more, so they may be exchanged.
        self._handle = after_steps(self._stepped)

    # ---- for a decider ----------------------------------------------------------------------

    def candidates(self) -> Candidates:
        """The strategies that may be chosen here; and those that may not, with the reason."""
        return self._check.candidates(self._strategy.accept)

    def from_all(self, mine: Tensor) -> Tensor:
        """Gather a tensor (on the host, of one shape) from all of `ranks`. A collective call.

        Returns:
            One row a rank.
        """
        options, far = self.now.spec, self.now.levels[-1].session
        # By the session's exchange where there is one, as that ends with an error where a peer is lost.
        rows = (
            gathered(mine, options.group)
            if options.leaves_ddp_alone
            else far.ask(lambda: gather(mine, WORLD), CHOICE)
        )
        everyone = torch.stack(rows)
        if options.sharded is None or options.sharded.near is None:
            return everyone
        return torch.cat(gathered(everyone, options.sharded.near))[self._order]

    # ---- what it reports --------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """As `AtWork.metrics`, with the sums of all strategies that were at work.

        `compute_share`, `lag` and the numbers of each level are those of the strategy that is at work.
        """
        numbers = in_turn([each.metrics for each in self._ended], self.now.metrics())
        return {**numbers, "steps": self._steps}

    def timeline(self) -> Timeline:
        """As `AtWork.timeline`, of all strategies that were at work, one after another."""
        parts = [(each.begun, each.timeline) for each in self._ended]
        return replace(
            one_after_another([*parts, (self._begun, self.now.timeline())]), algorithm=self._strategy.name
        )

    @property
    def active_path(self) -> str:
        """What runs, in one sentence, and why."""
        return f"{self.now.active_path}; {self._why()}"

    def describe(self) -> str:
        """What runs, in lines, and why: every candidate with the predicted seconds of a step."""
        lines = [self.now.describe(), "", self._why()]
        for text, seconds in () if self.choice is None else self.choice.considered:
            lines.append(f"  {text}: {'not predicted' if seconds is None else f'{seconds:.4g} s a step'}")
        lines += [f"  {text}: left out, as {why}" for text, why in self.candidates().left_out]
        return "\n".join(lines)

    def _why(self) -> str:
        if self.choice is None:
            return f"{self._strategy.name!r} chooses after step {self._due:g} at the earliest"
        return f"chosen by {self._strategy.name!r}: {self.choice.reason}"

    def observe(self, loss: Tensor | float) -> None:
        """As `AtWork.observe`; strategies that depend on the loss may be chosen then."""
        self._observes = True
        self.now.observe(loss)

    def check_called(self) -> None:
        """As `AtWork.check_called`; a strategy that was chosen after the first step has seen none."""
        if not self._ended or self.now.levels[0].session.step:
            self.now.check_called()

    # ---- checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As `AtWork.state_dict`: the strategy at work, and the choice with its reasons."""
        choice = None if self.choice is None else self.choice.to_json()
        due = None if math.isinf(self._due) else self._due
        told = json.dumps({"begun": self._begun, "due": due, "choice": choice})
        return {**self.now.state_dict(), CHOICE: told}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the strategy that the checkpoint was taken with. A collective call.

        One that was taken before anything was chosen goes on measuring.

        Raises:
            CheckpointError: it does not fit, or is of no session of `auto`.
        """
        if CHOICE not in state_dict:
            raise CheckpointError(
                f"the checkpoint is of no session of 'auto', and attached is {self._strategy.name!r}: attach "
                "the strategy that it was taken with, or start without the session's state"
            )
        with refusing():
            told = described.read(state_dict[CHOICE], Annotated[_SavedChoice, JSON], CHOICE)
        state = {key: value for key, value in state_dict.items() if key != CHOICE}
        saved_values.read(state_of(state))  # before another strategy is attached
        choice: Choice | None = told["choice"]
        self._check.observed = True  # or the strategy's first round says that nobody has called `observe`
        try:
            options = self._options_of(choice)
        except (AttachError, ConfigError) as error:
            raise CheckpointError(
                f"the checkpoint was taken with {choice and choice.algorithm!r}, which was chosen then and "
                f"is not possible here: {error}"
            ) from error
        self.now.flush()
        self._exchange(options, equal=False)
        try:
            self.now.load_state_dict(state)
        except CheckpointError as error:
            if choice is None or self.choice is not None:
                raise
            raise CheckpointError(
                f"{error}. If torch.distributed.checkpoint has loaded it: that reads only what a new session "
                f"has, and 'auto' has chosen nothing yet. Attach {choice.algorithm!r} in its place, which "
                "was chosen"
            ) from error
        self.choice = choice
        self._count_from(told["begun"])
        self._due = math.inf if told["due"] is None else told["due"]
        if choice is None:
            self._measure_steps()  # what was measured is not in a checkpoint
        else:
            self._measuring = False

    # ---- after every step ----------------------------------------------------------------------------

    @property
    def _steps(self) -> int:
        """The number of steps taken with all strategies; equal on all ranks."""
        return self._begun + self.now.levels[-1].session.step

    def _stepped(self, optimizer: Optimizer) -> None:
        """Called after a step of any optimizer, when all other hooks have been called."""
        if self._closed() or optimizer is not self.now.spec.optimizers[-1] or self._steps < self._due:
            return
        if self._measuring:
            self._choose()
        elif self.choice is not None and self._departs(self.choice.seconds):
            self._measure_steps()
        else:
            assert self._strategy.watch is not None
            self._due = self._steps + self._strategy.watch

    def _measure_steps(self) -> None:
        """Measure the next steps, whatever strategy is at work, and choose after them."""
        self._measuring, self._due = True, self._steps + self._decider.steps
        self._decider.begin(self._session)

    def _departs(self, predicted: float) -> bool:
        """Whether steps take another time than predicted, on average over the ranks. A collective call."""
        mine = torch.tensor([self._seconds()], dtype=torch.float64)
        seconds = float(self.from_all(mine).mean())
        departs = abs(seconds - predicted) > self._strategy.tolerance * predicted
        if departs and rank_in() == 0:
            _log.warning(
                "%r chooses again after step %d: a step takes %.4g s, and %.4g s were predicted",
                *(self._strategy.name, self._steps, seconds, predicted),
            )
        return departs

    def _seconds(self) -> float:
        """The seconds that a step has lately taken, on this rank."""
        period = self.now.spec.period
        ends = [at for _, at in self.now.levels[0].session.stats.steps]
        return step_seconds(ends, max(self._strategy.watch or 0, BLOCKS * period), period)

    def _choose(self) -> None:
        """Let the decider choose a strategy, and go on with it; or see more steps. A collective call."""
        self.now.flush()
        self._check.observed = bool(self.from_all(torch.tensor([self._observes])).all())
        if more := measured(self._decider, self._session):
            self._due = self._steps + more
            return
        self._measuring = False
        choice = decided(self._decider, self._session)
        try:
            options = self._options_of(choice)
        except (AttachError, ConfigError) as error:
            raise DecisionError(
                f"auto: {type(self._decider).__name__} chose {choice.algorithm!r}, which does not "
                f"fit: {error}"
            ) from error
        self.choice = choice
        if rank_in() == 0:
            _log.warning("%r goes on after step %d: %s", self._strategy.name, self._steps, choice.reason)
        self._due = math.inf if self._strategy.watch is None else self._steps + self._strategy.rest
        self._exchange(options)

    def _options_of(self, choice: Choice | None) -> AttachSpec:
        """The options of the chosen strategy's session; before a choice, those of `dense`."""
        text = "dense" if choice is None else choice.algorithm
        options, accept = self._check.options(text), self._strategy.accept
        unlisted = accept in ("exact", "rounded") and text not in self._check.texts(accept)
        if unlisted or (options.periodic and accept != "periodic"):
            raise AttachError(
                f"{text!r} risks more than accept={accept} allows: accept more, or have the decider choose "
                "among session.candidates()"
            )
        return replace(options, chosen_by=self.now.spec.chosen_by, probe=False)

    def _exchange(self, options: AttachSpec, equal: bool = True) -> None:
        """Replace the strategy at work, if the new one differs. A collective call.

        `equal`: whether replicas and optimizers are to be made equal before, as `close` makes them.
        """
        if repr(options.strategy) == repr(self.now.spec.strategy):
            return
        try:
            if equal:
                self.now.make_equal()
            ended = _Ended(self._begun, self.now.metrics(), self.now.timeline())
            steps = self._steps
            self.now.leave()
            self.now = AtWork(options)
        except BaseException:
            self._leave()  # the one before is gone
            raise
        self._ended = (*self._ended, ended)
        self._count_from(steps)

    def _count_from(self, steps: int) -> None:
        """Note the steps taken before the strategy at work was attached, so that errors count them."""
        self._begun = steps
        for level in self.now.levels:
            level.session.nonfinite.count_from(steps)

    def leave(self) -> None:
        """As `AtWork.leave`; nothing is chosen any more."""
        if self._handle is not None:
            self._handle.remove()
        if stop := getattr(self._decider, "stop", None):
            stop()
        self.now.leave()


def check(given: AttachSpec, decider: Decider) -> None:
    """Refuse arguments with which `auto` cannot begin.

    Raises:
        AttachError: there is no optimizer whose steps could be counted, or a weight.
    """
    if not given.optimizers:
        raise AttachError("'auto' chooses after a step of the optimizer: give attach the optimizer")
    if given.weight is not None:
        raise AttachError(
            f"weight={given.weight!r} with 'auto' is not possible, as it begins with plain averages: leave "
            "it out, or attach an algorithm that averages replicas, such as 'localsgd'"
        )
    checks.whole("the decider's steps", decider.steps, 1, None, "it decides after a step")


def step_seconds(ends: Sequence[float], window: int, period: int) -> float:
    """The seconds of a step: the median over the periods in the last steps, so that a pause does not count.

    Args:
        ends: when each step ended, the last thousand or so.
        window: the number of last steps that count.
        period: the number of steps after which the rounds repeat; the mean over one period is a step's time.

    Returns: Seconds; infinite if there was no whole period.
    """
    marks = [*ends][-window - 1 :][::-period]
    periods = [(later - sooner) / period for later, sooner in pairwise(marks)]
    return median(periods) if periods else math.inf


def _ranks(given: AttachSpec) -> list[int]:
    """The ranks that train the model, near axis by near axis. A collective call."""
    far, sharded = ranks_of(given.group), given.sharded
    if sharded is None or sharded.near is None:
        return far
    return [rank for each in gathered(torch.tensor(far), sharded.near) for rank in each.tolist()]
