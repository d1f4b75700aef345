"""Ranks compare the common point, bit for bit, in every 64th round; where it differs, all of them say so."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from replica_threads import Crew, Replica
from served_replicas import ServedCrew
from torch import Tensor

from cases import for_each
from tacit.algorithms import parse
from tacit.errors import RoundError
from tacit.replicas import anchor_comparison
from tacit.strategy import Strategy
from tacit.topologies import Flat, Star, TwoPhase

P = 3
SIZES = {"a": 1700, "b": 3, "c": 530}
TOPOLOGIES = [TwoPhase(), Flat(), Star()]
EVERY = 8


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every 8th round."""
    assert anchor_comparison.EVERY == 64
    monkeypatch.setattr(anchor_comparison, "EVERY", EVERY)


def crew(
    text: str, topology: TwoPhase | Flat | Star, peers: int = P, dtype: torch.dtype = torch.float32
) -> Crew:
    (level,) = parse(text).levels
    strategy: Strategy = replace(level, topology=topology)
    return (ServedCrew if isinstance(topology, Star) else Crew)(strategy, peers, sizes=SIZES, dtype=dtype)


def anchor(replica: Replica, name: str) -> Tensor:
    return replica.progress.saved_state()[name, "anchor"].tensor


def said(crew: Crew, steps: int) -> list[str]:
    """What each rank raises in so many steps; an empty text where it raises nothing."""
    found = [""] * len(crew.replicas)

    def work(rank: int, replica: Replica) -> None:
        try:
            for _ in range(steps):
                replica.named["a"].add_(0.01)
                replica.progress.after_step()
        except RoundError as error:
            found[rank] = str(error)

    crew.each(work)
    return found


@for_each("topology", TOPOLOGIES, ids=str)
@for_each("text", ["lowbit", "lowbit:late=1", "lowbit:predictor=last", "lowbit:bits=2,sync_every=2"])
@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_bit_that_differs_is_an_error_on_every_rank(
    dtype: torch.dtype, text: str, topology: TwoPhase | Flat | Star
) -> None:
    group, every = crew(text, topology, dtype=dtype), 2 if "sync_every" in text else 1
    assert said(group, 3) == [""] * P
    x = anchor(group.replicas[1], "c")
    x[7] = torch.nextafter(x[7], torch.tensor(9.0, dtype=x.dtype))
    was = [replica.flat.clone() for replica in group.replicas]
    texts = said(group, every * (EVERY + 4))
    assert len(set(texts)) == 1, "all say the same"
    step = every * (EVERY + 1) - 1
    assert texts[0].startswith(
        f"in step {step} the common point of c has other bits on rank 1 than on rank 0,"
    )
    assert "load checkpoints of one moment on all ranks" in texts[0]
    assert {replica.session.step for replica in group.replicas} == {step}
    assert all(not torch.equal(a.flat, b) for a, b in zip(group.replicas, was, strict=True))
    assert said(group, 1) == texts, "nobody goes on"
    group.close()


@for_each("topology", TOPOLOGIES, ids=str)
def test_nothing_of_the_round_is_applied(topology: TwoPhase | Flat | Star) -> None:
    group = crew("lowbit", topology)
    anchor(group.replicas[2], "a").add_(1e-3)
    was = [replica.flat.clone() for replica in group.replicas]
    texts = said(group, 1)
    assert all("of a has other bits on rank 2 than on rank 0" in text for text in texts)
    for replica, before in zip(group.replicas, was, strict=True):
        before[torch.arange(SIZES["a"])] += 0.01
        assert torch.equal(replica.flat, before)
    group.close()


def test_several_parameters_and_ranks_are_counted_and_named() -> None:
    group = crew("lowbit", Flat(), 4)
    for rank, name in ((1, "b"), (3, "a"), (3, "c")):
        anchor(group.replicas[rank], name).mul_(2)
    (text,) = {*said(group, 1)}
    assert re.match(
        r"in step 0 the common point of \w and 2 other parameters has other bits on ranks 1, 3 ", text
    )
    group.close()


@for_each(("i", "j"), [(0, 1), (3, 70_000), (65_536, 131_071)])
def test_two_entries_that_change_places_are_seen(i: int, j: int) -> None:
    """A plain sum of the bits would be the same."""
    (level,) = parse("lowbit").levels
    group = Crew(replace(level, topology=Flat()), 2, sizes={"a": 140_000})
    for replica in group.replicas:
        anchor(replica, "a").copy_(torch.arange(140_000) * 0.5)
    x = anchor(group.replicas[1], "a")
    x[[i, j]] = x[[j, i]]
    assert all("the common point of a" in text for text in said(group, 1))
    group.close()


@for_each("topology", TOPOLOGIES, ids=str)
@for_each("peers", [2, 16])
def test_ranks_that_agree_are_never_told_to_differ(peers: int, topology: TwoPhase | Flat | Star) -> None:
    group = crew("lowbit:predictor=last", topology, peers)
    assert said(group, 2 * EVERY + 1) == [""] * peers
    group.close()


def test_it_costs_eight_bytes_for_each_other_rank() -> None:
    group = crew("lowbit", TwoPhase())
    bytes_out = []
    for _ in range(2 * EVERY + 1):
        before = group.replicas[0].session.metrics()["bytes_out"]
        group.train(1)
        bytes_out.append(group.replicas[0].session.metrics()["bytes_out"] - before)
    plain = bytes_out[1]
    assert [i for i, sent in enumerate(bytes_out) if sent != plain] == [0, EVERY, 2 * EVERY]
    assert bytes_out[EVERY] - plain == 8 * (P - 1)
    group.close()


def test_checkpoints_of_two_moments_are_told_apart_at_once() -> None:
    saving, resumed = crew("lowbit", TwoPhase()), crew("lowbit", TwoPhase())
    saved: list[list[dict[str, object]]] = []
    for _ in range(2):
        saving.train(3)
        saved.append(saving.save())
    resumed.each(lambda rank, replica: replica.load(saved[rank == 1][rank]))
    assert all("has other bits on rank 1 than on rank 0" in text for text in said(resumed, 1))
    for group in (saving, resumed):
        group.close()


def test_merges_that_do_not_end_at_the_anchor_compare_in_the_first_round_alone() -> None:
    """All replicas begin at one point, whatever they do later."""
    group = Crew("localsgd:sync_every=1", P, sizes=SIZES)
    group.train(1)
    anchor(group.replicas[1], "a").add_(1e-3)
    assert said(group, EVERY) == [""] * P
    group.close()
    group = Crew("localsgd:sync_every=1", P, sizes=SIZES)
    anchor(group.replicas[1], "a").add_(1e-3)
    assert all("has other bits on rank 1 than on rank 0" in text for text in said(group, 1))
    group.close()
