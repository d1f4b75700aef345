"""Where a benchmark finds its images."""

from pathlib import Path

import pytest

import comparing


def test_missing_images_are_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TACIT_DATA", str(tmp_path))
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path))
    with pytest.raises(SystemExit, match="--download") as told:
        comparing.images()
    assert str(tmp_path) in str(told.value)
    with pytest.raises(SystemExit, match="nowhere"):
        comparing.images("/nowhere")
    (tmp_path / "cifar10-jpeg-q75.tar.xz").touch()
    assert comparing.images() == tmp_path / "cifar10-jpeg-q75.tar.xz"
    assert comparing.images(str(tmp_path)) == tmp_path / "cifar10-jpeg-q75.tar.xz"
    assert comparing.images("/proc") == Path("/proc")  # a folder of images, as far as is known
