"""Writing files: checks of their paths, replacing them as a whole, and handling failures to write.

A file that the user names is checked before anything is launched (`output`, `folder`) and replaced as a whole
(`put`). Writing during a training is `spared`: a failure is reported once, and training goes on.
"""

from __future__ import annotations

import io
import json
import os
import stat
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tacit.environment import NOTES
from tacit.errors import ConfigError

_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
}
_LONGEST = 255
"""The most bytes of a file name, on all common file systems of Linux."""
_NOTE = 1000
"""The most characters of a note, so that it is written at once, and not mixed with those of other ranks."""
_PART = ".part"
_SAID: set[str] = set()


def output(path: Path, option: str) -> Path:
    """Check that a regular file can be written at `path`, as far as that is known beforehand.

    A symbolic link is followed, so that a link to another disk stays one; what it leads to must be a regular
    file, or not there yet. Everything else keeps its place: a device or a pipe is never replaced.

    Args:
        option: the user's option, such as "--out".

    Raises:
        ConfigError: it cannot be written; the message says why, and what to write instead.
    """
    try:
        target = _target(path)
        # A file is replaced by a new one, so its folder must take one, too.
        if not all(os.access(each, os.W_OK) for each in (target, target.parent) if each.exists()):
            raise OSError("permission denied")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot write {option} {path}: {_why(error)}. Give a file, in a folder that is there"
        ) from error
    return path


def folder(path: Path, option: str) -> Path:
    """Check that `path` is a folder that can be written to, or can be made; nothing is made.

    Raises:
        ConfigError: it is not; the message says why, and what to write instead.
    """
    try:
        whole = Path(os.path.abspath(path))
        _fits(whole)
        nearest = next(each for each in (whole, *whole.parents) if os.path.lexists(each))
        if not stat.S_ISDIR(nearest.stat().st_mode):
            raise OSError(f"{nearest} is no folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise OSError("permission denied")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot write to {option} {path}: {_why(error)}. Give a folder, or a name for a new one"
        ) from error
    return path


def unmake(*paths: Path) -> None:
    """Remove files, and then empty folders, that were made for a run which could not begin."""
    for path in paths:
        with suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()


def put(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace a file so that it is whole at any time: the old one, or the new one.

    Links are followed as in `output`. Text is written as UTF-8; characters that cannot be encoded become "?".

    Args:
        durable: whether it must be on the disk before this returns, which takes the disk's time.

    Raises:
        ConfigError: it cannot be written, or is no regular file; the old file is unchanged.
    """
    data = content.encode(errors="replace") if isinstance(content, str) else content
    try:
        target = _target(path)
        own = f"{os.getpid()}.{threading.get_native_id()}"
        draft = target.with_name(f"{_draft(target)}{own}{_PART}")
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                if target.exists():
                    os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            draft.replace(target)
        except BaseException:  # an interruption, too, leaves no draft
            with suppress(OSError):
                draft.unlink()
            raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {_why(error)}") from error


def sweep(path: Path) -> None:
    """Remove drafts of a file that killed writers have left; it must have no other writer now."""
    with suppress(OSError, ValueError):
        target = _target(path)
        for each in target.parent.iterdir():
            if each.name.startswith(_draft(target)) and each.name.endswith(_PART):
                each.unlink()


class Log:
    """A file that whole lines are appended to.

    A last line that a killed writer cut short is dropped first, so that it does not spoil the next one.

    Raises:
        ConfigError: The file cannot be opened for writing, or is no regular file.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` for appending; make it where it is not there."""
        try:
            self._file = _target(path).open("a+b", buffering=0)
            self._file.truncate(_whole(self._file))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write {path}: {_why(error)}") from error

    def write(self, line: str) -> None:
        """Append a line; it is in the file before this returns, or not at all.

        Raises:
            OSError: it cannot be written.
        """
        data = line.encode(errors="replace") + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _whole(file: io.FileIO) -> int:
    """The number of bytes up to the end of the last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - (1 << 16))
        file.seek(start)
        cut = file.read(end - start).rfind(b"\n")
        if cut >= 0:
            return start + cut + 1
        end = start
    return 0


def _draft(target: Path) -> str:
    """The prefix of the names of a file's drafts."""
    return f".{zlib.crc32(os.fsencode(target.name)):08x}."


@contextmanager
def spared(what: str) -> Iterator[None]:
    """Let training go on if the block cannot write; a note says so, once for each `what` and reason."""
    try:
        yield
    except (OSError, ConfigError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        say(f"{what}: {_why(cause)}; training goes on")  # without the file, which is the rank's own


def say(text: str) -> None:
    """Print a note on stderr, once a process; the command that started the ranks prints it once for all."""
    if text in _SAID:
        return
    _SAID.add(text)
    mark, text = os.environ.get(NOTES), text[:_NOTE]
    line = f"{mark}{json.dumps({'note': text})}\n" if mark else f"tacit: {text}\n"
    with suppress(OSError, ValueError):
        sys.stderr.write(line)
        sys.stderr.flush()


def _target(path: Path) -> Path:
    """The file that is really written, at the end of all links.

    Raises:
        OSError: it is no regular file, or the folder does not exist.
    """
    target = Path(os.path.realpath(path))
    _fits(target)
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise OSError(f"there is no folder {target.parent}") from None
        return target
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS.items() if is_kind(mode)), "no file")
        raise OSError(f"it is {kind}")
    return target


def _fits(path: Path) -> None:
    """Refuse names that no file can have, also below folders that are not there yet."""
    if any(len(os.fsencode(part)) > _LONGEST for part in path.parts):
        raise OSError(f"a name in it has more than {_LONGEST} bytes")
    with suppress(FileNotFoundError):
        path.lstat()


def _why(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or str(error)
