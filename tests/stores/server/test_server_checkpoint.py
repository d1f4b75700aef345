"""What a server reads of its own checkpoint before it lets a worker in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from scheduled_service import BACK, N, World, one
from shared_secret import SECRET

from tacit.errors import ConfigError
from tacit.stores.messages import RunSpec
from tacit.stores.server.allowed_types import ALLOWED_TYPES
from tacit.stores.server.averaging_service import AveragingService
from tacit.stores.server.checkpoint import CheckpointFile, ServerSnapshot
from tacit.stores.server.optimizers import ServerAdam
from tacit.stores.server.parameter_service import ParameterService
from tacit.stores.server.process import ServerProcess
from tacit.topologies import Asynchronous, Star

WORKERS = 2
RUN = RunSpec(Star(), (), (("a", (N,), "float32", None),))


def shard(averages: bool, begun: bool = True) -> Mapping[str, Any]:
    """What a service has saved after a round, or before it had parameters."""
    star = Star(Asynchronous(), optimizer="server")
    service = (
        AveragingService(WORKERS, "a/0")
        if averages
        else ParameterService(WORKERS, star, BACK, ServerAdam(), "a/0")
    )
    world = World(service, WORKERS)
    for i in range(WORKERS if begun else 0):
        world.enter(i)
    for i in range(WORKERS if begun else 0):
        world.push(i, one(i))
    return service.save(world.state)


def kept(path: Path, shards: object, workers: int = WORKERS) -> CheckpointFile:
    """A file with these, and who reads it."""
    CheckpointFile((path, 30.0), workers, ALLOWED_TYPES).save(lambda: ServerSnapshot(RUN, shards), last=True)  # type: ignore[arg-type]
    return CheckpointFile((path, 30.0), WORKERS, ALLOWED_TYPES)


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    shards = {"a/0": shard(averages=True), "a/1": shard(averages=False)}
    shards |= {"a/2": shard(averages=True, begun=False), "a/3": shard(averages=False, begun=False)}
    found = kept(tmp_path / "server.pt", shards).load()
    assert found is not None
    assert found.run == RUN
    assert found.buckets.keys() == shards.keys()
    assert found.buckets["a/0"]["number"] == 1
    assert torch.equal(found.buckets["a/1"]["x"], shards["a/1"]["x"])


def test_a_server_that_begins_sweeps_what_a_killed_one_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = {"a/0": shard(averages=True)}
    kept(tmp_path / "server0.pt", shards)
    monkeypatch.setattr(Path, "replace", lambda *_: None)  # as if it were killed before
    for path in (tmp_path / "server0.pt", tmp_path / "server1.pt"):
        CheckpointFile((path, 30.0), WORKERS, ALLOWED_TYPES).save(
            lambda: ServerSnapshot(RUN, shards), last=True
        )
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 3
    for number in range(2):
        ServerProcess(
            WORKERS, 0, secret=SECRET, checkpoint=(tmp_path / f"server{number}.pt", 30.0)
        )._listener.close()
        assert len(list(tmp_path.iterdir())) == 2 - number
    assert [*tmp_path.iterdir()] == [tmp_path / "server0.pt"]


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    kept(tmp_path / "server.pt", {"a/0": shard(averages=False)})
    saved = torch.load(tmp_path / "server.pt", weights_only=True)
    torch.save({**saved, "version": 3}, tmp_path / "server.pt")
    reader = CheckpointFile((tmp_path / "server.pt", 30.0), WORKERS, ALLOWED_TYPES)
    with pytest.raises(ConfigError, match="it is of version 3, and this tacit reads version 4"):
        reader.load()


OF = "what it has of 'a/0'"
NAN = torch.full((N,), float("nan"))


@pytest.mark.parametrize(
    ("averages", "changes", "why"),
    [
        (False, {"clocks": None}, f"{OF} lacks 'clocks'"),
        (False, {"version": None}, f"{OF} lacks 'version'"),
        (False, {"version": -1}, f"{OF}.version is -1, where 0 to"),
        (False, {"late": True}, f"{OF}.late is 'True', where int"),
        (False, {"stale": {"a": 1}}, f"{OF}.stale has the key 'a'"),
        (False, {"optimizer": [1]}, f"{OF}.optimizer is .* where dict"),
        (False, {"optimizer": {"m": NAN}}, f"{OF}.optimizer.m holds NaN"),
        (False, {"optimizer": {"m": torch.ones(N + 1)}}, f"m of 'a/0' has the shape .{N + 1}"),
        (False, {"clocks": [1, 1, 1]}, f"{OF} is not of 2 workers"),
        (False, {"clocks": [1]}, f"{OF} is not of 2 workers"),
        (False, {"clocks": [1, "1"]}, rf"{OF}.clocks\[1\] is '1', where int"),
        (False, {"x": [1.0] * N}, f"{OF}.x is .* where a tensor"),
        (False, {"x": NAN}, f"{OF}.x holds NaN"),
        (False, {"x": NAN.to(torch.complex64)}, f"{OF}.x is of torch.complex64"),
        (False, {"more": 1}, f"{OF} has 'more'"),
        (True, {"number": None}, f"{OF} lacks"),
        (True, {"number": "1"}, f"{OF}.number is '1', where int"),
        (True, {"residuals": None}, f"{OF} lacks 'residuals'"),
        (True, {"residuals": {0: NAN}}, f"{OF}.residuals.0 holds NaN"),
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
    refused(tmp_path, {"a/0": other}, f"{OF} is .*, where SavedParameters belongs")


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    kept(tmp_path / "server.pt", {"a/0": shard(averages=False)})
    whole = bytearray((tmp_path / "server.pt").read_bytes())
    x = shard(averages=False)["x"].numpy().tobytes()
    whole[whole.index(x) + 3] ^= 1 << 5
    (tmp_path / "server.pt").write_bytes(whole)
    read = torch.load(tmp_path / "server.pt", weights_only=True)["buckets"]["a/0"]["x"]
    assert not torch.equal(read, shard(averages=False)["x"]), "torch.load does not notice"
    with pytest.raises(ConfigError, match=r"the checksum of its record .* is wrong"):
        CheckpointFile((tmp_path / "server.pt", 30.0), WORKERS, ALLOWED_TYPES).load()
    (tmp_path / "server.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="it is damaged, or cut short"):
        CheckpointFile((tmp_path / "server.pt", 30.0), WORKERS, ALLOWED_TYPES).load()


@pytest.mark.parametrize("shards", [None, [], {1: {}}], ids=str)
def test_what_has_no_buckets_is_refused(tmp_path: Path, shards: object) -> None:
    refused(tmp_path, shards, "")


def refused(tmp_path: Path, shards: object, why: str) -> None:
    reader = kept(tmp_path / "server.pt", shards)
    with pytest.raises(ConfigError, match=rf"server\.pt is no checkpoint of a server .*{why}.* move it away"):
        reader.load()
