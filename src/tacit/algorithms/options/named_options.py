"""How compressed gradients meet, and when rounds of a period leave and land, as the text form names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, TypeAlias

from tacit import checks, compressors, topologies  # of which only those load that are asked for
from tacit.contracts import Compressor, Topology
from tacit.overlap import Bucketwise, Delayed
from tacit.rounds import Every

Way: TypeAlias = Literal["all-gather", "two-phase", "hierarchical", "auto"]
"""The parameter `topology` of an algorithm.

"all-gather": every rank gets the payloads of all, and adds them up; all that was sent arrives. "two-phase":
each rank averages a slice for all, and sends the mean compressed again. "hierarchical": dense inside each
machine first, and the machine's mean is compressed and sent to the other machines, each rank a slice of it.
"auto": the session picks all-gather or two phases.
"""

AdditiveWay: TypeAlias = (
    Literal[
        "all-reduce",
        "direct",
        "ring",
        "halving-doubling",
        "double-tree",
        "torus",
        "blueconnect",
        "link-tree",
        "hierarchical",
        "two-phase",
        "auto",
    ]
    | str
)
"""The same where payloads may add up: also the shapes of an all-reduce.

"all-reduce" and "auto" take the backend's own. "direct": each rank sends all to every other one, in one round
trip. "torus-2x4" has two rows of four ranks; "blueconnect-8x4x2"
has nodes of eight ranks, racks of four nodes, and two racks: levels, with neighbours first. "link-tree" goes
by the links, which are measured when it is attached.
"""

_NUMBERED = r"(torus|blueconnect)-(\d{1,9}(?:x\d{1,9})+)"
_WAYS: dict[str, Callable[[], Topology]] = {
    "all-gather": lambda: topologies.Flat(),
    "two-phase": lambda: topologies.TwoPhase(),
    "auto": lambda: topologies.Auto(),
    "all-reduce": lambda: topologies.Flat(),
    "direct": lambda: topologies.Direct(),
    "ring": lambda: topologies.Ring(),
    "halving-doubling": lambda: topologies.HalvingDoubling(),
    "double-tree": lambda: topologies.DoubleTree(),
    "torus": lambda: topologies.Torus(),
    "blueconnect": lambda: topologies.BlueConnect(),
    "link-tree": lambda: topologies.LinkTree(),
    "hierarchical": lambda: topologies.Hierarchical(),
}

ADDED_UP: dict[str, Callable[[], Compressor]] = {
    "none": lambda: compressors.Dense(),
    "bf16": lambda: compressors.BF16(),
}
FEW_BITS = ADDED_UP | {"int8": lambda: compressors.Int8()}
"""The parameter `compressor` of algorithms whose point is another one; `ADDED_UP`: where payloads must add
up."""


def way(topology: str) -> Topology:
    """The topology of that name, the numbers after it included.

    Raises:
        ConfigError: there is none.
    """
    name, numbers = topology, tuple[int, ...]()
    if isinstance(topology, str) and (found := re.fullmatch(_NUMBERED, topology)):
        name, numbers = found[1], tuple(map(int, found[2].split("x")))
    checks.one_of("topology", name, tuple(_WAYS))
    if not numbers:
        return _WAYS[name]()
    if name == "torus":
        return topologies.Torus(sides=numbers)
    return topologies.BlueConnect(factors=numbers)


def staggered(sync_every: int, fragments: int, delay: int) -> tuple[Every, Bucketwise | Delayed]:
    """Rounds of each of so many parts of the model, every `sync_every` steps, in turn.

    Args:
        delay: how many steps after its round a part's answer is applied; training goes on until then.

    Raises:
        ConfigError: one of them is not possible.
    """
    hint = "write 5, or 0 for fragments that land at once"
    checks.whole("fragment_sync_delay", delay, 0, None, hint)
    return Every(sync_every, fragments), Delayed(delay) if delay else Bucketwise()
