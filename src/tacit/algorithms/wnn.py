"""WNN, the weight nowcaster, as a way to need fewer epochs (Jang et al., ICML 2023).

The paper's procedure:                                  here: train an epoch as usual; remember the weights
    Every(1), Average; a look after each `period` rounds
    after every fifth epoch: w <- forecast, for five    Nowcast: a leap of all replicas, from what all know
      epochs later, by one network a kind of layer      prediction.WNN, without the slips of the authors' code
    the optimizer's state stays                         it stays

It sends as much in a round as `ddp` does. What it can save is rounds, as a run may end earlier. Where there
are parameter servers, they average. The paper leaves batch norm's layers out, and forecasts biases; here all
tensors of one dimension are left out, as nothing distinguishes a bias from batch norm's statistics there.
"""

from __future__ import annotations

from tacit.algorithms.mp2 import trained
from tacit.algorithms.registry import algorithm
from tacit.compressors import Dense
from tacit.merges import Average
from tacit.prediction import Nowcast
from tacit.rounds import Every
from tacit.strategy import Strategy
from tacit.topologies import Auto


@algorithm(
    family="predictive",
    paper="WNN: Jang et al., ICML 2023",
    compresses=False,
    changes="after five periods all replicas leap five ahead, so that training may end earlier",
)
def wnn(period: int = 20, weights: str | None = None, sync_every: int = 1) -> Strategy:
    """Average in every round; after five periods, of so many rounds each, leap five ahead.

    Give the rounds of an epoch as `period` to have what the paper has.
    """
    return Strategy(
        subject="delta",
        rounds=Every(sync_every),
        compressor=Nowcast(Dense(), trained("wnn", weights), period),
        topology=Auto(at_servers=True),
        merge=Average(),
    )
