"""Members as processes, for tests: they are started, killed and frozen, and what they print is read."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forks import COMMAND, Fork

MEMBER = str(Path(__file__).with_name("member.py"))
SHARDED = str(Path(__file__).with_name("sharded_member.py"))
TORCHRUN = (
    *("torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"),
    *("--max-restarts", "1", "--monitor-interval", "0.05"),
)
SECONDS = 60


class Member:
    """One replica; what it says is in `said`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.said = process, list[dict[str, Any]]()

    def until(self, key: str, least: int = 0) -> dict[str, Any]:
        """Read what it says until it says `key`, of this number at least."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.said.append(json.loads(line))
                value = self.said[-1].get(key)
                if value is not None and (not isinstance(value, int) or value >= least):
                    return self.said[-1]
        raise AssertionError(f"it ended: {self.error()}")

    def ended(self) -> dict[str, Any]:
        """What it says at its end."""
        found = self.until("end")
        assert self.process.wait(SECONDS) == 0, self.error()
        return found

    def error(self) -> str:
        """Its errors, when it has ended."""
        assert self.process.stderr is not None
        self.process.wait(SECONDS)
        return str(self.process.stderr.read())

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.process.pid, number)


class Members:
    """The members of one store."""

    def __init__(self, where: str = "") -> None:
        self._all: list[Member] = []
        self._store: Member | None = None
        self.port = 0
        self._where = where
        if not where:
            self.serve()

    def serve(self) -> None:
        """Start the store; again at the same port."""
        words = ["-u", "-m", "tacit.members.store", "--host", "127.0.0.1", "--port", str(self.port)]
        self._store = self._begin(words)
        assert self._store.process.stdout is not None
        self.port = int(self._store.process.stdout.readline().split()[-1])

    def kill_store(self) -> None:
        """End the store at once."""
        assert self._store is not None
        self._store.signal(signal.SIGKILL)
        self._store.process.wait()

    def member(self, name: str, algorithm: str, steps: int = 60, how: str = "") -> Member:
        """Start a member."""
        where = self._where or f"127.0.0.1:{self.port}"
        return self._begin([MEMBER, name, where, algorithm, str(steps), how])

    def sharded(self, name: str, algorithm: str, steps: int, whole: bool = False) -> Member:
        """Start a member of two ranks, which torchrun starts again once; all of them say into one pipe.

        `whole`: or one of a process beside such.
        """
        words = [SHARDED, name, f"127.0.0.1:{self.port}", algorithm, str(steps), "2"]
        return self._begin(words if whole else ["-u", COMMAND, *TORCHRUN, *words])

    def _begin(self, words: list[str]) -> Member:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        made = Member(Fork([sys.executable, *words], env=env, text=True, **pipes))
        self._all.append(made)
        return made

    def end(self) -> None:
        """Kill what is left."""
        for each in self._all:
            if each.process.poll() is None:
                # torchrun ends its ranks with it.
                each.signal(signal.SIGTERM if "torchrun" in each.process.args else signal.SIGKILL)
            each.process.wait()
            for pipe in (each.process.stdout, each.process.stderr):
                assert pipe is not None
                pipe.close()


@contextmanager
def started() -> Iterator[Members]:
    """A store without members."""
    with begun("") as members:
        yield members


@contextmanager
def begun(where: str) -> Iterator[Members]:
    """Members that find each other there, such as "hub:127.0.0.1:29600"; "": by a store of theirs."""
    members = Members(where)
    try:
        yield members
    finally:
        members.end()


def wait_for(what: str, seconds: float = SECONDS) -> Iterator[None]:
    """Yield until a test has found what it waits for."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield
        time.sleep(0.05)
    raise AssertionError(f"no {what} in {seconds:g} s")


def one_dies_and_another_comes(members: Members, algorithm: str, how: str = "") -> None:
    """Of three members one is killed; those that live go on, a fourth joins them, and all end equal."""
    first = [members.member(name, algorithm, 150, how) for name in "ab"]
    lost = members.member("c", algorithm, 150, how)
    for each in (*first, lost):
        each.until("members")
    while len(first[0].until("step")["members"]) < 3:
        pass
    lost.until("step", 20)
    lost.signal(signal.SIGKILL)
    while len(first[0].until("step")["members"]) > 2:
        pass
    came = members.member("d", algorithm, 150, how=f"{how} scaler")  # it skips some steps
    assert came.until("begun")["begun"] > 20
    ends = [each.ended() for each in (*first, came)]
    assert ends[0]["sums"] == ends[1]["sums"] == ends[2]["sums"]
    assert all(each["end"]["members"] == 3 for each in ends)
    assert ends[0]["last"] < ends[0]["first"]
