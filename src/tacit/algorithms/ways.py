"""How compressed gradients meet, and when rounds of a period leave and land, as the text form names it."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from tacit import checks
from tacit.compressors.cast import BF16
from tacit.compressors.dense import Dense
from tacit.compressors.int8 import Int8
from tacit.contracts import Compressor
from tacit.overlap import Bucketwise, Delayed
from tacit.rounds import Every
from tacit.topologies.auto import Auto
from tacit.topologies.flat import Flat
from tacit.topologies.on_axis import OnAxis
from tacit.topologies.shapes import BlueConnect, DoubleTree, HalvingDoubling, LinkTree, Ring, Torus
from tacit.topologies.two_phase import TwoPhase

Way: TypeAlias = Literal["all-gather", "two-phase", "auto"]
"""The parameter `topology` of an algorithm.

"all-gather": every rank gets the payloads of all, and adds them up; all that was sent arrives. "two-phase":
each rank averages a slice for all, and sends the mean compressed again. "auto": the session picks.
"""

AdditiveWay: TypeAlias = (
    Literal[
        "all-reduce",
        "ring",
        "halving-doubling",
        "double-tree",
        "torus",
        "blueconnect",
        "link-tree",
        "two-phase",
        "auto",
    ]
    | str
)
"""The same where payloads may add up: also the shapes of an all-reduce.

"all-reduce" and "auto" take the backend's own. "torus-2x4" has two rows of four ranks; "blueconnect-8x4x2"
has nodes of eight ranks, racks of four nodes, and two racks: levels, with neighbours first. "link-tree" goes
by the links, which are measured when it is attached.
"""

_NUMBERED = r"(torus|blueconnect)-(\d{1,9}(?:x\d{1,9})+)"
_WAYS: dict[str, OnAxis] = {"all-gather": Flat(), "two-phase": TwoPhase(), "auto": Auto()}
_SHAPES: dict[str, OnAxis] = {
    "all-reduce": Flat(),
    "ring": Ring(),
    "halving-doubling": HalvingDoubling(),
    "double-tree": DoubleTree(),
    "torus": Torus(),
    "blueconnect": BlueConnect(),
    "link-tree": LinkTree(),
}

ADDED_UP: dict[str, Compressor] = {"none": Dense(), "bf16": BF16()}
FEW_BITS = ADDED_UP | {"int8": Int8()}
"""The parameter `compressor` of algorithms whose point is another one; `ADDED_UP`: where payloads must add
up."""


def way(topology: str) -> OnAxis:
    """The topology of that name, the numbers behind it included.

    Raises:
        ConfigError: there is none.
    """
    name, numbers = topology, tuple[int, ...]()
    if isinstance(topology, str) and (found := re.fullmatch(_NUMBERED, topology)):
        name, numbers = found[1], tuple(map(int, found[2].split("x")))
    known = _WAYS | _SHAPES
    checks.one_of("topology", name, tuple(known))
    if not numbers:
        return known[name]
    return Torus(sides=numbers) if name == "torus" else BlueConnect(factors=numbers)


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
