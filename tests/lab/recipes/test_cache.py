import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forked_testbeds import forked_testbeds
from tacit.errors import ConfigError
from tacit_lab.recipes.data import cache
from tacit_lab.recipes.data.splits import Images, Split


def images(seed: int = 0) -> Images:
    random = torch.Generator().manual_seed(seed)
    return Images(
        *(
            Split(
                torch.randint(256, (n, 3, 4, 4), dtype=torch.uint8, generator=random),
                torch.arange(n, dtype=torch.uint8),
            )
            for n in (20, 6)
        )
    )


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to have been read; the cache is empty."""
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "data"
    path.write_bytes(b"data")
    return path


class Reader:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, path: Path) -> Images:
        self.calls += 1
        return images(self.calls)


def same(one: Images, other: Images) -> bool:
    return all(
        torch.equal(a.long(), b.long())
        for a, b in zip(one.train + one.test, other.train + other.test, strict=True)
    )


def only_file(source: Path) -> Path:
    (file,) = (source.parent / "cache").glob("*.images")
    return file


def test_what_was_read_once_is_not_read_again(source: Path) -> None:
    reader = Reader()
    for _ in range(3):
        got = cache.cached("kind", source, reader)
        assert same(got, images(1))
    assert reader.calls == 1
    assert got.train.images.dtype == torch.uint8
    assert got.train.targets.dtype == torch.int64
    assert [file.name for file in only_file(source).parent.glob("*.part")] == []


def test_images_that_were_handed_out_cannot_change_the_cache(source: Path) -> None:
    reader = Reader()
    cache.cached("kind", source, reader).train.images.zero_()
    assert same(cache.cached("kind", source, reader), images(1))
    assert reader.calls == 1


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [touched, lambda path: path.write_bytes(b"other data")])
def test_a_file_that_changed_is_read_again(source: Path, change: Callable[[Path], None]) -> None:
    reader = Reader()
    cache.cached("kind", source, reader)
    change(source)
    assert same(cache.cached("kind", source, reader), images(2))


def test_other_kinds_and_other_files_are_others(source: Path) -> None:
    reader = Reader()
    other = source.with_name("other")
    other.write_bytes(b"data")
    for kind, path in (("kind", source), ("other", source), ("kind", other)):
        cache.cached(kind, path, reader)
    assert reader.calls == 3


def test_a_folder_changes_with_any_file_in_it(source: Path) -> None:
    reader, folder = Reader(), source.with_name("folder")
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_bytes(b"x")
    for expected in (1, 1):
        cache.cached("kind", folder, reader)
        assert reader.calls == expected
    touched(folder / "deep" / "file")
    cache.cached("kind", folder, reader)
    (folder / "more").touch()
    cache.cached("kind", folder, reader)
    assert reader.calls == 3


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: flipped(content, -1),
        lambda content: flipped(content, 5000),
        lambda content: flipped(content, 3),
        lambda content: content[:-1],
        lambda content: content[:4096],
        lambda content: content[:100],
        lambda content: b"",
        lambda content: b"[]".ljust(4096),
        lambda content: b"\xff" * 5000,
        lambda content: content + b"x",
    ],
)
def test_a_damaged_cache_is_made_anew(source: Path, damage: Callable[[bytes], bytes]) -> None:
    reader = Reader()
    cache.cached("kind", source, reader)
    file = only_file(source)
    file.write_bytes(damage(file.read_bytes()))
    assert same(cache.cached("kind", source, reader), images(2))
    assert same(cache.cached("kind", source, reader), images(2))


def test_data_that_cannot_be_read_leaves_no_trace(source: Path) -> None:
    def refuse(path: Path) -> Images:
        raise ConfigError("bad data")

    with pytest.raises(ConfigError, match="bad data"):
        cache.cached("kind", source, refuse)
    assert [file.name for file in (source.parent / "cache").iterdir()] == ["lock"]


def test_what_a_killed_process_left_is_written_over(source: Path) -> None:
    reader = Reader()
    cache.cached("kind", source, reader)
    file = only_file(source)
    file.rename(file.with_suffix(".part"))
    assert same(cache.cached("kind", source, reader), images(2))
    assert not file.with_suffix(".part").exists()


def test_a_cache_that_cannot_be_written_is_an_error(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(source / "cache"))
    with pytest.raises(ConfigError, match=r"cannot be kept in .*data/cache: .*Set TACIT_CACHE to a folder"):
        cache.cached("kind", source, Reader())


def test_what_was_made_is_kept_and_made_again_if_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    made = iter([b"first", b"second", b"third", b""])
    assert cache.kept("thing", lambda: next(made)) == b"first"
    assert cache.kept("thing", lambda: next(made)) == b"first"
    file = tmp_path / "cache" / "thing"
    for damaged, again in ((b"", b"second"), (file.read_bytes()[:-1], b"third"), (b"x" * 9, b"")):
        file.write_bytes(damaged)
        assert cache.kept("thing", lambda: next(made)) == again
        assert cache.kept("thing", lambda: next(made)) == again


def test_what_cannot_be_kept_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path))
    (tmp_path / "thing").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be kept in .*: Is a directory\. Set TACIT_CACHE"):
        cache.kept("thing", lambda: b"content")


def test_missing_data_is_said(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is nothing at .*absent"):
        cache.cached("kind", source.with_name("absent"), Reader())


def test_a_link_to_nowhere_is_said(source: Path) -> None:
    folder = source.with_name("folder")
    folder.mkdir()
    (folder / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"folder/link cannot be read: No such file"):
        cache.cached("kind", folder, Reader())


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TACIT_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.folder() == tmp_path / ".cache" / "tacit"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the specification
    assert cache.folder() == tmp_path / ".cache" / "tacit"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache.folder() == tmp_path / "caches" / "tacit"
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "mine"))
    assert cache.folder() == tmp_path / "mine"


def _noting(path: Path) -> Images:
    """Reads, and leaves a file to be counted."""
    (path.parent / f"read-by-{os.getpid()}").touch()
    return images(1)


def _come(source: Path) -> int:
    return int(cache.cached("kind", source, _noting).train.images.long().sum())


def test_of_many_processes_that_come_at_once_one_reads(source: Path) -> None:
    expected = int(images(1).train.images.long().sum())
    with forked_testbeds(), multiprocessing.get_context("spawn").Pool(4) as pool:
        assert pool.map(_come, [source] * 8, chunksize=1) == [expected] * 8
    assert len(list(source.parent.glob("read-by-*"))) == 1
