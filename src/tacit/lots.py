"""Lots: which parameters travel together, in which order; and which compressor handles which of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tacit.compressors.dense import Dense
from tacit.compressors.wrappers import Part, Select
from tacit.contracts import Compressor, Matrix, State
from tacit.errors import AttachError

Policy = Callable[[str, Tensor], Compressor | None]
"""(name, parameter) -> the compressor for it; None: dense."""


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a lot; of a stretch of it, from its entry `offset` on."""

    name: str
    start: int
    stop: int
    shape: torch.Size
    offset: int = 0

    def matrix(self, at: int) -> Matrix:
        """The parameter as a matrix that begins at `at`."""
        return as_matrix(self.shape, at, self.stop - self.start)


@dataclass(frozen=True)
class Lot:
    """Parameters that travel in one message: flat, one after the other; or a stretch of them.

    Attributes:
        device: where they are exchanged: where the parameters are, or on the host, on copies.
        chosen: each parameter's compressor; `compressor` joins them.
    """

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    device: torch.device
    chosen: tuple[Compressor, ...]

    @cached_property
    def compressor(self) -> Compressor:
        """What handles all of it."""
        return _joined(self.slots, self.chosen)

    @property
    def name(self) -> str:
        """Of its first parameter; no other lot has it."""
        return self.slots[0].name

    @cached_property
    def names(self) -> frozenset[str]:
        """Of all its parameters."""
        return frozenset(slot.name for slot in self.slots)

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return self.slots[-1].stop if self.slots else 0

    @property
    def edges(self) -> Sequence[int] | range:
        """Where it may be cut: anywhere, but between parameters only where a compressor sees matrices."""
        if any(c.bound((Matrix(0, 1, 1),)) != c for c in self.chosen):
            return [slot.start for slot in self.slots] + [self.numel]
        return range(self.numel + 1)

    def within(self, start: int, stop: int) -> Lot:
        """A stretch of it."""
        slots, chosen = [], []
        for slot, compressor in zip(self.slots, self.chosen, strict=True):
            a, b = max(slot.start, start), min(slot.stop, stop)
            if a < b:
                slots.append(
                    replace(slot, start=a - start, stop=b - start, offset=slot.offset + a - slot.start)
                )
                chosen.append(compressor)
        return replace(self, slots=tuple(slots), chosen=tuple(chosen))

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


def exempting(compressor: Compressor) -> Policy:
    """The compressor for all parameters but those that it exempts."""
    return lambda _, p: compressor.exempted() if compressor.exempts(p.shape) else compressor


def fitting(compressor: Compressor, tensors: Mapping[str, Tensor]) -> Policy:
    """The compressor, told of all parameters but those that it exempts, which it is not for.

    Raises:
        ConfigError: it cannot keep for this model what it promises.
    """
    shapes = [p.shape for p in tensors.values() if p.numel() and not compressor.exempts(p.shape)]
    return exempting(compressor.fitted(tuple(as_matrix(shape) for shape in shapes)))


def as_matrix(shape: torch.Size, at: int = 0, numel: int | None = None) -> Matrix:
    """A parameter of this shape, or so many entries of it, as a matrix that begins at `at`."""
    rows = shape[0] if shape else 1
    return Matrix(at, rows, (shape.numel() if numel is None else numel) // max(rows, 1), len(shape))


def make_lots(
    names: Iterable[Sequence[str]],
    named: Mapping[str, Tensor],
    policy: Policy,
    device: torch.device | None = None,
) -> list[Lot]:
    """Lots of these parameters, each with the compressor that the policy chooses, joined by `Select`.

    `device`: where they are exchanged; None: where the parameters are.
    """
    return [_lot(group, named, policy, device) for group in names]


def _lot(
    names: Sequence[str], named: Mapping[str, Tensor], policy: Policy, device: torch.device | None
) -> Lot:
    slots, start = [], 0
    for name in names:
        slots.append(Slot(name, start, start + named[name].numel(), named[name].shape))
        start = slots[-1].stop
    first = named[names[0]]
    chosen = tuple(choice(name, named[name], policy) for name in names)
    return Lot(tuple(slots), first.dtype, first.device if device is None else device, chosen)


def choice(name: str, p: Tensor, policy: Policy) -> Compressor:
    """What the policy chooses for the parameter.

    Raises:
        AttachError: it is no compressor.
    """
    compressor = policy(name, p)
    if compressor is not None and not isinstance(compressor, Compressor):
        raise AttachError(
            f"the policy gave {compressor!r} for {name}: return a Compressor, or None to keep it dense"
        )
    return Dense() if compressor is None else compressor


def _joined(slots: Sequence[Slot], chosen: Sequence[Compressor]) -> Compressor:
    if not slots:
        return Dense()
    mine: dict[Compressor, list[Slot]] = {}
    for slot, compressor in zip(slots, chosen, strict=True):
        mine.setdefault(compressor, []).append(slot)
    (main, most), *others = sorted(mine.items(), key=lambda item: -sum(s.stop - s.start for s in item[1]))
    main = main.bound(tuple(slot.matrix(slot.start) for slot in most))
    return Select(main, tuple(_part(*other) for other in others)) if others else main


def _part(compressor: Compressor, slots: Sequence[Slot]) -> Part:
    spans: list[tuple[int, int]] = []
    matrices, at = [], 0
    for slot in slots:
        matrices.append(slot.matrix(at))
        at += slot.stop - slot.start
        if spans and spans[-1][1] == slot.start:
            spans[-1] = (spans[-1][0], slot.stop)
        else:
            spans.append((slot.start, slot.stop))
    return Part(compressor.bound(tuple(matrices)), tuple(spans))


@dataclass(frozen=True)
class Kept:
    """A parameter's part of a state field, or what this rank has of it.

    Attributes:
        tensor: a view.
        shared: whether it is equal on all ranks of the axis where the compressors meet.
        start: of how many elements the whole would be, and from which on this is: `width`, `start`.
    """

    tensor: Tensor
    shared: bool
    start: int
    width: int


def named_state(lot: Lot, state: State) -> dict[tuple[str, str], Kept]:
    """A lot's state by (parameter, field)."""
    views: dict[tuple[str, str], Kept] = {}
    for field, tensor in state.items():
        owner, slots, short = _owner(lot, field)
        widths = owner.widths(short)
        at = 0
        for i, (slot, start) in enumerate(slots):
            if widths is not None:
                begin, size, offset, width = at, widths[i], 0, widths[i]
            else:
                begin, size, offset, width = start, slot.stop - slot.start, slot.offset, slot.shape.numel()
            view = tensor[begin : begin + size]
            views[slot.name, short] = Kept(view, owner.is_shared(short), offset, width)
            at += size
    return views


def stretch_state(lot: Lot, span: tuple[int, int], field: str, tensor: Tensor) -> dict[tuple[str, str], Kept]:
    """A state field that has one element for each of a stretch of a lot, by parameter: this rank's own.

    Of the parameters of the lot's main compressor alone: of others it says nothing.
    """
    parts = lot.compressor.parts if isinstance(lot.compressor, Select) else ()
    others = [span for part in parts for span in part.spans]
    mine = {slot.name for slot in lot.slots if not any(a <= slot.start < b for a, b in others)}
    return {
        (slot.name, field): Kept(tensor[slot.start : slot.stop], False, slot.offset, slot.shape.numel())
        for slot in lot.within(*span).slots
        if slot.name in mine
    }


def _owner(lot: Lot, field: str) -> tuple[Compressor, list[tuple[Slot, int]], str]:
    """Whose field it is, its parameters and where they begin in its tensor, and its own name."""
    if not isinstance(lot.compressor, Select):
        return lot.compressor, [(slot, slot.start) for slot in lot.slots], field
    spans = [span for part in lot.compressor.parts for span in part.spans]
    owner, _, short = field.partition(".")
    if owner == "main":
        rest = [slot for slot in lot.slots if not any(a <= slot.start < b for a, b in spans)]
        return lot.compressor.main, [(slot, slot.start) for slot in rest], short
    part = lot.compressor.parts[int(owner.removeprefix("part"))]
    mine = [slot for slot in lot.slots if any(a <= slot.start < b for a, b in part.spans)]
    starts = [sum(s.stop - s.start for s in mine[:i]) for i in range(len(mine))]
    return part.compressor, list(zip(mine, starts, strict=True)), short
