"""The length of an epoch, for strategies that depend on epochs: in steps of the optimizer, not in batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tacit import checks
from tacit.contracts import Rounds, ScheduleState
from tacit.errors import AttachError
from tacit.levels.spec import AttachSpec
from tacit.strategy import AnyStrategy
from tacit.transports.process_groups import rank_in

_log = logging.getLogger("tacit")

LOOKED_AT = 32
"""The number of first steps whose backward passes are counted."""

SAID = {"steps_per_epoch": "len(loader) // accumulation", "epochs": "10"}
"""What errors tell the user to write."""
_WORDS = {"steps_per_epoch": "the length of an epoch", "epochs": "the number of epochs"}


def check_given(spec: AttachSpec) -> None:
    """Check the length and the number of epochs, if `attach` got them.

    Raises:
        ConfigError: a number is no length.
        AttachError: the strategy depends on epochs, and a number is missing; the message names all that it
            needs.
    """
    for name, value in (("steps_per_epoch", spec.steps_per_epoch), ("epochs", spec.epochs)):
        if value is not None:
            checks.whole(name, value, 1, None, f"write {SAID[name]}")
    check(spec.strategy, spec.schedule_state)


def check(strategy: AnyStrategy, schedule_state: ScheduleState) -> None:
    """Refuse a strategy that depends on epochs if their length or number is missing.

    Raises:
        AttachError: one is missing; the message names all that the strategy needs.
    """
    for level in strategy.levels:
        unsaid = [name for name in SAID if name in level.rounds.needs - schedule_state.keys()]
        if unsaid:
            by_steps = (
                f", or give it a number of steps, such as {strategy.name.partition(':')[0]}:sync_every=50"
                if not level.rounds.observed_metrics
                else ""
            )
            raise AttachError(
                f"{strategy.name!r} depends on epochs, and attach was not given "
                f"{' and '.join(_WORDS[name] for name in unsaid)}: write "
                f"attach(..., {', '.join(f'{name}={SAID[name]}' for name in unsaid)})"
                f"{by_steps}{_more(level.rounds, unsaid)}"
            )
        _check_period(level.rounds, schedule_state.get("steps_per_epoch", math.inf))


def _more(rounds: Rounds, unsaid: Sequence[str]) -> str:
    """The rest of the error's advice."""
    loss = (
        ", and session.observe(loss) before each optimizer.step()"
        if "loss" in rounds.observed_metrics
        else ""
    )
    if "steps_per_epoch" not in unsaid:
        return loss
    return f"{loss}; accumulation: how many backward passes make a step, 1 where you do not accumulate"


def _check_period(rounds: Rounds, steps: float) -> None:
    period = rounds.sync_every or 0
    if period > steps and "steps_per_epoch" in rounds.needs:
        raise AttachError(
            f"sync_every={period} is longer than an epoch of {steps:g} steps, at the end of which there is a "
            f"round anyway: write {steps:g} at most"
        )


def warn_of_long_periods(strategy: AnyStrategy, schedule_state: ScheduleState) -> None:
    """Log a warning for periods longer than an epoch, as replicas then differ at its end."""
    for level in strategy.levels:
        period, steps = (
            level.rounds.sync_every or 0,
            schedule_state.get("steps_per_epoch", math.inf),
        )
        if period > steps and "steps_per_epoch" not in level.rounds.needs:
            _log.warning(
                "sync_every=%d is longer than an epoch of %d steps: replicas differ at the end of most "
                "epochs. Call session.sync() where they must not",
                *(period, steps),
            )


class BackwardPasses:
    """Counts how many backward passes make a step, and warns once where `steps_per_epoch` may be batches.

    Passes under `no_sync` count too, which DDP's hook does not see.

    Args:
        named: the parameters; the last one has a gradient in most passes.
        strategy: the name of the strategy that depends on epochs.
        steps_per_epoch: the `steps_per_epoch` of `attach`.
    """

    def __init__(self, named: Mapping[str, Tensor], strategy: str, steps_per_epoch: int) -> None:
        self._strategy, self._steps_per_epoch = strategy, steps_per_epoch
        self._passes = self._steps = self._before = 0
        last = [*named.values()][-1]
        hook: RemovableHandle = last.register_post_accumulate_grad_hook(self._passed)  # type: ignore[no-untyped-call]
        self._handle = hook

    @classmethod
    def of(
        cls, strategy: AnyStrategy, named: Mapping[str, Tensor], schedule_state: ScheduleState
    ) -> BackwardPasses | None:
        """A counter; None if no strategy depends on epochs, or their length is unknown."""
        needed = any("steps_per_epoch" in level.rounds.needs for level in strategy.levels)
        steps_per_epoch = schedule_state.get("steps_per_epoch")
        return (
            cls(named, strategy.name, int(steps_per_epoch))
            if needed and steps_per_epoch is not None and named
            else None
        )

    def _passed(self, _: Tensor) -> None:
        self._passes += 1

    def stepped(self) -> None:
        """Count a step."""
        self._steps += 1
        self._before = self._passes
        if self._steps != LOOKED_AT:
            return
        self.close()
        each = round(self._passes / self._steps)
        if each > 1 and rank_in() == 0:
            _log.warning(
                "%d backward passes make a step here, and steps_per_epoch=%d counts steps: if these are "
                "batches, the epochs of %r are %d times too long. Write steps_per_epoch=len(loader) // %d, "
                "here %d; if you did, all is well",
                *(
                    each,
                    self._steps_per_epoch,
                    self._strategy,
                    each,
                    each,
                    max(1, self._steps_per_epoch // each),
                ),
            )

    def discarded(self) -> None:
        """Note that a step is discarded, in place of `stepped`."""
        self._passes = self._before

    def close(self) -> None:
        """Stop counting."""
        self._handle.remove()
