"""Gradients that are exchanged between backward and step."""

from types import SimpleNamespace
from typing import Any

import torch

from tacit.gradients.before_step import StepGradients
from tacit.gradients.ddp_hook import BucketFuture, HookDispatcher
from tacit.torch_compat import GradBucket


def twice(bucket: GradBucket) -> BucketFuture:
    """An exchange that doubles."""
    future: BucketFuture = torch.futures.Future()
    future.set_result(bucket.buffer().mul_(2))
    return future


def test_gradients_of_any_layout_are_overwritten_with_the_answer() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 1))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    named = dict(model.named_parameters())
    unused = named["1.bias"]
    model(torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)).square().sum().backward()
    unused.grad = None
    before = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    session: Any = SimpleNamespace(failure=SimpleNamespace(raise_first=lambda: None))
    StepGradients(HookDispatcher(twice), named, cap=1 << 20).average(session)
    assert unused.grad is None
    for name, gradient in before.items():
        assert torch.equal(named[name].grad, 2 * gradient)
