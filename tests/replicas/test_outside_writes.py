"""Parameters that somebody else writes than the optimizers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from cases import for_each
from tacit.algorithms import parse
from tacit.errors import AttachError
from tacit.model.parameter_sample import ParameterSample
from tacit.replicas.outside_writes import OutsideWrites

Write = Callable[[nn.Parameter], object]
WRITES: dict[str, Write] = {
    "copy_": lambda p: p.copy_(torch.ones_like(p)),
    "data.copy_": lambda p: p.data.copy_(torch.ones_like(p)),
    "data =": lambda p: setattr(p, "data", torch.ones_like(p)),
    "clamp_": lambda p: p.clamp_(-1e-3, 1e-3),
    "a NaN": lambda p: p.fill_(float("nan")),
}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": nn.Parameter(torch.randn(8, 40, generator=generator).to(dtype)),
        "conv": nn.Parameter(
            torch.randn(4, 3, 3, 3, generator=generator).to(dtype).to(memory_format=torch.channels_last)
        ),
        "none": nn.Parameter(torch.empty(0, dtype=dtype)),
        "one": nn.Parameter(torch.ones((), dtype=dtype)),
    }


def writes(algorithm: str = "localsgd") -> tuple[OutsideWrites, dict[str, nn.Parameter]]:
    named = parameters()
    (level,) = parse(algorithm).levels
    found = OutsideWrites(level, named)
    found.note()
    return found, named


def step(found: OutsideWrites, named: dict[str, nn.Parameter], number: int) -> bool:
    """A step of an optimizer; whether all begin where the parameters were before it."""
    begins = found.before_step(number)
    with torch.no_grad():
        for p in named.values():
            p.mul_(0.9)
    found.note()
    return begins


@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16])
@for_each("way", [*WRITES])
@torch.no_grad()
def test_a_write_is_seen(way: str, dtype: torch.dtype) -> None:
    named = parameters(dtype)
    sample = ParameterSample(named)
    assert not sample.changed(), "nothing was noted"
    sample.note()
    assert not sample.changed()
    for name in ("w", "conv"):
        WRITES[way](named[name])
        assert sample.changed()
        assert sample.changed(), "until it is noted"
        sample.note()
        assert not sample.changed()


@torch.no_grad()
def test_weights_that_are_loaded_before_the_first_step_are_where_all_begin() -> None:
    found, named = writes()
    named["w"].fill_(1.0)
    assert step(found, named, 0)
    assert not step(found, named, 1)


@torch.no_grad()
def test_weights_that_are_loaded_later_are_an_error_if_nobody_agrees_on_them() -> None:
    found, named = writes()
    step(found, named, 0)
    named["w"].fill_(1.0)
    step(found, named, 1)
    with pytest.raises(AttachError, match=r"before step 1 .* call session.sync\(\)"):
        step(found, named, 2)

    found, named = writes()
    step(found, named, 0)
    named["w"].fill_(1.0)
    assert found.settle(), "all ranks are told"
    found.note()
    for number in range(1, 4):
        assert not step(found, named, number)
    assert not found.settle()


@torch.no_grad()
def test_weights_that_are_put_back_were_not_written() -> None:
    found, named = writes()
    for number in range(3):
        step(found, named, number)
        kept = named["w"].clone()
        named["w"].fill_(1.0)
        named["w"].copy_(kept)
        assert not found.settle()


@torch.no_grad()
def test_weights_that_are_put_back_by_subtracting_were_not_written() -> None:
    found, named = writes()
    climbs = {name: p.roll(1) for name, p in named.items()}
    for number in range(9):
        for name, p in named.items():
            p.add_(climbs[name]).sub_(climbs[name])
        if number == 7:
            named["w"].add_(1e-3)
        if number == 8:
            with pytest.raises(AttachError, match="before step 7"):
                step(found, named, number)
        else:
            assert not step(found, named, number)


@torch.no_grad()
def test_weights_that_are_scaled_by_about_what_rounding_may_do_are_written_behind_every_step() -> None:
    found, named = writes()
    for number in range(8):
        assert not step(found, named, number)
        named["w"].mul_(1 + (2e-7 if number % 2 else 1e-6))


@torch.no_grad()
def test_weights_that_are_clamped_behind_every_step_are_part_of_it(caplog: pytest.LogCaptureFixture) -> None:
    for algorithm in ("localsgd", "lowbit"):
        found, named = writes(algorithm)
        for number in range(8):
            step(found, named, number)
            named["w"].clamp_(-1e-3 / (number + 1), 1e-3 / (number + 1))
            if number in (4, 6):
                assert not found.settle(), "nothing unexplained"
                found.note()
    (told,) = caplog.messages
    assert told.startswith("the parameters are changed after every step")
    assert "'lowbit'" in told


@torch.no_grad()
def test_where_others_keep_the_parameters_a_write_is_an_error_at_once() -> None:
    for begun in (False, True):
        found, named = writes("ps-async")
        if begun:
            step(found, named, 0)
        named["w"].fill_(1.0)
        with pytest.raises(AttachError, match="load weights before you attach"):
            step(found, named, 1)


@torch.no_grad()
def test_a_model_may_be_loaded_behind_the_sessions_state() -> None:
    found, named = writes()
    step(found, named, 0)
    found.resume()
    named["w"].fill_(1.0)
    assert not found.settle()
    assert not step(found, named, 1)
    assert not step(found, named, 2)
