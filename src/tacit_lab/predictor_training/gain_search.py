"""Choose how far predictions are followed, by how trainings end that go by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from tacit import checks
from tacit.errors import ConfigError
from tacit.prediction.networks import weight_files
from tacit.prediction.networks.mp2 import MP2
from tacit_lab.predictor_training.trials import Trial, in_the_loop


def best(
    weights: weight_files.Weights,
    gains: Sequence[float],
    trials: Sequence[Trial],
    tell: Callable[[str], None] = lambda line: None,
) -> weight_files.Weights:
    """Multiply the predictions of MP²'s networks by that gain with which the trials end best, by mean loss.

    The best prediction of the next change is not the best one for a training. A prediction goes on where the
    gradient has turned since, as it was made of what was seen up to 1 / share rounds ago; and momentum, which
    stays with the workers, answers this delay by swinging. A smaller gain damps that.

    Args:
        gains: in (0, 1].

    Raises:
        ConfigError: a gain cannot be, or no trial stays finite with any.
    """
    for gain in gains:
        checks.real("gain", gain, "1 follows predictions wholly, 0.5 halves them", above=0, most=1)
    if not gains:
        raise ConfigError("there is no gain to try: write 1 to follow predictions as they are")
    if len(gains) == 1:
        return scaled(weights, gains[0])
    with TemporaryDirectory() as folder:
        file = Path(folder) / "mp2.pt"
        weight_files.write(file, "mp2", weights)
        losses = {gain: _mean(MP2(str(file)), gain, trials, tell) for gain in gains}
    gain = min(losses, key=lambda each: losses[each])
    if losses[gain] == math.inf:
        raise ConfigError(
            f"no training stays finite with any gain of {', '.join(f'{each:g}' for each in gains)}: write "
            "smaller ones, too"
        )
    tell(f"gain {gain:g}")
    return scaled(weights, gain)


def scaled(weights: weight_files.Weights, gain: float) -> weight_files.Weights:
    """Networks that predict `gain` times as much."""
    return {
        kind: {name: w * gain if name.startswith("last.") else w for name, w in named.items()}
        for kind, named in weights.items()
    }


def _mean(predictor: MP2, gain: float, trials: Sequence[Trial], tell: Callable[[str], None]) -> float:
    """The mean loss of the trials; infinite if a training does not stay finite."""
    ends = [in_the_loop(trial, predictor, gain) for trial in trials]
    for trial, end in zip(trials, ends, strict=True):
        tell(f"gain {gain:g}, {trial.recipe.name}: {f'loss {end.loss:.4f}' if end else 'diverged'}")
    return fmean(end.loss if end else math.inf for end in ends)
