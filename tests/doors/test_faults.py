"""A rank that goes wrong is named by all the others, within the time-out; nobody hangs."""

import re

import pytest
from launching import ranks

SAYS = {
    "killed": "rank 1 did not answer in round 5: gone or frozen",
    "frozen": "rank 1 did not answer in round 5: gone or frozen",
    "raises": "rank 1 has left in round 5: ValueError: a bad batch",
    "overflows": "finite entries became too large to be sent or owed",
    "interrupted": "rank 1 has left in round 5: KeyboardInterrupt",
}


@pytest.mark.parametrize(
    ("fault", "algorithm"),
    [
        ("killed", "topk"),
        ("frozen", "topk"),
        ("raises", "topk"),
        ("overflows", "topk"),
        ("killed", "gtopk"),
        ("frozen", "gtopk"),
        ("killed", "dense"),
        ("frozen", "ddp"),
        ("raises", "localsgd:sync_every=1"),
        ("killed", "odsgd"),
        ("interrupted", "odsgd"),
        ("killed", "daso:delay=3"),
        ("interrupted", "daso:delay=3"),
    ],
)
def test_the_others_name_it(fault: str, algorithm: str) -> None:
    late = algorithm.startswith(("odsgd", "daso"))
    world = 4 if algorithm.startswith("daso") else 3  # nodes of two; a round is under way as it dies
    ended = ranks("faulty.py", world, fault, algorithm, seconds=90, lost=1)
    for rank in set(range(world)) - {1}:
        assert ended[rank].code == 1, ended[rank].text
        (said,) = ended[rank].said
        assert said["kind"] == "PeerLost", said
        # Where answers come late, the round in which the others notice is a matter of luck.
        says = re.sub(r"in round \d+", "in round 5", str(said["says"])) if late else str(said["says"])
        assert SAYS[fault] in says, said
        assert float(str(said["seconds"])) < 25
