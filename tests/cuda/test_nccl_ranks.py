"""Four ranks of NCCL on one GPU, which NCCL allows from 2.30 on: messages that travel, in stream order."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("kernels", "planning", "suite")]
from nccl_ranks import CHECKS, LOST

from tacit.levels.gpu_checks import nccl_version

HERE = Path(__file__).resolve().parent


pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and nccl_version() < (2, 30),
    reason="NCCL before 2.30 refuses two ranks on one GPU: preload a newer libnccl.so.2",
)


@pytest.fixture(scope="module")
def said() -> list[dict[str, object]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone"]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "PYTHONPATH": os.pathsep.join([*sys.path]),
    }
    ended = subprocess.run(
        [*command, str(HERE / "nccl_ranks.py")], capture_output=True, text=True, timeout=400, env=env
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"check"')]
    assert lines, ended.stdout + ended.stderr
    return lines


@pytest.mark.parametrize("name", CHECKS)
def test_ranks_share_a_gpu_by_nccl(name: str, said: list[dict[str, object]]) -> None:
    mine = [each for each in said if each["check"] == name]
    assert len(mine) == (3 if name == LOST else 4), "not every rank has come so far"
    for each in mine:
        assert each["error"] is None, each["error"]
