"""Judge predictors by what comes of their use: one step ahead, in an assembled model, and in the loop.

MP² chooses its network by a "prediction-result-based evaluation" (Liu et al. 2024), of which no more than the
name is published. Here: (1) the error of predictions made from true changes; (2) the loss of models put
together of pushed and predicted parameters, against that of the true next model; (3) the loss with which a
training ends that goes by the predictions. The last is what counts: a change that is predicted well from true
ones may still mislead if predictions follow predictions.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tacit import checks
from tacit.algorithms.localsgd import localsgd
from tacit.algorithms.mp2 import mp2
from tacit.errors import ConfigError, NonFinite
from tacit.prediction.partly_sent import Predicted, with_predictor
from tacit.prediction.predictor import PIECE, Predictor, in_a_row
from tacit.strategy import Strategy
from tacit_lab.predictor_training.layers import Layer, Recorder
from tacit_lab.predictor_training.simulation import Round, Simulation, kinds
from tacit_lab.predictor_training.trajectories import Motion, Windows, motions, period_of, roll_out
from tacit_lab.recipes.recipe import Recipe

WHOLE_BELOW = Predicted.whole_below
"""Parameters of fewer elements are sent whole, and those of one dimension."""


class Score(NamedTuple):
    """How far predictions were from what happened, as a share of how far "no change" is; below 1 is better.

    Attributes:
        absolute: mean absolute error. `squared`: root of the mean squared error.
    """

    predictor: str
    kind: str
    absolute: float
    squared: float


class End(NamedTuple):
    """Loss and accuracy (0..1) on held-out data, in the end or at some moments' mean."""

    loss: float
    accuracy: float


class Trial(NamedTuple):
    """A recipe, and how it is trained where predictors are tried on it.

    Attributes:
        share: how much a round sends, of what a full push sends.
        sync_every: steps of the optimizer from one round to the next.
    """

    recipe: Recipe
    epochs: int
    workers: int = 4
    share: float = 0.44
    sync_every: int = 4
    seed: int = 0

    @property
    def steps(self) -> int:
        """Of the optimizer, in all."""
        return self.epochs * self.recipe.steps_per_epoch(self.workers)

    def simulation(self, strategy: Strategy) -> Simulation:
        """The training under this strategy."""
        return Simulation(self.recipe, strategy, workers=self.workers, steps=self.steps, seed=self.seed)


def predicting(
    predictor: Predictor, *, share: float, sync_every: int, steps: int, gain: float = 1.0
) -> Strategy:
    """`mp2` with this predictor, which in each round of such a run sends a share of what a full push does.

    Raises:
        ConfigError: the share is no more than what the first rounds send, which push everything.
    """
    strategy = mp2(
        rescale=False,
        budget=share / sync_every,
        predictor="stale",
        sync_every=sync_every,
        horizon=max(1000, steps),
    )
    return replace(strategy, compressor=with_predictor(strategy.compressor, predictor, gain))


# ---- one step ahead -----------------------------------------------------------------------------------


def evaluate(predictors: Mapping[str, Predictor], layers: Iterable[Layer], share: float = 1.0) -> list[Score]:
    """Each change from those that would have been heard of, were a share sent. Every layer counts alike."""
    by_kind: dict[str, list[Windows]] = {}
    for layer in layers:
        for motion in motions([layer], share=share):
            by_kind.setdefault(layer.kind, []).append(motion.windows(share))
    scores = []
    for name, predictor in predictors.items():
        for kind, found in by_kind.items():
            errors = [_errors(predictor, kind, w) for w in found]
            absolute, squared = (fmean(each) for each in zip(*errors, strict=True))
            scores.append(Score(name, kind, absolute, squared))
    return scores


def _errors(predictor: Predictor, kind: str, w: Windows) -> tuple[float, float]:
    guess = predictor.change(w.seen, kind)
    least = torch.finfo(torch.float32).tiny
    return (
        float((guess - w.true).abs().sum() / w.true.abs().sum().clamp(min=least)),
        float((guess - w.true).norm() / w.true.norm().clamp(min=least)),
    )


# ---- in an assembled model ----------------------------------------------------------------------------


class Assembled:
    """Puts the next model of a full push together of pushed and predicted parameters, at some moments of it.

    Each parameter of two dimensions or more and 1,024 elements is pushed in part, one element in every few;
    the others wholly. Predictions are made from the true changes of the rounds in which it was pushed.
    """

    def __init__(self, predictors: Mapping[str, Predictor], trial: Trial, moments: int) -> None:
        self._predictors, self._recipe, self._period = predictors, trial.recipe, period_of(trial.share)
        rounds, first = trial.steps // trial.sync_every, 2 * self._period
        self._moments = {first + (i + 1) * (rounds - first) // (moments + 1) for i in range(moments)}
        self._past: deque[Mapping[str, Tensor]] = deque(maxlen=first)
        self._kinds: dict[str, str] = {}
        self.true: list[End] = []
        """Of the true next models."""
        self.ends: dict[str, list[End]] = {name: [] for name in predictors}
        """Of each predictor's, at the same moments."""

    def note(self, round_: Round, model: nn.Module) -> None:
        """Evaluate a round of a full push, with the model after it."""
        if round_.number in self._moments and len(self._past) == self._past.maxlen:
            self._kinds = self._kinds or kinds(model)
            self.true.append(End(*self._recipe.evaluate(model)))
            for name, predictor in self._predictors.items():
                other = deepcopy(model)
                with torch.no_grad():
                    for label, p in other.named_parameters():
                        p.add_(self._off(predictor, label, round_))
                self.ends[name].append(End(*self._recipe.evaluate(other)))
        self._past.append(round_.answer)

    def _off(self, predictor: Predictor, name: str, round_: Round) -> Tensor:
        """How far the assembled parameter is from the true one."""
        true = round_.answer[name]
        if true.dim() < 2 or true.numel() < WHOLE_BELOW:
            return torch.zeros_like(true)
        changes = torch.stack([*(each[name].reshape(-1) for each in self._past), true.reshape(-1)])
        off = roll_out(lambda seen: predictor.change(seen, self._kinds[name]), _whole(changes), self._period)
        return (off[-1] - changes[-1]).view(true.shape)


def _whole(changes: Tensor) -> Motion:
    """All elements of one layer, over consecutive rounds."""
    swings = changes.square().mean(1).sqrt()
    count = torch.tensor([changes.shape[1]])
    return Motion(changes, swings.unsqueeze(1).expand_as(changes), count.new_zeros(1), count)


def mean_of(ends: Sequence[End]) -> End:
    """Of losses and accuracies."""
    return End(fmean(each.loss for each in ends), fmean(each.accuracy for each in ends))


# ---- in the loop --------------------------------------------------------------------------------------


def full_push(
    trial: Trial, watching: Sequence[Callable[[Round, nn.Module], None]] = ()
) -> tuple[End, list[Layer]]:
    """Train with everything pushed. Returns its end, and the recorded motion of elements.

    Args:
        watching: each is called with every round, and the model after it.
    """
    simulation = trial.simulation(localsgd(sync_every=trial.sync_every))
    recorder = Recorder(simulation.model, run=trial.recipe.name, split="data", share=trial.share)
    for round_ in simulation.rounds():
        recorder.note(0, round_)
        for watch in watching:
            watch(round_, simulation.model)
    return End(*simulation.evaluate()), recorder.layers()


def in_the_loop(trial: Trial, predictor: Predictor, gain: float = 1.0) -> End | None:
    """Train with a part pushed and the rest predicted; how it ends, None where it does not stay finite.

    Args:
        gain: what predictions are multiplied by, in (0, 1].
    """
    strategy = predicting(
        predictor, share=trial.share, sync_every=trial.sync_every, steps=trial.steps, gain=gain
    )
    simulation = trial.simulation(strategy)
    try:
        for _ in simulation.rounds():
            pass
    except NonFinite:
        return None
    end = End(*simulation.evaluate())
    return end if math.isfinite(end.loss) else None


# ---- paths, and cost ----------------------------------------------------------------------------------


def paths(
    predictors: Mapping[str, Predictor], layers: Sequence[Layer], kind: str, share: float, length: int = 60
) -> tuple[str, Tensor, dict[str, Tensor]]:
    """Where two elements of the largest layer of a kind went, and where each predictor would have led them.

    Along the recorded motion each element is sent in every few rounds, and predicted in the others.

    Returns:
        The layer's name; (rounds, 2) what was true, as distance from where it began; the same of each
        predictor. The two are the one that has gone farthest, and one of the middle.

    Raises:
        ConfigError: no layer of this kind moves.
    """
    own = [layer for layer in layers if layer.kind == kind]
    if not motions(own):
        raise ConfigError(f"no layer of kind {kind!r} moves for long enough to be shown")
    largest = max(own, key=lambda layer: torch.Size(layer.shape).numel())
    (motion,) = motions([largest])
    order = motion.changes[:length].sum(0).abs().argsort()
    shown = order[[-1, len(order) // 2]]
    period = period_of(share)
    led = {
        name: roll_out(lambda seen, by=each: by.change(seen, kind), motion, period)  # type: ignore[misc]
        for name, each in predictors.items()
    }
    return (
        largest.name,
        motion.changes[:length, shown].cumsum(0),
        {name: answers[:length, shown].cumsum(0) for name, answers in led.items()},
    )


def cost(predictor: Predictor, seconds: float = 0.2) -> float:
    """Microseconds an element, as measured here, on as many threads as torch has; the least of some."""
    checks.real("seconds", seconds, "0.2 is usual", above=0)
    seen, least = in_a_row(torch.randn(2, PIECE, generator=torch.Generator().manual_seed(0))), float("inf")
    predictor.change(seen, "linear")
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        predictor.change(seen, "linear")
        least = min(least, time.perf_counter() - start)
    return least / PIECE * 1e6
