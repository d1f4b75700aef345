"""A rank that goes wrong is named by all the others, within the time-out; nobody hangs."""

import re

import pytest
from launching import ranks

SAYS = {
    "killed": "rank 1 did not answer in round 5: gone or frozen",
    "frozen": "rank 1 did not answer in round 5: gone or frozen",
    "raises": "rank 1 has left in round 5: ValueError: a bad batch",
    "interrupted": "rank 1 has left in round 5: KeyboardInterrupt",
}


@pytest.mark.parametrize(
    ("fault", "algorithm"),
    [
        ("killed", "topk"),
        ("frozen", "topk"),
        ("raises", "topk"),
        ("killed", "dense"),
        ("frozen", "ddp"),
        ("raises", "localsgd:sync_every=1"),
        ("killed", "odsgd"),
        ("interrupted", "odsgd"),
    ],
)
def test_the_others_name_it(fault: str, algorithm: str) -> None:
    late = algorithm == "odsgd"
    ended = ranks("faulty.py", 3, fault, algorithm, seconds=90, lost=1)
    for rank in (0, 2):
        assert ended[rank].code == 1, ended[rank].text
        (said,) = ended[rank].said
        assert said["kind"] == "PeerLost", said
        # Where answers come late, the round in which the others notice is a matter of luck.
        says = re.sub(r"in round \d+", "in round 5", str(said["says"])) if late else str(said["says"])
        assert SAYS[fault] in says, said
        assert float(str(said["seconds"])) < 25
