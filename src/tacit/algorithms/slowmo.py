"""SlowMo (Wang, Tantia, Ballas & Rabbat, ICLR 2020, arXiv 1910.00643), with local SGD inside.

The paper's algorithm, for each outer iteration t of tau steps:    here:
    tau steps of the base optimizer on each worker                 the user's optimizer
    x_{t,tau} <- mean over the workers                             the round: the mean delta
    u_{t+1} = beta * u_t + (x_{t,0} - x_{t,tau}) / lr_t            SlowMo: its state, in units of the gradient
    x_{t+1,0} = x_{t,0} - alpha * lr_t * u_{t+1}                   SlowMo: the anchor, and the parameters

The base optimizer's own momentum stays local, which the paper calls "maintain"; its "reset" and "average"
are options of the strategy.
"""

from __future__ import annotations

from tacit.algorithms.registry import algorithm
from tacit.merges import SlowMo
from tacit.rounds import Every
from tacit.strategy import Strategy


@algorithm(
    family="periodic",
    paper="SlowMo: Wang et al. 2020, arXiv 1910.00643",
    compresses=False,
    changes="the replicas are averaged every few steps, with momentum over the averages",
)
def slowmo(sync_every: int = 12, momentum: float = 0.7, slow_lr: float = 1.0) -> Strategy:
    """Local SGD with momentum over rounds of `sync_every` steps."""
    merge = SlowMo(slow_lr, momentum)
    return Strategy(subject="delta", rounds=Every(sync_every), merge=merge)
