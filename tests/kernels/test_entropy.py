"""The entropy coder: what is coded is decoded, both versions give the same bytes, and damage is an error."""

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import for_each
from tacit.errors import PayloadError
from tacit.kernels import blockwise, dispatch, entropy
from tacit.kernels.payload_layout import (
    block_count,
    blocks_bytes,
    pack_codes,
    pack_trits,
    unpack_codes,
    unpack_trits,
)

SIZES = st.one_of(st.integers(0, 70), st.integers(500, 1100), st.just(512 * 9 + 77))


def codes_of(numel: int, bits: int, seed: int = 0) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    codes = torch.empty(blocks_bytes(numel, bits), dtype=torch.uint8)
    blockwise.encode_blocks(x, bits, codes, torch.empty(block_count(numel), dtype=torch.bfloat16))
    return codes


@settings(max_examples=30, deadline=None)
@given(SIZES, st.sampled_from([2, 3, 4]), st.integers(0, 3))
def test_what_is_coded_is_decoded_with_and_without_numba(numel: int, bits: int, seed: int) -> None:
    codes, messages = codes_of(numel, bits, seed), []
    for backend in ("numba", "torch"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "active_backend", lambda device="cpu", found=backend: found)
            messages.append(entropy.encode_codes(codes, bits, numel))
            assert messages[-1].numel() <= entropy.longest(numel, bits)
            back = torch.full_like(codes, 7)
            entropy.decode_codes(messages[-1], bits, numel, back)
            assert torch.equal(back, codes)
    assert torch.equal(*messages)


@for_each("bits", [2, 3, 4])
def test_many_pieces_are_coded_each_by_itself(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their words lie one behind the other; those of the last piece are what is left."""
    numel = 512 * 60 + 77
    codes = codes_of(numel, bits)
    monkeypatch.setattr(entropy, "PIECE", 1 << 20)
    whole = entropy.encode_codes(codes, bits, numel)
    monkeypatch.setattr(entropy, "PIECE", 1024)
    pieces, messages = entropy.piece_count(numel, bits), []
    assert pieces >= 7
    for backend in ("numba", "torch"):
        monkeypatch.setattr(dispatch, "active_backend", lambda device="cpu", found=backend: found)
        messages.append(entropy.encode_codes(codes, bits, numel))
        back = torch.full_like(codes, 7)
        entropy.decode_codes(messages[-1], bits, numel, back)
        assert torch.equal(back, codes)
    assert torch.equal(*messages)
    assert abs(messages[0].numel() - whole.numel() - 34 * (pieces - 1)) <= 16 * pieces
    counts = messages[0][1 + 2 * ((1 << bits) - 1) :][: 2 * (pieces - 1)]
    counts[:2], counts[2:4] = counts[2:4].clone() + 1, counts[:2].clone()
    with pytest.raises(PayloadError):
        entropy.decode_codes(messages[0], bits, numel, back)


@for_each("bits", [2, 3, 4])
def test_it_takes_the_entropy_and_little_more(bits: int) -> None:
    numel = 512 * 400
    codes = codes_of(numel, bits)
    found = unpack_trits(codes, 512) if bits == 2 else unpack_codes(codes, bits, 512)
    shares = found.reshape(-1).bincount() / numel
    least = float(-(shares * shares.clamp(min=1e-30).log2()).sum())
    assert 0.9999 * least <= entropy.encode_codes(codes, bits, numel).numel() * 8 / numel <= 1.01 * least


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 3, 4]), st.floats(0, 20), st.integers(0, 2**31))
def test_codes_of_which_some_hardly_ever_occur(bits: int, skew: float, seed: int) -> None:
    """What is rare is given one part of all at least, which what is frequent must have."""
    numel, count = 512 * 40, (1 << bits) - 1
    generator = torch.Generator().manual_seed(seed)
    rare = torch.rand(count, generator=generator).double() ** skew + 1e-12
    rare[count // 2] = 1
    levels = torch.multinomial(rare, numel, replacement=True, generator=generator).view(-1, 512)
    codes = pack_trits(levels) if bits == 2 else pack_codes(levels, bits)
    message = entropy.encode_codes(codes, bits, numel)
    back = torch.zeros_like(codes)
    entropy.decode_codes(message, bits, numel, back)
    assert torch.equal(back, codes)
    shares = levels.reshape(-1).bincount().double() / numel
    least = float(-(shares * shares.clamp(min=1e-30).log2()).sum())
    assert message.numel() * 8 / numel <= 1.01 * least + 0.03


def test_codes_that_are_all_alike_and_codes_at_random() -> None:
    numel = 5000
    same = torch.empty(blocks_bytes(numel, 3), dtype=torch.uint8)
    blockwise.encode_blocks(torch.zeros(numel), 3, same, torch.empty(10, dtype=torch.bfloat16))
    assert entropy.encode_codes(same, 3, numel).numel() < 60
    x = torch.rand(100) - 0.5
    short = torch.empty(blocks_bytes(100, 3), dtype=torch.uint8)
    blockwise.encode_blocks(x, 3, short, torch.empty(1, dtype=torch.bfloat16))
    assert entropy.encode_codes(short, 3, 100).numel() == entropy.longest(100, 3), "as they are, and a byte"


@for_each("bits", [2, 3, 4])
def test_a_damaged_message_is_refused_and_nothing_is_written(bits: int) -> None:
    numel = 3000
    message = entropy.encode_codes(codes_of(numel, bits), bits, numel)
    shares = message.clone()
    shares[1] += 1
    kind, other = message.clone(), message.clone()
    kind[0] = 9
    other[-3] ^= 16
    states = message.clone()
    states[1 + 2 * ((1 << bits) - 1) + 2] ^= 1
    long = torch.cat((message, message[-2:]))
    said = {
        "damaged": (shares, other, states, long, message[:-2]),
        "not whole": (kind, message[:9], message[:-1]),
    }
    for word, damaged in said.items():
        for each in damaged:
            out = torch.full((blocks_bytes(numel, bits),), 7, dtype=torch.uint8)
            with pytest.raises(PayloadError, match=word):
                entropy.decode_codes(each, bits, numel, out)
            assert bool((out == 7).all())
    with pytest.raises(PayloadError):
        entropy.decode_codes(
            message, bits, numel + 1, torch.empty(blocks_bytes(numel + 1, bits), dtype=torch.uint8)
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 900))
def test_any_bytes_are_decoded_or_refused(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    message = torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
    if size > 60:
        good = entropy.encode_codes(codes_of(2000, 3), 3, 2000)
        message = good.clone()
        message[torch.randint(47, len(good), (5,), generator=generator)] = 255
    out = torch.empty(blocks_bytes(2000, 3), dtype=torch.uint8)
    with suppress(PayloadError):
        entropy.decode_codes(message, 3, 2000, out)
