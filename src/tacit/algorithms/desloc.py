"""DES-LOC: parameters and moments averaged each in its own period (Iacob et al. 2025, arXiv 2505.22549).

The paper's step t of Adam, on each worker r:       here:
    if t mod K_x = 0: x_r <- mean_r(x_r)            Every(sync_every=K_x), Average
    if t mod K_u = 0: u_r <- mean_r(u_r)            MomentPeriods(first_every=K_u)
    if t mod K_v = 0: v_r <- mean_r(v_r)            MomentPeriods(second_every=K_v)
    u_r, v_r, x_r <- Adam(g_r)                      the user's optimizer

Averages come after the steps K, 2 K, ... counted from 1, where the paper's come before a step. By default K_u
= 3 K_x and K_v = 6 K_x, as accounts of the paper recommend: what changes slowly is averaged seldom. Momentum
and second moments are recognized by the names of torch's optimizers: `exp_avg_sq`, `max_exp_avg_sq`,
`square_avg`, `sum` and `exp_inf` are second moments, all else of a parameter's shape is first. With K_x = K_u
= K_v it is Local Adam, `localsgd:momentum=averaged`. In K_v steps it sends as much as 6 + 2 + 1 dense rounds
of parameters.

After an average of first moments alone second ones rise to the least that Adam can have with these: of an
entry whose gradients were all on other replicas it is 0 else, and the next step is divided by `eps`.

Differences from the paper: that; deltas travel, not parameters; moments always densely. Gradients are clipped
only if you do so: the paper clips each worker's. As the session closes, all are averaged. The abstract and
the introduction could be read, and others' accounts of the algorithm; the authors' code was not found.
"""

from __future__ import annotations

from tacit.algorithms.options.codecs import of_bits
from tacit.algorithms.options.named_options import AdditiveWay, way
from tacit.algorithms.registry import algorithm
from tacit.merges import Average
from tacit.rounds import Every, MomentPeriods
from tacit.strategy import Strategy


@algorithm(
    family="periodic",
    paper="DES-LOC: Iacob et al. 2025, arXiv 2505.22549",
    compresses=False,
    changes="the replicas are averaged every few dozen steps, and Adam's moments less often, each in its "
    "period",
)
def desloc(
    sync_every: int = 32,
    first_every: int | None = None,
    second_every: int | None = None,
    bits: int = 32,
    topology: AdditiveWay = "auto",
) -> Strategy:
    """Replicas are averaged every `sync_every` steps, first moments every 3, second ones every 6 of these."""
    rounds = Every(sync_every)
    return Strategy(
        subject="delta",
        rounds=rounds,
        compressor=of_bits(bits),
        topology=way(topology),
        merge=Average(),
        momentum=MomentPeriods(
            first_every=3 * sync_every if first_every is None else first_every,
            second_every=6 * sync_every if second_every is None else second_every,
        ),
    )
