"""Different compressors in successive phases, such as a warm-up of the ratio."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from tacit import checks
from tacit.contracts import Compressor, Context, Exchange, Matrix, Momentum, OneShotUse, ScheduleState, State
from tacit.errors import ConfigError


class ByStep(Compressor):
    """Base of compressors that use one of several, by the step; all share one state."""

    @property
    @abstractmethod
    def _all(self) -> tuple[Compressor, ...]:
        """All compressors that may be used."""

    @abstractmethod
    def _at(self, step: int) -> Compressor:
        """The compressor of this step."""

    @property
    def hides_nonfinite(self) -> bool:  # type: ignore[override]
        """Whether any phase does."""
        return any(compressor.hides_nonfinite for compressor in self._all)

    @property
    def on_device(self) -> bool:
        return all(compressor.on_device for compressor in self._all)

    @property
    def shows_nonfinite(self) -> bool:  # type: ignore[override]
        return all(compressor.shows_nonfinite for compressor in self._all)

    def one_shot(self, step: int) -> OneShotUse | None:
        return self._at(step).one_shot(step)


@dataclass(frozen=True)
class Scheduled(ByStep):
    """Compress by each of `phases` for its number of steps, and by `then` afterwards.

    All of them have the same state fields, so that each phase continues with the residual of the one before.
    Bytes are those of the present phase; the session plans its buffers again at each change.

    Attributes:
        phases: (steps, compressor), in order; steps are attempts of the optimizer, 1 or more.
    """

    phases: tuple[tuple[int, Compressor], ...]
    then: Compressor

    def __post_init__(self) -> None:
        checks.compressor("then", self.then)
        if not isinstance(self.phases, tuple) or any(
            not isinstance(each, tuple) or len(each) != 2 for each in self.phases
        ):
            raise ConfigError(
                f"phases={self.phases!r} is no tuple of (steps, compressor): write "
                "((1000, ErrorFeedback(TopK(ratio=0.1))),), with a comma after a single one"
            )
        for steps, compressor in self.phases:
            checks.compressor("phases", compressor)
            hint = f"write 1 or more steps with {compressor}, or leave the phase out"
            checks.whole("phases: steps", steps, 1, None, hint)
            if compressor.takes_momentum != self.then.takes_momentum:
                raise ConfigError(
                    f"{compressor} and {self.then} differ in momentum, which one optimizer cannot: put "
                    "MomentumCorrection with the same numbers around both, or around neither"
                )

    @property
    def _all(self) -> tuple[Compressor, ...]:
        return (*(compressor for _, compressor in self.phases), self.then)

    @property
    def scales(self) -> bool:  # type: ignore[override]
        """Whether all of them do."""
        return all(compressor.scales for compressor in self._all)

    @property
    def takes_momentum(self) -> Momentum | None:
        """The momentum, which is the same in all phases."""
        return self.then.takes_momentum

    @property
    def changes(self) -> tuple[int, ...]:
        return tuple(accumulate(steps for steps, _ in self.phases))

    def exempts(self, shape: torch.Size) -> bool:
        return self.then.exempts(shape)

    def exempted(self) -> Compressor | None:
        return self.then.exempted()

    def for_model(self, matrices: tuple[Matrix, ...]) -> Compressor:
        phases = tuple((steps, compressor.for_model(matrices)) for steps, compressor in self.phases)
        return replace(self, phases=phases, then=self.then.for_model(matrices))

    def for_training(self, schedule_state: ScheduleState) -> Compressor:
        phases = tuple((steps, compressor.for_training(schedule_state)) for steps, compressor in self.phases)
        return replace(self, phases=phases, then=self.then.for_training(schedule_state))

    def ended(self, steps: int) -> str:
        """The message of the last phase that the training reached."""
        return self._at(steps).ended(steps)

    def with_layout(self, matrices: tuple[Matrix, ...]) -> Compressor:
        phases = tuple((steps, compressor.with_layout(matrices)) for steps, compressor in self.phases)
        return replace(self, phases=phases, then=self.then.with_layout(matrices))

    def is_shared(self, field: str) -> bool:
        return self.then.is_shared(field)

    def widths(self, field: str) -> tuple[int, ...] | None:
        return self.then.widths(field)

    def init(self, like: Tensor) -> State:
        """The state, which has the same fields in all phases.

        Raises:
            ConfigError: phases differ in fields or shapes.
        """
        state = self.then.init(like)
        shapes = {name: tensor.shape for name, tensor in state.items()}
        for _, compressor in self.phases:
            meta = compressor.init(like.new_empty(like.shape, device="meta"))
            if {name: tensor.shape for name, tensor in meta.items()} != shapes:
                raise ConfigError(
                    f"{compressor} keeps {sorted(meta)} and {self.then} {sorted(state)}, or of other shapes: "
                    "a phase takes over the state of the one before, so give all the same wrappers"
                )
        return state

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        return self._at(ctx.step).exchange(x, state, ctx)

    def _at(self, step: int) -> Compressor:
        return self._all[bisect_right(self.changes, step)]
