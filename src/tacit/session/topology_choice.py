"""Which topology, where the strategy leaves it open: by the bytes it sends, and what arrives for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tacit.contracts import Compressor, Topology
from tacit.errors import ConfigError
from tacit.session.buckets import choice
from tacit.session.exchange_plan import Coordinate, Plan, SessionContext
from tacit.transports.meter import DryRun

FEW = 2
"""Ranks up to which two phases save nothing: each sends its whole payload once, either way."""


@dataclass(frozen=True)
class TopologyChoice:
    """What was chosen, and why.

    Attributes:
        sent: for each candidate, the bytes that the busiest rank sends where compressors meet, for all
        buckets
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


def choose(session_context: SessionContext, names: Sequence[Sequence[str]]) -> TopologyChoice:
    """The topology for these buckets; equal on all ranks, as they ask the same of the same buckets.

    Raises:
        ConfigError: the topology cannot be used with one of the compressors.
    """
    if not names:
        return TopologyChoice(session_context.topology)
    compressors = dict.fromkeys(
        choice(name, p, session_context.policy) for name, p in session_context.tensors.items()
    )
    for compressor in compressors:
        _refuse_variable(compressor, session_context.topology)
    options, because, prices = session_context.topology.options(compressors)
    counts = dict(zip(options, prices or [1.0] * len(options), strict=True))
    sent: dict[Topology, int] = {}
    if len(options) > 1:
        sent = {each: foretold(replace(session_context, topology=each), names) for each in options}
    found = TopologyChoice(
        options[0], sent, because, counts, few=session_context.coordinate.here.peers <= FEW
    )
    if sent and not found.few:
        weighed = found.weighed
        found = replace(found, topology=min(options, key=lambda each: weighed[each]))
    for compressor in compressors:
        found.topology.fields(compressor)
    return found


def _refuse_variable(compressor: Compressor, topology: Topology) -> None:
    """Refuse payloads of variable length where nobody is told how long they are."""
    one_shot = compressor.one_shot(0)
    varies = one_shot is not None and one_shot.codec.varies
    if varies and not topology.takes_variable_length:
        raise ConfigError(
            f"{compressor} with topology={topology} is not possible, as ranks expect payloads of a known "
            "length there: write topology=Auto(), or Blockwise in its place (lowbit: entropy=false)"
        )


def foretold(session_context: SessionContext, names: Sequence[Sequence[str]]) -> int:
    """The bytes that the busiest rank sends in a round on the axis where compressors meet.

    In the last phase, where a compressor has phases: most rounds are of that one.
    """
    plan, axis = Plan(session_context, names), session_context.topology.meets
    # Who keeps most for itself and who keeps least stand for all: the first rank on the axis and the last.
    coordinates = {
        coordinate
        for coordinate in session_context.coordinates
        if coordinate.here.rank in (0, coordinate.here.peers - 1)
    }

    def sent(i: int, coordinate: Coordinate) -> int:
        last_phase = max((0, *plan.buckets[i].compressor.changes))
        return plan.run_dry(i, DryRun(), coordinate, last_phase).sent[axis]

    return max(sum(sent(i, coordinate) for i in range(len(plan.buckets))) for coordinate in coordinates)
