"""What a server reads of its own checkpoint before it lets a worker in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from known import SECRET
from services import BACK, N, World, one

from tacit.errors import ConfigError
from tacit.server.averager import Averager
from tacit.server.checkpoint import Saved, StateSlice
from tacit.server.host import Host
from tacit.server.keeper import Keeper
from tacit.server.rules import Adam
from tacit.topologies import Asynchronous, Star
from tacit.transports.messages import About

WORKERS = 2
ABOUT = About(Star(), (), (("a", (N,), "float32", None),))


def shard(averages: bool, begun: bool = True) -> Mapping[str, Any]:
    """What a service has saved after a round, or before it had parameters."""
    star = Star(Asynchronous(), optimizer="server")
    service = Averager(WORKERS, "a/0") if averages else Keeper(WORKERS, star, BACK, Adam(), "a/0")
    world = World(service, WORKERS)
    for i in range(WORKERS if begun else 0):
        world.enter(i)
    for i in range(WORKERS if begun else 0):
        world.push(i, one(i))
    return service.save(world.state)


def kept(path: Path, shards: object, workers: int = WORKERS) -> StateSlice:
    """A file with these, and who reads it."""
    StateSlice(path, 30.0, workers).save(lambda: Saved(ABOUT, shards), last=True)  # type: ignore[arg-type]
    return StateSlice(path, 30.0, WORKERS)


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    shards = {"a/0": shard(averages=True), "a/1": shard(averages=False)}
    shards |= {"a/2": shard(averages=True, begun=False), "a/3": shard(averages=False, begun=False)}
    found = kept(tmp_path / "server.pt", shards).load()
    assert found is not None
    assert found.about == ABOUT
    assert found.shards.keys() == shards.keys()
    assert found.shards["a/0"]["number"] == 1
    assert torch.equal(found.shards["a/1"]["x"], shards["a/1"]["x"])


def test_a_server_that_begins_sweeps_what_a_killed_one_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = {"a/0": shard(averages=True)}
    kept(tmp_path / "server0.pt", shards)
    monkeypatch.setattr(Path, "replace", lambda *_: None)  # as if it were killed before
    for path in (tmp_path / "server0.pt", tmp_path / "server1.pt"):
        StateSlice(path, 30.0, WORKERS).save(lambda: Saved(ABOUT, shards), last=True)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 3
    for number in range(2):
        Host(WORKERS, 0, secret=SECRET, kept=tmp_path / f"server{number}.pt")._entrance.close()
        assert len(list(tmp_path.iterdir())) == 2 - number
    assert [*tmp_path.iterdir()] == [tmp_path / "server0.pt"]


LACKING = "what it has of 'a/0' is no state of a server"
OTHERS = "what it has of 'a/0' is not of 2 workers"


@pytest.mark.parametrize(
    ("averages", "changes", "why"),
    [
        (False, {"clocks": None}, LACKING),
        (False, {"version": None}, LACKING),
        (False, {"rule": [1]}, LACKING),
        (False, {"clocks": [1, 1, 1]}, OTHERS),
        (False, {"clocks": [1]}, OTHERS),
        (False, {"clocks": [1, "1"]}, OTHERS),
        (False, {"x": [1.0] * N}, "the parameters of 'a/0' are no tensor"),
        (True, {"number": None}, LACKING),
        (True, {"number": "1"}, LACKING),
        (True, {"owed": None}, LACKING),
    ],
)
def test_a_bucket_that_is_not_whole_is_named(
    tmp_path: Path, averages: bool, changes: dict[str, Any], why: str
) -> None:
    whole = {**shard(averages), **changes}
    whole = {name: value for name, value in whole.items() if value is not None}
    refused(tmp_path, {"b/0": shard(averages), "a/0": whole}, why)


@pytest.mark.parametrize("other", [None, 1, "text", [], torch.zeros(3)], ids=str)
def test_a_bucket_that_is_no_mapping_is_named(tmp_path: Path, other: object) -> None:
    refused(tmp_path, {"a/0": other}, LACKING)


@pytest.mark.parametrize("shards", [None, [], {1: {}}], ids=str)
def test_what_has_no_buckets_is_refused(tmp_path: Path, shards: object) -> None:
    refused(tmp_path, shards, "")


def refused(tmp_path: Path, shards: object, why: str) -> None:
    reader = kept(tmp_path / "server.pt", shards)
    with pytest.raises(ConfigError, match=rf"server\.pt is no checkpoint of a server .*{why}.* move it away"):
        reader.load()
