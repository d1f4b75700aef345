"""An entropy coder for the packed codes of `blockwise`: rANS (Duda 2013, arXiv 1311.2540).

Levels near zero are frequent, so that a code takes fewer bits than its packed width. Codes are coded in
groups, as that takes fewer steps: the five of a byte where they have 2 bits, else two. A message says how
often each code occurs, in 4096ths, and then all groups in as many bits as these shares ask for. Pieces of
16384 groups are coded each by itself, so that a GPU works on all of them in parallel; in each there are
eight streams that take turns, for a processor's sake. The length is known only when it is made.

    kind: a byte       0: the packed codes follow, as they would be no longer; 1: what stands below
    shares             uint16 for each of 2^bits - 1 codes; their sum is 4096
    counts             uint16 for each piece but the last: its words
    states             8 of uint32 for each piece: where the streams end, and decoding begins
    words              uint16, as the streams take them, piece by piece
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tacit.errors import PayloadError
from tacit.kernels import dispatch
from tacit.kernels.payload_layout import BLOCK, TRITS, block_bytes, blocks_bytes
from tacit.kernels.reference import entropy as reference

PACKED, CODED = 0, 1
SHARES = 1 << 12
"""What the shares of a message add up to."""
PIECE = 1 << 14
"""Groups that are coded by themselves; 34 bytes are added for each of them but the first."""
GROUPS = {2: (3, TRITS), 3: (8, 2), 4: (16, 2)}
"""By bits, how a group is made of codes: as the digits of a number, and how many."""


def longest(numel: int, bits: int) -> int:
    """The most bytes of a message about `numel` entries."""
    return 1 + blocks_bytes(numel, bits)


def encode_codes(codes: Tensor, bits: int, numel: int) -> Tensor:
    """The message (uint8) of the packed codes of `numel` entries of 2 to 4 bits, as of `encode_blocks`."""
    groups = _groups(codes, bits, numel)
    shares = _shares(_counted(groups, bits))
    pieces = piece_count(numel, bits)
    states, counts = np.empty((pieces, reference.STREAMS), np.uint32), np.empty(pieces, np.int64)
    words = np.empty(len(groups) + 1, np.uint16)
    _coder().encode(groups, PIECE, _frequencies(shares, bits), states, words, counts)
    used = int(counts.sum())
    size = head_bytes(numel, bits) + 2 * used
    if not numel or size >= longest(numel, bits):
        return torch.cat((torch.tensor([PACKED], dtype=torch.uint8), codes))
    table, ahead = shares.astype(np.uint16), counts[:-1].astype(np.uint16)
    parts = np.array([CODED], np.uint8), table, ahead, states.reshape(-1), words[len(words) - used :]
    return torch.from_numpy(np.concatenate([part.view(np.uint8) for part in parts]))


def decode_codes(message: Tensor, bits: int, numel: int, codes: Tensor) -> None:
    """Write the packed codes of a message to `codes` (uint8).

    Raises:
        PayloadError: it is damaged, cut short, or of other entries; `codes` is as it was.
    """
    count = (1 << bits) - 1
    raw: NDArray[np.uint8] = message.numpy()
    head, pieces = head_bytes(numel, bits), piece_count(numel, bits)
    if len(raw) == longest(numel, bits) and raw[0] == PACKED:
        codes.copy_(message[1:])
        return
    if not (head <= len(raw) < longest(numel, bits) and raw[0] == CODED and (len(raw) - head) % 2 == 0):
        raise PayloadError(f"a message of {len(raw)} bytes about {numel} codes of {bits} bits is not whole")
    shares = raw[1 : 1 + 2 * count].copy().view(np.uint16).astype(np.int64)
    if int(shares.sum()) != SHARES:
        raise PayloadError(
            f"the shares of {count} codes add up to {int(shares.sum())}, where {SHARES} are expected: the "
            "message is damaged"
        )
    ahead = 1 + 2 * count + 2 * (pieces - 1)
    states = raw[ahead:head].copy().view(np.uint32).reshape(pieces, -1)
    groups, words = np.empty(group_count(numel, bits), np.uint8), raw[head:].copy().view(np.uint16)
    counts = np.zeros(pieces, np.int64)
    counts[:-1] = raw[1 + 2 * count : ahead].copy().view(np.uint16)
    counts[-1] = len(words) - counts.sum()
    freqs = _frequencies(shares, bits)
    if counts[-1] < 0 or not _coder().decode(freqs, PIECE, states, counts, words, groups):
        raise PayloadError(
            f"a message about {numel} codes of {bits} bits does not end as it began: it is damaged"
        )
    _ungroup(groups, bits, numel, codes.numpy())


def encode_on_device(codes: Tensor, bits: int, numel: int, message: Tensor) -> Tensor:
    """`encode_codes` into `message`, of the `longest`, without waiting; returns the length (int32), there."""
    return dispatch.run_opaque("entropy.encode_codes", _encode_by_host, codes, bits, numel, message)


def decode_on_device(messages: Tensor, lengths: Tensor, bits: int, numel: int, codes: Tensor) -> Tensor:
    """`decode_codes` of several messages at once, without waiting: a row of `messages` and `codes` for each.

    `lengths` (int32) are on the device. Returns numbers there that are 0 where a message is damaged.
    """
    return dispatch.run_opaque("entropy.decode_codes", _decode_by_host, messages, lengths, bits, numel, codes)


def _encode_by_host(codes: Tensor, bits: int, numel: int, message: Tensor) -> Tensor:
    """Without Triton: the host waits for the codes, and codes them."""
    found = encode_codes(codes.cpu(), bits, numel)
    message[: len(found)].copy_(found)
    return torch.full((), len(found), dtype=torch.int32, device=codes.device)


def _decode_by_host(messages: Tensor, lengths: Tensor, bits: int, numel: int, codes: Tensor) -> Tensor:
    good = torch.ones_like(lengths)
    for i, (message, length) in enumerate(zip(messages.cpu(), lengths.tolist(), strict=True)):
        found = torch.empty(codes.shape[1:], dtype=torch.uint8)
        try:
            decode_codes(message[: max(0, length)], bits, numel, found)
        except PayloadError:
            good[i] = 0
        else:
            codes[i].copy_(found)
    return good


def group_count(numel: int, bits: int) -> int:
    """How many groups the packed codes of `numel` entries make."""
    size = blocks_bytes(numel, bits)
    return size // 3 * 4 if bits == 3 else size


def piece_count(numel: int, bits: int) -> int:
    """How many pieces these are coded in; one at least."""
    return max(1, -(-group_count(numel, bits) // PIECE))


def head_bytes(numel: int, bits: int) -> int:
    """The bytes of a coded message before its words."""
    pieces = piece_count(numel, bits)
    return 1 + 2 * ((1 << bits) - 1) + 2 * (pieces - 1) + 4 * reference.STREAMS * pieces


def _coder() -> Any:
    return dispatch.numba_kernels("entropy") if dispatch.active_backend() == "numba" else reference


def _counted(groups: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """How often each code occurs: each group counts for all that it is made of."""
    radix, digits = GROUPS[bits]
    columns = np.zeros((reference.COLUMNS, 256), np.int64)
    _coder().count(groups, columns)
    table = columns.sum(0)[: radix**digits].reshape((radix,) * digits)
    counts: NDArray[np.int64] = sum(np.moveaxis(table, j, 0).reshape(radix, -1).sum(1) for j in range(digits))
    return counts[: (1 << bits) - 1]


def _shares(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each code occurs, in 4096ths: at least one where it occurs at all."""
    total = max(1, int(counts.sum()))
    return _filled(np.maximum(counts * SHARES // total, counts > 0), SHARES)


def _frequencies(shares: NDArray[np.int64], bits: int) -> NDArray[np.uint32]:
    """How often each group of codes occurs: the product of its codes' shares; at least one where all occur.

    So at most 243 are raised to one, and the most frequent has more than that to give.
    """
    radix, digits = GROUPS[bits]
    each = np.zeros(radix, np.int64)
    each[: len(shares)] = shares
    product = each
    for _ in range(digits - 1):
        product = np.multiply.outer(product, each)
    found = product.reshape(-1) >> ((SHARES.bit_length() - 1) * digits - reference.SCALE_BITS)
    return _filled(np.maximum(found, product.reshape(-1) > 0), reference.SLOTS).astype(np.uint32)


def _filled(parts: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Parts that add up to the total, as the largest one gives or takes the difference."""
    parts[int(parts.argmax())] += total - int(parts.sum())
    return parts


def _groups(codes: Tensor, bits: int, numel: int) -> NDArray[np.uint8]:
    """The groups of all codes, which may be `codes` itself."""
    packed: NDArray[np.uint8] = codes.numpy()
    if bits == 4:
        return packed
    if bits == 2:
        groups = packed.copy()
        _exchange_padding(groups, numel)
        return groups
    groups = np.empty(group_count(numel, bits), np.uint8)
    _coder().split(packed, groups)
    return groups


def _ungroup(groups: NDArray[np.uint8], bits: int, numel: int, codes: NDArray[np.uint8]) -> None:
    """`_groups`, back."""
    if bits == 3:
        _coder().join(groups, codes)
        return
    codes[:] = groups
    if bits == 2:
        _exchange_padding(codes, numel)


def _exchange_padding(groups: NDArray[np.uint8], numel: int) -> None:
    """Exchange 0, which whole blocks are padded with in their last bytes, and the middle level.

    As the middle level is frequent, padding then takes few bits.
    """
    lanes, middle = block_bytes(BLOCK, 2), 3 ** (TRITS - 1)
    blocks = groups[: numel // BLOCK * lanes].reshape(-1, lanes)
    padded = blocks[:, lanes - (lanes * TRITS - BLOCK) :]
    padded[:] = np.where(
        padded < middle, padded + middle, np.where(padded < 2 * middle, padded - middle, padded)
    )
