"""Large parameters are read and written where they lie: the same bits as by copies of whole buckets."""

from __future__ import annotations

import pytest
import torch
from replica_threads import Crew
from torch import Tensor

from cases import for_each
from tacit.algorithms import parse
from tacit.compressors import BF16, Clip
from tacit.contracts import Compressor
from tacit.merges import Average, Elastic, LocalResidual, SlowMo, StaleMean
from tacit.overlap import Delayed
from tacit.replicas import replica as module
from tacit.replicas.replica import Replica
from tacit.rounds import Cycling, Every
from tacit.session.buckets import Bucket, ParamSlice
from tacit.strategy import Strategy
from tacit.topologies import Flat

MEMORY = {"steps_per_epoch": 12.0, "epochs": 100.0}
WAYS = {
    **{text: parse(text) for text in ("lowbit:sync_every=2", "lowbit:late=1", "diloco:sync_every=2")},
    "streaming-diloco": parse("streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=1"),
    "late": Strategy(subject="delta", rounds=Every(3), overlap=Delayed(2), merge=Average()),
    "stale": Strategy(
        subject="delta", rounds=Cycling(3, warmup_epochs=0, cooldown_epochs=0), merge=StaleMean()
    ),
    "slowmo": Strategy(subject="delta", rounds=Every(2), merge=SlowMo()),
    "elastic": Strategy(subject="delta", rounds=Every(2), merge=Elastic()),
}


def trained(strategy: Strategy, shares: list[float] | None = None) -> list[Tensor]:
    crew = Crew(strategy, 3, shares, MEMORY)
    trace = crew.train(7, loss=lambda step: 1.0)
    crew.sync()
    ends = [each.flat for each in crew.replicas]
    crew.close()
    return [*(flat for rank in trace for flat in rank), *ends]


@for_each("way", WAYS)
def test_as_by_copies(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [0.5, 1.0, 1.5] if way in ("late", "diloco:sync_every=2") else None
    copied = trained(WAYS[way], shares)
    monkeypatch.setattr(module, "LARGE", 6)  # of 7, 3, 5 and 6 entries two are large
    assert all(map(torch.equal, trained(WAYS[way], shares), copied))
    monkeypatch.undo()


def replica_of(named: dict[str, Tensor]) -> tuple[Replica, Tensor]:
    slices, start = [], 0
    for name, p in named.items():
        slices.append(ParamSlice(name, start, start + p.numel(), p.shape))
        start += p.numel()
    dtype = next(iter(named.values())).dtype
    bucket = Bucket(tuple(slices), dtype, torch.device("cpu"), ())
    anchor = torch.empty(start, dtype=torch.promote_types(dtype, torch.float32))
    return Replica([bucket], named, [anchor], stays=True), anchor


def doubled(replica: Replica, entrywise: bool = True) -> int:
    """Multiplies all parameters by two; in how many stretches they came."""
    stretches = [params.mul_(2) for _, params in replica.overwritten(0, reads=True, entrywise=entrywise)]
    return len(stretches)


def test_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 6)
    values = torch.arange(24.0)
    named = {
        "turned": values[:6].clone().view(3, 2).t(),
        "small": values[6:8].clone(),
        "none": torch.empty(0),
        "scalar": torch.tensor(8.0),
        "plain": torch.nn.Parameter(values[9:21].clone().view(3, 4)),
    }
    replica, anchor = replica_of(named)
    assert torch.equal(anchor[:6].view(2, 3), named["turned"])
    before = anchor.clone()
    assert doubled(replica) == 3, "the small ones together"
    out = torch.empty_like(anchor)
    assert torch.equal(replica.progress(0, anchor, out), before)
    named["plain"] = torch.nn.Parameter(torch.ones(3, 4))  # assigned anew
    named["turned"] = torch.ones(2, 3)
    assert doubled(replica) == 3
    assert bool((named["plain"] == 2).all() and (named["turned"] == 2).all())
    assert torch.equal(replica.progress(0, torch.zeros_like(anchor), out)[6:9], 4 * before[6:9])
    assert doubled(replica, entrywise=False) == 1


def test_parameters_that_share_memory_change_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 6)
    memory = torch.ones(12)
    named = {"a": memory[:8], "b": memory[4:]}
    replica, _ = replica_of(named)
    assert doubled(replica) == 1
    assert torch.equal(memory, torch.full((12,), 2.0))


def test_two_bytes_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 6)
    replica, anchor = replica_of({"a": torch.ones(8, dtype=torch.bfloat16)})
    ((_, params),) = replica.overwritten(0, reads=True, entrywise=True)
    assert params.dtype == anchor.dtype == torch.float32


@for_each("dtype", [torch.float32, torch.float16])
@for_each("codec", [BF16(), Clip(BF16(), max_norm=1e9)])
def test_what_rounding_left_out_stays_in_the_replica(codec: Compressor, dtype: torch.dtype) -> None:
    strategy = Strategy(
        subject="delta", rounds=Every(1), merge=LocalResidual(), compressor=codec, topology=Flat()
    )
    crew = Crew(strategy, 2, dtype=dtype, start=0.0)
    deltas = [torch.full((21,), 0.0101 * (1 + rank), dtype=dtype) for rank in range(2)]

    def step(rank: int, each: object) -> None:
        for p in each.named.values():  # type: ignore[attr-defined]
            p.add_(deltas[rank][: len(p)])
        each.progress.after_step()  # type: ignore[attr-defined]

    crew.each(step)
    for rank, each in enumerate(crew.replicas):
        anchor = torch.cat(each.progress._anchor)
        exact = deltas[rank].float()
        unsent = exact - exact.bfloat16().float()
        assert bool((unsent != 0).all())
        assert torch.equal(each.flat, (anchor + unsent).to(dtype))
    crew.close()
