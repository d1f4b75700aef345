from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from image_files import as_archive, as_folder, batches, encoded, patches, pictures, real_data

from tacit.errors import ConfigError
from tacit_lab.recipes.data import cifar10
from tacit_lab.recipes.data.cifar10 import CLASSES, read

Files: TypeAlias = dict[str, bytes]


@pytest.mark.parametrize("name", ["data.tar", "data.tar.gz", "data.tar.xz", "data.zip", "data"])
def test_image_folders_and_archives_of_them_give_the_same(tmp_path: Path, name: str) -> None:
    files = {f"above/{key}": content for key, content in reversed(pictures(3, 2).items())}
    path = as_folder(tmp_path / name, files) if name == "data" else as_archive(tmp_path / name, files)
    train, test = read(path)
    assert train.images.shape == (30, 3, 32, 32)
    assert test.images.shape == (20, 3, 32, 32)
    assert train.images.dtype == train.targets.dtype == torch.uint8
    assert train.images.is_contiguous()
    # Each class in turn: the first ten images are the first of each class.
    assert train.targets.tolist() == [*range(10)] * 3
    for i in (0, 13, 29):
        expected = patches(i % 10, 3)[i // 10]
        assert (train.images[i].permute(1, 2, 0).numpy() == expected).all()


@pytest.mark.parametrize("form", ["JPEG", "PPM", "BMP"])
def test_other_formats_of_images(tmp_path: Path, form: str) -> None:
    train, _ = read(as_folder(tmp_path, pictures(1, 1, form)))
    expected = np.stack([patches(label, 1)[0] for label in range(10)])
    difference = np.abs(train.images.permute(0, 2, 3, 1).numpy().astype(int) - expected)
    assert difference.mean() < (40 if form == "JPEG" else 1e-9)


def without(name: str) -> Callable[[Files], None]:
    return lambda files: files.__delitem__(name)


def having(name: str, content: bytes) -> Callable[[Files], None]:
    return lambda files: files.__setitem__(name, content)


GOOD = encoded(patches(0, 1)[0])
BIG = encoded(np.zeros((33, 40, 3), np.uint8))
HUGE = b"P6 30000 30000 255\n"  # a bomb: nothing is unpacked before the size is looked at


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without("train/dog/0001.png"),
            r"holds 2 images in train/airplane and 1 in train/dog, but each class",
        ),
        (
            having("train/dogs/0001.png", GOOD),
            r"train/dogs/0001.png: unknown class 'dogs'. Did you mean 'dog'",
        ),
        (having("train/dog/0001.png", GOOD[:200]), r"train/dog/0001.png is no image that can be decoded"),
        (having("train/dog/0001.png", b"text"), r"train/dog/0001.png is no image that can be decoded"),
        (having("train/dog/0001.png", b""), r"train/dog/0001.png is no image that can be decoded"),
        (having("test/cat/0000.png", BIG), r"test/cat/0000.png has 40x33 pixels, it must have 32x32"),
        (
            having("test/cat/0000.png", HUGE),
            r"test/cat/0000.png is no image that can be decoded: .*exceeds limit",
        ),
        (having("data_batch_1.bin", b"x"), r"holds both images and the binary form"),
    ],
)
def test_an_image_folder_that_cannot_be_is_refused(
    tmp_path: Path, change: Callable[[Files], None], message: str
) -> None:
    files = pictures(2, 1)
    change(files)
    with pytest.raises(ConfigError, match=message):
        read(as_folder(tmp_path, files))


def test_both_splits_are_needed(tmp_path: Path) -> None:
    files = {name: content for name, content in pictures(1, 1).items() if name.startswith("train")}
    with pytest.raises(ConfigError, match="holds no images in test/: it needs both train and test"):
        read(as_folder(tmp_path, files))


def test_without_pillow_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = as_folder(tmp_path, pictures(1, 1))
    monkeypatch.setattr("tacit_lab.recipes.data.folder.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'torch-tacit\[recipes\]'"):
        read(path)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Files:
    """The binary form with 7 images in each file."""
    monkeypatch.setattr(cifar10, "IMAGES", 7)
    return batches(7)


def test_the_binary_form_is_classes_and_planes(tmp_path: Path, few: Files) -> None:
    train, test = read(
        as_archive(tmp_path / "c.tar.gz", {f"cifar-10-batches-bin/{k}": v for k, v in few.items()})
    )
    assert train.images.shape == (35, 3, 32, 32)
    assert test.images.shape == (7, 3, 32, 32)
    third = few["data_batch_2.bin"][2 * 3073 : 3 * 3073]
    assert train.targets[9] == third[0]
    assert train.images[9].numpy().tobytes() == third[1:]
    other = read(as_folder(tmp_path / "plain", few))
    assert torch.equal(other.train.images, train.images)
    assert torch.equal(other.test.targets, test.targets)


def test_the_official_files_have_ten_thousand_images(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data_batch_1.bin .* has 21,511 bytes, but 10,000 .* are 30,730,000"
    ):
        read(as_folder(tmp_path, batches(7)))


def labelled(content: bytes, image: int, label: int) -> bytes:
    changed = bytearray(content)
    changed[image * 3073] = label
    return bytes(changed)


def test_a_binary_form_that_cannot_be_is_refused(tmp_path: Path, few: Files) -> None:
    name = "data_batch_3.bin"
    cases: list[tuple[Callable[[Files], None], str]] = [
        (without(name), r"lacks data_batch_3.bin of CIFAR-10's binary form"),
        (having(name, few[name][:-1]), r"data_batch_3.bin .* has 21,510 bytes, but"),
        (having(name, few[name][:-3073]), r"data_batch_3.bin .* has 18,438 bytes, but"),
        (having(name, few[name] + b"x"), r"data_batch_3.bin .* has more than 21,511 bytes"),
        (
            having(name, labelled(few[name], 4, 10)),
            r"image 4 in data_batch_3.bin .* has class 10, the last is 9",
        ),
    ]
    for i, (change, message) in enumerate(cases):
        files = dict(few)
        change(files)
        with pytest.raises(ConfigError, match=message):
            read(as_folder(tmp_path / str(i), files))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar-10-batches-py/data_batch_1", "pickled form, and unpickling may run any code"),
        ("cifar-10-binary.tar.gz", r"holds no images, but an archive: give .*/cifar-10-binary.tar.gz"),
        ("notes.txt", r"holds only, for example, notes.txt: CIFAR-10 is expected as train/CLASS"),
        ("cat/0001.png", r"holds only, for example, 0001.png: CIFAR-10 is expected as train/CLASS"),
        (".hidden", r"holds no file at all: CIFAR-10 is expected"),
    ],
)
def test_what_is_no_cifar10_is_refused_by_what_it_is(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(as_folder(tmp_path, {name: b"x"}))


def test_the_real_images() -> None:
    train, test = read(real_data("cifar10-jpeg-q75.tar.xz"))
    assert train.images.shape == (50_000, 3, 32, 32)
    assert test.images.shape == (10_000, 3, 32, 32)
    assert train.targets[:10_000].bincount().tolist() == [1000] * len(CLASSES)
    pixels = train.images[:10_000].float() / 255
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.005)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx([0.2470, 0.2435, 0.2616], abs=0.01)
