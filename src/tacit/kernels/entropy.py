"""An entropy coder for the packed codes of `blockwise`: rANS (Duda 2013, arXiv 1311.2540).

Levels near zero are frequent, so that a code takes fewer bits than its packed width. A message says how
often each code occurs, in 4096ths, and then all of them in as many bits as these shares ask for. There are
eight streams that take turns, so that a processor works at them side by side. It is for the host alone, and
its length is known only when it is made.

    kind: a byte       0: the packed codes follow, as they would be no longer; 1: what stands below
    shares             uint16 for each of 2^bits - 1 codes; their sum is 4096
    states             8 of uint32: where the streams end, and decoding begins
    words              uint16, as the streams take them
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tacit.errors import PayloadError
from tacit.kernels.dispatch import active_backend, numba_kernels
from tacit.kernels.layout import (
    BLOCK,
    block_bytes,
    blocks_bytes,
    pack_codes,
    pack_trits,
    unpack_codes,
    unpack_trits,
)
from tacit.kernels.numba.jit import address
from tacit.kernels.reference import entropy as reference

PACKED, CODED = 0, 1


def longest(numel: int, bits: int) -> int:
    """The most bytes of a message about `numel` entries."""
    return 1 + blocks_bytes(numel, bits)


def encode_codes(codes: Tensor, bits: int, numel: int) -> Tensor:
    """The message (uint8) of the packed codes of `numel` entries, as of `blockwise.encode_blocks`."""
    symbols = _unpacked(codes, bits, numel)
    states, words = np.empty(reference.STREAMS, np.uint32), np.empty(numel, np.uint16)
    freqs = _shares(_counted(symbols, (1 << bits) - 1))
    coder = numba_kernels("entropy") if active_backend() == "numba" else reference
    used = coder.encode(symbols, freqs, states, words) if numel else 0
    size = 1 + 2 * len(freqs) + states.nbytes + 2 * used
    if not numel or size >= longest(numel, bits):
        return torch.cat((torch.tensor([PACKED], dtype=torch.uint8), codes))
    parts = (np.array([CODED], np.uint8), freqs.astype(np.uint16), states, words[numel - used :])
    return torch.from_numpy(np.concatenate([part.view(np.uint8) for part in parts]))


def decode_codes(message: Tensor, bits: int, numel: int, codes: Tensor) -> None:
    """Write the packed codes of a message to `codes` (uint8).

    Raises:
        PayloadError: it is damaged, cut short, or of other entries; `codes` is as it was.
    """
    count = (1 << bits) - 1
    raw: NDArray[np.uint8] = message.numpy()
    head = 1 + 2 * count + 4 * reference.STREAMS
    if len(raw) == longest(numel, bits) and raw[0] == PACKED:
        codes.copy_(message[1:])
        return
    if not (head <= len(raw) < longest(numel, bits) and raw[0] == CODED and (len(raw) - head) % 2 == 0):
        raise PayloadError(f"a message of {len(raw)} bytes about {numel} codes of {bits} bits is not whole")
    freqs = raw[1 : 1 + 2 * count].copy().view(np.uint16).astype(np.uint32)
    if int(freqs.sum()) != reference.SLOTS:
        raise PayloadError(
            f"the shares of {count} codes add up to {int(freqs.sum())}, where {reference.SLOTS} are "
            "expected: the message is damaged"
        )
    states = raw[1 + 2 * count : head].copy().view(np.uint32)
    symbols = np.empty(numel, np.uint8)
    coder = numba_kernels("entropy") if active_backend() == "numba" else reference
    if not coder.decode(freqs, states, raw[head:].copy().view(np.uint16), symbols):
        raise PayloadError(
            f"a message about {numel} codes of {bits} bits does not end as it began: it is damaged"
        )
    codes.copy_(_packed(symbols, bits))


def _counted(symbols: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    if active_backend() != "numba":
        return np.bincount(symbols, minlength=count)
    columns = np.zeros((4, 256), np.int64)
    numba_kernels("entropy").count(symbols, columns)
    found: NDArray[np.int64] = columns.sum(0)[:count]
    return found


def _shares(counts: NDArray[np.int64]) -> NDArray[np.uint32]:
    """How often each symbol occurs, in 4096ths: at least one where it occurs at all."""
    total, slots = max(1, int(counts.sum())), reference.SLOTS
    shares = np.maximum(counts * slots // total, counts > 0)
    shares[int(shares.argmax())] += slots - int(shares.sum())
    return shares.astype(np.uint32)


def _unpacked(codes: Tensor, bits: int, numel: int) -> NDArray[np.uint8]:
    """A byte a code."""
    symbols = np.empty(numel, np.uint8)
    if active_backend() == "numba":
        kernels = numba_kernels("blockwise")
        kernels.unpack_all(address(codes), numel, bits, symbols.ctypes.data)
        return symbols
    whole = numel - numel % BLOCK
    at = whole // BLOCK * block_bytes(BLOCK, bits)
    for start, stop, packed, size in (
        (0, whole, codes[:at], BLOCK),
        (whole, numel, codes[at:], numel - whole),
    ):
        if stop > start:
            found = unpack_trits(packed, size) if bits == 2 else unpack_codes(packed, bits, size)
            symbols[start:stop] = found.reshape(-1).to(torch.uint8).numpy()
    return symbols


def _packed(symbols: NDArray[np.uint8], bits: int) -> Tensor:
    numel = len(symbols)
    codes = torch.empty(blocks_bytes(numel, bits), dtype=torch.uint8)
    if active_backend() == "numba":
        numba_kernels("blockwise").pack_all(symbols.ctypes.data, numel, bits, address(codes))
        return codes
    whole, at = numel - numel % BLOCK, 0
    for start, stop, size in ((0, whole, BLOCK), (whole, numel, numel - whole)):
        if stop > start:
            row = torch.from_numpy(symbols[start:stop]).to(torch.int64).view(-1, size)
            packed = pack_trits(row) if bits == 2 else pack_codes(row, bits)
            codes[at : at + len(packed)] = packed
            at += len(packed)
    return codes
