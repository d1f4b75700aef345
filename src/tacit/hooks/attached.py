"""An attached session: what the user calls during training, and how it is closed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tacit.errors import AttachError, PeerLost
from tacit.hooks import (
    checkpoint,
    exit,
    momentum,
    run_report,
    sharded_state,
    status,
    step_profile,
    tensorboard,
)
from tacit.hooks.agreement import agree
from tacit.hooks.assembly import levels_of
from tacit.hooks.ddp import HookDispatcher, no_exchange
from tacit.hooks.failures import Failures, first_line
from tacit.hooks.footprint import footprint
from tacit.hooks.frozen_check import FrozenCheck
from tacit.hooks.grad_scaler import ScaledSteps
from tacit.hooks.learning_rates import RateHistory, Rates
from tacit.hooks.level import Level
from tacit.hooks.memory import too_large
from tacit.hooks.options import AttachOptions
from tacit.hooks.step_hooks import StepHooks, differ_since
from tacit.hooks.trained_model import TrainedModel
from tacit.hooks.uneven_data import SyncedBackwards
from tacit.session import Session, joined, timeline
from tacit.timelines import Timeline
from tacit.torch_compat import in_join
from tacit.transports.process_groups import rank_in, ranks_of

CLOSE = "write `with tacit.attach(...):` around the loop, or session.close() behind it"

_log = logging.getLogger("tacit")

_ATTACHED: WeakKeyDictionary[TrainedModel, Attached] = WeakKeyDictionary()


def session_of(model: TrainedModel) -> Attached | None:
    """The session that is attached to the model, if one is."""
    return _ATTACHED.get(model)


class Attached:
    """A session at work on a model; a context manager, which closes it.

    `attach` and `CommState` make it. A collective call: the ranks first compare what they give.

    Args:
        options: what to attach, and to what; checked.
        dispatcher: answers the communication hook that the user registers; None: tacit registers its own.

    Attributes:
        strategy: as given.
        levels: the strategy's, near to far.
    """

    def __init__(self, options: AttachOptions, dispatcher: HookDispatcher | None = None) -> None:
        self.strategy = options.strategy
        self.levels: list[Level] = []
        self._options = options
        model, optimizers = options.model, options.optimizers
        rates = Rates(optimizers, options.named)
        # A replica that moves on its own may pass over steps of its own with a scaler.
        own_steps = options.scaler is not None and options.periodic
        self._notes = RateHistory(rates) if optimizers and not own_steps and not in_join(model) else None
        self._frozen, backwards = FrozenCheck(model), SyncedBackwards(model)
        self._hooks = StepHooks(options, self.levels, backwards, self._frozen, self._notes)
        self._failures = Failures(options, self.levels, backwards, self._notes)
        self._momentum = momentum.planned(self.strategy, options.policy, optimizers, options.named)
        self._scaled: ScaledSteps | None = None
        agree(options)
        if options.ddp is not None and not options.leaves_ddp_alone:
            dispatcher = dispatcher or HookDispatcher.of(options.ddp)
        elif options.sharded is not None and not options.periodic:
            dispatcher = HookDispatcher(no_exchange)
        try:
            self._begin(rates, dispatcher)
        except torch.OutOfMemoryError as error:
            self._leave()
            raise AttachError(
                too_large(self.strategy, options.named, options.policy, options.exchange_on)
            ) from error
        except BaseException:
            self._leave()
            raise
        _ATTACHED[model] = self
        run_report.began(self)
        tensorboard.began(self)
        exit.began(self)
        step_profile.began(self, options)

    def _begin(self, rates: Rates, dispatcher: HookDispatcher | None) -> None:
        options = self._options
        for level in levels_of(options, rates, self._momentum):
            self.levels.append(level)
        if options.scaler is not None and options.scaled:
            self._scaled = ScaledSteps(options.scaler, self.levels, options.named, options.optimizers)
        self._failures.watch()
        self._hooks.register(dispatcher, self._momentum, self._scaled)
        exit.watch(ranks_of(options.group))

    @property
    def session(self) -> Session:
        """The session of the nearest level; of the only one, where there are no levels."""
        return self.levels[0].session

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks whose parameters are averaged."""
        return self._options.group

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those whose steps it follows, without what frameworks wrap around them."""
        return self._options.optimizers

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return session_of(self._options.model) is not self

    # ---- while it is at work --------------------------------------------------------------------------

    def observe(self, loss: Tensor | float) -> None:
        """Give the loss of this step to strategies that depend on it; others ignore it.

        To be called once a step, before `optimizer.step`.
        """
        for level in self.levels:
            if level.progress is not None:
                level.progress.observations.observe(loss)

    def flush(self) -> None:
        """Wait until no message is in flight, as before a checkpoint. Raises what went wrong.

        An answer that is to be applied later is kept until then.
        """
        for level in self.levels:
            level.session.flush()

    def check_called(self) -> None:
        """To be called behind a first step, by who has attached for somebody else.

        Raises:
            AttachError: torch has not called the hooks, so nothing was exchanged; says why that may be.
        """
        if self._scaled is None and self._options.optimizers and not self._hooks.called:
            raise AttachError(
                f"a step was taken, and the optimizer that {self.strategy.name!r} has did not take "
                "it, so nothing is exchanged: attach behind whatever makes another optimizer of it"
            )
        if self.levels[0].gradient is not None and self._hooks.backwards.begun == 0:
            raise AttachError(
                f"a step was taken, and DDP did not call its hook, so {self.strategy.name!r} has exchanged "
                "no gradients: compute the loss by calling the model that the framework has wrapped, and not "
                "a module inside it, and leave no_sync out of a step's last backward"
            )

    def sync(self) -> None:
        """Make all replicas equal now, by a round where the strategy lets them differ. A collective call.

        Raises:
            AttachError: a Parameter of the model has been replaced by another.
            RoundError: the round failed.
        """
        self.flush()
        if self._options.sharded is not None:
            self._options.sharded.reshard()
        self._frozen.check_objects()
        self.levels[-1].sync()

    def state_dict(self) -> dict[str, Any]:
        """The session for a checkpoint (`Stateful`): counters, buckets, and all state that it keeps.

        For torch.save each rank saves its own, as residuals differ by rank; torch.distributed.checkpoint
        keeps them apart by their keys. Waits until nothing is under way.
        """
        self.flush()
        state, sharded = checkpoint.save(self.strategy, self.levels), self._options.sharded
        if sharded is None:
            return state
        return sharded_state.whole(sharded, self._options.named, state, self._not_by_entry())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, bit for bit; load the model and the optimizer too.

        Raises:
            CheckpointError: it does not fit, or is not whole; nothing has been changed then.
        """
        self.flush()
        if (sharded := self._options.sharded) is not None:
            sharded.reshard()
            state_dict = sharded_state.mine(sharded, self._options.named, state_dict, self._not_by_entry())
        checkpoint.load(state_dict, self.strategy, self.levels)
        for level in self.levels:
            level.fetch()
        if self._notes is not None:
            self._notes.loaded()

    def _not_by_entry(self) -> set[tuple[int, str, str]]:
        return {
            (i, *key)
            for i, level in enumerate(self.levels)
            for key, kept in level.session.store.named_state().items()
            if not kept.by_entry
        }

    # ---- what it tells --------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """This rank's numbers since the session began.

        * `steps`, and `rounds`; `void_rounds`: of these, how many came to nothing as a scaled gradient
          overflowed;
        * `bytes_out`: sent by this rank in training, by the formulas of the collectives; `ddp_bytes_out`:
          what DDP's own all-reduce would have sent of a rank in as many steps; `compression`: how many times
          as much that is. `closing_bytes_out`: sent by closing the session, where replicas are averaged;
        * `exchange_seconds`: with a round under way; `exposed_seconds`: of these, with training waiting;
          `compute_share`: the share of the time between rounds that was not spent waiting;
        * `lag`: how many steps after its round had left an answer was applied, on average.

        With parameter servers also `push_bytes`, `pull_bytes`, `queue_seconds` and `staleness`. Of several
        levels: their sums (`lag`: that of the farthest), and `rounds_0`, `bytes_out_0`, `rounds_1` and so on
        for each, near to far.
        """
        each = [level.metrics() for level in self.levels]
        return each[0] if len(each) == 1 else joined(each)

    def servers(self) -> list[dict[str, Any]]:
        """The counters of each parameter server; empty where there are none.

        `pushes` and `pulls`, and their `push_bytes` and `pull_bytes`, of all workers; `stale`: how many
        pushes were how many updates old; `late`: how many were dropped; `queue_seconds`: how long messages
        waited for their turn, in all; `busy_seconds`; `transmitted`: bytes that its interface has sent.

        Raises:
            ServerLost: one is gone.
        """
        self.flush()
        return [facts for level in self.levels for facts in level.servers()]

    def footprint(self) -> dict[str, int]:
        """Bytes that this rank keeps beside the model, its gradients and the optimizer, by what they are.

        E.g. `residual` and `anchor`; `second buffers`: what a round writes while the old state is kept, so
        that a round that fails leaves no trace; `messages`: what is sent and received, used again in the next
        round; `scratch`: what encoding and decoding use, in the threads of all sessions.
        """
        return footprint([self.levels, self._momentum], self._options.model.module, self._options.optimizers)

    def timeline(self) -> Timeline:
        """When this rank computed and waited: its last thousand steps, and each level's last thousand rounds.

        Of each round: when it began and ended, when training waited for it, its bytes. What of a step is no
        waiting is computing, tacit's own included. Ranks of one machine have one clock. With `ddp` only steps
        are known. `tacit.lab.reports.trace` makes of all ranks' timelines a trace for Perfetto.
        """
        names = ["exchange"] if len(self.levels) == 1 else [each.name for each in self.strategy.levels]
        sessions = [level.session for level in self.levels]
        return timeline(self.strategy.name, rank_in(), names, sessions)

    @property
    def active_path(self) -> str:
        """What runs, in one sentence: the strategy, its messages, the ranks, the kernels."""
        return status.active_path(self._options, self.levels, self._momentum)

    def describe(self) -> str:
        """What runs, in lines: `active_path`, and all that it summarises.

        Of each level its strategy as a value; which topology was chosen, and by which numbers: the bytes of
        the busiest rank, as sent and as weighed by what a second compression loses; and each bucket with its
        parameters, their compressors, what predicts them, and its bytes.
        """
        return status.describe(self._options, self.levels, self._momentum)

    # ---- how it ends ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Make replicas and their optimizers equal, wait for all rounds, and leave plain DDP; idempotent.

        The optimizer's hooks are taken away; DDP's communication hook stays, and averages as plain DDP does.
        A collective call: a rank that comes early waits for the others, while they live.

        Raises:
            UnevenData: ranks have taken different numbers of steps.
            RatesDiffer: with different learning rates.
            RoundError: the last round failed, or an earlier one did.
        """
        if session_of(self._options.model) is None:
            return
        try:
            first = self._failures.first
            if first is None or any(
                level.session.strategy.late and level.session.failure.unraised for level in self.levels
            ):
                self._make_equal()
            elif isinstance(first, PeerLost):
                raise first  # found by the failure detector, and perhaps not yet raised
        finally:
            self._leave()

    def _make_equal(self) -> None:
        """Hold a last round, and average the optimizer state that has stayed local."""
        self._failures.enter_barrier()
        self.flush()  # what is under way is training's
        for level in self.levels:
            level.session.stats.begin_closing()
        self.sync()
        self.levels[-1].consolidate()
        for level in self.levels if self._options.group.rank() == 0 else ():
            if note := level.strategy.compressor.ended(level.session.step):
                _log.warning("%s", note)
        if self._scaled is not None:
            self._scaled.consolidate()
        self._failures.leave_barrier()

    def _leave(self) -> None:
        """Remove the hooks and close the levels of this rank; no collective call."""
        _ATTACHED.pop(self._options.model, None)
        self._hooks.remove()
        self._failures.close()
        failed = self._failures.first is not None
        for level in self.levels:
            level.close(failed)
        exit.ended(self)
        run_report.ended(self)
        tensorboard.ended(self)

    def end(self, where: str, error: BaseException | None) -> None:
        """Close a session that nobody has closed, at `where`; see `hooks.exit`. Logs what it did."""
        since = differ_since(self.levels)
        try:
            if error is not None:
                self._failures.lost_by(error)
                self._leave()
                return
            self.close()
        except Exception as failure:
            undone = "" if since is None else f" The replicas, {since}, were not averaged."
            _log.warning(
                "the session of %r was open at %s, and could not be closed: %s.%s Close it yourself: %s",
                *(self.strategy.name, where, first_line(failure), undone, CLOSE),
            )
        else:
            if since is not None and rank_in() == 0:
                _log.warning(
                    "the session of %r was open at %s. The replicas, %s, have been averaged now: what was "
                    "saved or evaluated before was one rank's own. Close it where training ends: %s",
                    *(self.strategy.name, where, since, CLOSE),
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        lost = self._failures.lost_by(error)
        self._leave()
        if lost is not None:
            raise lost from error
