"""signSGD with majority vote (Bernstein, Wang, Azizzadenesheli & Anandkumar, ICML 2018, arXiv 1802.04434).

The paper's algorithm, on each worker r:            here:
    s_r <- sign(g_r)                                MajoritySign.encode: one bit an entry
    Signum: m_r <- beta m_r + (1 - beta) g_r        MomentumCorrection, with `momentum`, beta: its velocity is
            s_r <- sign(m_r)                        m_r / (1 - beta), of the same sign
    V   <- sign(sum_r s_r)                          MajoritySign.decode_mean_, on every rank
    x   <- x - lr * (V + lambda x)                  the optimizer; V takes the gradient's place

Every entry moves by lr in every step: write a learning rate as for Adam, a hundred to a thousand times below
that of SGD, and let it fall. With `momentum`, SGD's is taken over, and the ranks vote on the signs of their
momenta; without, SGD's own averages votes. Differences from the paper: votes are gathered by all ranks, as
there is no server, and in two phases only by `topology=two-phase`, as one bit could not say that a vote was a
tie; ties give 0; a gradient of exactly 0 has no vote where 64 side by side are 0, and votes for and against
by turns elsewhere (`MajoritySign`).
"""

from __future__ import annotations

from tacit import checks
from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import MajoritySign, MomentumCorrection
from tacit.strategy import Strategy


@algorithm(
    family="quantization",
    paper="Bernstein et al. 2018, arXiv 1802.04434",
    compresses=True,
    changes="ranks vote on the sign of every entry; each moves by lr, so lr must be small",
)
def signsgd(topology: Way = "auto", momentum: float = 0.0) -> Strategy:
    """One bit an entry and no magnitude at all: the ranks vote, and lr is the step of every entry.

    `momentum`: they vote on the signs of their momenta, with this factor (Signum); 0: of their gradients.
    """
    checks.real("momentum", momentum, "write 0.9, or 0 for none", least=0, below=1)
    votes = MomentumCorrection(MajoritySign(), momentum, masking=False) if momentum else MajoritySign()
    return Strategy(compressor=votes, topology=way(topology))
