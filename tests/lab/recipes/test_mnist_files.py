from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from image_files import as_archive, as_folder, digits, idx, packed, real_data

from tacit.errors import ConfigError
from tacit_lab.recipes.data.mnist import read

Files: TypeAlias = dict[str, bytes]
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def test_the_four_files_packed_or_not(tmp_path: Path) -> None:
    files = digits(30, 5)
    train, test = read(as_folder(tmp_path / "plain", files))
    assert train.images.shape == (30, 1, 28, 28)
    assert test.images.shape == (5, 1, 28, 28)
    assert train.images.dtype == train.targets.dtype == torch.uint8
    assert train.images.numpy().tobytes() == files[IMAGES][16:]
    assert train.targets.numpy().tobytes() == files[LABELS][8:]
    dotted = {name.replace("-idx", ".idx"): content for name, content in files.items()}
    for path in (
        as_folder(tmp_path / "packed", {f"MNIST/raw/{name}": c for name, c in packed(files).items()}),
        as_folder(tmp_path / "dotted", dotted),
        as_archive(tmp_path / "mnist.tar.xz", packed(files)),
    ):
        again = read(path)
        assert torch.equal(again.train.images, train.images)
        assert torch.equal(again.test.targets, test.targets)


def set_to(name: str, content: bytes) -> Callable[[Files], None]:
    return lambda files: files.__setitem__(name, content)


def cut(name: str, end: int) -> Callable[[Files], None]:
    return lambda files: files.__setitem__(name, files[name][:end])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files.pop(LABELS), r"lacks train-labels-idx1-ubyte: MNIST is expected as four IDX"),
        (cut(IMAGES, -1), r"train-images-idx3-ubyte .* says that it holds 30x28x28 bytes, and holds 23,519"),
        (cut(IMAGES, 7), r"begins with 00 00 08 03, an IDX file of bytes in 3 dims"),
        (cut(IMAGES, 0), r"train-images-idx3-ubyte of .* begins with "),
        (
            set_to(IMAGES, b"\x89PNG\r\n"),
            r"begins with 89 50 4e 47, an IDX file of bytes in 3 dims with 00 00 08 03",
        ),
        (
            set_to(LABELS, idx(np.zeros((30, 28, 28), np.uint8))),
            r"begins with 00 00 08 03, .* with 00 00 08 01",
        ),
        (set_to(IMAGES, b"\0\0\x0d\3" + bytes(12)), r"begins with 00 00 0d 03"),
        (set_to(LABELS, idx(np.zeros(29, np.uint8))), r"holds 30 images .* and 29 labels"),
        (set_to(LABELS, idx(np.full(30, 10, np.uint8))), r"has a class 10: MNIST's are 0 to 9"),
        (
            set_to(IMAGES, idx(np.zeros((30, 28, 27), np.uint8))),
            r"are 28 by 27 pixels, those of MNIST 28 by 28",
        ),
        (set_to(IMAGES, idx(np.zeros((0, 28, 28), np.uint8))), r"says that it holds 0x28x28 bytes"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: Callable[[Files], None], message: str) -> None:
    files = digits(30, 5)
    change(files)
    with pytest.raises(ConfigError, match=message):
        read(as_folder(tmp_path, files))


def test_a_packed_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    files = packed(digits(30, 5))
    files[f"{IMAGES}.gz"] = files[f"{IMAGES}.gz"][:-30]
    with pytest.raises(ConfigError, match=r"train-images-idx3-ubyte.gz of .* cannot be unpacked"):
        read(as_folder(tmp_path, files))


def test_one_of_the_files_is_not_all(tmp_path: Path) -> None:
    folder = as_folder(tmp_path, packed(digits(3, 3)))
    with pytest.raises(ConfigError, match="is one of MNIST's four files: give the folder"):
        read(folder / f"{IMAGES}.gz")


def test_the_real_digits() -> None:
    train, test = read(real_data("mnist"))
    assert train.images.shape == (60_000, 1, 28, 28)
    assert test.images.shape == (10_000, 1, 28, 28)
    assert (train.images.float() / 255).mean() == pytest.approx(0.1307, abs=1e-4)
    assert (train.images.float() / 255).std() == pytest.approx(0.3081, abs=1e-4)
    assert train.targets[:5].tolist() == [5, 0, 4, 1, 9]
