"""Bytes coded plane by plane: all is decoded, both versions give the same bytes, and damage is an error."""

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tacit.errors import PayloadError
from tacit.kernels import dispatch, entropy
from tacit.kernels.byte_planes import decode_planes, encode_planes, most_bytes

TYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32)


def tensor(numel: int, dtype: torch.dtype, seed: int, scale: float = 20.0) -> Tensor:
    x = scale * torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return (x.abs() if dtype == torch.uint8 else x).to(dtype)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 129, 700, 5000]), st.sampled_from(TYPES)), max_size=3),
    st.integers(0, 9),
)
def test_what_is_coded_is_decoded_with_and_without_numba(
    parts: list[tuple[int, torch.dtype]], seed: int
) -> None:
    payload, messages = [tensor(*each, seed) for each in parts], []
    for backend in ("numba", "torch"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "active_backend", lambda device="cpu", found=backend: found)
            messages.append(encode_planes(payload))
            back = [torch.full_like(each, 7) for each in payload]
            decode_planes(messages[-1], back)
        for a, b in zip(back, payload, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(*messages)
    assert messages[0].numel() <= most_bytes(payload)


def test_a_plane_is_coded_in_pieces_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which each takes 34 bytes more, and no table."""
    x = tensor(5000, torch.uint8, 0)
    whole, messages = encode_planes([x]), []
    monkeypatch.setattr(entropy, "PIECE", 1024)
    for backend in ("numba", "torch"):
        monkeypatch.setattr(dispatch, "active_backend", lambda device="cpu", found=backend: found)
        messages.append(encode_planes([x]))
        back = torch.zeros_like(x)
        decode_planes(messages[-1], [back])
        assert torch.equal(back, x)
    assert torch.equal(*messages)
    assert abs(len(messages[0]) - len(whole) - 4 * 34) <= 4 * 16


def test_exponents_take_the_entropy_and_little_more() -> None:
    """Signs and mantissas are as good as random: 8 of the 16 bits of bf16."""
    x = tensor(200_000, torch.bfloat16, 0)
    exponents = x.view(torch.int16).bitwise_right_shift(7).bitwise_and(255)
    shares = exponents.bincount() / x.numel()
    least = 8 - float((shares * shares.clamp(min=1e-30).log2()).sum())
    assert least <= 8 * encode_planes([x]).numel() / x.numel() <= 1.01 * least


def test_what_is_random_is_left_and_what_is_alike_is_next_to_nothing() -> None:
    random = torch.randint(256, (50_000,), generator=torch.Generator().manual_seed(0)).byte()
    assert encode_planes([random]).numel() == 1 + random.numel()
    assert encode_planes([torch.zeros(50_000)]).tolist() == 4 * [2, 0]
    assert encode_planes([torch.full((1,), 7, dtype=torch.uint8)]).tolist() == [2, 7]


def test_a_damaged_message_is_refused() -> None:
    x = tensor(3000, torch.uint8, 0)
    message = encode_planes([x])

    def changed(at: int, by: int) -> Tensor:
        other = message.clone()
        other[at] ^= by
        return other

    said = {
        "damaged": (changed(0, 8), changed(40, 1), changed(-3, 16), torch.cat((message, message[-2:]))),
        "cut short": (message[:0], message[:20], message[:-2]),
    }
    for word, messages in said.items():
        for each in messages:
            with pytest.raises(PayloadError, match=word):
                decode_planes(each, [torch.empty_like(x)])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 900))
def test_any_bytes_are_decoded_or_refused(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    message = torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
    if size > 60:
        message = encode_planes([tensor(2000, torch.bfloat16, 0)])
        message[torch.randint(5, len(message), (5,), generator=generator)] = 255
    with suppress(PayloadError):
        decode_planes(message, [torch.empty(2000, dtype=torch.bfloat16)])
