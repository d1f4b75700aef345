"""The files in a folder, or in an archive of one, one after the other; only what is asked for is unpacked."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Self, cast

from tacit.errors import ConfigError
from tacit.files import say

_MOST_FILES, _MANY_FILES = 1_000_000, 100_000
_LONGEST_NAME = 1 << 20
_FORMS = ".tar, .tar.gz, .tar.xz, .tar.bz2 or .zip"
_ZIP = b"PK\x03\x04"
_PACKED: dict[bytes, Callable[[Path], io.BufferedIOBase]] = {
    b"\x1f\x8b": gzip.GzipFile,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"BZh": bz2.BZ2File,
}
_BROKEN = (EOFError, OSError, lzma.LZMAError, zlib.error, tarfile.TarError, zipfile.BadZipFile)


@dataclass(frozen=True)
class File:
    """A file in a folder or archive; `read` before the next one is asked for.

    Attributes:
        name: Its path from the folder, or in the archive.
        start: So many of its bytes, or all of them where there are fewer.
        source: The folder or archive.
    """

    name: PurePosixPath
    start: Callable[[int], bytes]
    source: Path

    def read(self, most: int) -> bytes:
        """All its bytes, of which there are not more than `most`; of more, as many are unpacked.

        Raises:
            ConfigError: There are more, or the source is broken.
        """
        with _blaming(self.source):
            content = self.start(most + 1)
        if len(content) > most:
            raise ConfigError(
                f"{self.name} of {self.source} has more than {most:,} bytes, and no file of this data set "
                "has: give the original one"
            )
        return content


def files(path: Path) -> Iterator[File]:
    """All files of a folder sorted by name, or of an archive in its order, without hidden ones.

    An archive is known by its content. It is read to its end, so that one that was cut short is noticed.

    Raises:
        ConfigError: There is nothing at `path`, it is no folder and no archive, or it is broken.
    """
    if not os.path.exists(path):  # it says no, too, where a name is too long
        raise ConfigError(f"there is nothing at {path}: give a folder or an archive that exists")
    with _blaming(path):
        found = _folder(path) if path.is_dir() else _archive(path)
        for file in found:
            if not _hidden(file.name):
                yield file


def paths(folder: Path) -> Iterator[Path]:
    """All regular files in a folder and those below it that are not hidden, in an order by their names.

    Links are followed, each folder is entered once.

    Raises:
        ConfigError: There are more than any data set has.
    """
    entered: set[tuple[int, int]] = set()
    count = 0
    for here, folders, names in os.walk(folder, followlinks=True):
        seen = [name for name in sorted(folders) if not _hidden(PurePosixPath(name))]
        folders[:] = [name for name in seen if _is_new(Path(here, name), entered)]
        for file in (Path(here, name) for name in sorted(names)):
            if file.is_file() or file.is_symlink():  # a link that leads nowhere is an error where it is read
                yield file
                count += 1
        if count > _MANY_FILES:
            say(f"{folder} holds more than {_MANY_FILES:,} files, and all are looked at: is it the data?")
        if count > _MOST_FILES:
            raise ConfigError(
                f"{folder} holds more than {_MOST_FILES:,} files: give the folder of the data set"
            )


def _is_new(folder: Path, entered: set[tuple[int, int]]) -> bool:
    facts = folder.stat()
    key = (facts.st_dev, facts.st_ino)
    new = key not in entered
    entered.add(key)
    return new


def _hidden(name: PurePosixPath) -> bool:
    return any(part == "__MACOSX" or (part.startswith(".") and part != ".") for part in name.parts)


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    try:
        yield
    except _BROKEN as error:
        why = str(error) or type(error).__name__
        raise ConfigError(f"{path} cannot be read to its end: {why}. Fetch or unpack it once more") from error


def _folder(path: Path) -> Iterator[File]:
    for file in paths(path):
        yield File(PurePosixPath(file.relative_to(path).as_posix()), partial(_start, file.open), path)


def _start(opened: Callable[..., IO[bytes]], size: int) -> bytes:
    with opened("rb") as file:
        return _upto(file, size)


def _archive(path: Path) -> Iterator[File]:
    if not path.is_file():
        raise ConfigError(f"{path} is neither a folder nor a file: give a folder, or an archive as {_FORMS}")
    with path.open("rb") as file:
        head = file.read(6)
    if head.startswith(_ZIP):
        return _zip(path)
    unpack = next((opener for magic, opener in _PACKED.items() if head.startswith(magic)), None)
    if unpack is None and not tarfile.is_tarfile(path):
        raise ConfigError(f"{path} is no archive that can be read: give a folder, or one as {_FORMS}")
    return _tar(path, unpack or (lambda path: path.open("rb")))


def _zip(path: Path) -> Iterator[File]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                opened = partial(archive.open, member)
                yield File(PurePosixPath(member.filename), partial(_unzipped, opened), path)


def _unzipped(opened: Callable[[], IO[bytes]], size: int) -> bytes:
    with opened() as file:
        return _upto(file, size)


def _tar(path: Path, unpack: Callable[[Path], io.BufferedIOBase]) -> Iterator[File]:
    with unpack(path) as unpacked:
        stream = _Tail(cast(IO[bytes], unpacked))
        try:
            archive = tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|", tarinfo=_Member)  # noqa: SIM115
        except tarfile.ReadError as error:
            raise ConfigError(
                f"{path} is packed, but what is in it is no archive: give a folder, or one as {_FORMS}"
            ) from error
        with archive:
            for member in archive:
                if member.isfile():
                    yield File(PurePosixPath(member.name), partial(_content, archive, member), path)
            stream.check()


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, size: int) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, "only files are asked for"
    return _upto(file, size)


def _upto(file: IO[bytes], size: int) -> bytes:
    """The first bytes of a file; memory is taken for those that there are."""
    pieces = []
    while size and (piece := file.read(min(size, 1 << 20))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


class _Member(tarfile.TarInfo):
    """A member whose own description is short: tarfile reads the whole of it into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """A member from its header."""
        member = super().frombuf(buf, encoding, errors)
        if not member.isreg() and member.size > _LONGEST_NAME:
            raise tarfile.ReadError(f"the name of a member has more than {_LONGEST_NAME:,} bytes")
        return member


class _Tail:
    """Hands on what it reads, and remembers whether the last block was zeros, as those at a tar's end are.

    tarfile itself takes an archive that stops between two of its files for one that is whole.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._last = b""

    def read(self, size: int) -> bytes:
        """Read as the file does."""
        piece = self._file.read(size)
        self._last = (self._last + piece)[-tarfile.BLOCKSIZE :]
        return piece

    def check(self) -> None:
        """Read to the end, which also lets an unpacker compare its checksums."""
        while self.read(1 << 20):
            pass
        if self._last.strip(b"\0"):
            raise EOFError("it is cut short")
