"""One level of a strategy at work on a model: a session, its transport, and its hook into torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tacit.contracts import LayerwiseOverlap, PairTopology
from tacit.fsdp.gradients import reduced_together
from tacit.fsdp.model import ShardedModel
from tacit.gradients.ddp_hook import GradientHook
from tacit.gradients.layerwise.hook import LayerwiseHook
from tacit.gradients.unused_parameters import UsedParameters
from tacit.kernels.dispatch import warm_up_for
from tacit.levels.device_placement import Placement, placed, transport_for
from tacit.levels.spec import AttachSpec
from tacit.model.trained_model import TrainedModel, local, locals_of
from tacit.optimizer_hooks.taken_momentum import Taken
from tacit.replicas import buffers
from tacit.replicas.buffers import ReplicaBuffers
from tacit.replicas.equal_parameters import EqualParameters
from tacit.replicas.fragments import fragments
from tacit.replicas.optimizer_state import OptimizerState
from tacit.replicas.replica import LiveTensors
from tacit.replicas.rounds_after_step import OptimizerHook
from tacit.session import Session
from tacit.session.buckets import Policy, fitting, group_names, most_bytes
from tacit.stores.client import placement
from tacit.stores.client.buffers import ServerBuffers, homes_of
from tacit.stores.client.step_hook import OptimizerGroups, ServerStepHook
from tacit.stores.client.transport import StarTransport
from tacit.stores.pairs import PairTransport
from tacit.stores.pairs.members import joined_pairs
from tacit.strategy import Strategy
from tacit.timelines import PlannedMessage
from tacit.transports.devices import ByDevice
from tacit.transports.torch import TorchTransport


class Level:
    """One strategy at work. A collective call, as process groups are made.

    `replicated_in_node`: whether a nearer level keeps the parameters of a node's ranks equal.

    Attributes:
        gradient: the hook in backward, where gradients are exchanged.
        progress: the hook after `optimizer.step`, where replicas move on their own.
        stepped: the hook around `optimizer.step`, where a server steps.
        moments: the optimizers' state there.
        buffers: averages the model's buffers there; None where servers have them.
        placing: where its exchanges run.
        taken: the momentum that was taken from the optimizers of the gradients' level.
    """

    gradient: GradientHook | LayerwiseHook | None = None
    progress: OptimizerHook | None = None
    stepped: ServerStepHook | None = None
    moments: OptimizerState | None = None
    buffers: ReplicaBuffers | None = None
    _equal: EqualParameters | None = None

    def __init__(
        self,
        spec: AttachSpec,
        strategy: Strategy,
        rates: Callable[[], Mapping[str, float]] = dict,
        nodes: Sequence[Sequence[int]] = (),
        share: float = 1.0,
        taken: Taken | None = None,
    ) -> None:
        model, named, timeout, seed = spec.model, spec.named, spec.time_limit, spec.seed
        policy, schedule_state = spec.policy, spec.schedule_state
        optimizers = spec.optimizers
        self._group = model.process_group
        self.strategy = strategy = strategy.for_training(schedule_state)
        self.taken = taken if strategy.subject == "gradient" else None
        quiet = strategy.subject == "nothing"
        chosen = _of_parameters(policy or fitting(strategy.compressor, locals_of(named)), named)
        self.placing = Placement()
        if not quiet:
            self.placing = placed(strategy, named, chosen, model.process_group, spec.exchange_on)
        peers = transport_for(self.placing, model.process_group, timeout, nodes)
        self.transport: TorchTransport | ByDevice | StarTransport | PairTransport = peers
        tensors = {**named, **_at_servers(strategy, model)}
        cap = most_bytes(strategy.topology, int(model.bucket_bytes_cap))
        pairs = strategy.topology if isinstance(strategy.topology, PairTopology) else None
        if pairs is not None:  # one bucket's answer comes back while the next one leaves
            cap = placement.message_cap(strategy, tensors, 1, 1, cap)
        parts = [] if quiet else fragments(tensors, strategy.parts)
        buckets = [
            bucket
            for part in parts
            for group in _apart(part, named)
            for bucket in group_names(group, tensors, cap)
        ]
        modules: list[dict[str, int]] = []
        if isinstance(model, ShardedModel) and strategy.subject == "gradient":
            modules = reduced_together(model, named)
            # Of a module without rows here, peers have none either.
            buckets = [[*each] for each in modules if any(local(named[name]).numel() for name in each)]
        groups: OptimizerGroups | None = None
        beside: ServerBuffers | None = None
        if pairs is not None:
            assert isinstance(peers, TorchTransport), "no store is on a GPU"
            self.transport = joined_pairs(peers, pairs, seed, timeout)
        elif strategy.server is not None:
            servers = placement.find_servers(strategy, spec.servers)
            stepped = strategy.server.optimizer == "server"
            groups = OptimizerGroups(optimizers, named) if stepped else None
            still = dict(LiveTensors(model.module, buffers.numbers_in(model))) if stepped else {}
            homes = placement.homes(tensors, len(servers)) | homes_of([*still], len(servers))
            cap = placement.message_cap(strategy, tensors, len(servers), model.process_group.size(), cap)
            kinds = groups.of if groups is not None else dict.fromkeys(tensors)
            buckets = [
                bucket
                for part in parts
                for group in _apart(part, named)
                for bucket in placement.cut_by_server(group, tensors, homes, cap, kinds)
            ]
            assert isinstance(peers, TorchTransport), "no server is on a GPU"
            self.transport = placement.connect(
                *(peers, strategy, {**tensors, **still}, servers, homes, timeout),
                *(groups.rules if groups is not None else (), kinds),
            )
            if groups is not None:
                beside = ServerBuffers(model.module, [*still], self.transport.servers, homes, cap)
        self.used = UsedParameters.of(model, named) if strategy.subject == "gradient" else None
        idle = None if self.used is None else self.used.idle
        with warm_up_for(_kernels_on(self.placing, named)):
            self.session = Session(
                strategy,
                locals_of(tensors),
                self.transport,
                buckets,
                chosen,
                schedule_state=schedule_state,
                rates=rates,
                idle=idle,
                seed=seed,
                trained=named,
                device=self.placing.device,
                in_stream=self.placing.in_stream,
                bucket_lr=None if groups is None else groups.rate,
                replicated_in_node=named if spec.replicated_in_node else (),
            )
        if not strategy.independent:
            self._equal = EqualParameters(self.session, named, model.process_group if quiet else None)
        if isinstance(self.transport, PairTransport):
            self.transport.report_to(self.session.failure.fail, lambda: self.session.step)
        if quiet:
            return
        together = strategy.subject == "delta" and not strategy.independent
        self.session.connect(ReplicaBuffers.stages(self.session) if together else EqualParameters.STAGES)
        if strategy.server is not None and groups is not None and beside is not None:
            self.stepped = ServerStepHook(self.session, tensors, strategy.server.back, groups, beside)
            self.fetch()
        elif isinstance(strategy.overlap, LayerwiseOverlap):
            assert isinstance(model, DistributedDataParallel), "others were refused"
            self.gradient = LayerwiseHook(self.session, model, named)
        elif strategy.subject == "gradient":
            self.gradient = GradientHook(self.session, tensors, self.used, modules, share)
        else:
            near = model.near if isinstance(model, ShardedModel) else None
            if together:
                self.moments = OptimizerState(self.session, optimizers, named, near)
                present = LiveTensors(model.module, buffers.found_in(model))
                self.buffers = ReplicaBuffers(self.session, present, share)
            self.progress = OptimizerHook(
                self.session,
                LiveTensors(model.module, tensors, named),
                share,
                rates,
                self.buffers if strategy.buffers == "averaged" else None,
                () if together else buffers.variances_in(model.module),
                moments=self.moments,
                on_sync=self.buffers if strategy.buffers == "on_sync" else None,
            )
            if near is not None:
                self.progress.observations.share_with(near)
                self.progress.consensus.leave_out()
            self.fetch()

    def fetch(self) -> None:
        """Go on from the parameters that servers or this rank's store keep, if any do. A collective call."""
        hook = self.progress or self.stepped
        if isinstance(self.transport, PairTransport) and hook is not None:
            hook.enter(self.transport.enter)
            placement.wait_for_all(self._group)
        if not isinstance(self.transport, StarTransport) or hook is None:
            return
        servers, star = self.transport.servers, self.strategy.server
        if star is None or not star.independent:
            return
        hook.enter(lambda bucket, x: servers.of(bucket).enter(x, f"{bucket}/0", star.back(x)))
        placement.wait_for_all(self._group)

    def metrics(self) -> dict[str, float]:
        """See `Session.metrics`; with parameter servers, what was pushed and pulled too."""
        numbers = self.session.metrics()
        if isinstance(self.transport, StarTransport):
            numbers |= self.transport.servers.counts()
        if self.progress is not None and self.progress.consensus.last is not None:
            numbers |= self.progress.consensus.last.metrics()
        return numbers

    def messages(self) -> list[PlannedMessage]:
        """When planned messages were where, from the first call on; empty where there are none."""
        if not isinstance(self.gradient, LayerwiseHook):
            return []
        self.gradient.log.begin()
        return self.gradient.log.messages()

    def servers(self) -> list[dict[str, Any]]:
        """The counters of its parameter servers; see `Attached.servers`."""
        return self.transport.servers.stats() if isinstance(self.transport, StarTransport) else []

    def after_step(self) -> None:
        """To be called after every attempt of the optimizer."""
        if self.progress is not None:
            self.progress.after_step()
        elif self.stepped is not None:
            self.stepped.after_step()
        else:
            self.session.advance()

    def discard(self) -> None:
        """Have all be as if the backward passes since the last step had not been."""
        if self.gradient is not None:
            self.session.take_back()
        if self.progress is not None:
            self.progress.observations.take_back()

    def sync(self) -> None:
        """Make replicas equal by a round now, where they may differ, and see by their bits that they are."""
        hook = self.progress or self.stepped
        if hook is not None:
            hook.sync()
        if self.progress is None and self._equal is not None:
            self._equal.sync()

    def consolidate(self) -> None:
        """Average what has stayed local beside the parameters."""
        if self.moments is not None:
            self.moments.consolidate()
        if self.buffers is not None and self.strategy.buffers == "local":
            self.buffers.average()
            self.buffers.copy_first()

    def close(self, failed: bool = False) -> None:
        """Wait for exchanges, or after a failure end them, and leave the process groups to other sessions."""
        if failed and self.session.config.in_stream:
            self.transport.abort()  # else its stream may wait for a peer for ever
        if isinstance(self.gradient, LayerwiseHook):
            self.gradient.remove()
        if self.moments is not None:
            self.moments.close()
        self.session.close()
        if self.used is not None:
            self.used.close()
        if failed:
            self.transport.abort(self.session.failure.error)
        self.transport.close()


def _at_servers(strategy: Strategy, model: TrainedModel) -> dict[str, Tensor]:
    """The buffers that servers keep beside the parameters, as workers do not wait for each other."""
    if strategy.subject != "delta" or not strategy.independent:
        return {}
    return dict(LiveTensors(model.module, buffers.numbers_in(model)))


def _kernels_on(placing: Placement, named: Mapping[str, Tensor]) -> str:
    """The type of device on which compressors run."""
    first = next(iter(named.values()), None)
    return first.device.type if placing.in_stream and first is not None else "cpu"


def _apart(part: list[str], named: dict[str, Tensor]) -> list[list[str]]:
    """Parameters and buffers apart, as no bucket holds both."""
    return [[name for name in part if (name in named) == ours] for ours in (True, False)]


def _of_parameters(policy: Policy, named: dict[str, Tensor]) -> Policy:
    """The policy for parameters, which it sees whole, with buffers dense."""
    return lambda name, tensor: policy(name, named[name]) if name in named else None
