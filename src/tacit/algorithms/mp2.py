"""MP²: what does not travel is not lost (after Liu et al., Computer Networks 255, 2024, 110883).

By default, `form=quantized`, every `sync_every` steps, with x the common point, x_r the replica of worker r,
and q(y) = y in `bits` bits an entry:

    d_r <- x_r - x; s_r <- q(d_r): sent                 Blockwise(bits); biases and norms in 8 bits
    y   <- mean of all s_r + e; a <- q(y); e <- y - a   MeanFeedback: at a server, or by slices in two phases
    x   <- x + a; x_r <- x_r + (a - s_r)                CommonPoint

What a worker has not sent stays in its replica, and what an answer has not said in e: x + e + mean(x_r - x)
changes by exactly the mean of the workers' own progress. The result is x. No round sends everything; momentum
and all other state of the optimizer stay local, and BatchNorm's statistics are averaged by `session.sync()`
and as the session closes. With `late=1` an answer is applied as the next round leaves.
With Adam or AdamW each step's variance is scaled to that of the mean gradient, or
replicas, whose batches are smaller, would move too little; `variance=local` leaves it.
With `predictor=last`, or `least-squares` (of the last three changes of x), q is of what is not predicted:

    p   <- the last change of x, times a gain for each layer and the change of the learning rate
    s_r <- q(d_r - p); y and a as above; x <- x + p + a                                    FittedCoding

and a prediction cancels in a replica. Matrices and convolutions alone are predicted.

All wait for all, and where a worker is lost all end with an error that names it. With `bound`, at parameter
servers, workers may miss rounds, go and come back: the server keeps X = x + e, and of each worker the point
z_r from which that goes on, and answers how far it is off:

    worker r: d_r <- x_r - z_r; s_r <- q(d_r): sent
    server: X <- X + s_r / P, of all P workers, whoever came; when no other worker is more than `bound` rounds
        behind, a <- q(X - z_r): sent; z_r <- z_r + a          Star(StaleSynchronous, pull)
    worker r: z_r <- z_r + a; x_r <- x_r + (a - s_r)           CommonPoint

X + mean(d_r) changes by exactly the mean of the workers' own progress: one that misses a round counts as 0,
keeps its d_r, and is told of all rounds that it has missed by its next answer. One that comes back, or joins
late, gets X whole, and starts there; what the dead one had not sent is lost.

The paper's system, `form=paper`, in each round:         here, at a server or on an all-reduce:
    each worker steps                                    the user's optimizer
    workers push a subset of the parameters              Predicted: the delta of a subset that moves on
    the server predicts the residual parameters by a     Predicted: every rank, from what all ranks know;
      network trained on samples of ordinary trainings     its network is prediction.MP2
    workers pull the parameters                          they pull the subset, as they have the rest; with
                                                           pull=full the server predicts, and they pull all

The paper has not published which subset, what the network is shown, or its shapes; those are ours, see
`Predicted` and `prediction.MP2`. As every rank runs the predictor, each element costs each rank what it would
have cost the server, unless `pull=full`: then `budget` is of what is pushed, and the pull is dense. Momentum
and all other state of the optimizer stay local.

The weights that come with tacit are of `tacit predictor` (their note says how), from small networks on
made-up images, in rounds of four steps of SGD with momentum, as is the default here: other optimizers, and
other rounds, move otherwise, and want a predictor trained on them.

A round sends a share rho of the entries, and what a worker knew of the others is lost: replicas would move
rho times as far as those of plain training. With `rescale`, as by default, what is sent of an entry beyond
its prediction counts 1 / rho times. A prediction that is good after true changes may still lead astray after
other predictions; so predictions are multiplied by a gain for each parameter, found by least squares on what
arrives, of entries of all ages.
`predictor=own` predicts nothing that all share: each replica keeps its own delta where nothing arrived
(`LocalResidual`); see docs/papers/mp2.md.
"""

from __future__ import annotations

import typing
from typing import Any, Literal, TypeAlias

from tacit import checks
from tacit.algorithms.registry import algorithm
from tacit.compressors.blockwise import Blockwise
from tacit.compressors.cast import BF16, FP16
from tacit.compressors.dense import Dense
from tacit.compressors.entropy_coded import EntropyCoded
from tacit.compressors.mean_feedback import MeanFeedback
from tacit.errors import ConfigError
from tacit.merges import Average, CommonPoint, LocalResidual
from tacit.overlap import Bucketwise, Delayed
from tacit.prediction.budget import Subset
from tacit.prediction.extrapolation import Exponential, Linear, Stale
from tacit.prediction.fitted_coding import FittedCoding
from tacit.prediction.networks.mp2 import MP2
from tacit.prediction.networks.wnn import WNN
from tacit.prediction.predicted import Predicted
from tacit.prediction.predictor import Predictor
from tacit.prediction.server_prediction import Pulled
from tacit.rounds import Every
from tacit.strategy import Strategy, Variance
from tacit.topologies import Auto, StaleSynchronous, Star

Values: TypeAlias = Literal["fp32", "bf16", "fp16"]
_VALUES: dict[str, Dense | BF16 | FP16] = {"fp32": Dense(), "bf16": BF16(), "fp16": FP16()}

Which: TypeAlias = Literal["mp2", "wnn", "linear", "exponential", "stale", "own"]
Fitted: TypeAlias = Literal["last", "least-squares"]
FITTED = {"last": 1, "least-squares": 3}
"""How many past changes they predict from."""


@algorithm(
    family="predictive",
    paper="MP2: Liu et al., Computer Networks 255, 2024, 110883",
    compresses=True,
    changes="progress travels in a few bits an entry both ways; replicas keep what they have not sent",
)
def mp2(
    bits: int | None = None,
    sync_every: int = 1,
    late: int = 0,
    entropy: bool = False,
    bound: int | None = None,
    form: Literal["quantized", "paper"] = "quantized",
    budget: float | None = None,
    predictor: Which | Fitted | None = None,
    weights: str | None = None,
    subset: Subset | None = None,
    values: Values | None = None,
    shrink: float | None = None,
    full_rounds: int | None = None,
    drops: int | None = None,
    horizon: int | None = None,
    pull: Literal["subset", "full"] | None = None,
    rescale: bool | None = None,
    variance: Variance | None = None,
) -> Strategy:
    """Send `bits` bits an entry every `sync_every` steps, and keep the rest; `form=paper` sends a subset.

    `bound`: by how many rounds a worker may be ahead of the slowest, at a parameter server; workers may then
    go and come back. Without it all wait for all.
    """
    checks.one_of("form", form, ("quantized", "paper"))
    papers = {
        "budget": budget,
        "predictor": predictor,
        "weights": weights,
        "subset": subset,
        "values": values,
        "shrink": shrink,
        "full_rounds": full_rounds,
        "drops": drops,
        "horizon": horizon,
        "pull": pull,
        "rescale": rescale,
    }
    given: dict[str, Any] = {name: value for name, value in papers.items() if value is not None}
    fitted = FITTED.get(predictor) if isinstance(predictor, str) else None
    if form == "paper":
        idle = {
            "bits": bits,
            "late": late or None,
            "entropy": entropy or None,
            "bound": bound,
            "variance": variance,
        }
        if said := ", ".join(f"{name}={value!r}" for name, value in idle.items() if value is not None):
            raise ConfigError(
                f"{said} with form='paper' would do nothing, as it sends a subset of the entries: leave "
                f"{'it' if ',' not in said else 'them'} out, or leave form out"
            )
        if fitted:
            raise ConfigError(
                f"predictor={predictor!r} with form='paper' is not possible, as it predicts from changes "
                "of all entries: leave form out, or write predictor='linear'"
            )
        return _subsets(sync_every=sync_every, **given)
    if fitted:
        del given["predictor"]
    if given:
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ConfigError(
            f"{said} with form='quantized' is not possible, as all entries are sent: write form='paper' "
            "beside it, or leave it out; predictor may be 'last' or 'least-squares'"
        )
    return _quantized(3 if bits is None else bits, sync_every, late, entropy, bound, fitted, variance)


LATEST = 2
"""The longest period that has a late form: answers of more steps ago cost accuracy (docs/papers/mp2.md)."""


def _quantized(
    bits: int,
    sync_every: int,
    late: int,
    entropy: bool,
    bound: int | None,
    answers: int | None,
    variance: Variance | None,
) -> Strategy:
    checks.flag("entropy", entropy)
    checks.whole("late", late, 0, 1, "write 1 to apply an answer as the next round leaves")
    rounds = Every(sync_every)
    if late and sync_every > LATEST:
        raise ConfigError(
            f"late=1 with sync_every={sync_every} is not possible, as answers would be {sync_every} steps "
            f"old: write sync_every=1 or {LATEST}, or late=0"
        )
    codec = EntropyCoded(bits) if entropy else Blockwise(bits)
    overlap = Delayed(sync_every) if late else Bucketwise()
    if bound is not None:
        if answers:
            raise ConfigError(
                f"bound={bound} with a predictor is not possible, as it predicts from answers that all "
                "workers have in common, and the server then answers each one alone: leave one of them out"
            )
        if variance == "scaled":
            raise ConfigError(
                f"bound={bound} with variance='scaled' is not possible, as workers do not wait for each "
                "other to compare gradients: leave one of them out"
            )
        return Strategy(
            subject="delta",
            rounds=rounds,
            compressor=codec,
            topology=Star(StaleSynchronous(bound), pull=codec),
            overlap=overlap,
            merge=CommonPoint(),
            name="mp2",
        )
    coded = MeanFeedback(codec)
    return Strategy(
        subject="delta",
        rounds=rounds,
        compressor=FittedCoding(coded, answers) if answers else coded,
        topology=Auto(at_servers=True),
        overlap=overlap,
        merge=CommonPoint(),
        buffers="on_sync",
        variance="scaled" if variance is None else variance,
        name="mp2",
    )


def _subsets(
    budget: float = 0.11,
    predictor: Which = "mp2",
    weights: str | None = None,
    subset: Subset = "rotating",
    values: Values = "fp32",
    sync_every: int = 1,
    shrink: float = 1.0,
    full_rounds: int = 2,
    drops: int = 0,
    horizon: int | None = None,
    pull: Literal["subset", "full"] = "subset",
    rescale: bool | None = None,
) -> Strategy:
    """The paper's form: send the share `budget` of what plain training would, and predict the rest."""
    checks.whole("full_rounds", full_rounds, 0, None, "2 are usual")
    checks.one_of("values", values, tuple(_VALUES))
    if predictor == "own" and rescale:
        raise ConfigError(
            "rescale=true with predictor='own' would count twice what replicas keep of their own: leave one "
            "of them out"
        )
    checks.one_of("pull", pull, ("subset", "full"))
    if pull == "full" and predictor == "own":
        raise ConfigError(
            "pull='full' with predictor='own' would pull nothing but zeros: leave one of them out"
        )
    return Strategy(
        subject="delta",
        rounds=Every(sync_every),
        compressor=(Pulled if pull == "full" else Predicted)(
            budget=budget,
            predictor=predictor_of(predictor, weights),
            subset=subset,
            values=_VALUES[values],
            shrink=shrink,
            full_steps=full_rounds * sync_every,
            drops=drops,
            every=sync_every,
            horizon=horizon,
            rescale=predictor != "own" and subset != "magnitude" if rescale is None else rescale,
        ),
        topology=Star() if pull == "full" else Auto(at_servers=True),
        merge=LocalResidual() if predictor == "own" else Average(),
        name="mp2",
    )


def predictor_of(which: Which, weights: str | None) -> Predictor:
    """The predictor of this name; its file is read now, so that an error in it is raised now."""
    checks.one_of("predictor", which, typing.get_args(Which))
    plain: dict[str, Predictor] = {
        "linear": Linear(),
        "exponential": Exponential(),
        "stale": Stale(),
        "own": Stale(),  # no common prediction; `LocalResidual` leaves each its own
    }
    if weights is not None and which in plain:
        raise ConfigError(
            f"predictor={which!r} has no weights, and weights={weights!r}: leave one of them out"
        )
    return plain.get(which) or trained(which, weights)


def trained(which: Which, weights: str | None) -> Predictor:
    """The network of this name, with these weights or its own.

    Raises:
        ConfigError: they cannot be read, or are none of its.
    """
    if weights is not None and (not isinstance(weights, str) or not weights):
        raise ConfigError(f"weights={weights!r} is no path: leave it out, or write the path of a file")
    predictor = MP2(weights or "") if which == "mp2" else WNN(weights or "")
    try:
        predictor.kinds()
    except ConfigError as error:
        raise ConfigError(f"weights={weights!r}: {error}") from error
    return predictor
