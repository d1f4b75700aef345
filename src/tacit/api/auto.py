"""The session of `auto`."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tacit.api.attached import Attached
from tacit.api.choosing import Choosing, check
from tacit.attaching.requirements import fitted
from tacit.levels.spec import AttachSpec
from tacit.planning.candidates import Candidates
from tacit.planning.decider import Decider
from tacit.strategy import AutoStrategy


class AutoSession(Attached):
    """A session whose strategy is chosen during training, with what a decider needs besides.

    Args:
        given: the arguments of the user's `attach`.
        strategy: the strategies that may be chosen, and how they are watched.
        decider: chooses; the same on all ranks.

    Attributes:
        ranks: the ranks of the world that train the model.

    Raises:
        AttachError: there is no optimizer whose steps could be counted, or a weight.
    """

    strategy: AutoStrategy

    def __init__(self, given: AttachSpec, strategy: AutoStrategy, decider: Decider) -> None:
        check(given, decider)
        by = f"{strategy!r} by {type(decider).__name__} after {decider.steps} steps: "
        super().__init__(fitted(replace(given, strategy=strategy.levels[0], chosen_by=by)), strategy=strategy)
        self._at_work = self._choosing = Choosing(self._active, given, strategy, decider)
        self.ranks = self._choosing.ranks
        self._choosing.begin(self, lambda: self.closed, self._leave)

    def candidates(self) -> Candidates:
        """The strategies that may be chosen here; and those that may not, with the reason."""
        return self._choosing.candidates()

    def from_all(self, mine: Tensor) -> Tensor:
        """Gather a tensor (on the host, of one shape) from all of `ranks`. A collective call.

        Returns:
            One row a rank.
        """
        return self._choosing.from_all(mine)
