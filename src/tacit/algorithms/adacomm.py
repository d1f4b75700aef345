"""AdaComm (Wang & Joshi, SysML 2019, arXiv 1810.08313).

The paper's rule, after interval l of T_0 seconds:           here:
    tau_l = ceil(sqrt(lr_0 / lr_l * F_l / F_0) * tau_0)      AdaComm(sync_every=tau_0, interval=T_0 in steps)
    where not smaller than tau_{l-1}: tau_{l-1} / 2          the same, rounded up
    every tau_l steps: x_r <- mean_r(x_r)                    Average

F is the mean of the losses given to `session.observe(loss)` since the round before. The interval
counts steps, not seconds, so that a run does not depend on the machine's speed. lr_0 is the largest learning
rate so far, and intervals are counted from the end of a warm-up, which the paper does not have.
"""

from __future__ import annotations

from tacit.algorithms.registry import algorithm
from tacit.merges import Average
from tacit.rounds import AdaComm
from tacit.strategy import Strategy


@algorithm(
    family="periodic",
    paper="AdaComm: Wang & Joshi 2019, arXiv 1810.08313",
    compresses=False,
    changes="the replicas are averaged every few steps, and more often as the loss falls",
)
def adacomm(sync_every: int = 16, interval: int = 100) -> Strategy:
    """Local SGD whose period begins at `sync_every` and shrinks as the loss falls."""
    rounds = AdaComm(sync_every, interval)
    return Strategy(subject="delta", rounds=rounds, merge=Average())
