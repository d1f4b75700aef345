"""The worker's optimizer in plain values, for a server to step as it would; and what it cannot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tacit.errors import AttachError, ConfigError
from tacit.stores.client.step_hook import OptimizerGroups
from tacit.stores.server.optimizers import ServerAdam, ServerSGD, optimizer_from


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def named(net: nn.Module) -> dict[str, Tensor]:
    return dict(net.named_parameters())


def test_each_group_is_a_rule_and_has_its_own_rate() -> None:
    net = model()
    optimizer = torch.optim.SGD(
        [{"params": net[0].parameters(), "weight_decay": 0.1}, {"params": net[1].parameters(), "lr": 0.5}],
        lr=0.25,
        momentum=0.9,
    )
    groups = OptimizerGroups([optimizer], named(net))
    assert groups.of == {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": 1}
    assert [optimizer_from(rule) for rule in groups.rules] == [
        ServerSGD(0.9, weight_decay=0.1),
        ServerSGD(0.9),
    ]
    assert (groups.rate("0.bias"), groups.rate("1.weight")) == (0.25, 0.5)
    optimizer.param_groups[1]["lr"] = torch.tensor(0.125)
    assert groups.rate("1.bias") == 0.125
    groups.check()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_hyper_parameters_that_are_tensors_are_numbers(kind: type[torch.optim.Adam]) -> None:
    net = model()
    betas = (torch.tensor(0.5), torch.tensor(0.75))
    rule = optimizer_from(
        OptimizerGroups([kind(net.parameters(), betas=betas, weight_decay=0.0)], named(net)).rules[0]
    )
    assert rule == ServerAdam((0.5, 0.75), decoupled=kind is torch.optim.AdamW)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: [], "and none is no torch"),
        (lambda p: [torch.optim.Adagrad(p)], "and Adagrad is no torch.optim.SGD, Adam or AdamW"),
        (lambda p: [torch.optim.SGD(p[:2]), torch.optim.SGD(p[2:])], "and SGD, SGD is no torch"),
        (lambda p: [torch.optim.SGD(p, maximize=True)], "a server has no maximize=True"),
        (lambda p: [torch.optim.AdamW(p, amsgrad=True)], "a server has no amsgrad=True"),
        (lambda p: [torch.optim.SGD(p[:3])], "and 1.bias is in no group of the optimizer: add it, or freeze"),
    ],
)
def test_what_a_server_cannot_do_is_refused(make: object, says: str) -> None:
    net = model()
    with pytest.raises(AttachError, match=says):
        OptimizerGroups(make([*net.parameters()]), named(net))  # type: ignore[operator]


def test_a_schedule_of_more_than_the_rate_is_refused_by_name() -> None:
    """OneCycleLR moves the momentum too, of which a server would not learn."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    groups = OptimizerGroups([optimizer], named(net))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
    optimizer.step()
    schedule.step()
    says = r"momentum of the optimizer's group 0 is 0\.8\d* now, and the server steps by 0\.9.*cycle_momentum"
    with pytest.raises(ConfigError, match=says):
        groups.check()


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"kind": "SGD", "momentum": "much"},
        {"kind": "SGD", "speed": 1.0},
        {"kind": "SGD", "nesterov": 1.0},
        {"kind": "Adam", "betas": (0.9,)},
        {"kind": "Adam", "betas": (0.9, 1.5)},
        {"kind": "AdamW", "betas": "ab"},
        {"kind": "os.system"},
    ],
    ids=str,
)
def test_a_rule_that_cannot_be_is_refused(rule: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        optimizer_from(rule)
