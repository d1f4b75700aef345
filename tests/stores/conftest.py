"""Servers in threads of this process, for workers in other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shared_secret import SECRET

from tacit.stores.server.process import ServerProcess


@pytest.fixture(autouse=True)
def _on_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def serve() -> Iterator[Callable[..., ServerProcess]]:
    """Starts a server; at the end, each has come to its own end."""
    threads: list[tuple[threading.Thread, ServerProcess]] = []

    def start(
        workers: int, checkpoint: Path | None = None, every: float = 30.0, **options: Any
    ) -> ServerProcess:
        kept = None if checkpoint is None else (checkpoint, every)
        host = ServerProcess(workers, 0, secret=SECRET, **{"timeout": 20.0, "checkpoint": kept} | options)
        thread = threading.Thread(target=host.run, daemon=True)
        thread.start()
        threads.append((thread, host))
        host.thread = thread  # type: ignore[attr-defined]
        return host

    yield start
    for thread, host in threads:
        host.stop()
        thread.join(10)
        assert not thread.is_alive()
