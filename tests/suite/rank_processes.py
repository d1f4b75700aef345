"""Start ranks as real processes, without a launcher that would end them at the first failure."""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from forks import WARNINGS, Forked


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, the JSON objects it printed, and everything else."""

    code: int
    said: list[dict[str, object]]
    text: str


def ranks(
    script: str,
    world: int,
    *arguments: str,
    seconds: float = 240,
    lost: int | None = None,
    fresh: Collection[int] = (),
    hosted: bool = False,
) -> list[Ended]:
    """Run `script` on `world` ranks, as if on nodes of two; this process hosts their store.

    The script is in a folder on `sys.path`, and imports from those. Where the store is to be `hosted` by rank
    0, it is not. The rank `lost` is not waited for: it is killed when the others have ended. Ranks are forked
    from a process that has imported torch, but those that are to be `fresh`, with a hash seed of their own.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(not hosted),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": WARNINGS,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    if hosted:
        del store  # which frees the port
    program = next(file for folder in sys.path if (file := Path(folder) / script).is_file())
    processes = [
        (started if rank in fresh else Forked)(
            [str(program), *arguments],
            env | {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)},
        )
        for rank in range(world)
    ]
    try:
        others = {rank: ended(p, seconds) for rank, p in enumerate(processes) if rank != lost}
        return [others[rank] if rank != lost else ended(_killed(p), 5) for rank, p in enumerate(processes)]
    finally:
        end(processes)


def started(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """A new interpreter."""
    return subprocess.Popen(
        [sys.executable, *argv], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(processes: Iterable[subprocess.Popen[str]]) -> None:
    """Leave none of them behind."""
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _killed(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    process.kill()
    return process


def ended(process: subprocess.Popen[str], seconds: float) -> Ended:
    """Wait for its end."""
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        text = f"(still running after {seconds} s)\n{text}"
    said = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return Ended(process.returncode, said, text)


def assert_passed(name: str, ended: list[Ended]) -> None:
    """Hold that the check of this name passed on every rank of a launch of `replicas.Checks`."""
    said = [{entry["check"]: entry["error"] for entry in each.said} for each in ended]
    # Of a rank that fails alone, the others say a time-out at best.
    errors = "\n".join(f"rank {rank}:\n{each[name]}" for rank, each in enumerate(said) if each.get(name))
    assert not errors, errors
    for rank, each in enumerate(ended):
        assert name in said[rank], f"rank {rank} did not get there:\n{each.text[-3000:]}"
