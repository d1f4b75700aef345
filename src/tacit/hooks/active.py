"""The strategy at work on a model: its levels, the hooks that feed them, how it begins and how it ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from tacit.contracts import LinkRates
from tacit.errors import AttachError, CheckpointError, TacitError
from tacit.hooks import checkpoint, epochs, exit, momentum, sharded_state
from tacit.hooks.agreement import agree
from tacit.hooks.assembly import levels_of, links_for
from tacit.hooks.bounded_store import host_store, store_host
from tacit.hooks.ddp import HookDispatcher, no_exchange
from tacit.hooks.discarding import agreed, mistimed, no_wish, refuse_discard
from tacit.hooks.failures import Failures
from tacit.hooks.frozen_check import FrozenCheck
from tacit.hooks.grad_scaler import ScaledSteps
from tacit.hooks.learning_rates import RateHistory, Rates
from tacit.hooks.level import Level
from tacit.hooks.memory import too_large
from tacit.hooks.options import AttachOptions
from tacit.hooks.outside_writes import ParameterSample
from tacit.hooks.own_replica import OwnReplica
from tacit.hooks.saved_values import sealed
from tacit.hooks.step_hooks import StepHooks
from tacit.hooks.surroundings import shielded
from tacit.hooks.uneven_data import SyncedBackwards
from tacit.links import Links
from tacit.torch_compat import in_join
from tacit.transports.process_groups import ranks_of

_log = logging.getLogger("tacit")


class ActiveStrategy:
    """A strategy at work. A collective call: the ranks first compare what they give.

    Args:
        options: what is at work, and on what; checked.
        dispatcher: answers the communication hook that the user registers; None: tacit registers its own.

    Attributes:
        levels: the strategy's, near to far.
        failures: what this rank knows of failures, its own and its peers'.
        momentum: what was taken from the optimizers, if anything was.
        links: what the links carry, where the strategy goes by them.

    Raises:
        AttachError: it does not fit, or ranks give different things; no hook is left then.
        PeerLost: a rank is gone or frozen, or does not attach; nor then.
    """

    @shielded
    def __init__(self, options: AttachOptions, dispatcher: HookDispatcher | None = None) -> None:
        self.options = options
        self.levels: list[Level] = []
        self.links: Links | None = None
        model, optimizers = options.model, options.optimizers
        rates = Rates(optimizers, options.named)
        # A replica that moves on its own may pass over steps of its own with a scaler.
        own_steps = options.scaler is not None and options.periodic
        mark = tuple if options.periodic else ParameterSample(options.named).mark
        compared = optimizers and not own_steps and not in_join(model)
        self._notes = RateHistory(rates, mark) if compared else None
        self._frozen, backwards = FrozenCheck(model), SyncedBackwards(model)
        self._hooks = StepHooks(options, self.levels, backwards, self._frozen, self._notes)
        self.failures = Failures(options, self.levels, backwards, self._notes)
        self.momentum = momentum.planned(options.strategy, options.policy, optimizers, options.named)
        self._own = OwnReplica(options, self.levels)
        self._scaled: ScaledSteps | None = None
        self._left = False
        try:
            host_store()
            agree(options)
            self.failures.watch(store_host())
            self._begin(rates, dispatcher)
        except BaseException as error:
            found: Exception | None = self.failures.lost_by(error)
            self.leave()
            if isinstance(error, torch.OutOfMemoryError):
                found = AttachError(
                    too_large(options.strategy, options.named, options.policy, options.exchange_on)
                )
            if found is not None:
                raise found from error
            raise

    def _begin(self, rates: Rates, dispatcher: HookDispatcher | None) -> None:
        options = self.options
        epochs.warn_of_long_periods(options.strategy, options.schedule_state)
        if options.ddp is not None and not options.leaves_ddp_alone:
            dispatcher = dispatcher or HookDispatcher.of(options.ddp)
        elif options.sharded is not None and not options.periodic:
            dispatcher = HookDispatcher(no_exchange)
        self.links = links_for(options)
        if self.links is not None and options.group.rank() == 0:
            own = LinkRates(self.links.rate_both_ways, self.links.ranks).of_nodes()
            each = ", ".join(f"{rate / 1e6:.4g}" for rate in own)
            _log.info("%s: the nodes' links carry %s Mbit/s both ways", options.strategy.name, each)
        for level in levels_of(options, rates, self.momentum, self.links):
            self.levels.append(level)
        if self.momentum is not None and options.scaler is None:
            store = self.levels[0].session.store
            store.restore(self.momentum.velocities(store.named_state()))
        if options.scaler is not None and options.scaled:
            self._scaled = ScaledSteps(options.scaler, self.levels, options.named, options.optimizers)
        self._hooks.register(dispatcher, self.momentum, self._scaled)
        exit.watch(ranks_of(options.group))
        self.failures.begin()

    @shielded
    def flush(self) -> None:
        """See `Attached.flush`."""
        self._hooks.complete()
        for level in self.levels:
            level.session.flush()

    @shielded
    def sync(self) -> None:
        """See `Attached.sync`."""
        self.flush()
        self.failures.come_to("session.sync()")
        self._sync()

    def _sync(self) -> None:
        if self.options.sharded is not None:
            self.options.sharded.reshard()
        self._frozen.check_objects()
        self.levels[-1].sync()

    @shielded
    def discard(self, wish: object) -> bool:
        """See `Attached.discard`."""
        refuse_discard(self.options, self.levels)
        half = self._hooks.is_half_taken
        if not half:
            self._hooks.complete()  # a step before, which an optimizer that steps more seldom did not take
        backwards = self._hooks.backwards.since
        wrong = mistimed(self.options, self.levels, backwards, half) or no_wish(wish)
        if not agreed(self.failures, self.levels[-1].session.step, wrong is None and bool(wish), wrong):
            return False
        self._hooks.discard()
        return True

    def check_called(self) -> None:
        """See `Attached.check_called`."""
        name = self.options.strategy.name
        if self._scaled is None and self.options.optimizers and not self._hooks.called:
            raise AttachError(
                f"a step was taken, and the optimizer that {name!r} has did not take "
                "it, so nothing is exchanged: attach behind whatever makes another optimizer of it"
            )
        if self.levels[0].gradient is not None and self._hooks.backwards.begun == 0:
            raise AttachError(
                f"a step was taken, and DDP did not call its hook, so {name!r} has exchanged "
                "no gradients: compute the loss by calling the model that the framework has wrapped, and not "
                "a module inside it, and leave no_sync out of a step's last backward"
            )

    @shielded
    def state_dict(self) -> dict[str, Any]:
        """See `Attached.state_dict`."""
        self._hooks.saved_whole()
        self.flush()
        if any(level.session.store.shares_out for level in self.levels):
            self.failures.come_to("session.state_dict()")
        state, sharded = checkpoint.save(self.options.strategy, self.levels), self.options.sharded
        state |= self._own.saved()
        if sharded is None:
            return sealed(state)
        return sharded_state.whole(sharded, self.options.named, state, self._not_by_entry())

    @shielded
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `Attached.load_state_dict`."""
        self.flush()
        agreed = False

        def agree(step: int) -> None:
            nonlocal agreed
            agreed = True
            self._all_load(step)

        try:
            if (sharded := self.options.sharded) is not None:
                sharded.reshard()
                state_dict = sharded_state.mine(sharded, self.options.named, state_dict, self._not_by_entry())
            checkpoint.load(state_dict, self.options.strategy, self.levels, self._own, agree)
        except CheckpointError:
            if not agreed:
                with suppress(TacitError):
                    self._all_load(None)
            raise
        for level in self.levels:
            level.fetch()
            if level.stepped is not None:
                level.stepped.resume()
        if self._notes is not None:
            self._notes.loaded()

    def _all_load(self, step: int | None) -> None:
        """Wait until all ranks load a state, where they wait for each other, and compare their steps.

        `step`: of this rank's state; None: it does not fit.

        Raises:
            CheckpointError: another rank's does not, or is of another step.
            PeerLost: another rank is gone, or has gone on.
        """
        if any(level.strategy.independent for level in self.levels):
            return
        ranks = len(self.options.ranks)
        told = 1 if step is None else step * (ranks + 1)
        steps, wrong = divmod(self.failures.come_to("session.load_state_dict()", told), ranks + 1)
        if step is not None and (wrong or steps != step * ranks):
            raise CheckpointError(
                "another rank cannot load its state, and says why there: no rank has changed anything"
                if wrong
                else f"the state of this rank is of step {step}, and not all ranks' are: load on every rank "
                "what it saved at the same moment. No rank has changed anything"
            )

    def _not_by_entry(self) -> set[tuple[int, str, str]]:
        return self._own.not_by_entry() | {
            (i, *key)
            for i, level in enumerate(self.levels)
            for key, kept in level.session.store.named_state().items()
            if not kept.by_entry
        }

    @shielded
    def make_equal(self) -> None:
        """Hold a last round, and average the optimizer state that has stayed local. A collective call.

        Raises:
            UnevenData: ranks have taken different numbers of steps.
            RatesDiffer: with different learning rates.
            RoundError: the last round failed, or an earlier one did.
        """
        self.failures.enter_barrier(self._hooks.refused)
        self.flush()  # what is under way is training's
        for level in self.levels:
            level.session.stats.begin_closing()
        self._sync()
        self.levels[-1].consolidate()
        for level in self.levels if self.options.group.rank() == 0 else ():
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
        self._hooks.remove()
        self._own.drop()
        self.failures.close()
        failed = self.failures.first is not None
        for level in self.levels:
            level.close(failed)
