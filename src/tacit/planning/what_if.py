"""Predictions for a diagnosis: the seconds of a step with one thing changed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from tacit.algorithms import parse
from tacit.contracts import WORLD
from tacit.errors import AttachError, ConfigError, TacitError, first_line
from tacit.levels.node_layout import measured_links
from tacit.levels.spec import AttachSpec
from tacit.links import Links
from tacit.model.trained_model import local, locals_of
from tacit.moments import Watch
from tacit.planning.candidates import CandidateCheck
from tacit.planning.cluster_prediction import Prediction
from tacit.planning.diagnosis import Facts
from tacit.planning.profile import Profile
from tacit.planning.simulation import networks
from tacit.planning.simulation.clock import Network
from tacit.planning.simulation.rehearsal import rehearse
from tacit.planning.step_prediction import StepPredictor
from tacit.planning.step_profiler import gather_found, take
from tacit.planning.step_timer import StepTimer
from tacit.strategy import Accept, AnyStrategy
from tacit.topologies import Hierarchical
from tacit.transports.probing import ring_cost
from tacit.transports.process_groups import rank_in

MOST_NODES = 16
"""With more nodes links are not measured one by one, which would take minutes."""
_LARGE, _LARGE_ON_GPU = 25 << 20, 100 << 20
_SMALLER = 10 << 20
_COPIED = 16 << 20
_SIDE, _PRODUCTS, _TIMES = 384, 10, 3


def considered(
    facts: Facts, timer: StepTimer, options: AttachSpec, links: Links | None
) -> tuple[Facts, list[str]]:
    """Add measurements and the planner's predictions to the facts. A collective call.

    Args:
        timer: has timed the steps.
        links: measured before; None: they are measured now.

    Returns: The facts, equal on all ranks, and notes on what could not be measured.
    """
    asking = _Asking(facts, timer, options)
    asking.measure(links)
    try:
        asking.ask()
    except TacitError as error:
        asking.notes.append(f"what would be faster ({first_line(error)})")
    return asking.facts, asking.notes


@dataclass(eq=False)
class _Asking:
    facts: Facts
    timer: StepTimer
    options: AttachSpec
    notes: list[str] = field(default_factory=list)

    @property
    def _watch(self) -> Watch:
        first = local(next(iter(self.options.named.values())))
        return Watch(time.thread_time, first.device if self.timer.on_gpu else None)

    def measure(self, links: Links | None) -> None:
        """Measure the links, the copies into buckets, and what threads do to products."""
        if links is None and len({each.node for each in self.facts.ranks}) > MOST_NODES:
            self.notes.append(f"the links one by one, as there are more than {MOST_NODES} nodes")
        elif links is None:
            try:
                links = measured_links(self.options.group, self.options.mesh)
            except TacitError as error:  # equal on all ranks
                self.notes.append(f"the links one by one ({first_line(error)})")
        self.facts = replace(
            self.facts,
            links=links,
            copying=self._copying(),
            threads_gain=self._threads_gain(),
        )

    def _copying(self) -> float:
        """Seconds a step for copies of all gradients, there and back; the median over the ranks."""
        ddp = self.options.ddp
        if ddp is None or ddp.gradient_as_bucket_view:
            return 0.0
        nbytes = sum(p.numel() * p.element_size() for p in self.options.named.values())
        device = next(iter(self.options.named.values())).device

        def mine() -> float:
            source = torch.ones(min(nbytes, _COPIED) // 4, dtype=torch.float32, device=device)
            target = torch.empty_like(source)

            def both() -> None:
                target.copy_(source)
                source.copy_(target)

            return min(self._watch.took(both) for _ in range(_TIMES)) * nbytes / max(4 * source.numel(), 1)

        return median(self._everyones(mine))

    def _threads_gain(self) -> float:
        """The share of a matrix product's time that is saved if the ranks of a machine divide its cores."""
        ranks = self.facts.ranks
        here = next(each for each in ranks if each.rank == rank_in())
        mates = sum(each.machine == here.machine for each in ranks)
        now, wanted = here.threads, max(1, here.cores // mates)
        if not any(self._everyones(lambda: float(mates * now > here.cores and now > 1))):
            return 0.0
        many = self._product_seconds()
        torch.set_num_threads(wanted)
        try:
            few = self._product_seconds()
        finally:
            torch.set_num_threads(now)
        return max(0.0, median(self._everyones(lambda: 1 - few / many)))

    def _product_seconds(self) -> float:
        x, took = torch.ones(_SIDE, _SIDE, dtype=torch.float32), []
        for _ in range(_TIMES):
            self._everyones(float)  # so that all begin at once
            begun = time.perf_counter()
            for _ in range(_PRODUCTS):
                torch.mm(x, x)
            took.append(time.perf_counter() - begun)
        return median(took)

    def _everyones(self, mine: Callable[[], float]) -> list[float]:
        return [float(each) for each in gather_found(lambda: repr(mine()), self.options.group)]

    # ---- the planner ----------------------------------------------------------------------------------

    def ask(self) -> None:
        """Predict a step with the present strategy, and with each change.

        Raises:
            ConfigError: the strategy at work cannot be predicted.
        """
        options, strategy = self.options, self.options.strategy
        ring = ring_cost(options.group)
        profile = take(self.timer, options, ring)
        self.facts = replace(self.facts, gpu=profile.gpu)
        network = _network(self.facts.links, profile, options.group.size(), ring.rate, ring.latency)
        predictor = StepPredictor(
            profile=profile,
            network=network,
            tensors=locals_of(options.named),
            slowest=lambda mine: max(self._everyones(lambda: mine)),
        )
        present = predictor.predict(strategy)
        buckets = rehearse(strategy, profile, network.nodes, network.ranks)[-1].buckets
        self.facts = replace(self.facts, buckets=len(buckets), bucket_bytes=profile.bucket_bytes)
        if present is None:
            raise ConfigError(f"{strategy.name!r} cannot be predicted")
        self.facts = replace(
            self.facts,
            predicted=present.seconds,
            waits={"encoding": present.encoding, "links": present.far + present.near},
        )
        found = changes(predictor, strategy, self.facts, options.ddp is not None)
        best = self._fastest(predictor, present)
        if best is not None:
            found["strategy"] = best.seconds
            self.facts = replace(self.facts, best=best.algorithm)
        self.facts = replace(self.facts, changes=found)

    def _fastest(self, predictor: StepPredictor, present: Prediction) -> Prediction | None:
        """What `auto` might choose that is faster, as far as the strategy at work accepts it."""
        if self.options.group.size() == 1:
            raise AttachError("this rank is alone, and exchanges nothing")
        given = replace(self.options, steps_per_epoch=None, epochs=None, weight=None, servers=None)
        accept: Accept = "periodic" if self.options.periodic else "feedback"
        texts = CandidateCheck(given).candidates(accept).possible
        others = [parse(text) for text in texts if text != self.options.strategy.name]
        found = predictor.predict_all(others, present.seconds)
        return min(found, key=lambda each: each.seconds, default=None)


def changes(predictor: StepPredictor, strategy: AnyStrategy, facts: Facts, by_ddp: bool) -> dict[str, float]:
    """The seconds of a step with one thing changed, by its name. A collective call.

    Args:
        by_ddp: whether DDP cuts the buckets.
    """
    found = {}
    for change, changed, other in _changes(predictor, strategy, facts, by_ddp):
        prediction = changed.predict(other)
        if prediction is not None:
            found[change] = prediction.seconds
    return found


def _changes(
    predictor: StepPredictor, strategy: AnyStrategy, facts: Facts, by_ddp: bool
) -> Iterator[tuple[str, StepPredictor, AnyStrategy]]:
    """Each change by its name, with the predictor of steps with it, and the strategy."""
    links, network, profile = facts.links, predictor.network, predictor.profile
    gpu, large = network.gpu, _LARGE if profile.gpu is None else _LARGE_ON_GPU

    def faster(factor: float) -> StepPredictor:
        """All links between nodes carry so many times as much."""
        rates = tuple(rate * factor for rate in network.rates)
        of_gpus = replace(gpu, rate=gpu.rate * factor)
        changed = replace(network, rate=network.rate * factor, rates=rates, gpu=of_gpus)
        return replace(predictor, network=changed)

    if links is not None and len(links.hosts) > 1:
        slow = links.slow()
        if slow:
            fast = median(links.between(links.rate_both_ways, slow)) / 8
            even = faster(fast / network.rate)
            yield "even links", replace(even, network=replace(even.network, rates=())), strategy
        one, several = links.between(links.rate), links.between(links.rate_of_flows)
        ratio = median(many / single for many, single in zip(several, one, strict=True))
        if ratio > 1:
            yield "several streams", faster(ratio), strategy
        if gpu.rate and median(several) / 8 > gpu.rate:
            more = replace(gpu, rate=median(several) / 8)
            yield "NCCL's sockets", replace(predictor, network=replace(network, gpu=more)), strategy
    if idle := min(len(each.idle) for each in facts.ranks):
        yield "all interfaces", faster(1 + idle), strategy
    if gpu.near_rate:
        near = replace(network, gpu=replace(gpu, near_rate=math.inf, near_latency=0.0))
        yield "NVLink", replace(predictor, network=near), strategy
    if profile.bucket_bytes < large:
        yield "large buckets", replace(predictor, profile=replace(profile, bucket_bytes=large)), strategy
    if profile.bucket_bytes > _SMALLER and by_ddp:
        smaller = replace(profile, bucket_bytes=_SMALLER)
        yield "smaller buckets", replace(predictor, profile=smaller), strategy
    near_level = strategy.levels[0]
    alone = len(strategy.levels) == 1 and near_level.subject != "delta" and near_level.topology.meets == WORLD
    if alone and network.nodes > 1 and network.ranks > 1:
        name = f"{near_level.name} by node"
        by_node = replace(near_level, subject="gradient", topology=Hierarchical(), name=name)
        yield "by node", predictor, by_node


def _network(links: Links | None, profile: Profile, ranks: int, rate: float, latency: float) -> Network:
    """The measured cluster; a ring of all ranks if nodes differ, or links are not known."""
    if links is None or len({len(node) for node in links.ranks}) > 1:
        return networks.of_ring(ranks, 1, rate, latency, profile)
    return networks.measured(links, profile)
