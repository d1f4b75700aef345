"""The choice of a topology, if the strategy leaves it open: by bytes, what compression loses, latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tacit.contracts import Compressor, Topology
from tacit.errors import ConfigError
from tacit.session.buckets import choice
from tacit.session.exchange_plan import Plan
from tacit.session.session_context import Coordinate, SessionContext
from tacit.transports.meter import DryRun

FEW = 2
"""The number of ranks up to which two phases save nothing: each sends its whole payload once in both
topologies.
"""


@dataclass(frozen=True)
class TopologyChoice:
    """The chosen topology, and the reasons.

    Attributes:
        sent: for each candidate, the bytes that the busiest rank sends where compressors meet, for all
        buckets
            once: in a round, or if parts of the model have separate rounds, in one round of each. Empty where
            there was nothing to choose.
        prices: the weight of a byte of each.
        delays: the bytes that a link would carry while messages of each are on the way.
        few: whether there are so few ranks that the first candidate is taken, whatever the bytes.
        because: why there was nothing to choose, if the strategy asks for a choice.
    """

    topology: Topology
    sent: Mapping[Topology, int] = field(default_factory=dict)
    because: str = ""
    prices: Mapping[Topology, float] = field(default_factory=dict)
    delays: Mapping[Topology, float] = field(default_factory=dict)

    few: bool = False

    @property
    def weighed(self) -> dict[Topology, float]:
        """The numbers by which candidates are compared: their bytes, weighted, and what latency is worth."""
        return {each: sent * self.prices[each] + self.delays[each] for each, sent in self.sent.items()}


def choose(session_context: SessionContext, names: Sequence[Sequence[str]]) -> TopologyChoice:
    """The topology for these buckets. It is equal on all ranks, as it depends on the buckets alone.

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
    options, because, prices, delays = session_context.topology.options(compressors)
    counts = dict(zip(options, prices or [1.0] * len(options), strict=True))
    late = dict(zip(options, delays or [0.0] * len(options), strict=True))
    sent: dict[Topology, int] = {}
    if len(options) > 1:
        sent = {each: predicted_bytes(_with(session_context, each), names) for each in options}
    few = session_context.coordinate.here.peers <= FEW
    found = TopologyChoice(options[0], sent, because, counts, late, few)
    if sent and not found.few:
        weighed = found.weighed
        found = replace(found, topology=min(options, key=lambda each: weighed[each]))
    for compressor in compressors:
        found.topology.fields(compressor)
    return found


def _with(session_context: SessionContext, topology: Topology) -> SessionContext:
    return replace(session_context, strategy=replace(session_context.strategy, topology=topology))


def _refuse_variable(compressor: Compressor, topology: Topology) -> None:
    """Refuse payloads of variable length where a receiver does not learn their length."""
    one_shot = compressor.one_shot(0)
    varies = one_shot is not None and one_shot.codec.varies
    if varies and not topology.takes_variable_length:
        raise ConfigError(
            f"{compressor} with topology={topology} is not possible, as ranks expect payloads of a known "
            "length there: write topology=Auto(), or Blockwise in its place (lowbit: entropy=false)"
        )


def predicted_bytes(session_context: SessionContext, names: Sequence[Sequence[str]]) -> int:
    """The predicted bytes that the busiest rank sends in a round on the axis where compressors meet.

    If a compressor has phases, those of the last one, to which most rounds belong.
    """
    plan, axis = Plan(session_context, names), session_context.topology.meets
    # The first and the last rank on the axis have the largest and the smallest span, so the busiest is one of
    # them.
    coordinates = {
        coordinate
        for coordinate in session_context.coordinates
        if coordinate.here.rank in (0, coordinate.here.peers - 1)
    }

    def sent(i: int, coordinate: Coordinate) -> int:
        last_phase = max((0, *plan.buckets[i].compressor.changes))
        return plan.run_dry(i, DryRun(), coordinate, last_phase).sent[axis]

    return max(sum(sent(i, coordinate) for i in range(len(plan.buckets))) for coordinate in coordinates)
