"""At its end a process waits for threads that still want to run, and not for ever."""

import subprocess
import sys

import pytest

SCRIPT = """
import hashlib, threading, time
from tacit.transports.thread_shutdown import settle

def busy(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        hashlib.sha256(bytes(1 << 20)).digest()  # without the interpreter's lock

thread = threading.Thread(target=busy, args=({seconds},), daemon=True)
thread.start()
print(settle(limit={limit}), thread.is_alive())
"""


@pytest.mark.parametrize(
    ("seconds", "limit", "said"),
    [(0.3, 60, "True False"), (60, 0.3, "False True")],
    ids=["it waits", "and not for ever"],
)
def test_threads_are_waited_for(seconds: float, limit: float, said: str) -> None:
    script = SCRIPT.format(seconds=seconds, limit=limit)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said


def test_threads_that_sleep_are_not() -> None:
    script = SCRIPT.format(seconds=0, limit=60).replace(
        "busy(seconds):", "busy(seconds):\n    time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True True"
