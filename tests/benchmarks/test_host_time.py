"""How much a bucket launches in stream order, as `benchmarks/host_time.py` counts it: no time is measured."""

import json
import os
from pathlib import Path

import pytest

import host_time
from forks import ran

MOST = {
    "dense": 7,
    "bf16": 8,
    "topk": 24,
    "efsign": 46,
    "powersgd": 26,
    "qsgd": 34,
    "dgc": 34,
    "lowbit:sync_every=1": 42,
}
"""Operations of torch that are launched for a bucket of two or three layers, of four ranks."""
SAME = ("topk",)
"""Counted among 16 ranks, too."""

Counts = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def launched() -> Counts:
    script, benchmarks = Path(__file__).with_name("host_launches.py"), Path(host_time.__file__).parent
    path = os.pathsep.join((str(benchmarks), os.environ.get("PYTHONPATH", "")))
    done = ran(str(script), ",".join(MOST), ",".join(SAME), PYTHONPATH=path)
    assert done.code == 0, done.err
    counts: Counts = json.loads(done.out.splitlines()[-1])
    return counts


@pytest.mark.parametrize("algorithm", MOST)
def test_a_bucket_launches_no_more(algorithm: str, launched: Counts) -> None:
    assert launched["few"][algorithm] <= MOST[algorithm]


@pytest.mark.parametrize("algorithm", SAME)
def test_more_ranks_launch_no_more(algorithm: str, launched: Counts) -> None:
    assert launched["many"][algorithm] == launched["few"][algorithm]
