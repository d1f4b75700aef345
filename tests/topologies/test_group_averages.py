"""Groups that change from round to round: who averages with whom, and that it is their mean."""

import pytest
import torch
from mixed_replicas import N, assert_followed, assert_resumed, matrix, mixed_by_hand, synced
from replica_threads import Crew
from torch import Tensor

from cases import for_each
from tacit.algorithms import parse
from tacit.compressors import BF16, ErrorFeedback, TopK
from tacit.errors import ConfigError
from tacit.merges import Average, Mix
from tacit.strategy import Levels, Strategy
from tacit.topologies import Groups


def sizes(w: Tensor) -> list[int]:
    """Of the group of each rank; a row is that of a plain mean."""
    counts = [int((row > 0).sum()) for row in w]
    assert all(
        torch.allclose(row[row > 0], torch.tensor(1 / n).double()) for row, n in zip(w, counts, strict=True)
    )
    return counts


def test_every_round_is_a_mean_in_groups_and_each_rank_is_in_one() -> None:
    for peers in (1, 2, 4, 8, 16):
        for size in (None, 2, 4):
            if size is not None and size > peers:
                continue
            for round_index in range(6):
                w = matrix(Groups(size), peers, round_index)
                want = {1: 1, 2: 2, 4: 2, 8: 4, 16: 4}[peers] if size is None else size
                assert sizes(w) == [want] * peers
                assert torch.equal(w, w.T)
    for peers, size, found in ((5, 4, [1, 4, 4, 4, 4]), (7, 4, [1, 2, 2, 4, 4, 4, 4]), (6, 2, [2] * 6)):
        for round_index in range(6):
            w = matrix(Groups(size, "random"), peers, round_index)
            assert sorted(sizes(w)) == found
            assert torch.equal(w, w.T)


@for_each(("peers", "size", "rounds"), [(8, 2, 3), (16, 4, 2), (4, 2, 2), (8, 4, 2)])
def test_everybody_has_of_everybody_after_a_full_turn_of_the_butterfly(
    peers: int, size: int, rounds: int
) -> None:
    w = torch.eye(peers).double()
    for round_index in range(rounds):
        w = matrix(Groups(size), peers, round_index) @ w
    if peers == 8 and size == 4:  # the second round goes around, and takes a bit twice
        assert bool((w > 0).all())
    else:
        assert torch.allclose(w, torch.full((peers, peers), 1 / peers).double())


def test_random_groups_are_others_in_each_round_and_follow_the_seed() -> None:
    topology = Groups(2, "random")
    drawn = [topology.swaps(8, round_index, seed=5) for round_index in range(20)]
    assert drawn == [topology.swaps(8, round_index, seed=5) for round_index in range(20)]
    assert len(set(drawn)) > 10
    assert drawn != [topology.swaps(8, round_index, seed=6) for round_index in range(20)]


@for_each(
    ("text", "peers"),
    [
        ("wagma", 4),
        ("wagma:group_size=2,global_every=3", 8),
        ("wagma:late=1,global_every=5", 4),
        ("prague", 5),
        ("prague:group_size=4,sync_every=2", 6),
        ("prague:late=1", 3),
    ],
)
def test_replicas_take_the_papers_steps(text: str, peers: int) -> None:
    (level,) = parse(text).levels
    assert isinstance(level.topology, Groups)
    late = int(level.overlap.apply_at(0))
    crew = Crew(level, peers=peers)
    want = mixed_by_hand(level.topology, peers, 12, level.rounds.sync_every, late)  # type: ignore[attr-defined]
    assert_followed(crew.train(12), want, atol=2e-6)
    synced(crew)
    crew.close()


def test_a_rank_sends_what_it_has_once_for_each_doubling() -> None:
    for text, messages in (("wagma:group_size=2,global_every=99", 1), ("prague:group_size=4", 2)):
        crew = Crew(text, peers=8)
        crew.train(4)
        for replica in crew.replicas:
            flags = 2 * 7 / 8 * 4 * 8 * len(replica.session.buckets)
            compared = 8 * 7 / 4  # in the first of the four rounds, where they begin
            assert replica.session.stats.totals.bytes_out / 4 == messages * 4 * N + flags + compared
        crew.close()


def test_the_mean_stays_also_where_it_travels_rounded() -> None:
    strategy = Strategy(subject="delta", compressor=BF16(), topology=Groups(4), merge=Mix())
    crew = Crew(strategy, peers=4)
    crew.each(lambda rank, replica: [p.add_(0.1 * rank) for p in replica.named.values()])
    crew.each(lambda _, replica: replica.progress.after_step())
    flats = [replica.flat for replica in crew.replicas]
    assert all(torch.equal(flats[0], each) for each in flats)
    assert torch.allclose(flats[0], torch.full((N,), 1.15), atol=2e-3)
    crew.close()


def test_a_run_that_is_resumed_goes_on_bit_for_bit() -> None:
    for text in ("wagma", "prague:late=1"):
        assert_resumed(text)


def test_what_cannot_be_is_refused() -> None:
    for given, says in (
        ({"group_size": 3}, "write 2 or 4"),
        ({"group_size": 1}, "group_size=1"),
        ({"drawing": "static"}, "unknown drawing"),
        ({"global_every": -1}, "write 0 for never"),
    ):
        with pytest.raises(ConfigError, match=says):
            Groups(**given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"drawing='butterfly' with 6 ranks.*attach prague.*4 or 8 ranks"):
        Groups().swaps(6, 0)
    with pytest.raises(ConfigError, match="group_size=8 with 4 ranks is not possible: write 4"):
        Groups(8).swaps(4, 0)
    for compressor in (TopK(), ErrorFeedback(TopK()), ErrorFeedback(BF16())):
        with pytest.raises(ConfigError, match="would lose what it does not send"):
            Strategy(subject="delta", compressor=compressor, topology=Groups(), merge=Mix())
    with pytest.raises(ConfigError, match=r"write merge=Mix\(\)"):
        Strategy(subject="delta", topology=Groups(), merge=Average())
    with pytest.raises(ConfigError, match="cannot be one of several levels"):
        Levels((Strategy(), Strategy(subject="delta", topology=Groups(), merge=Mix())))
