"""Entries in parts of falling magnitude, so that a sender may stop after any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.byte_coded import ByteCoded
from tacit.compressors.sparse_entries import Entries
from tacit.contracts import Decoded, OneShot, Payload, Transmitted
from tacit.errors import ConfigError, PayloadError
from tacit.kernels.payload_layout import position_bytes
from tacit.kernels.positions import pack_positions, scatter_add_, unpack_positions


@dataclass(frozen=True)
class InParts(ByteCoded):
    """Send the entries of `inner` in parts, those of largest magnitude first.

    All that a peer has is a prefix of them, so where a round ends early the largest entries have arrived
    (bounded loss: MLT, Wang et al., NSDI 2024). `Star(deadline=)` stops sending there. Each part has its own
    positions, which take up to twice as many bytes as those of all together.

    Attributes:
        inner: chooses entries and sends them exactly, such as `TopK()`.
        count: the number of parts, of equally many entries.
    """

    count: int = 16

    on_device: ClassVar[bool] = False
    partial: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.whole("count", self.count, 1, None, "write in how many parts entries are sent, such as 16")
        if not isinstance(self.inner, Entries) or not self.inner.exact:
            raise ConfigError(
                f"inner={self.inner!r} sends no exact entries that could be sorted by magnitude: write "
                "TopK(ratio=0.01)"
            )

    def decode_(self, payload: Payload, out: Tensor) -> None:
        self.check(payload, out)
        self.decode_add_(payload, out.zero_(), 1.0)

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        """Scatter-add of the entries that are there."""
        self.check(payload, out)
        values, packed = payload
        positions = unpack_positions(packed, out.numel(), len(values))
        scatter_add_(positions, values[: len(positions)], out, weight)

    def decode_mean_(self, payloads: Sequence[Payload], out: Tensor) -> None:
        OneShot.decode_mean_(self, payloads, out)

    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        """What peers decode."""
        return Decoded(self, payload)

    def of_sums(self, numel: int, peers: int) -> OneShot | None:
        """That of the inner codec."""
        return self.inner.of_sums(numel, peers)

    def _sizes(self, numel: int, payload: Payload) -> tuple[int, int, int]:
        """Entries of a part, the bytes of their values, and those of their positions."""
        size = -(-len(payload[0]) // self.count)
        return size, size * payload[0].element_size(), position_bytes(numel, size)

    def longest(self, payload: Payload, numel: int) -> int:
        """All parts."""
        return self.count * sum(self._sizes(numel, payload)[1:])

    def message_parts(self, payload: Payload, numel: int) -> list[Tensor]:
        """Values and positions of each part; of entries that the payload has, so that none is empty."""
        values, packed = payload
        positions = unpack_positions(packed, numel, len(values)).clone()
        size, _, of_positions = self._sizes(numel, payload)
        falling = values[: len(positions)].abs().argsort(descending=True, stable=True)
        found = []
        for some in torch.split(falling, size) if len(falling) else ():
            at = some.sort().values
            here = values.new_zeros(size)
            here[: len(at)] = values[at]
            bits = torch.empty(of_positions, dtype=torch.uint8)
            pack_positions(positions[at], numel, size, bits)
            found.append(torch.cat((here.view(torch.uint8), bits)))
        return found

    def shortened(self, payload: Payload, numel: int) -> Tensor:
        """All parts, one after the other."""
        return torch.cat([payload[1].new_empty(0), *self.message_parts(payload, numel)])

    def restore_(self, message: Tensor, numel: int, payload: Payload) -> None:
        """The entries of as many parts as the message has."""
        values, packed = payload
        size, of_values, of_positions = self._sizes(numel, payload)
        whole = of_values + of_positions
        if len(message) % whole or len(message) > self.count * whole:
            raise PayloadError(
                f"a message of {len(message)} bytes, where up to {self.count} parts of {whole} belong"
            )
        there, entries = [packed.new_empty(0, dtype=torch.int32)], [values[:0]]
        for part in torch.split(message, whole) if len(message) else ():
            at = unpack_positions(part[of_values:].contiguous(), numel, size).clone()
            there.append(at)
            entries.append(part[:of_values].clone().view(values.dtype)[: len(at)])
        positions, order = torch.cat(there).sort()
        n = len(positions)
        if n > len(values) or (n and (int(positions[-1]) >= numel or bool((positions.diff() <= 0).any()))):
            raise PayloadError(f"{n} positions of a peer are not different ones among {numel}: it is damaged")
        found = torch.cat(entries)[order]
        values.zero_()[:n] = found
        pack_positions(positions, numel, len(values), packed)
