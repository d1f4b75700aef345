"""All-gather or two phases, where nobody has told: what is foretold is what is sent, and nothing is lost."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tacit
from cases import for_each
from tacit.algorithms import known, parse
from tacit.contracts import (
    WORLD,
    Compressor,
    LinkRates,
    MixingTopology,
    PairTopology,
    Topology,
    made_for,
)
from tacit.errors import ConfigError
from tacit.session import Session
from tacit.strategy import Strategy
from tacit.topologies import Auto, Decoupled, Flat, GlobalTopK, Hierarchical, Star, TwoPhase, Uneven
from tacit.topologies.two_phase import SECOND
from tacit.transports.loopback import Loopback, LoopbackTransport

NAMED = {
    "a": torch.zeros(200, 175),
    "b": torch.zeros(175),
    "c": torch.zeros(130, 66),
    "d": torch.zeros(130),
}
LOTS = [["d", "c"], ["b", "a"]]
WORLDS = [1, 2, 3, 4, 8]
ALONE = [
    name
    for name in known()
    if len(parse(name).levels) == 1 and parse(name).levels[0].subject != "nothing"
    if not isinstance(parse(name).levels[0].topology, Star | MixingTopology | PairTopology)
    if name != "three-lc"  # whose messages are as long as their values make them
]
BOTH_WAYS = {"fp8", "int8", "sign", "efsign", "onebit", "onebit-adam", "qsgd", "terngrad", "natural"}
BOTH_WAYS |= {"natural-dithering"}
BOTH_WAYS |= {"topk", "dgc", "threshold", "stc", "streaming-diloco", "lowbit"}
UNBIASED = {"qsgd", "terngrad", "natural", "natural-dithering"}
OWES = sorted(BOTH_WAYS - UNBIASED - {"streaming-diloco", "dgc", "lowbit"})
SPARSE = {"topk", "dgc", "threshold", "stc"}
SIGNS = {"sign", "efsign", "onebit", "onebit-adam"}


def undecided(name: str) -> Strategy:
    """The algorithm, with the choice left to the session."""
    level = parse(name).levels[0]
    return replace(level, topology=Auto()) if name.partition(":")[0] in BOTH_WAYS else level


def expected(name: str, peers: int) -> Topology:
    """Fewer bytes, unless what they bring is worth so much less: the largest entries are a twelfth of it."""
    own = parse(name).levels[0].topology
    if isinstance(own, GlobalTopK | Decoupled | Uneven):
        return own
    few = 4 if name == "terngrad" else 3 if name in SIGNS else 2
    return TwoPhase() if name in BOTH_WAYS - SPARSE and peers > few else Flat()


class Group:
    """Sessions of P ranks on a loopback, of one strategy."""

    def __init__(
        self,
        strategy: Strategy,
        net: Loopback,
        topology: Topology | None = None,
        buckets: list[list[str]] = LOTS,
    ) -> None:
        if topology is not None:
            strategy = Strategy(
                subject=strategy.subject,
                rounds=strategy.rounds,
                compressor=strategy.compressor,
                topology=topology,
                merge=strategy.merge,
            )
        self.net = net
        self.sessions = [
            Session(strategy, NAMED, LoopbackTransport(net, rank), buckets) for rank in range(net.world)
        ]

    @property
    def topology(self) -> Topology:
        (found,) = {session.strategy.topology for session in self.sessions}
        return found

    def given(self, seed: int) -> list[list[Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        sizes = [bucket.numel for bucket in self.sessions[0].buckets]
        return [[torch.randn(n, generator=generator) for _ in self.sessions] for n in sizes]

    def round(self, given: list[list[Tensor]]) -> dict[str, Tensor]:
        """What was agreed on, by parameter; `given` is overwritten."""
        agreed = {}
        for i, xs in enumerate(given):
            done = self.net.run([s.open(i, x) for s, x in zip(self.sessions, xs, strict=True)])
            for session, outcome in zip(self.sessions, done, strict=True):
                session.complete(i, outcome)
            assert all(torch.equal(x, xs[0]) for x in xs)
            agreed |= {s.name: xs[0][s.start : s.stop].clone() for s in self.sessions[0].buckets[i].slices}
        for session in self.sessions:
            session.advance()
        return agreed

    def means(self, given: list[list[Tensor]]) -> dict[str, Tensor]:
        buckets = zip(self.sessions[0].buckets, given, strict=True)
        return {
            s.name: torch.stack(xs).mean(0)[s.start : s.stop] for bucket, xs in buckets for s in bucket.slices
        }

    def new_residual(self, units: int) -> dict[str, Tensor]:
        """What the mean still has to receive."""
        finite_probe = {name: torch.zeros(p.numel()) for name, p in NAMED.items()}
        for session in self.sessions:
            for (name, field), kept in session.store.named_state().items():
                share = 1.0 if field == SECOND else 1 / units if field.endswith("residual") else 0.0
                finite_probe[name][kept.start : kept.start + kept.tensor.numel()] += share * kept.tensor
        return finite_probe


def loses_nothing(group: Group, units: int, rounds: int = 5) -> None:
    told = {name: torch.zeros(p.numel()) for name, p in NAMED.items()}
    true = {name: torch.zeros(p.numel()) for name, p in NAMED.items()}
    for seed in range(rounds):
        given = group.given(seed)
        for name, mean in group.means(given).items():
            true[name] += mean
        for name, agreed in group.round(given).items():
            told[name] += agreed
    for name, new_residual in group.new_residual(units).items():
        torch.testing.assert_close(told[name] + new_residual, true[name], atol=1e-3, rtol=1e-4)


def told(session: Session) -> str:
    return "\n".join(session.describe())


@for_each("peers", WORLDS)
@pytest.mark.parametrize("name", ALONE)
def test_the_cheaper_one_is_chosen_and_every_prediction_is_what_is_sent(name: str, peers: int) -> None:
    strategy = undecided(name)
    transports = [LoopbackTransport(Loopback(peers), rank) for rank in sorted({0, peers // 2, peers - 1})]
    session, *others = [Session(strategy, NAMED, transport, LOTS) for transport in transports]
    choice, chosen = session.choice, session.strategy.topology
    assert all(other.choice == choice for other in others)
    assert chosen == expected(name, peers)
    assert set(choice.sent) == ({Flat(), TwoPhase()} if name in BOTH_WAYS else set())
    for topology in choice.sent or [chosen]:
        group = Group(strategy, Loopback(peers), topology)
        group.round(group.given(0))
        assert group.net.sent == [sum(cost.sent[WORLD] for cost in s.store.costs) for s in group.sessions]
        if choice.sent:
            if strategy.compressor.changes:  # the choice is by what the last phase sends
                group = Group(
                    replace(strategy, compressor=strategy.compressor.inner), Loopback(peers), topology
                )
                group.round(group.given(0))
            assert max(group.net.sent) == choice.sent[topology]
            assert f"{topology}: {choice.sent[topology]:,} bytes sent" in told(session)
        elif name != "gtopk":
            assert f"{chosen}, as " in told(session)
    if peers > 2 and choice.sent:
        assert choice.sent[TwoPhase()] < choice.sent[Flat()]


@for_each("peers", [3, 4])
@for_each("name", OWES)
def test_nothing_is_lost(name: str, peers: int) -> None:
    group = Group(undecided(name), Loopback(peers), TwoPhase())
    loses_nothing(group, peers)


def test_by_their_names_algorithms_are_their_papers() -> None:
    found = {name: parse(name).levels[0].topology for name in BOTH_WAYS}
    assert {name for name, way in found.items() if way == Flat()} == {"topk", "dgc", "threshold", "sign"}
    assert {name for name, way in found.items() if way == TwoPhase()} == {
        "stc",
        "efsign",
        "onebit",
        "onebit-adam",
    }
    for name in BOTH_WAYS - {"streaming-diloco", "lowbit"}:
        for text, way in (("all-gather", Flat()), ("two-phase", TwoPhase()), ("auto", Auto())):
            assert parse(f"{name}:topology={text}").levels[0].topology == way
    with pytest.raises(ConfigError, match="unknown value of topk:topology 'ring'"):
        parse("topk:topology=ring")


def test_what_a_second_compression_loses_is_weighed() -> None:
    def chosen(compressor: Compressor, peers: int) -> tuple[Topology, str]:
        group = Group(Strategy(compressor=compressor), Loopback(peers))
        return group.topology, told(group.sessions[0])

    # Of the mean's entries a tenth arrive at once: 2.3 times as many bytes by an all-gather are worth it.
    largest = tacit.ErrorFeedback(tacit.TopK(ratio=0.1))
    assert chosen(largest, 4)[0] == Flat()
    topology, said = chosen(largest, 16)
    assert topology == TwoPhase()
    assert "bytes sent, times 2.28 for what a second compression loses" in said
    assert chosen(tacit.QSGD(bits=2), 4)[0] == Flat()
    assert chosen(tacit.QSGD(bits=4), 4)[0] == TwoPhase()


def test_latency_is_weighed_where_it_is_known() -> None:
    strategy = undecided("efsign")

    def group(topology: Topology) -> Group:
        return Group(replace(strategy, topology=topology), Loopback(4))

    (flat, two_phase), weighed = (
        group(Auto()).sessions[0].choice.sent.values(),
        group(Auto()).sessions[0].choice,
    )
    gap = weighed.weighed[Flat()] - weighed.weighed[TwoPhase()]
    assert flat > two_phase
    assert gap > 0
    rate = 1e8
    trip = gap * 8 / rate / 2  # one way, of a round trip in which the link carries what two phases save
    assert group(Auto(latency=0.9 * trip, rate=rate)).topology == TwoPhase()
    late = group(Auto(latency=1.1 * trip, rate=rate))
    assert late.topology == Flat()
    assert f"plus {1.1 * gap:,.0f} for latency" in told(late.sessions[0])
    links = LinkRates(((None, 2e8), (rate, None)), ((0, 1), (2, 3)), 1.1 * trip)
    assert made_for(Auto(), links) == Auto(latency=1.1 * trip, rate=rate)
    assert made_for(Hierarchical(), links).options([strategy.compressor]).delays == pytest.approx(
        (1.1 * gap, 2.2 * gap)
    )
    assert not any(each.needs_rates for each in (Auto(), Hierarchical()))
    with pytest.raises(
        ConfigError, match=r"latency=0.03 has no rate .* write Auto\(latency=0.03, rate=1e8\)"
    ):
        Auto(latency=0.03)
    with pytest.raises(ConfigError, match="rate=0 is not a finite number above 0: write bit/s"):
        Auto(rate=0)


def test_bytes_grow_by_a_quarter_from_4_ranks_to_16_and_by_five_times_in_an_all_gather() -> None:
    sent = {}
    for peers in (4, 16):
        session = Session(
            undecided("efsign"), {"w": torch.zeros(512, 2048)}, LoopbackTransport(Loopback(peers), 0), [["w"]]
        )
        assert session.strategy.topology == TwoPhase()
        # Less the word that tells of a NaN, a float to each peer in either way.
        sent[peers] = {each: n - 4 * (peers - 1) for each, n in session.choice.sent.items()}
        payload = (1 << 20) // 8 + 4 * (1 << 20) // 512
        assert sent[peers][TwoPhase()] == 2 * (peers - 1) * payload // peers
    assert sent[16][TwoPhase()] / sent[4][TwoPhase()] == 1.25
    assert sent[16][Flat()] / sent[4][Flat()] == 5


@pytest.mark.parametrize("topology", [Flat(), TwoPhase()])
def test_what_is_told_is_respected(topology: Topology) -> None:
    group = Group(parse("efsign").levels[0], Loopback(4), topology)
    assert group.topology == topology
    assert group.sessions[0].choice.sent == {}
    assert f"topology: {topology}, as the strategy names it" in told(group.sessions[0])


def test_not_told_is_a_value_like_others() -> None:
    strategy = undecided("efsign")
    assert strategy.topology == Auto() == Strategy().topology
    modules = (tacit, tacit.compressors, tacit.merges, tacit.overlap, tacit.rounds, tacit.topologies)
    names = {each: getattr(module, each) for module in modules for each in module.__all__}
    assert eval(repr(strategy), names) == strategy
    for each in (Auto(), Auto("net"), Hierarchical(), Hierarchical(far=TwoPhase("net"))):
        assert eval(repr(each), names) == each
    with pytest.raises(ConfigError, match="unknown axis 'nodes'"):
        Auto("nodes")
    with pytest.raises(ConfigError, match=r"not on the axis between nodes: write Flat\(axis='net'\)"):
        Hierarchical(far=TwoPhase())


@pytest.mark.parametrize(
    ("compressor", "because"),
    [
        (tacit.TopK(), "no residual keeps what a second TopK"),
        (tacit.Sign(), "no residual keeps what a second Sign"),
        (tacit.MajoritySign(), "no residual keeps what a second MajoritySign"),
        (tacit.BF16(), "payloads are additive"),
        (tacit.ErrorFeedback(tacit.PowerSGD()), "an exchange takes several messages"),
        (
            tacit.Scheduled(((3, tacit.ErrorFeedback(tacit.TopK())),), tacit.ErrorFeedback(tacit.Dense())),
            "would never send that residual",
        ),
    ],
)
def test_what_a_second_compression_would_break_stays_an_all_gather(
    compressor: Compressor, because: str
) -> None:
    group = Group(Strategy(compressor=compressor), Loopback(4))
    assert group.topology == Flat()
    assert because in told(group.sessions[0])


@pytest.mark.parametrize(
    "compressor",
    [tacit.QSGD(), tacit.Natural(), tacit.TernGrad(clip=None)],
    ids=["qsgd", "natural", "terngrad"],
)
def test_two_roundings_by_lot_are_right_in_the_mean(compressor: Compressor) -> None:
    group = Group(Strategy(compressor=compressor), Loopback(4), TwoPhase())
    assert not any(field == SECOND for s in group.sessions for _, field in s.store.named_state())
    given = group.given(0)
    true = group.means(given)["a"]
    draws = [group.round([[x.clone() for x in xs] for xs in given])["a"] for _ in range(60)]
    once = torch.stack([(draw - true).square().mean() for draw in draws]).mean()
    # Errors that are independent and centred: the square error of a mean of 60 is a 60th.
    assert float((torch.stack(draws).mean(0) - true).square().mean()) < 1.2 * float(once) / 60


@pytest.mark.parametrize("topology", [TwoPhase(), Auto()])
def test_phases_go_each_in_its_own_way_and_lose_nothing(topology: Topology) -> None:
    phases = tacit.Scheduled(
        ((2, tacit.ErrorFeedback(tacit.Dense())), (2, tacit.ErrorFeedback(tacit.TopK(ratio=0.1)))),
        tacit.ErrorFeedback(tacit.Sign()),
    )
    group = Group(Strategy(compressor=phases), Loopback(4), topology)
    assert group.topology == TwoPhase()
    loses_nothing(group, 4, rounds=7)
    records = group.sessions[0].stats.records
    assert group.net.sent[0] == sum(record.bytes_out for record in records)
    alone = Group(Strategy(compressor=phases.then), Loopback(4), TwoPhase())
    alone.round(alone.given(0))
    assert records[-1].bytes_out == alone.net.sent[0]
    dense = Group(Strategy(compressor=phases.phases[0][1]), Loopback(4), TwoPhase())
    dense.round(dense.given(0))
    assert records[0].bytes_out > dense.net.sent[0]  # the word that tells of a NaN


def test_a_warm_up_is_judged_by_its_last_phase() -> None:
    group = Group(undecided("dgc:ratio=0.01,warmup_steps=4"), Loopback(4))
    for seed in range(6):
        group.round(group.given(seed))
    last = [session.stats.records[-1].bytes_out for session in group.sessions]
    assert max(last) == group.sessions[0].choice.sent[Flat()]


def test_a_phase_that_would_forget_what_is_owed_is_refused() -> None:
    forgets = tacit.Scheduled(((2, tacit.ErrorFeedback(tacit.TopK())),), tacit.ErrorFeedback(tacit.Dense()))
    for compressor in (forgets, tacit.Clip(forgets, max_norm=1.0)):
        with pytest.raises(ConfigError, match=r"would never send that residual: write topology=Flat\(\)"):
            Group(Strategy(compressor=compressor), Loopback(4), TwoPhase())


@for_each(("nodes", "ranks"), [(6, 2), (3, 1), (5, 1), (2, 2), (1, 2)])
@for_each("by", ["slices", "leaders"])
def test_the_way_between_nodes_is_chosen_too(by: str, nodes: int, ranks: int) -> None:
    strategy = Strategy(
        compressor=tacit.ErrorFeedback(tacit.Sign(block=512)),
        topology=Hierarchical(by=by),  # type: ignore[arg-type]
    )
    group = Group(strategy, Loopback.of_nodes(nodes, ranks))
    assert isinstance(group.topology, Hierarchical)
    assert group.topology.far == (TwoPhase("net") if nodes > 3 else Flat("net"))
    for topology, foretold in group.sessions[0].choice.sent.items():
        same = Group(strategy, Loopback.of_nodes(nodes, ranks), topology)
        same.round(same.given(0))
        assert same.net.sent == [sum(sum(b.sent.values()) for b in s.store.costs) for s in same.sessions]
        assert foretold == max(sum(cost.sent["net"] for cost in s.store.costs) for s in same.sessions)
    loses_nothing(group, nodes)


def test_lots_cut_anew_between_nodes_keep_what_is_owed() -> None:
    strategy = Strategy(
        compressor=tacit.ErrorFeedback(tacit.Sign(block=512)), topology=Hierarchical(far=TwoPhase("net"))
    )
    group = Group(strategy, Loopback.of_nodes(3, 2))
    for seed in range(3):
        group.round(group.given(seed))
    before = group.new_residual(3)
    for buckets in ([["a", "b"], ["c", "d"]], [["d", "c", "b", "a"]], [["c"], ["b"], ["d"], ["a"]]):
        wholes = group.net.run([session.store.gathered() for session in group.sessions])
        for session, whole in zip(group.sessions, wholes, strict=True):
            session.rebucket(buckets, carry=False)
            session.store.restore({key: kept.tensor for key, kept in whole.items()})
        for name, new_residual in group.new_residual(3).items():
            torch.testing.assert_close(new_residual, before[name])
        group.round(group.given(9))
        before = group.new_residual(3)


def test_what_others_speak_of_is_never_owed_by_the_second_side() -> None:
    group = Group(parse("sign:topology=two-phase").levels[0], Loopback(4), buckets=[["d", "c", "b", "a"]])
    spare = [torch.nan] * 4
    for session, value in zip(group.sessions, spare, strict=True):
        for workspace, state in zip(session.store._workspaces, session.store._states, strict=True):
            workspace.spare(SECOND, state[SECOND]).fill_(value)
    for seed in range(3):
        (given,) = group.given(seed)
        done = group.net.run([s.open(0, x) for s, x in zip(group.sessions, given, strict=True)])
        dense = {s.name: s for s in group.sessions[0].buckets[0].slices if s.name in "bd"}
        whole = torch.cat([outcome.state[SECOND] for outcome in done])
        assert whole.numel() == sum(p.numel() for p in NAMED.values())
        assert bool(whole.isfinite().all())
        for slot in dense.values():
            assert not bool(whole[slot.start : slot.stop].any())
        for session, outcome in zip(group.sessions, done, strict=True):
            session.complete(0, outcome)
    assert not {"b", "d"} & {
        name for s in group.sessions for name, field in s.store.named_state() if field == SECOND
    }


def test_a_parameter_that_becomes_a_small_part_takes_its_debt_along() -> None:
    def policy(name: str, p: Tensor) -> Compressor:
        return tacit.ErrorFeedback(tacit.Sign() if name == "c" else tacit.TopK(ratio=0.1))

    net = Loopback(3)
    strategy = Strategy(topology=TwoPhase())
    group = Group(strategy, net)
    group.sessions = [
        Session(strategy, NAMED, LoopbackTransport(net, rank), [["c"], ["a"], ["b", "d"]], policy)
        for rank in range(3)
    ]
    for seed in range(3):
        group.round(group.given(seed))
    before = group.new_residual(3)
    wholes = net.run([session.store.gathered() for session in group.sessions])
    for session, whole in zip(group.sessions, wholes, strict=True):
        assert bool(whole["c", SECOND].tensor.any())
        session.rebucket([["a", "b", "c", "d"]], carry=False)
        told = session.store.restore({key: kept.tensor for key, kept in whole.items()})
        assert told == {"c"}
    for name, new_residual in group.new_residual(3).items():
        torch.testing.assert_close(new_residual, before[name])


@for_each("bits", [2, 3, 4])
def test_few_bits_with_feedback_of_means_go_by_two_phases(bits: int) -> None:
    """Under error feedback three levels are dear to compress twice; here nothing that waits is lost."""
    (level,) = parse(f"lowbit:bits={bits}").levels
    named = {"w": torch.zeros(256, 512)}
    session = Session(replace(level, topology=Auto()), named, LoopbackTransport(Loopback(4), 0), [["w"]])
    assert isinstance(session.strategy.topology, TwoPhase)
