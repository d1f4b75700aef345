"""Small datasets in the forms that the real ones have."""

import gzip
import io
import os
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tacit_lab.recipes.data.cifar10 import CLASSES
from tacit_lab.recipes.data.mnist import FILES


def patches(label: int, count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Images of shape (count, 32, 32, 3): each class has its own colour, under noise."""
    colour = np.random.default_rng(label).integers(0, 256, 3)
    noise = np.random.default_rng([label, seed]).normal(0, 30, (count, 32, 32, 3))
    return (colour + noise).clip(0, 255).astype(np.uint8)


def encoded(pixels: NDArray[np.uint8], form: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form, compress_level=1)
    return out.getvalue()


def pictures(train: int, test: int, form: str = "PNG") -> dict[str, bytes]:
    """An image folder's files with so many images in each class."""
    return {
        f"{split}/{name}/{i:04d}.{form.lower()}": encoded(pixels, form)
        for seed, (split, count) in enumerate((("train", train), ("test", test)))
        for label, name in enumerate(CLASSES)
        for i, pixels in enumerate(patches(label, count, seed))
    }


def batches(images: int) -> dict[str, bytes]:
    """The files of CIFAR-10's binary form, with so many images in each; the pixels are random."""
    random = np.random.default_rng(0)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    tables = {name: random.integers(0, 256, (images, 3073), np.uint8) for name in names}
    for table in tables.values():
        table[:, 0] %= 10
    return {name: table.tobytes() for name, table in tables.items()}


def idx(array: NDArray[np.uint8]) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def digits(train: int, test: int) -> dict[str, bytes]:
    """MNIST's files with so many images, unpacked: each class is a bright row of its own."""
    found = []
    for seed, count in enumerate((train, test)):
        random = np.random.default_rng(seed)
        labels = random.integers(0, 10, count).astype(np.uint8)
        images = random.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        images[np.arange(count), 4 + 2 * labels] += 180
        found += [idx(images), idx(labels)]
    return dict(zip(FILES, found, strict=True))


def packed(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(content, 1) for name, content in files.items()}


def as_folder(root: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return root


def as_archive(path: Path, files: Mapping[str, bytes]) -> Path:
    """A .zip, or a .tar packed as its name says."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path
    packing = path.suffix.removeprefix(".").replace("tar", "")
    with tarfile.open(path, f"w:{packing}") as tar:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def real_data(name: str) -> Path:
    """A file or folder of the real data, or a skip that says where it was looked for."""
    told = os.environ.get("TACIT_DATA")
    root = Path(told) if told else Path(__file__).resolve().parents[4] / "shared" / "data"
    if not (root / name).exists():
        pytest.skip(f"there is no {root / name}: set TACIT_DATA to the folder that holds {name}")
    return root / name
