"""Times each step of a training: data, forward, each gradient of backward, optimizer."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tacit.errors import ConfigError
from tacit.model.not_copied import OnlyHere
from tacit.model.trained_model import local
from tacit.planning.profile import ParamReady, StepProfile

KEPT = 50
"""The number of last steps that are recorded."""


@dataclass
class StepTimes:
    """One step, in seconds.

    Attributes:
        data, forward, backward, optimizer: see `StepProfile`.
        ready: by parameter, from the end of the forward pass until its gradient was computed.
        wall: the whole step in wall-clock time, waiting included.
        waited: in `data`, the seconds in which the main thread did not run.
        exchanging: wall-clock time from the last gradient until the optimizer's step begins: an exchange that
            is not hidden.
        between: of these, the seconds in which the main thread ran.
        passes: the number of forward passes of training in it.
        marks: by `time.perf_counter`: when it began, when the last gradient was computed, when the
            optimizer's step began, and when it ended.
    """

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)
    wall: float = 0.0
    waited: float = 0.0
    exchanging: float = 0.0
    between: float = 0.0
    passes: int = 1
    marks: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class _Clocks:
    """Readings of the three clocks at one time."""

    own: float
    wall: float


class StepTimer:
    """Times every step from the second on, until it is closed.

    Args:
        module: the model whose forward pass is timed; DDP's `module`, not the wrapper.
        optimizers: a step ends when the last of them has stepped.
        named: the trainable parameters, by name.
        kept: the number of last steps that are recorded.

    Attributes:
        steps: the last steps, in order.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        named: Mapping[str, Tensor],
        kept: int = KEPT,
    ) -> None:
        self.steps: deque[StepTimes] = deque(maxlen=kept)
        self._named = named
        self._own = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._begun: _Clocks | None = None
        self._forward: _Clocks | None = None
        self._forward_done: _Clocks | None = None
        self._ready: dict[str, float] = {}
        self._last_ready: _Clocks | None = None
        self._stepping: _Clocks | None = None
        self._passes = 0
        self._handles: list[Any] = [
            module.register_forward_pre_hook(OnlyHere(lambda *_: self._forward_begins())),
            module.register_forward_hook(OnlyHere(lambda *_: self._forward_ends())),
            *(_on_gradient(parameter, partial(self._is_ready, name)) for name, parameter in named.items()),
        ]
        if optimizers:
            self._handles += [
                optimizers[0].register_step_pre_hook(lambda *_: self._optimizer_begins()),
                optimizers[-1].register_step_post_hook(lambda *_: self._optimizer_ends()),
            ]

    def close(self) -> None:
        """Remove its hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _now(self) -> _Clocks:
        return _Clocks(self._own(), time.perf_counter())

    def _forward_begins(self) -> None:
        self._forward, self._ready = self._now(), {}
        self._passes += torch.is_grad_enabled()

    def _forward_ends(self) -> None:
        self._forward_done = self._now()

    def _is_ready(self, name: str, _: Tensor) -> None:
        if self._forward_done is not None:
            self._last_ready = self._now()
            self._ready[name] = self._last_ready.own - self._forward_done.own

    def _optimizer_begins(self) -> None:
        self._stepping = self._now()

    def _optimizer_ends(self) -> None:
        before, now = self._begun, self._now()
        passes, self._begun, self._passes = self._passes, now, 0
        forward, forward_done, stepping = self._forward, self._forward_done, self._stepping
        if before is None or forward is None or forward_done is None or stepping is None:
            return
        # FSDP2 sets the gradients of its shards itself, and torch calls no hook: all count as ready at the
        # end.
        last = self._last_ready or stepping
        data = forward.wall - before.wall
        self.steps.append(
            StepTimes(
                data=data,
                forward=forward_done.own - forward.own,
                backward=last.own - forward_done.own,
                optimizer=now.own - stepping.own,
                ready=self._ready,
                wall=now.wall - before.wall,
                waited=max(0.0, data - (forward.own - before.own)),
                exchanging=stepping.wall - last.wall,
                between=stepping.own - last.own,
                passes=passes,
                marks=(before.wall, last.wall, stepping.wall, now.wall),
            )
        )

    def profile(self, skipped: int = 2) -> StepProfile:
        """The median step, without the first `skipped`.

        Raises:
            ConfigError: there are too few steps.
        """
        steps = [*self.steps][skipped:] if len(self.steps) > skipped + 2 else [*self.steps]
        if not steps:
            raise ConfigError(
                "no step of the training was measured: it takes two calls of optimizer.step() at least, each "
                "after a forward pass and a backward pass of the attached model"
            )
        backward = _median(step.backward for step in steps)
        ready = {
            name: _median(step.ready[name] for step in steps if name in step.ready)
            if any(step.ready for step in steps)
            else backward
            for name in self._named
        }
        parameters = [
            ParamReady(name, tuple(local(p).shape), str(p.dtype).removeprefix("torch."), ready[name])
            for name, p in self._named.items()
        ]
        waited = _median(step.waited for step in steps)
        # If ranks share cores the main thread also waits for a core: only clearly longer waits are the
        # loader's.
        data = _median(step.data for step in steps)
        own = max(0.0, data - waited)
        loading = waited if waited > max(0.002, 2 * own) else 0.0
        return StepProfile(
            data=own + loading,
            forward=_median(step.forward for step in steps),
            backward=backward,
            optimizer=_median(step.optimizer for step in steps),
            parameters=tuple(parameters),
            loading=loading,
        )


def _on_gradient(parameter: Any, call: Callable[[Tensor], None]) -> Any:
    """Call `call` whenever the parameter's gradient is computed; torch has no types for it."""
    return parameter.register_post_accumulate_grad_hook(call)


def _median(values: Iterable[float] | Iterator[float]) -> float:
    found = [*values]
    return statistics.median(found) if found else 0.0
