"""Shapes of an all-reduce by the clock: what each takes is its formula, and who wins follows from that."""

from collections.abc import Generator

import made_training as made
import pytest

from tacit.algorithms import parse
from tacit.algorithms.auto import candidates, shaped
from tacit.planning.profile import ParamReady, Profile, StepProfile
from tacit.planning.simulation.clock import Activity, Clock
from tacit.planning.simulation.rehearsal import rehearse
from tacit.topologies import schedules
from tacit_lab.cluster_plans import shapes_worth_a_look

ALPHA, RATE = 1e-3, 1e8
"""Seconds of the way there and back, and bytes a second."""
SHAPES = ("ring", "halving-doubling", "double-tree", "torus", "blueconnect")


def profile(nbytes: int) -> Profile:
    """One parameter, whose gradient is ready at the end of a backward of a millisecond."""
    parameters = (ParamReady("w", (nbytes // 4,), "float32", 0.001),)
    return Profile(StepProfile(0.0, 0.001, 0.001, 0.0, parameters, 0.0), nbytes, 1, 1, 4, 0.0, 0.0, 0, 0)


def seconds(word: str, nbytes: int, nodes: int, ranks: int = 1, latency: float = ALPHA) -> float:
    """How long the messages of one exchange take, each behind the one before it."""
    network = made.network(nodes, ranks, RATE, latency=latency / 2)
    (level,) = rehearse(parse(f"dense:topology={word}"), profile(nbytes), nodes, ranks)
    clock = Clock(cores=8.0)

    def exchange() -> Generator[Activity, None, None]:
        for message in level.buckets[0].messages:
            own = message.own
            yield clock.send(network.transfer(own.kind, own.axis, own.sent, message.crossing))

    clock.run(exchange())
    return clock.now


@pytest.mark.parametrize("peers", [4, 8, 16])
@pytest.mark.parametrize("nbytes", [1 << 12, 1 << 20, 1 << 26])
def test_what_a_shape_takes_is_its_formula(peers: int, nbytes: int) -> None:
    m, beta = peers.bit_length() - 1, nbytes / RATE
    rows, columns = schedules.found_sides(peers)
    least = 2 * (peers - 1) / peers * beta
    gloos = max(2 * (peers - 1) * ALPHA + least / 2, least)
    assert seconds("all-reduce", nbytes, peers) == pytest.approx(gloos, rel=1e-3)
    assert seconds("ring", nbytes, peers) == pytest.approx(2 * (peers - 1) * ALPHA + least, rel=1e-3)
    assert seconds("halving-doubling", nbytes, peers) == pytest.approx(2 * m * ALPHA + least, rel=1e-3)
    hops = 2 * (rows - 1) + 2 * (columns - 1)
    assert seconds("torus", nbytes, peers) == pytest.approx(hops * ALPHA + least, rel=1e-3)
    pieces = min(max(1, nbytes // 2 >> 18), 16)
    rounds = len(schedules.double_tree(peers, pieces).rounds)
    tree = rounds * (ALPHA + beta / (2 * pieces))
    assert seconds("double-tree", nbytes, peers) == pytest.approx(tree, rel=1e-3)


def fastest(nbytes: int, peers: int) -> str:
    return min(SHAPES, key=lambda word: seconds(word, nbytes, peers))


@pytest.mark.parametrize(
    ("peers", "nbytes", "winner"),
    [
        # Of a power of two, halves have the fewest messages and the fewest bytes.
        (16, 1 << 12, "halving-doubling"),
        (16, 1 << 26, "halving-doubling"),
        # Of another product, what is left over makes halves dear: rings of its factors have fewer bytes.
        (12, 1 << 26, "blueconnect"),
        # Of a prime, halves win while latency counts, and a ring where bytes do; trees between, of many.
        (17, 1 << 12, "halving-doubling"),
        (17, 1 << 28, "ring"),
        (127, 1 << 12, "halving-doubling"),
        (127, 10**7, "double-tree"),
        (127, 1 << 28, "ring"),
    ],
)
def test_which_shape_wins(peers: int, nbytes: int, winner: str) -> None:
    assert fastest(nbytes, peers) == winner


@pytest.mark.parametrize(("nodes", "ranks"), [(4, 4), (3, 5), (8, 8)])
def test_by_level_as_much_leaves_a_node_as_if_it_were_one_rank(nodes: int, ranks: int) -> None:
    nbytes = 60 << 20
    by_level = seconds(f"blueconnect-{ranks}x{nodes}", nbytes, nodes, ranks, latency=0.0)
    assert by_level == pytest.approx(2 * (nodes - 1) / nodes * nbytes / RATE, rel=1e-3)
    flat = 2 * (nodes * ranks - 1) / (nodes * ranks) * nbytes / RATE
    assert seconds("all-reduce", nbytes, nodes, ranks, latency=0.0) == pytest.approx(flat, rel=1e-3)


def test_shapes_are_planned_where_they_are_faster_than_a_ring() -> None:
    def worth(nbytes: int, latency: float, nodes: int, ranks: int = 1) -> list[str]:
        return shapes_worth_a_look(profile(nbytes), made.network(nodes, ranks, RATE, latency=latency))

    assert worth(1 << 12, 0.06, 4)[:2] == ["dense:topology=direct", "dense:topology=halving-doubling"]
    assert "dense:topology=direct" not in worth(1 << 26, ALPHA, 4), "(P - 1) times the bytes"
    assert "dense:topology=halving-doubling" in worth(1 << 12, ALPHA, 16)
    assert worth(1 << 26, 0.0, 17) == [], "without latency a ring has the fewest bytes"
    assert worth(1 << 26, 0.0, 4, 4) == [
        "dense:topology=halving-doubling",
        "dense:topology=torus",
        LEVELS,
        "dense:topology=hierarchical",
    ]
    assert worth(1 << 12, ALPHA, 17) == ["dense:topology=halving-doubling", "dense:topology=double-tree"]


LEVELS = "dense:topology=blueconnect-4x4"


def test_auto_considers_them_among_many_ranks() -> None:
    assert shaped(2, 1) == [] == shaped(1024, 8)
    assert shaped(3, 1) == ["dense:topology=direct"]
    assert candidates("exact") == ["ddp", "dense"]
    assert "powersgd:topology=direct" in candidates("feedback", 4, 1)
    assert "dense:topology=direct" not in candidates("exact", 17, 1)
    assert candidates("exact", 4, 4) == ["ddp", "dense", *shaped(4, 4)]
    assert candidates("rounded", 8, 1)[-6:] == [
        *("bf16", "int8", "qsgd", "bf16:topology=halving-doubling"),
        *("int8:topology=all-gather", "qsgd:topology=all-gather"),
    ]
    assert {"int8:topology=all-gather", "efsign:topology=all-gather"} <= {*candidates("feedback", 8, 1)}
    assert "powersgd:topology=halving-doubling" in candidates("feedback", 17, 1)
    for text in (*candidates("periodic", 8, 2), *candidates("periodic", 17, 1)):
        assert parse(text).name == text
    for text in [*shaped(4, 4), *shaped(3, 4), *shaped(17, 1)]:
        assert parse(text).name == text
    assert "dense:topology=blueconnect" in shaped(12, 1)
