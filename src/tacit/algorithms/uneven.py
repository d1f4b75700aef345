"""Synchronous SGD where one rank's link is slower than the others': averages in unequal spans.

    x <- x - lr * mean_r(g_r)

BytePS (Jiang et al., OSDI 2020) gives a server a share of the gradients by its bandwidth, so that all links
are done at once. Here each rank is a server, and the share is `topologies.uneven.cut`:

    the paper:                                         here:
    share of the CPU machines' and GPU machines'       Uneven.rates, cut
    servers, by their bandwidth (section 3)
    push, sum, pull, each in parts of 4 MB             AllToAll of a chunk, and of the mean of the one before
    shares from the numbers of machines                rates that are measured when it is attached

The numbers are DDP's but for the order in which ranks are added up.
"""

from __future__ import annotations

from typing import Literal

from tacit import checks
from tacit.algorithms.options.named_options import ADDED_UP
from tacit.algorithms.registry import algorithm
from tacit.errors import ConfigError
from tacit.strategy import Strategy
from tacit.topologies import Uneven


@algorithm(
    family="scheduled",
    paper="BytePS: Jiang et al. 2020, OSDI",
    compresses=False,
    changes="gradients are averaged in unequal spans: a rank with a slow link averages little for others",
)
def uneven(rates: str | None = None, compressor: Literal["none", "bf16"] = "none") -> Strategy:
    """Average in unequal spans; `rates` in Mbit/s, a rank each, as 1000/1000/100, or else measured."""
    checks.one_of("compressor", compressor, list(ADDED_UP))
    return Strategy(compressor=ADDED_UP[compressor](), topology=Uneven(rates=_read(rates)))


def _read(rates: str | None) -> tuple[float, ...]:
    if rates is None:
        return ()
    try:
        found = tuple(1e6 * float(word) for word in rates.split("/"))
    except (AttributeError, ValueError):
        found = (0.0,)
    if not all(0 < rate < float("inf") for rate in found):
        raise ConfigError(
            f"rates={rates!r} is not possible: write what each rank's link carries, in Mbit/s, such as "
            "rates=1000/1000/1000/100, or leave it out, to have it measured"
        )
    return found
