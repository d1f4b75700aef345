"""Finds out who is missing when a round fails: the survivors call the roll through the launcher's store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from tacit.errors import PeerLost

POLL_SECONDS = 1.0
"""How often each rank looks whether somebody raised the alarm: one small message to the store."""
GRACE_SECONDS = 5.0
"""How long a rank may take to answer the roll call."""


class RollCall:
    """One rank's part in the roll call.

    A rank whose round fails raises the alarm. Every rank that still lives answers it with the round that it
    has reached, from a thread of its own, so that a rank that hangs in a collective answers too. Who does not
    answer is gone or frozen; who answers with an error has left; who answers with the lowest round is late.
    The first alarm stands: what comes later is often only that a connection broke, as the first rank went.

    Args:
        store: of the process group; its host is the launcher, which outlives the ranks.
        key: names the session; equal on all of its ranks, and used once.
        rank: this rank; `ranks` takes part.
        round: reads how many rounds this rank has entered.
        on_alarm: called once, in this thread, with what was found; must end what hangs.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        rank: int,
        ranks: list[int],
        round: Callable[[], int],
        on_alarm: Callable[[PeerLost], None],
    ) -> None:
        # A store client serves one call at a time: a copy never waits for the program's own calls.
        clone = getattr(store, "clone", lambda: store)  # an older torch has none
        self._store = PrefixStore(f"tacit/{key}", clone())
        self._rank, self._ranks, self._round, self._on_alarm = rank, ranks, round, on_alarm
        self._found: PeerLost | None = None
        self._told = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tacit-rollcall", daemon=True)
        self._thread.start()

    def alarm(self, reason: str) -> PeerLost:
        """Raise the alarm, and say who is missing."""
        self._try(lambda: self._store.compare_set("alarm", "", f"rank {self._rank}: {reason}"))
        self._told.wait(POLL_SECONDS + 2 * GRACE_SECONDS)
        return self._found or PeerLost(f"a round failed and the store does not answer: {reason}")

    def leave(self, reason: str) -> None:
        """Tell the others that this rank stops, so that they need not wait for it."""
        self._try(lambda: self._store.set(f"left/{self._rank}", reason))
        self._try(lambda: self._store.compare_set("alarm", "", f"rank {self._rank} has left: {reason}"))
        self.close()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            try:
                if not self._store.check(["alarm"]):
                    continue
                found = self._call()
            except dist.DistError as error:
                found = PeerLost(f"the launcher's store is gone, and with it the node that held it: {error}")
            if self._closing.is_set():
                return
            self._found = found
            self._told.set()
            self._on_alarm(found)
            return

    def _call(self) -> PeerLost:
        self._store.set(f"here/{self._rank}", str(self._round()))
        deadline = time.monotonic() + GRACE_SECONDS
        answers: dict[int, str] = {}
        while len(answers) < len(self._ranks) and time.monotonic() < deadline:
            for rank in self._ranks:
                for key in (f"left/{rank}", f"here/{rank}"):
                    if rank not in answers and self._store.check([key]):
                        answers[rank] = key[0] + self._store.get(key).decode()
            time.sleep(0.05)
        return PeerLost(_verdict(self._ranks, answers, self._store.get("alarm").decode()))

    def _try(self, call: Callable[[], object]) -> None:
        try:
            self._store.set_timeout(timedelta(seconds=GRACE_SECONDS))
            call()
        except dist.DistError:
            pass  # the store is gone: the watch says so


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
