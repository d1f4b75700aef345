"""Deep gradient compression, DGC (Lin, Han, Mao, Wang & Dally, ICLR 2018, arXiv 1712.01887).

The paper's algorithm, on each worker r:            here:
    g_r <- clip(g_r, threshold / sqrt(P))           Clip, where `max_norm` is given
    u_r <- m u_r + g_r                              MomentumCorrection: `velocity`
    v_r <- v_r + u_r                                ErrorFeedback: add what is owed
    M   <- the k entries of v_r largest in |.|      TopK.encode
    s_r <- v_r on M;  v_r <- 0 on M                 ErrorFeedback: keep what was not sent
    u_r <- 0 on M                                   MomentumCorrection: momentum factor masking
    x   <- x - lr * mean_r(s_r)                     Auto: all-gather, then scatter-add of P sparse messages
    warm-up: k of 25 %, 6.25 %, 1.56 %, 0.4 %       Phases, a quarter of `warmup_steps` each

With `nesterov`, g_r + m u_r is added to v_r. The optimizer must be SGD; its momentum is taken over while the
strategy is attached, and it is told to have none.

Where that sends less, as from 3 ranks on, each rank averages one stretch for all and sends the largest
entries of the mean; the others wait there, though the momentum of who sent them is masked already (Auto,
TwoPhase). `topology=Flat()` lets all that was sent arrive at once, as in the paper.

Differences from the paper: the k entries are chosen over a whole lot, exactly, not by a sampled threshold
tensor by tensor; the warm-up is in steps, not epochs; clipping is off by default, as in the authors' code,
and lot by lot. Biases and norms are sent densely in the same message, with momentum and without masking.
Weight decay is added by the optimizer, without momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from tacit.compressors.clip import Clip
from tacit.compressors.momentum import MomentumCorrection
from tacit.compressors.phases import Phases
from tacit.compressors.topk import TopK
from tacit.compressors.wrappers import ErrorFeedback
from tacit.contracts import Compressor
from tacit.errors import ConfigError
from tacit.strategy import Strategy

WARMUP = (0.25, 0.0625, 0.015625, 0.00390625)
"""Ratios of the paper's four phases, each a quarter of the one before."""


def dgc(
    ratio: float = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    max_norm: float | None = None,
    warmup_steps: int = 0,
) -> Strategy:
    """One entry in 1 / `ratio` of the accumulated momentum is sent, the largest; the rest is owed."""

    def corrected(ratio: float) -> Compressor:
        return MomentumCorrection(ErrorFeedback(TopK(ratio=ratio)), momentum, nesterov, masking)

    compressor = _warmed_up(corrected, ratio, warmup_steps)
    if max_norm is not None:
        compressor = Clip(compressor, max_norm)
    return Strategy(compressor=compressor, name="dgc")


def _warmed_up(corrected: Callable[[float], Compressor], ratio: float, steps: int) -> Compressor:
    after = corrected(ratio)
    if type(steps) is not int or steps < 0 or 0 < steps < len(WARMUP):
        raise ConfigError(
            f"warmup_steps={steps!r} cannot be cut into {len(WARMUP)} phases: write how many steps the whole "
            "warm-up takes, such as 4 * len(loader), or 0 for none"
        )
    if not steps:
        return after
    cuts = [steps * i // len(WARMUP) for i in range(len(WARMUP) + 1)]
    phases = zip(pairwise(cuts), WARMUP, strict=True)
    return Phases(tuple((stop - start, corrected(max(ratio, each))) for (start, stop), each in phases), after)
