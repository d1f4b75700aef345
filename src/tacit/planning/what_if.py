"""Predictions for a diagnosis: the seconds of a step with one thing changed."""

from __future__ import annotations

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
from tacit.model.trained_model import locals_of
from tacit.planning.candidates import CandidateCheck
from tacit.planning.cluster_prediction import Prediction
from tacit.planning.diagnosis import Facts
from tacit.planning.profile import Profile
from tacit.planning.simulation import networks
from tacit.planning.simulation.clock import Network
from tacit.planning.simulation.rehearsal import rehearse
from tacit.planning.step_prediction import StepPredictor
from tacit.planning.step_profiler import take
from tacit.planning.step_timer import StepTimer, recorded_event
from tacit.strategy import Accept, AnyStrategy
from tacit.topologies import Hierarchical
from tacit.transports.probing import ring_cost
from tacit.transports.process_groups import gathered, rank_in

MOST_NODES = 16
"""With more nodes links are not measured one by one, which would take minutes."""
_LARGE = 25 << 20
_SMALLER = 10 << 20
_COPIED = 16 << 20
_SIDE, _PRODUCTS, _TIMES = 384, 10, 3
_LARGE_SIDE, _HAS_TF32 = 4096, (8, 0)
"""Of a product on a GPU; and the least version of GPUs with TF32."""


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
    if timer.on_gpu:
        asking.notes.append("what would be faster, as the planner's clock knows processors only")
        return asking.facts, asking.notes
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

    def measure(self, links: Links | None) -> None:
        """Measure the links, the copies into buckets, and what threads and TF32 do to products."""
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
            tf32_gain=self._tf32_gain(),
        )

    def _copying(self) -> float:
        """Seconds a step for copies of all gradients, there and back; the median over the ranks."""
        ddp = self.options.ddp
        if ddp is None or ddp.gradient_as_bucket_view:
            return 0.0
        nbytes = sum(p.numel() * p.element_size() for p in self.options.named.values())
        device = next(iter(self.options.named.values())).device
        source = torch.ones(min(nbytes, _COPIED) // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)

        def both() -> None:
            target.copy_(source)
            source.copy_(target)

        mine = self._took(both) * nbytes / max(4 * source.numel(), 1)
        return median(self._everyones(mine))

    def _took(self, work: Callable[[], object]) -> float:
        """The seconds of a processor or GPU that some work takes, the least of a few."""
        took: list[float] = []
        for _ in range(_TIMES):
            if self.timer.on_gpu:
                begun = recorded_event()
                work()
                done = recorded_event()
                done.synchronize()
                took.append(begun.elapsed_time(done) / 1e3)
            else:
                began = time.thread_time()
                work()
                took.append(time.thread_time() - began)
        return min(took)

    def _tf32_gain(self) -> float:
        """The share of a matrix product's time that TF32 would save on the GPU, where it is off."""
        mine, off = 0.0, torch.get_float32_matmul_precision() == "highest" and not self.timer.autocast
        if self.timer.on_gpu and off and torch.cuda.get_device_capability() >= _HAS_TF32:
            p = next(iter(self.options.named.values()))
            if p.dtype == torch.float32:
                x = torch.ones(_LARGE_SIDE, _LARGE_SIDE, dtype=p.dtype, device=p.device)
                now = self._took(lambda: torch.mm(x, x))
                torch.set_float32_matmul_precision("high")
                try:
                    mine = max(0.0, 1 - self._took(lambda: torch.mm(x, x)) / now)
                finally:
                    torch.set_float32_matmul_precision("highest")
        return median(self._everyones(mine))

    def _threads_gain(self) -> float:
        """The share of a matrix product's time that is saved if the ranks of a machine divide its cores."""
        ranks = self.facts.ranks
        here = next(each for each in ranks if each.rank == rank_in())
        mates = sum(each.machine == here.machine for each in ranks)
        now, wanted = here.threads, max(1, here.cores // mates)
        if not any(self._everyones(float(mates * now > here.cores and now > 1))):
            return 0.0
        many = self._product_seconds()
        torch.set_num_threads(wanted)
        try:
            few = self._product_seconds()
        finally:
            torch.set_num_threads(now)
        return max(0.0, median(self._everyones(1 - few / many)))

    def _product_seconds(self) -> float:
        x, took = torch.ones(_SIDE, _SIDE, dtype=torch.float32), []
        for _ in range(_TIMES):
            self._everyones(0.0)  # so that all begin at once
            begun = time.perf_counter()
            for _ in range(_PRODUCTS):
                torch.mm(x, x)
            took.append(time.perf_counter() - begun)
        return median(took)

    def _everyones(self, mine: float) -> list[float]:
        return [
            float(each) for each in gathered(torch.tensor([mine], dtype=torch.float64), self.options.group)
        ]

    # ---- the planner ----------------------------------------------------------------------------------

    def ask(self) -> None:
        """Predict a step with the present strategy, and with each change.

        Raises:
            ConfigError: the strategy at work cannot be predicted.
        """
        options, strategy = self.options, self.options.strategy
        ring = ring_cost(options.group)
        profile = take(self.timer, options.model, options.optimizers, ring)
        network = _network(self.facts.links, profile, options.group.size(), ring.rate, ring.latency)
        predictor = StepPredictor(
            profile=profile,
            network=network,
            tensors=locals_of(options.named),
            slowest=lambda mine: max(self._everyones(mine)),
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
        changes: dict[str, float] = {}
        for change, changed, other in self._changes(predictor, strategy):
            found = changed.predict(other)
            if found is not None:
                changes[change] = found.seconds
        self.facts = replace(self.facts, changes=changes)
        best = self._fastest(predictor, present)
        if best is not None:
            changes["strategy"] = best.seconds
            self.facts = replace(self.facts, best=best.algorithm)

    def _changes(
        self, predictor: StepPredictor, strategy: AnyStrategy
    ) -> Iterator[tuple[str, StepPredictor, AnyStrategy]]:
        """Each change by its name, with the predictor of steps with it, and the strategy."""
        links, network, bucket_bytes = self.facts.links, predictor.network, predictor.profile.bucket_bytes
        if links is not None and len(links.hosts) > 1:
            slow = links.slow()
            if slow:
                fast = median(links.between(links.rate_both_ways, slow)) / 8
                even = replace(network, rate=fast, rates=())
                yield "even links", replace(predictor, network=even), strategy
            one, several = links.between(links.rate), links.between(links.rate_of_flows)
            ratio = median(many / single for many, single in zip(several, one, strict=True))
            if ratio > 1:
                rates = tuple(rate * ratio for rate in network.rates)
                faster = replace(network, rate=network.rate * ratio, rates=rates)
                yield "several streams", replace(predictor, network=faster), strategy
        if bucket_bytes < _LARGE:
            large = replace(predictor.profile, bucket_bytes=_LARGE)
            yield "large buckets", replace(predictor, profile=large), strategy
        if bucket_bytes > _SMALLER and self.options.ddp is not None:
            smaller = replace(predictor.profile, bucket_bytes=_SMALLER)
            yield "smaller buckets", replace(predictor, profile=smaller), strategy
        near = strategy.levels[0]
        alone = len(strategy.levels) == 1 and near.subject != "delta" and near.topology.meets == WORLD
        if alone and network.nodes > 1 and network.ranks > 1:
            name, by_node = f"{near.name} by node", Hierarchical()
            yield "by node", predictor, replace(near, subject="gradient", topology=by_node, name=name)

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


def _network(links: Links | None, profile: Profile, ranks: int, rate: float, latency: float) -> Network:
    """The measured cluster; a ring of all ranks if nodes differ, or links are not known."""
    if links is None or len({len(node) for node in links.ranks}) > 1:
        return networks.of_ring(ranks, 1, rate, latency, profile)
    return networks.measured(links, profile)
