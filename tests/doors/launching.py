"""Start ranks as real processes, without a launcher that would end them at the first failure."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, the JSON objects it printed, and everything else."""

    code: int
    said: list[dict[str, object]]
    text: str


def ranks(
    script: str, world: int, *arguments: str, seconds: float = 90, lost: int | None = None
) -> list[Ended]:
    """Run `script` (in this folder) on `world` ranks; this process hosts their store, as launchers do.

    The rank `lost` is not waited for: it is killed when the others have ended.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "error::FutureWarning,error::DeprecationWarning",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        ended = {rank: _ended(p, seconds) for rank, p in enumerate(processes) if rank != lost}
        return [ended[rank] if rank != lost else _ended(_killed(p), 5) for rank, p in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _killed(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    process.kill()
    return process


def _ended(process: subprocess.Popen[str], seconds: float) -> Ended:
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        text = f"(still running after {seconds} s)\n{text}"
    said = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return Ended(process.returncode, said, text)
