"""Two ranks on one GPU by Gloo: the numbers of the same ranks on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_ranks import ALGORITHMS

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def said() -> list[dict[str, object]]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(HERE / "gpu_ranks.py"),
    ]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert lines, ended.stdout + ended.stderr
    return lines


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_ranks_share_a_gpu(algorithm: str, said: list[dict[str, object]]) -> None:
    mine = [each for each in said if each["algorithm"] == algorithm]
    assert len(mine) == 2
    for each in mine:
        assert each["error"] is None, each["error"]
        assert each["apart"] < 2e-2  # matrices are multiplied in another order
