"""Dry runs of a strategy on a model and a cluster: the messages of each bucket's exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tacit.contracts import NET, NODE, WORLD, AxisRank, ByLinks
from tacit.errors import ConfigError
from tacit.kernels.dispatch import warm_up_for
from tacit.levels.device_placement import needs_host
from tacit.planning.profile import Profile
from tacit.planning.simulation.echo import Layout
from tacit.replicas.fragments import fragments
from tacit.session.buckets import divided, fitting, group_names, most_bytes
from tacit.session.exchange_plan import Plan
from tacit.session.session_context import Coordinate, SessionContext
from tacit.session.topology_choice import choose
from tacit.strategy import AnyStrategy, Strategy
from tacit.transports.meter import DryRun, SentMessage

_FIRST_BUCKET = 1 << 20
"""The bytes that close DDP's first bucket, if the script does not set `bucket_cap_mb`."""
_CAP = 25 << 20
_MOST_UNEVEN = 64
TRAINING = {"steps_per_epoch": 100.0, "epochs": 10.0}
"""The training that is assumed for strategies that depend on epochs."""


@dataclass(frozen=True)
class NodeMessage:
    """A collective of an exchange, for a whole node.

    Attributes:
        own: the collective for this rank.
        crossing: bytes that leave the busiest node.
        by_node: bytes that leave each node, if they differ.
    """

    own: SentMessage
    crossing: int
    by_node: tuple[int, ...] = ()


@dataclass(frozen=True)
class BucketScript:
    """The exchange of a bucket in a round.

    Attributes:
        names: the names of its parameters.
        messages: its collectives, in order.
        part: the number of its part of the model.
    """

    names: tuple[str, ...]
    numel: int
    messages: tuple[NodeMessage, ...]
    part: int = 0


@dataclass(frozen=True)
class LevelScript:
    """A level of a strategy, ready for the simulation.

    Attributes:
        strategy: its strategy, with the topology that a session would choose.
        on_gpu: whether its exchanges run on a GPU, in stream order.
    """

    strategy: Strategy
    buckets: tuple[BucketScript, ...]
    on_gpu: bool = False


def ddp_buckets(profile: Profile) -> list[list[str]]:
    """DDP's buckets from the second step on: gradients in the order in which they are ready."""
    ready = sorted(profile.step.parameters, key=lambda each: each.ready)
    limit = _FIRST_BUCKET if profile.bucket_bytes == _CAP else profile.bucket_bytes
    buckets: list[list[str]] = [[]]
    size = 0
    for each in ready:
        buckets[-1].append(each.name)
        size += each.nbytes
        if size >= limit:
            buckets.append([])
            size, limit = 0, profile.bucket_bytes
    return [bucket for bucket in buckets if bucket]


def level_buckets(strategy: Strategy, profile: Profile) -> list[tuple[int, list[str]]]:
    """The buckets of a level, in the order of sending, each with its part of the model."""
    named, topology = profile.named, strategy.topology
    if strategy.subject != "delta":
        return [(0, names) for names in divided(ddp_buckets(profile), named, topology)]
    return [
        (part, bucket)
        for part, names in enumerate(fragments(named, strategy.parts))
        for bucket in group_names(names, named, most_bytes(topology, profile.bucket_bytes))
    ]


def rehearse(strategy: AnyStrategy, profile: Profile, nodes: int, ranks: int) -> tuple[LevelScript, ...]:
    """Run every exchange of a round dry, as the ranks of a node would take part in it; by level, near to far.

    Raises:
        ConfigError: the strategy does not fit this model or this number of ranks.
    """
    layout = Layout(nodes, ranks)
    with warm_up_for("meta"):  # no kernel will run: numba alone takes a second to load
        return tuple(
            _level(each, profile, layout, replicated=number > 0)
            for number, each in enumerate(strategy.levels)
        )


def _level(strategy: Strategy, profile: Profile, layout: Layout, replicated: bool) -> LevelScript:
    strategy = strategy.for_training(TRAINING)
    buckets = level_buckets(strategy, profile)
    named = profile.named
    names = [names for _, names in buckets]
    policy = fitting(strategy.compressor, named)
    topology = choose(SessionContext(strategy, layout, named, policy), names).topology
    strategy = replace(strategy, topology=topology)
    on_gpu = _on_gpu(strategy, profile)
    plan, scripts = Plan(SessionContext(strategy, layout, named, policy), names), []
    for i, (part, bucket_names) in enumerate(buckets):
        step = max((0, *plan.buckets[i].compressor.changes))
        if isinstance(topology, ByLinks) and topology.meets == WORLD:
            scripts.append(
                BucketScript(tuple(bucket_names), plan.buckets[i].numel, _uneven(plan, i, step, layout), part)
            )
            continue
        found = [
            plan.run_dry(i, DryRun(), coordinate, step).messages for coordinate in _senders(plan, i, layout)
        ]
        messages = [
            NodeMessage(_busiest(each), _crossing([other[k] for other in found], layout))
            for k, each in enumerate(found[0])
            if not (replicated and each.kind == "ReduceScatter" and each.axis == NODE)
        ]
        scripts.append(BucketScript(tuple(bucket_names), plan.buckets[i].numel, tuple(messages), part))
    return LevelScript(strategy, tuple(scripts), on_gpu)


def _on_gpu(strategy: Strategy, profile: Profile) -> bool:
    """Whether its exchanges run on the GPU of the profile; those of plain DDP do by NCCL."""
    if profile.gpu is None:
        return False
    if strategy.subject == "nothing":
        return profile.gpu.by_nccl
    policy = fitting(strategy.compressor, profile.named)
    return profile.gpu.in_stream and not needs_host(strategy, profile.named, policy)


def _uneven(plan: Plan, i: int, step: int, layout: Layout) -> tuple[NodeMessage, ...]:
    """The messages of an exchange in which ranks send different numbers of bytes."""
    context = plan.session_context
    if len(context.coordinates) > _MOST_UNEVEN:
        raise ConfigError(
            f"{context.topology} is predicted for up to {_MOST_UNEVEN} ranks, as each sends another number "
            f"of bytes, and there are {len(context.coordinates)}: plan for fewer nodes"
        )
    found = [plan.run_dry(i, DryRun(), each, step).messages for each in context.coordinates]
    messages = []
    for own, *others in zip(*found, strict=True):
        by_rank = [_crossing([each], layout) for each in (own, *others)]
        # `_crossing` is for a node whose ranks all send as this one does.
        nodes = [by_rank[k : k + layout.each] for k in range(0, len(by_rank), layout.each)]
        by_node = [round(sum(node) / layout.each) for node in nodes]
        messages.append(NodeMessage(own, max(by_node), tuple(by_node)))
    return tuple(messages)


def _senders(plan: Plan, i: int, layout: Layout) -> list[Coordinate]:
    """The ranks of a node that send in a round; one for all if the topology is not by node."""
    here = plan.session_context.coordinate
    spans = plan.spans[i]
    in_turns = sum(stop - start for start, stop in spans) > plan.buckets[i].numel
    if not plan.session_context.by_node or in_turns:
        return [here]
    return [here._replace(near=AxisRank(place, layout.each)) for place in range(layout.each)]


def _crossing(of_node: Sequence[SentMessage], layout: Layout) -> int:
    """The bytes that leave a node, whose ranks take part in a collective as in `of_node`.

    On the axis of all ranks, `of_node` has one rank, and all others do the same. There a ring passes from
    node to node once; of an all-to-all, the parts for ranks in other nodes leave the node; a `Permute` says
    which rank sends to which.
    """
    first = of_node[0]
    if layout.count == 1 or first.axis == NODE:
        return 0
    if first.axis == NET:
        return sum(_busiest(each).sent for each in of_node)
    if first.kind == "AllToAll":
        away = layout.count * layout.each - layout.each
        return round(layout.each * first.sent * away / max(layout.count * layout.each - 1, 1))
    if first.kind == "Permute":
        sending = Counter(
            rank // layout.each
            for rank, end in enumerate(first.to)
            if end is not None and end // layout.each != rank // layout.each
        )
        return first.size * max(sending.values(), default=0)
    return first.sent


def _busiest(message: SentMessage) -> SentMessage:
    """The message of a rank that sends, for which all others wait."""
    return message._replace(sent=message.size) if message.kind == "Permute" else message
