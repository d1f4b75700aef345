"""A vote on the sign of every entry (signSGD with majority vote: Bernstein et al., ICML 2018, ICLR 2019)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts import AddingCodec, Context, Payload
from tacit.kernels.dispatch import on_host
from tacit.kernels.payload_layout import BLOCK, block_count
from tacit.kernels.payloads import SignPayload, expect_parts
from tacit.kernels.philox import philox
from tacit.kernels.signs import add_signs_, encode_signs

GROUP = 64
"""Size of a group of entries for which a rank abstains if all are 0."""
PIECE = 1 << 14
"""Entries processed at a time where some are 0; whole blocks, and whole bytes of groups."""
LARGE = 1 << 20
"""The same on a device."""


@dataclass(frozen=True)
class MajoritySign(AddingCodec):
    """Send the sign of every entry; the answer is the sign of their sum.

    Bytes: ceil(n / 8) + ceil(n / 512), to P - 1 peers. The answer is 1, -1, or 0 where the vote is a tie,
    whatever the gradient's size. So every entry moves by the learning rate in every step: choose it as for
    Adam, a hundred to a thousand times smaller than for SGD, and let it fall. Clipping by norm, and weight
    decay as a part of the gradient, mean nothing here. All parameters take part, also biases: the answer has
    one scale only.

    The paper's sign of 0 is 0, which one bit cannot encode. Where 64 entries side by side are 0, as in rows
    of an embedding that no batch has used, the rank abstains there. Single zeros alternate: they vote +1 in
    one round and -1 in the next, and of two neighbouring ranks one votes +1 and one -1. So what is 0 on all
    ranks is a tie where their number is even; else it oscillates by the learning rate, and does not drift.

    Differences from the paper: ranks exchange votes with each other (all-gather), as there is no server;
    single zeros; ties give 0, except with `TwoPhase`, which must be chosen: there they vote as single zeros.
    Under `ErrorFeedback` the residual would be the difference from 1, which is not meant: use `Sign`.
    """

    sliceable: ClassVar[bool] = True
    on_device: ClassVar[bool] = True

    def exempts(self, shape: torch.Size) -> bool:
        """No parameter: a dense bias would have another scale than votes."""
        return False

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """(packed signs; for each 64 entries a bit: whether all are 0)."""
        numel = x.numel()
        bits = ctx.scratch("bits", x, (-(-numel // 8),), torch.uint8)
        means = ctx.scratch("means", x, (block_count(numel),), torch.float32)
        abstains = ctx.scratch("abstains", x, (-(-numel // (8 * GROUP)),), torch.uint8)
        encode_signs(x, bits, means, None)
        abstains.zero_()
        if not x.is_meta and (not on_host(x) or int(torch.count_nonzero(x)) < numel):
            size = PIECE if on_host(x) else LARGE
            for start in range(0, numel, size):
                _vote_of_zeros(x[start : start + size], start, bits, means, abstains, ctx)
        return bits, abstains

    def check(self, payload: Payload, out: Tensor) -> None:
        """Expects signs, and the bits of abstention."""
        numel = out.numel()
        signs = ("signs", -(-numel // 8), torch.uint8)
        expect_parts(payload, numel, signs, ("abstentions", -(-numel // (8 * GROUP)), torch.uint8))

    def decode_mean_(self, payloads: Sequence[Payload], out: Tensor) -> None:
        """Add up the votes, and keep the sign of the sum."""
        for payload in payloads:
            self.check(payload, out)
        self.add_(payloads, 1.0, out, fresh=True)
        out.sign_()

    def add_(self, payloads: Sequence[Payload], weight: float, out: Tensor, fresh: bool) -> None:
        add_signs_([_vote(payload) for payload in payloads], weight, out, fresh)
        for _, abstains in payloads:
            if not out.is_meta:
                _withdraw(abstains, weight, out)


def _vote(payload: Payload) -> SignPayload:
    bits, _ = payload
    return bits, torch.ones(1, device=bits.device, dtype=torch.float32), None


def _vote_of_zeros(
    piece: Tensor, start: int, bits: Tensor, means: Tensor, abstains: Tensor, ctx: Context
) -> None:
    """Encode a part again if it may hold zeros, which otherwise all vote +1."""
    zeros = piece == 0
    if on_host(piece) and not bool(zeros.any()):
        return
    size = piece.numel()
    groups = -(-size // GROUP)
    empty = zeros.new_ones(groups * GROUP)
    empty[:size] = zeros
    empty = empty.view(groups, GROUP).all(1)
    first = start // (8 * GROUP)
    abstains[first : first + -(-groups // 8)] = _packed(empty)
    votes = _turned(piece, zeros, start, ctx)
    votes.view(-1).masked_fill_(_of_groups(empty)[:size], 1.0)
    span = slice(start // BLOCK, -(-(start + size) // BLOCK))
    encode_signs(votes, bits[start // 8 : start // 8 + -(-size // 8)], means[span], None)


def _turned(piece: Tensor, zeros: Tensor, start: int, ctx: Context) -> Tensor:
    """A copy of the part that begins at `start`, in which zeros vote in alternation."""
    if not on_host(piece):
        at = torch.arange(start, start + piece.numel(), device=piece.device)
        return torch.where(zeros, _by_turns(at, ctx).to(piece.dtype), piece)
    at = zeros.nonzero().squeeze(1)
    votes = piece.clone()
    votes[at] = _by_turns(at + start, ctx).to(votes.dtype)
    return votes


def _by_turns(at: Tensor, ctx: Context) -> Tensor:
    """1 or -1: random for the entry, alternating with rounds and ranks."""
    seed = zlib.crc32(f"{ctx.seed}|{ctx.name}|{ctx.prefix}|by turns".encode())
    chance = philox(seed, at)[0]
    return 1 - 2 * ((chance + ctx.round + ctx.rank) & 1)


def _packed(flags: Tensor) -> Tensor:
    padded = flags.new_zeros(-(-flags.numel() // 8) * 8)
    padded[: flags.numel()] = flags
    return (padded.view(-1, 8).to(torch.uint8) << _bits(flags)).sum(1, dtype=torch.uint8)


def _of_groups(each: Tensor) -> Tensor:
    """Each group's value, repeated for its entries."""
    return each.unsqueeze(1).expand(-1, GROUP).reshape(-1)


def _withdraw(abstains: Tensor, weight: float, out: Tensor) -> None:
    """Subtract the votes for groups in which the rank abstains."""
    if on_host(out) and not bool(abstains.any()):
        return
    flags = ((abstains.unsqueeze(1) >> _bits(abstains)) & 1).view(-1).bool()
    if not on_host(out):
        out.sub_(_of_groups(flags)[: out.numel()].to(out.dtype), alpha=weight)
        return
    for group in torch.split(flags.nonzero().squeeze(1), PIECE // GROUP):
        at = (group.unsqueeze(1) * GROUP + torch.arange(GROUP, device=out.device)).view(-1)
        at = at[at < out.numel()]
        out.index_add_(0, at, out.new_full((1,), -weight).expand(at.numel()))


def _bits(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
