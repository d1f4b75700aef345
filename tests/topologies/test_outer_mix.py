"""NoLoCo: the outer steps of its authors' code in plain tensors, what is kept, and what ranks cannot be."""

import pytest
import torch
from mixed_replicas import N, assert_followed, assert_nan_named, assert_resumed, matrix, synced
from replica_threads import LR, Crew, gradient
from torch import Tensor

from tacit.algorithms import parse
from tacit.compressors import Dense, OuterMix, PublicCopy, PushSum, TopK
from tacit.contracts import Compressor, MixingTopology
from tacit.errors import ConfigError
from tacit.merges import Average, Mix
from tacit.strategy import Strategy
from tacit.topologies import Directed, Flat, Gossip, Groups


def by_hand(
    topology: Groups | Gossip,
    peers: int,
    steps: int,
    lr: float,
    mu: float,
    every: int = 1,
    late: bool = False,
) -> Tensor:
    """The authors' lines, with the means of delta and of phi apart; [step, rank, entry]."""
    theta = torch.ones(peers, N, dtype=torch.float64)
    phi, m, way, trace = theta.clone(), torch.zeros_like(theta), None, []
    for t in range(steps):
        theta = torch.stack([each - LR * gradient(each, i, t) for i, each in enumerate(theta)])
        if way is not None:  # an answer that left a step ago comes on top of that step
            theta, way = theta + way, None
        if (t + 1) % every == 0:
            w = matrix(topology, peers, (t + 1) // every - 1)
            delta = theta - phi
            m = mu * m + lr * (w @ delta) + lr * (w @ phi - phi)
            phi = phi + m
            if late:
                way = phi - theta
            else:
                theta = phi.clone()
        trace.append(theta.clone())
    return torch.stack(trace)


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        ("noloco:sync_every=1", 2),
        ("noloco:sync_every=2,outer_lr=0.5,outer_momentum=0.9", 4),
        ("noloco:sync_every=3", 6),
        ("noloco:sync_every=1,outer_momentum=0", 6),
        ("noloco:sync_every=2,late=1", 4),
        ("noloco:sync_every=2,group_size=4", 4),
    ],
)
def test_replicas_take_the_outer_steps_of_the_authors_code(text: str, peers: int) -> None:
    (level,) = parse(text).levels
    topology, sender, late = level.topology, level.compressor, bool(level.overlap.apply_at(0))
    assert isinstance(topology, Groups)
    assert isinstance(sender, OuterMix)
    every = level.rounds.sync_every  # type: ignore[attr-defined]
    replicas = Crew(level, peers=peers)
    want = by_hand(topology, peers, 12, sender.lr, sender.momentum, every, late)
    assert_followed(replicas.train(12), [*want], atol=5e-6)
    found = synced(replicas)
    if not late:
        assert torch.allclose(found.double(), want[-1].mean(0), atol=5e-6), "and leaves their mean"
    for replica in replicas.replicas:
        kept = replica.session.store.named_state()
        assert {field for _, field in kept} == {"slow", "momentum"}
        assert not any(each.tensor.any() for each in kept.values()), "at the anchor, and at rest"
    replicas.close()


def test_after_sync_it_goes_on_from_the_mean() -> None:
    replicas = Crew("noloco:sync_every=1,outer_momentum=0.9", peers=2)
    replicas.train(5)
    replicas.sync()
    start = replicas.replicas[0].flat.double()
    trace = replicas.train(4)
    theta, phi, m = start.repeat(2, 1), start.repeat(2, 1), torch.zeros(2, N).double()
    for t in range(4):
        theta = torch.stack([each - LR * gradient(each, i, t + 5) for i, each in enumerate(theta)])
        m = 0.9 * m + 0.7 * (theta.mean(0) - phi)
        phi = phi + m
        theta = phi.clone()
        assert all(torch.allclose(trace[r][t].double(), theta[r], atol=5e-6) for r in range(2)), t
    replicas.close()


def test_in_any_graph_of_gossip_and_without_momentum_it_is_gossip() -> None:
    ring = Strategy(subject="delta", compressor=OuterMix(0.6, 0.4), topology=Gossip("ring"), merge=Mix())
    want = by_hand(Gossip("ring"), 3, 8, 0.6, 0.4)
    assert_followed(Crew(ring, peers=3).train(8), [*want], atol=5e-6)
    plain = Strategy(
        subject="delta", compressor=OuterMix(1.0, 0.0), topology=Groups(2, "random"), merge=Mix()
    )
    for one, other in zip(Crew(plain, peers=5).train(8), Crew("prague", peers=5).train(8), strict=True):
        assert torch.allclose(one[-1], other[-1], atol=2e-6)


def test_a_rank_sends_its_replica_once_a_round() -> None:
    replicas = Crew("noloco:sync_every=2", peers=4)
    replicas.train(8)
    for replica in replicas.replicas:
        flags = 2 * 3 / 4 * 4 * 4 * len(replica.session.buckets)
        compared = 8 * 3 / 4  # in the first of the four rounds, where they begin
        assert replica.session.stats.totals.bytes_out / 4 == 4 * N + flags + compared
    replicas.close()


def test_a_run_that_is_resumed_goes_on_bit_for_bit() -> None:
    for text in ("noloco:sync_every=2", "noloco:sync_every=2,late=1"):
        assert_resumed(text)


def test_two_byte_parameters_keep_their_slow_ones_in_fp32() -> None:
    replicas = Crew("noloco:sync_every=1", peers=2, dtype=torch.bfloat16)
    replicas.train(3)
    kept = replicas.replicas[0].session.store.named_state()
    assert {each.tensor.dtype for each in kept.values()} == {torch.float32}
    assert torch.equal(replicas.replicas[0].named["a"], (1 + kept["a", "slow"].tensor.bfloat16()))
    replicas.close()


def test_a_replica_alone_takes_its_own_steps() -> None:
    alone = Crew("localsgd:sync_every=100", peers=1).train(6)
    assert torch.equal(Crew("noloco:sync_every=2", peers=1).train(6)[0][-1], alone[0][-1])


def test_a_nan_is_told_on_all_ranks() -> None:
    assert_nan_named("noloco:sync_every=1", peers=4)


def test_odd_ranks_are_refused_at_attach() -> None:
    for peers, says in ((3, "2 or 4"), (5, "4 or 6"), (7, "6 or 8")):
        with pytest.raises(ConfigError, match=rf"groups of 2 with {peers} ranks.*train with {says} ranks"):
            parse("noloco").levels[-1].topology.check_ranks(peers)
        parse("prague").levels[-1].topology.check_ranks(peers)
    with pytest.raises(ConfigError, match=r"groups of 4 with 6 ranks.*train with 4 or 8"):
        Groups(4, "random", equal=True).check_ranks(6)
    for peers in (1, 2, 4, 6):
        Groups(2, "random", equal=True).check_ranks(peers)


@pytest.mark.parametrize(
    ("topology", "peers", "says"),
    [
        (Groups(2), 6, "train with 4 or 8 ranks"),
        (Groups(8), 4, "write 4"),
        (Gossip(((0.5, 0.5), (0.5, 0.5))), 3, "has 2 rows, and there are 3 ranks"),
        (Directed(((0.5, 0.5), (0.5, 0.5))), 3, "has 2 rows, and there are 3 ranks"),
    ],
)
def test_what_is_for_other_numbers_of_ranks_is_refused_at_attach(
    topology: MixingTopology, peers: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        topology.check_ranks(peers)
    Gossip("measured").check_ranks(peers)  # it is made for them


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lr": 0.0}, r"lr=0\.0 is not a finite number above 0: write 0\.7"),
        ({"momentum": 1.0}, r"momentum=1\.0 is not in \[0, 1\)"),
        ({"momentum": -0.1}, r"momentum=-0\.1"),
    ],
)
def test_numbers_that_cannot_be(given: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        OuterMix(**given)


def test_what_does_not_fit_is_refused() -> None:
    for text, says in (
        ("noloco:outer_lr=0", "outer_lr=0"),
        ("noloco:outer_momentum=1", "outer_momentum=1"),
        ("noloco:group_size=3", "write 2 or 4"),
        ("noloco:late=-1", "late=-1"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse(text)
    with pytest.raises(ConfigError, match="equal='yes' is neither True nor False"):
        Groups(equal="yes")  # type: ignore[arg-type]
    fits: tuple[tuple[Compressor, Groups, str], ...] = (
        (PublicCopy(TopK()), Groups(), r'groups are others in each round: write topology=Gossip\("ring"\)'),
        (OuterMix(), Groups(global_every=4), "leave global_every out"),
    )
    for compressor, topology, says in fits:
        with pytest.raises(ConfigError, match=says):
            Strategy(subject="delta", compressor=compressor, topology=topology, merge=Mix())
    with pytest.raises(ConfigError, match=r"topology=Gossip\(\), merge=Mix\(\)"):
        Strategy(subject="delta", compressor=OuterMix(), topology=Flat(), merge=Average())


def test_push_sum_in_groups_is_their_mean() -> None:
    """Its weights stay 1 there."""
    pushed, plain = (
        Crew(Strategy(subject="delta", compressor=each, topology=Groups(2), merge=Mix()), peers=4).train(6)
        for each in (PushSum(), Dense())
    )
    assert all(torch.allclose(a[-1], b[-1], atol=2e-6) for a, b in zip(pushed, plain, strict=True))
