"""Workers and servers as real processes, with nobody above them that would end all at the first failure."""

from __future__ import annotations

import secrets
import socket
import subprocess
import time

from torch.distributed import TCPStore

from rank_processes import Processes, found, of_launcher, store_of_a_launcher
from tacit_lab.testbed.launch import free_port


class WorkerProcesses(Processes):
    """They share a secret, and are gone when the block is left."""

    def __init__(self) -> None:
        super().__init__()
        self.secret = secrets.token_hex(32)
        self._store, self._of_alone = store_of_a_launcher(), list[TCPStore]()

    def server(self, workers: int, *options: str, number: int = 0) -> tuple[str, subprocess.Popen[str]]:
        """A server that is listening; its address, and its process."""
        port = free_port()
        command = ["-m", "tacit.stores.server", "--workers", str(workers), "--port", str(port)]
        command += ["--number", str(number), *options]
        process = self.start(*command, TACIT_SERVER_SECRET=self.secret)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        return f"127.0.0.1:{port}", process

    def worker(
        self, world: int, rank: int, *arguments: str, script: str = "training_worker.py", **env: object
    ) -> subprocess.Popen[str]:
        """A rank of a world of workers."""
        common = of_launcher(self._store.port, rank, world, world) | {"TACIT_SERVER_SECRET": self.secret}
        return self.start(found(script), *arguments, **common | env)

    def alone(self, worker: int, workers: int, *arguments: str, **env: object) -> subprocess.Popen[str]:
        """A worker that is a world of its own."""
        self._of_alone.append(store := store_of_a_launcher())
        env |= {"MASTER_PORT": store.port, "TACIT_WORKER": worker, "TACIT_WORKERS": workers}
        return self.worker(1, 0, *arguments, **env)
