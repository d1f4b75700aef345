"""Random bits that are a function of a seed and a counter: Philox4x32-10 (Salmon et al., SC 2011).

No state is kept, so any entry's bits can be drawn alone, in any order, on any device; the compiled versions
are in `numba.primitives`, `numba.levels_wide` and `triton.primitives`.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox(seed: int, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 random bits (int64, never negative) for each entry of `counter` (int64).

    The key is `seed` (64 bits); the counter's 128 bits are that of `counter` and zeros.
    """
    a, b = counter & _LOW, counter >> 32
    c, d = torch.zeros_like(a), torch.zeros_like(a)
    key0, key1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(ROUNDS):
        # Products wrap around at 64 bits, signed; their two halves are the right ones all the same.
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (q >> 32 & _LOW) ^ b ^ key0, q & _LOW, (p >> 32 & _LOW) ^ d ^ key1, p & _LOW
        key0, key1 = (key0 + WEYL[0]) & _LOW, (key1 + WEYL[1]) & _LOW
    return a, b, c, d


def random_uint16(
    seed: int, first: int, rows: int, stride: int, lanes: int, device: torch.device | str = "cpu"
) -> Tensor:
    """16 random bits an entry (int64, rows x 8 lanes): row r uses the counters from `first + r * stride` on.

    With w(i, k) the word k of counter i, a row is w(0, 0), w(1, 0), ..., w(lanes - 1, 0), w(0, 1), ..., each
    word giving its low half and then its high half.
    """
    row = torch.arange(rows, device=device).unsqueeze(1) * stride + first
    words = torch.stack(philox(seed, row + torch.arange(lanes, device=device)), dim=1)
    return torch.stack((words & 0xFFFF, words >> 16), dim=-1).view(rows, 8 * lanes)


def uniform(seed: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """`count` numbers in [0, 1), float64 of 53 random bits each; the same on every device."""
    if torch.device(device).type == "meta":  # where each operation below takes torch a millisecond
        return torch.empty(count, dtype=torch.float64, device=device)
    a, b, c, d = philox(seed, torch.arange((count + 1) // 2, device=device))
    high, low = torch.stack((a, c), dim=1).view(-1), torch.stack((b, d), dim=1).view(-1)
    return (((high >> 5) << 26) + (low >> 6))[:count].double() * 2.0**-53
