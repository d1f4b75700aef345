"""A session that nobody closes: closed as torch.distributed is shut down, or at exit, or it says why not."""

import time

import pytest
from replica_threads import Crew

from rank_processes import Ended, ranks
from tacit.checkpoint.session_state import LAST_EQUAL

WORLD = 3


def run(how: str, algorithm: str = "diloco") -> list[Ended]:
    # How an interpreter ends by itself, one of its own shows; the others go through the same steps.
    return ranks("unclosed_session.py", WORLD, how, algorithm, fresh=(0,) if how == "exits" else ())


def said(ended: list[Ended], words: str) -> list[int]:
    return [rank for rank, each in enumerate(ended) if words in each.text]


@pytest.mark.parametrize("algorithm", ["diloco", "predictive"])
def test_shutting_torch_distributed_down_averages_the_replicas(algorithm: str) -> None:
    ended = run("is destroyed", algorithm)
    assert [each.code for each in ended] == [0] * WORLD, ended[0].text
    assert len({each.said[-1]["sum"] for each in ended}) == 1
    if algorithm == "diloco":  # no outer step: the mean of the replicas
        assert float(ended[0].said[-1]["off"]) < 1e-6  # type: ignore[arg-type]
    assert said(ended, "was open at destroy_process_group. The replicas, which differ after") == [0]


@pytest.mark.parametrize(
    ("how", "algorithm"),
    [("is destroyed", "ddp"), ("says exit", "topk")],
)
def test_replicas_that_are_equal_need_no_words(how: str, algorithm: str) -> None:
    ended = run(how, algorithm)
    assert [each.code for each in ended] == [0] * WORLD
    assert said(ended, "session") == []


def test_at_exit_it_is_closed_too() -> None:
    ended = run("exits")
    assert [each.code for each in ended] == [0] * WORLD, [each.text for each in ended]
    assert said(ended, "was open at the end of the program. The replicas, which differ after 12 steps") == [0]


def test_a_session_that_is_resumed_counts_from_the_checkpoints_own_steps() -> None:
    """Since its last round, though it was loaded since; and rates are compared anew."""
    ended = run("is resumed", "localsgd:sync_every=4")
    assert [each.code for each in ended] == [0] * WORLD, ended[0].text
    assert said(ended, "was open at destroy_process_group. The replicas, which differ after 3 steps") == [0]
    assert said(ended, "learning rate") == []


@pytest.mark.parametrize(
    ("before", "more", "apart"), [(4, 0, None), (4, 3, 3), (6, 0, 2), (6, 1, 3), (6, 2, None)]
)
def test_steps_since_the_last_round_are_counted_over_a_resumption(
    before: int, more: int, apart: int | None
) -> None:
    first, resumed, older = (Crew("localsgd:sync_every=4") for _ in range(3))
    first.train(before)
    saved = [replica.save() for replica in first.replicas]
    resumed.each(lambda rank, replica: replica.load(saved[rank]))
    older.each(lambda rank, replica: replica.load({k: v for k, v in saved[rank].items() if k != LAST_EQUAL}))
    for crew in (first, resumed, older):
        crew.train(more)
        crew.close()
    assert [replica.progress.steps_since_equal for replica in (*first.replicas, *resumed.replicas)] == [
        apart
    ] * 6
    if apart:  # a checkpoint that does not say when: since the beginning
        assert [replica.progress.steps_since_equal for replica in older.replicas] == [before + more] * 3


def test_a_rank_that_raises_tells_the_others_and_nobody_waits() -> None:
    begun = time.monotonic()
    ended = run("raises")
    assert time.monotonic() - begun < 60
    assert [each.code for each in ended] == [0, 1, 0]
    assert said(
        ended, "could not be closed: rank 1 has left in round 0: ValueError: of the script's own"
    ) == [0, 2]
    assert said(ended, "were not averaged") == [0, 2]


def test_a_rank_that_ends_early_is_named() -> None:
    ended = run("ends early")
    assert [each.code for each in ended] == [0] * WORLD
    assert said(ended, "rank 1 closed its session after 6 steps") == [0, 1, 2]


def test_a_rank_that_is_killed_is_named_and_the_others_end() -> None:
    ended = run("is killed")
    assert [each.code for each in ended] == [0, -9, 0]
    assert said(ended, "could not be closed: ") == [0, 2]
    assert said(ended, "rank 1") == [0, 2]


def test_who_saves_between_rounds_is_told_once() -> None:
    ended = run("saves", "localsgd:sync_every=8")
    read = "has read the state_dict of its own replica"
    assert said(ended, read) == [0]
    says = f"{read}: the replicas of 'localsgd:sync_every=8', which differ after 4 steps of their own, "
    assert ended[0].text.count(says + "agree again after the next round") == 1
    never = (
        "'lowbit', which differ after 1 step of their own, agree again in session.sync() and close() alone"
    )
    assert never in ended[0].text
    assert said(run("saves", "localsgd:sync_every=4"), read) == []
