"""A strategy that is chosen while it trains (after Agarwal et al., MLSys 2022, arXiv 2103.00543).

The paper measures that compression helps only on some networks and models, and foretells where by a model of
a step's time. `auto` trains its first steps as `dense` does, measures, and asks a decider, which foretells
the time of a step with each candidate. The session goes on with the one that was chosen, which may be plain
DDP.

Differences from the paper: the candidates are tacit's, by what the user accepts; and what was chosen is
watched, and chosen again where steps take another time than was predicted.
"""

from __future__ import annotations

from collections.abc import Mapping

from tacit.algorithms.registry import algorithm
from tacit.strategy import Accept, AutoStrategy
from tacit.topologies.schedules import found_factors

CANDIDATES: Mapping[Accept, tuple[str, ...]] = {
    "exact": ("ddp", "dense"),
    "rounded": ("bf16", "int8", "qsgd"),
    "feedback": ("efsign", "topk:ratio=0.01", "dgc", "onebit-adam", "powersgd"),
    "periodic": (
        "lowbit",
        "zeroone-adam",
        "localsgd",
        "diloco",
        "streaming-diloco",
        "ednncomm:sync_every=8",
        "daso",
    ),
}
"""What each word adds to those before it, as texts of algorithms; in `dgc` and `onebit-adam` the optimizer's
own momentum is filled in."""
SENT_LATE = frozenset({"efsign", "topk", "powersgd"})
"""Algorithms whose error feedback sends much of a gradient many steps later. Where steps are not linear in
gradients, as Adam's are not, this cost accuracy where it was measured (docs/accuracy.md)."""

SHAPED, DIRECT = range(4, 257), range(3, 17)
"""Among so many ranks shapes of an all-reduce are candidates, as schedules of more take seconds to make; and
direct sums, which take P - 1 times the bytes."""
_FEWER_TRIPS: Mapping[Accept, tuple[str, ...]] = {
    "rounded": ("bf16:topology=halving-doubling",),
    "feedback": ("powersgd:topology=halving-doubling",),
    "periodic": ("localsgd:topology=halving-doubling", "diloco:topology=halving-doubling"),
}
"""Candidates among `SHAPED` ranks: fewer round trips, and as many bytes."""
_ONE_TRIP: Mapping[Accept, tuple[str, ...]] = {
    "rounded": ("int8:topology=all-gather", "qsgd:topology=all-gather"),
    "feedback": ("powersgd:topology=direct", "efsign:topology=all-gather"),
    "periodic": ("lowbit:topology=all-gather",),
}
"""Candidates among `DIRECT` ranks: one round trip, and more bytes."""


def shaped(nodes: int, ranks: int) -> list[str]:
    """The texts of `dense` by other shapes than a ring, for so many nodes of so many ranks each."""
    world = nodes * ranks
    words = ["direct"] if world in DIRECT else []
    if world in SHAPED:
        words += ["halving-doubling", "double-tree"]
        factors = found_factors(world)
        if len(factors) > 1:
            words.append("torus")
        if len(factors) > 2 and factors[-1] > 2:  # else it is halving and doubling, or the torus
            words.append("blueconnect")
        if nodes > 1 and ranks > 1:
            words.append(f"blueconnect-{ranks}x{nodes}")
    return [f"dense:topology={word}" for word in words]


def candidates(accept: Accept, nodes: int = 1, ranks: int = 1) -> list[str]:
    """The texts of all strategies that may be chosen where so much is accepted, on this cluster."""
    allowed = [*CANDIDATES][: [*CANDIDATES].index(accept) + 1]
    world, found = nodes * ranks, []
    for word in allowed:
        found += [*CANDIDATES[word], *(shaped(nodes, ranks) if word == "exact" else ())]
        found += _FEWER_TRIPS.get(word, ()) if world in SHAPED else ()
        found += _ONE_TRIP.get(word, ()) if world in DIRECT else ()
    return found


def accuracy_hint(text: str) -> str:
    """A sentence on where its cost in accuracy stands; nothing if its numbers are DDP's."""
    if text in CANDIDATES["exact"]:
        return ""
    return f"What it costs in accuracy: tacit list {text.partition(':')[0]}"


@algorithm(
    family="automatic",
    paper="after Agarwal et al. 2022, arXiv 2103.00543",
    compresses=False,
    changes="measures the first steps, chooses one of the other algorithms, plain DDP included, and goes on "
    "with it",
)
def auto(
    accept: Accept = "rounded",
    watch: int | None = 100,
    tolerance: float = 0.25,
    rest: int = 1000,
) -> AutoStrategy:
    """Begins as `dense`; `accept` says what may be chosen."""
    return AutoStrategy(accept=accept, watch=watch, tolerance=tolerance, rest=rest)
