"""Decode a dataset once, or train a network once: afterwards all ranks read the same file."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tacit.environment import CACHE
from tacit.errors import ConfigError
from tacit_lab.recipes.data import sources
from tacit_lab.recipes.data.splits import Images, Split

_VERSION = 1
_CRC = 4
"""Bytes of a checksum."""
_HEAD = 4096
"""Bytes before the images: a line of JSON and spaces, a page long."""


def folder() -> Path:
    """Where decoded and downloaded data is kept: TACIT_CACHE, or tacit in the user's folder for caches."""
    named = os.environ.get(CACHE)
    if named:
        return Path(named).absolute()
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path("~/.cache").expanduser()) / "tacit"


def cached(kind: str, path: Path, read: Callable[[Path], Images]) -> Images:
    """What `read(path)` returns, from the cache where it has been read before.

    The cache belongs to the file's path, size and time of change, or to those of all files in a folder. One
    that is damaged is made anew. If several ranks come at once, one reads and the others wait.

    Returns:
        Images mapped from the cache's file, whose memory all ranks share; targets are int64.

    Raises:
        ConfigError: `read` raises it, or the cache cannot be written.
    """
    if not os.path.exists(path):  # it says no, too, where a name is too long
        raise ConfigError(f"there is nothing at {path}: give a folder or an archive that exists")
    file = folder() / f"{kind}-{_identity(path)}.images"
    images = _load(file)
    if images is None:
        with _alone(file.parent):
            images = _load(file)
            if images is None:
                _save(read(path), file)
                images = _load(file)
    assert images is not None, "it was written just now"
    return images


def kept(name: str, make: Callable[[], bytes]) -> bytearray:
    """What `make` returns, from the cache's file of this name where it was made before.

    A file that is damaged is made again. If several ranks come at once, one makes it and the others wait.

    Raises:
        ConfigError: The cache cannot be read or written.
    """
    file = folder() / name
    try:
        content = _whole(file)
        if content is None:
            with _alone(file.parent):
                content = _whole(file)
                if content is None:
                    content = bytearray(make())
                    part = file.with_suffix(".part")
                    part.write_bytes(content + zlib.crc32(content).to_bytes(_CRC, "little"))
                    part.replace(file)
    except OSError as error:
        raise _unwritable(file.parent, error) from error
    return content


def _whole(file: Path) -> bytearray | None:
    """What `kept` has put there; None where there is nothing, or something else."""
    if not file.exists():
        return None
    stored = bytearray(file.read_bytes())
    content, crc = stored[:-_CRC], stored[-_CRC:]
    return content if zlib.crc32(content).to_bytes(_CRC, "little") == crc else None


def _identity(path: Path) -> str:
    """Sixteen hex digits that change with the data, as far as its names, sizes and times of change tell."""
    path = path.resolve()
    names = sources.paths(path) if path.is_dir() else [path]
    digest = hashlib.blake2b(f"{_VERSION} {path}".encode(), digest_size=8)
    for name in names:
        try:
            facts = name.stat()
        except OSError as error:
            raise ConfigError(f"{name} cannot be read: {error.strerror}. Repair or remove it") from error
        digest.update(f"\0{name}\0{facts.st_size}\0{facts.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Hold the cache's lock; raise a `ConfigError` if it cannot be written."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / "lock").open("w")
    except OSError as error:
        raise _unwritable(home, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unwritable(home: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"what is made once cannot be kept in {home}: {error.strerror}. Set {CACHE} to a folder that can be "
        "written"
    )


def _save(images: Images, file: Path) -> None:
    tensors = [tensor.contiguous().numpy() for split in images for tensor in split]
    check = 0
    for tensor in tensors:
        check = zlib.crc32(tensor.reshape(-1).data, check)
    head = json.dumps({"version": _VERSION, "shapes": [tensor.shape for tensor in tensors], "crc32": check})
    # Only one at a time has the lock, so that what is left of one that was killed is written over.
    part = file.with_suffix(".part")
    try:
        with part.open("wb") as out:
            out.write(head.encode().ljust(_HEAD))
            for tensor in tensors:
                out.write(tensor.reshape(-1).data)
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _unwritable(file.parent, error) from error


def _load(file: Path) -> Images | None:
    """The images in a cache's file; None where there is none, or it is not what was written."""
    try:
        with file.open("rb") as opened:
            head = json.loads(opened.read(_HEAD))
        shapes = [tuple(shape) for shape in head["shapes"]]
        if head["version"] != _VERSION or file.stat().st_size != _HEAD + sum(map(prod, shapes)):
            return None
        # Private pages: no write can change the cache, and torch needs writable memory.
        stored = np.memmap(file, np.uint8, mode="c", offset=_HEAD)
        if zlib.crc32(stored.data) != head["crc32"]:
            return None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unwritable(file.parent, error) from error
    except (ValueError, KeyError, TypeError):
        return None
    train_images, train_targets, test_images, test_targets = _cut(
        torch.from_numpy(np.asarray(stored)), shapes
    )
    return Images(Split(train_images, train_targets.long()), Split(test_images, test_targets.long()))


def _cut(stored: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    pieces = torch.split(stored, [prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
