"""Detects writes to parameters by some entries of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_

import torch
from torch import Tensor, nn

from tacit.model.trained_model import local

SAMPLE = 16
"""The number of entries of each parameter that are checked: the first and the last ones in memory."""
_TURN = 2.4
"""Entry i has the weight cos(i * this angle) in a sum, so that swapped entries change the sum."""
_ROUNDING = 4
"""Units in the last place of the largest entry: the most that is lost when up to six times that entry is
added and subtracted again, which rounds twice.
"""
_WIDE = torch.float32, torch.float64
"""In narrower types a step is no larger than rounding, so only equal bits count as restored."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ParameterSample:
    """Some entries of every parameter, as they were at the last `note`.

    Any write that changes one of these is detected. On a GPU for which a check must not wait, it detects only
    writes that torch counts, and so none to `p.data`.

    Args:
        named: the parameters, looked up again each time; buffers among them are left out.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self._named = named
        self._now: list[Tensor] = []
        self._found: list[Tensor] = []
        self._whole = True
        self._where: list[int] = []
        self._views: list[tuple[torch.dtype, list[Tensor]]] = []
        self._noted: list[Tensor] = []
        self._version = 0

    def note(self) -> None:
        """Record the present entries."""
        self._version = self._look()
        self._noted = [torch.cat(each) for _, each in self._views]

    def changed(self, waits: bool = True) -> bool:
        """Whether an entry differs from its recorded value by more than rounding."""
        return self.moved(waits) > 1

    def moved(self, waits: bool = True) -> float:
        """The largest change of an entry since `note`, in units of possible rounding; 0: no change.

        `waits`: whether to check also a GPU on which torch has counted no write, which waits for it.
        """
        looks, far = self._look() != self._version or waits, 0.0
        for (dtype, each), noted in zip(self._views, self._noted, strict=False):
            if (looks or not noted.is_cuda) and not torch.equal(now := torch.cat(each), noted):
                far = max(far, _apart(now, noted, dtype))
        return far

    def mark(self) -> list[float]:
        """The norm of the present entries, and a weighted sum; [] on a GPU, for which it would wait."""
        self._look()
        if any(each[0].is_cuda for _, each in self._views):
            return []
        each = [torch.cat(views).view(dtype).double() for dtype, views in self._views]
        x = torch.cat(each) if each else torch.zeros(0, dtype=torch.float64)
        return [float(x.norm()), float(x @ torch.arange(len(x), dtype=torch.float64).mul_(_TURN).cos_())]

    def _look(self) -> int:
        """Refresh the views, and return a number that changes with every counted write and every move."""
        now = [*self._named.values()]
        if len(now) != len(self._now) or not all(map(is_, now, self._now)):
            self._now, self._found = now, [p for p in now if isinstance(p, nn.Parameter)]
            self._whole = all(type(p) is nn.Parameter for p in self._found)
        mine = self._found if self._whole else [*map(local, self._found)]
        where = [x.data_ptr() for x in mine]
        if where != self._where:
            self._where, self._views = where, _samples(mine)
        return sum([x._version for x in mine]) + sum(where)


def _apart(now: Tensor, noted: Tensor, dtype: torch.dtype) -> float:
    """The largest difference, in units of possible rounding; infinity if unknown. Their bits differ."""
    if dtype not in _WIDE or now.dtype != noted.dtype or now.shape != noted.shape:
        return float("inf")
    other, x, before = now != noted, now.view(dtype).double(), noted.view(dtype).double()
    most = before.abs().max() * (_ROUNDING * torch.finfo(dtype).eps)
    return float(((x - before)[other].abs() / most).nan_to_num(nan=float("inf")).max())


def _samples(tensors: Sequence[Tensor]) -> list[tuple[torch.dtype, list[Tensor]]]:
    """Views of some entries of each as bits, grouped by type and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for x in tensors:
        room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        entries = min(x.numel(), room)  # an expanded tensor has fewer entries than its shape
        few, first = min(SAMPLE // 2, entries), x.storage_offset()
        starts = {first, first + entries - few} if few else set()
        for start in sorted(starts):  # contiguous entries, as torch joins others far slower
            some = x.detach().as_strided((few,), (1,), start)
            alike.setdefault((x.dtype, x.device), []).append(some.view(_BITS[x.element_size()]))
    return [(dtype, views) for (dtype, _), views in alike.items()]
