"""1-bit Adam (Tang et al., ICML 2021, arXiv 2102.02888): Adam's momentum in one bit an entry.

The paper's algorithm 1, on each worker r:          here:
    first T_w steps: Adam, uncompressed             AdamMomentum: gradients, by Int8 with error feedback
    v is kept as it is from then on                 hooks.FrozenAdam, from `freeze_step` on
    m_r <- beta1 m + (1 - beta1) g_r                AdamMomentum: `momentum` is m
    s_r <- C(m_r + e_r);  e_r <- m_r + e_r - s_r    ErrorFeedback(Sign(block=512)): one bit, a mean a block
    m   <- C(mean_r(s_r) + e);  e likewise          TwoPhase: the rank whose slice it is
    x   <- x - lr * m / sqrt(v)                     the user's Adam or AdamW

The optimizer must be torch's Adam or AdamW; all else stays the optimizer's: decay, `eps`, the learning rate.
`bits` of 2 to 8 send that many bits an entry by blocks (`Blockwise`) in place of signs.

A variance that was found in the first steps of a short training is not that of its later ones. So for
`refresh` steps at 1.5, 1.5^2, 1.5^3 ... times `freeze_step` gradients travel again, and v moves: after 0/1
Adam (Lu et al., ICLR 2023, arXiv 2202.06009), which renews it in single steps, at intervals that double.
`refresh=0` is 1-bit Adam's own way.

What never had a gradient does not move: zeros stay zeros, also in one bit. DeepSpeed asks for a mask there.

Differences from the paper: a magnitude for each block of 512 entries, not for each layer; gradients travel in
8 bits, not in 32, and so does the last momentum before they are renewed, which takes up what signs have left
out; residuals follow the learning rate (`ErrorFeedback.rescale`), and what is owed to a gradient is 1 - beta1
of that to a momentum; and a step divides by the root of beta2 v + (1 - beta2) m^2, as Adam forms it, of which
v alone is kept. So where a momentum outgrows the old variance, its step is bounded, and v rises to the least
that Adam ever has with m: it is 0 where gradients had not begun, as of rare tokens' rows, and steps would
then not end with m. Biases and norms are sent densely, with the same momentum.
"""

from __future__ import annotations

from tacit import checks
from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import AdamMomentum, Blockwise, ErrorFeedback, Sign
from tacit.strategy import Strategy


@algorithm(
    family="quantization",
    paper="1-bit Adam: Tang et al. 2021, arXiv 2102.02888",
    compresses=True,
    changes="after a warm-up Adam's variance is kept, and its momentum travels in one bit an entry",
)
def onebit_adam(
    freeze_step: int = 500,
    refresh: int = 20,
    bits: int = 1,
    beta: float = 0.9,
    topology: Way = "two-phase",
) -> Strategy:
    """Gradients in 8 bits until `freeze_step`; then Adam's momentum, in `bits` bits an entry."""
    checks.whole("bits", bits, 1, 8, "they are of an entry; write 1, or 3")
    codec = ErrorFeedback(Sign(block=512) if bits == 1 else Blockwise(bits))
    return Strategy(
        compressor=AdamMomentum(codec, beta=beta, freeze_step=freeze_step, refresh=refresh),
        topology=way(topology),
    )
