"""The level at which gradients are sent layer by layer, in planned messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tacit.gradients.layerwise.forward_steps import ForwardSteps
from tacit.gradients.layerwise.hook import LayerwiseHook
from tacit.gradients.layerwise.planner import MessagePlanner
from tacit.levels.gradients import GradientLevel
from tacit.timelines import PlannedMessage


class LayerwiseLevel(GradientLevel):
    """A level whose gradients travel in planned messages; steps may be put off into the next forward pass."""

    _forward: ForwardSteps | None = None

    def _hook_in(self, modules: Sequence[Mapping[str, int]]) -> None:
        spec, named = self._spec, self._spec.named
        assert spec.ddp is not None, "others were refused"
        self.gradient = self._hook = LayerwiseHook(self.session, spec.ddp, named)
        if self._hook.into_forward:
            name = spec.strategy.name
            self._forward = ForwardSteps(self._hook, spec.ddp.module, named, spec.optimizers, name)
            self.put_off = self._forward.before_step
        self.planned = MessagePlanner(self._hook, self.session, named, spec.group, self._forward).stepped

    def complete(self) -> None:
        if self._forward is not None:
            self._forward.complete()

    def messages(self) -> list[PlannedMessage]:
        if self.session.context.in_stream:
            return []  # the host knows when they are launched, and not when they are sent
        self._hook.log.begin()
        return self._hook.log.messages()

    def _let_go(self) -> None:
        if self._forward is not None:
            self._forward.remove()
        self._hook.remove()
