"""The learning rate of each parameter, as the optimizers' groups have it at this moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer


class Rates:
    """Reads learning rates by parameter.

    Which group a parameter is in is looked up once, and again when groups have been added or have grown.

    Args:
        optimizers: of the parameters, and perhaps of others.
        named: the parameters by name.
    """

    def __init__(self, optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]) -> None:
        self._optimizers = optimizers
        self._names = {id(p): name for name, p in named.items()}
        self._none = dict.fromkeys(named, 0.0)
        self._sizes: list[list[int]] = []
        self._groups: list[tuple[Optimizer, int, list[str]]] = []

    def __call__(self) -> dict[str, float]:
        """The rate of each parameter: 0 where no group holds it, the largest where several do."""
        found = dict(self._none)
        for optimizer, i, names in self._looked_up():
            lr = float(optimizer.param_groups[i]["lr"])  # loading a state gives an optimizer other groups
            for name in names:
                found[name] = max(found[name], lr)
        return found

    def largest(self) -> float:
        """The largest rate of any group that holds one of the parameters; 0 where none does."""
        each = [float(optimizer.param_groups[i]["lr"]) for optimizer, i, _ in self._looked_up()]
        return max(each, default=0.0)

    def _looked_up(self) -> list[tuple[Optimizer, int, list[str]]]:
        sizes = [[len(group["params"]) for group in each.param_groups] for each in self._optimizers]
        if sizes != self._sizes:
            self._sizes = sizes
            found = [
                (each, i, [self._names[id(p)] for p in group["params"] if id(p) in self._names])
                for each in self._optimizers
                for i, group in enumerate(each.param_groups)
            ]
            self._groups = [entry for entry in found if entry[2]]
        return self._groups
