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
from tacit.kernels.dispatch import on_host
from tacit.model.not_copied import OnlyHere
from tacit.model.trained_model import local
from tacit.moments import Moment, Watch
from tacit.planning.profile import Launching, ParamReady, StepProfile
from tacit.torch_compat import spin

KEPT = 50
"""The number of last steps that are recorded."""


@dataclass
class StepTimes:
    """One step, in seconds. Those of a model on a GPU are the GPU's, by events in its stream.

    Attributes:
        data, forward, backward, optimizer: see `StepProfile`.
        ready: by parameter, from the end of the forward pass until its gradient was computed.
        wall: the whole step in wall-clock time, waiting included.
        waited: in `data`, the seconds in which the main thread did not run.
        exchanging: wall-clock time from the last gradient until the optimizer's step begins: an exchange that
            is not hidden, and on a GPU also what the script does there.
        between: of these, the seconds in which the main thread ran; unknown on a GPU, and 0.
        launching: the host's wall-clock time of the parts.
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
    launching: Launching = Launching()
    passes: int = 1
    marks: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class _Step:
    """The moments of a step, from the end of the one before."""

    before: Moment
    forward: Moment
    forward_done: Moment
    ready: dict[str, Moment]
    last_ready: Moment
    stepping: Moment
    ended: Moment
    passes: int

    def times(self) -> StepTimes:
        data = self.before.until(self.forward)
        host = self.forward.wall - self.before.wall - (self.forward.own - self.before.own)
        on_gpu = self.ended.event is not None
        return StepTimes(
            data=data,
            forward=self.forward.work_until(self.forward_done),
            backward=self.forward_done.work_until(self.last_ready),
            optimizer=self.stepping.work_until(self.ended),
            ready={name: self.forward_done.work_until(at) for name, at in self.ready.items()},
            wall=self.before.until(self.ended),
            waited=min(data, max(0.0, host)),
            exchanging=self.last_ready.until(self.stepping),
            between=0.0 if on_gpu else self.stepping.own - self.last_ready.own,
            launching=Launching(
                self.forward.host_until(self.forward_done),
                self.forward_done.host_until(self.last_ready),
                self.stepping.host_until(self.ended),
            ),
            passes=self.passes,
            marks=(self.before.wall, self.last_ready.wall, self.stepping.wall, self.ended.wall),
        )


class StepTimer:
    """Times every step from the second on, until it is closed. It never waits for a GPU while it does.

    Args:
        module: the model whose forward pass is timed; DDP's `module`, not the wrapper.
        optimizers: a step ends when the last of them has stepped.
        named: the trainable parameters, by name.
        kept: the number of last steps that are recorded.

    Attributes:
        on_gpu: whether the parameters are on a GPU.
        autocast: whether the last forward pass ran under autocast there.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        named: Mapping[str, Tensor],
        kept: int = KEPT,
    ) -> None:
        first = next(iter(named.values()), None)
        self.on_gpu = first is not None and not on_host(local(first))
        self.autocast = False
        self._steps: deque[_Step] = deque(maxlen=kept)
        self._named = named
        alone = self.on_gpu or torch.get_num_threads() == 1
        device = local(first).device if self.on_gpu and first is not None else None
        self._watch = Watch(time.thread_time if alone else time.perf_counter, device)
        self._ended: Moment | None = None
        self._forward: Moment | None = None
        self._forward_done: Moment | None = None
        self._ready: dict[str, Moment] = {}
        self._last_ready: Moment | None = None
        self._stepping: Moment | None = None
        self._passes = 0
        self._ahead: float | None = None
        self._queued: _Step | None = None
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

    @property
    def steps(self) -> list[StepTimes]:
        """The last steps, in order. Waits until a GPU has ended them."""
        if self.on_gpu and self._steps:
            self._steps[-1].ended.event.synchronize()
        return [each.times() for each in self._steps]

    def run_ahead(self) -> None:
        """Have the GPU begin the next step's passes when the host has launched about all of them.

        So that step, which is not among `steps`, tells what the GPU takes where it never waits for the host.
        """
        if self.on_gpu and self._steps:
            last = self._steps[-1]
            self._ahead = last.forward.host_until(last.last_ready)

    @property
    def queued(self) -> float:
        """The GPU's seconds of the passes of such a step; 0 if there was none."""
        step = self._queued
        return step.forward.work_until(step.last_ready) if step is not None and self.steps else 0.0

    def close(self) -> None:
        """Remove its hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _forward_begins(self) -> None:
        if self._ahead is not None:
            spin(self._ahead)
        self._forward, self._ready = self._watch.now(), {}
        self._passes += torch.is_grad_enabled()
        self.autocast = self.on_gpu and torch.is_autocast_enabled("cuda")

    def _forward_ends(self) -> None:
        self._forward_done = self._watch.now()

    def _is_ready(self, name: str, _: Tensor) -> None:
        if self._forward_done is not None:
            self._last_ready = self._ready[name] = self._watch.now()

    def _optimizer_begins(self) -> None:
        self._stepping = self._watch.now()

    def _optimizer_ends(self) -> None:
        before, now = self._ended, self._watch.now()
        passes, self._ended, self._passes = self._passes, now, 0
        forward, forward_done, stepping = self._forward, self._forward_done, self._stepping
        if before is None or forward is None or forward_done is None or stepping is None:
            return
        # FSDP2 sets the gradients of its shards itself, and torch calls no hook: all count as ready at the
        # end.
        last = self._last_ready or stepping
        step = _Step(before, forward, forward_done, self._ready, last, stepping, now, passes)
        if self._ahead is not None:
            self._queued, self._ahead = step, None
        else:
            self._steps.append(step)

    @property
    def launching(self) -> Launching:
        """The median host's time of the parts, over the last steps."""
        steps = self.steps
        return Launching(
            *(_median(getattr(each.launching, part) for each in steps) for part in Launching.PARTS)
        )

    def profile(self, skipped: int = 2) -> StepProfile:
        """The median step, without the first `skipped`.

        Raises:
            ConfigError: there are too few steps.
        """
        steps = self.steps
        steps = steps[skipped:] if len(steps) > skipped + 2 else steps
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
            passes=round(_median(step.passes for step in steps)),
        )


def _on_gradient(parameter: Any, call: Callable[[Tensor], None]) -> Any:
    """Call `call` whenever the parameter's gradient is computed; torch has no types for it."""
    return parameter.register_post_accumulate_grad_hook(call)


def _median(values: Iterable[float] | Iterator[float]) -> float:
    found = [*values]
    return statistics.median(found) if found else 0.0
