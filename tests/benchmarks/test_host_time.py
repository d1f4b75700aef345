"""How much a bucket launches in stream order, as `benchmarks/host_time.py` counts it: no time is measured."""

import pytest

import host_time

MOST = {"dense": 7, "bf16": 7, "topk": 30, "efsign": 46, "powersgd": 30, "qsgd": 34, "dgc": 34}
"""Operations of torch that are launched for a bucket of two or three layers, of four ranks."""


def launched(algorithm: str) -> float:
    launches = host_time.Launches()
    with host_time.training(algorithm, launches) as step:
        for _ in range(host_time.WARM):
            step()
        launches.found.clear()
        launches.buckets = 0
        step()
    return launches.found.total() / launches.buckets


@pytest.mark.parametrize("algorithm", MOST)
def test_a_bucket_launches_no_more(algorithm: str) -> None:
    assert launched(algorithm) <= MOST[algorithm]


@pytest.mark.parametrize("algorithm", ["topk", "qsgd"])
def test_more_ranks_launch_no_more(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = launched(algorithm)
    monkeypatch.setattr(host_time, "RANKS", 16)
    assert launched(algorithm) == few
