"""Which topology, where the strategy leaves it open: by the bytes it sends, and what arrives for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tacit.contracts import Topology
from tacit.lots import choice
from tacit.session.plan import Ground, Plan, Spot
from tacit.transports.meter import Rehearsal

FEW = 2
"""Ranks up to which two phases save nothing: each sends its whole payload once, either way."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        sent: for each candidate, the bytes that the busiest rank sends where compressors meet, for all lots
            once: in a round, or where parts have rounds of their own, in one of each. Empty where there was
            nothing to choose.
        prices: what a byte by each counts for.
        few: whether there are so few ranks that the first candidate is taken, whatever the bytes.
        because: why there was nothing to choose, where a choice was asked for.
    """

    topology: Topology
    sent: Mapping[Topology, int] = field(default_factory=dict)
    because: str = ""
    prices: Mapping[Topology, float] = field(default_factory=dict)

    few: bool = False

    @property
    def weighed(self) -> dict[Topology, float]:
        """What the candidates are compared by: their bytes times what a byte of each counts for."""
        return {each: sent * self.prices[each] for each, sent in self.sent.items()}


def choose(ground: Ground, names: Sequence[Sequence[str]]) -> Choice:
    """The topology for these lots; equal on all ranks, as they ask the same of the same lots.

    Raises:
        ConfigError: the topology cannot be used with one of the compressors.
    """
    if not names:
        return Choice(ground.topology)
    compressors = dict.fromkeys(choice(name, p, ground.policy) for name, p in ground.tensors.items())
    options, because, prices = ground.topology.options(compressors)
    counts = dict(zip(options, prices or [1.0] * len(options), strict=True))
    sent: dict[Topology, int] = {}
    if len(options) > 1:
        sent = {each: foretold(replace(ground, topology=each), names) for each in options}
    found = Choice(options[0], sent, because, counts, few=ground.spot.here.peers <= FEW)
    if sent and not found.few:
        weighed = found.weighed
        found = replace(found, topology=min(options, key=lambda each: weighed[each]))
    for compressor in compressors:
        found.topology.fields(compressor)
    return found


def foretold(ground: Ground, names: Sequence[Sequence[str]]) -> int:
    """The bytes that the busiest rank sends in a round on the axis where compressors meet.

    In the last phase, where a compressor has phases: most rounds are of that one.
    """
    plan, axis = Plan(ground, names), ground.topology.meets
    # Who keeps most for itself and who keeps least stand for all: the first rank on the axis and the last.
    spots = {spot for spot in ground.spots if spot.here.rank in (0, spot.here.peers - 1)}

    def sent(i: int, spot: Spot) -> int:
        last_phase = max((0, *plan.lots[i].compressor.changes))
        return plan.rehearse(i, Rehearsal(), spot, last_phase).sent[axis]

    return max(sum(sent(i, spot) for i in range(len(plan.lots))) for spot in spots)
