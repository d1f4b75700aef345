"""The latest rows beside six partners: two compressors of one tensor, which share messages where they can."""

import pytest
import torch
from laws import FLAT, Peers, tensors
from table import NUMEL, TABLE

from tacit.compressors import Part, Partition
from tacit.contracts import AxisRank, Context
from tacit.transports.meter import DryRun, run_dry

PEERS, START, STOP = 3, 300, 500
PARTNERS = ("dense", "bf16 + ef", "topk 1% + ef", "sign by blocks + ef", "qsgd", "int8 + ef")
LATEST = ("majority of momenta", *list(TABLE)[list(TABLE).index("cosine transform, topk 1%") :])


@pytest.mark.parametrize("name", LATEST)
def test_beside_each_partner_a_row_obeys(name: str) -> None:
    row = TABLE[name]
    inside = torch.zeros(NUMEL, dtype=torch.bool)
    inside[START:STOP] = True
    for partner in PARTNERS:
        other = TABLE[partner]
        both = Partition(row.compressor, (Part(other.compressor, ((START, STOP),)),))
        group = Peers(both, PEERS, NUMEL)
        given, arrived = torch.zeros(PEERS, NUMEL), torch.zeros(PEERS, NUMEL)
        for seed in range(2):
            xs = tensors(PEERS, NUMEL, seed)
            outcomes = group.exchange(xs)
            first, sent = outcomes[0].mean, torch.stack([each.sent.dense(each.mean) for each in outcomes])
            assert all(torch.equal(first, each.mean) for each in outcomes), partner
            given, arrived = given + torch.stack(xs), arrived + sent
            bound = 1e-6 + (row.rounding + other.rounding) * sent.abs().mean(0)
            mean = torch.where(inside | (not row.votes), sent.mean(0), sent.sum(0).sign())
            held = inside if row.steps else torch.ones_like(inside)
            assert bool(((first - mean).abs() <= bound)[held].all()), partner
            if seed == 0:
                told = sum(foretold(both, rank) for rank in range(PEERS))
                assert sum(group.net.sent) <= told, partner
                assert row.varies or sum(group.net.sent) == told, partner
        kept = torch.zeros_like(given)
        for rank, state in enumerate(group.states):
            if row.conserves:
                kept[rank] += state["main.residual"]
            if other.conserves:
                kept[rank, START:STOP] += state["part0.residual"]
        owed = (inside & other.conserves) | (~inside & row.conserves)
        torch.testing.assert_close((arrived + kept)[:, owed], given[:, owed], rtol=1e-4, atol=1e-4)


def foretold(compressor: Partition, rank: int) -> int:
    """The bytes that the meter says this rank sends in a round."""
    x = torch.empty(NUMEL, device="meta")
    ctx = Context(out=x, work=DryRun(), peers=PEERS, rank=rank, name="bucket")
    talk = FLAT.conduct(x, compressor, compressor.init(x), ctx)
    _, cost = run_dry(talk, lambda _: AxisRank(rank, PEERS))
    return sum(cost.sent.values())
