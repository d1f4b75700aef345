"""`session.footprint()`: which memory a session keeps beside the model."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch
from loopback_training import Member
from model_features import Feature, Net
from torch import Tensor, nn

from in_threads import in_threads
from tacit.algorithms import parse
from tacit.kernels.thread_scratch import all_scratch
from tacit.planning.footprint import footprint
from tacit.replicas import rounds_after_step
from tacit.session import bucket_states
from tacit.transports.loopback import Loopback

PARAMS = 4 * sum(p.numel() for p in Net().parameters())
RANKS = 2
ALGORITHMS: dict[str, dict[str, int]] = {
    "topk": {},
    "dgc": {},
    "efsign": {},
    "powersgd": {},
    "localsgd:sync_every=2": {"anchor": 1, "delta": 1},
    "diloco:sync_every=2": {"anchor": 1, "momentum": 1},
    "lowbit": {"anchor": 1, "delta": 1},
    "onebit-adam:freeze_step=1": {"kept variance": 1},
    "zeroone-adam:freeze_step=1,refresh=1": {"anchor": 1, "kept variance": 1},
}
"""What some of them keep, in sizes of the model."""


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}


def alive() -> dict[int, int]:
    gc.collect()
    return storages(each for each in gc.get_objects() if isinstance(each, Tensor))


def crew_of(algorithm: str, feature: Feature | None = None) -> list[Member]:
    """Two replicas behind five steps."""
    nets = [Loopback.of_nodes(1, RANKS) for _ in parse(algorithm).levels]
    feature = feature or Feature()
    crew = [Member(rank, feature, algorithm, nets) for rank in range(RANKS)]
    for step in range(5):
        for member in crew:
            member.backward(step)
        layout = [[slot.name for slot in bucket.slices] for bucket in crew[0].near.session.buckets]
        in_threads(RANKS, lambda rank, layout=layout: crew[rank].exchange(layout))
        in_threads(RANKS, lambda rank, step=step: crew[rank].step(step, set()))
    return crew


def of_training(crew: Sequence[Member]) -> Iterator[Tensor]:
    """What is not the sessions': parameters, gradients, the optimizers' state, and the test's buckets."""
    for member in crew:
        yield from getattr(member, "given", {}).values()
        for p in member.net.parameters():
            yield p
            if p.grad is not None:
                yield p.grad
        for state in member.optimizer.state.values():
            yield from (each for each in state.values() if isinstance(each, Tensor))


def told_by(crew: Sequence[Member]) -> dict[str, int]:
    nets = nn.ModuleList(member.net for member in crew)
    return footprint([member.levels for member in crew], nets, [member.optimizer for member in crew])


def close(crew: Iterable[Member]) -> None:
    for member in crew:
        member.close()


def test_every_byte_that_is_kept_is_counted() -> None:
    before = alive() | storages(all_scratch())  # what other tests have left
    crews = [crew_of(algorithm) for algorithm in ALGORITHMS]
    everyone = [member for crew in crews for member in crew]
    known = before | storages(of_training(everyone))
    kept = sum(size for at, size in alive().items() if at not in known)
    older = sum(size for at, size in storages(all_scratch()).items() if at in before)
    assert sum(told_by(everyone).values()) - older == kept
    for crew, expected in zip(crews, ALGORITHMS.values(), strict=True):
        told = told_by(crew)
        assert {field: told[field] for field in expected} == {
            field: times * RANKS * PARAMS for field, times in expected.items()
        }
    close(everyone)


def test_a_state_has_its_own_name() -> None:
    crew = crew_of("topk")
    told = told_by(crew)
    states = [each.tensor for member in crew for each in member.near.session.store.named_state().values()]
    close(crew)
    assert told["residual"] >= sum(t.numel() * t.element_size() for t in states) > 0
    assert "second buffers" not in told


def test_second_buffers_stay_where_allocating_them_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_states, "REUSED", 0)
    crew = crew_of("topk")
    told = told_by(crew)
    close(crew)
    assert told["second buffers"] == told["residual"]


@pytest.mark.parametrize("algorithm", ["localsgd", "diloco", "sparseloco"])
def test_deltas_of_rare_rounds_have_memory_in_rounds_alone(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rare in (3, 2):
        monkeypatch.setattr(rounds_after_step, "RARE", rare)
        crew = crew_of(f"{algorithm}:sync_every=2")
        assert ("delta" in told_by(crew)) is (rare == 3)
        found.append([p.detach().clone() for member in crew for p in member.net.parameters()])
        close(crew)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def deep() -> nn.Module:
    """Eight layers, so that a bucket's scratch is little beside what is kept of all."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 160), *[nn.Linear(160, 160) for _ in range(8)], nn.Linear(160, 5))


KEPT = {
    "dense": 0.0,
    "bf16": 0.5,
    "topk": 1.08,
    "powersgd": 1.05,
    "topk:residual_bits=16": 0.58,
    "efsign": 1.7,
    "efsign:residual_bits=16": 0.95,
    "int8": 1.25,
    "dgc": 2.02,
    "dgc:residual_bits=16": 1.02,
    "localsgd:sync_every=2": 2.0,
    "localsgd:sync_every=32": 1.0,
    "diloco:sync_every=2": 3.0,
    "diloco:sync_every=32": 2.0,
    "sparseloco:sync_every=2": 3.2,
    "lowbit": 2.12,
    "lowbit:late=1": 5.3,
    "mp2": 6.0,
}
"""What is kept between two steps, in sizes of the model: a copy more, and a row is 1 higher."""


@pytest.mark.parametrize("algorithm", KEPT)
def test_no_copy_more_is_kept_than_said(algorithm: str) -> None:
    before = alive()
    feature = Feature(net=deep, ddp={"bucket_cap_mb": 0.11})
    crew = crew_of(algorithm, feature)
    known = before | storages(of_training(crew))
    kept = sum(size for at, size in alive().items() if at not in known)
    size = sum(p.nbytes for p in crew[0].net.parameters())
    close(crew)
    assert kept / RANKS / size == pytest.approx(KEPT[algorithm], abs=0.2)
