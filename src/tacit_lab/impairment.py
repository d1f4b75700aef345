"""What a link does to packets, but for its rate and its latency: loss, jitter, an MTU, a NAT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

from tacit.errors import ConfigError

_SMALLEST, ETHERNET, _LARGEST = 576, 1500, 9000
"""Bytes of a packet: what every host takes, of Ethernet, and of its jumbo frames."""
HEADERS = 52
"""Bytes of a packet that are no payload: of IP, and of TCP with time stamps."""
NAT = "nat"
EXAMPLES = (
    "Write for example 2x2@100mbit (2 nodes of 2 ranks, 100 Mbit/s links), 4x1@1gbit,20ms (with latency), "
    "4x1@100mbit,30ms±2ms,1%loss,mtu=1280 (with jitter, loss and small packets), "
    "4x1@100mbit,1ms,2places=30ms (at two places), 2x2 (links at full speed) or local:4 (4 plain local "
    "processes)."
)
"""How clusters are written, for messages."""


@dataclass(frozen=True, order=True)
class Impairment:
    """What else a link does to the packets that its node sends.

    Attributes:
        loss: The share that is lost, each by chance.
        jitter: The most seconds by which a packet is earlier or later than the latency says, each by chance.
        mtu: The bytes of the largest packet, with its IP header.
        nat: Whether the node is as behind a NAT: it opens connections, and nobody opens one to it.
    """

    loss: float = 0.0
    jitter: float = 0.0
    mtu: int = ETHERNET
    nat: bool = False

    def __post_init__(self) -> None:
        """Refuse values that no link can have."""
        if not 0 <= self.loss < 1:
            raise ConfigError(
                f"a link cannot lose {100 * self.loss:g} % of its packets: write 0 % or more, and less than "
                f"100 %. {EXAMPLES}"
            )
        if not (math.isfinite(self.jitter) and self.jitter >= 0):
            raise ConfigError(f"a jitter cannot be {self.jitter} s: it must be 0 or more. {EXAMPLES}")
        if not _SMALLEST <= self.mtu <= _LARGEST:
            raise ConfigError(
                f"an MTU cannot be {self.mtu} bytes: write {_SMALLEST}, which every host takes, to "
                f"{_LARGEST:,}. {EXAMPLES}"
            )

    @property
    def of_single_packets(self) -> bool:
        """Whether it differs from packet to packet."""
        return self.loss > 0 or self.jitter > 0

    def words(self) -> list[str]:
        """Its parts of a cluster's text, but for the jitter, which is written with the latency."""
        lost = [f"{(Decimal(repr(float(self.loss))) * 100).normalize():f}%loss"] if self.loss else []
        small = [f"mtu={self.mtu}"] if self.mtu != ETHERNET else []
        return [*lost, *small, *([NAT] if self.nat else [])]
