"""MNIST in its own form, four IDX files, packed by gzip or not."""

from __future__ import annotations

import gzip
import io
import zlib
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tacit.errors import ConfigError
from tacit_lab.recipes.data import sources
from tacit_lab.recipes.data.splits import Images, Split

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
SIDE = 28
HEAD = 16
"""Bytes of the longest head: that of the images."""
LARGEST = 256 << 20
"""Bytes of a file; MNIST's largest has 47 million."""
CLASSES = 10
UINT8 = 0x08
"""IDX's code for bytes; the third byte of a file."""


def read(path: Path) -> Images:
    """Read MNIST, or what has its form: grey images of 28x28 pixels of ten classes.

    Source: LeCun, Cortes & Burges, http://yann.lecun.com/exdb/mnist, "the IDX file format".

    Args:
        path: A folder or an archive with the four files, such as train-images-idx3-ubyte.gz.

    Raises:
        ConfigError: One is missing, broken, or of another format.
    """
    found: dict[str, bytes] = {}
    if path.is_file() and _plain(path.name) in FILES:
        raise ConfigError(f"{path} is one of MNIST's four files: give the folder that holds all of them")
    for file in sources.files(path):
        name = _plain(file.name.name)
        if name in FILES and name not in found:
            found[name] = _unpacked(file, path)
    missing = [name for name in FILES if name not in found]
    if missing:
        raise ConfigError(
            f"{path} lacks {', '.join(missing)}: MNIST is expected as four IDX files of these names, with or "
            "without .gz"
        )
    return Images(_split(found, "train", path), _split(found, "t10k", path))


def _plain(name: str) -> str:
    """The official name of a file; some copies have a dot where it has its second dash."""
    return name.removesuffix(".gz").replace(".idx", "-idx")


def _unpacked(file: sources.File, path: Path) -> bytes:
    content = file.read(LARGEST)
    if file.name.suffix != ".gz":
        return content
    try:
        with gzip.open(io.BytesIO(content)) as packed:
            head = packed.read(HEAD)
            return head + packed.read(min(_size(head), LARGEST) + 1 - len(head))
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file.name} of {path} cannot be unpacked: {error}. Fetch it once more") from error


def _size(head: bytes) -> int:
    """How many bytes an IDX file says that it has; no more than its beginning where it is none."""
    dims = head[3] if len(head) == HEAD and head[:3] == bytes([0, 0, UINT8]) else 0
    if not 0 < dims <= 3:
        return len(head)
    return 4 + 4 * dims + prod(int(size) for size in np.frombuffer(head, ">u4", dims, 4))


def _split(found: dict[str, bytes], start: str, path: Path) -> Split:
    names = [name for name in FILES if name.startswith(start)]
    images, labels = (_array(found[name], name, dims, path) for name, dims in zip(names, (3, 1), strict=True))
    if images.shape[1:] != (SIDE, SIDE):
        raise ConfigError(
            f"the images in {names[0]} of {path} are {' by '.join(map(str, images.shape[1:]))} pixels, those "
            f"of MNIST {SIDE} by {SIDE}: give the original files"
        )
    if len(images) != len(labels):
        raise ConfigError(
            f"{path} holds {len(images):,} images in {names[0]} and {len(labels):,} labels in {names[1]}: "
            "they do not belong together"
        )
    if labels.max() >= CLASSES:
        raise ConfigError(f"{names[1]} of {path} has a class {labels.max()}: MNIST's are 0 to {CLASSES - 1}")
    return Split(torch.from_numpy(images[:, None]), torch.from_numpy(labels))


def _array(content: bytes, name: str, dims: int, path: Path) -> NDArray[np.uint8]:
    """The array in an IDX file: two zeros, the type, the number of dims, each dim, and the entries."""
    start = 4 + 4 * dims
    if content[:4] != bytes([0, 0, UINT8, dims]) or len(content) < start:
        raise ConfigError(
            f"{name} of {path} begins with {content[:4].hex(' ')}, an IDX file of bytes in {dims} dims with "
            f"{bytes([0, 0, UINT8, dims]).hex(' ')}: give the original file"
        )
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dims, 4))
    if len(content) - start != prod(shape) or not shape[0]:
        raise ConfigError(
            f"{name} of {path} says that it holds {'x'.join(map(str, shape))} bytes, and holds "
            f"{len(content) - start:,}: it is cut short or damaged, fetch it once more"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()
