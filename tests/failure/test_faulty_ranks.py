"""A rank that goes wrong is named by all the others, within the time-out; nobody hangs."""

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest

from rank_processes import Ended, ranks

SAYS = {
    "killed": "rank 1 did not answer in round 5: gone or frozen",
    "frozen": "rank 1 did not answer in round 5: gone or frozen",
    "raises": "rank 1 has left in round 5: ValueError: a bad batch",
    "overflows": "finite entries became too large to be sent or kept as residual",
    "interrupted": "rank 1 has left in round 5: KeyboardInterrupt",
    "slow": "rank 1 did not enter round 5 in time",
}
FAULTS = [
    ("killed", "topk"),
    ("killed", "FSDP2, topk"),
    ("raises", "FSDP2, localsgd:sync_every=1"),
    ("frozen", "topk"),
    ("raises", "topk"),
    ("overflows", "topk"),
    ("killed", "gtopk"),
    ("killed", "dense:topology=ring"),
    ("frozen", "dense:topology=double-tree"),
    ("killed", "dense"),
    ("frozen", "ddp"),
    ("raises", "localsgd:sync_every=1"),
    ("killed", "odsgd"),
    ("killed", "daso:delay=3"),
    ("interrupted", "daso:delay=3"),
    ("killed", "gossip"),
    ("killed", "prague"),
    ("slow", "topk"),
    ("slow", "ddp"),
    ("slow", "localsgd:sync_every=1"),
]
AT_ONCE = 2
"""Launches side by side: most of their time passes in waiting for what does not come."""


def world(algorithm: str) -> int:
    """Nodes of two, for what goes by node; two replicas of two shards."""
    return 4 if algorithm.startswith(("daso", "FSDP2")) else 3


Launch: TypeAlias = tuple[str, ...]
"""A script, and its arguments."""


def launch(params: dict[str, Any]) -> tuple[Launch, int, dict[str, Any]]:
    """What a test with these parameters starts, on how many ranks, and how."""
    match params:
        case {"how": how, "victim": victim}:
            return ("faulty_rank.py", how, "topk", str(victim)), 3, {"lost": victim, "hosted": True}
        case {"where": where, "algorithm": algorithm}:
            return ("killed_while_attaching.py", algorithm, where), 3, {"lost": 1}
        case {"moment": moment}:
            return ("killed_while_rebuilding.py", moment), 4, {"lost": 1}
        case {"words": words}:
            return ("killed_while_rebuilding.py", *words), 2, {}
        case _:
            fault, algorithm = params["fault"], params["algorithm"]
            return ("faulty_rank.py", fault, algorithm), world(algorithm), {"lost": 1}


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest) -> Iterator[dict[Launch, Future[list[Ended]]]]:
    """Those of the tests that were chosen."""
    chosen = [item for item in request.session.items if item.path == request.path]
    each = [launch(item.callspec.params) for item in chosen if hasattr(item, "callspec")]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {argv: pool.submit(ranks, argv[0], count, *argv[1:], **how) for argv, count, how in each}


@pytest.mark.parametrize(("fault", "algorithm"), FAULTS)
def test_the_others_name_it(fault: str, algorithm: str, launches: dict[Launch, Future[list[Ended]]]) -> None:
    late = algorithm.startswith(("odsgd", "daso"))
    ended = launches["faulty_rank.py", fault, algorithm].result()
    for rank in set(range(world(algorithm))) - {1}:
        assert (ended[rank].code, len(ended[rank].said)) == (1, 1), ended[rank].text
        (said,) = ended[rank].said
        assert said["kind"] == "PeerLost", said
        # Where answers come late, the round in which the others notice is a matter of luck.
        says = re.sub(r"in round \d+", "in round 5", str(said["says"])) if late else str(said["says"])
        assert SAYS[fault] in says, said
        mixes = algorithm in ("gossip", "prague")
        assert ("attach 'adpsgd:allow_lost=true'" in says) == mixes, said
        assert float(str(said["seconds"])) < 25


@pytest.mark.parametrize("moment", ["recut", "state_dict"])
def test_it_is_named_also_where_ranks_put_their_state_together(
    moment: str, launches: dict[Launch, Future[list[Ended]]]
) -> None:
    """As DDP's own buckets become the buckets, behind the third round, and in a checkpoint."""
    ended = launches["killed_while_rebuilding.py", moment].result()
    for rank in (0, 2, 3):
        (said,) = ended[rank].said
        assert said["kind"] == "PeerLost", said
        assert "rank 1 did not answer in round" in str(said["says"])
        assert float(str(said["seconds"])) < 25


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (("alone",), "state_dict"),
        (("sync", "topk"), "sync"),
        (("sync", "localsgd:sync_every=8"), "sync"),
        (("load", "topk"), "load_state_dict"),
    ],
)
def test_a_rank_that_is_alone_in_a_call_is_an_error_that_names_it(
    words: tuple[str, ...], call: str, launches: dict[Launch, Future[list[Ended]]]
) -> None:
    for each in launches["killed_while_rebuilding.py", *words].result():
        (said,) = each.said
        assert said["kind"] == "PeerLost", said
        says = f"rank 0 waits in session.{call}() after 5 steps, and rank 1 has gone on without it: "
        assert str(said["says"]).startswith(says), said
        assert float(str(said["seconds"])) < 50, "the time-out is 100 s"


@pytest.mark.parametrize(
    ("algorithm", "where", "doing"),
    [
        (
            "topk",
            "tacit.attaching.agreement.gathered",
            "comparing the arguments of tacit.attach, which all ranks",
        ),
        ("adpsgd", "tacit.stores.pairs.joining._Door.missing", "while ranks attached: "),
        ("ddp", "tacit.levels.node_layout.measured_links", ""),
    ],
)
def test_it_is_named_also_where_ranks_attach(
    algorithm: str, where: str, doing: str, launches: dict[Launch, Future[list[Ended]]]
) -> None:
    ended = launches["killed_while_attaching.py", algorithm, where].result()
    for rank in (0, 2):
        (said,) = ended[rank].said
        assert said["kind"] == "PeerLost", said
        assert re.match(
            rf"rank 1 did not answer in round 0: gone or frozen \(rank \d: {doing}", str(said["says"])
        )
        assert "GLHF" not in str(said["says"])
        assert float(str(said["seconds"])) < 25


@pytest.mark.parametrize(
    ("how", "victim", "says"),
    [
        ("killed", 1, SAYS["killed"]),
        ("killed", 0, "rank 0 is gone, which held the store by which ranks find each other"),
        ("raises", 0, "rank 0 has left in round 5: ValueError: a bad batch"),
    ],
)
def test_it_is_named_also_where_rank_0_hosts_the_store(
    how: str, victim: int, says: str, launches: dict[Launch, Future[list[Ended]]]
) -> None:
    """Without torchrun's agent: whoever meets an error then ends with its process."""
    ended = launches["faulty_rank.py", how, "topk", str(victim)].result()
    for rank in set(range(3)) - {victim}:
        (said,) = ended[rank].said
        assert said["kind"] == "PeerLost", said
        assert says in str(said["says"]), said
        assert float(str(said["seconds"])) < 25


def test_who_finds_a_nan_late_waits_for_the_others() -> None:
    each = [one.said[0] for one in ranks("faulty_rank.py", 3, "nan", "pipesgd")]
    assert [one["kind"] for one in each] == ["NonFinite"] * 3, each
    at = [float(str(one["at"])) for one in each]
    assert max(at) - min(at) < 0.6, "rank 2 begins its backward a second later"
