"""0/1 Adam (Lu, Li, Zhang, De Sa & He, ICLR 2023, arXiv 2202.06009): a kept variance, and local steps.

The paper's algorithm, on each worker r:                 here:
    v moves in steps of T_v alone, by mean gradients     near level: During(Renewals), error feedback; Int8,
                                                           or Blockwise where `gradient_bits` is less
    m_r <- beta1 m_r + (1 - beta1) g_r                   Adam itself, on each replica
    x_r <- x_r - lr * m_r / sqrt(v)                      Adam or AdamW, by hooks.KeptVariance
    in steps of T_u: what all have moved by since the    far level: rounds as those of `lowbit`, every
      last one, averaged in one bit, error feedback        `sync_every` steps in `bits` bits an entry

T_v: the first `freeze_step` steps; then, `refresh` at a time, from 1.5, 1.5^2, 1.5^3 ... times that on. A
variance of mean gradients is what plain Adam has. That of a replica's own, which `lowbit` scales to it, is of
a smaller batch: it is noisier, and another on each replica. `refresh` steps move v by 1 - beta2^refresh: ten
steps by two fifths with beta2 = 0.95, where it was measured, and by a hundredth with 0.999.

Differences from the paper: v moves for a few steps at a time, not in single ones; gradients travel in 8
bits. A step divides by the root of beta2 v + (1 - beta2) g^2 / P, of P replicas, where the paper's divides
by that of v, and v rises to (1 - beta2) g^2 / P where it is less. What a round leaves out stays in the
replica, so that the error of what was sent needs no memory; momenta stay each replica's own, where the paper
sets them to what the round says; 2 bits and more, not one; rounds are equally far apart, and go on while
gradients travel.
"""

from __future__ import annotations

from tacit import checks
from tacit.algorithms.registry import algorithm
from tacit.compressors import EntropyCoded, ErrorFeedback, Int8, MeanFeedback
from tacit.compressors.blockwise import VECTOR_BITS, Blockwise
from tacit.merges import CommonPoint
from tacit.rounds import During, Every, Renewals
from tacit.strategy import Levels, Strategy


@algorithm(
    family="periodic",
    paper="0/1 Adam: Lu et al. 2022, arXiv 2202.06009",
    compresses=True,
    changes="Adam's variance is kept but for a few steps now and then, in which gradients travel; progress "
    "travels in few bits an entry both ways; replicas keep what they have not sent",
)
def zeroone_adam(
    freeze_step: int = 500,
    refresh: int = 20,
    bits: int = 2,
    sync_every: int = 1,
    entropy: bool = False,
    gradient_bits: int = 8,
    anchor_bits: int = 32,
) -> Levels:
    """Adam's variance moves until `freeze_step`, then `refresh` steps at a time; progress in `bits` bits.

    `entropy`: progress, and gradients of up to four bits, in as many bits as their frequencies ask for.
    """
    checks.flag("entropy", entropy)
    # Of two bits three gradients are owed at the end of a renewal; the next one would put them into v as one.
    checks.whole("gradient_bits", gradient_bits, 3, 8, "it is how gradients travel; write 8 or 4")
    renewals = Renewals(freeze_step, refresh)
    near = Strategy(
        compressor=ErrorFeedback(_of_gradients(gradient_bits, entropy)),
        rounds=During(renewals),
        name="gradients",
    )
    far = Strategy(
        subject="delta",
        rounds=Every(sync_every),
        compressor=MeanFeedback(EntropyCoded(bits) if entropy else Blockwise(bits)),
        merge=CommonPoint(),
        buffers="on_sync",
        variance=renewals,
        anchor_bits=anchor_bits,
        name="progress",
    )
    return Levels((near, far))


def _of_gradients(bits: int, entropy: bool) -> Int8 | Blockwise:
    if bits == VECTOR_BITS:
        return Int8()
    return EntropyCoded(bits) if entropy and bits <= 4 else Blockwise(bits)  # codes of more are not shortened
