"""Workers of one process that train together: what they exchange is tacit's own, without a network.

    Replicas(recipe, parse("topk"), steps=600, seed=0).train()

Each worker has a model, an optimizer and the sessions that `attach` would make, on a transport that hands
tensors over in memory. The trajectory is that of as many processes under DDP, up to the order of sums. It is
for accuracy alone, and for no algorithm whose course depends on time. With a GPU all of it is there, but for
what an algorithm needs on the host.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

from torch import Tensor, nn

from tacit.attaching.assembly import fully_named
from tacit.attaching.requirements import needs_servers
from tacit.contracts import ByLinks
from tacit.errors import ConfigError
from tacit.gradients.ddp_hook import SETTLED
from tacit.levels.kinds import kind_of
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.optimizer_hooks import momentum
from tacit.session.learning_rates import Rates
from tacit.strategy import AnyStrategy, AutoStrategy
from tacit.torch_compat import copy_each_, ddp_buckets
from tacit.transports.loopback import Loopback, LoopbackTransport
from tacit_lab.recipes.recipe import Batch, Recipe, optimizer_of
from tacit_lab.study.graphed import GraphedGradients

T = TypeVar("T")
CPU = "cpu"
SWITCHING = 2e-4
"""Seconds after which a thread hands the interpreter on; workers are threads, and wait for each other."""
PATIENCE = 60.0
"""Seconds that a round of all workers may take."""
CAP, FIRST = 25 << 20, 1 << 20
"""Bytes of a bucket, and of the one that is ready first, as of DDP."""


def refuse(strategy: AnyStrategy) -> None:
    """Refuse what cannot be trained so.

    Raises:
        ConfigError: its course depends on a network, or nothing but its time differs from plain training.
    """
    levels = strategy.levels
    why = None
    if isinstance(strategy, AutoStrategy):
        why = "chooses by what it measures on a network"
    elif needs_servers(strategy):
        why = "needs a parameter server"
    elif any(level.independent for level in levels):
        why = "has ranks that do not wait for each other, so that its course depends on their pace"
    elif any("transfer" in level.rounds.observed_metrics for level in levels):
        why = "takes its period from how long its transfers take"
    elif any(isinstance(level.topology, ByLinks) and level.topology.needs_rates for level in levels):
        why = "goes by rates of links, which are measured"
    elif any(level.overlap.layerwise for level in levels):
        why = "computes what dense does, and differs in time alone"
    if why is not None:
        raise ConfigError(
            f"{strategy.name} cannot be trained with all replicas in one process, as it {why}: leave it out, "
            "or compare it on an emulated network (tacit compare, without --replicas)"
        )


class Crew:
    """A thread for each worker, as each waits for the others inside an exchange."""

    def __init__(self, size: int) -> None:
        self._queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
        for each in self._queues:
            threading.Thread(target=_serve, args=(each,), daemon=True).start()

    def all(self, work: Callable[[int], T]) -> list[T]:
        """Have each worker do it with its number; raises what the first of them raised."""
        futures: list[Future[T]] = []
        for rank, each in enumerate(self._queues):
            futures.append(Future())
            each.put((futures[-1], work, rank))
        return [future.result(PATIENCE) for future in futures]

    def close(self) -> None:
        """End the threads."""
        for each in self._queues:
            each.put(None)


def _serve(tasks: queue.SimpleQueue[Any]) -> None:
    while (task := tasks.get()) is not None:
        future, work, rank = task
        try:
            future.set_result(work(rank))
        except BaseException as error:
            future.set_exception(error)


@dataclass(frozen=True)
class Trained:
    """What came of a training.

    Attributes:
        model: the first worker's, once all replicas are equal.
        loss: the mean of the training losses of the last tenth of the steps.
        sent: bytes that all workers have sent, by the formulas of ring collectives; `plain`: what a dense
            all-reduce of fp32 after every step would have been.
        finite: whether the last loss was a number; if not, training ended there.
        steps: how many were taken.
    """

    model: nn.Module
    loss: float
    sent: int
    plain: float
    finite: bool
    steps: int


class Networks:
    """What workers meet on: one network for what is on their device, and one for what is on the host.

    Args:
        nodes: how many, with so many `ranks` each.
    """

    def __init__(self, nodes: int, ranks: int) -> None:
        self.device, self.host = (Loopback.of_nodes(nodes, ranks) for _ in range(2))

    def end(self, rank: int, *_: object, in_order: bool = False) -> LoopbackTransport:
        """A worker's place in one of them: in the device's, where an exchange runs in stream order."""
        return LoopbackTransport(self.device if in_order else self.host, rank)

    @property
    def sent(self) -> int:
        """Bytes that all have sent."""
        return sum(self.device.sent) + sum(self.host.sent)


class Worker:
    """One replica."""

    def __init__(
        self,
        rank: int,
        recipe: Recipe,
        strategy: AnyStrategy,
        nets: list[Networks],
        *,
        seed: int,
        rate: float,
        known: tuple[int, int],
        device: str,
    ) -> None:
        self.net = recipe.model(seed).to(device)
        self.optimizer = optimizer_of(recipe, self.net, strategy, rate)
        if device != CPU:  # a launch takes longer than a step of so few parameters
            for group in self.optimizer.param_groups:
                group.update(fused=True, foreach=False)
        self.first = [group["lr"] for group in self.optimizer.param_groups]
        self.named: dict[str, Tensor] = {
            name: p for name, p in self.net.named_parameters() if p.requires_grad
        }
        # What a level asks of a DDP object.
        ddp: Any = SimpleNamespace(
            module=self.net,
            process_group=SimpleNamespace(size=lambda: nets[0].device.world, rank=lambda: rank),
            bucket_bytes_cap=CAP,
            find_unused_parameters=False,
            parameters_to_ignore=set(),
        )
        spec = AttachSpec(
            model=ddp,
            optimizers=[self.optimizer],
            strategy=strategy,
            timeout=timedelta(minutes=1),
            seed=seed,
            steps_per_epoch=known[0],
            epochs=known[1],
        )
        rates = Rates([self.optimizer], self.named)
        taken = momentum.planned(strategy, None, [self.optimizer], self.named)
        self.levels: list[Level] = []
        for net, level in zip(nets, fully_named(strategy), strict=True):
            with (
                patch("tacit.levels.device_placement.TorchTransport", partial(net.end, rank)),
                patch("tacit.levels.device_placement.backend_on", lambda *_: "nccl"),
                patch("tacit.exchange.stream_lane.stream_on", lambda _: None),  # all is in one order then
            ):
                made = kind_of(level)(spec, level, rates, nets[0].device.groups("node"), taken=taken)
                self.levels.append(made)
        for made in self.levels:
            if made.strategy.rounds.follows is not None:
                made.session.schedule.follow(self.levels[-1].session.schedule)
        if taken is not None:
            taken.take(lambda: self.near.session.step)
        self._late: dict[str, Tensor] | None = None

    @property
    def near(self) -> Level:
        """The level that exchanges gradients, if one does."""
        return self.levels[0]

    def backward(self, recipe: Recipe, batch: Batch, factor: float) -> float:
        """Gradients of this worker's own; its loss."""
        self.at_rate(factor)
        self.optimizer.zero_grad(set_to_none=False)
        loss = recipe.loss(self.net(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        self.observe(loss)
        return float(loss.detach())

    def at_rate(self, factor: float) -> None:
        """Have the optimizer step with the recipe's learning rate times `factor`."""
        for group, rate in zip(self.optimizer.param_groups, self.first, strict=True):
            group["lr"] = rate * factor

    def observe(self, loss: Tensor) -> None:
        """Tell schedules that follow it of this step's loss."""
        for level in self.levels:
            if level.progress is not None:
                level.progress.observations.observe(loss)

    def step(self) -> None:
        """Means in place of gradients where they are exchanged; the optimizer's step; a round behind it."""
        if self.near.gradient is not None and self.near.session.communicates():
            self._exchange()
        self.optimizer.step()
        for level in self.levels:
            level.after_step()

    def _exchange(self) -> None:
        session = self.near.session
        session.pending.begin_anew()
        if session.round == SETTLED:
            session.rebucket(_as_ddp_fills_them(self.named))
        there = next(iter(self.named.values())).device
        flats = []
        for i, bucket in enumerate(session.buckets):
            gathered = bucket.like(there).zero_()
            for param in bucket.slices:
                grad = self.named[param.name].grad
                if grad is not None:
                    gathered[param.start : param.stop].view_as(grad).copy_(grad)
            flats.append(gathered.to(session.lanes.device))
            session.submit(i, flats[-1], lambda: None)
        session.flush()
        means = {
            param.name: flat[param.start : param.stop]
            for bucket, flat in zip(session.buckets, [each.to(there) for each in flats], strict=True)
            for param in bucket.slices
        }
        if session.strategy.overlap.steps:
            late = {name: mean.clone() for name, mean in means.items()}
            means, self._late = means if self._late is None else self._late, late
        for name, mean in means.items():
            grad = self.named[name].grad
            if grad is not None:
                grad.copy_(mean.view_as(grad))

    def finish(self) -> None:
        """Make the replicas equal."""
        for level in self.levels:
            level.session.flush()
        self.levels[-1].sync()
        for level in self.levels:
            level.consolidate()


def _as_ddp_fills_them(named: Mapping[str, Tensor]) -> list[list[str]]:
    """The names in each bucket of DDP: the last parameters first, as their gradients are ready first."""
    names = [*named][::-1]
    found = ddp_buckets([named[name] for name in names], FIRST, CAP)
    return [[names[i] for i in bucket] for bucket in found]


class Replicas:
    """Workers that train one recipe with one strategy.

    Args:
        workers: how many; `ranks_per_node`: how many of them share a node, for strategies of two levels.
        steps: of the whole run, which the learning rate's course is made for.
        rate: what the recipe's learning rate is multiplied by.
        device: where the networks are: "cpu" or "cuda".
    """

    def __init__(
        self,
        recipe: Recipe,
        strategy: AnyStrategy,
        *,
        steps: int,
        seed: int = 0,
        rate: float = 1.0,
        workers: int = 4,
        ranks_per_node: int = 1,
        device: str = CPU,
    ) -> None:
        self._recipe, self._steps, self._seed, self._device = recipe, steps, seed, device
        each = recipe.steps_per_epoch(workers)
        known = each, math.ceil(steps / each)
        self._nets = [Networks(workers // ranks_per_node, ranks_per_node) for _ in strategy.levels]
        self._workers = [
            Worker(rank, recipe, strategy, self._nets, seed=seed, rate=rate, known=known, device=device)
            for rank in range(workers)
        ]
        self._crew = Crew(workers)

    @property
    def models(self) -> list[nn.Module]:
        """The replicas."""
        return [worker.net for worker in self._workers]

    @property
    def sent(self) -> int:
        """Bytes that all workers have sent until now."""
        return sum(net.sent for net in self._nets)

    def train(self, after: Callable[[int, float], None] = lambda step, loss: None) -> Trained:
        """Train to the end; `after` is called with how many steps have been taken, and a loss of the last."""
        sys.setswitchinterval(SWITCHING)
        workers = self._workers
        losses: list[float] = []
        gradients = self._one_by_one if self._device == CPU else self._graphed()
        shares_buffers = workers[0].near.gradient is not None and len(workers[0].levels) == 1
        for step, batches in zip(range(self._steps), self._batches(), strict=False):
            if shares_buffers:
                self._broadcast_buffers()
            losses += gradients(batches, self._recipe.rate((step + 0.5) / self._steps))
            self._crew.all(lambda rank: workers[rank].step())
            after(step + 1, losses[-1])
            if not math.isfinite(losses[-1]):
                break
        last = losses[-max(1, len(losses) // 10 // len(workers)) * len(workers) :]
        self._crew.all(lambda rank: workers[rank].finish())
        entries = sum(p.numel() for p in workers[0].named.values())
        plain = 8.0 * entries * (len(workers) - 1) * self._steps
        for worker in workers:
            for level in worker.levels:
                level.session.close()
        self._crew.close()
        return Trained(
            workers[0].net.cpu(),
            sum(last) / len(last),
            self.sent,
            plain,
            math.isfinite(losses[-1]),
            len(losses) // len(workers),
        )

    def _one_by_one(self, batches: Sequence[Batch], factor: float) -> list[float]:
        """Each worker's loss; its gradients are in its parameters."""
        return [
            worker.backward(self._recipe, batch, factor)
            for worker, batch in zip(self._workers, batches, strict=True)
        ]

    def _graphed(self) -> Callable[[Sequence[Batch], float], list[float]]:
        """The same, of all workers at once on the GPU."""
        replay = GraphedGradients(self.models, self._recipe.loss, next(self._batches()))

        def all_at_once(batches: Sequence[Batch], factor: float) -> list[float]:
            losses = replay(batches)
            for worker, loss in zip(self._workers, losses.unbind(), strict=True):
                worker.at_rate(factor)
                worker.observe(loss)
            found: list[float] = losses.tolist()
            return found

        return all_at_once

    def _batches(self) -> Iterator[list[Batch]]:
        """What each worker is given in a step, epoch after epoch."""
        size = len(self._workers)
        for epoch in count():
            streams = [self._recipe.train_batches(epoch, rank, size, self._seed) for rank in range(size)]
            yield from map(list, zip(*streams, strict=True))

    def _broadcast_buffers(self) -> None:
        """The first worker's to all, as DDP does before every forward pass."""
        first = [*self._workers[0].net.buffers()]
        for worker in self._workers[1:] if first else ():
            copy_each_([*worker.net.buffers()], first)
