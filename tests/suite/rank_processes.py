"""Start ranks and servers as real processes, without a launcher that would end them at the first failure."""

import json
import os
import subprocess
import sys
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fork_server import TAKEN_DOWN
from forks import WARNINGS, Fork


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, the JSON objects it printed, and everything else."""

    code: int
    said: list[dict[str, object]]
    text: str


class Processes(ExitStack):
    """Starts interpreters; none of them is left when the block is left."""

    def start(self, *argv: str, fresh: bool = False, **env: object) -> subprocess.Popen[str]:
        """As `python ARGV` with these variables besides; all that it prints goes into one pipe.

        It is forked from a process that has imported torch, or else `fresh`, with a hash seed of its own.
        """
        common = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": WARNINGS}
        common["PYTHONPATH"] = os.pathsep.join(sys.path)
        kind: Any = subprocess.Popen if fresh else Fork
        process: subprocess.Popen[str] = kind(
            [sys.executable, *argv],
            env=os.environ | common | {name: str(value) for name, value in env.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.callback(_end, process)
        return process

    @staticmethod
    def ended(process: subprocess.Popen[str], seconds: float = 560) -> Ended:
        """Wait for its end."""
        try:
            text, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            text = f"(still running after {seconds} s)\n{text}"
        said = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return Ended(process.returncode, said, text)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def found(script: str) -> str:
    """The file of this name in a folder on `sys.path`."""
    return str(next(file for folder in sys.path if (file := Path(folder) / script).is_file()))


def store_of_a_launcher() -> dist.TCPStore:
    """The store that a launcher hosts, in this process."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def of_launcher(port: int, rank: int, world: int, node: int) -> dict[str, object]:
    """The variables that a launcher gives a rank: its store is at `port`, and a node has `node` ranks."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "WORLD_SIZE": world,
        "RANK": rank,
        "LOCAL_RANK": rank % node,
        "GROUP_RANK": rank // node,
    }


def ranks(
    script: str,
    world: int,
    *arguments: str,
    seconds: float = 560,
    lost: int | None = None,
    fresh: Collection[int] = (),
    hosted: bool = False,
) -> list[Ended]:
    """Run `script` on `world` ranks, as if on nodes of two; this process hosts their store.

    The script is in a folder on `sys.path`, and imports from those. Where the store is to be `hosted` by rank
    0, it is not. The rank `lost` is not waited for: it is killed when the others have ended. Ranks are forked
    but for those that are to be `fresh`.
    """
    store = store_of_a_launcher()
    port, program = store.port, found(script)
    if hosted:
        del store  # which frees the port
    with Processes() as processes:
        all_ = []
        for rank in range(world):
            env = of_launcher(port, rank, world, 2) | {"TORCHELASTIC_USE_AGENT_STORE": not hosted}
            env |= {TAKEN_DOWN: 1} if rank == 0 and script.endswith("_checks.py") else {}
            all_.append(processes.start(program, *arguments, fresh=rank in fresh, **env))
        others = {rank: processes.ended(p, seconds) for rank, p in enumerate(all_) if rank != lost}
        if lost is not None:
            all_[lost].kill()
            others[lost] = processes.ended(all_[lost], 5)
    return [others[rank] for rank in range(world)]


def assert_passed(name: str, ended: list[Ended]) -> None:
    """Hold that the check of this name passed on every rank of a launch of `rank_training.Checks`."""
    said = [{entry["check"]: entry["error"] for entry in each.said} for each in ended]
    # Of a rank that fails alone, the others say a time-out at best.
    errors = "\n".join(f"rank {rank}:\n{each[name]}" for rank, each in enumerate(said) if each.get(name))
    assert not errors, errors
    for rank, each in enumerate(ended):
        assert name in said[rank], f"rank {rank} did not get there:\n{each.text[-3000:]}"
