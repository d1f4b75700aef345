"""Shields tacit's tensors from the script's inference mode, autocast and default device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from tacit.torch_compat import in_function_mode

_DEVICES = ("cpu", "cuda")
Given = ParamSpec("Given")
T = TypeVar("T")


def shielded(call: Callable[Given, T]) -> Callable[Given, T]:
    """The same function, which runs without the script's inference mode, autocast and default device.

    A tensor made in inference mode cannot be written later, autocast multiplies in fewer bits, and with
    another default device tensors would be on the wrong device.
    """

    @wraps(call)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> T:
        inferring = torch.is_inference_mode_enabled()
        casting = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        elsewhere = in_function_mode() and torch.get_default_device().type != "cpu"
        if not (inferring or casting or elsewhere):
            return call(*args, **kwargs)
        with ExitStack() as inside:
            if inferring:
                inside.enter_context(torch.inference_mode(False))
                inside.enter_context(torch.no_grad())
            for device_type in filter(torch.is_autocast_enabled, _DEVICES):
                inside.enter_context(torch.autocast(device_type, enabled=False))
            if elsewhere:
                inside.enter_context(torch.device("cpu"))
            return call(*args, **kwargs)

    return run
