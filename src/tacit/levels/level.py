"""The base of all kinds of levels: one strategy at work on a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from tacit.contracts import WORLD
from tacit.kernels.dispatch import warm_up_for
from tacit.levels.device_placement import placed, transport_for
from tacit.levels.spec import AttachSpec
from tacit.model.trained_model import locals_of
from tacit.session import Session, Training
from tacit.session.buckets import fitting, group_names, most_bytes
from tacit.strategy import Strategy
from tacit.timelines import PlannedMessage
from tacit.transports.by_device import ByDevice
from tacit.transports.torch_distributed import TorchTransport

if TYPE_CHECKING:
    from tacit.gradients.ddp_hook import GradientHook
    from tacit.gradients.layerwise.hook import LayerwiseHook
    from tacit.gradients.unused_parameters import UsedParameters
    from tacit.optimizer_hooks.taken_momentum import Taken
    from tacit.replicas.consensus import Consensus
    from tacit.replicas.rounds_after_step import OptimizerHook
    from tacit.stores.client.transport import ServerGroup, StarTransport
    from tacit.stores.pairs import PairTransport

COMPARING = {WORLD: 1}
"""The number of collectives on each axis that a comparison of all ranks' parameters takes at once."""

Cut = Callable[[list[str]], list[list[str]]]
"""Cuts tensors into buckets of names."""


class Level(ABC):
    """One strategy at work; the base of all kinds of levels (`kinds.kind_of` chooses one).

    Making one is a collective call, as process groups are made.

    Args:
        spec: the arguments of attach.
        strategy: the strategy of this level.
        rates: reads the parameters' learning rates.
        nodes: the ranks of each node, if the strategy depends on nodes.
        share: the weight of this rank in a mean; 1 on average over the ranks of the mean.
        taken: the momentum that was taken from the optimizers.

    Attributes:
        strategy: adapted to this training.
        placing: where its exchanges run.
        gradient: the hook in backward; None: gradients are not exchanged.
        used: notes which parameters had a gradient; None: all have one.
        taken: the momentum, if gradients are exchanged.
        progress: the hook after `optimizer.step`; None: replicas do not step alone.
        take_loaded: is called before a step, if replicas start at what was loaded before the first step.
        before_step: is called before `optimizer.step`, if a server takes the step.
        after_step: is called after an attempt of the optimizer.
        put_off: is called after all other hooks before it, if steps are put off into the next forward.
        planned: is called after a step that all levels have counted, if messages are planned.
    """

    steps_alone: ClassVar[bool] = False
    """Whether replicas differ between rounds, so that DDP must not broadcast rank 0's buffers."""

    gradient: GradientHook | LayerwiseHook | None = None
    used: UsedParameters | None = None
    progress: OptimizerHook | None = None
    take_loaded: Callable[[], None] | None = None
    before_step: Callable[..., None] | None = None
    after_step: Callable[[], None]
    put_off: Callable[..., None] | None = None
    planned: Callable[[], None] | None = None
    _servers: ServerGroup | None = None

    def __init__(
        self,
        spec: AttachSpec,
        strategy: Strategy,
        rates: Callable[[], Mapping[str, float]] = dict,
        nodes: Sequence[Sequence[int]] = (),
        share: float = 1.0,
        taken: Taken | None = None,
    ) -> None:
        self._spec, self._rates, self._share = spec, rates, share
        self.strategy = strategy = strategy.for_training(spec.schedule_state)
        self.taken = taken if strategy.subject == "gradient" else None
        named = spec.named
        policy = spec.policy or fitting(strategy.compressor, locals_of(named))
        # The policy sees parameters whole; buffers are dense.
        self._policy = lambda name, tensor: policy(name, named[name]) if name in named else None
        self.placing = placed(strategy, named, self._policy, spec.group, spec.exchange_on)
        self.peers = transport_for(self.placing, spec.group, spec.time_limit, nodes)
        self.transport: TorchTransport | ByDevice | StarTransport | PairTransport = self.peers
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Make the session, and its hooks in torch."""

    def _cut(self, tensors: Mapping[str, Tensor]) -> Cut:
        """The function that cuts tensors into buckets. Joins the servers, if some average."""
        strategy, spec = self.strategy, self._spec
        cap = most_bytes(strategy.topology, spec.bucket_bytes_cap)
        if strategy.server is None:
            return lambda names: group_names(names, tensors, cap)
        from tacit.stores.client.joining import join_servers
        from tacit.stores.client.placement import find_servers

        where = find_servers(spec.servers)
        joined = join_servers(strategy, where, self.peers, tensors, cap, spec.time_limit)
        self.transport, self._servers = joined.transport, joined.transport.servers
        return joined.cut

    def _watch_used(self) -> Callable[[str], bool] | None:
        """A function that says whether a parameter had no gradient; None: every answer is applied.

        DDP applies all answers without `find_unused_parameters`, and FSDP2 always does.
        """
        if self._spec.sharded is not None or not self._spec.model.find_unused_parameters:
            return None
        from tacit.gradients.unused_parameters import UsedParameters

        self.used = UsedParameters(self._spec.named)
        return self.used.idle

    def _open(
        self,
        tensors: Mapping[str, Tensor],
        buckets: Sequence[Sequence[str]],
        idle: Callable[[str], bool] | None = None,
        bucket_lr: Callable[[str], float] | None = None,
    ) -> None:
        """Make the session; `tensors`: the parameters, and buffers that are exchanged with them."""
        spec, placing = self._spec, self.placing
        first = next(iter(spec.named.values()), None)
        with warm_up_for(first.device.type if placing.in_stream and first is not None else "cpu"):
            self.session = Session(
                self.strategy,
                locals_of(tensors),
                self.transport,
                buckets,
                self._policy,
                Training(
                    rates=self._rates,
                    bucket_lr=bucket_lr,
                    schedule_state=spec.schedule_state,
                    idle=idle,
                    trained=spec.named,
                    replicated_in_node=spec.named if spec.replicated_in_node else (),
                    seed=spec.seed,
                ),
                placing.device,
                placing.in_stream,
            )
        self.after_step = self.session.advance

    # ---- while it is at work --------------------------------------------------------------------------

    def observe(self, loss: Tensor | float) -> None:
        """Note the loss of this step, for rounds that depend on it."""

    def complete(self) -> None:
        """Take all steps that are put off until the next forward pass."""

    def acts_after(self, step: int) -> bool:
        """Whether a round, or applying an answer, follows `optimizer.step` in this step."""
        return False

    def act(self, step: int) -> None:
        """Run the round after this step."""

    def note_writes(self) -> None:
        """Record the present parameters as known, whoever has written them."""

    @property
    def has_moved(self) -> bool:
        """Whether parameters have moved since the last step that was seen."""
        return False

    @property
    def steps_since_equal(self) -> int | None:
        """The number of steps since the replicas were equal; None: they are equal."""
        return None

    @property
    def begun(self) -> int:
        """The number of exchanges that this rank has begun, in the order of all ranks."""
        return self.session.pending.begun

    def discard(self) -> None:
        """Undo the backward passes since the last step."""

    def fetch(self) -> None:
        """Take the parameters that a server or store keeps for this rank, if one does. A collective call."""

    def reload(self) -> None:
        """Go on after a checkpoint was loaded."""
        self.fetch()

    def count_by(self, step: Callable[[], int]) -> None:
        """Count steps by `step` in what changes the optimizers' state."""

    @abstractmethod
    def sync(self) -> None:
        """Make replicas equal by a round now, if they may differ, and check that their bits are equal."""

    def consolidate(self) -> None:
        """Average what has stayed local besides the parameters."""

    def measure_consensus(self) -> Consensus | None:
        """The consensus distance of the replicas; None: it is not measured. A collective call."""
        return None

    # ---- metrics, and the end ---------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """See `Session.metrics`; with parameter servers, what was pushed and pulled too."""
        return self.session.metrics() | ({} if self._servers is None else self._servers.counts())

    def messages(self) -> list[PlannedMessage]:
        """The times of planned messages, recorded from the first call on; empty if there are none."""
        return []

    def servers(self) -> list[dict[str, Any]]:
        """The counters of its parameter servers; see `Attached.servers`."""
        return [] if self._servers is None else self._servers.stats()

    def close(self, failed: bool = False) -> None:
        """Wait for exchanges, or end them after a failure, and free the process groups for other sessions."""
        if failed and self.session.context.in_stream:
            self.transport.abort()  # otherwise its stream may wait for a peer for ever
        self._let_go()
        self.session.close()
        if self.used is not None:
            self.used.close()
        if failed:
            self.transport.abort(self.session.failure.error)
        self.transport.close()

    def _let_go(self) -> None:
        """Remove its hooks in torch."""


def parts_cut(parts: Sequence[list[str]], cut: Cut, parameters: Collection[str]) -> list[list[str]]:
    """The buckets of each part, one part after the other; no bucket has both parameters and buffers."""
    groups = (
        [name for name in part if (name in parameters) == ours] for part in parts for ours in (True, False)
    )
    return [bucket for group in groups for bucket in cut(group)]
