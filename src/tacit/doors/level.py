"""One level of a strategy at work on a DDP model: a session, its transport, and the door where it stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tacit.contracts import Memory
from tacit.doors import served
from tacit.doors.ddp import GradientDoor
from tacit.doors.moments import Moments
from tacit.doors.optimizer import ProgressDoor, fragments
from tacit.doors.stepped import SteppedDoor, described
from tacit.lots import Policy, cut
from tacit.session import Session
from tacit.strategy import Strategy
from tacit.topologies.star import Star
from tacit.transports.servers import StarTransport
from tacit.transports.torch import TorchTransport


class Level:
    """One strategy at work. A collective call, as process groups are made.

    `alike`: whether a nearer level keeps the parameters of a node's ranks equal.

    Attributes:
        gradient: the door in backward, where gradients are exchanged.
        progress: the door after `optimizer.step`, where replicas move on their own.
        stepped: the door around it, where a server steps.
        moments: what stands beside the parameters there.
    """

    gradient: GradientDoor | None = None
    progress: ProgressDoor | None = None
    stepped: SteppedDoor | None = None
    moments: Moments | None = None

    def __init__(
        self,
        strategy: Strategy,
        model: DistributedDataParallel,
        named: dict[str, Tensor],
        *,
        nodes: Sequence[Sequence[int]] = (),
        policy: Policy | None = None,
        timeout: timedelta,
        lr: Callable[[], float] = lambda: 0.0,
        memory: Memory | None = None,
        share: float = 1.0,
        alike: bool = False,
        optimizers: Sequence[Optimizer] = (),
        servers: served.Addresses = (),
    ) -> None:
        self.strategy = strategy = strategy.told(memory or {})
        self.transport: TorchTransport | StarTransport = TorchTransport(model.process_group, timeout, nodes)
        quiet = strategy.subject == "nothing"
        buffers = _float_buffers(model) if strategy.subject == "progress" else {}
        local = strategy.buffers == "local"
        tensors = named if local else {**named, **buffers}
        cap = int(model.bucket_bytes_cap)
        parts = [] if quiet else fragments(tensors, strategy.rounds.parts)
        lots = [
            lot for part in parts for group in _apart(part, named, alike) for lot in cut(group, tensors, cap)
        ]
        if isinstance(strategy.topology, Star):
            homes = served.homes(tensors, len(servers))
            cap = served.lot_cap(strategy, tensors, len(servers), model.process_group.size(), cap)
            lots = [lot for part in parts for lot in served.cut_by_home(part, tensors, homes, cap)]
            rule = described(optimizers) if strategy.topology.optimizer == "server" else None
            self.transport = served.connect(self.transport, strategy, tensors, servers, homes, timeout, rule)
        chosen = None if policy is None else _of_parameters(policy, named)
        self.session = Session(strategy, tensors, self.transport, lots, chosen, lr, memory)
        self.session.alike = frozenset(named if alike else ())
        if quiet:
            return
        self.transport.open(self.session.stages)
        if isinstance(strategy.topology, Star) and strategy.topology.optimizer == "server":
            self.stepped = SteppedDoor(self.session, tensors, strategy.topology.back)
            self.fetch()
        elif strategy.subject == "gradient":
            self.gradient = GradientDoor(self.session, tensors)
        else:
            self.progress = ProgressDoor(self.session, tensors, named, share, lr)
            self.fetch()
        if self.progress is not None and not strategy.topology.apart:
            self.moments = Moments(self.session, optimizers, named, buffers if local else {})
            self.progress.landed = self.moments.landed

    def fetch(self) -> None:
        """Go on from the parameters that the servers have, where these keep them. A collective call."""
        door = self.progress or self.stepped
        if not isinstance(self.transport, StarTransport) or door is None:
            return
        servers, star = self.transport.servers, self.strategy.topology
        assert isinstance(star, Star)
        if not star.apart:
            return
        door.enter(lambda lot, x: servers.of(lot).enter(x, f"{lot}/0", star.back(x)))
        served.wait_for_all(self.transport.peers)

    def metrics(self) -> dict[str, float]:
        """See `Session.metrics`; with parameter servers, what was pushed and pulled too."""
        numbers = self.session.metrics()
        if isinstance(self.transport, StarTransport):
            numbers |= self.transport.servers.counts()
        return numbers

    def servers(self) -> list[dict[str, Any]]:
        """What its parameter servers tell of themselves."""
        return self.transport.servers.facts() if isinstance(self.transport, StarTransport) else []

    def after_step(self) -> None:
        """To be called after every attempt of the optimizer."""
        if self.progress is not None:
            self.progress.after_step()
        elif self.stepped is not None:
            self.stepped.after_step()
        else:
            self.session.step += 1

    def sync(self) -> None:
        """A round now, where replicas may differ."""
        door = self.progress or self.stepped
        if door is not None:
            door.sync()

    def settle(self) -> None:
        """Average what has stayed local beside the parameters."""
        if self.moments is not None:
            self.moments.settle()

    def close(self, failed: bool = False) -> None:
        """Drain, and leave the process groups to others; but after a failure messages may be on their way."""
        self.session.close()
        if failed:
            self.transport.abort()
        self.transport.close()


def _apart(part: list[str], named: dict[str, Tensor], alike: bool) -> list[list[str]]:
    """What the ranks of a node have alike, and what they have not: it travels apart, where that matters."""
    if not alike:
        return [part]
    return [[name for name in part if (name in named) == ours] for ours in (True, False)]


def _of_parameters(policy: Policy, named: dict[str, Tensor]) -> Policy:
    """Buffers that travel along are dense, and the policy is not asked about them."""
    return lambda name, tensor: policy(name, tensor) if name in named else None


def _float_buffers(model: DistributedDataParallel) -> dict[str, Tensor]:
    return {n: b for n, b in model.module.named_buffers() if b.is_floating_point() and b.numel()}


def own_timeout(group: dist.ProcessGroup) -> timedelta:
    """The group's own time-out."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout
