"""The same training without DDP, Gloo or processes: replicas in threads, whose messages are a loopback's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from model_features import STEPS, Feature, flat, optimizer_of, passes, rates
from torch import Tensor, nn

from in_threads import in_threads
from tacit.algorithms import parse
from tacit.attaching.assembly import fully_named
from tacit.levels.kinds import kind_of
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.optimizer_hooks import momentum
from tacit.overlap import Delayed
from tacit.session.learning_rates import Rates
from tacit.transports.loopback import Loopback, LoopbackTransport

SETTLED = 3
"""The round from which buckets are DDP's buckets."""
Layouts = Sequence[Sequence[Sequence[str]]]


class Member:
    """One replica."""

    def __init__(
        self, rank: int, feature: Feature, algorithm: str, nets: Sequence[Loopback], **known: Any
    ) -> None:
        self.rank, self.feature = rank, feature
        strategy = parse(algorithm)
        self.net = feature.net()
        self.optimizer = optimizer_of(feature, algorithm, self.net)
        self.first = [group["lr"] for group in self.optimizer.param_groups]
        self.data = torch.Generator().manual_seed(rank)
        self.named = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        ddp: Any = SimpleNamespace(
            module=self.net,
            process_group=SimpleNamespace(size=lambda: nets[0].world, rank=lambda: rank),
            bucket_bytes_cap=int(feature.cap * 1024 * 1024),
            find_unused_parameters=bool(feature.ddp.get("find_unused_parameters")),
            parameters_to_ignore=set(),
        )
        self.taken = momentum.planned(strategy, None, [self.optimizer], self.named)
        spec = AttachSpec(
            model=ddp,
            optimizers=[self.optimizer],
            strategy=strategy,
            scaler=torch.amp.GradScaler("cpu") if feature.scaled else None,
            timeout=timedelta(minutes=1),
            **known,
        )
        rates = Rates([self.optimizer], self.named)
        self.levels = []
        for net, level in zip(nets, fully_named(strategy), strict=False):
            with patch(
                "tacit.levels.device_placement.TorchTransport",
                lambda *_, net=net: LoopbackTransport(net, rank),
            ):
                made = kind_of(level)(spec, level, rates, nets[0].groups("node"), taken=self.taken)
                self.levels.append(made)
        for level in self.levels:
            if level.strategy.rounds.follows is not None:
                level.session.schedule.follow(self.levels[-1].session.schedule)
        if self.taken is not None:
            self.taken.take(lambda: self.near.session.step)
        self.before: list[Tensor] | None = None

    @property
    def near(self) -> Level:
        """What exchanges gradients, if anything does."""
        return self.levels[0]

    def backward(self, step: int) -> None:
        """Gradients of this replica's own."""
        rates(self.feature, self.optimizer, self.first, step)
        self.optimizer.zero_grad()
        loss = passes(self.feature, self.net, self.net, self.data, lambda loss: loss)
        for level in self.levels:
            if level.progress is not None:
                level.progress.observations.observe(loss)

    def exchange(self, layout: Sequence[Sequence[str]]) -> None:
        """Means in place of gradients, where gradients are exchanged in this step."""
        session = self.near.session
        if self.near.gradient is None or not session.communicates():
            return
        session.pending.begin_anew()
        here = [[slot.name for slot in bucket.slices] for bucket in session.buckets]
        if session.round >= SETTLED and here != layout:
            session.rebucket(layout)
        flats = [bucket.like("cpu").zero_() for bucket in session.buckets]
        for i, bucket in enumerate(session.buckets):
            for slot in bucket.slices:
                grad = self.named[slot.name].grad
                if grad is not None:
                    flats[i][slot.start : slot.stop] = grad.reshape(-1)
            session.submit(i, flats[i], lambda: None)
        used = self.near.used
        idle = set() if used is None else {name for name in self.named if used.idle(name)}
        session.flush()
        if used is not None:
            used.clear()
        self.given = {
            slot.name: flats[i][slot.start : slot.stop]
            for i, bucket in enumerate(session.buckets)
            for slot in bucket.slices
        }
        self.idle = idle
        if isinstance(session.strategy.overlap, Delayed):
            now = {name: each.clone() for name, each in self.given.items()}
            self.given = now if self.before is None else self.before  # type: ignore[assignment]
            self.before = now  # type: ignore[assignment]

    def step(self, step: int, unused: set[str]) -> None:
        """The optimizer's step, and a round of progress behind it."""
        if self.near.gradient is not None and self.near.session.communicates():
            for name, p in self.named.items():
                if name not in unused:
                    p.grad = self.given[name].view_as(p).clone()
        if self.feature.clip is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.feature.clip)
        self.optimizer.step()
        for level in self.levels:
            level.after_step()
        self.feature.after(self.net, step)

    def close(self) -> None:
        """End what runs."""
        for level in self.levels:
            level.session.close()
        if self.taken is not None:
            self.taken.restore()


def trained(
    feature: Feature, algorithm: str, nodes: int, ranks: int, layouts: Layouts, **known: Any
) -> list[Tensor]:
    """What every replica has after its steps; `layouts`: DDP's buckets, step by step."""
    levels = len(parse(algorithm).levels)
    nets = [Loopback.of_nodes(nodes, ranks) for _ in range(levels)]
    crew = [Member(rank, feature, algorithm, nets, **known) for rank in range(nodes * ranks)]
    for step in range(STEPS):
        if crew[0].near.gradient is not None and len(crew[0].levels) == 1:
            _broadcast_buffers(crew)
        for member in crew:  # one after the other: networks draw from one generator, and count their passes
            member.backward(step)
        in_threads(len(crew), lambda rank, step=step: crew[rank].exchange(layouts[step]))
        idle = [getattr(member, "idle", set()) for member in crew]
        unused = set.intersection(*idle) if crew[0].near.used is not None else set()
        in_threads(len(crew), lambda rank, step=step, unused=unused: crew[rank].step(step, unused))
    found = [flat(member.net) for member in crew]
    for member in crew:
        member.close()
    return found


def _broadcast_buffers(crew: Sequence[Member]) -> None:
    """As DDP does before every forward."""
    first = dict(crew[0].net.named_buffers())
    for member in crew[1:]:
        for name, b in member.net.named_buffers():
            b.copy_(first[name])
