"""A strategy that is chosen while it trains (after Agarwal et al., MLSys 2022, arXiv 2103.00543).

The paper measures that compression helps only on some networks and models, and foretells where by a model of
a step's time. `auto` trains its first steps as `dense` does, measures, and asks a decider, which foretells
the time of a step with each candidate. The session goes on with the one that was chosen, which may be plain
DDP.

Differences from the paper: the candidates are tacit's, by what the user accepts; and what was chosen is
watched, and chosen again where steps take another time than was foretold.
"""

from __future__ import annotations

from collections.abc import Mapping

from tacit.algorithms.registry import algorithm
from tacit.strategy import Accept, AutoStrategy

CANDIDATES: Mapping[Accept, tuple[str, ...]] = {
    "exact": ("ddp", "dense"),
    "lossless": ("bf16",),
    "feedback": ("int8", "efsign", "topk:ratio=0.01", "dgc", "powersgd"),
    "periodic": ("localsgd", "diloco", "streaming-diloco", "ednncomm:sync_every=8", "daso"),
}
"""What each word adds to the words before it, as texts of algorithms; in `dgc` the momentum is filled in."""


def candidates(accept: Accept) -> list[str]:
    """The texts of all strategies that may be chosen where so much is accepted."""
    allowed = [*CANDIDATES][: [*CANDIDATES].index(accept) + 1]
    return [text for word in allowed for text in CANDIDATES[word]]


@algorithm(
    family="automatic",
    paper="after Agarwal et al. 2022, arXiv 2103.00543",
    compresses=False,
    changes="measures the first steps, chooses one of the other algorithms, plain DDP included, and goes on "
    "with it",
)
def auto(
    accept: Accept = "feedback",
    watch: int | None = 100,
    tolerance: float = 0.25,
    rest: int = 1000,
) -> AutoStrategy:
    """Begins as `dense`; `accept` says what may be chosen."""
    return AutoStrategy(accept=accept, watch=watch, tolerance=tolerance, rest=rest)
