"""All that is known of some predictors, put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tacit import checks
from tacit.errors import ConfigError
from tacit.prediction.predictor import Predictor
from tacit_lab.predictor_training.layers import Layer
from tacit_lab.predictor_training.trajectories import motions, reach
from tacit_lab.predictor_training.trials import (
    Assembled,
    Trial,
    cost,
    evaluate,
    full_push,
    in_the_loop,
    mean_of,
    paths,
)
from tacit_lab.reports.predictors import Evaluation, Judged, Path

SHOWN = ("convolution", "linear")
"""Of which kinds elements' paths are drawn."""


def check(trial: Trial, within: float = 0.02, moments: int = 1) -> None:
    """Refuse what cannot be tried before anything is trained.

    Raises:
        ConfigError: names the parameter, and says what to write.
    """
    checks.whole("epochs", trial.epochs, 1, None, "5 are usual, or leave it out")
    checks.whole("workers", trial.workers, 1, None, "4 are usual")
    checks.whole("sync_every", trial.sync_every, 1, None, "1: a round after every step")
    checks.whole("seed", trial.seed, 0, None, "0 is usual")
    checks.whole("moments", moments, 1, None, "5 are usual")
    checks.real("within", within, "0.02 is usual", least=0)
    rounds, least = trial.steps // trial.sync_every, reach(trial.share) + moments + 1
    if rounds < least:
        raise ConfigError(
            f"{trial.epochs} epochs of {trial.recipe.name} on {trial.workers} workers have {rounds} rounds, "
            f"and {least} are needed: write more epochs, a larger share, or fewer moments"
        )


def judge(
    trial: Trial,
    predictors: Mapping[str, Predictor],
    *,
    within: float = 0.02,
    moments: int = 5,
    held_out: Sequence[Layer] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> Evaluation:
    """Try each predictor: one step ahead, in assembled models, and in the loop of a whole training.

    Args:
        within: by what share the loss may be above that of the full push.
        moments: at how many rounds of the full push models are assembled.
        held_out: recorded layers that no predictor has learnt from.
        tell: gets a line about each step.
    """
    assembled = Assembled(predictors, trial, moments)
    end, layers = full_push(trial, [assembled.note])
    true = mean_of(assembled.true)
    tell(f"full push: loss {end.loss:.4f}, accuracy {end.accuracy:.4f}")
    errors = _by_name(predictors, layers, trial.share)
    rest = {
        split: _by_name(predictors, [layer for layer in held_out if layer.split == split], trial.share)
        for split in dict.fromkeys(layer.split for layer in held_out)
    }
    rows = []
    for name, predictor in predictors.items():
        came = in_the_loop(trial, predictor)
        tell(f"{name}: {f'loss {came.loss:.4f}, accuracy {came.accuracy:.4f}' if came else 'diverged'}")
        put = mean_of(assembled.ends[name])
        rows.append(
            Judged(
                name=name,
                errors=errors[name],
                held_out={f"{s}, {kind}": e for s, named in rest.items() for kind, e in named[name].items()},
                assembled=put.loss,
                assembled_accuracy=put.accuracy,
                loss=came and came.loss,
                accuracy=came and came.accuracy,
                within=came is not None and came.loss <= end.loss * (1 + within),
                operations=predictor.operations,
                microseconds=cost(predictor),
            )
        )
    return Evaluation(
        recipe=trial.recipe.name,
        workers=trial.workers,
        epochs=trial.epochs,
        share=trial.share,
        sync_every=trial.sync_every,
        seed=trial.seed,
        tolerance=within,
        loss=end.loss,
        accuracy=end.accuracy,
        next_loss=true.loss,
        next_accuracy=true.accuracy,
        rows=tuple(rows),
        paths=tuple(_paths(predictors, layers, trial.share)),
    )


def _by_name(
    predictors: Mapping[str, Predictor], layers: Sequence[Layer], share: float
) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {name: {} for name in predictors}
    for score in evaluate(predictors, layers, share):
        found[score.predictor][score.kind] = score.absolute
    return found


def _paths(predictors: Mapping[str, Predictor], layers: Sequence[Layer], share: float) -> list[Path]:
    found = []
    for kind in SHOWN:
        if not motions(layers, kind):
            continue
        name, true, led = paths(predictors, layers, kind, share)
        for i, which in enumerate(("one that goes far", "one of the middle")):
            each = {label: values[:, i].tolist() for label, values in led.items()}
            found.append(Path(title=f"{name} ({kind}), {which}", true=true[:, i].tolist(), led=each))
    return found
