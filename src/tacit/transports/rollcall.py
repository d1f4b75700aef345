"""Finds out who is missing when a round fails: the survivors call the roll through the launcher's store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from tacit.errors import PeerLost, UnevenData
from tacit.transports.closing import UNEVEN, Reached, Rendezvous

POLL_SECONDS = 1.0
"""How often each rank looks whether somebody raised the alarm: one small message to the store."""
GRACE_SECONDS = 5.0
"""How long a rank may take to answer the roll call."""


class RollCall:
    """One rank's part in the roll call.

    A rank whose round fails raises the alarm. Every rank that still lives answers it with the round that it
    has reached, from a thread of its own, so that a rank that hangs in a collective answers too. Who does not
    answer is gone or frozen; who answers with an error has left; who answers with the lowest round is late.
    Before they close, all ranks meet: who closes earlier than others go on has other data than they.
    The first alarm stands: what comes later is often only that a connection broke, as the first rank went.

    Args:
        store: of the process group; its host is the launcher, which outlives the ranks.
        key: names the session; equal on all of its ranks, and used once.
        rank: this rank; `ranks` takes part.
        round: reads how many rounds this rank has entered.
        reached: reads how many steps it has taken, and begun.
        on_alarm: called once, in this thread, with what was found; must end what hangs.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        rank: int,
        ranks: list[int],
        round: Callable[[], int],
        reached: Callable[[], Reached],
        on_alarm: Callable[[PeerLost], None],
    ) -> None:
        # A store client serves one call at a time: a copy never waits for the program's own calls.
        clone = getattr(store, "clone", lambda: store)  # an older torch has none
        self._store = PrefixStore(f"tacit/{key}", clone())
        self._rank, self._ranks, self._round, self._on_alarm = rank, ranks, round, on_alarm
        self._reached = reached
        self._rendezvous = Rendezvous(self._store, rank, ranks)
        self._found: PeerLost | None = None
        self._told = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tacit-rollcall", daemon=True)
        self._thread.start()

    def alarm(self, reason: str) -> PeerLost:
        """Raise the alarm, and say who is missing."""
        self._try(lambda: self._raise(f"rank {self._rank}: {reason}"))
        self._told.wait(POLL_SECONDS + 2 * GRACE_SECONDS)
        return self._found or PeerLost(f"a round failed and the store does not answer: {reason}")

    def leave(self, reason: str) -> None:
        """Tell the others that this rank stops, so that they need not wait for it."""
        self._try(lambda: self._store.set(f"left/{self._rank}", reason))
        self._try(lambda: self._raise(f"rank {self._rank} has left: {reason}"))
        self.close()

    def meet(self) -> None:
        """Wait until all ranks have come here, after the same number of steps.

        Raises:
            UnevenData: they have taken different numbers of steps.
            PeerLost: a rank is gone or frozen.
        """
        try:
            uneven = self._rendezvous.arrive(self._reached())
            self._store.set("news", "")
            if uneven is not None:
                self._raise(uneven)
            delay = 0.001
            while not (self._told.wait(delay) or self._rendezvous.complete()):
                delay = min(2 * delay, 0.05)
        except dist.DistError as error:
            self._found = self._found or _gone(error)
        if self._found is not None:
            raise self._found

    def part(self) -> None:
        """End the thread when all is done that ranks do together."""
        self.close()
        self._try(lambda: self._rendezvous.part(GRACE_SECONDS))

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            try:
                found = self._look()
            except dist.DistError as error:
                found = _gone(error)
            if self._closing.is_set():
                return
            if found is None:
                continue
            self._found = found
            self._told.set()
            self._on_alarm(found)
            return

    def _look(self) -> PeerLost | None:
        if not self._store.check(["news"]):
            return None
        if not self._store.check(["alarm"]):
            wrong = self._rendezvous.look(self._reached())
            if wrong is None:
                return None
            self._raise(wrong)
        return self._call()

    def _raise(self, text: str) -> None:
        """Raise the alarm; the first counts."""
        self._store.compare_set("alarm", "", text)
        self._store.set("news", "")

    def _call(self) -> PeerLost:
        alarm = self._store.get("alarm").decode()
        if alarm.startswith(UNEVEN):
            return UnevenData(alarm.removeprefix(UNEVEN))
        self._store.set(f"here/{self._rank}", str(self._round()))
        deadline = time.monotonic() + GRACE_SECONDS
        answers: dict[int, str] = {}
        while len(answers) < len(self._ranks) and time.monotonic() < deadline:
            for rank in self._ranks:
                for key in (f"left/{rank}", f"here/{rank}"):
                    if rank not in answers and self._store.check([key]):
                        answers[rank] = key[0] + self._store.get(key).decode()
            time.sleep(0.05)
        return PeerLost(_verdict(self._ranks, answers, alarm))

    def _try(self, call: Callable[[], object]) -> None:
        try:
            self._store.set_timeout(timedelta(seconds=GRACE_SECONDS))
            call()
        except dist.DistError:
            pass  # the store is gone: the watch says so


def _gone(error: dist.DistError) -> PeerLost:
    return PeerLost(f"the launcher's store is gone, and with it the node that held it: {error}")


def _verdict(ranks: list[int], answers: dict[int, str], alarm: str) -> str:
    absent = [rank for rank in ranks if rank not in answers]
    left = {rank: text[1:] for rank, text in answers.items() if text[0] == "l"}
    rounds = {rank: int(text[1:]) for rank, text in answers.items() if text[0] == "h"}
    now = max(rounds.values(), default=0)
    late = [rank for rank, reached in rounds.items() if reached < now]
    if absent:
        return f"{_names(absent)} did not answer in round {now}: gone or frozen ({alarm})"
    if left:
        return "; ".join(f"rank {rank} has left in round {now}: {why}" for rank, why in left.items())
    if late:
        reached = rounds[late[0]]
        return f"{_names(late)} did not enter round {now} in time (still in round {reached}) ({alarm})"
    return f"a round failed although every rank is alive: {alarm}"


def _names(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
