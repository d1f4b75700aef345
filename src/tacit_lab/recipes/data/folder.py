"""Images in folders by split and class: train/cat/0001.jpg, as torchvision's ImageFolder wants them."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tacit.errors import ConfigError, installing, unknown
from tacit_lab.recipes.data.splits import Images, Split

SIDE = 32
LARGEST = 1 << 20
"""Bytes of a picture's file; one of 32x32 pixels in colour has 3 KiB before it is packed."""
SPLITS = ("train", "test")
ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp")
FORMATS = ("JPEG", "PNG", "PPM", "BMP")
"""What Pillow may take a file for, whatever its name says."""


@dataclass(frozen=True)
class Picture:
    """An image as it is on disk, at .../split/class/name."""

    name: PurePosixPath
    content: bytes

    @property
    def split(self) -> str:
        """The folder above the class."""
        return self.name.parts[-3]

    @property
    def label(self) -> str:
        """The class."""
        return self.name.parts[-2]


def is_picture(name: PurePosixPath) -> bool:
    """Whether a file has the name of an image in a split."""
    return len(name.parts) >= 3 and name.parts[-3] in SPLITS and name.suffix.lower() in ENDINGS


def decode(pictures: Iterable[Picture], classes: Sequence[str], source: Path) -> Images:
    """Decode images of 32x32 pixels in colour.

    Each class is taken in turn, the images of a class in the order of their names: so the first few hold as
    many of each class, and do not depend on the order of an archive.

    Raises:
        ConfigError: A class is unknown, missing, or has more images than another; an image is broken or of
            another size; Pillow is not installed.
    """
    if find_spec("PIL") is None:
        raise ConfigError(f"the images of {source} are decoded by Pillow: {installing('recipes')}")
    parts: dict[str, list[Picture]] = {split: [] for split in SPLITS}
    for picture in pictures:
        if picture.label not in classes:
            raise ConfigError(f"{source}: {picture.name}: {unknown('class', picture.label, classes)}")
        parts[picture.split].append(picture)
    return Images(*(_split(parts[name], name, classes, source) for name in SPLITS))


def _split(pictures: list[Picture], name: str, classes: Sequence[str], source: Path) -> Split:
    _check_counts(Counter(picture.label for picture in pictures), name, classes, source)
    ordered = list(_in_turn(pictures))
    images = np.empty((len(ordered), SIDE, SIDE, 3), np.uint8)
    for i, picture in enumerate(ordered):
        images[i] = _pixels(picture, source)
    targets = torch.tensor([classes.index(picture.label) for picture in ordered], dtype=torch.uint8)
    return Split(_channels_first(images), targets)


def _check_counts(counts: Counter[str], split: str, classes: Sequence[str], source: Path) -> None:
    most, least = (choose(classes, key=lambda name: counts[name]) for choose in (max, min))
    if counts[most] != counts[least]:
        raise ConfigError(
            f"{source} holds {counts[most]} images in {split}/{most} and {counts[least]} in {split}/{least}, "
            "but each class should have as many: fetch or unpack it once more"
        )
    if not counts[most]:
        raise ConfigError(f"{source} holds no images in {split}/: it needs both {' and '.join(SPLITS)}")


def _in_turn(pictures: Iterable[Picture]) -> Iterator[Picture]:
    classes = defaultdict(list)
    for picture in pictures:
        classes[picture.label].append(picture)
    rows = [sorted(classes[label], key=lambda picture: picture.name) for label in sorted(classes)]
    for row in zip(*rows, strict=True):
        yield from row


def _pixels(picture: Picture, source: Path) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(picture.content), formats=FORMATS) as image:
            if image.size == (SIDE, SIDE):
                return np.asarray(image.convert("RGB"))
            width, height = image.size
    # Pillow calls a broken PNG a SyntaxError.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{source}: {picture.name} is no image that can be decoded: {error}") from error
    raise ConfigError(f"{source}: {picture.name} has {width}x{height} pixels, it must have {SIDE}x{SIDE}")


def _channels_first(images: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
