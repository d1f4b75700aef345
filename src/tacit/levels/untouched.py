"""The level for `ddp`, which does not change DDP."""

from __future__ import annotations

from tacit.levels.level import Level
from tacit.replicas.equal_parameters import EqualParameters


class UntouchedLevel(Level):
    """A level where only DDP exchanges; steps are counted, and ranks compare their parameters."""

    def _begin(self) -> None:
        self._open(self._spec.named, [])
        self._equal = EqualParameters(self.session, self._spec.named, self._spec.group)

    def sync(self) -> None:
        self._equal.sync()
