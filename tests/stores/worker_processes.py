"""Workers and servers as real processes, with nobody above them that would end all at the first failure."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from forks import WARNINGS, Forked
from rank_processes import Ended, end, ended
from tacit_lab.testbed.launch import free_port

HERE = Path(__file__).resolve().parent


def _store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Crowd:
    """Processes that are gone when the block is left."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(32)
        self._stores = [_store()]
        self._all: list[subprocess.Popen[str]] = []

    def _start(self, command: Sequence[str], **env: object) -> subprocess.Popen[str]:
        common = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": WARNINGS}
        common |= {"TACIT_SERVER_SECRET": self.secret}
        process = Forked(command, os.environ | common | {key: str(value) for key, value in env.items()})
        self._all.append(process)
        return process

    def server(self, workers: int, *options: str, number: int = 0) -> tuple[str, subprocess.Popen[str]]:
        """A server that is listening; its address, and its process."""
        port = free_port()
        command = ["-m", "tacit.stores.server", "--workers", str(workers), "--port", str(port)]
        process = self._start([*command, "--number", str(number), *options])
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        return f"127.0.0.1:{port}", process

    def worker(self, world: int, rank: int, *arguments: str, **env: object) -> subprocess.Popen[str]:
        """A rank of a world of workers."""
        return self._start(
            [str(HERE / "training_worker.py"), *arguments],
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=self._stores[0].port,
            TORCHELASTIC_USE_AGENT_STORE="True",
            WORLD_SIZE=world,
            RANK=rank,
            LOCAL_RANK=rank,
            **env,
        )

    def alone(self, worker: int, workers: int, *arguments: str, **env: object) -> subprocess.Popen[str]:
        """A worker that is a world of its own."""
        self._stores.append(store := _store())
        return self._start(
            [str(HERE / "training_worker.py"), *arguments],
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=store.port,
            TORCHELASTIC_USE_AGENT_STORE="True",
            WORLD_SIZE=1,
            RANK=0,
            LOCAL_RANK=0,
            TACIT_WORKER=worker,
            TACIT_WORKERS=workers,
            **env,
        )

    @staticmethod
    def ended(process: subprocess.Popen[str], seconds: float = 400) -> Ended:
        """Wait for its end."""
        return ended(process, seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end(self._all)
