"""Predictive coding: say where a prediction that all share is wrong. Ours; see `docs/papers/mp2.md`.

In a round of every `sync_every` steps:                 here:
    p    <- the last round's answer x `trust`           predictors.Persistent, on every rank alike
    send the largest entries of x - p + owed            PredictiveCoding(ErrorFeedback(TopK))
    x    <- the common point + p + their mean           Average, at the server where there is one

MP² (Liu et al. 2024) predicts what it does not send, and what a worker knew of that is lost; here all that was
not said is owed, so that the prediction decides only how soon it arrives. EF21 (Richtarik et al. 2021) and
DIANA (Mishchenko et al. 2019) send compressed differences too, of gradients, and to each worker's own.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from tacit import checks
from tacit.compressors.cast import BF16
from tacit.compressors.coding import PredictiveCoding
from tacit.compressors.dense import Dense
from tacit.compressors.topk import TopK
from tacit.compressors.wrappers import ErrorFeedback
from tacit.merges import Average
from tacit.predictors import Persistent
from tacit.rounds import Every, EveryStep
from tacit.strategy import Strategy
from tacit.topologies import Auto

Values: TypeAlias = Literal["fp32", "bf16"]


def predictive(ratio: float = 0.1, sync_every: int = 8, trust: float = 0.5, values: Values = "fp32") -> Strategy:
    """Every `sync_every` steps, send the largest `ratio` of what the last round's progress does not foretell."""
    checks.whole("sync_every", sync_every, 1, None, "8 are usual")
    checks.word("values", values, ("fp32", "bf16"))
    largest = TopK(ratio=ratio, values=Dense() if values == "fp32" else BF16())
    return Strategy(
        subject="progress",
        rounds=EveryStep() if sync_every == 1 else Every(sync_every),
        compressor=PredictiveCoding(ErrorFeedback(largest), Persistent(trust)),
        topology=Auto(at_servers=True),
        merge=Average(),
        name="predictive",
    )
