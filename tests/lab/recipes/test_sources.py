import gzip
from pathlib import Path

import pytest
from image_files import as_archive, as_folder

from tacit.errors import ConfigError
from tacit_lab.recipes.data import sources

FILES = {"top/a.txt": b"first", "top/deep/b.bin": bytes(range(256)) * 50, "top/empty": b""}
HIDDEN = {"top/.hidden": b"x", "__MACOSX/top/._a.txt": b"x"}
ARCHIVES = ["data.tar", "data.tar.gz", "data.tar.xz", "data.tar.bz2", "data.zip"]


def content(path: Path) -> dict[str, bytes]:
    return {str(file.name): file.read(1 << 22) for file in sources.files(path)}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_holds_what_was_put_in(tmp_path: Path, name: str) -> None:
    assert content(as_archive(tmp_path / name, {**HIDDEN, **FILES})) == FILES


def test_a_folder_is_read_in_the_order_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "_MANY_FILES", 2)
    folder = as_folder(tmp_path, {**HIDDEN, **dict(reversed(FILES.items()))})
    assert content(folder) == FILES
    assert list(content(folder)) == ["top/a.txt", "top/empty", "top/deep/b.bin"]
    said = f"{folder} holds more than 2 files, and all are looked at: is it the data?"
    assert capsys.readouterr().err.count(said) == 1, "and who waits knows why"


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_is_known_by_its_content_not_its_name(tmp_path: Path, name: str) -> None:
    path = as_archive(tmp_path / name, FILES).rename(tmp_path / "data")
    assert content(path) == FILES


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("files", [1, 2, 3])
def test_an_archive_that_was_cut_short_is_refused(tmp_path: Path, name: str, files: int) -> None:
    """Anywhere: also where one file ends and the next would begin."""
    whole = as_archive(tmp_path / name, FILES).read_bytes()
    cuts = {len(whole) // 2, 20, len(whole) - 4}
    if name == "data.tar":  # where a file ends, where its header does, and within both
        some = as_archive(tmp_path / "some.tar", dict(list(FILES.items())[:files])).read_bytes()
        end = -(-len(some.rstrip(b"\0")) // 512) * 512
        cuts = {end, end - 100, 512, 1024, 1024 + 100, 3000}
    for cut in cuts:
        path = tmp_path / "cut"
        path.write_bytes(whole[:cut])
        with pytest.raises(ConfigError, match=r"cut (cannot be read to its end|is no archive)"):
            content(path)


@pytest.mark.parametrize("name", ["data.tar.gz", "data.tar.xz", "data.tar.bz2", "data.zip"])
def test_a_damaged_archive_is_refused(tmp_path: Path, name: str) -> None:
    path = as_archive(tmp_path / name, {"noise": b"".join(bytes([i * i % 251]) for i in range(5000))})
    bad = bytearray(path.read_bytes())
    bad[len(bad) // 3] ^= 0x55
    path.write_bytes(bad)
    with pytest.raises(ConfigError, match=r"cannot be read to its end|is packed"):
        content(path)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    for name, data in (
        ("text", b"hello"),
        ("nothing", b""),
        ("image.png", b"\x89PNG\r\n\x1a\n" + bytes(900)),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=rf"{name} is no archive that can be read: give a folder, or"):
            content(tmp_path / name)
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"hello" * 500))
    with pytest.raises(ConfigError, match=r"text.gz is packed, but what is in it is no archive"):
        content(tmp_path / "text.gz")


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is nothing at .*absent: give a folder or an archive"):
        content(tmp_path / "absent")
