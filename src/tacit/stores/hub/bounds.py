"""Bounds on what members may push: a share of another size, that is not finite, or that is far too large.

A hub does not decode. Members say which numbers lie where in a message, and what codes decode to is as large
as the numbers beside them: the units of blocks, the values of chosen entries, norms. So magnitudes are judged
by these, and by the entries themselves where they are sent. Of a message without any (`entropy=true`, for
one) the size alone is judged.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import hypot
from statistics import median_high  # of two the larger one: an idle member makes nobody too large

import torch
from torch import Tensor

from tacit.stores.hub.collectives import TYPES, ShareSpec

_log = logging.getLogger("tacit")

LARGEST = 2.0**100
"""No training has norms of 1e30; see `finite_checks.EXTREME`."""
IDLE = 100
"""Shares of zeros in a row, where others had more, after which it is told; and after ten times as many."""


@dataclass(frozen=True)
class Norms:
    """Of a share.

    Attributes:
        by_part: of each part of the payload for one rank; over all ranks, where there is one for each.
        by_rank: for "exchange", of all that goes to each rank.
    """

    by_part: tuple[float, ...] = ()
    by_rank: tuple[float, ...] = ()


def norms(spec: ShareSpec, share: Tensor) -> Norms:
    """The norms of the floating-point numbers in a share: NaN where they have one."""
    if spec.do == "reduce":
        return Norms((*_norms(share.view(1, -1), spec.dtype).tolist(),) if spec.op == "sum" else ())
    sizes = spec.sizes if spec.do == "exchange" else [share.numel()]
    if not spec.parts or sum(sizes) != share.numel():
        return Norms()
    rows = spec.parts if len(spec.parts) > 1 else spec.parts * len(sizes)
    found, at = [], 0
    for (size, parts), alike in groupby(zip(sizes, rows, strict=True)):
        count, column, each = len([*alike]), 0, []
        grid = share[at : at + count * size].view(count, size)
        for dtype, nbytes in parts:
            end = min(column + nbytes, size)
            each.append(_norms(grid[:, column:end], dtype))
            column = end
        found.append(torch.stack(each, 1))
        at += count * size
    squares = torch.cat(found).square_()
    by_rank = squares.sum(1).sqrt().tolist() if spec.do == "exchange" else ()
    return Norms((*squares.sum(0).sqrt().tolist(),), (*by_rank,))


def _norms(rows: Tensor, dtype: str) -> Tensor:
    """Of each row of bytes, which are numbers of this type; 0 where they are no floating-point numbers."""
    kind = TYPES[dtype]
    if not kind.is_floating_point or rows.shape[1] < kind.itemsize:
        return torch.zeros(len(rows), dtype=torch.float64)
    whole = rows[:, : rows.shape[1] // kind.itemsize * kind.itemsize]
    if whole.stride(0) != whole.shape[1] or whole.storage_offset():
        whole = whole.clone(
            memory_format=torch.contiguous_format
        )  # so that numbers lie where their type wants
    wide = torch.promote_types(kind, torch.float32)
    found: Tensor = torch.linalg.vector_norm(whole.view(kind), dim=1, dtype=wide)
    return found.double()


class Bounds:
    """What is refused.

    Args:
        clip: a norm of more than so many times the median of the others' is; None: sizes alone are judged.
    """

    def __init__(self, clip: float | None) -> None:
        self.clip = clip
        self._sent: dict[tuple[str, str], Sequence[Norms]] = {}
        self._idle: Counter[str] = Counter()

    def refused(
        self, specs: Mapping[int, ShareSpec], sizes: Mapping[int, int], found: Mapping[int, Norms]
    ) -> dict[int, str]:
        """Which ranks' shares of a collective are refused, and why."""
        first, wrong = _other_than_most(specs, sizes)
        if wrong or self.clip is None:
            return wrong
        for rank, each in found.items():
            if not all(norm < LARGEST for norm in each.by_part):
                wrong[rank] = "its share holds NaN, infinity or numbers beyond 1e30"
        if wrong or len(specs) < 2 or not first.bucket:
            return wrong
        every = [found[rank] for rank in sorted(found)]
        if first.stage == 0:
            for rank in specs:
                others = [each.by_part for i, each in enumerate(every) if i != rank]
                wrong |= self._too_large(
                    rank, found[rank].by_part, [*map(median_high, zip(*others, strict=True))]
                )
                self._note_idle(specs[rank].by, sum(found[rank].by_part), sum(map(sum, others)))
            if first.do == "exchange":
                self._sent[_family(first), first.bucket] = every
        elif first.do == "gather" and (sent := self._sent.pop((_family(first), first.bucket), None)):
            # Each has averaged a part, of which the others have sent it theirs.
            for rank in specs:
                theirs = median_high(each.by_rank[rank] for i, each in enumerate(sent) if i != rank)
                wrong |= self._too_large(rank, [hypot(*found[rank].by_part)], [theirs])
        return wrong

    def forget(self, group: str) -> None:
        """A group is gone."""
        family = group.rpartition(" #")[0]
        self._sent = {key: each for key, each in self._sent.items() if key[0] != family}

    def _too_large(self, rank: int, norms: Sequence[float], others: Sequence[float]) -> dict[int, str]:
        assert self.clip is not None
        for norm, typical in zip(norms, others, strict=True):
            if norm > self.clip * typical > 0:
                return {
                    rank: f"its share is {norm / typical:.3g} times as large as the others' in the median, "
                    f"where --clip allows {self.clip:g}"
                }
        return {}

    def _note_idle(self, name: str, norm: float, others: float) -> None:
        if norm:
            self._idle.pop(name, None)
        if norm or not others:
            return
        self._idle[name] += 1
        if self._idle[name] >= IDLE and str(self._idle[name]).strip("0") == "1":
            _log.warning("%s has pushed nothing but zeros %d times in a row", name, self._idle[name])


def _family(spec: ShareSpec) -> str:
    """What the groups of one period have in common, one for each stage."""
    return spec.group.rpartition(" #")[0]


def _other_than_most(
    specs: Mapping[int, ShareSpec], sizes: Mapping[int, int]
) -> tuple[ShareSpec, dict[int, str]]:
    """What most say of their shares, and whose is another; of two that differ the first member is right."""
    ranks = sorted(specs)
    forms = {rank: (0 if specs[rank].differs else sizes[rank], specs[rank].form) for rank in ranks}
    usual = Counter(forms.values()).most_common(1)[0][0]
    first = next(specs[rank] for rank in ranks if forms[rank] == usual)
    if first.do not in ("reduce", "gather", "gather to", "exchange"):
        return first, {}
    wrong = {}
    for rank, (size, form) in forms.items():
        if size != usual[0] and specs[rank].differs == first.differs:
            wrong[rank] = f"has {size} bytes, and the others' {usual[0]}"
        elif form != usual[1]:
            wrong[rank] = "is made of other parts than the others'"
        elif first.do == "exchange" and sum(specs[rank].sizes) != sizes[rank]:
            wrong[rank] = f"has {sizes[rank]} bytes, and is to have {sum(specs[rank].sizes)}"
    return first, {rank: f"its share {why}: does it train the same model?" for rank, why in wrong.items()}
