"""Finds the missing rank when a round fails: the others answer an alarm in the launcher's store."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from tacit.errors import PeerLost, RatesDiffer, UnevenData, of_ranks
from tacit.failure.barrier import UNEVEN, CallBarrier, CloseBarrier, StepsReached
from tacit.failure.bounded_store import BoundedStore, store_gone
from tacit.failure.store_comparison import DIFFERENT, StepComparison, StepHistory
from tacit.torch_compat import PrefixStore, Store

POLL_SECONDS = 1.0
"""Seconds between two checks of a rank for an alarm: one small message to the store."""
COMPARED = 3
"""The number of checks after which ranks compare their notes: one more message."""
GRACE_SECONDS = 5.0
"""Seconds that a rank may take to answer an alarm, and the store once a round has failed."""
OWN = "own: "
"""The prefix of an alarm that names its rank and the reason: no peer and no network is to blame."""


class PostedCount(NamedTuple):
    """The number of a rank's posted collectives.

    Attributes:
        number: the number of messages or rounds; equal on all ranks that have got as far.
        since: when the last of them was posted, by `time.monotonic`.
    """

    number: int
    since: float


class Member(NamedTuple):
    """A rank among those that watch each other.

    Attributes:
        rank: this rank.
        ranks: all ranks that take part.
        host: the rank whose process serves the store, if one does: it ends last, and errors name it.
        shard: the number of this rank's shard of the model: ranks with the same shard compare notes.
    """

    rank: int
    ranks: list[int]
    host: int | None = None
    shard: int = 0


class RankProgress(NamedTuple):
    """Functions that read how far a rank is; also called in the detector's thread.

    Attributes:
        round: the number of rounds that it has entered.
        reached: the numbers of steps taken and of collectives begun.
        posted: its posted collectives; None: those begun.
        overdue: the reason why a round that has not ended counts as failed, if nothing else reports that; "":
            none does. Read in each check.
    """

    round: Callable[[], int]
    reached: Callable[[], StepsReached]
    posted: Callable[[], PostedCount] | None = None
    overdue: Callable[[], str] = lambda: ""


class FailureDetector:
    """The search for a failed rank, on one rank.

    A rank whose round fails raises the alarm. Every living rank answers with the round that it has reached. A
    separate thread does so, so a rank that hangs in a collective answers too. A rank

    * that does not answer is gone or frozen;
    * that answers with an error has left;
    * that has posted fewer messages than others, which waited for it, is late; so is one that has posted as
      many, but long after the others;
    * whose clock has jumped had been stopped.

    Before they close, all ranks wait for each other: one that closes earlier has less data than the rest.
    The first alarm counts: later ones are often only connections that the end of the first rank has broken.
    If the store's node cannot be reached, the error says so, some seconds after the time-out.

    Args:
        store: the process group's; its host is the launcher, which outlives the ranks.
        key: the name of the session; equal on all of its ranks, and used once.
        member: this rank and its peers.
        progress: reads how far this rank is.
        on_alarm: called once, in the detector's thread, with the error; must end hanging collectives.
        timeout: seconds after which a peer that does not answer is an error.
        notes: records after each step, which must be equal on all ranks.
        instead: a sentence after the error of a rank that does not answer: what could train without it.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        member: Member,
        progress: RankProgress,
        on_alarm: Callable[[PeerLost], None],
        timeout: float = 60.0,
        notes: StepHistory | None = None,
        instead: str = "",
    ) -> None:
        # A store client serves one call at a time: a copy never waits for the program's own calls.
        clone = getattr(store, "clone", lambda: store)  # an older torch has none
        # Longer than the time-out: a link that recovers within it must cause no error.
        self._store = BoundedStore(PrefixStore(f"tacit/{key}", clone()), timeout + GRACE_SECONDS)
        self._soon = self._store.within(GRACE_SECONDS)
        self._rank, self._ranks, self._host, shard = member
        self._round, self._reached, posted, self._overdue = progress
        self._on_alarm = on_alarm
        self._barrier = CloseBarrier(self._store, member.rank, member.ranks, timeout)
        self._calls = CallBarrier(self._store, member.rank, len(member.ranks))
        self._closes = False
        self._comparison = None if notes is None else StepComparison(self._store, member.rank, notes, shard)
        self._timeout, self._instead = timeout, instead
        self._posted = posted or self._begun
        self._last = PostedCount(-1, time.monotonic())
        self._stood, self._stood_at = 0.0, 0.0
        self._found: PeerLost | None = None
        self._absent: set[int] = set()
        self._told = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tacit-rollcall", daemon=True)
        self._thread.start()

    def alarm(self, reason: str, own: bool = False) -> PeerLost:
        """Raise the alarm. The returned error names the missing rank, or this rank if it is its `own`."""
        failed = f"{OWN}round {self._round()} failed on rank {self._rank}: {reason}"
        try:
            self._raise(failed if own else f"rank {self._rank}: {reason}", self._soon)
        except dist.DistError as error:
            self._found = self._found or self._gone(error, reason)
        else:
            self._told.wait(POLL_SECONDS + 3 * GRACE_SECONDS)
        return self._found or PeerLost(f"a round failed and the store does not answer: {reason}")

    def raised(self) -> PeerLost | None:
        """The error of an alarm that a rank has raised; None: there is none. Reads the store."""
        with contextlib.suppress(dist.DistError):
            if self._soon.check(["alarm"]):
                self._told.wait(POLL_SECONDS + 3 * GRACE_SECONDS)
        return self._found

    def leave(self, reason: str) -> None:
        """Report that this rank stops, so that others do not wait for it."""
        self._try(lambda: self._soon.set(f"left/{self._rank}", reason))
        self._try(lambda: self._raise(f"rank {self._rank} has left: {reason}", self._soon))
        self._try(self._linger)
        self.close()

    def dismiss(self) -> None:
        """End the threads; later alarms still count this rank as alive."""
        self._try(lambda: self._soon.set(f"here/{self._rank}", self._status().to_text()))
        self.close()

    def meet(self) -> None:
        """Wait until all ranks have found the same error, some seconds at most.

        Otherwise the end of this rank could break a collective of another library on them first.
        """
        self._try(lambda: self._soon.set(f"found/{self._rank}", ""))
        self._try(lambda: self._wait_for({*self._ranks}, "found"))

    def come_to(self, call: str, number: int = 0) -> int:
        """Wait until all ranks have made a collective call; returns the sum of their numbers.

        Raises:
            PeerLost: a rank is gone or frozen, or has gone on.
        """
        total, since, announced = None, time.monotonic(), False
        try:
            self._calls.arrive(number)
            while (total := self._calls.complete()) is None and not self._told.wait(0.001):
                waited = time.monotonic() - since
                if waited > POLL_SECONDS and not announced:
                    self._calls.announce(self._reached(), call)
                    self._store.set("news", "")
                    announced = True
                if waited > self._timeout:
                    raise self.alarm(f"it waited in {call} for the others")
        except dist.DistError as error:
            self._found = self._found or self._gone(error)
        if self._found is not None:
            raise self._found
        return total or 0

    def enter_barrier(self, refused: str = "") -> None:
        """Wait until all ranks have arrived, after the same number of steps.

        `refused`: the reason why this rank could not take its next step.

        Raises:
            UnevenData: they have taken different numbers of steps.
            RatesDiffer: they have taken a step with different learning rates.
            PeerLost: a rank is gone or frozen.
        """
        self._closes = True
        try:
            differs = (lambda: None) if self._comparison is None else self._comparison.end
            wrong = self._barrier.arrive(self._reached(), differs, refused)
            self._store.set("news", "")
            if wrong is not None:
                self._raise(wrong, self._store)
            delay = 0.001
            while not (self._told.wait(delay) or self._barrier.complete()):
                delay = min(2 * delay, 0.05)
        except dist.DistError as error:
            self._found = self._found or self._gone(error)
        if self._found is not None:
            raise self._found

    def leave_barrier(self) -> None:
        """Leave the close barrier, and end the threads."""
        self._end()
        self._try(lambda: self._barrier.leave(GRACE_SECONDS))
        self._store.close()

    def close(self) -> None:
        """End the threads."""
        self._end()
        self._store.close()

    def _end(self) -> None:
        """End the watching thread; a thread that waits for the store is waited for a limited time."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(GRACE_SECONDS)

    def _watch(self) -> None:
        looks = 0
        while not self._wait():
            looks += 1
            try:
                found = self._look(looks % COMPARED == 0)
            except dist.DistError as error:
                found = self._gone(error)
            if self._closing.is_set():
                return
            if found is None:
                continue
            self._found = found
            self._try(self._linger)
            self._told.set()
            self._on_alarm(found)
            return

    def _wait(self) -> bool:
        """Wait until the next check. Returns whether to end. Notes a longer wait, as after being stopped."""
        before = time.monotonic()
        over = self._closing.wait(POLL_SECONDS)
        stood = time.monotonic() - before - POLL_SECONDS
        if stood > POLL_SECONDS:
            self._stood, self._stood_at = stood, before
        return over

    def _begun(self) -> PostedCount:
        """The number of collectives begun, and since which check."""
        begun = self._reached().begun
        if begun != self._last.number:
            self._last = PostedCount(begun, time.monotonic())
        return self._last

    def _look(self, compares: bool) -> PeerLost | None:
        self._posted()
        if compares and self._comparison is not None:
            different = self._comparison.look()
            if different is not None:
                self._raise(different, self._store)
        if overdue := self._overdue():
            self._raise(f"rank {self._rank}: {overdue}", self._store)
        if not self._store.check(["news"]):
            return None
        if not self._store.check(["alarm"]):
            wrong = self._barrier.look(self._reached())
            if wrong is None and (passed := self._calls.look(self._reached(), self._closes)) is not None:
                wrong = OWN + passed
            if wrong is None:
                return None
            self._raise(wrong, self._store)
        return self._call()

    def _raise(self, text: str, store: BoundedStore) -> None:
        """Raise the alarm; only the first one is stored."""
        store.compare_set("alarm", "", text)
        store.set("news", "")

    def _call(self) -> PeerLost:
        alarm = self._store.get("alarm").decode()
        if alarm.startswith(UNEVEN):
            return UnevenData(alarm.removeprefix(UNEVEN))
        if alarm.startswith(DIFFERENT):
            return RatesDiffer(alarm.removeprefix(DIFFERENT))
        if alarm.startswith(OWN):
            return PeerLost(alarm.removeprefix(OWN))
        self._store.set(f"here/{self._rank}", self._status().to_text())
        deadline = time.monotonic() + GRACE_SECONDS
        answers: dict[int, str] = {}
        asked = {*self._ranks}
        while asked and time.monotonic() < deadline:
            for rank in sorted(asked):
                for key in (f"left/{rank}", f"here/{rank}"):
                    if rank not in answers and self._store.check([key]):
                        answers[rank] = key[0] + self._store.get(key).decode()
                if rank in answers or self._store.check([f"silent/{rank}"]):
                    asked.discard(rank)
            time.sleep(0.05)
        self._absent = {*self._ranks} - answers.keys()
        blamed = _blamed(self._ranks, answers, alarm, self._timeout, self._instead)
        if blamed is None and (uneven := self._barrier.left_behind(alarm)) is not None:
            return UnevenData(uneven.removeprefix(UNEVEN))
        return PeerLost(blamed or _nobody(answers, alarm))

    def _status(self) -> _RankStatus:
        now, posted = time.monotonic(), self._posted()
        lately = now - self._stood_at - self._stood < self._timeout + GRACE_SECONDS
        return _RankStatus(self._round(), posted.number, now - posted.since, self._stood if lately else 0.0)

    def _linger(self) -> None:
        """Wait until the others know the error, if the store would end with this process."""
        self._soon.set(f"known/{self._rank}", "")
        if self._host == self._rank:
            self._wait_for({*self._ranks} - self._absent, "known")

    def _wait_for(self, ranks: set[int], what: str) -> None:
        """Wait until these ranks have reported that, or have left; some seconds at most."""
        deadline = time.monotonic() + GRACE_SECONDS
        while ranks and time.monotonic() < deadline:
            ranks -= {rank for rank in ranks for key in (what, "left") if self._soon.check([f"{key}/{rank}"])}
            time.sleep(0.02)

    def _gone(self, error: dist.DistError, reason: str = "") -> PeerLost:
        return store_gone(error, self._host, f" ({reason})" if reason else "")

    def _try(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(dist.DistError):  # the store is gone: the watching thread reports it
            call()


class _RankStatus(NamedTuple):
    """A rank's answer: ended rounds, posted collectives, seconds since the last and while it was stopped."""

    round: int
    posted: int
    age: float
    stood: float = 0.0

    def to_text(self) -> str:
        return f"{self.round} {self.posted} {self.age:.3f} {self.stood:.3f}"

    @classmethod
    def from_text(cls, text: str) -> _RankStatus:
        round, posted, *seconds = text.split()
        return cls(int(round), int(posted), *map(float, seconds))


def _blamed(
    ranks: list[int], answers: dict[int, str], alarm: str, timeout: float, instead: str = ""
) -> str | None:
    """A sentence on the failed rank; None: unknown. `instead`: a sentence after ranks that are gone."""
    absent = [rank for rank in ranks if rank not in answers]
    left = {rank: text[1:] for rank, text in answers.items() if text[0] == "l"}
    here = _present(answers)
    now = max((each.round for each in here.values()), default=0)
    gone = [f"rank {rank} has left in round {now}: {why}" for rank, why in left.items()]
    if absent:  # last, as it may only be slow to answer
        gone += [f"{of_ranks(absent)} did not answer in round {now}: gone or frozen ({alarm}){instead}"]
    if gone:
        return "; ".join(gone)
    most = max(each.posted for each in here.values())
    longest = max(each.age for each in here.values())
    waited = max(each.age for each in here.values() if each.posted == most)
    behind = [rank for rank, each in here.items() if each.round < now]
    late = behind or [rank for rank, each in here.items() if each.posted < most and waited > timeout / 2]
    if late:
        still = f" (still in round {here[late[0]].round})" if behind else ""
        return f"{of_ranks(late)} did not enter round {now} in time{still} ({alarm})"
    stood = [rank for rank, each in here.items() if each.stood > timeout / 2]
    if stood:
        seconds = max(here[rank].stood for rank in stood)
        return f"{of_ranks(stood)} stood still for {seconds:.0f} s in round {now}, as if stopped ({alarm})"
    just = [rank for rank, each in here.items() if longest - each.age > timeout / 2]
    if just:
        seconds = longest - min(here[rank].age for rank in just)
        return f"{of_ranks(just)} did not enter round {now} in time, but some {seconds:.0f} s late ({alarm})"
    return None


def _present(answers: dict[int, str]) -> dict[int, _RankStatus]:
    return {rank: _RankStatus.from_text(text[1:]) for rank, text in answers.items() if text[0] == "h"}


def _nobody(answers: dict[int, str], alarm: str) -> str:
    here = _present(answers).values()
    now, apart = (
        max(each.round for each in here),
        max(each.age for each in here) - min(each.age for each in here),
    )
    return (
        f"round {now} failed, and no rank is to blame that is known: all are alive, and what they gave "
        f"last they gave within {apart:.1f} s of each other. {_first(alarm)}. So look at the network between "
        "these ranks: a link that was down or refused, or that needs longer than the time-out; then write "
        "attach(..., timeout=timedelta(minutes=5)), and so for init_process_group"
    )


def _first(alarm: str) -> str:
    """The first failed rank with its error: "rank 0: a connection was closed"."""
    who, colon, why = alarm.partition(": ")
    return f"The first to fail was {who}, of this: {why.rstrip('.')}" if colon else f"The error was: {alarm}"
