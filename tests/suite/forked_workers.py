"""`pytest --forks N`: tests in N processes that are forked once all tests are collected.

Each worker of pytest-xdist imports torch and all files of tests anew. Here that is done once; the workers
take whole files from one pipe, the next when they are done with one, and send their reports by pipes of
their own. A worker that dies fails the test that it was at, and another one goes on behind that test.
"""

from __future__ import annotations

import atexit
import os
import pickle
import selectors
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

LENGTH = struct.Struct("!I")
GROUP = struct.Struct("!H")
SHARED = ("torch._dynamo", "torch._meta_registrations")
"""What most workers import sooner or later, and takes seconds."""
PATIENCE = 10.0
"""Seconds that an interrupted worker has to end."""


@dataclass
class Worker:
    """A worker, as the first process sees it.

    Attributes:
        process: its number.
        pipe: of its messages.
        queue: the items that it has begun with and not finished, the first of them maybe running.
        running: whether the first of the queue is running.
        done: whether it has said that it is at its end.
        rest: what was read of the next message.
    """

    process: int
    pipe: int
    queue: list[int]
    running: bool = False
    done: bool = False
    rest: bytes = b""

    def messages(self) -> Iterator[Any] | None:
        """Those that have come; None at the end of the pipe."""
        data = os.read(self.pipe, 1 << 20)
        self.rest += data
        return self._whole() if data else None

    def _whole(self) -> Iterator[Any]:
        while len(self.rest) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self.rest)
            end = LENGTH.size + length
            if len(self.rest) < end:
                return
            message, self.rest = self.rest[LENGTH.size : end], self.rest[end:]
            yield pickle.loads(message)


@dataclass
class Forks:
    """The plugin, in the first process and in its workers.

    Attributes:
        count: of workers.
        alive: the workers by their pipes.
    """

    count: int
    alive: dict[int, Worker] = field(default_factory=dict)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all items in forks."""
        if session.config.option.collectonly or not session.items:
            return None
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        for name in SHARED:
            import_module(name)
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"{threads} threads after the imports: a process with threads cannot be forked"
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.showfspath = False  # files take turns
        self._session, self._groups = session, _by_file(session.items)
        self._next = _pipe_of(len(self._groups))
        try:
            for _ in range(min(self.count, len(self._groups))):
                self._fork([])
            self._serve()
        finally:
            self._end()
            os.close(self._next)
        return True

    def _end(self) -> None:
        """End those that still run: their tests are interrupted, and end what they have started."""
        for worker in self.alive.values():
            os.kill(worker.process, signal.SIGINT)
        until = time.monotonic() + PATIENCE
        for worker in self.alive.values():
            while os.waitpid(worker.process, os.WNOHANG) == (0, 0):
                if time.monotonic() > until:
                    os.kill(worker.process, signal.SIGKILL)
                time.sleep(0.01)

    def _fork(self, queue: Sequence[int]) -> None:
        """A worker more, which begins with these items."""
        capture: Any = self._session.config.pluginmanager.get_plugin("capturemanager")
        capture.read_global_capture()  # else each of them would tell it again
        sys.stdout.flush()
        mine, theirs = os.pipe()
        number = len(os.listdir(_room(self._session)))
        (_room(self._session) / f"worker{number}").mkdir()
        process = os.fork()
        if process == 0:
            os.close(mine)
            Side(self._session, theirs, number).run(self._groups, self._next, queue)
        os.close(theirs)
        self.alive[mine] = Worker(process, mine, [*queue])

    def _serve(self) -> None:
        """Until no worker is left, or pytest is told to stop."""
        while self.alive:
            with selectors.PollSelector() as ready:
                for pipe in self.alive:
                    ready.register(pipe, selectors.EVENT_READ)
                pipes = [key.fd for key, _ in ready.select()]
            for pipe in pipes:
                worker = self.alive[pipe]
                messages = worker.messages()
                if messages is None:
                    self._ended(worker)
                else:
                    for message in messages:
                        self._told(worker, *message)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)

    def _told(self, worker: Worker, kind: str, what: Any) -> None:
        config = self._session.config
        if kind == "group":
            worker.queue += what
        elif kind == "start":
            worker.running = True
            item = self._session.items[what]
            if config.option.verbose > 0:
                config.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif kind == "report":
            report = config.hook.pytest_report_from_serializable(config=config, data=what)
            config.hook.pytest_runtest_logreport(report=report)
        elif kind == "finish":
            worker.running = False
            worker.queue.pop(0)
        elif kind == "warning":
            text, category, file, line, when, nodeid = what
            warning = warnings.WarningMessage(text, category, file, line)  # type: ignore[arg-type]
            config.hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": warning, "when": when, "nodeid": nodeid, "location": None}
            )
        elif kind == "broken":
            raise RuntimeError(f"a worker has failed outside of tests:\n{what}")
        else:
            worker.done = True

    def _ended(self, worker: Worker) -> None:
        """Its pipe is closed: it is done, or it has died in a test, and somebody else does the rest."""
        del self.alive[worker.pipe]
        os.close(worker.pipe)
        _, status = os.waitpid(worker.process, 0)
        if worker.done:
            return
        if worker.running:
            item = self._session.items[worker.queue.pop(0)]
            how = os.waitstatus_to_exitcode(status)
            words = f"by {signal.Signals(-how).name}" if how < 0 else f"with exit code {how}"
            message = f"{item.nodeid}: the worker has ended {words} in this test"
            report = pytest.TestReport(
                item.nodeid, item.location, {}, "failed", message, "call", [], 0.0, 0.0, 0.0
            )
            self._session.config.hook.pytest_runtest_logreport(report=report)
        self._fork(worker.queue)


class Side:
    """A worker, in its own process."""

    def __init__(self, session: pytest.Session, pipe: int, number: int) -> None:
        self.session, self.pipe, self.number = session, pipe, number

    def run(self, groups: Sequence[Sequence[int]], following: int, queue: Sequence[int]) -> NoReturn:
        """Run the items of the queue, then whole files until none is left; and end."""
        code = 1
        try:
            self._begin()
            self._items(groups, following, [*queue])
            atexit._run_exitfuncs()
            self._say("done", None)
            code = 0
        except BaseException:
            self._say("broken", traceback.format_exc())
        finally:
            os._exit(code)

    def _begin(self) -> None:
        """What is a process's own: captured output, folders, and what is done at its end."""
        atexit._clear()
        config = self.session.config
        capture: Any = config.pluginmanager.get_plugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        config._tmp_path_factory._basetemp = _room(self.session) / f"worker{self.number}"  # type: ignore[attr-defined]
        reporter: Any = config.pluginmanager.unregister(
            name="terminalreporter"
        )  # the first process says it all
        config.pluginmanager.register(SimpleNamespace(_tw=reporter._tw), "terminalreporter")  # for time-outs
        config.pluginmanager.register(self, "worker")

    def _items(self, groups: Sequence[Sequence[int]], following: int, queue: list[int]) -> None:
        """Run those of the queue, and of all groups that can be had; fixtures ask what comes next."""
        items = self.session.items
        while True:
            if len(queue) < 2 and (data := os.read(following, GROUP.size)):
                (group,) = GROUP.unpack(data)
                queue += groups[group]
                self._say("group", groups[group])
            if not queue:
                return
            number, *queue = queue
            self._say("start", number)
            after = items[queue[0]] if queue else None
            items[number].config.hook.pytest_runtest_protocol(item=items[number], nextitem=after)
            self._say("finish", number)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send it."""
        config = self.session.config
        self._say("report", config.hook.pytest_report_to_serializable(config=config, report=report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str
    ) -> None:
        """Send it; a category of its own may be unknown where it is read."""
        known = warning_message.category if warning_message.category.__module__ == "builtins" else UserWarning
        said = (str(warning_message.message), known, warning_message.filename, warning_message.lineno)
        self._say("warning", (*said, when, nodeid))

    def _say(self, kind: str, what: object) -> None:
        data = pickle.dumps((kind, what))
        view = memoryview(LENGTH.pack(len(data)) + data)
        while view:
            view = view[os.write(self.pipe, view) :]


def _by_file(items: Sequence[pytest.Item]) -> list[list[int]]:
    """The numbers of the items of each file, in the order in which files come first."""
    groups: dict[object, list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault(item.path, []).append(number)
    return [*groups.values()]


def _pipe_of(count: int) -> int:
    """A pipe that gives each number below `count` to one reader, and then ends."""
    source, target = os.pipe()
    os.write(target, b"".join(map(GROUP.pack, range(count))))
    os.close(target)
    return source


def _room(session: pytest.Session) -> Any:
    """The folder of all folders of workers."""
    room = session.config._tmp_path_factory.getbasetemp() / "workers"  # type: ignore[attr-defined]
    room.mkdir(exist_ok=True)
    return room
