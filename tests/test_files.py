"""Where files may be written, and what a failure to write does."""

import contextlib
import io
import json
import os
import resource
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tacit import files
from tacit.errors import ConfigError
from tacit_lab.cli.interrupts import Interrupted


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_SAID", set())
    monkeypatch.delenv("TACIT_NOTES", raising=False)


def device(path: Path) -> Path:
    if os.geteuid() != 0:
        pytest.skip("only root makes devices")
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 7))  # what /dev/full is
    return path


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def unix_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
    return path


def directory(path: Path) -> Path:
    path.mkdir()
    return path


def loop(path: Path) -> Path:
    path.symlink_to(path)
    return path


ODD = {
    device: "it is a device",
    fifo: "it is a named pipe",
    unix_socket: "it is a socket",
    directory: "it is a folder",
    loop: "Too many levels of symbolic links",
}


def kept(path: Path) -> tuple[int, int, int, int]:
    """What tells whether it is the same as before; to follow a link changes when it was read."""
    found = path.lstat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(("make", "why"), ODD.items())
def test_what_is_no_regular_file_is_refused_and_stays(
    tmp_path: Path, make: object, why: str, linked: bool
) -> None:
    path = make(tmp_path / "odd")  # type: ignore[operator]
    if linked:
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    before = kept(path)
    for write in (lambda: files.output(path, "--out"), lambda: files.put(path, "text")):
        with pytest.raises(ConfigError, match=why):
            write()
    assert kept(path) == before
    assert len(list(tmp_path.iterdir())) == 1 + linked


def test_a_file_is_replaced_as_a_whole_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    path.chmod(0o600)
    before = path.stat()
    files.put(files.output(path, "--out"), "neu\udcff ü")
    assert path.read_bytes() == "neu? ü".encode()
    assert path.stat().st_ino != before.st_ino
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("there", [False, True])
def test_a_link_is_followed_and_stays_one(tmp_path: Path, there: bool) -> None:
    (tmp_path / "disk").mkdir()
    real = tmp_path / "disk" / "page.html"
    if there:
        real.write_text("old")
    link = tmp_path / "page.html"
    link.symlink_to(real)
    files.put(files.output(link, "--out"), b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Nothing that this process writes may be larger than 4 KiB, as on a disk that is full.

    Not a fixture: pytest writes that a test has passed before it takes fixtures down, perhaps to a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for before in (None, "old"):
        with (
            small_files(),
            pytest.raises(ConfigError, match=r"cannot write .*run.json: File too large"),
        ):
            files.put(path, "x" * 5000)
        assert [each.read_text() for each in tmp_path.iterdir()] == ([] if before is None else [before])
        path.write_text("old")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted(signal.SIGTERM)], ids=repr)
@pytest.mark.parametrize("moment", ["fsync", "fchmod"])
def test_a_write_that_is_interrupted_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, moment: str
) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")

    def interrupt(*_: object) -> None:
        assert len(list(tmp_path.iterdir())) == 2
        raise error

    monkeypatch.setattr(f"os.{moment}", interrupt)
    with pytest.raises(type(error)):
        files.put(path, "new", durable=True)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def left(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Drafts that two writers who were killed have left."""
    before = {*path.parent.iterdir()}
    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", lambda *_: None)
        for number in (11, 12):
            killed.setattr("os.getpid", lambda number=number: number)
            files.put(path, "half")
    return [*{*path.parent.iterdir()} - before]


def test_what_killed_writers_have_left_of_a_file_is_swept_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = tmp_path / "server0.pt", tmp_path / "server1.pt"
    mine.write_text("old")
    theirs = [*left(other, monkeypatch), tmp_path / ".part", tmp_path / ".server0.pt.part"]
    for path in theirs[2:]:
        path.write_text("a user's own")
    assert len(left(mine, monkeypatch)) == 2
    (tmp_path / "link").symlink_to(mine)
    for path in (mine, tmp_path / "link", tmp_path / "absent" / "x", tmp_path, Path("nul\0l")):
        files.sweep(path)
        assert {*tmp_path.iterdir()} == {mine, *theirs, tmp_path / "link"}
    assert mine.read_text() == "old"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("absent/page.html", "there is no folder"),
        ("file/page.html", "Not a directory|there is no folder"),
        ("x" * 300, "a name in it has more than 255 bytes"),
        ("absent/" + "x" * 300, "a name in it has more than 255 bytes"),
        ("/".join(["x" * 200] * 30), "File name too long"),
        ("nul\0l", "null byte|null character"),
        (".", "it is a folder"),
    ],
)
def test_a_path_that_cannot_be_a_file_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=why):
        files.output(Path(path), "--out")
    with pytest.raises(ConfigError, match=why):
        files.put(Path(path), "text")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("file", "file is no folder"),
        ("file/below", "Not a directory"),
        ("link", "No such file"),
        ("/dev/full", "/dev/full is no folder"),
        ("x" * 300, "more than 255 bytes"),
        ("absent/" + "x" * 300, "more than 255 bytes"),
        ("nul\0l", "null byte|null character"),
    ],
)
def test_a_path_that_cannot_be_a_folder_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=why):
        files.folder(Path(path), "--out")


def test_a_folder_is_checked_and_not_made(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b"):
        assert files.folder(path, "--out") == path
    assert list(tmp_path.iterdir()) == []


def test_what_is_spared_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = []
    for _ in range(3):
        with files.spared("numbers are not kept"):
            files.put(tmp_path / "absent" / "rank0.json", "{}")
        after.append("on")
    assert after == ["on"] * 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("tacit: numbers are not kept: there is no folder ")
    assert err.endswith("absent; training goes on\n")


def test_only_failures_to_write_are_spared() -> None:
    with pytest.raises(ZeroDivisionError), files.spared("numbers are not kept"):
        raise ZeroDivisionError


def test_under_the_command_a_note_is_a_marked_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TACIT_NOTES", "\x1emark ")
    files.say("ü" * 5000)
    err = capsys.readouterr().err
    assert err.startswith("\x1emark ")
    assert json.loads(err.removeprefix("\x1emark ")) == {"note": "ü" * 1000}


def test_a_stderr_that_takes_nothing_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr("sys.stderr", io.TextIOWrapper(full, write_through=True))
        files.say("nobody hears it")


def test_two_threads_do_not_write_the_same_draft(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    errors: list[BaseException] = []

    def write(text: str) -> None:
        try:
            for _ in range(200):
                files.put(path, text)
                assert path.read_text() in ("a" * 9000, "b" * 9000)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(letter * 9000,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
