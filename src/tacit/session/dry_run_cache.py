"""A cache of dry runs: the cost of an exchange depends on shapes and settings, and on no values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from threading import Lock

import torch

from tacit.contracts import AxisRank
from tacit.transports.meter import Cost, DryRun

CAPACITY = 1024
"""The number of dry runs that are remembered; the least recently used is dropped first."""
_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)

Place = Callable[[str], AxisRank]


@dataclass(frozen=True)
class Remembered:
    """A remembered dry run.

    Attributes:
        scratched: the buffers that it asked for; see `DryRun`.
        places: the rank's position on each axis that the exchange used.
    """

    cost: Cost
    scratched: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    places: Mapping[str, AxisRank]


class RememberedRuns:
    """The last dry runs of this process; safe for several threads."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity, self._lock = capacity, Lock()
        self._runs: OrderedDict[Hashable, Remembered] = OrderedDict()

    def run(
        self, key: tuple[Hashable, ...], work: DryRun, place: Place, run: Callable[[DryRun, Place], Cost]
    ) -> Cost:
        """The cost that `run` returns, which asks `work` for memory; remembered by key and positions.

        `key`: all that the cost depends on except positions. If a part of it is mutable, as a user's object
            can be, nothing is remembered.
        """
        if not unchanging(key):
            return run(work, place)
        with self._lock:
            found = self._runs.pop(key, None)
            if found is not None:
                self._runs[key] = found
        if found is None or any(place(axis) != there for axis, there in found.places.items()):
            found = self._made(key, place, run)
        work.ask_again(found.scratched)
        return found.cost

    def _made(self, key: Hashable, place: Place, run: Callable[[DryRun, Place], Cost]) -> Remembered:
        asked: dict[str, AxisRank] = {}

        def noted(axis: str) -> AxisRank:
            asked[axis] = place(axis)
            return asked[axis]

        work = DryRun()
        made = Remembered(run(work, noted), work.scratched, asked)
        with self._lock:
            self._runs[key] = made
            while len(self._runs) > self._capacity:
                self._runs.popitem(last=False)
        return made


def unchanging(value: object) -> bool:
    """Whether a value consists of frozen dataclasses, tuples, texts and numbers, so that equals act alike."""
    if isinstance(value, _VALUES):
        return True
    if isinstance(value, tuple):
        return all(map(unchanging, value))
    if isinstance(value, type) or not is_dataclass(value):
        return False
    # A subclass that is no dataclass itself may have attributes that comparing two of them ignores.
    own = vars(type(value)).get("__dataclass_params__")
    return own is not None and own.frozen and all(unchanging(getattr(value, f.name)) for f in fields(value))
