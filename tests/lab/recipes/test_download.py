"""From a server of this machine; nothing here asks the web."""

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tacit.errors import ConfigError
from tacit_lab.recipes.data import download
from tacit_lab.recipes.data.download import REMOTES, Remote

CONTENT = bytes(range(256)) * 100


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that has the file `data`; the cache is empty."""
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "data").write_bytes(CONTENT)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "web"))) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}/"
        serving.shutdown()
        thread.join()


def offered(monkeypatch: pytest.MonkeyPatch, *remotes: Remote) -> None:
    monkeypatch.setitem(REMOTES, "cifar10", remotes)


def remote(*addresses: str) -> Remote:
    digest = hashlib.sha256(CONTENT).hexdigest()
    return Remote(name="data", addresses=addresses, size=len(CONTENT), sha256=digest)


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())


def test_a_file_is_fetched_once(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered(monkeypatch, remote(server))
    assert download.fetched("cifar10") is None
    told: list[str] = []
    for _ in range(2):
        path = download.fetch("cifar10", told.append)
        assert path.read_bytes() == CONTENT
        assert download.fetched("cifar10") == path
    assert told == [f"fetching {server}data, 0.0256 MB"]
    assert left(tmp_path) == ["data"]


def test_another_address_is_tried_and_several_files_are_a_folder(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "web" / "more").write_bytes(CONTENT)
    both = remote(f"{server}absent/", server), replace(remote(server), name="more")
    offered(monkeypatch, *both)
    path = download.fetch("cifar10", lambda text: None)
    assert sorted(file.name for file in path.iterdir()) == ["data", "more"]
    (path / "more").unlink()
    assert download.fetched("cifar10") is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (CONTENT[:-1] + b"x", r"another checksum \(25,600 bytes of 25,600\)"),
        (CONTENT[:100], r"another checksum \(100 bytes of 25,600\)"),
        (CONTENT + b"x", "another checksum"),
        (None, "404"),
    ],
)
def test_what_is_not_the_file_is_refused(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, reason: str
) -> None:
    offered(monkeypatch, remote(server))
    if content is None:
        (tmp_path / "web" / "data").unlink()
    else:
        (tmp_path / "web" / "data").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"cannot download data: {server}data: .*{reason}.*--data PATH"):
        download.fetch("cifar10", lambda text: None)
    assert left(tmp_path) == []


def test_a_server_that_does_not_answer_is_said(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offered(monkeypatch, remote("http://127.0.0.1:1/"))
    with pytest.raises(ConfigError, match="refused"):
        download.fetch("cifar10", lambda text: None)


def test_checksums_are_whole_and_mnists_are_those_of_the_real_files() -> None:
    from image_files import real_data

    assert {len(bytes.fromhex(each.sha256)) for remotes in REMOTES.values() for each in remotes} == {32}
    folder = real_data("mnist")
    for each in REMOTES["mnist"]:
        content = (folder / each.name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (each.size, each.sha256)
