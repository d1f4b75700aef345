"""The session without a network: rounds, commits, buckets, and what happens to a round that fails."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tacit.algorithms import parse
from tacit.compressors import BF16, Dense, Partition, TopK
from tacit.errors import AttachError, NonFinite
from tacit.kernels.dispatch import active_backend
from tacit.session import Session, Training
from tacit.session.buckets import group_names, make_buckets
from tacit.session.health.nonfinite import NonfiniteChecks
from tacit.session.health.nonfinite_origin import Origin
from tacit.transports.loopback import Loopback, LoopbackTransport

NAMED = {"a": torch.zeros(30, 10), "b": torch.zeros(10), "c": torch.zeros(40, 5), "d": torch.zeros(5)}
LOTS = [["d", "c"], ["b", "a"]]


class Group:
    """Sessions of P ranks on one loopback."""

    def __init__(self, algorithm: str, peers: int = 3, seed: int = 0) -> None:
        self.net = Loopback(peers)
        self.sessions = [
            Session(
                parse(algorithm), NAMED, LoopbackTransport(self.net, r), LOTS, training=Training(seed=seed)
            )
            for r in range(peers)
        ]

    def exchange(self, bucket: int, xs: list[Tensor]) -> None:
        outcomes = self.net.run([s.open(bucket, x) for s, x in zip(self.sessions, xs, strict=True)])
        for session, outcome in zip(self.sessions, outcomes, strict=True):
            session.complete(bucket, outcome)

    def gradients(self, bucket: int, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        size = self.sessions[0].buckets[bucket].numel
        return [torch.randn(size, generator=generator) for _ in self.sessions]

    def states(self) -> list[dict[tuple[str, str], Tensor]]:
        return [{k: v.tensor.clone() for k, v in s.store.named_state().items()} for s in self.sessions]


def equal(a: list[dict[tuple[str, str], Tensor]], b: list[dict[tuple[str, str], Tensor]]) -> bool:
    return all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True)
    )


def test_state_is_there_from_the_start_and_has_the_parameters_names() -> None:
    (session, *_) = Group("topk:ratio=0.1").sessions
    assert {("a", "residual"), ("c", "residual")} <= session.store.named_state().keys()
    assert session.store.named_state()["a", "residual"].tensor.numel() == 300


def test_a_round_is_committed_when_its_last_lot_has_landed() -> None:
    group = Group("topk:ratio=0.1")
    before = group.states()
    group.exchange(0, group.gradients(0, 1))
    assert equal(group.states(), before)
    assert group.sessions[0].round == 0
    group.exchange(1, group.gradients(1, 2))
    assert not equal(group.states(), before)
    assert [s.round for s in group.sessions] == [1, 1, 1]
    assert group.sessions[0].metrics()["rounds"] == 1


def test_a_round_that_fails_leaves_no_trace() -> None:
    group = Group("topk:ratio=0.1")
    for bucket in (0, 1):
        group.exchange(bucket, group.gradients(bucket, bucket))
    before = group.states()
    group.exchange(0, group.gradients(0, 5))
    xs = group.gradients(1, 6)
    xs[2][3] = torch.nan
    with pytest.raises(NonFinite, match=r"gradient of b on rank 2"):
        group.exchange(1, xs)
    for session in group.sessions:
        session.pending.begin_anew()
    assert equal(group.states(), before)
    # and the next round is as if the failed one had never been
    other = Group("topk:ratio=0.1")
    for bucket in (0, 1):
        other.exchange(bucket, other.gradients(bucket, bucket))
    for bucket in (0, 1):
        a, b = group.gradients(bucket, 7), other.gradients(bucket, 7)
        group.exchange(bucket, a)
        other.exchange(bucket, b)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "algorithm", ["topk", "dgc", "topk:topology=two-phase", "topk:chunk=4", "qsgd", "clipped"]
)
def test_a_compressor_that_reads_all_entries_looks_for_nan_itself(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session then makes no pass of its own."""
    passes = []
    divide = NonfiniteChecks.divide
    monkeypatch.setattr(NonfiniteChecks, "divide", lambda self, *a: passes.append(a) or divide(self, *a))
    group = Group("dgc:max_norm=1.0" if algorithm == "clipped" else algorithm)
    group.exchange(1, group.gradients(1, 1))
    compiled = active_backend() == "numba"
    itself = algorithm == "qsgd" or (algorithm in ("topk", "dgc", "topk:topology=two-phase") and compiled)
    assert len(passes) == (0 if itself else 3)


@pytest.mark.parametrize(
    "algorithm",
    [
        *("dense", "bf16", "topk:ratio=0.1", "topk:ratio=0.1,topology=two-phase", "topk:chunk=4"),
        *("topk:ratio=0.1,values=int8", "topk:warmup_steps=40", "dgc:ratio=0.1", "dgc:max_norm=1.0", "qsgd"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_an_error_on_every_rank(algorithm: str, value: float) -> None:
    group = Group(algorithm)
    xs = group.gradients(1, 1)
    xs[1][9], xs[2][100] = value, value
    failures = []

    def guarded(session: Session, x: Tensor):
        try:
            yield from session.open(1, x)
        except NonFinite as error:
            failures.append(str(error))

    group.net.run([guarded(s, x) for s, x in zip(group.sessions, xs, strict=True)])
    assert len(failures) == 3
    # A mean tells which parameters are broken, and a word whose they are, but not which is whose.
    says = (
        "b on rank 1, a on rank 2" if algorithm.startswith(("topk", "dgc", "qsgd")) else "b, a on rank 1, 2"
    )
    assert all(says in text for text in failures), failures


@pytest.mark.parametrize("algorithm", ["randomk:ratio=0.1", "qsgd:bits=2", "natural", "terngrad"])
def test_draws_are_those_of_the_seed(algorithm: str) -> None:
    def said(seed: int) -> list[Tensor]:
        group, means = Group(algorithm, seed=seed), []
        for _ in range(2):
            for bucket in (0, 1):
                xs = group.gradients(bucket, 7)
                group.exchange(bucket, xs)
                means.append(xs[0])
        return means

    ones, same, others = said(1), said(1), said(2)
    assert all(torch.equal(one, again) for one, again in zip(ones, same, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(ones, others, strict=True))
    if algorithm.startswith("randomk"):  # which entries travel
        assert not torch.equal(ones[0] != 0, others[0] != 0)


def test_lots_can_change_and_state_follows_its_parameters() -> None:
    group = Group("topk:ratio=0.1")
    for bucket in (0, 1):
        group.exchange(bucket, group.gradients(bucket, bucket))
    before = group.states()
    for session in group.sessions:
        session.rebucket([["a", "c"], ["b", "d"]])
    after = group.states()
    assert [bucket.name for bucket in group.sessions[0].buckets] == ["a", "b"]
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(old[name, "residual"], new[name, "residual"]) for name in ("a", "c"))


def test_lots_are_cut_by_size_and_kind() -> None:
    named = {"w": torch.zeros(100), "x": torch.zeros(50), "y": torch.zeros(20), "z": torch.zeros(5)}
    assert group_names(reversed(named), named, cap=300) == [["z", "y", "x"], ["w"]]
    assert group_names(named, named, cap=100) == [["w"], ["x"], ["y", "z"]]
    named["x"] = torch.zeros(50, dtype=torch.float64)
    assert group_names(reversed(named), named, cap=10_000) == [["z", "y"], ["x"], ["w"]]


def test_vectors_stay_dense_where_the_compressor_exempts_them() -> None:
    (bucket, _) = Group("topk:ratio=0.1").sessions[0].buckets
    assert isinstance(bucket.compressor, Partition)
    assert [part.compressor for part in bucket.compressor.parts] == [Dense()]
    assert bucket.compressor.parts[0].spans == ((0, 5),)
    assert all(bucket.compressor == BF16() for bucket in Group("bf16").sessions[0].buckets)


def test_a_policy_that_gives_no_compressor_is_told() -> None:
    with pytest.raises(AttachError, match="gave 'topk' for d: return a Compressor, or None"):
        make_buckets(LOTS, NAMED, lambda name, p: "topk")  # type: ignore[arg-type, return-value]


def test_equal_choices_of_a_policy_become_one_part() -> None:
    (bucket,) = make_buckets(
        [["a", "b", "c", "d"]], NAMED, lambda name, p: TopK(ratio=0.1) if name in "ac" else BF16()
    )
    assert isinstance(bucket.compressor, Partition)
    assert bucket.compressor.main == TopK(ratio=0.1)
    assert [part.spans for part in bucket.compressor.parts] == [((300, 310), (510, 515))]


def test_there_are_stages_for_lots_of_any_size() -> None:
    # 12,000 dense floats a bucket ride in the sparse message; 24,000 need one of their own.
    named = {
        "v": torch.zeros(12_000),
        "w": torch.zeros(100, 30),
        "x": torch.zeros(12_000),
        "y": torch.zeros(100, 30),
    }
    session = Session(parse("topk"), named, LoopbackTransport(Loopback(2), 0), [["v", "w"], ["x", "y"]])
    assert [cost.stages for cost in session.store.costs] == [{"world": 1}, {"world": 1}]
    assert session.store.stages == {"world": 3}
    session.rebucket([["v", "w", "x", "y"]])
    assert [cost.stages for cost in session.store.costs] == [{"world": 2}]


def test_buffers_and_bills_follow_the_phases() -> None:
    group = Group("dgc:ratio=0.05,warmup_steps=4")
    shares = []
    for step in range(6):
        for bucket in (0, 1):
            group.exchange(bucket, group.gradients(bucket, 10 * step + bucket))
        session = group.sessions[0]
        billed = sum(sum(cost.sent.values()) for cost in session.store.costs)
        assert session.stats.records[-1].bytes_out == billed
        assert group.net.sent[0] == session.metrics()["bytes_out"]
        shares.append(session.stats.records[-1].bytes_out)
        for each in group.sessions:
            each.advance()
    assert shares[0] > shares[1] > shares[3]
    assert shares[4] == shares[5]


def test_a_session_that_starts_in_a_later_phase_pays_for_that_one() -> None:
    late = Group("dgc:ratio=0.05,warmup_steps=4")
    for session in late.sessions:
        session.resume(5, 0, {})
    for bucket in (0, 1):
        late.exchange(bucket, late.gradients(bucket, bucket))
    straight = Group("dgc:ratio=0.05")
    for bucket in (0, 1):
        straight.exchange(bucket, straight.gradients(bucket, bucket))
    assert late.sessions[0].stats.records[-1].bytes_out == straight.sessions[0].stats.records[-1].bytes_out


def test_what_is_exempt_has_the_momentum_too() -> None:
    (session, *_) = Group("dgc").sessions
    assert {(name, "velocity") for name in NAMED} <= session.store.named_state().keys()
    assert ("b", "inner.residual") not in session.store.named_state()


@pytest.mark.parametrize("algorithm", ["powersgd:min_compression_rate=0.1", "powersgd:rank=1", "dense"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("culprit", [0, 2])
def test_only_the_rank_with_the_nan_is_named(algorithm: str, value: float, culprit: int) -> None:
    """PowerSGD means twice: what the others give to the second mean comes from the first."""
    group = Group(algorithm)
    xs = group.gradients(1, 1)
    xs[culprit][50] = value  # in a matrix
    with pytest.raises(NonFinite, match=rf"in the gradient of a on rank {culprit}, in step 0"):
        group.exchange(1, xs)


class Meeting(LoopbackTransport):
    """Answers a bucket when all buckets have been asked, as a server may have to: see `Session.agree`."""

    def __init__(self) -> None:
        super().__init__(Loopback(1), 0)
        self.asked: list[tuple[int, Callable[[], None]]] = []

    def ranks(self, axis: str) -> list[int]:
        return [0]

    def post(self, request: Any, stage: int, key: str) -> Any:
        return Answer(request.pulls[0].numel, self.asked)


class Answer:
    def __init__(self, numel: int, asked: list[tuple[int, Callable[[], None]]]) -> None:
        self.numel, self.asked, self.sent = numel, asked, 0

    def on_done(self, call: Callable[[], None]) -> None:
        self.asked.append((self.numel, call))
        if len(self.asked) == len(LOTS):
            for _, answered in self.asked:
                answered()

    def answer(self) -> Any:
        return ((torch.full((self.numel,), float(self.numel)),),)


def test_workers_that_meet_do_so_in_all_lots_at_once() -> None:
    """Else one meets in the first bucket, and another waits for its push in the second: both for ever."""
    session = Session(parse("ps:backup_workers=1"), NAMED, Meeting(), LOTS)
    xs = [torch.zeros(bucket.numel) for bucket in session.buckets]
    meeting = threading.Thread(target=session.agree, args=(xs,), daemon=True)
    meeting.start()
    meeting.join(20)
    assert not meeting.is_alive(), "it waits for an answer in one bucket before it asks in the next"
    assert all(torch.equal(x, torch.full_like(x, x.numel())) for x in xs)


def test_parameters_are_numbered_alike_on_all_ranks() -> None:
    """Ranks send each other the number of a parameter that is not finite: not by a set, whose order is not
    the same in two processes."""
    named = {f"layer{i}": torch.zeros(2) for i in range(40)}
    session = Session(parse("dense"), named, LoopbackTransport(Loopback(1), 0), [[*named][::-1]])
    assert session.nonfinite._names == [*named][::-1]


@pytest.mark.parametrize("algorithm", ["dense", "bf16"])
def test_a_parameter_can_be_cut_where_nothing_is_kept_of_it(algorithm: str) -> None:
    """In slices its mean is what it is whole; errors name the parameter, and no bucket has another's name."""
    named = {"w": torch.zeros(6, 1024), "b": torch.zeros(10)}
    cuts = [["w[0:2048]"], ["w[2048:5120]", "b"], ["w[5120:6144]"]]
    net, whole = Loopback(2), Loopback(2)
    ours = [Session(parse(algorithm), named, LoopbackTransport(net, r), cuts) for r in range(2)]
    one = [Session(parse(algorithm), named, LoopbackTransport(whole, r), [["w"], ["b"]]) for r in range(2)]
    assert [bucket.name for bucket in ours[0].buckets] == ["w[0:2048]", "w[2048:5120]", "w[5120:6144]"]
    assert [sorted(bucket.names) for bucket in ours[0].buckets] == [["w"], ["b", "w"], ["w"]]
    generator = torch.Generator().manual_seed(1)
    grads = [(torch.randn(6144, generator=generator), torch.randn(10, generator=generator)) for _ in ours]
    expected = [(w.clone(), b.clone()) for w, b in grads]
    for i in range(2):
        whole.run([session.open(i, pair[i]) for session, pair in zip(one, expected, strict=True)])
    given = [[w[:2048].clone(), torch.cat([w[2048:5120], b]), w[5120:].clone()] for w, b in grads]
    for i in range(3):
        net.run([session.open(i, parts[i]) for session, parts in zip(ours, given, strict=True)])
    for parts, (w, b) in zip(given, expected, strict=True):
        assert torch.equal(torch.cat([parts[0], parts[1][:3072], parts[2]]), w)
        assert torch.equal(parts[1][3072:], b)


def test_what_was_there_from_the_beginning_has_no_step() -> None:
    assert Origin("w", age=3).words(1, 3) == "rank 1 had it first in step 0, in w"
    assert Origin("w", age=4).words(1, 3) == "rank 1 had it before the first step, in w"
