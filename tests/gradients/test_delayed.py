"""Late gradients: the buffers alone, and on real processes over Gloo; all checks in one launch."""

import pytest
import torch
from delayed_checks import CHECKS

import tacit
from rank_processes import Ended, assert_passed, ranks
from tacit.contracts import Overlap
from tacit.errors import ConfigError
from tacit.gradients import delayed
from tacit.overlap import Bucketwise, Delayed
from tacit.session import Session
from tacit.transports.loopback import Loopback, LoopbackTransport

WORLD = 4
NAMED = {"a": torch.zeros(30, 10), "b": torch.zeros(10), "c": torch.zeros(41, 5, dtype=torch.float64)}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return ranks("delayed_checks.py", WORLD, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)


def test_the_ranks_end_well(ended: list[Ended]) -> None:
    assert [each.code for each in ended] == [0] * WORLD


def means(monkeypatch: pytest.MonkeyPatch) -> delayed.DelayedMeans:
    monkeypatch.setattr(delayed, "BLOCK", 7)  # so that they take several blocks, the last one shorter
    strategy = tacit.Strategy(overlap=Delayed(1))
    return delayed.DelayedMeans(
        Session(strategy, NAMED, LoopbackTransport(Loopback(1), 0), [["c"], ["b", "a"]])
    )


def test_a_gradient_and_a_mean_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = means(monkeypatch)
    first, second = torch.arange(300.0), torch.arange(300.0) + 1000
    buffers.swap_(1, 10, given := first.clone())
    assert not given.any()
    buffers.swap_(1, 10, given := second.clone())
    assert torch.equal(given, first)
    assert torch.equal(buffers.flats[1][10:], second)
    assert not buffers.flats[1][:10].any()


def test_means_follow_their_parameters_into_other_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = means(monkeypatch)
    for i, flat in enumerate(buffers.flats):
        flat.copy_(torch.arange(float(flat.numel())) + 1000 * i)
    before = {name: mean.clone() for name, mean in buffers.saved_state().items()}
    buffers._session.rebucket([["a"], ["c"], ["b"]])
    buffers.follow_buckets()
    assert [flat.numel() for flat in buffers.flats] == [300, 205, 10]
    assert all(torch.equal(mean, before[name]) for name, mean in buffers.saved_state().items())


def test_delays_and_warm_ups() -> None:
    assert [Delayed(2).apply_at(step) for step in range(3)] == [2, 3, 4]
    assert [Delayed(1, warmup_steps=2).apply_at(step) for step in range(4)] == [0, 1, 3, 4]
    for warmup_steps in (-1, 1.5):
        with pytest.raises(ConfigError, match="whole number of steps"):
            Delayed(1, warmup_steps=warmup_steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("subject", "overlap", "says"),
    [
        ("gradient", Delayed(2), r"2 steps old.*write Delayed\(1\)"),
        ("delta", Delayed(2, warmup_steps=5), r"warmup_steps=5 is for gradients.*write Delayed\(2\)"),
    ],
)
def test_delays_that_cannot_be_are_refused(subject: str, overlap: Overlap, says: str) -> None:
    merge = tacit.Replace() if subject == "gradient" else tacit.Average()
    rounds = tacit.EveryStep() if subject == "gradient" else tacit.Every(4)
    with pytest.raises(ConfigError, match=says):
        tacit.Strategy(subject=subject, overlap=overlap, merge=merge, rounds=rounds)  # type: ignore[arg-type]


def test_inside_a_node_gradients_are_not_late() -> None:
    far = tacit.Strategy(subject="delta", rounds=tacit.Every(4), merge=tacit.Average())
    near = tacit.Strategy(topology=tacit.Flat(axis="node"), overlap=Delayed(1))
    with pytest.raises(ConfigError, match=r"of the first level.*write Bucketwise\(\)"):
        tacit.Levels((near, far))
    assert Bucketwise().apply_at(3) == 3
