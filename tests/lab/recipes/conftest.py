from collections.abc import Iterator
from pathlib import Path

import image_files
import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a rank; two threads on busy cores would also wait for each other at every operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache_apart(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own cache is not for tests."""
    monkeypatch.setenv("TACIT_CACHE", str(shared_cache))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of 1,500 training and 100 test images."""
    files = image_files.pictures(150, 10)
    return image_files.as_archive(tmp_path_factory.mktemp("pictures") / "small.tar", files)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 1,500 training and 100 test images."""
    return image_files.as_folder(tmp_path_factory.mktemp("digits"), image_files.digits(1500, 100))
