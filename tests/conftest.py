"""What tests in several folders share."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: its threads would spin for what is small here

# A shell has its background jobs ignore it, and what they start: commands under test are to be interrupted.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tacit.errors import TestbedError
from tacit.lab.cluster import Cluster
from tacit.lab.testbed import Testbed

Curves: TypeAlias = dict[str, list[tuple[int, float]]]


@pytest.fixture
def read_curves() -> Callable[[Path], Curves]:
    """Reads a run's event files: (step, value) by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder: Path) -> Curves:
        events = EventAccumulator(str(folder)).Reload()
        return {
            tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in sorted(events.Tags()["scalars"])
        }

    return read


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where the system does not permit namespaces, and only there."""
    try:
        with Testbed(Cluster(1, 1)):
            pass
    except TestbedError as error:
        if "does not permit" not in str(error):
            raise
        pytest.skip(str(error))
