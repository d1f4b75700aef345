"""A test without the mark `processes` starts none: what `make quick` runs."""

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

STARTS: dict[str, Callable[[], object]] = {
    "a command": lambda: subprocess.run(["true"], check=True),
    "a shell": lambda: os.system("true"),
    "a fork": os.fork,
    "a spawn": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    "a child of multiprocessing": lambda: multiprocessing.get_context("fork").Process(target=print).start(),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_a_test_that_starts_a_process_fails(start: Callable[[], object], guard: Any) -> None:
    with pytest.raises(AssertionError, match="belongs into PROCESSES"):
        start()
    assert guard.started, "else a test that goes on regardless would pass"
    guard.started.clear()


@pytest.mark.processes
def test_a_marked_one_may(guard: Any) -> None:
    subprocess.run(["true"], check=True)
    assert not guard.started
