"""MP²: push a subset of the parameters, predict the rest (Liu et al., Computer Networks 255, 2024, 110883).

The paper's system, in each round:                       here, at a server or on an all-reduce:
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
made-up images, in rounds of four steps of SGD with momentum: other optimizers, and other rounds, move
otherwise, and want a predictor trained on them.

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
from typing import Literal, TypeAlias

from tacit import checks
from tacit.algorithms.registry import algorithm
from tacit.compressors import BF16, FP16, Dense
from tacit.errors import ConfigError
from tacit.merges import Average, LocalResidual
from tacit.prediction import MP2, WNN, Exponential, Linear, Predicted, Predictor, Pulled, Stale
from tacit.prediction.budget import Subset
from tacit.rounds import Every
from tacit.strategy import Strategy
from tacit.topologies import Auto, Star

Values: TypeAlias = Literal["fp32", "bf16", "fp16"]
_VALUES: dict[str, Dense | BF16 | FP16] = {"fp32": Dense(), "bf16": BF16(), "fp16": FP16()}

Which: TypeAlias = Literal["mp2", "wnn", "linear", "exponential", "stale", "own"]


@algorithm(
    family="predictive",
    paper="MP2: Liu et al., Computer Networks 255, 2024, 110883",
    compresses=True,
    changes="a changing subset of the progress travels, and every rank predicts the rest by a network",
)
def mp2(
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
    """Send the share `budget` of what plain training would, and predict the rest."""
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
