"""Registers the hooks of an attached session on the model and on its optimizers, and removes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from tacit.attaching.epoch_length import BackwardPasses
from tacit.attaching.rate_history import RateHistory
from tacit.attaching.step_discarding import why_not
from tacit.errors import AttachError
from tacit.gradients.accumulation_checks import AccumulationCheck, linear
from tacit.gradients.ddp_hook import Answer, HookDispatcher, SyncedBackwards, no_exchange, plain_mean
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.model.frozen_check import FrozenCheck
from tacit.model.not_copied import OnlyHere
from tacit.model.torch_modes import shielded
from tacit.optimizer_hooks.closures import with_gradients
from tacit.optimizer_hooks.step_counting import StepCounting
from tacit.session import Session
from tacit.transports.process_groups import rank_in

if TYPE_CHECKING:
    from tacit.attaching.grad_scaler import ScaledSteps
    from tacit.optimizer_hooks.taken_momentum import Taken

_log = logging.getLogger("tacit")


class StepHooks:
    """The hooks in backward, and before and after every optimizer step.

    Args:
        spec: the arguments of attach.
        levels: near to far; the list may still be filled until `register` is called.
        backwards: counts the backward passes.
        frozen: checks that the trained parameters stay the same.
        notes: records after every step, which must be equal on all ranks.

    Attributes:
        called: whether a step was taken.
    """

    def __init__(
        self,
        spec: AttachSpec,
        levels: Sequence[Level],
        backwards: SyncedBackwards,
        frozen: FrozenCheck,
        notes: RateHistory | None,
    ) -> None:
        self._spec, self._levels = spec, levels
        self.backwards, self._frozen, self._notes = backwards, frozen, notes
        self._passes = BackwardPasses.of(spec.strategy, spec.named, spec.schedule_state)
        self._handles: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._accumulating: AccumulationCheck | None = None
        self._scaled: ScaledSteps | None = None
        self._seen: StepCounting | None = None
        self._warned = self.called = self._whole = False
        self._saved: tuple[str, str] | None = None
        self._before: list[Callable[[Optimizer], object]] = []
        self._after: tuple[Callable[[], None], ...] = ()
        self._through: Callable[[Callable[[], None]], None] | None = None

    def register(
        self, dispatcher: HookDispatcher | None, taken: Taken | None, scaled: ScaledSteps | None
    ) -> None:
        """Register them, in the order in which they are to be called.

        Args:
            dispatcher: is called by the hook of DDP, or the hooks of FSDP2; None: there is none.
            taken: the momentum to take from the optimizers.
            scaled: counts the attempts of a scaler.
        """
        self._scaled = scaled
        optimizers, near, far = self._spec.optimizers, self._levels[0], self._levels[-1]
        if optimizers:
            self._see_steps(dispatcher is not None)
        if dispatcher is not None:
            self._answer_hook(dispatcher)
        if any(level.steps_alone for level in self._levels) and self._spec.ddp is not None:
            from tacit.replicas.buffers import BufferBroadcasts

            self._undo.append(BufferBroadcasts(self._spec.ddp).restore)
        if not self._spec.leaves_ddp_alone:
            self._before.append(self._frozen)
        if near.before_step is not None:
            self._before.append(near.before_step)
        if far.progress is not None and scaled is None:
            from tacit.replicas.nonfinite_since import NonfiniteSince

            broken = NonfiniteSince(self._spec.named, lambda: far.session.step)
            far.session.nonfinite.use_origin(broken.origin)
            self._before.append(broken)
        if far.progress is not None:
            module: Any = self._spec.model.module
            self._handles.append(module.register_state_dict_pre_hook(OnlyHere(self._note_saved)))
        if far.progress is not None or taken is not None:  # whose hooks come next
            self._register_before()
        counted = 0 if scaled is None else 1  # with a scaler an attempt ends with its backward
        far.count_by(lambda: far.session.step - counted)
        if taken is not None:
            taken.take(lambda: near.session.step - counted)
            self._undo.append(taken.restore)
        if any(level.session.context.in_stream and level.gradient is not None for level in self._levels):
            # The last of the hooks: while the host waits here, the device runs out of work.
            self._before.append(self._check_means)
        if near.put_off is not None:
            self._before.append(near.put_off)
        if self._seen is not None and near.gradient is not None and self._spec.ddp is not None:
            self._seen.watch_forward(self._spec.ddp, self._frozen.moved)
            self._before.append(self._seen.refuse_own_gradients)
        self._register_before()
        self._after = tuple(self._acts_after_step())

    def _see_steps(self, counts: bool) -> None:
        """Count the optimizers' steps; `counts`: whether backward passes are counted."""
        spec = self._spec
        named = {} if spec.leaves_ddp_alone else spec.named
        backwards = self.backwards if counts else None
        self._seen = seen = StepCounting(
            *(spec.optimizers, named, backwards, spec.strategy.name),
            begin=self._levels[-1].take_loaded or (lambda: None),
            count=self._after_step,
        )
        self._undo.append(seen.remove)

    def complete(self) -> None:
        """Take all steps that are put off until the next forward pass, and count one that was taken."""
        for level in self._levels:
            level.complete()
        if self._seen is not None:
            self._seen.complete()

    def remove(self) -> None:
        """Remove the hooks, and restore what was taken over from the optimizers."""
        self._warn_of_own_replica()
        for handle in self._handles:
            handle.remove()
        for undo in self._undo:
            undo()
        if self._passes is not None:
            self._passes.close()

    def _register_before(self) -> None:
        """Register a hook that torch calls before a step; later ones come after it."""
        acts, self._before = tuple(self._before), []

        def before(optimizer: Optimizer) -> None:
            for act in acts:
                act(optimizer)

        hook = with_gradients(before if self._seen is None else self._seen.noting(before))
        self._handles += [each.register_step_pre_hook(hook) for each in self._spec.optimizers if acts]

    # ---- in backward ----------------------------------------------------------------------------------

    def _answer_hook(self, dispatcher: HookDispatcher) -> None:
        """Let the nearest level answer the hook, wrapped in the checks of every backward."""
        spec, near = self._spec, self._levels[0]
        self._undo.append(lambda: dispatcher.use(plain_mean(spec.model.process_group)))
        answer: Answer = near.gradient or no_exchange
        ended = None
        if near.gradient is not None and spec.ddp is not None and self._refuses_sums():
            scaled, unseen = self._scaled is not None, not spec.optimizers
            possible = not near.session.context.in_stream and why_not(spec, self._levels) is None
            self._accumulating = AccumulationCheck(
                *(spec.ddp, near.session, spec.named, scaled, unseen),
                self._take_back if possible else None,
            )
            self._undo.append(self._accumulating.close)
            stepped = self._accumulating.stepped
            for each in spec.optimizers:  # one of several may step less often
                self._handles.append(each.register_step_post_hook(lambda *_: stepped()))
            ended = self._accumulating.note_exchanged
        if self._scaled is not None:
            answer = self._scaled.around(answer)
        self.backwards.answer_by(answer, ended)
        if self._seen is not None:
            self.backwards.look(self._refuse_unseen, self._seen.refuse)
        dispatcher.use(self.backwards)
        if spec.sharded is not None:
            from tacit.fsdp.gradients import ShardedGradients

            settle = near.session.lanes.settle
            of_shards = ShardedGradients(spec.sharded, spec.named, dispatcher, spec.reduction, settle)
            of_shards.install()
            self._undo.append(of_shards.remove)
            self._before.append(of_shards.check)

    def _refuse_unseen(self) -> None:
        """Refuse parameters that move by no step that was seen."""
        if self._levels[-1].has_moved:
            raise AttachError(
                "the parameters have moved between backward passes, and "
                f"{self._spec.strategy.name!r} has seen no step of the optimizers that it got: give "
                "attach those whose step() moves them"
            )

    def _refuses_sums(self) -> bool:
        """Whether adding a gradient to a mean is refused; delayed means check the optimizer's steps."""
        session = self._levels[0].session
        return not linear(session) or (session.strategy.late and not self._spec.optimizers)

    @property
    def is_half_taken(self) -> bool:
        """Whether only some of the optimizers have taken the present step."""
        return self._seen is not None and self._seen.is_half_taken

    @property
    def refused(self) -> BaseException | None:
        """The error that prevented this rank's last step."""
        return None if self._seen is None else self._seen.refused

    def discard(self) -> None:
        """Undo the present step's exchanges; its gradients are to be cleared."""
        self._take_back()
        if self._accumulating is not None:
            self._accumulating.discarded()

    def _take_back(self) -> None:
        for level in self._levels:
            level.discard()
        self.backwards.discarded()
        if self._passes is not None:
            self._passes.discarded()

    # ---- before a step --------------------------------------------------------------------------------

    def _check_means(self, _: Optimizer) -> None:
        """Read the device's notes before a step uses the means: one wait a step."""
        for level in self._levels:
            # Steps that are put off are checked by who puts them off.
            if level.gradient is not None and level.put_off is None and not level.session.strategy.late:
                level.session.pending.check()

    # ---- after a step, and elsewhere -----------------------------------------------------------------

    def _acts_after_step(self) -> Iterator[Callable[[], None]]:
        """What is called after a step, in this order."""
        near = self._levels[0]
        if self._spec.leaves_ddp_alone:
            yield near.session.failure.raise_first  # DDP does not know of it
        if near.session.context.in_stream and near.gradient is not None:
            # Commit what was checked before the step: the device is busy again.
            yield near.session.commit_checked
        if self._scaled is not None:
            yield self._scaled.after_step
        else:
            yield from (level.after_step for level in self._levels)
        if self._notes is not None:
            yield self._note_rates
        if self._passes is not None:
            yield self._passes.stepped
        yield lambda: near.session.stats.stepped(self._levels[-1].session.step)
        if near.planned is not None:
            yield near.planned

    @shielded
    def _after_step(self) -> None:
        self.called = True
        if self._saved is not None or self._whole:
            self._warn_of_own_replica()
        if self._through is not None:
            self._through(self.act_after_step)
            return
        for act in self._after:
            act()

    def act_through(self, through: Callable[[Callable[[], None]], None]) -> None:
        """Have `through` do what follows a step: it gets that as a function, and may call it later."""
        self._through = through

    def act_after_step(self) -> None:
        """Do what follows a step."""
        for act in self._after:
            act()

    def _note_rates(self) -> None:
        session = self._levels[-1].session
        assert self._notes is not None
        self._notes.stepped(session.nonfinite.begun + session.step)

    def _note_saved(self, *_: object) -> None:
        """Note that the model's `state_dict` is read: between two rounds it is this replica alone."""
        since = differ_since(self._levels)
        if self._saved is None and since is not None:
            meets = _next_round_meets(self._levels[-1].session)
            self._saved = since, "after the next round" if meets else "in session.sync() and close() alone"

    def saved_whole(self) -> None:
        """Note that the session's state, which includes that replica, is saved in this step."""
        self._whole = True

    def _warn_of_own_replica(self) -> None:
        """Warn after the next step, or when the session ends, if only the model was saved."""
        since, whole = self._saved, self._whole
        self._saved, self._whole = None, False
        if since is not None and not whole and not self._warned:
            self._warned = True
            _log.warning(
                "rank %d has read the state_dict of its own replica: the replicas of %r, %s, agree again %s. "
                "Call session.sync() on every rank before, or read it after session.close(). A checkpoint "
                "of every rank, with session.state_dict(), is fine as it is",
                *(rank_in(), self._spec.strategy.name, *since),
            )


def _next_round_meets(session: Session) -> bool:
    whole, step = session.strategy.parts == 1, session.step
    return whole and session.strategy.merge.meets and session.schedule.sync_at(step).apply_at <= step


def differ_since(levels: Sequence[Level]) -> str | None:
    """A few words on since when the replicas differ; None: they do not."""
    since = levels[-1].steps_since_equal
    return (
        None if since is None else f"which differ after {since} step{'s' if since > 1 else ''} of their own"
    )
