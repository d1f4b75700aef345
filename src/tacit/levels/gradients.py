"""The level at which gradients are averaged in backward, by DDP's hook or by FSDP2's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from tacit.gradients.ddp_hook import GradientHook
from tacit.levels.level import COMPARING, Level, parts_cut
from tacit.model.trained_model import local

if TYPE_CHECKING:
    from tacit.replicas.equal_parameters import EqualParameters


class GradientLevel(Level):
    """A level whose gradients are averaged among the ranks, or by servers that only average."""

    def _begin(self) -> None:
        spec, named = self._spec, self._spec.named
        modules: Sequence[Mapping[str, int]] = []
        if spec.sharded is None:
            buckets = parts_cut([[*reversed(named)]], self._cut(named), named)
        else:
            from tacit.fsdp.gradients import reduced_together

            modules = reduced_together(spec.sharded, named)
            # If this rank has no row of a module, its peers have none either.
            buckets = [[*each] for each in modules if any(local(named[name]).numel() for name in each)]
        self._open(named, buckets, self._watch_used())
        self.session.connect(COMPARING)
        self._hook_in(modules)

    def _hook_in(self, modules: Sequence[Mapping[str, int]]) -> None:
        """Make the hook; `modules`: see `GradientHook`."""
        self.gradient = GradientHook(self.session, self._spec.named, self.used, modules, self._share)
        if not self._spec.optimizers and self._spec.scaler is None:
            self.gradient.count_steps()

    def discard(self) -> None:
        self.session.take_back()

    @cached_property
    def _equal(self) -> EqualParameters:
        from tacit.replicas.equal_parameters import EqualParameters

        return EqualParameters(self.session, self._spec.named)

    def sync(self) -> None:
        self._equal.sync()
