"""Which parameters had a gradient in a backward, for DDP with `find_unused_parameters`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.utils.hooks import RemovableHandle


class UsedParameters:
    """The parameters that have had a gradient since the last exchange, counted as DDP counts them.

    With `find_unused_parameters` DDP does not change the gradient of a parameter that no rank has used, and
    discards what its hook has answered for it. Passes under `no_sync` count too.

    Args:
        named: the parameters to watch.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self._used: set[str] = set()
        self._handles: list[RemovableHandle] = []
        for name, p in named.items():
            self._handles.append(p.register_hook(self._noted(name)))  # type: ignore[no-untyped-call]

    def _noted(self, name: str) -> Callable[[Tensor], None]:
        return lambda gradient: self._used.add(name)

    def idle(self, name: str) -> bool:
        """Whether the parameter has had no gradient since the last exchange."""
        return name not in self._used

    def clear(self) -> None:
        """Forget the gradients seen, as an exchange is over."""
        self._used.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
