"""DiLoCo (Douillard et al., arXiv 2311.08105) and Streaming DiLoCo (Douillard et al., arXiv 2501.18512).

DiLoCo's algorithm 1, for each outer step t, on worker r:          here:
    theta_r <- theta^(t-1)                                         OuterStep: `now` becomes `then`
    H steps of the inner optimizer (AdamW)                         the user's optimizer
    delta = mean_r (theta^(t-1) - theta_r)                         the round: minus the mean progress
    theta^(t) <- OuterOpt(theta^(t-1), delta), Nesterov            OuterStep(lr, momentum), as torch's SGD

Streaming DiLoCo does so for one fragment p at a time:             here:
    fragment p has a round every H steps, offset from the others   Every(H, fragments=P)
    its outer gradient travels while training goes on for tau      Delayed(tau)
    theta_p <- alpha * theta_p + (1 - alpha) * new theta_p         OuterStep(local=alpha)
    the outer gradients travel in 4 bits                           any compressor of ours: qsgd by `bits`

Differences: fragments are neighbouring parameters of about equal size ("sequential"; the paper strides over
layers); 4-bit values are QSGD's, equal steps of a bucket's norm rounded by lot, where the paper has E3M0.
The inner optimizer's state stays local and is not reset, as in the papers. Closing the session, and `sync`,
take the mean of the replicas as they are, without an outer step.
"""

from __future__ import annotations

from tacit.compressors.cast import BF16
from tacit.compressors.dense import Dense
from tacit.compressors.qsgd import QSGD
from tacit.contracts import Compressor
from tacit.errors import ConfigError
from tacit.merges import OuterStep
from tacit.overlap import Bucketwise, Delayed
from tacit.rounds import Every
from tacit.strategy import Strategy


def diloco(
    sync_every: int = 32, outer_lr: float = 0.7, outer_momentum: float = 0.9, bits: int = 32
) -> Strategy:
    """An outer SGD with Nesterov momentum steps by the mean progress of `sync_every` inner steps."""
    return Strategy(
        subject="progress",
        rounds=Every(sync_every),
        compressor=_of(bits),
        merge=OuterStep(outer_lr, outer_momentum),
        name="diloco",
    )


def streaming_diloco(
    sync_every: int = 32,
    fragments: int = 4,
    fragment_sync_delay: int = 5,
    fragment_update_alpha: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    bits: int = 4,
) -> Strategy:
    """DiLoCo in fragments that take turns, and land `fragment_sync_delay` steps late."""
    return Strategy(
        subject="progress",
        rounds=Every(sync_every, fragments),
        compressor=_of(bits),
        overlap=Delayed(fragment_sync_delay) if fragment_sync_delay else Bucketwise(),
        merge=OuterStep(outer_lr, outer_momentum, local=fragment_update_alpha),
        name="streaming-diloco",
    )


def _of(bits: int) -> Compressor:
    if bits == 32:
        return Dense()
    if bits == 16:
        return BF16()
    if 2 <= bits <= 8:
        return QSGD(bits=bits)
    raise ConfigError(f"bits={bits} is not possible: write 32 (fp32), 16 (bf16), or 2 to 8 (QSGD)")
