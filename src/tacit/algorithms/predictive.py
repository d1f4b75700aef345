"""Predictive coding: send where the common prediction is wrong, and keep what was not sent. Ours.

In a round after every `sync_every` steps, on each worker r:        here:
    p   <- trust x the last round's answer                          prediction.Persistent, alike on every rank
    d_r <- x_r - x - p: what is not predicted; send its largest     PredictiveCoding(TopK)
    x   <- x + p + mean of what was sent                            LocalResidual; a server does so too
    x_r <- x + what r has not sent of its d_r                       LocalResidual

Two predictions are in it. Where nothing arrives, all workers first assume the change of the last round.
Then each assumes its own change, which is the better prediction: a worker's own steps say more about the mean
step than any extrapolation. MP² (Liu et al. 2024) uses neither: there what a worker knew of an entry
that is not sent is lost.

After EF21 (Richtarik, Sokolov & Fatkhullin 2021) and DIANA (Mishchenko et al. 2019), which send compressed
differences of gradients to each worker's last; Qsparse-local-SGD (Basu et al. 2019), which sends the largest
of deltas, with error feedback; and SPARTA (Exo Labs 2025), which averages a random part and keeps the rest.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from tacit import checks
from tacit.algorithms.registry import algorithm
from tacit.compressors import BF16, Dense, TopK
from tacit.merges import LocalResidual
from tacit.prediction import Persistent, PredictiveCoding
from tacit.rounds import Every
from tacit.strategy import Strategy
from tacit.topologies import Auto

Values: TypeAlias = Literal["fp32", "bf16"]


@algorithm(
    family="predictive",
    paper="ours; compressed differences: EF21, arXiv 2106.05203; DIANA, arXiv 1901.09269",
    compresses=True,
    changes="the largest of what the last round's progress does not predict; each replica keeps its rest",
)
def predictive(
    ratio: float = 0.05, sync_every: int = 4, trust: float = 0.3, values: Values = "fp32"
) -> Strategy:
    """Every `sync_every` steps send the largest `ratio` of what is not predicted, and keep the rest."""
    hint = "write 0.3, as is usual, or 0 to predict nothing"
    checks.real("trust", trust, hint, least=0, most=1)
    checks.one_of("values", values, ("fp32", "bf16"))
    largest = TopK(ratio=ratio, values=Dense() if values == "fp32" else BF16())
    return Strategy(
        subject="delta",
        rounds=Every(sync_every),
        compressor=PredictiveCoding(largest, Persistent(trust)),
        topology=Auto(at_servers=True),
        merge=LocalResidual(),
    )
