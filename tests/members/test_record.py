"""What members agree on: who takes part next, and whose state the others take."""

from dataclasses import replace

from tacit.members.record import Life, MemberArrival, Period, RankArrival, following


def arrived(id: str, step: int, rounds: list[int], acted: list[bool], ready: bool = True) -> MemberArrival:
    ranks = [RankArrival(*each) for each in zip(rounds, acted, strict=True)]
    return MemberArrival(id, id, ready, step, ranks=ranks)


def after(*there: MemberArrival) -> Period:
    now = Period(3, [each for each in there if each.ready])
    return Period.of(following(now, {each.id: each for each in there}, {}, 64).to_text())


def test_where_a_round_has_ended_on_one_shard_alone_each_shard_has_its_source() -> None:
    a = arrived("a", 8, [5, 4], [True, False])
    b = arrived("b", 8, [4, 5], [False, True])
    new = arrived("new", 0, [0, 0], [True, True], ready=False)
    period = after(a, b, new)
    assert [each.id for each in period.members] == ["a", "b", "new"]
    assert period.sources == [0, 1]
    assert [period.behind(shard) for shard in range(2)] == [[1, 2], [0, 2]]


def test_who_has_gone_on_beyond_the_round_is_the_source_of_all_shards() -> None:
    half = arrived("half", 8, [5, 4], [True, False])
    on = arrived("on", 9, [5, 5], [True, True])
    period = after(half, on)
    assert period.sources == [1, 1]
    assert [period.behind(shard) for shard in range(2)] == [[], [0]]  # it keeps what it has done in one


def test_where_answers_come_late_shards_go_on_after_the_step_of_the_furthest() -> None:
    """A round has ended on one shard of a member, and another member has gone on a step without it."""
    ended = arrived("ended", 8, [5, 4], [True, True])
    on = arrived("on", 9, [4, 4], [True, False])
    period = after(ended, on)
    assert period.sources == [0, 1]
    assert [period.reached(shard) for shard in range(2)] == [(9, False), (9, True)]


def test_newcomers_alone_take_the_state_of_the_first() -> None:
    period = after(*(arrived(id, 0, [0, 0], [True, True], ready=False) for id in "ab"))
    assert period.sources == [0, 0]
    assert period.behind(0) == period.behind(1) == [1]


def test_those_that_are_as_far_as_the_source_share_out_who_takes_its_state() -> None:
    on, also = (arrived(id, 8, [5], [True]) for id in ("on", "also"))
    late, unacted = arrived("late", 7, [4], [True]), arrived("unacted", 8, [5], [False])
    one, two = (arrived(id, 0, [0], [True], ready=False) for id in "xy")
    period = after(on, also, unacted, late, one, two)
    assert [period.members[i].id for i in period.behind(0)] == ["late", "x", "y"]
    assert period.givers(0) == {3: 0, 4: 1, 5: 0}


def test_of_two_newcomers_of_one_name_the_first_one_is_a_member() -> None:
    first, second = (replace(arrived(id, 0, [0], [True], ready=False), name="a") for id in "xy")
    assert [each.id for each in after(first, second).members] == ["x"]
    assert [each.id for each in after(arrived("a", 8, [5], [True]), second).members] == ["a"]


def test_no_two_periods_have_one_number() -> None:
    """One had read the fifth record when the store died, and the next store got an earlier one."""
    there = after(arrived("a", 8, [5], [True]), replace(arrived("b", 8, [5], [True]), known=5))
    assert there.number == 6


def test_steps_that_the_gone_had_not_sent_are_counted() -> None:
    a, b = (arrived(id, 8, [5], [True]) for id in "ab")
    gone = {"b": Life(step=11, unsent=3), "c": None}
    assert following(after(a, b), {"a": a}, gone, 64).lost == 3


def test_what_was_said_goes_with_the_state() -> None:
    """Those that begin after all others have gone begin with the data, too."""
    a, b = (replace(arrived(id, 8, [5], [True]), says={"epoch": 4}) for id in ("a", "b"))
    now = after(a, b)
    new = arrived("new", 0, [0], [True], ready=False)
    gone = {"a": Life(step=8, says={"epoch": 5})}
    assert following(now, {"b": b, "new": new}, gone, 64).said == [{"epoch": 5}, {"epoch": 4}]
    assert following(now, {"new": new}, gone, 64).said == []
