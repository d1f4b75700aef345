"""Post-local SGD (Lin, Stich, Patel & Jaggi, ICLR 2020, arXiv 1808.07217).

The paper's algorithm, on each worker r, in step t:          here:
    t <= t':  x_r <- x_r - lr * mean_r(g_r)                  near level: Until(t'), gradients in backward
    t >  t':  x_r <- x_r - lr * g_r                          the user's optimizer; no gradient travels
              every H steps: x_r <- mean_r(x_r)              far level: Every(H, start_step=t'), Average

The paper switches at the first decay of the learning rate, which is the `start_step` that a user gives. What
travels after it is the delta, as in `localsgd`; floating-point buffers travel with it.
"""

from __future__ import annotations

from tacit import checks
from tacit.algorithms.registry import algorithm
from tacit.merges import Average
from tacit.rounds import Every, Until
from tacit.strategy import Levels, Strategy


@algorithm(
    family="periodic",
    paper="Post-local SGD: Lin et al. 2020, arXiv 1808.07217",
    compresses=False,
    changes="synchronous up to a step; from then on the replicas are averaged every few steps",
    instead="localsgd",
)
def postlocal(start_step: int = 50, sync_every: int = 8) -> Levels:
    """Synchronous up to `start_step`; from then on the replicas are averaged every `sync_every` steps."""
    hint = "so many steps are synchronous; write 50, or localsgd for none"
    checks.whole("start_step", start_step, 1, None, hint)
    near = Strategy(rounds=Until(start_step), name="synchronous")
    far = Strategy(
        subject="delta",
        rounds=Every(sync_every, start_step=start_step),
        merge=Average(),
        name="local",
    )
    return Levels((near, far))
