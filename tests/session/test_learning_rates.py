"""The learning rate of each parameter, read again when one has changed."""

import copy

import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from tacit.session.learning_rates import Rates, Rescaling


def named() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(3)) for name in "abcd"}


def test_each_parameter_has_the_rate_of_its_group_now() -> None:
    p = named()
    optimizer = SGD([{"params": [p["a"]]}, {"params": [p["b"], p["c"]], "lr": 0.5}], lr=0.1)
    rates = Rates([optimizer], p)
    assert rates() == {"a": 0.1, "b": 0.5, "c": 0.5, "d": 0.0}
    assert max(rates().values()) == 0.5
    StepLR(optimizer, 1, gamma=0.1)
    for group in optimizer.param_groups:
        group["lr"] *= 0.1
    assert rates() == {"a": 0.1 * 0.1, "b": 0.5 * 0.1, "c": 0.5 * 0.1, "d": 0.0}


def test_groups_that_are_added_count_and_groups_of_others_do_not() -> None:
    p, other = named(), nn.Parameter(torch.zeros(3))
    optimizer = SGD([{"params": [other], "lr": 9.0}, {"params": [p["a"]], "lr": 0.2}])
    rates = Rates([optimizer], p)
    assert max(rates().values()) == 0.2
    optimizer.add_param_group({"params": [p["d"]], "lr": 0.3})
    assert rates() == {"a": 0.2, "b": 0.0, "c": 0.0, "d": 0.3}
    optimizer.param_groups[1]["params"].append(p["b"])
    assert rates()["b"] == 0.2


def test_a_loaded_state_has_new_groups_and_rates_are_theirs() -> None:
    p = named()
    optimizer = SGD(p.values(), lr=0.1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.7
    rates = Rates([optimizer], p)
    optimizer.load_state_dict(saved)
    assert max(rates().values()) == 0.7


def test_several_optimizers_and_rates_that_are_tensors() -> None:
    p = named()
    first, second = SGD([p["a"], p["b"]], lr=0.1), Adam([p["c"], p["b"]], lr=torch.tensor(0.25))
    rates = Rates([first, second], p)
    assert rates() == {"a": 0.1, "b": 0.25, "c": 0.25, "d": 0.0}


def test_without_an_optimizer_there_is_none() -> None:
    assert Rates([], named())() == dict.fromkeys("abcd", 0.0)
    assert not Rates([], {})()


def test_a_rate_that_is_written_in_place_is_seen() -> None:
    p, lr = named(), torch.tensor(0.25)
    rates = Rates([Adam(p.values(), lr=lr)], p)
    assert rates() is not rates()
    lr.fill_(0.5)
    assert rates() == dict.fromkeys(p, 0.5)


def test_while_no_rate_changes_nothing_is_made_anew() -> None:
    p = named()
    optimizer = SGD(p.values(), lr=0.1)
    rates, rescaling = Rates([optimizer], p), Rescaling()
    assert rates() is rates()
    assert not rescaling.changes(rates())
    before = rescaling.state()
    assert not rescaling.changes(rates())
    rescaling.take_back()
    assert rescaling.state() == before
    optimizer.param_groups[0]["lr"] = 0.2
    changed = rescaling.changes(rates())
    assert changed == dict.fromkeys(p, 0.2)
    rescaling.commit(changed, {"a"})
    assert rescaling.changes(rates()) == {"a": 0.2}, "its residual is still in the old units"
