"""SparseLoCo: a few entries of each chunk, of replicas' progress (Sarfi et al. 2025, arXiv 2508.15706).

The paper's outer step t, on each worker r:         here:
    H steps of AdamW from theta: theta_r            the user's optimizer
    e_r <- beta e_r + (theta - theta_r)             ErrorFeedback(decay=beta)
    s_r <- Q(the k largest of each chunk of e_r)    TopK(k / chunk, values=TwoMagnitudes(64), chunk)
    e_r <- e_r - s_r                                ErrorFeedback: what was not sent is the new residual
    theta <- theta - alpha mean_r(s_r)              OuterStep(lr=alpha, momentum=0)

What is left of each round in e_r takes the place of DiLoCo's outer momentum. A bucket of n entries sends
k = 64 (n // 4096) + min(64, n % 4096) of them, to P - 1 peers: their positions in k + ceil((k + (n - 1) //
256) / 8) bytes, which is 9.25 bits each where 12 would tell a place in a chunk; ceil(k / 4) bytes of signs
and sides, and 4 ceil(k / 64) of magnitudes. Of 2^20 entries 16,384 are sent so, in 24,064 bytes, 174 times
less than fp32. `bits=none` sends the chosen entries as they are, 3 to 8 in QSGD's levels.

Differences from the paper: chunks are cut from a bucket's row of entries, not from each tensor in tiles of
64 x 64. 2 bits are a sign and one of two magnitudes, of each 64 values that are sent: with k=64 those of one
chunk. The authors' code has four bins of a tensor's spread, and sends each bin's mean. The mean counts a rank
that did not choose an entry as 0. Biases and norms are sent densely. The ranks are those of the process
group: nobody joins while it trains. The inner optimizer's state stays local.

What could be read: the paper's abstract and introduction (1 to 3 % of the entries, 2 bits, error feedback in
place of momentum), and code of its authors. H = 30 and chunks of 64 x 64 are in tplr-ai/templar
(hparams.json, which sends 32 of each); the compressor is that of their earlier CCLoco, and beta = 0.95 the
default where facebookresearch/MuLoCo has adapted it (quantized_outer_sgd.py). k = 64 is said of the run of
Covenant-72B (arXiv 2603.08163), which was not read; alpha = 1 is plain averaging.
"""

from __future__ import annotations

from tacit import checks
from tacit.algorithms.options.codecs import few_bits
from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import Dense, ErrorFeedback, TopK
from tacit.merges import OuterStep
from tacit.rounds import Every
from tacit.strategy import Strategy

_SHARING = 64
"""Chosen values that have a scale in common: as many as one chunk has by default."""


@algorithm(
    family="periodic",
    paper="SparseLoCo: Sarfi et al. 2025, arXiv 2508.15706",
    compresses=True,
    changes="every few dozen steps the largest entries of each chunk of the replicas' progress travel, "
    "in 2 bits; the rest is sent later, and fades",
)
def sparseloco(
    sync_every: int = 30,
    k: int = 64,
    chunk: int = 4096,
    bits: int | None = 2,
    decay: float = 0.95,
    outer_lr: float = 1.0,
    topology: Way = "all-gather",
) -> Strategy:
    """Of each `chunk` entries of `sync_every` steps' progress the `k` largest are sent; the rest waits."""
    checks.whole("chunk", chunk, 1, None, "it is of how many entries k are chosen; write 4096")
    checks.whole("k", k, 1, chunk, f"so many of each {chunk} entries are sent; write 64 of 4096")
    checks.real("outer_lr", outer_lr, "write 1.0", above=0)
    values = Dense() if bits is None else few_bits(bits, _SHARING)
    chosen = TopK(ratio=k / chunk, values=values, chunk=chunk)
    return Strategy(
        subject="delta",
        rounds=Every(sync_every),
        compressor=ErrorFeedback(chosen, decay=decay),
        topology=way(topology),
        merge=OuterStep(outer_lr, momentum=0.0),
    )
