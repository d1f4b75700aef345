"""Payloads in one message: aligned, whatever their sizes, and read where they lie."""

import torch
from torch import Tensor

from tacit.contracts import Payload
from tacit.transports.message_layout import Slots


def payload(codes: int, units: int, seed: int = 0) -> Payload:
    """As `lowbit` sends: levels, and units of blocks; of another size for each peer."""
    g = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 256, (codes,), generator=g, dtype=torch.uint8)
    return levels, torch.randn(units, generator=g).bfloat16()


def inside(x: Tensor, whole: Tensor) -> bool:
    return whole.data_ptr() <= x.data_ptr() < whole.data_ptr() + whole.numel()


def test_payloads_of_odd_sizes_are_read_where_they_lie() -> None:
    given = [payload(103, 1, 1), payload(206, 2, 2), payload(51, 1, 3)]
    slots = Slots(given)
    slots.pack(given)
    for sent, found in zip(given, slots.payloads(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(sent, found, strict=True))
        assert all(inside(each, slots.message) for each in found)
    assert [*map(len, slots.slots)] == slots.sizes == [112, 216, 56]


def test_other_forms_do_not_fit() -> None:
    one, other = payload(103, 1), payload(103, 1, seed=1)
    slots = Slots([one, one, payload(51, 1)])
    assert slots.fit([other, other, payload(51, 1)])
    assert slots.fit([one, other, payload(51, 1)])
    assert not slots.fit([one, one])
    assert not slots.fit([one, one, one])
    assert not slots.fit([one, payload(103, 2), payload(51, 1)])
    assert not slots.fit([(one[0], one[1].float()), one, payload(51, 1)])


def test_one_payload_is_written_to_its_slot_alone() -> None:
    form, mine = payload(10, 2), payload(10, 2, seed=3)
    slots = Slots([form] * 3)
    slots.pack([mine], 1)
    assert torch.equal(slots.payloads(1)[0][1], mine[1])
    assert not slots.slots[0].any()
    assert not slots.slots[2].any()
