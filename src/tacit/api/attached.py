"""An attached session: what the user calls during training, and how it is closed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from tacit.api import observers
from tacit.api.at_work import AtWork
from tacit.attaching.requirements import warn_of_late_gradients
from tacit.attaching.step_hooks import differ_since
from tacit.errors import AttachError, PeerLost, first_line
from tacit.failure import exit
from tacit.gradients.ddp_hook import HookDispatcher
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.model.torch_modes import shielded
from tacit.model.trained_model import TrainedModel
from tacit.session import Session
from tacit.strategy import AnyStrategy
from tacit.transports.process_groups import rank_in

if TYPE_CHECKING:
    from tacit.api.choosing import Choosing
    from tacit.api.members_at_work import MembersAtWork
    from tacit.links import Links
    from tacit.planning.decider import Choice
    from tacit.planning.live_diagnosis import Diagnosing
    from tacit.replicas.consensus import Consensus
    from tacit.timelines import Timeline

CLOSE = "write `with tacit.attach(...):` around the loop, or session.close() after it"

_log = logging.getLogger("tacit")

_ATTACHING = threading.Lock()
_ATTACHED: WeakKeyDictionary[TrainedModel, Attached] = WeakKeyDictionary()


def session_of(model: TrainedModel) -> Attached | None:
    """The session that is attached to the model, if one is."""
    return _ATTACHED.get(model)


def refuse_second(model: TrainedModel) -> None:
    """Refuse a model that has a session.

    Raises:
        AttachError: names the session's strategy.
    """
    earlier = session_of(model)
    if earlier is not None:
        raise AttachError(f"{earlier.strategy.name!r} is attached to this model already: close it first")


class Attached:
    """A strategy at work on a model. As a context manager it closes itself at the end of the block.

    `attach` and `CommState` make one. That is a collective call: the ranks first compare what they attach.

    Args:
        spec: the arguments of `attach`, checked.
        dispatcher: answers the communication hook that the user registers; None: tacit registers its own.
        strategy: the strategy that the user named, if another one is at work (`auto`).

    Attributes:
        strategy: as the user named it.
        optimizers: those whose steps it follows, without what frameworks wrap around them.
        links: the measured links between nodes, if `attach` was asked to measure them, or the strategy
            depends on them; else None.
    """

    strategy: AnyStrategy
    optimizers: Sequence[Optimizer]
    links: Links | None

    def __init__(
        self,
        spec: AttachSpec,
        dispatcher: HookDispatcher | None = None,
        strategy: AnyStrategy | None = None,
    ) -> None:
        self.strategy = spec.strategy if strategy is None else strategy
        self._model, self.optimizers = spec.model, spec.optimizers
        self._process, self._rank = os.getpid(), rank_in()
        if not _ATTACHING.acquire(blocking=False):
            raise AttachError(
                "another thread of this process is attaching, and ranks have to attach in the same order: "
                "attach one model after the other, from one thread"
            )
        try:
            refuse_second(self._model)  # another thread may have attached it since the caller asked
            self._at_work: AtWork | Choosing | MembersAtWork = self._begun(spec) or AtWork(spec, dispatcher)
            _ATTACHED[self._model] = self
        finally:
            _ATTACHING.release()
        if self._rank == 0:
            warn_of_late_gradients(self.strategy, self.optimizers)
        self.links = self._active.links
        try:
            exit.began(self)
            observers.began(self)
        except BaseException as error:
            Attached.__exit__(self, type(error), error, error.__traceback__)
            raise

    def _begun(self, spec: AttachSpec) -> MembersAtWork | None:
        """What is at work, where that is more than one strategy."""
        return None

    @property
    def _active(self) -> AtWork:
        return self._at_work.now

    @property
    def levels(self) -> list[Level]:
        """The levels of the strategy that is at work, near to far."""
        return self._active.levels

    @property
    def session(self) -> Session:
        """The session of the nearest level; of the only one, where there are no levels."""
        return self.levels[0].session

    @property
    def members(self) -> MembersAtWork:
        """The members of the present period, where replicas come and go: see `Members`.

        Raises:
            AttributeError: `attach` got no `members=`.
        """
        raise AttributeError(
            "this session has no members, as its replicas stay: write tacit.attach(..., "
            "members=tacit.Members()), where each replica is a world of its own"
        )

    @property
    def options(self) -> AttachSpec:
        """What is at work, and on what: strategy, model, optimizers, parameters by name, process group."""
        return self._active.spec

    @property
    def closed(self) -> bool:
        """Whether the session has ended. True in a forked process, as the session is its parent's."""
        return session_of(self._model) is not self or os.getpid() != self._process

    # ---- while it is at work --------------------------------------------------------------------------

    @shielded
    def observe(self, loss: Tensor | float) -> None:
        """Pass the loss of this step to strategies that depend on it; others ignore it.

        Call it once a step, before `optimizer.step`.
        """
        self._at_work.observe(loss)

    def discard(self, wish: bool = True) -> bool:
        """Take back the step that is under way if any rank asks for it, as its loss has a spike for example.

        A collective call, between the last backward of a step and `optimizer.step`, in every step in which
        a rank may ask. Where it returns True, clear the gradients and do not step. Residuals, momenta,
        counters and random streams are then as if this batch had never been.

        Args:
            wish: whether this rank asks for it; one rank is enough.

        Returns: Whether the step is taken back; equal on all ranks.

        Raises:
            AttachError: there is no backward to take back, `wish` is no bool, or the strategy cannot do it.
            RoundError: the ranks could not agree, or the round of that backward has failed.
        """
        if self.closed:
            raise AttachError("session.discard() was called when the session was closed: call it before")
        return self._active.discard(wish)

    def flush(self) -> None:
        """Wait until no message is in flight, for example before a checkpoint.

        An answer that is due in a later step is still applied then.

        Raises:
            RoundError: an exchange failed.
        """
        self._active.flush()

    def check_called(self) -> None:
        """Check after the first step that torch calls the hooks; for frameworks that attach for a script.

        Raises:
            AttachError: torch has not called them, so nothing was exchanged; the message says why that may
                be.
        """
        self._at_work.check_called()

    def sync(self) -> None:
        """Make all replicas equal now. A collective call, after the same step on every rank.

        The replicas become their mean, or the strategy's common point, such as the centre of `easgd`; changes
        are sent uncompressed. Weights that the script has written become their mean, and all replicas begin
        again from there. The ranks compare a checksum of their parameters: where gradients are averaged, a
        warning names the rank that alone was written to. After `close` it does nothing.

        Raises:
            AttachError: a Parameter of the model has been replaced by another.
            RoundError: it failed; `PeerLost`: a rank is gone, or has gone on without this call.
        """
        if not self.closed:
            self._active.sync()

    def state_dict(self) -> dict[str, Any]:
        """The session for a checkpoint (`Stateful`): counters, buckets, and all state that it keeps.

        With torch.save each rank saves a file, as residuals differ by rank; torch.distributed.checkpoint
        separates them by their keys. All ranks call it after the same step, as some strategies (`efsign`)
        have it wait for all.
        """
        return self._at_work.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, bit for bit; load the model and the optimizer too. A collective call.

        Raises:
            CheckpointError: the state of a rank does not fit, or is not whole. All ranks raise it, and
                nothing has changed.
        """
        self._at_work.load_state_dict(state_dict)

    # ---- what it reports --------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """This rank's numbers since the session began.

        * `steps`, also those before a checkpoint that was loaded; `rounds`; `void_rounds`: of these, how many
          came to nothing, as a scaled gradient overflowed or the step was discarded;
        * `bytes_out`: sent by this rank in training, by the formulas of the collectives; `ddp_bytes_out`:
          what DDP's all-reduce would have sent from a rank in the session's steps; `compression`: the ratio
          of the two, or 1 where tacit has sent nothing, as with "ddp". `closing_bytes_out`: sent when the
          session closes, if replicas are averaged then;
        * `exchange_seconds`: how long a round was under way; `exposed_seconds`: of these, how long training
          waited; `compute_share`: the share of the time between rounds that was not spent waiting;
        * `lag`: how many steps after the start of its round an answer was applied, on average.

        If replicas differ, and were averaged by `sync` or `tacit.measure_consensus`, their distance to the
        mean just before: `consensus_distance`, the mean over the replicas of ||x_i - mean x||, and
        `consensus_relative`, that divided by ||mean x||.

        With parameter servers also `push_bytes`, `pull_bytes`, `queue_seconds` and `staleness`. Of several
        levels: their sums (`lag`: that of the farthest), and `rounds_0`, `bytes_out_0`, `rounds_1` and so on
        for each, near to far.
        """
        return self._at_work.metrics()

    def metrics_text(self) -> str:
        """The numbers of `metrics` for Prometheus: lines `tacit_rounds{rank="0"} 12`, with help and type.

        Serve it at a path of your own, or write it to a file that node_exporter reads.
        """
        from tacit.reporting.prometheus import metrics_text

        return metrics_text(self.metrics(), self._labels)

    @property
    def _labels(self) -> dict[str, str]:
        """What tells this rank's numbers from others'."""
        return {"rank": str(self._rank)}

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
        """The bytes of memory that the session adds on this rank to model, gradients and optimizer, by label.

        E.g. `residual` and `anchor`; `second buffers`: what a round writes while the old state is kept, so
        that a round that fails leaves no trace; `messages`: what is sent and received, used again in the next
        round; `scratch`: what encoding and decoding use, in the threads of all sessions.
        """
        from tacit.planning.footprint import footprint

        return footprint([self.levels, self._active.momentum], self._model.module, self.optimizers)

    @shielded
    def diagnose(self, steps: int | None = None) -> Diagnosing:
        """Find out where the time of the next steps goes, and what would change it. All ranks call it.

        Each of these steps is timed, which costs some microseconds a parameter. After the last one all ranks
        compare, which takes some seconds: links are measured, and the times of other strategies predicted.
        Rank 0 logs the diagnosis.

        Args:
            steps: how many steps are timed, 2 or more, after five that are skipped. By default 20, or two
                periods of the strategy.

        Returns:
            An object whose `result` is None until then, and then a `Diagnosis`, equal on all ranks.

        Raises:
            AttachError: attach got no optimizer.
            ConfigError: this number of steps is not possible.
        """
        from tacit.planning.live_diagnosis import Diagnosing

        return Diagnosing(self, steps)

    def timeline(self) -> Timeline:
        """When this rank computed and waited: its last thousand steps, and each level's last thousand rounds.

        Of each round: when it began and ended, when training waited for it, its bytes. All of a step that is
        not waiting counts as computing, tacit's included. Ranks of one machine have one clock. With `ddp`
        only steps are known. With `fusion` and `priority` the timeline also says when each message was ready,
        left and came, and when training waited for it; this is recorded from the first call on.
        `tacit_lab.reports.trace` makes a trace for Perfetto of the timelines of all ranks.
        """
        return self._at_work.timeline()

    @property
    def choice(self) -> Choice | None:
        """What `auto` has chosen, and on what grounds; None before, and where the user named the strategy."""
        return self._at_work.choice

    @property
    def active_path(self) -> str:
        """What runs, in one sentence: the strategy, its messages, the ranks, the kernels."""
        return self._at_work.active_path

    def describe(self) -> str:
        """What runs, in lines: `active_path`, and all that it summarises.

        Of each level its strategy as a value; which topology was chosen, and by which numbers: the bytes of
        the busiest rank, as sent and as weighed by what a second compression loses; and each bucket with its
        parameters, their compressors, what predicts them, and its bytes.
        """
        return self._at_work.describe()

    # ---- how it ends ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Make replicas and their optimizers equal, wait for all rounds, and leave plain DDP; idempotent.

        The optimizer's hooks are taken away; DDP's communication hook stays, and averages as plain DDP does.
        A collective call: a rank that comes early waits for the others, while they live.

        Raises:
            UnevenData: ranks have taken different numbers of steps.
            RatesDiffer: ranks have different learning rates.
            RoundError: the last round failed, or an earlier one did.
        """
        if self.closed:
            return
        try:
            first = self._active.failures.first
            if first is None or any(
                level.session.strategy.late and level.session.failure.unraised for level in self.levels
            ):
                self._active.make_equal()
            elif isinstance(first, PeerLost):
                raise first  # found by the failure detector, and perhaps not yet raised
        finally:
            self._leave()

    def _leave(self) -> None:
        """Remove the hooks and close the levels of this rank; no collective call."""
        _ATTACHED.pop(self._model, None)
        self._at_work.leave()
        exit.ended(self)
        observers.ended(self)

    def end(self, where: str, error: BaseException | None) -> None:
        """Close a session that nobody has closed, at `where`; see `hooks.exit`. Logs what it did."""
        since = differ_since(self.levels)
        try:
            if error is not None:
                self._active.failures.lost_by(error)
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
                    "saved or evaluated before was that of one rank alone. Close it where training ends: %s",
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
        if self.closed:
            return
        lost = self._active.failures.lost_by(error)
        self._leave()
        if lost is not None:
            raise lost from error


@shielded
def measure_consensus(session: Attached) -> Consensus | None:
    """Measure how far the replicas are from their mean, for example once an epoch. A collective call.

    It averages a copy of the model, whose bytes `session.metrics` does not count, and leaves the replicas as
    they are. Where the strategy has made them equal it sends nothing, and the distance is 0.
    `session.metrics` has it from then on. None where it is not measured: where replicas never differ, where
    workers do not wait for each other, and for sharded models.

    Raises:
        RoundError: the average failed.
    """
    session.flush()
    return session.levels[-1].measure_consensus()
