"""Measures on this machine what a strategy computes on a rank: encoding, decoding, applying answers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Event

import torch
from torch import Tensor, nn

from tacit.errors import ConfigError
from tacit.kernels.dispatch import warm_up_for
from tacit.moments import Moment, Watch
from tacit.planning.footprint import footprint
from tacit.planning.profile import BucketCost, LevelCost, Profile, StrategyCost
from tacit.planning.simulation.echo import EchoTransport
from tacit.planning.simulation.rehearsal import TRAINING, LevelScript, rehearse
from tacit.replicas.rounds_after_step import OptimizerHook
from tacit.session import Session, Training
from tacit.session.schedule import Schedule
from tacit.strategy import AnyStrategy

_ROUNDS = 3
_SWEPT = 8 << 20
"""The entries that are read and written before each round: more than caches hold."""
_MOST_STEPS = 500
"""The number of steps in which each bucket is sent at least once; later buckets count as free."""


def measured_cost(
    strategy: AnyStrategy,
    profile: Profile,
    nodes: int,
    ranks: int,
    tensors: Mapping[str, Tensor] | None = None,
) -> StrategyCost:
    """Measure a strategy on tensors of this model's shapes, as one rank of such a cluster.

    Nothing is sent. Tensors as large as the model, and the strategy's state, are allocated meanwhile. What
    runs on a GPU in stream order is measured there, by events in its stream; the rest in processor time.

    Args:
        strategy: each of its levels is measured.
        profile: of the model.
        nodes, ranks: of the cluster, and of each node.
        tensors: the parameters, which are not changed; by default random ones.

    Raises:
        ConfigError: the strategy does not fit the model, or needs a parameter server; or the tensors are not
            those of the profile; or there are none, and it runs on a GPU.
    """
    if tensors is not None:
        profile.check_model(tensors)
    elif profile.gpu is not None:
        raise ConfigError(
            f"what {strategy.name!r} costs on {profile.gpu.name} is measured in the training alone: write "
            f"tacit profile --algorithms {strategy.name} -- SCRIPT there"
        )
    scripts = rehearse(strategy, profile, nodes, ranks)
    leaders = [Schedule(scripts[-1].strategy, TRAINING) for _ in scripts[1:]]
    levels = []
    for script, leader in zip(scripts, [*leaders, None], strict=True):
        named = _copies(profile, tensors, script.on_gpu)
        device = next(iter(named.values())).device if script.on_gpu else None
        echo = EchoTransport(nodes, ranks, Watch(device=device))
        levels.append(_level(script, echo, named, leader))
    return StrategyCost(strategy.name, nodes, ranks, tuple(levels))


def _copies(profile: Profile, tensors: Mapping[str, Tensor] | None, on_gpu: bool) -> dict[str, Tensor]:
    """Copies of the parameters, where the strategy's exchanges run."""
    if tensors is not None:
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return copies if on_gpu else {name: copy.cpu() for name, copy in copies.items()}
    return {name: _normal(*p.shape).to(p.dtype) for name, p in profile.named.items()}


def _normal(*shape: int, device: torch.device | None = None) -> Tensor:
    """Normal random numbers, without a global generator."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return made if device is None else made.to(device)


def _level(
    script: LevelScript, echo: EchoTransport, named: dict[str, Tensor], leader: Schedule | None
) -> LevelCost:
    """Measure a level. `leader`: the schedule of the farthest level, if this is another."""
    if script.strategy.subject == "nothing":
        return LevelCost(tuple(BucketCost(each.numel, (0.0, 0.0)) for each in script.buckets))
    with warm_up_for("cuda" if script.on_gpu else "cpu"):
        session = Session(
            script.strategy,
            named,
            echo,
            [list(each.names) for each in script.buckets],
            training=Training(
                rates=lambda: dict.fromkeys(named, 0.01),
                schedule_state=TRAINING,
                replicated_in_node=named if script.strategy.subject == "delta" and leader is None else (),
            ),
            in_stream=script.on_gpu,
        )
    if leader is not None:
        session.schedule.follow(leader)
    try:
        session.connect({})
        if script.strategy.subject == "delta":
            cost = _deltas(session, echo, named)
        else:
            cost = LevelCost(tuple(_exchanges(session, echo)), kept_bytes=_kept([session], named))
        return replace(cost, kept_bytes=cost.kept_bytes + _kept_variances(session, named))
    finally:
        session.close()


def _kept(holders: list[object], named: Mapping[str, Tensor]) -> int:
    return sum(footprint(holders, nn.ParameterList(named.values()), ()).values())


def _kept_variances(session: Session, named: Mapping[str, Tensor]) -> int:
    """Bytes of tacit's copies of Adam's variances."""
    momenta = [bucket.compressor.takes_momentum for bucket in session.buckets]
    frozen = any(each is not None and each.freeze_step is not None for each in momenta)
    if not frozen and session.strategy.renewals is None:
        return 0
    return sum(p.numel() * p.element_size() for p in named.values())


def _exchanges(session: Session, echo: EchoTransport) -> list[BucketCost]:
    """The costs of the buckets' exchanges, run one at a time."""
    device = echo.watch.device
    given = [_normal(b.numel, device=device).to(b.dtype).mul_(0.01) for b in session.buckets]
    swept = torch.zeros(_SWEPT, dtype=torch.float32, device=device)
    apart = session.context.apart
    rounds = []
    # The ranks of a node may send in turn; only rounds in which this one sends count.
    turns = session.context.coordinate.near.peers if session.context.by_node else 1
    for _ in range(1 + _ROUNDS * turns):
        swept.add_(1)  # in training, forward and backward evict it from the caches
        session.begin()
        rounds.append([_exchanged(session, echo, i, x.clone(), apart) for i, x in enumerate(given)])
        session.pending.verify()
        session.advance()
    return [
        BucketCost(
            bucket.numel,
            _medians([segments for segments, _ in own]),
            statistics.median(launching for _, launching in own),
        )
        for bucket, own in zip(session.buckets, zip(*rounds[1:], strict=True), strict=True)
    ]


def _medians(rounds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The median of each segment, over the rounds with the most segments."""
    most = max(map(len, rounds))
    own = [segments for segments in rounds if len(segments) == most]
    return tuple(map(statistics.median, zip(*own, strict=True)))


def _exchanged(
    session: Session, echo: EchoTransport, i: int, x: Tensor, apart: bool
) -> tuple[list[float], float]:
    """The seconds of each segment of one bucket's exchange; and on a GPU the host's, to launch it."""
    over = Event()
    unsent = x if apart and session.strategy.merge.keeps_unsent else None
    out = torch.empty_like(x) if apart else None
    echo.marks.clear()
    echo.watch.settled()  # what x is copied from
    with session.lanes.inside():
        begun = echo.watch.now()
        session.submit(i, x, over.set, unsent, out=out)
        session.lanes.settle()
        launched = echo.watch.now()
        over.wait()
        ended = echo.watch.settled()
    session.failure.raise_first()
    moments = [begun, *(at for _, *pair in echo.marks for at in pair), ended]
    segments = [before.work_until(after) for before, after in zip(moments[::2], moments[1::2], strict=True)]
    if echo.watch.device is None:
        return segments, 0.0
    echoed = sum(posted.host_until(taken) for _, posted, taken in echo.marks)
    return segments, max(0.0, begun.host_until(launched) - echoed)


def _deltas(session: Session, echo: EchoTransport, named: dict[str, Tensor]) -> LevelCost:
    """The cost of the optimizer's hook in two cycles of rounds, without the exchanges."""
    exchanges = _exchanges(session, echo)
    spent = {bucket.name: sum(cost.segments) for bucket, cost in zip(session.buckets, exchanges, strict=True)}
    entries = {bucket.name: bucket.numel for bucket in session.buckets}
    session.resume(0, session.round, session.schedule.state)
    hook = OptimizerHook(session, named)
    main = moved = 0.0
    # The host and a GPU take turns in what follows a step: both count.
    between = Moment.work_until if echo.watch.device is None else Moment.host_until
    for cycle in range(2):
        pending = set(entries)
        for _ in range(_MOST_STEPS):
            for p in named.values():
                p.mul_(1.0 + 1e-3)
            echo.marks.clear()
            hook.observations.observe(1.0)
            begun = echo.watch.settled()
            hook.after_step()
            session.lanes.flush()
            session.lanes.join()
            ended = echo.watch.settled()
            took = between(begun, ended) - sum(between(posted, taken) for _, posted, taken in echo.marks)
            sent = {key for key, *_ in echo.marks if key in entries}
            if cycle:
                main += took - sum(spent[key] for key in sent)
                moved += sum(entries[key] for key in sent)
            pending -= sent
            if not pending:
                break
    session.flush()
    return LevelCost(
        tuple(exchanges),
        max(0.0, main) * sum(entries.values()) / max(moved, 1.0),
        _kept([session, hook], named),
    )
