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
layers); 4-bit values are QSGD's, equal steps of a bucket's norm rounded at random, where the paper has E3M0;
from 3 ranks on, where that sends less, the mean is rounded once more on its way back (Auto, TwoPhase). The
inner optimizer's state stays local and is not reset, as in the papers. Closing the session, and `sync`, take
the mean of the replicas as they are, without an outer step.
"""

from __future__ import annotations

from tacit import checks
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
    _check(outer_lr, outer_momentum)
    return Strategy(
        subject="delta",
        rounds=Every(sync_every),
        compressor=of_bits(bits),
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
    _check(outer_lr, outer_momentum)
    hint = "write 5, or 0 for fragments that land at once"
    checks.whole("fragment_sync_delay", fragment_sync_delay, 0, None, hint)
    hint = "it is how much a replica keeps of its own; write 0.5"
    checks.real("fragment_update_alpha", fragment_update_alpha, hint, least=0, below=1)
    return Strategy(
        subject="delta",
        rounds=Every(sync_every, fragments),
        compressor=of_bits(bits),
        overlap=Delayed(fragment_sync_delay) if fragment_sync_delay else Bucketwise(),
        merge=OuterStep(outer_lr, outer_momentum, local=fragment_update_alpha),
        name="streaming-diloco",
    )


def _check(outer_lr: float, outer_momentum: float) -> None:
    checks.real("outer_lr", outer_lr, "write 0.7", above=0)
    checks.real("outer_momentum", outer_momentum, "write 0.9, or 0 for none", least=0, below=1)


def of_bits(bits: int) -> Compressor:
    """What says progress in so many bits an entry."""
    checks.whole("bits", bits, 2, 32, "write 32 (fp32), 16 (bf16), or 2 to 8 (QSGD)")
    if bits == 32:
        return Dense()
    if bits == 16:
        return BF16()
    if 2 <= bits <= 8:
        return QSGD(bits=bits)
    raise ConfigError(f"bits={bits} is not possible: write 32 (fp32), 16 (bf16), or 2 to 8 (QSGD)")
