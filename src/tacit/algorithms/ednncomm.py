"""eDNNcomm (Moreno-Alvarez, Paoletti, Cavallaro & Haut, IEEE TNNLS 2023, doi 10.1109/TNNLS.2023.3309735).

The paper's figure 1, for replica r of node m, in iteration i:   here:
    g_r     <- gradient of r on its own mini-batch               the user's backward
    G_m     <- mean of g_r over the replicas of node m           near level: Flat("node"), every step
    theta_r <- O(theta_r, G_m), with any optimizer O             the user's optimizer
    every K' iterations: Theta_R <- mean of theta_r              far level: Every(K'), Average, Hierarchical
    theta_r <- Theta_R                                           Average: all replicas equal, to the bit

Choices where the public text is silent. K' counts steps of the run, and "auto" is one exchange an epoch, as
in the authors' scripts. Every rank of a node takes its slice across ("leaders": the first takes all; "turns":
one after the other). What travels is the delta since the last anchor, which in fp32 is the same mean; `bits`
sends it shorter: 16 is bf16, 2 to 8 are QSGD's. Floating-point buffers (BatchNorm's statistics) are averaged
with the parameters, and momentum stays local until the session closes, unless `buffers` and `momentum` say
otherwise.

The paper's exchange is of all parameters as they are after K' steps, and the next step begins from the mean:
none of it can leave before. With `fragments` and `fragment_sync_delay` parts of the model take turns, and are
applied later: another arithmetic than the paper's, see `localsgd`, which has the same.
"""

from __future__ import annotations

from typing import Literal

from tacit import checks
from tacit.algorithms.options.codecs import of_bits
from tacit.algorithms.options.named_options import staggered
from tacit.algorithms.registry import algorithm
from tacit.contracts import NODE, Overlap, Rounds
from tacit.merges import Average
from tacit.overlap import Bucketwise
from tacit.rounds import EveryEpoch
from tacit.strategy import Buffers, Levels, MomentumUse, Strategy
from tacit.topologies import Flat, Hierarchical


@algorithm(
    family="hierarchical",
    paper="eDNNcomm: Moreno-Alvarez et al. 2023, doi 10.1109/TNNLS.2023.3309735",
    compresses=False,
    changes="gradients are averaged inside each node; between nodes, the parameters, once an epoch",
)
def ednncomm(
    sync_every: int | Literal["auto"] = "auto",
    by: Literal["slices", "leaders", "turns"] = "slices",
    momentum: MomentumUse = "local",
    buffers: Buffers = "averaged",
    bits: int = 32,
    fragments: int = 1,
    fragment_sync_delay: int = 0,
) -> Levels:
    """Gradients inside the node in every step, parameters between nodes every `sync_every` steps."""
    if sync_every == "auto":
        hint = "with sync_every='auto' there is no period of so many steps; write sync_every=64 with it"
        checks.whole("fragments", fragments, 1, 1, hint)
        checks.whole("fragment_sync_delay", fragment_sync_delay, 0, 0, hint)
        rounds: Rounds = EveryEpoch()
        overlap: Overlap = Bucketwise()
    else:
        rounds, overlap = staggered(sync_every, fragments, fragment_sync_delay)
    near = Strategy(topology=Flat(axis=NODE), name="near")
    far = Strategy(
        subject="delta",
        rounds=rounds,
        compressor=of_bits(bits),
        topology=Hierarchical(by=by),
        overlap=overlap,
        merge=Average(),
        momentum=momentum,
        buffers=buffers,
        name="far",
    )
    return Levels((near, far))
