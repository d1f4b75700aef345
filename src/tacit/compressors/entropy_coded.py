"""A few bits an entry, entropy coded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from tacit import checks
from tacit.compressors.blockwise import VECTOR_BITS, Blockwise
from tacit.contracts import Compressor, Payload
from tacit.errors import PayloadError
from tacit.kernels.entropy import (
    decode_codes,
    decode_on_device,
    encode_codes,
    encode_on_device,
    longest,
)
from tacit.kernels.payload_layout import block_count


@dataclass(frozen=True)
class EntropyCoded(Blockwise):
    """`Blockwise` of 2 to 4 bits whose codes are entropy-coded by their frequencies (rANS: Duda 2013).

    The same bits arrive, in fewer bytes: of normally distributed entries 2.0 bits an entry in place of 3, and
    0.6 in place of 1.6. The length of a message depends on the values: it is sent ahead to a parameter
    server, and ranks exchange lengths first, then pad their messages to the longest. It is at most that of
    `Blockwise` and five bytes. Biases and norms are sent in 8 bits, uncoded.
    """

    on_device: ClassVar[bool] = True
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

    def shortened_on_device(self, payload: Payload, numel: int) -> tuple[Tensor, Tensor]:
        """The same bytes."""
        codes, units = payload
        size = 2 * block_count(numel)
        message = torch.empty(self.longest(payload, numel), dtype=torch.uint8, device=codes.device)
        message[:size].copy_(units.view(torch.uint8))
        return message, encode_on_device(codes.view(-1), self.bits, numel, message[size:]) + size

    def restore_(self, message: Tensor, numel: int, payload: Payload) -> None:
        """Write codes, and then units."""
        codes, units = payload
        size = 2 * block_count(numel)
        if message.numel() < size:
            raise PayloadError(f"a message of {message.numel()} bytes about {numel} entries is cut short")
        units.view(torch.uint8).copy_(message[:size])
        decode_codes(message[size:], self.bits, numel, codes)

    def restore_on_device_(self, messages: Tensor, lengths: Tensor, numel: int, payloads: Payload) -> None:
        codes, units = payloads
        size = 2 * block_count(numel)
        messages = pad(messages, (0, max(0, size + 1 - messages.shape[1])))  # where all are cut short
        units.view(torch.uint8).copy_(messages[:, :size])
        good = decode_on_device(messages[:, size:], lengths - size, self.bits, numel, codes.flatten(1))
        units.masked_fill_((good == 0).unsqueeze(1), torch.nan)
