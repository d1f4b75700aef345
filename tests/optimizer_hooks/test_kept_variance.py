"""Adam's variance that is kept, against the same lines over plain tensors."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import tacit
from cases import for_each
from tacit.algorithms import parse
from tacit.attaching.requirements import renewals
from tacit.compressors import Blockwise, EntropyCoded, ErrorFeedback, Int8
from tacit.levels.spec import AttachSpec
from tacit.optimizer_hooks.kept_variance import KeptVariance
from tacit.rounds import During, Renewals

P, STEPS = 3, 16
RENEWALS = Renewals(4, 2)
MOVING = {0, 1, 2, 3, 6, 7, 13, 14}
"""Of `RENEWALS`: from 0, 6 and 13.5 on; from 9 on it has been kept for one step only."""
KINDS: dict[str, Any] = {
    "AdamW": lambda ps: AdamW(ps, lr=0.01, betas=(0.9, 0.9), weight_decay=0.1),
    "Adam": lambda ps: Adam(ps, lr=0.01, betas=(0.8, 0.95)),
    "L2": lambda ps: Adam(ps, lr=0.01, weight_decay=0.3),
    "maximize": lambda ps: Adam(ps, lr=0.01, weight_decay=0.2, maximize=True),
    "fused": lambda ps: AdamW(ps, lr=0.01, fused=True),
    "one by one": lambda ps: AdamW(ps, lr=0.01, foreach=False),
}


class Replica:
    """Parameters, their optimizer, and the variance that is kept; gradients are made up."""

    def __init__(self, build: Any, renewals: Renewals = RENEWALS) -> None:
        self.parameters = {
            name: nn.Parameter(torch.full(shape, 0.5, dtype=torch.float64))
            for name, shape in (("weight", (5, 4)), ("bias", (5,)), ("idle", (3,)))
        }
        self.optimizer: Optimizer = build([*self.parameters.values()])
        self.step = 0
        self.variance = KeptVariance(renewals, [self.optimizer], self.parameters, P, lambda: self.step)

    def given(self) -> None:
        """A gradient of this step, with one that is far larger than those before."""
        data = torch.Generator().manual_seed(self.step)
        for name, p in self.parameters.items():
            p.grad = torch.randn(p.shape, generator=data, dtype=p.dtype)
            if name == "idle" and self.step % 2:
                p.grad = None
        if self.step == 5:
            self.parameters["weight"].grad[0, 0] = 1e4  # type: ignore[index]

    def stepped(self) -> None:
        self.given()
        self.optimizer.step()
        self.step += 1

    def state(self, name: str) -> dict[str, Any]:
        return self.optimizer.state[self.parameters[name]]


def squared(replica: Replica, name: str) -> Tensor:
    """What Adam squares: the gradient, with an L2 penalty in it."""
    p, group = replica.parameters[name], replica.optimizer.param_groups[0]
    assert p.grad is not None
    if group.get("decoupled_weight_decay") or not group["weight_decay"]:
        return p.grad
    return p.grad + (-1 if group["maximize"] else 1) * group["weight_decay"] * p.detach()


@for_each("kind", KINDS)
def test_each_step_divides_by_what_is_kept_and_the_state_has_it_again(kind: str) -> None:
    build = KINDS[kind]
    replica = Replica(build)
    beta = replica.optimizer.param_groups[0]["betas"][1]
    kept: dict[str, tuple[Tensor, int]] = {}
    frozen = 0
    for step in range(STEPS):
        replica.given()
        twins = {name: nn.Parameter(p.detach().clone()) for name, p in replica.parameters.items()}
        twin = build([*twins.values()])
        moves = step in MOVING
        assert RENEWALS.moves(step) == moves
        before = {}
        for name, p in replica.parameters.items():
            state = replica.state(name)
            taken = int(state["step"]) if state else 0
            if not moves and name not in kept:
                kept[name] = state["exp_avg_sq"].clone(), taken
            if moves and name in kept:  # Adam goes on from it as if it had moved in every step
                v, since = kept.pop(name)
                state = {**state, "exp_avg_sq": v * (1 - beta**taken) / (1 - beta**since)}
            if p.grad is None:
                continue
            twins[name].grad = p.grad.clone()
            if state:
                twin.state[twins[name]] = {key: value.clone() for key, value in state.items()}
            if not moves:
                g, (v, since) = squared(replica, name), kept[name]
                risen = (1 - beta) * (1 - beta**since) / P * g.square()
                outgrown, was = risen > v, state["exp_avg_sq"].clone()
                v = torch.where(outgrown, risen, v)
                kept[name] = v, since
                wanted = beta * v / (1 - beta**since) + (1 - beta) * g.square() / P  # what Adam divides by
                raw = wanted * (1 - beta ** (taken + 1))
                twin.state[twins[name]]["exp_avg_sq"] = (raw - (1 - beta) * g.square()) / beta
                before[name] = v, was, outgrown
                frozen += 1
        twin.step()
        replica.optimizer.step()
        replica.step += 1
        for name, p in replica.parameters.items():
            torch.testing.assert_close(p.detach(), twins[name].detach(), rtol=1e-7, atol=1e-12)
        for name, (v, was, outgrown) in before.items():
            now = replica.state(name)["exp_avg_sq"]
            torch.testing.assert_close(now, v, rtol=1e-12, atol=0)
            assert torch.equal(now[~outgrown], was[~outgrown]), "to the bit"
            assert step != 5 or name != "weight" or outgrown[0, 0]
    assert frozen > 10
    assert {*kept} == {"weight", "bias", "idle"}
    replica.variance.restore()
    for name, (v, since) in kept.items():
        steps = int(replica.state(name)["step"])
        expected = v * (1 - beta**steps) / (1 - beta**since)
        torch.testing.assert_close(replica.state(name)["exp_avg_sq"], expected)
    assert not replica.optimizer._optimizer_step_pre_hooks
    assert not replica.optimizer._optimizer_step_post_hooks
    after = deepcopy(replica.optimizer.state_dict())
    replica.variance.restore()  # a second time: nothing
    for name in kept:
        there = after["state"][[*kept].index(name)]["exp_avg_sq"]
        assert torch.equal(replica.state(name)["exp_avg_sq"], there)


@pytest.mark.parametrize("loads", ["before", "behind"])
@pytest.mark.parametrize("stop", [2, 5, 7, 8, 12])
def test_a_run_that_is_resumed_is_the_run_that_never_stopped(stop: int, loads: str) -> None:
    whole, again = Replica(KINDS["AdamW"]), Replica(KINDS["AdamW"])
    for _ in range(stop):
        whole.stepped()
    saved, told = deepcopy(whole.optimizer.state_dict()), deepcopy(whole.variance.saved_state())
    for name, p in again.parameters.items():
        p.data.copy_(whole.parameters[name].detach())
    again.step = stop
    if loads == "before":
        again.optimizer.load_state_dict(saved)
    again.variance.resume(told)
    if loads == "behind":
        again.optimizer.load_state_dict(saved)
    assert again.variance.saved_state() == told
    for _ in range(stop, STEPS):
        whole.stepped()
        again.stepped()
    for name in whole.parameters:
        assert torch.equal(whole.parameters[name], again.parameters[name])
        assert torch.equal(whole.state(name)["exp_avg_sq"], again.state(name)["exp_avg_sq"])


def test_a_step_that_a_scaler_leaves_out_changes_nothing() -> None:
    """A fused optimizer is called all the same, and told so; and else divides the gradient itself."""
    replica = Replica(KINDS["fused"])
    for _ in range(5):
        replica.stepped()
    before = replica.state("weight")["exp_avg_sq"].clone()
    replica.given()
    replica.optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    replica.optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
    parameters = {name: p.detach().clone() for name, p in replica.parameters.items()}
    replica.optimizer.step()
    assert all(torch.equal(p, parameters[name]) for name, p in replica.parameters.items())
    assert torch.equal(replica.state("weight")["exp_avg_sq"], before)
    replica.optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    for p in replica.parameters.values():
        if p.grad is not None:
            p.grad = 8 * p.grad
    other = Replica(KINDS["fused"])
    for _ in range(5):
        other.stepped()
    other.given()
    other.optimizer.step()
    replica.optimizer.step()
    for name, p in replica.parameters.items():
        torch.testing.assert_close(p.detach(), other.parameters[name].detach(), rtol=1e-6, atol=1e-9)


def test_a_step_that_raises_leaves_the_variance_but_for_what_rose() -> None:
    replica = Replica(KINDS["AdamW"])
    for _ in range(5):
        replica.stepped()
    before = replica.state("weight")["exp_avg_sq"].clone()
    replica.given()

    def interrupted(*_: Any) -> None:
        raise RuntimeError("a hook of the user's")

    replica.optimizer.register_step_pre_hook(interrupted)
    with pytest.raises(RuntimeError, match="of the user's"):
        replica.optimizer.step()
    assert not torch.equal(replica.state("weight")["exp_avg_sq"], before)
    replica.variance.restore()
    share = (1 - 0.9**5) / (1 - 0.9**4)
    assert replica.parameters["weight"].grad is not None
    risen = (1 - 0.9) * (1 - 0.9**4) / P * replica.parameters["weight"].grad.square()
    expected = share * torch.maximum(before, risen)
    torch.testing.assert_close(replica.state("weight")["exp_avg_sq"], expected)


@for_each("beta", (0.95, 0.999))
def test_a_row_whose_first_gradient_comes_late_does_not_run_away(beta: float) -> None:
    """As of a rare token: one gradient, and none before or behind it, also when the variance moves again."""
    row = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = AdamW([row], lr=0.01, betas=(0.9, beta), weight_decay=0.0)
    step = 0
    KeptVariance(Renewals(10, 2), [optimizer], {"row": row}, 4, lambda: step)
    moved = []
    for step in range(60):
        row.grad = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
        row.grad[1] = 1.0 if step == 20 else 0.0
        row.grad[2] = 1e-6 if step == 12 else 0.0
        before = row.detach().clone()
        optimizer.step()
        moved.append((row.detach() - before).abs())
    largest = torch.stack(moved).amax(0) / 0.01
    alone = 0.1 / math.sqrt((1 - beta) / 4)  # what one step by one gradient is, of the learning rate
    assert largest[3] == 0
    assert (largest < 1.1 * max(1.0, alone)).all(), largest


def test_a_parameter_of_a_late_gradient_is_named() -> None:
    replica = Replica(KINDS["AdamW"])
    for _ in range(4):
        replica.given()
        replica.parameters["idle"].grad = None
        replica.optimizer.step()
        replica.step += 1
    replica.given()
    with pytest.raises(
        tacit.AttachError, match=r"idle has its first gradient in step 4 or later.*larger freeze_step"
    ):
        replica.optimizer.step()


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda ps: SGD(ps, lr=0.1), "SGD is neither torch.optim.Adam nor AdamW.*attach 'lowbit'"),
        (lambda ps: Adam(ps, amsgrad=True), "Adam with amsgrad=True.*leave amsgrad out"),
        (lambda ps: AdamW(ps, capturable=True), "AdamW with capturable=True.*leave capturable out"),
        (lambda ps: AdamW(ps, differentiable=True), "differentiable=True"),
    ],
)
def test_optimizers_without_such_a_variance_are_refused(build: Any, says: str) -> None:
    with pytest.raises(tacit.AttachError, match=says):
        Replica(build)


def test_the_strategy_of_the_algorithm() -> None:
    near, far = parse("zeroone-adam:freeze_step=60,refresh=10,bits=3,sync_every=2").levels
    assert (near.subject, near.rounds) == ("gradient", During(Renewals(60, 10)))
    assert far.variance == Renewals(60, 10)
    (plain,) = parse("lowbit:bits=3,sync_every=2").levels
    assert (far.compressor, far.rounds, far.merge) == (plain.compressor, plain.rounds, plain.merge)
    assert math.isclose(sum(near.rounds.at(step, {}) is not None for step in range(600)), 110)
    assert near.rounds.summary == "in the first 60 steps, then 10 at a time"
    assert During(Renewals(60, 0)).summary == "in the first 60 steps"


def test_gradients_of_fewer_bits_may_be_entropy_coded() -> None:
    for text, codec in (
        ("zeroone-adam", Int8()),
        ("zeroone-adam:gradient_bits=4", Blockwise(4)),
        ("zeroone-adam:gradient_bits=4,entropy=true", EntropyCoded(4)),
        ("zeroone-adam:gradient_bits=6,entropy=true", Blockwise(6)),
        ("zeroone-adam:gradient_bits=8,entropy=true", Int8()),
    ):
        near, far = parse(text).levels
        assert near.compressor == ErrorFeedback(codec)
        assert type(far.compressor.inner) is (EntropyCoded if "entropy" in text else Blockwise)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("zeroone-adam:freeze_step=0", "freeze_step=0"),
        ("zeroone-adam:refresh=-1", "refresh=-1"),
        ("zeroone-adam:bits=1", "bits=1"),
        ("zeroone-adam:bits=9", "bits=9"),
        ("zeroone-adam:sync_every=0", "sync_every=0"),
        ("zeroone-adam:gradient_bits=2", "gradient_bits=2.*write 8 or 4"),
        ("zeroone-adam:gradient_bits=9", "gradient_bits=9"),
        ("zeroone-adam:bits=5,entropy=true", "bits=5"),
    ],
)
def test_what_cannot_be_is_refused(text: str, says: str) -> None:
    with pytest.raises(tacit.ConfigError, match=says):
        parse(text)


def spec_of(strategy: tacit.Strategy | tacit.Levels) -> AttachSpec:
    return AttachSpec(model=None, optimizers=[], strategy=strategy)  # type: ignore[arg-type]


def test_a_variance_that_no_gradients_move_is_refused() -> None:
    alone = tacit.Strategy(subject="delta", merge=tacit.merges.CommonPoint(), variance=RENEWALS)
    other = tacit.Levels((tacit.Strategy(rounds=During(Renewals(5, 2))), alone))
    for strategy in (alone, other):
        (why,) = renewals(spec_of(strategy))
        assert f"Strategy(rounds=During({RENEWALS}))" in why
    assert not [*renewals(spec_of(tacit.Levels((tacit.Strategy(rounds=During(RENEWALS)), alone))))]
    with pytest.raises(tacit.ConfigError, match=r"variance=Renewals.* with subject='gradient'"):
        tacit.Strategy(variance=RENEWALS)
    with pytest.raises(tacit.ConfigError, match=r"momentum=Renewals"):
        tacit.Strategy(subject="delta", merge=tacit.merges.CommonPoint(), momentum=RENEWALS)  # type: ignore[arg-type]
