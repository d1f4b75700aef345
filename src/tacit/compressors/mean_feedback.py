"""Error feedback for compressed means alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tacit.compressors.wrappers import Feedback, outer_state
from tacit.contracts import Context, Exchange, OneShot, OneShotUse, Outcome, ReduceEncoded, State
from tacit.errors import ConfigError


@dataclass(frozen=True)
class MeanFeedback(Feedback):
    """Add the error of a compressed mean to the next mean; the errors of payloads are not kept.

    For deltas whose merge keeps what this rank has not sent (`LocalResidual`, `CommonPoint`): with
    `ErrorFeedback` it would be kept twice. `TwoPhase` keeps the residual of the means for each rank's
    slice, and a parameter server that averages (`Star`) for all of it: it compresses its answer as the
    payloads were. An all-gather compresses no mean, and there nothing changes.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.inner, OneShot):
            raise ConfigError(
                f"MeanFeedback({self.inner}) is not possible, as it takes several messages or keeps a "
                "residual itself: write a one-shot compressor, such as MeanFeedback(Blockwise(bits=3))"
            )

    @property
    def sent_lasts(self) -> bool:  # type: ignore[override]
        return self.inner.sent_lasts

    def one_shot(self, step: int) -> OneShotUse | None:
        """That of the inner compressor, with feedback of means."""
        one_shot = self.inner.one_shot(step)
        return one_shot and one_shot._replace(has_mean_feedback=True)

    def init(self, like: Tensor) -> State:
        """The inner compressor's state."""
        return outer_state(self.inner.init(like), "inner")

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """One request, which the topology answers."""
        assert isinstance(self.inner, OneShot)
        request = ReduceEncoded(self.inner, x, ctx.inside("inner"), has_mean_feedback=True)
        mean, sent = yield request
        return Outcome(mean, sent, state)
