"""CIFAR-10 in each of its forms: image folder, archive of one, official binary form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from tacit.errors import ConfigError
from tacit_lab.recipes.data import folder, sources
from tacit_lab.recipes.data.splits import Images, Split

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = ("test_batch.bin",)
IMAGES = 10_000
"""In each file of the binary form."""
RECORD = 1 + 3 * 32 * 32
"""Bytes of an image there: its class, then the red, the green and the blue pixels by rows."""
PICKLED = ("data_batch_1", "test_batch")


def read(path: Path) -> Images:
    """Read CIFAR-10, of 32x32 pixels in colour.

    Source: Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images"; the binary form is
    described at https://www.cs.toronto.edu/~kriz/cifar.html.

    Args:
        path: A folder or an archive with train/CLASS/NAME.jpg and test/CLASS/NAME.jpg, or with the six files
            of the official binary form; folders above these do not matter.

    Raises:
        ConfigError: There is neither, or it is broken, incomplete, or of another format.
    """
    batches: dict[str, bytes] = {}
    pictures: list[folder.Picture] = []
    other: list[str] = []
    for file in sources.files(path):
        if file.name.name in TRAIN + TEST:
            batches[file.name.name] = file.read(IMAGES * RECORD)
        elif folder.is_picture(file.name):
            pictures.append(folder.Picture(file.name, file.read(folder.LARGEST)))
        else:
            other.append(file.name.name)
    if batches and pictures:
        raise ConfigError(f"{path} holds both images and the binary form: give a folder with one of them")
    if batches:
        return _decode(batches, path)
    if pictures:
        return folder.decode(pictures, CLASSES, path)
    raise _nothing(path, other)


def _nothing(path: Path, other: list[str]) -> ConfigError:
    """Why there is nothing to read: what is there in its place."""
    if any(name in PICKLED for name in other):
        return ConfigError(
            f"{path} holds CIFAR-10 in its pickled form, and unpickling may run any code, so it is not read: "
            "give the binary form, cifar-10-binary.tar.gz"
        )
    archives = [name for name in other if "cifar" in name.lower() and "." in name]
    if archives and path.is_dir():
        return ConfigError(f"{path} holds no images, but an archive: give {path / archives[0]}")
    wanted = f"train/CLASS/NAME.jpg and test/CLASS/NAME.jpg, or {TRAIN[0]} to {TRAIN[-1]} and {TEST[0]}"
    there = f"only, for example, {', '.join(sorted(other)[:3])}" if other else "no file at all"
    return ConfigError(f"{path} holds {there}: CIFAR-10 is expected as {wanted}")


def _decode(batches: Mapping[str, bytes], path: Path) -> Images:
    missing = [name for name in TRAIN + TEST if name not in batches]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)} of CIFAR-10's binary form: add what is missing")
    return Images(*(_split([(name, batches[name]) for name in names], path) for names in (TRAIN, TEST)))


def _split(batches: list[tuple[str, bytes]], path: Path) -> Split:
    for name, content in batches:
        if len(content) != IMAGES * RECORD:
            raise ConfigError(
                f"{name} of {path} has {len(content):,} bytes, but {IMAGES:,} images of {RECORD} bytes are "
                f"{IMAGES * RECORD:,}: it is cut short or no file of CIFAR-10, fetch it once more"
            )
    table = np.concatenate([np.frombuffer(content, np.uint8).reshape(-1, RECORD) for _, content in batches])
    targets = table[:, 0].copy()
    wrong = np.flatnonzero(targets >= len(CLASSES))
    if len(wrong):
        name = batches[wrong[0] // IMAGES][0]
        raise ConfigError(
            f"image {wrong[0] % IMAGES} in {name} of {path} has class {targets[wrong[0]]}, the last is "
            f"{len(CLASSES) - 1}: this is no CIFAR-10 (CIFAR-100, for example, has two classes an image)"
        )
    images = np.ascontiguousarray(table[:, 1:]).reshape(-1, 3, 32, 32)
    return Split(torch.from_numpy(images), torch.from_numpy(targets))
