"""A profile knows the optimizers, so that what is planned is what `attach` would take."""

from dataclasses import replace
from pathlib import Path

import made_training as made
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tacit.gradients.layerwise.forward_steps import stepping
from tacit.optimizer_hooks.optimizer_facts import facts_of, made_again
from tacit.planning.candidates import fitting_texts
from tacit.planning.profile import Profile

TEXTS = ("ddp", "topk:ratio=0.01", "dgc", "onebit-adam", "zeroone-adam", "int8")


class Own(torch.optim.SGD):
    """With a step of its own."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise AssertionError


def profile(kind: type[Optimizer], groups: int = 1, **options: object) -> Profile:
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in made.SHAPES.items()}
    several = [{"params": [*named.values()][i::groups]} for i in range(groups)]
    optimizer = kind(several, **options)  # type: ignore[call-arg]
    return replace(made.profile(), optimizers=facts_of([optimizer], named))


def test_the_facts_are_saved_and_make_the_same_optimizer_again(tmp_path: Path) -> None:
    kept = profile(torch.optim.AdamW, groups=2, betas=(0.8, 0.99), amsgrad=True)
    kept.save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded == kept
    (optimizer,) = made_again(loaded.optimizers, loaded.named)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert stepping(optimizer) is stepping(torch.optim.AdamW([torch.zeros(1)]))
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.99)] * 2
    assert all(group["amsgrad"] is True for group in optimizer.param_groups)
    assert {p for g in optimizer.param_groups for p in g["params"]} == {*loaded.named.values()}


@pytest.mark.parametrize(
    ("of", "fits"),
    [
        (
            profile(torch.optim.SGD, lr=0.1, momentum=0.8, nesterov=True),
            ["ddp", "topk:ratio=0.01", "dgc:momentum=0.8,nesterov=true", "int8"],
        ),
        (profile(torch.optim.SGD, lr=0.1), ["ddp", "topk:ratio=0.01", "int8"]),
        (
            profile(torch.optim.AdamW, betas=(0.8, 0.99)),
            ["ddp", "onebit-adam:beta=0.8", "zeroone-adam", "int8"],
        ),
        (profile(torch.optim.AdamW, amsgrad=True), ["ddp", "int8"]),
        (profile(torch.optim.RMSprop), ["ddp", "int8"]),
        (profile(torch.optim.LBFGS), ["ddp"]),
        (profile(Own, lr=0.1), ["ddp", "int8"]),
        (made.profile(), [*TEXTS]),
    ],
    ids=["momentum", "sgd", "adamw", "amsgrad", "rmsprop", "lbfgs", "own step", "not known"],
)
def test_candidates_are_those_that_fit(of: Profile, fits: list[str]) -> None:
    found, refused = fitting_texts(TEXTS, of, asked=False)
    assert found == fits
    assert len(refused) == len(TEXTS) - len(fits)


def test_what_the_user_names_is_refused_only_where_attach_refuses_it() -> None:
    found, refused = fitting_texts(TEXTS, profile(torch.optim.AdamW), asked=True)
    assert found == ["ddp", "topk:ratio=0.01", "onebit-adam", "zeroone-adam", "int8"]
    assert "cannot be switched off" in refused["dgc"]
