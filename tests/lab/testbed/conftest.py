from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def programs() -> Path:
    return Path(__file__).parent / "programs"


@pytest.fixture
def processes_named(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], set[int]]:
    """Finds the processes of a name that this test has started, as other tests have some of their own."""
    mark = f"TACIT_TEST_OF={os.getpid()}"
    monkeypatch.setenv(*mark.split("="))

    def found(name: str) -> set[int]:
        there = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    named = (entry / "comm").read_text().strip() == name
                    if named and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        there.add(int(entry.name))
        return there

    return found
