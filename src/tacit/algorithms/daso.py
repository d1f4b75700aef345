"""DASO (Coquelin, Debus, Goetz, von der Lehr, Kahn, Siggel & Streit 2021, arXiv 2104.05588).

The paper's method, with M nodes of G ranks:                        here:
    node-local networks average gradients in every step             near level: Flat("node"), NodeRounds(...)
    one global group i = {rank i of every node} talks a sync,       far level: Hierarchical(by="turns"); or
        the groups take turns; its members broadcast in the node        "slices", in which all of them share
    warm-up, cool-down: after every step, blocking, in bf16         Cycling, which applies answers at once;
                                                                        blocking=BF16(), of the delta
    cycling: every B batches, received W batches later              Cycling(period=B, delay=W), fp32
    x <- (2S x + sum_i x_i) / (2S + P)                              StaleMean(), P nodes, lag S
    local synchronization off in all but every L-th batch           NodeRounds(...), from when an answer is
                                                                        applied to the next round
    plateau of the loss: B, L halved, W one less; at B = 1 reset    Cycling.observe; session.observe(loss)

Differences. What travels is the delta since the last anchor, which in fp32 is the same mean, and in
bf16 is not: of parameters, bf16 loses small updates. The weight goes by the lag that an answer really has.
Node mates that L lets drift apart are averaged before an answer is applied, where the authors' code throws
away all but one. Warm-up and cool-down are a tenth of the epochs each, and 4 at most (there: 4). Buffers
travel with the parameters, unless `buffers` says otherwise. `period=auto` is ours.
"""

from __future__ import annotations

from typing import Literal

from tacit import checks
from tacit.algorithms.options.codecs import of_bits
from tacit.algorithms.registry import algorithm
from tacit.compressors import BF16, Dense
from tacit.contracts import NODE
from tacit.merges import StaleMean
from tacit.rounds import Cycling, NodeRounds
from tacit.strategy import Buffers, Levels, MomentumUse, Strategy
from tacit.topologies import Flat, Hierarchical


@algorithm(
    family="hierarchical",
    paper="DASO: Coquelin et al. 2021, arXiv 2104.05588",
    compresses=False,
    changes="gradients are averaged inside each node; between nodes the parameters, every few steps and late",
)
def daso(
    period: int | Literal["auto"] = 4,
    delay: int = 1,
    local: int = 1,
    max_period: int = 8,
    warmup_epochs: int | None = None,
    cooldown_epochs: int | None = None,
    patience: int = 2,
    threshold: float = 0.05,
    staleness: float = 2.0,
    by: Literal["turns", "slices", "leaders"] = "turns",
    bits: int | Literal["paper"] = "paper",
    momentum: MomentumUse = "local",
    buffers: Buffers = "averaged",
) -> Levels:
    """Gradients inside the node in every step; parameters between nodes every few steps, and late."""
    checks.whole("max_period", max_period, 1, None, "write 8, or another multiple of 4")
    schedule = Cycling(period, delay, local, max_period, warmup_epochs, cooldown_epochs, patience, threshold)
    near = Strategy(topology=Flat(axis=NODE), rounds=NodeRounds(schedule), name="near")
    far = Strategy(
        subject="delta",
        rounds=schedule,
        compressor=Dense() if bits == "paper" else of_bits(bits),
        blocking=BF16() if bits == "paper" else None,
        topology=Hierarchical(by=by),
        merge=StaleMean(staleness),
        momentum=momentum,
        buffers=buffers,
        name="far",
    )
    return Levels((near, far))
