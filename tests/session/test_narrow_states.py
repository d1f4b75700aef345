"""Residuals kept in bf16: half the memory, the same on every try, and nothing lost in the mean."""

import pytest
import torch
from test_session import NAMED, Group, equal
from torch import Tensor

from tacit.algorithms import parse
from tacit.attaching.memory import state_bytes
from tacit.errors import ConfigError, NonFinite
from tacit.kernels.dispatch import active_backend, find_backend

ALGORITHMS = [
    "topk:ratio=0.1",
    "topk:topology=two-phase",
    "efsign",
    "int8",
    "powersgd:rank=2",
    "dgc:ratio=0.1",
]


def narrow(algorithm: str) -> str:
    return f"{algorithm}{',' if ':' in algorithm else ':'}residual_bits=16"


def trained(group: Group, rounds: range) -> list[Tensor]:
    """The means of these rounds."""
    means = []
    for round in rounds:
        for bucket in (0, 1):
            xs = group.gradients(bucket, 10 * round + bucket)
            group.exchange(bucket, xs)
            means.append(xs[0].clone())
        for session in group.sessions:
            session.advance()
    return means


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_half_as_much_is_kept_and_each_try_gives_the_same(algorithm: str) -> None:
    group, other, wide = Group(narrow(algorithm)), Group(narrow(algorithm)), Group(algorithm)
    first, again, exact = (trained(each, range(4)) for each in (group, other, wide))
    assert equal(group.states(), other.states())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    sizes = [
        sum(x.nbytes for state in each.states() for (_, field), x in state.items() if not field.endswith("q"))
        for each in (group, wide)
    ]
    assert 2 * sizes[0] == sizes[1] > 0
    near = torch.cat(first) - torch.cat(exact)
    assert 0 < float(near.norm()) < 0.2 * float(torch.cat(exact).norm())
    (strategy,) = parse(narrow(algorithm)).levels
    told = state_bytes(strategy, NAMED)
    assert told["residual"] * 2 == state_bytes(parse(algorithm).levels[0], NAMED)["residual"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_taken_back_or_fails_leaves_no_trace(algorithm: str) -> None:
    group, other = Group(narrow(algorithm)), Group(narrow(algorithm))
    trained(group, range(2))
    trained(other, range(2))
    for bucket in (0, 1):
        group.exchange(bucket, group.gradients(bucket, 77))
    for session in group.sessions:
        session.pending.take_back(session.step)
    assert equal(group.states(), other.states())
    xs = group.gradients(1, 5)
    xs[2][3] = torch.nan
    group.exchange(0, group.gradients(0, 4))
    with pytest.raises(NonFinite):
        group.exchange(1, xs)
    for session in group.sessions:
        session.pending.begin_anew()
    assert equal(group.states(), other.states())
    means = trained(group, range(2, 4)), trained(other, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(*means, strict=True))


@pytest.mark.parametrize("algorithm", ["topk:ratio=0.1", "int8"])
def test_a_saved_state_is_gone_on_from_to_the_bit(algorithm: str) -> None:
    group, other = Group(narrow(algorithm)), Group(narrow(algorithm))
    trained(group, range(3))
    saved = group.net.run([s.store.gathered() for s in group.sessions])
    for session, whole in zip(other.sessions, saved, strict=True):
        session.store.restore({key: kept.tensor for key, kept in whole.items()})
        session.resume(3, 3, {})
    assert equal(group.states(), other.states())
    means = trained(group, range(3, 5)), trained(other, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(*means, strict=True))


def test_compiled_and_by_torch_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    fast = Group(narrow("int8"))
    means = trained(fast, range(2))
    with monkeypatch.context() as patch:
        patch.setenv("TACIT_KERNELS", "reference")
        for each in (find_backend, active_backend):
            each.cache_clear()
        slow = Group(narrow("int8"))
        assert all(torch.equal(a, b) for a, b in zip(means, trained(slow, range(2)), strict=True))
    for each in (find_backend, active_backend):
        each.cache_clear()
    assert equal(fast.states(), slow.states())


def test_what_is_small_is_sent_in_the_end() -> None:
    """Rounded to the nearest number, a residual would stop to grow, and what comes then would be lost."""
    group = Group("topk:ratio=0.02,residual_bits=16", peers=2)
    size, sums = group.sessions[0].buckets[1].numel, 0.0
    gradient = torch.full((size,), 1e-3)
    gradient[0] = 1.0
    for _ in range(400):
        xs = [gradient.clone() for _ in group.sessions]
        group.exchange(0, group.gradients(0, 1))
        group.exchange(1, xs)
        sums += float(xs[0][1:].sum())
    kept = sum(float(x.float().sum()) for (name, _), x in group.states()[0].items() if name in ("a", "b"))
    assert sums + kept == pytest.approx(400 * 1e-3 * (size - 1), rel=0.05)


@pytest.mark.parametrize("text", ["topk:residual_bits=8", "int8:residual_bits=64"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"residual_bits.*16"):
        parse(text)
