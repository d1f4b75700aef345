"""The strategy at work on a model: its levels and hooks, its beginning and its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from tacit.attaching import epoch_length
from tacit.attaching.agreement import agree
from tacit.attaching.assembly import levels_of, links_for
from tacit.attaching.failures import Failures
from tacit.attaching.rate_history import RateHistory
from tacit.attaching.step_hooks import StepHooks
from tacit.contracts import LinkRates
from tacit.errors import AttachError, CheckpointError, TacitError
from tacit.failure import exit
from tacit.failure.bounded_store import host_store, store_host
from tacit.gradients.ddp_hook import HookDispatcher, SyncedBackwards, no_exchange
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.model.frozen_check import FrozenCheck
from tacit.model.parameter_sample import ParameterSample
from tacit.model.torch_modes import shielded
from tacit.optimizer_hooks import momentum
from tacit.session.learning_rates import Rates
from tacit.transports.process_groups import ranks_of

if TYPE_CHECKING:
    from tacit.attaching.grad_scaler import ScaledSteps
    from tacit.checkpoint.own_replica import OwnReplica
    from tacit.links import Links

_log = logging.getLogger("tacit")


class ActiveStrategy:
    """A strategy at work. Making one is a collective call: the ranks first compare their arguments.

    Args:
        spec: the strategy, the model and the other arguments; checked.
        dispatcher: answers the communication hook that the user registers; None: tacit registers its own.

    Attributes:
        levels: the strategy's, near to far.
        hooks: in backward, and around the optimizers' steps.
        failures: the failures that this rank knows, its own and its peers'.
        momentum: the momentum that was taken from the optimizers, if any.
        links: the measured links, if the strategy depends on them or the user has asked for them.

    Raises:
        AttachError: it does not fit, or ranks have different arguments; no hook remains then.
        PeerLost: a rank is gone or frozen, or does not attach; no hook remains then.
    """

    @shielded
    def __init__(self, spec: AttachSpec, dispatcher: HookDispatcher | None = None) -> None:
        self.spec = spec
        self.levels: list[Level] = []
        self.links: Links | None = None
        model, optimizers = spec.model, spec.optimizers
        rates = Rates(optimizers, spec.named)
        # With a scaler a replica that steps alone may skip steps alone.
        own_steps = spec.scaler is not None and spec.periodic
        mark = tuple if spec.periodic else ParameterSample(spec.named).mark
        compared = optimizers and not own_steps and not spec.in_join
        self._notes = RateHistory(rates, mark) if compared else None
        self._frozen, backwards = FrozenCheck(model), SyncedBackwards(spec.ddp)
        self.hooks = StepHooks(spec, self.levels, backwards, self._frozen, self._notes)
        self.failures = Failures(spec, self.levels, backwards, self._notes)
        self.momentum = momentum.planned(spec.strategy, spec.policy, optimizers, spec.named)
        self._own: OwnReplica | None = None
        self._scaled: ScaledSteps | None = None
        self._left = False
        try:
            if spec.members is None:
                host_store()
                agree(spec)
                self.failures.watch(store_host())
            self._begin(rates, dispatcher)
        except BaseException as error:
            found: Exception | None = self.failures.lost_by(error)
            self.leave()
            if isinstance(error, torch.OutOfMemoryError):
                from tacit.attaching.memory import too_large

                found = AttachError(too_large(spec.strategy, spec.named, spec.policy, spec.exchange_on))
            if found is not None:
                raise found from error
            raise

    def _begin(self, rates: Rates, dispatcher: HookDispatcher | None) -> None:
        spec = self.spec
        epoch_length.warn_of_long_periods(spec.strategy, spec.schedule_state)
        if spec.ddp is not None and not spec.leaves_ddp_alone and spec.members is None:
            dispatcher = dispatcher or HookDispatcher.of(spec.ddp)
        elif spec.sharded is not None and not spec.periodic:
            dispatcher = HookDispatcher(no_exchange)
        self.links = links_for(spec)
        if self.links is not None and spec.group.rank() == 0:
            own = LinkRates(self.links.rate_both_ways, self.links.ranks).of_nodes()
            each = ", ".join(f"{rate / 1e6:.4g}" for rate in own)
            _log.info("%s: the nodes' links carry %s Mbit/s both ways", spec.strategy.name, each)
        for level in levels_of(spec, rates, self.momentum, self.links):
            self.levels.append(level)
        if self.momentum is not None and spec.scaler is None:
            store = self.levels[0].session.store
            store.restore(self.momentum.velocities(store.named_state()))
        if spec.scaler is not None and spec.scaled:
            from tacit.attaching.grad_scaler import ScaledSteps

            self._scaled = ScaledSteps(spec.scaler, self.levels, spec.named, spec.optimizers)
        self.hooks.register(dispatcher, self.momentum, self._scaled)
        exit.watch(ranks_of(spec.model.process_group))
        self.failures.begin()

    @shielded
    def flush(self) -> None:
        """See `Attached.flush`."""
        self.hooks.complete()
        for level in self.levels:
            level.session.flush()

    @shielded
    def sync(self) -> None:
        """See `Attached.sync`."""
        self.flush()
        self.failures.come_to("session.sync()")
        self._sync()

    def _sync(self) -> None:
        if self.spec.sharded is not None:
            self.spec.sharded.reshard()
        self._frozen.check_objects()
        self.levels[-1].sync()

    @shielded
    def discard(self, wish: object) -> bool:
        """See `Attached.discard`."""
        from tacit.attaching.step_discarding import agreed, mistimed, no_wish, refuse_discard

        refuse_discard(self.spec, self.levels)
        half = self.hooks.is_half_taken
        if not half:
            self.hooks.complete()  # an earlier step, which an optimizer that steps less often did not take
        backwards = self.hooks.backwards.since
        wrong = mistimed(self.spec, self.levels, backwards, half) or no_wish(wish)
        if not agreed(self.failures, self.levels[-1].session.step, wrong is None and bool(wish), wrong):
            return False
        self.hooks.discard()
        return True

    def check_called(self) -> None:
        """See `Attached.check_called`."""
        name = self.spec.strategy.name
        if self._scaled is None and self.spec.optimizers and not self.hooks.called:
            raise AttachError(
                f"a step was taken, and the optimizer that {name!r} has did not take "
                "it, so nothing is exchanged: attach after whatever makes another optimizer of it"
            )
        if self.levels[0].gradient is not None and self.hooks.backwards.begun == 0:
            raise AttachError(
                f"a step was taken, and DDP did not call its hook, so {name!r} has exchanged "
                "no gradients: compute the loss by calling the model that the framework has wrapped, and not "
                "a module inside it, and leave no_sync out of a step's last backward"
            )

    @shielded
    def state_dict(self) -> dict[str, Any]:
        """See `Attached.state_dict`."""
        from tacit.checkpoint import session_state, sharded_state
        from tacit.checkpoint.saved_values import sealed

        self.hooks.saved_whole()
        self.flush()
        if any(level.session.store.shares_out for level in self.levels):
            self.failures.come_to("session.state_dict()")
        state, sharded = session_state.save(self.spec.strategy, self.levels), self.spec.sharded
        state |= self._own_replica().saved()
        if sharded is None:
            return sealed(state)
        return sharded_state.whole(sharded, self.spec.named, state, self._not_by_entry())

    @shielded
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `Attached.load_state_dict`."""
        from tacit.checkpoint import session_state, sharded_state

        self.flush()
        agreed = False

        def agree(step: int) -> None:
            nonlocal agreed
            agreed = True
            self._all_load(step)

        try:
            if (sharded := self.spec.sharded) is not None:
                sharded.reshard()
                state_dict = sharded_state.mine(sharded, self.spec.named, state_dict, self._not_by_entry())
            shard = None if sharded is None else sharded.shard
            session_state.load(state_dict, self.spec.strategy, self.levels, self._own_replica(), agree, shard)
        except CheckpointError:
            if not agreed:
                with suppress(TacitError):
                    self._all_load(None)
            raise
        for level in self.levels:
            level.reload()
        if self._notes is not None:
            self._notes.loaded()

    def _all_load(self, step: int | None) -> None:
        """Wait until all ranks load a state, if they wait for each other, and compare their steps.

        `step`: of this rank's state; None: it does not fit.

        Raises:
            CheckpointError: another rank's state does not fit, or is of another step.
            PeerLost: another rank is gone, or has gone on.
        """
        if any(level.strategy.independent for level in self.levels):
            return
        ranks = len(self.spec.ranks)
        number = 1 if step is None else step * (ranks + 1)
        steps, wrong = divmod(self.failures.come_to("session.load_state_dict()", number), ranks + 1)
        if step is not None and (wrong or steps != step * ranks):
            raise CheckpointError(
                "another rank cannot load its state, and says why there: no rank has changed anything"
                if wrong
                else f"the state of this rank is of step {step}, and not all ranks' are: load on every rank "
                "what it saved at the same moment. No rank has changed anything"
            )

    def _own_replica(self) -> OwnReplica:
        if self._own is None:
            from tacit.checkpoint.own_replica import OwnReplica

            self._own = OwnReplica(self.spec, self.levels)
        return self._own

    def _not_by_entry(self) -> set[tuple[int, str, str]]:
        return self._own_replica().not_by_entry() | {
            (i, *key)
            for i, level in enumerate(self.levels)
            for key, kept in level.session.store.named_state().items()
            if not kept.by_entry
        }

    @shielded
    def make_equal(self) -> None:
        """Run a last round, and average the optimizer state that has stayed local. A collective call.

        Raises:
            UnevenData: ranks have taken different numbers of steps.
            RatesDiffer: ranks have taken a step with different learning rates.
            RoundError: the last round failed, or an earlier one did.
        """
        self.failures.enter_barrier(self.hooks.refused)
        self.flush()  # the bytes of rounds under way are training's
        for level in self.levels:
            level.session.stats.begin_closing()
        self._sync()
        self.levels[-1].consolidate()
        for level in self.levels if self.spec.group.rank() == 0 else ():
            if note := level.strategy.compressor.ended(level.session.step):
                _log.warning("%s", note)
        if self._scaled is not None:
            self._scaled.consolidate()
        self.failures.leave_barrier()

    @shielded
    def leave(self) -> None:
        """Remove the hooks and close the levels of this rank; no collective call, and idempotent."""
        if self._left:
            return
        self._left = True
        self.hooks.remove()
        if self._own is not None:
            self._own.drop()
        self.failures.close()
        failed = self.failures.first is not None
        for level in self.levels:
            level.close(failed)
