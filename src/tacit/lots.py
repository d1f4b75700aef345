"""Lots: which parameters travel together, in which order; and which compressor handles which of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.compressors.dense import Dense
from tacit.compressors.wrappers import Part, Select
from tacit.contracts import Compressor, State
from tacit.errors import AttachError

Policy = Callable[[str, Tensor], Compressor | None]
"""(name, parameter) -> the compressor for it; None: dense."""


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a lot."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Lot:
    """Parameters that travel in one message: flat, one after the other."""

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    device: torch.device
    compressor: Compressor

    @property
    def name(self) -> str:
        """Of its first parameter; no other lot has it."""
        return self.slots[0].name

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return self.slots[-1].stop

    def like(self, device: torch.device | str = "meta") -> Tensor:
        """An uninitialised tensor of its shape."""
        return torch.empty(self.numel, dtype=self.dtype, device=device)


def cut(names: Iterable[str], named: Mapping[str, Tensor], cap: int) -> list[list[str]]:
    """Group parameters, in this order, into lots of at most `cap` bytes, or of one parameter.

    Types and devices are not mixed.
    """
    lots: list[list[str]] = []
    last: tuple[torch.dtype, torch.device] | None = None
    room = 0
    for name in names:
        p = named[name]
        size, kind = p.numel() * p.element_size(), (p.dtype, p.device)
        if not lots or room < size or kind != last:
            room = cap
            lots.append([])
        lots[-1].append(name)
        room -= size
        last = kind
    return lots


def make_lots(names: Iterable[Sequence[str]], named: Mapping[str, Tensor], policy: Policy) -> list[Lot]:
    """Lots of these parameters, each with the compressor that the policy chooses, joined by `Select`."""
    return [_lot(group, named, policy) for group in names]


def _lot(names: Sequence[str], named: Mapping[str, Tensor], policy: Policy) -> Lot:
    slots, start = [], 0
    for name in names:
        slots.append(Slot(name, start, start + named[name].numel()))
        start = slots[-1].stop
    first = named[names[0]]
    chosen = [_choice(name, named[name], policy) for name in names]
    return Lot(tuple(slots), first.dtype, first.device, _joined(slots, chosen))


def _choice(name: str, p: Tensor, policy: Policy) -> Compressor:
    compressor = policy(name, p)
    if compressor is not None and not isinstance(compressor, Compressor):
        raise AttachError(
            f"the policy gave {compressor!r} for {name}: return a Compressor, or None to keep it dense"
        )
    return Dense() if compressor is None else compressor


def _joined(slots: Sequence[Slot], chosen: Sequence[Compressor]) -> Compressor:
    spans: dict[Compressor, list[tuple[int, int]]] = {}
    for slot, compressor in zip(slots, chosen, strict=True):
        mine = spans.setdefault(compressor, [])
        if mine and mine[-1][1] == slot.start:
            mine[-1] = (mine[-1][0], slot.stop)
        else:
            mine.append((slot.start, slot.stop))
    parts = sorted((Part(c, tuple(s)) for c, s in spans.items()), key=lambda part: -part.numel)
    return parts[0].compressor if len(parts) == 1 else Select(parts[0].compressor, tuple(parts[1:]))


def named_state(lot: Lot, state: State) -> dict[tuple[str, str], Tensor]:
    """Views of a lot's flat state: (parameter, field) -> its part of the field."""
    views: dict[tuple[str, str], Tensor] = {}
    for field, tensor in state.items():
        owner, spans, short = _owner(lot, field)
        at = 0
        for a, b in spans:
            for slot in lot.slots:
                if a <= slot.start and slot.stop <= b:
                    begin = at + slot.start - a
                    views[slot.name, short] = tensor[begin : begin + slot.stop - slot.start]
            at += b - a
        assert at == tensor.numel(), f"{owner} keeps {field} of {tensor.numel()} elements, not {at}"
    return views


def _owner(lot: Lot, field: str) -> tuple[Compressor, tuple[tuple[int, int], ...], str]:
    if isinstance(lot.compressor, Select):
        part, _, short = field.partition(".")
        if part == "main":
            return lot.compressor.main, ((0, lot.numel),), short
        owner = lot.compressor.parts[int(part.removeprefix("part"))]
        return owner.compressor, owner.spans, short
    return lot.compressor, ((0, lot.numel),), field
