"""What a rank does when a round fails: it finds the missing rank, ends what hangs, and alarms its peers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch.distributed as dist

from tacit.attaching.rate_history import RateHistory
from tacit.errors import NonFinite, PeerLost, RoundError, TacitError, first_line
from tacit.failure.barrier import StepsReached
from tacit.failure.detector import FailureDetector, Member, PostedCount, RankProgress
from tacit.gradients.ddp_hook import SyncedBackwards
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.strategy import Strategy
from tacit.torch_compat import default_store, sequence_number
from tacit.transports.process_groups import abort, rank_in

_log = logging.getLogger("tacit")

_SESSIONS: dict[str, int] = {}
"""The number of sessions that these ranks have begun: each has separate keys in the store."""


class Failures:
    """The failures that one rank of an attached session knows, its own and its peers'.

    Args:
        spec: the arguments of attach.
        levels: near to far; the list may still be filled until `watch` is called.
        backwards: counts the backward passes.
        notes: notes after each step, which must be equal on all ranks.
    """

    def __init__(
        self,
        spec: AttachSpec,
        levels: Sequence[Level],
        backwards: SyncedBackwards,
        notes: RateHistory | None,
    ) -> None:
        self._spec, self._levels = spec, levels
        self._backwards, self._notes = backwards, notes
        self._detector: FailureDetector | None = None
        self._noted: BaseException | None = None
        self._since = time.monotonic()
        mesh = ""
        if spec.sharded is not None:  # with different ones torch hangs, and says nothing of meshes
            mesh = f" with one mesh, here of {spec.sharded.shards} shards a replica"
        self._doing = f"comparing the arguments of tacit.attach, which all ranks must call{mesh}: "

    def watch(self, host: int | None = None) -> None:
        """Start to compare with the other ranks, if there are any, before there are levels.

        All ranks must be known to attach, as sessions are counted equally on all of them.
        `host`: see `store_host`.
        """
        ranks, farthest = self._spec.ranks, self._spec.strategy.levels[-1]
        if len(ranks) == 1:
            return
        name = "-".join(map(str, ranks))
        _SESSIONS[name] = _SESSIONS.get(name, 0) + 1
        posted = None if self._spec.leaves_ddp_alone else self._posted
        self._detector = FailureDetector(
            default_store(),
            f"{name}/{_SESSIONS[name]}",
            Member(rank_in(), ranks, host, 0 if self._spec.sharded is None else self._spec.sharded.shard),
            RankProgress(self._rounds, self._reached, posted, self._overdue),
            self._peer_lost,
            self._spec.time_limit.total_seconds(),
            self._notes,
            without_it(farthest),
        )
        self._doing = "while ranks attached: "

    def begin(self) -> None:
        """Explain failures of the levels, which are made now; or stop, if no rank waits for another."""
        self._doing = ""
        if self._detector is None:
            return
        if self._levels[-1].strategy.independent:
            self._detector.dismiss()
            self._detector = None
            return
        for level in self._levels:
            tell = self._tell if len(level.session.ranks) < len(self._spec.ranks) else None
            meet = self._meet if level.session.strategy.late else None
            level.session.failure.report_to(self._explain, tell, self._detector.raised, meet)
        if self._noted is not None:
            self._note(self._noted)

    @property
    def first(self) -> BaseException | None:
        """The error of the nearest level that has failed."""
        errors = (level.session.failure.error for level in self._levels)
        return next((error for error in errors if error is not None), self._noted)

    def come_to(self, call: str, number: int = 0) -> int:
        """Wait until all ranks have made a collective call; returns the sum of their numbers.

        Raises:
            PeerLost: a rank is gone or frozen, or has gone on without the call.
        """
        first = self.first
        if isinstance(first, TacitError):
            raise first
        return number if self._detector is None else self._detector.come_to(call, number)

    def enter_barrier(self, refused: BaseException | None) -> None:
        """Wait until all ranks close their sessions after equally many steps, unless something has failed.

        `refused`: the error that prevented this rank's next step.

        Raises:
            UnevenData: they have taken different numbers of steps.
            RatesDiffer: they have taken a step with different learning rates.
            PeerLost: a rank is gone or frozen.
        """
        if self._detector is not None and self.first is None:
            why = "" if refused is None else f"{type(refused).__name__}: {first_line(refused)}"
            self._detector.enter_barrier(why and f"rank {rank_in()} could not take its next step: {why}")

    def leave_barrier(self) -> None:
        """Stop comparing, at the same time as the other ranks."""
        if self._detector is not None:
            self._detector.leave_barrier()

    def close(self) -> None:
        """Stop comparing, without waiting for others."""
        if self._detector is not None:
            self._detector.close()

    def lost_by(self, error: BaseException) -> TacitError | None:
        """The failure that caused an error of the training loop; None: nothing did.

        If the error is this rank's, its peers are alarmed.
        """
        first, of_a_collective = self.first, isinstance(error, dist.DistError) or _is_of_gloo(error)
        if first is not None:
            return first if of_a_collective and isinstance(first, TacitError) else None
        doing = self._doing
        if self._detector is None and doing and of_a_collective and self._spec.members is None:
            self.watch()  # no rank has got further, and none can go on
        if self._detector is None:
            return None
        if of_a_collective:
            lost = self._detector.alarm(doing + first_line(error))
            self._note(lost)
            return lost
        # The peers may be waiting for this rank: alarm them, and do not wait for them.
        self._detector.leave(f"{type(error).__name__}: {error}")
        self._note(error)
        self._abort()
        return None

    # ---- called by sessions and by the detector -------------------------------------------------------

    def _tell(self, error: BaseException) -> None:
        """Alarm the ranks that take no part in the failed round."""
        if self._detector is not None and not isinstance(error, PeerLost):
            self._detector.leave(f"{type(error).__name__}: {error}")

    def _meet(self, error: BaseException) -> None:
        """Wait for the other ranks: with late answers, each reads the same error at another time."""
        if self._detector is not None and isinstance(error, NonFinite):
            self._detector.meet()

    def _explain(self, error: BaseException) -> BaseException:
        if isinstance(self.first, PeerLost):
            return self.first
        assert self._detector is not None
        own = isinstance(error, TacitError) and not isinstance(error, RoundError)
        found = self._detector.alarm(first_line(error), own)
        found.__cause__ = error
        return found

    def _rounds(self) -> int:
        """The number of this rank's rounds, which ranks compare when a round fails."""
        if self._spec.leaves_ddp_alone:
            return sum(level.session.step for level in self._levels)
        return sum(level.session.round for level in self._levels)

    def _posted(self) -> PostedCount:
        """The number of this rank's posted collectives, and the time of the last."""
        sessions = [level.session for level in self._levels]
        begun = self._backwards.begun if self._spec.scaled else 0
        since = max((session.lanes.posted_at for session in sessions), default=self._since)
        return PostedCount(sum(session.lanes.posted for session in sessions) + begun, since)

    def _overdue(self) -> str:
        """The reason why a round on a GPU counts as failed, or "": NCCL reports no lost peer."""
        seconds = self._spec.time_limit.total_seconds()
        if not any(level.session.lanes.overdue(seconds) for level in self._levels):
            return ""
        return f"the GPU has not ended an exchange within {seconds:g} s"

    def _reached(self) -> StepsReached:
        """How far this rank is, which ranks compare when one closes its session."""
        farthest = self._levels[-1].session if self._levels else None
        steps = 0 if farthest is None else farthest.nonfinite.global_step(farthest.step)
        if self._spec.leaves_ddp_alone:
            if self._spec.in_join:
                return StepsReached(0)  # there ranks may take different numbers of steps
            return StepsReached(steps, sequence_number(self._spec.group))
        begun = sum(level.begun for level in self._levels)
        # With a scaler the ranks compare in backward, before a round begins.
        return StepsReached(steps, begun + (self._backwards.begun if self._spec.scaled else 0))

    def _peer_lost(self, error: PeerLost) -> None:
        if self._spec.leaves_ddp_alone:
            _log.error("%s", error)  # DDP's collective hangs, and ends with an error of Gloo
        self._note(error)
        self._abort()

    def _note(self, error: BaseException) -> None:
        self._noted = self._noted or error
        for level in self._levels:
            level.session.failure.fail(error)

    def _abort(self) -> None:
        """End collectives that may hang: tacit's, or DDP's if it exchanges the gradients itself."""
        for level in self._levels:
            level.transport.abort(self.first)
        if self._spec.leaves_ddp_alone:
            abort([self._spec.group])


def _is_of_gloo(error: BaseException) -> bool:
    """Whether a collective of Gloo failed; most of its plain errors name a file of its sources."""
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "pair closure" in text)


def without_it(strategy: Strategy) -> str:
    """A sentence on what could go on without a lost rank; "" if nothing similar could."""
    if not strategy.topology.mixes:
        return ""
    return (
        f". With {strategy.name!r} all ranks of a round wait for each other; to go on without a rank that is "
        "gone, attach 'adpsgd:allow_lost=true'"
    )
