"""A few bits an entry, entropy coded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.blockwise import VECTOR_BITS, Blockwise
from tacit.contracts import Compressor, Payload
from tacit.errors import PayloadError
from tacit.kernels.entropy import decode_codes, encode_codes, longest
from tacit.kernels.payload_layout import block_count


@dataclass(frozen=True)
class EntropyCoded(Blockwise):
    """`Blockwise` of 2 to 4 bits whose codes are entropy-coded by their frequencies (rANS: Duda 2013).

    The same bits arrive, in fewer bytes: of normally distributed entries 2.0 bits an entry in place of 3, and
    0.6 in place of 1.6. The length of a message depends on the values: it is sent ahead to a parameter
    server, and ranks exchange lengths first, then pad their messages to the longest. It is at most that of
    `Blockwise` and five bytes. Biases and norms are sent in 8 bits, uncoded.
    """

    on_device: ClassVar[bool] = False
    varies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.whole("bits", self.bits, 2, 4, "write 3, 2 or 4; codes of more bits cannot be shortened much")

    def exempted(self) -> Compressor:
        """`Blockwise` with 8 bits."""
        return Blockwise(VECTOR_BITS)

    def longest(self, payload: Payload, numel: int) -> int:
        """The units, and codes that cannot be shortened."""
        return 2 * block_count(numel) + longest(numel, self.bits)

    def shortened(self, payload: Payload, numel: int) -> Tensor:
        """The units as they are, and then the codes."""
        codes, units = payload
        message = encode_codes(codes.view(-1), self.bits, numel)
        return torch.cat((units.view(torch.uint8), message))

    def restore_(self, message: Tensor, numel: int, payload: Payload) -> None:
        """Write codes, and then units."""
        codes, units = payload
        size = 2 * block_count(numel)
        if message.numel() < size:
            raise PayloadError(f"a message of {message.numel()} bytes about {numel} entries is cut short")
        decode_codes(message[size:], self.bits, numel, codes)
        units.view(torch.uint8).copy_(message[:size])
