"""Three values an entry, five to a byte, runs of zeros in one (3LC: Lim, Andersen & Kaminsky 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from tacit import checks
from tacit.contracts import Context, Decoded, OneShot, Payload, Transmitted
from tacit.errors import PayloadError
from tacit.kernels.payload_layout import BLOCK, TRITS, block_count, pack_trits, unpack_trits
from tacit.kernels.payloads import expect_parts

_ZEROS = 121
"""A byte of five zeros: each is the code 1, and 1 + 3 + 9 + 27 + 81 is 121."""
_FIRST, _LONGEST = 243, 14
"""The first byte that stands for a run, of two such bytes; and the most that one byte stands for."""


@dataclass(frozen=True)
class ThreeLC(OneShot):
    """Send -M, 0 or M for each entry, M = sparsity x the largest magnitude of its block of 512.

    Bytes: at most ceil(n / 5) + 4 x ceil(n / 512). The paper's three steps (arXiv 1802.07389): an entry
    becomes the nearest of the three values; five of them are a byte (quartic encoding); and 2 to 14 bytes in
    a row that are all zeros become one (zero-run encoding), so that the length of a message depends on the
    values: ranks exchange lengths first, then pad their messages to the longest. Put `ErrorFeedback` around
    it, or what rounding leaves out is lost.

    Differences from the paper: an M for each block, not for each tensor; means come back as they are, where
    its server compresses them too, unless the topology is `TwoPhase`.

    Attributes:
        sparsity: s, from 1 to below 2. More makes more zeros, and shorter messages.
    """

    sparsity: float = 1.75

    additive: ClassVar[bool] = False
    on_device: ClassVar[bool] = True
    sliceable: ClassVar[bool] = True
    varies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.real("sparsity", self.sparsity, "write 1.75, or 1.0 for the fewest zeros", least=1, below=2)

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """(five entries a byte, M of each block)."""
        numel = x.numel()
        size, blocks = -(-numel // TRITS), block_count(numel)
        if x.is_meta:
            return x.new_empty(size, dtype=torch.uint8), x.new_empty(blocks, dtype=torch.float32)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rows = torch.nn.functional.pad(wide, (0, blocks * BLOCK - numel)).view(blocks, BLOCK)
        # M counts as 3.4e38 at most, so that s times the largest magnitude does not overflow.
        units = (rows.abs().amax(1).double() * self.sparsity).clamp(max=3.4e38).float()
        half = _spread(units, numel) / 2
        codes = (wide > half).long() - (wide < -half).long() + 1
        return pack_trits(codes.view(1, -1)), units

    def check(self, payload: Payload, out: Tensor) -> None:
        numel = out.numel()
        expect_parts(
            payload,
            numel,
            ("codes", -(-numel // TRITS), torch.uint8),
            ("M", block_count(numel), torch.float32),
        )

    def _decoded(self, payload: Payload, out: Tensor) -> Tensor:
        self.check(payload, out)
        codes, units = payload
        found = unpack_trits(codes, out.numel()).view(-1) - 1
        return found.to(out.dtype) * _spread(units, out.numel()).to(out.dtype)

    def decode_(self, payload: Payload, out: Tensor) -> None:
        out.copy_(self._decoded(payload, out))

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        out.add_(self._decoded(payload, out), alpha=weight)

    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        return Decoded(self, payload)

    def longest(self, payload: Payload, numel: int) -> int:
        """The Ms, and bytes of which none are a run."""
        return 4 * block_count(numel) + -(-numel // TRITS)

    def shortened(self, payload: Payload, numel: int) -> Tensor:
        """The Ms, and then the bytes with their runs."""
        codes, units = payload
        zeros, counts = torch.unique_consecutive(codes, return_counts=True)
        runs = zeros == _ZEROS
        # Of a run of L bytes L // 14 are the last byte, and what is left a shorter run, or one byte alone.
        whole, rest = counts // _LONGEST, counts % _LONGEST
        full = torch.where(runs, whole, 0)
        tail = torch.where(runs, (rest > 0).long(), counts)
        ends = torch.where(runs & (rest > 1), _FIRST - 2 + rest, zeros.long())
        repeats = torch.stack((full, tail), dim=1).view(-1)
        last = torch.full_like(ends, _FIRST - 2 + _LONGEST)
        message = torch.stack((last, ends), dim=1).view(-1).repeat_interleave(repeats).to(torch.uint8)
        return torch.cat((units.view(torch.uint8), message))

    def shortened_on_device(self, payload: Payload, numel: int) -> tuple[Tensor, Tensor]:
        """The same bytes: of a run those at which a byte for it ends are sent, and of the others all."""
        codes, units = payload
        zeros, place = codes == _ZEROS, torch.arange(1, len(codes) + 1, device=codes.device)
        run = place - torch.where(zeros, 0, place).cummax(0).values
        run = (run - 1) % _LONGEST + 1
        last = torch.ones_like(zeros)
        last[:-1] = ~zeros[1:]
        ends = ~zeros | last | (run == _LONGEST)
        found = torch.where(zeros & (run > 1), _FIRST - 2 + run, codes).to(torch.uint8)
        message = codes.new_empty(units.nbytes + len(codes) + 1)
        message[: units.nbytes].copy_(units.view(torch.uint8))
        to = torch.where(ends, ends.cumsum(0) - 1, len(codes))
        message[units.nbytes :].scatter_(0, to, found)
        return message[:-1], (ends.sum() + units.nbytes).to(torch.int32)

    def restore_(self, message: Tensor, numel: int, payload: Payload) -> None:
        """Write codes and Ms."""
        lengths = torch.tensor([message.numel()], dtype=torch.int32)
        whole = self._restored(message.unsqueeze(0), lengths, *(each.unsqueeze(0) for each in payload))
        if not bool(whole.all()):
            raise PayloadError(
                f"a message of {message.numel()} bytes about {numel} entries is damaged, or cut short"
            )

    def restore_on_device_(self, messages: Tensor, lengths: Tensor, numel: int, payloads: Payload) -> None:
        """The same; an M is NaN where a message is damaged."""
        whole = self._restored(messages, lengths, *payloads)
        payloads[1].masked_fill_(~whole.unsqueeze(1), torch.nan)

    def _restored(self, messages: Tensor, lengths: Tensor, codes: Tensor, units: Tensor) -> Tensor:
        """Write codes and Ms, a row for each message; whether each is whole. Else they are anything."""
        size, ahead = codes.shape[1], units[0].nbytes
        messages = pad(messages, (0, max(0, ahead + 1 - messages.shape[1])))
        found = messages[:, ahead:].long()
        there = torch.arange(found.shape[1], device=found.device) < (lengths - ahead).unsqueeze(1)
        counts = torch.where(found >= _FIRST, found - _FIRST + 2, 1) * there
        whole = (counts.sum(1) == size) & (lengths >= ahead)
        one = torch.zeros_like(counts)
        one[:, :1].fill_(size)
        counts = torch.where(whole.unsqueeze(1), counts, one)  # as many as there is room for
        found = torch.where(found >= _FIRST, _ZEROS, found).view(-1)
        codes.copy_(found.repeat_interleave(counts.view(-1), output_size=codes.numel()).view_as(codes))
        units.view(torch.uint8).copy_(messages[:, :ahead])
        return whole


def _spread(units: Tensor, numel: int) -> Tensor:
    """Each block's M for each of its entries."""
    return units.repeat_interleave(BLOCK)[:numel]
