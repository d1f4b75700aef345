"""Runs one rank: passes its lines on whole, and reports when and how it ended.

torchrun starts this in place of the rank, as a plain script without site packages, so that it costs a few
milliseconds; it must import nothing but the standard library. (Ranks of recipes are forks of a process that
has imported torch, and so is this: see `supervisor`.) The rank's output passes through here for two
reasons: lines of several ranks that share a pipe are not torn, and tracebacks are known as such. These and
the report go to stderr, in lines that begin with `MARK`; whoever started the launcher takes them out.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType

MARK = "\x1etacit "
# Of `tacit.environment`, which cannot be imported here.
RESTORE = "TACIT_RESTORE"
WORKER = "TACIT_WORKER"
_PR_SET_PDEATHSIG = 1
_LOOK = 1.0  # seconds after a signal
_NOW_AND_THEN = 2.0  # seconds between two looks whether the rank is stopped
_CHUNK = 500  # characters; escaped they must stay below PIPE_BUF, so that a report is written in one piece
_HEADER = "Traceback (most recent call last):"
_PREFIX = re.compile(r"(\[rank\d+\]: )?")
_UNCAUGHT = re.compile(rf"\[rank\d+\]: {re.escape(_HEADER)}")  # torch's own excepthook writes it so
BREAKING = re.compile(
    r"terminate called after throwing an instance of 'gloo::|  what\(\):  \["
    r"|(\[rank\d+\]:)?\[W[^\]]* TCPStore\.cpp|Exception raised from \w+ at /__w/"
    r"|frame #\d+: |<omitting python frames>"
)
"""What C++ prints when connections of an ending rank break; the traceback has the reason."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""By which a launcher ends a rank."""
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")


class Stream:
    """One output of the rank, handed on line by line."""

    def __init__(self, source: int, write: Callable[[bytes], None]) -> None:
        """Read from a file, and hand whole lines to `write`."""
        self.source = source
        self._write = write
        self._rest = b""
        os.set_blocking(source, False)

    def pump(self) -> bool:
        """Hand on what is there; False at the end of the stream."""
        try:
            data = os.read(self.source, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        data = self._rest + data
        # A progress bar ends its lines by \r; a line without end must not fill the memory.
        cut = len(data) if len(data) > 1 << 20 else max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._write(data[:cut])
        self._rest = data[cut:]
        return True

    def drain(self) -> None:
        """Hand on all that is left, even if a child of the rank keeps the stream open."""
        while select_now(self.source) and self.pump():
            pass
        self._write(self._rest + b"\n" if self._rest else b"")


def to_stdout(data: bytes) -> None:
    """Write all data to stdout."""
    _write(1, data)


class Errors:
    """Writes the rank's stderr with marked tracebacks, and keeps some of the last lines."""

    def __init__(self, keep: int = 1000) -> None:
        """Keep at most `keep` lines."""
        self.kept: deque[tuple[float, str]] = deque(maxlen=keep)
        self._detector = TracebackDetector()

    def write(self, data: bytes) -> None:
        """Write whole lines, with those of tracebacks marked."""
        now, plain = time.monotonic(), b""
        for line in data.splitlines(keepends=True):
            text = line.decode(errors="replace").rstrip("\r\n")
            self.kept.append((now, text))
            if self._detector.holds(text):
                _write(2, plain)
                _say_text("line", text)
                plain = b""
            else:
                plain += line
        _write(2, plain)


class TracebackDetector:
    """Distinguishes the lines of tracebacks from others, as they are printed."""

    def __init__(self) -> None:
        """Start outside of any traceback."""
        self._prefix: str | None = None
        self._said = False  # the error itself, after which a traceback without prefixes ends

    def holds(self, line: str) -> bool:
        """Whether this line is one of a traceback."""
        if line.endswith(_HEADER) and _PREFIX.fullmatch(line.removesuffix(_HEADER)):
            self._prefix, self._said = line.removesuffix(_HEADER), False
            return True
        if BREAKING.match(line):
            return True
        if self._prefix is None:
            return False
        if self._prefix:
            return line.startswith(self._prefix) or line in ("", self._prefix.rstrip())
        if not self._said:
            self._said = not line.startswith(" ")
            return True
        if line and not any(phrase in line for phrase in _CHAINED):
            self._prefix = None
        return self._prefix is not None


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


def select_now(source: int) -> bool:
    """Whether there is something to read right now."""
    with selectors.PollSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        return bool(selector.select(0))


def last_traceback(lines: Sequence[tuple[float, str]]) -> tuple[float, str] | None:
    """The last traceback among timed lines, with those that it was raised from, and when it began."""
    heads = [i for i, (_, line) in enumerate(lines) if line.endswith(_HEADER)]
    if not heads:
        return None
    start = heads.pop()
    while heads and any(
        phrase in line for _, line in lines[max(0, start - 3) : start] for phrase in _CHAINED
    ):
        start = heads.pop()
    # torch writes "[rank0]: " before each line, and other lines may follow the traceback.
    prefix = lines[start][1].removesuffix(_HEADER)
    ours = [line for _, line in lines[start:] if line.startswith(prefix) or line in ("", prefix.rstrip())]
    return lines[start][0], "\n".join(line[len(prefix) :] for line in ours)


def verdict(code: int, ended: float, lines: Sequence[tuple[float, str]]) -> tuple[int, float, str]:
    """Exit code, time and traceback of the rank's end.

    An interpreter takes its time to exit by an exception: torch may abort it meanwhile, and a launcher may
    end it because a peer that has lost it was gone first. What went wrong is the exception.
    """
    found = last_traceback(lines)
    if found and code < 0 and any(_UNCAUGHT.match(line) for at, line in lines if at >= found[0]):
        return 1, *found
    if found and (code > 0 or code == -signal.SIGABRT):
        return code, *found
    return code, ended, ""


def report(code: int, ended: float, lines: Sequence[tuple[float, str]], frozen: bool = False) -> None:
    """Report on stderr how the rank ended; in parts, each written at once."""
    code, began, text = verdict(code, ended, lines)
    if text:
        _say_text("traceback", text)
    _say({"code": code, "time": began, "frozen": frozen})


def _say_text(what: str, text: str) -> None:
    """Report a text in parts, of which all but the last announce another."""
    pieces = [text[at : at + _CHUNK] for at in range(0, len(text), _CHUNK)] or [""]
    for piece in pieces[:-1]:
        _say({what: piece, "more": True})
    _say({what: pieces[-1]})


def _say(message: dict[str, object]) -> None:
    rank = int(os.environ.get(WORKER, os.environ.get("RANK", "-1")))
    os.write(2, (MARK + json.dumps({"rank": rank, **message}) + "\n").encode())


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _start(become: Callable[[], object], outputs: Sequence[int]) -> int:
    """Fork the rank, which writes to these two files. Returns its process."""
    process = os.fork()
    if process:
        return process
    try:
        _die_with_parent()
        for number in (*_SIGNALS, signal.SIGALRM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        for target, output in enumerate(outputs, 1):
            os.dup2(output, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        become()
    except BaseException as error:
        os.write(2, f"the rank cannot be started: {error}\n".encode())
    finally:
        os._exit(127)


def watch(become: Callable[[], object], alone: bool = False) -> int:
    """Run the rank to its end; its exit code, or minus the signal that killed it."""
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    process = _start(become, (out_end, err_end))
    for end in (out_end, err_end):
        os.close(end)
    errors, frozen = Errors(), []
    streams = [Stream(out, to_stdout), Stream(err, errors.write)]

    def signalled(number: int, frame: FrameType | None) -> None:
        if alone:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(process, number)
        signal.setitimer(signal.ITIMER_REAL, _LOOK, _LOOK)

    signal.signal(signal.SIGALRM, lambda *_: frozen.extend(_kill_stopped(process)))
    for number in _SIGNALS:
        signal.signal(number, signalled)
    ended = _pump_until_exit(process, streams)
    for stream in streams:
        stream.drain()
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code:
        report(code, ended, list(errors.kept), bool(frozen))
    else:
        _say({"well": True})
    return code


def _kill_stopped(pid: int) -> list[int]:
    """Kill those of a process and all below it that are stopped: SIGTERM does not reach them."""
    found = _stopped(pid)
    for each in found:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(each, signal.SIGKILL)
    return found


def _stopped(pid: int) -> list[int]:
    """Those of a process and all below it that are stopped; not by a debugger, which is another state."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        found += [pid] if _state(pid) == "T" else []
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            for child in children.read().split():
                found += _stopped(int(child))
    return found


def _state(pid: int) -> str:
    """The system's letter for the process's state; it follows the name, which may hold anything."""
    with open(f"/proc/{pid}/stat", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def _pump_until_exit(pid: int, streams: Sequence[Stream]) -> float:
    with selectors.PollSelector() as selector:
        handle, stopped = os.pidfd_open(pid), False
        selector.register(handle, selectors.EVENT_READ)
        for stream in streams:
            selector.register(stream.source, selectors.EVENT_READ, stream)
        look = time.monotonic() + _NOW_AND_THEN
        while True:
            ready = selector.select(max(0.0, look - time.monotonic()))
            if time.monotonic() >= look:
                look = time.monotonic() + _NOW_AND_THEN
                if bool(_stopped(pid)) != stopped:
                    stopped = not stopped
                    _say({"stopped": stopped})
            for key, _ in ready:
                if key.fd == handle:
                    os.close(handle)
                    return time.monotonic()
                if not key.data.pump():
                    selector.unregister(key.fd)


def keep(become: Callable[[], object], alone: bool = False) -> int:
    """Run the rank and end as it did.

    Args:
        become: What the rank's process calls. It never returns.
        alone: Whether the launcher signals this process alone, which then passes the signal on. Otherwise it
            signals the process group, which the rank belongs to.
    """
    _die_with_parent()
    code = watch(become, alone)
    if code >= 0:
        return code
    with contextlib.suppress(OSError, ValueError):  # SIGKILL and SIGSTOP take no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


def main(argv: Sequence[str]) -> int:
    """Run this command as the rank, and end as it did."""
    return keep(lambda: os.execve(argv[0], [*argv], environment()))


def environment() -> dict[str, str]:
    """The environment of the rank."""
    found = dict(os.environ)
    for name, value in json.loads(found.pop(RESTORE, "{}")).items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = value
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
