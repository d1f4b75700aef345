"""The benchmark of profiles: what is chosen, and that its last table adds up."""

from dataclasses import asdict

import pytest

import profiles
from tacit_lab.profiling.profile import RankProfile, Summary, ThreadProfile
from tacit_lab.profiling.stages import UNATTRIBUTED

MS = 1_000_000


def test_what_is_profiled_can_be_chosen() -> None:
    assert profiles._chosen(None, quick=False) == (tuple(profiles.MODELS), tuple(profiles.ARMS))
    assert profiles._chosen(None, quick=True) == (("vgg11",), ("ddp", "topk"))
    assert profiles._chosen("bytes,dgc", quick=True) == (["bytes"], ["dgc"])
    assert profiles._chosen("dgc", quick=False) == (tuple(profiles.MODELS), ["dgc"])
    with pytest.raises(SystemExit, match="--only vgg,tpk: write some of vgg11"):
        profiles._chosen("vgg,tpk,topk", quick=False)


def test_whole_rounds_are_measured() -> None:
    from tacit.algorithms import parse

    for algorithm in filter(None, profiles.ARMS.values()):
        parse(algorithm)
        period = algorithm.partition("sync_every=")[2].partition(",")[0]
        assert profiles.STEPS % int(period or 1) == 0


def test_servers_are_there_for_what_uses_them() -> None:
    served, alone = "4x1+1@100mbit", "4x1@100mbit"
    assert profiles._servers(served, "ps")
    assert profiles._servers(served, "lowbit:sync_every=2,late=1")
    assert not profiles._servers(alone, "lowbit")
    assert not any(profiles._servers(served, each) for each in ("", "ddp", "efsign"))
    assert "4x1@100mbit has none" in profiles._why_not(alone, "vgg11", "ps")
    assert not profiles._why_not(served, "vgg11", "ps")
    assert not profiles._why_not(alone, "vgg11", "lowbit")
    assert "AdamW" in profiles._why_not(alone, "bytes", "dgc")


def test_the_last_table_has_all_processor_time_by_kind_of_thread() -> None:
    names = {"main": 5, "tacit: lane": 3, "Gloo: sockets 1": 2, "Gloo: collectives 1": 1, "tacit-store": 0.5}
    stages = {"main": "forward", "tacit: lane": "encode"}
    threads = tuple(
        ThreadProfile(name, ({stages.get(name, UNATTRIBUTED): int(ms * MS)},)) for name, ms in names.items()
    )
    profile = RankProfile(rank=0, first=7, wall_ns=(9 * MS,), process_ns=(12 * MS,), threads=threads)
    row = {"model": "vgg11", "arm": "topk", "attached": "topk:ratio=0.01", "cluster": "4x1"}
    text = profiles.table([{**row, **asdict(Summary.of([profile]))}])
    assert "== vgg11 with topk:ratio=0.01 on 4x1" in text
    numbers = ["9.0", "12.0", "5.0", "3.0", "3.0", "1.0", "3.0"]
    assert text.splitlines()[-1].split() == ["vgg11", "topk", *numbers]
