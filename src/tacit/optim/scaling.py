"""The learning rate of a larger batch, and the gradual warm-up to it."""

from __future__ import annotations

import math
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from tacit.errors import ConfigError, unknown

Rule = Literal["linear", "sqrt"]
_RULES = {"linear": float, "sqrt": math.sqrt}


def scale_lr(
    optimizer: Optimizer, batch_ratio: float, *, warmup_steps: int, rule: Rule = "linear"
) -> LinearLR:
    """Scale every group's learning rate for a batch `batch_ratio` times as large, reached by a warm-up.

    "linear" multiplies it by the ratio (Goyal et al. 2017, arXiv 1706.02677, section 2.1), "sqrt" by the
    ratio's square root (Krizhevsky 2014, arXiv 1404.5997, section 5; Hoffer et al. 2017). Training begins
    with the learning rate as it was, which then rises by equal amounts for `warmup_steps` steps (Goyal,
    section 2.2: five epochs). To decay it later too, chain schedules, which count from the same beginning:
    `ChainedScheduler([scale_lr(optimizer, 8, warmup_steps=500), MultiStepLR(optimizer, [9000])])`.

    Args:
        optimizer: its learning rates are those of the small batch; they are changed at once.
        batch_ratio: the global batch (of all ranks and accumulated passes) over the small one; 1 or more.
        warmup_steps: steps of the scheduler until the full learning rate; 0: at once.
        rule: how the learning rate follows the batch.

    Returns:
        The scheduler, one of torch's; its `step` is to be called after every step of the optimizer.

    Raises:
        ConfigError: a number is out of range, or the optimizer has a scheduler already.
    """
    if rule not in _RULES:
        raise unknown("rule", str(rule), _RULES)
    if not (batch_ratio >= 1 and math.isfinite(batch_ratio)):
        raise ConfigError(
            f"batch_ratio={batch_ratio} is not possible: write the large batch over the small one, such as 8"
        )
    if type(warmup_steps) is not int or warmup_steps < 0:
        raise ConfigError(f"warmup_steps={warmup_steps!r} is not possible: write a whole number of 0 or more")
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ConfigError(
            "the optimizer has a scheduler already, which uses the learning rates from before: call "
            "scale_lr first, and make other schedulers after it"
        )
    factor = _RULES[rule](batch_ratio)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    start = 1.0 / factor if warmup_steps else 1.0
    return LinearLR(optimizer, start_factor=start, total_iters=max(1, warmup_steps))
