import pytest
import torch
from host_sync import NoHostSync
from torch import Tensor

from tacit.errors import TacitError
from tacit.kernels.dispatch import active_backend, emulated_device
from tacit.kernels.entry_buffers import Selection
from tacit.kernels.payload_layout import INT32, position_bytes, position_format, position_sizes
from tacit.kernels.positions import pack_positions, scatter_add_, scatter_all_, unpack_positions
from tacit.kernels.reference import positions as reference

CASES = [
    (1, 1), (1, 0), (8, 8), (9, 9), (255, 3), (256, 3), (257, 3), (1000, 10), (1000, 999), (65_536, 40),
    (65_537, 40), (70_001, 7), (100_003, 30_000), (3_000_000, 300), (3_000_000, 5), (3_000_000, 0),
    (9_000_000, 90_000),
]  # fmt: skip


def rising(numel: int, count: int, seed: int = 0) -> Tensor:
    """With the first and the last position, where there are two."""
    drawn = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[:count]
    if 2 <= count < numel:
        drawn[0], drawn[1] = 0, numel - 1
    return drawn.unique().to(torch.int32)


def test_the_sizes_are_these() -> None:
    # Of a million entries, one in a hundred: 10000 low bytes, and ceil((10000 + 3906) / 8) of bits.
    assert position_sizes(1_000_000, 10_000) == {0: 125_000, 1: 10_000 + 1739, 2: 20_000 + 1252, 4: 40_000}
    assert position_bytes(1_000_000, 10_000) == 11_739
    assert position_bytes(1_000, 10) == 10 + 2
    assert position_bytes(1_000, 1_000) == 125
    assert position_bytes(25_000_000, 2_500) == 2 * 2_500 + 361
    assert position_bytes(25_000_000, 1) == 4
    assert {position_format(numel, k) for numel, k in CASES} == {0, 1, 2, INT32}


@pytest.mark.parametrize(("numel", "k"), CASES)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_positions_come_back_and_both_versions_write_the_same(numel: int, k: int, share: float) -> None:
    index = rising(numel, int(share * k))
    fast, slow = (torch.full((position_bytes(numel, k),), 0xAA, dtype=torch.uint8) for _ in range(2))
    pack_positions(index, numel, k, fast)
    reference.pack_positions(index, numel, k, slow)
    assert torch.equal(fast, slow)
    assert torch.equal(unpack_positions(fast, numel, k), index)
    assert torch.equal(reference.unpack_all([fast], numel, k)[0], index)


@pytest.mark.parametrize(("numel", "k"), [case for case in CASES if case[0] < 1_000_000])
def test_on_a_device_absent_positions_leave_no_trace(numel: int, k: int) -> None:
    index = rising(numel, k // 2)
    few, fixed = (torch.full((position_bytes(numel, k),), 0xAA, dtype=torch.uint8) for _ in range(2))
    pack_positions(index, numel, k, few)
    with emulated_device(), NoHostSync():
        whole = torch.cat([index, index.new_full((k - len(index),), -1)])
        pack_positions(whole, numel, k, fixed)
        found = unpack_positions(fixed, numel, k)
    assert torch.equal(fixed, few)
    assert torch.equal(found, whole)


def test_a_message_that_says_too_much_is_not_written_past_the_end() -> None:
    packed = torch.full((position_bytes(1000, 10),), 255, dtype=torch.uint8)
    assert unpack_positions(packed, 1000, 10).numel() <= 10 + 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weight", [1.0, 0.25, 1 / 3, -1.0, 1e-40])
def test_adding_equals_index_add(dtype: torch.dtype, weight: float) -> None:
    index = rising(10_007, 999)
    values = torch.randn(index.numel(), generator=torch.Generator().manual_seed(4)).to(dtype)
    here = torch.randn(10_007, generator=torch.Generator().manual_seed(5)).to(dtype)
    there = here.clone()
    scatter_add_(index, values, here, weight)
    there.index_add_(0, index, values, alpha=weight)
    assert torch.equal(here, there)


def test_with_a_position_outside_it_is_an_error_and_nothing_is_written() -> None:
    whole = torch.zeros(200)
    for bad in (150, -3):
        index = torch.tensor([5, bad], dtype=torch.int32)
        with pytest.raises((TacitError, IndexError)):
            scatter_add_(index, torch.ones(2), whole[10:110])
    assert float(whole.sum()) == 0.0
    assert active_backend() in ("numba", "torch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("numel", [40_007, 8_192, 1])
@pytest.mark.parametrize("fresh", [True, False])
def test_all_peers_at_once_are_as_one_by_one(dtype: torch.dtype, numel: int, fresh: bool) -> None:
    peers = []
    for seed, share in enumerate((0.1, 0.0, 1.0, 0.3)):
        index = rising(numel, int(share * numel), seed)
        values = torch.randn(index.numel(), generator=torch.Generator().manual_seed(seed))
        peers.append(Selection(index, values.to(dtype)))
    peers.append(Selection(peers[0].positions.flip(0), peers[0].values))  # as no payload of ours has them
    here = torch.randn(numel, generator=torch.Generator().manual_seed(5)).to(dtype)
    for some in (peers, peers[:-1], peers[1:2]):
        there = torch.zeros_like(here) if fresh else here.clone()
        for each in some:
            scatter_add_(*each, there, 1 / 3)
        scatter_all_(some, here, 1 / 3, fresh)
        assert torch.equal(here.view(torch.uint8), there.view(torch.uint8))


def test_one_peer_with_a_position_outside_is_an_error() -> None:
    whole = torch.ones(200)
    for bad in (150, -3):
        peers = [Selection(torch.tensor([5, at], dtype=torch.int32), torch.ones(2)) for at in (7, bad)]
        with pytest.raises((TacitError, IndexError)):
            scatter_all_(peers, whole[10:110], 1.0, fresh=True)
    assert whole[:10].eq(1).all()
    assert whole[110:].eq(1).all()
