"""Anchors and outer momenta kept in bf16: half the memory, equal on all ranks, nothing lost in the mean."""

from dataclasses import replace

import pytest
import torch
from replica_threads import Crew
from torch import Tensor

from cases import for_each
from tacit.algorithms import parse
from tacit.attaching.memory import state_bytes
from tacit.compressors import TopK
from tacit.errors import ConfigError
from tacit.merges import Average, LocalResidual, Mix, OuterStep, SlowMo
from tacit.replicas import narrow_anchors
from tacit.rounds import Every
from tacit.strategy import Strategy
from tacit.topologies import Flat, Gossip

SIZES = {"a": 300, "b": 24, "c": 50}
WAYS: dict[str, Strategy] = {
    text: parse(text).levels[-1]
    for text in (
        "diloco:sync_every=2",
        "diloco:sync_every=2,bits=4",
        "streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=1,bits=8",
        "eager-diloco:sync_every=2",
        "lowbit:variance=local",
        "lowbit:late=1,variance=local",
        "lowbit:predictor=last,variance=local",
        "zeroone-adam:freeze_step=1,sync_every=2",
    )
} | {
    "average": Strategy(subject="delta", rounds=Every(2), merge=Average()),
    "keep": Strategy(
        subject="delta", rounds=Every(2), compressor=TopK(0.5), topology=Flat(), merge=LocalResidual()
    ),
}


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_anchors, "PIECE", 128)


def narrow(way: str) -> Strategy:
    return replace(WAYS[way], variance="local", anchor_bits=16)


def crew_of(strategy: Strategy, dtype: torch.dtype = torch.float32) -> Crew:
    return Crew(strategy, sizes=SIZES, dtype=dtype)


def anchors(crew: Crew) -> list[list[Tensor]]:
    return [[kept.clone() for kept in replica.progress._anchor] for replica in crew.replicas]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@for_each("way", WAYS)
def test_all_ranks_and_all_tries_have_the_same_bits(way: str) -> None:
    crew, again, exact = (
        crew_of(each) for each in (narrow(way), narrow(way), replace(narrow(way), anchor_bits=32))
    )
    before = torch.random.get_rng_state()
    traces = [each.train(7) for each in (crew, again, exact)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert equal([rows[-1] for rows in traces[0]], [rows[-1] for rows in traces[1]])
    found = anchors(crew)
    assert all(x.dtype == torch.bfloat16 for x in found[0])
    assert all(equal(found[0], other) for other in found[1:])
    for replica in crew.replicas:
        assert all(x.dtype == torch.bfloat16 for s in replica.progress._deltas.states for x in s.values())
    middle, wide = (torch.stack([rows[-1] for rows in trace]).mean(0) for trace in (traces[0], traces[2]))
    assert 0 < float((middle - wide).norm()) < 0.05 * float(wide.norm())
    crew.sync()
    params = [replica.flat for replica in crew.replicas]
    assert all(torch.equal(each, params[0]) for each in params)
    for each in (crew, again, exact):
        each.close()


@for_each("way", ("diloco:sync_every=2", "eager-diloco:sync_every=2", *(w for w in WAYS if "lowbit" in w)))
def test_a_saved_state_is_gone_on_from_to_the_bit(way: str) -> None:
    crew, other = crew_of(narrow(way)), crew_of(narrow(way))
    crew.train(4)
    saved = crew.save()
    other.each(lambda rank, replica: replica.load(saved[rank]))
    assert all(equal(*both) for both in zip(anchors(crew), anchors(other), strict=True))
    first, second = crew.train(5), other.train(5)
    assert equal([rows[-1] for rows in first], [rows[-1] for rows in second])
    for each in (crew, other):
        each.close()


@for_each("dtype", (torch.bfloat16, torch.float16, torch.float64))
@for_each("way", ("diloco:sync_every=2", "lowbit:variance=local", "average"))
def test_parameters_of_other_types(way: str, dtype: torch.dtype) -> None:
    crew = crew_of(narrow(way), dtype)
    crew.train(6)
    found = anchors(crew)
    assert all(equal(found[0], other) for other in found[1:])
    assert found[0][0].dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
    crew.close()


def test_steps_too_small_for_bf16_add_up() -> None:
    """Each replica moves by a 100th of what the anchor can tell; to the nearest it would stand still."""
    for way in ("average", "keep", "lowbit:variance=local"):
        crew = crew_of(narrow(way))

        def work(_: int, replica: object) -> None:
            for _step in range(400):
                for p in replica.named.values():  # type: ignore[attr-defined]
                    p.add_(2**-7 / 100)
                replica.progress.after_step()  # type: ignore[attr-defined]

        crew.each(work)
        middle = torch.stack([replica.flat for replica in crew.replicas]).mean()
        assert float(middle) == pytest.approx(1 + 4 * 2**-7, abs=2**-9)
        crew.close()


@for_each("way", ("average", "keep", "lowbit:variance=local"))
def test_the_mean_of_the_replicas_is_what_it_was(way: str) -> None:
    """Before and behind a round: it is moved by the rounding alone, and in what is kept not even by that."""
    found = []
    for bits in (16, 32):
        crew = crew_of(replace(narrow(way), rounds=Every(1), anchor_bits=bits))
        crew.train(1)
        found.append(torch.stack([replica.flat for replica in crew.replicas]).double().mean(0))
        crew.close()
    apart = float((found[0] - found[1]).abs().max())
    assert 2**-12 < apart < 2**-7 if way == "average" else apart < 1e-5


def test_filters_in_channels_last() -> None:
    """Their entries lie in another order than the anchor's."""
    params = torch.randn(32, 64, 3, 3).to(memory_format=torch.channels_last)
    anchor = torch.randn(params.numel()).bfloat16()
    mean = torch.randn(params.numel())
    merge, at = OuterStep(0.7, 0.0), narrow_anchors.Application(peers=2)
    flat, other = params.contiguous().view(-1).clone(), anchor.clone()
    narrow_anchors.apply_(merge, params, anchor, mean, None, {}, at, ("salt",))
    narrow_anchors.apply_(merge, flat, other, mean, None, {}, at, ("salt",))
    assert torch.equal(params.reshape(-1), flat)
    assert torch.equal(anchor, other)
    assert torch.equal(flat, anchor.float())


@for_each("text", ("diloco", "lowbit", "streaming-diloco"))
def test_what_is_told_of_memory(text: str) -> None:
    tensors = {"a": torch.empty(1000)}
    wide, half = (state_bytes(parse(f"{text}:anchor_bits={bits}").levels[0], tensors) for bits in (32, 16))
    assert [2 * half[name] for name in half if name in ("anchor", "momentum")] == [
        wide[name] for name in wide if name in ("anchor", "momentum")
    ]


def test_what_is_refused() -> None:
    delta = {"subject": "delta", "anchor_bits": 16}
    for text in ("diloco:anchor_bits=8", "lowbit:anchor_bits=64"):
        with pytest.raises(ConfigError, match=r"anchor_bits.*write 32, or 16"):
            parse(text)
    with pytest.raises(ConfigError, match="keeps no anchor"):
        Strategy(anchor_bits=16)
    with pytest.raises(ConfigError, match="keeps no anchor"):
        Strategy(**delta, topology=Gossip(), merge=Mix())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a server keeps the anchor"):
        parse("lowbit:bound=0,anchor_bits=16")
    with pytest.raises(ConfigError, match="learning rates"):
        Strategy(**delta, merge=SlowMo())  # type: ignore[arg-type]
