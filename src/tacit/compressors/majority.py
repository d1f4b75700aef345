"""A vote on the sign of every entry (signSGD with majority vote: Bernstein et al., ICML 2018, ICLR 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts import Context, Decoded, OneShot, Payload, Sent
from tacit.kernels.payloads import expect_parts
from tacit.kernels.signs import Values, add_signs_, blocks, encode_signs


@dataclass(frozen=True)
class MajoritySign(OneShot):
    """Send the sign of every entry; the answer is the sign of their sum: ceil(n / 8) bytes, to P - 1 peers.

    The answer is 1, -1, or 0 where the vote is a tie, whatever the gradient's size; a rank votes 1 for an
    entry that is 0. So every entry moves by the learning rate in every step: choose it as for Adam, a hundred
    to a thousand times smaller than for SGD, and let it fall. Clipping by norm, and weight decay as a part of
    the gradient, mean nothing here. All parameters take part, also biases: the answer has one scale only.
    Differences from the paper: ranks exchange votes with each other (all-gather), as there is no server; ties
    give 0, but in `TwoPhase`, which must be told: one bit sends them back as 1. Under `ErrorFeedback` it
    would owe the difference from 1 and is not made for that: use `Sign`.
    """

    additive: ClassVar[bool] = False

    def exempts(self, shape: torch.Size) -> bool:
        """A dense bias among votes would live on another scale."""
        return False

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """(packed signs,)."""
        bits = ctx.scratch("bits", x, (-(-x.numel() // 8),), torch.uint8)
        encode_signs(x, bits, ctx.scratch("means", x, (blocks(x.numel()),), torch.float32), None)
        return (bits,)

    def check(self, payload: Payload, out: Tensor) -> None:
        """Signs alone."""
        expect_parts(payload, out.numel(), ("signs", -(-out.numel() // 8), torch.uint8))

    def decode_(self, payload: Payload, out: Tensor) -> None:
        """A vote alone: 1 or -1."""
        self.check(payload, out)
        add_signs_([_vote(payload)], 1.0, out, fresh=True)

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        """Add a vote."""
        self.check(payload, out)
        add_signs_([_vote(payload)], weight, out, fresh=False)

    def decode_mean_(self, payloads: Sequence[Payload], out: Tensor) -> None:
        """Count the votes, and keep the sign."""
        for payload in payloads:
            self.check(payload, out)
        add_signs_([_vote(payload) for payload in payloads], 1.0, out, fresh=True)
        out.sign_()

    def sent(self, payload: Payload, x: Tensor) -> Sent:
        """This rank's vote."""
        return Decoded(self, payload)


def _vote(payload: Payload) -> Values:
    (bits,) = payload
    return bits, torch.ones(1, device=bits.device), None
