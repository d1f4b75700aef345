"""OD-SGD (Xu, Dong et al. 2020, arXiv 2005.06728): one-step delay SGD.

The paper's idea, on each worker r:                                here:
    the global weights take the mean gradient of step t            the round of step t: Every(1)
    step t + 1 computes on local weights, that have only the       Delayed(1): the step is taken at once with
    worker's own gradient of step t in the meantime                the own gradient, ...
    the global weights then replace them, with the own step        ... Average: own + mean - own delta, a step
    of t + 1 on top                                                later

The paper has the global update on a parameter server with separate momentum; here every rank has it, and the
optimizer's state stays local.
"""

from __future__ import annotations

from tacit.algorithms.registry import algorithm
from tacit.merges import Average
from tacit.overlap import Delayed
from tacit.rounds import Every
from tacit.strategy import Strategy


@algorithm(
    family="periodic",
    paper="OD-SGD: Xu et al. 2020, arXiv 2005.06728",
    compresses=False,
    changes="each replica steps at once by its own gradient; the others' follow one step late",
)
def odsgd() -> Strategy:
    """Every step's exchange is hidden behind the next step, which corrects for it."""
    return Strategy(subject="delta", rounds=Every(1), overlap=Delayed(1), merge=Average())
