"""Buckets: which parameters travel together, in which order; and which compressor handles which of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tacit.compressors.dense import Dense
from tacit.compressors.wrappers import Part, Partition
from tacit.contracts import (
    Compressor,
    Matrix,
    MixingCompressor,
    Spans,
    State,
    Topology,
)
from tacit.errors import AttachError

Policy = Callable[[str, Tensor], Compressor | None]
"""(name, parameter) -> the compressor for it; None: dense."""


@dataclass(frozen=True)
class ParamSlice:
    """The position of a parameter in a bucket, or of a part of it that begins at its entry `offset`."""

    name: str
    start: int
    stop: int
    shape: torch.Size
    offset: int = 0

    @property
    def member(self) -> str:
        """Its name among the members of a bucket; see `span_of`."""
        size = self.stop - self.start
        return member(self.name, self.offset, self.offset + size, self.shape.numel())

    def matrix(self, at: int) -> Matrix:
        """The parameter as a matrix that begins at `at`."""
        return as_matrix(self.shape, at, self.stop - self.start)


def member(name: str, start: int, stop: int, numel: int) -> str:
    """The name of a parameter's entries from `start` to `stop` as a bucket's member: NAME[START:STOP].

    If these are all of its entries, it is the parameter's name.
    """
    return name if (start, stop) == (0, numel) else f"{name}[{start}:{stop}]"


def parameter_of(member: str, named: Collection[str]) -> str:
    """The parameter of which a member of a bucket is all or a part."""
    return member if member in named or not member.endswith("]") else member.rpartition("[")[0]


def span_of(member: str, named: Mapping[str, Tensor]) -> tuple[str, int, int]:
    """The parameter, start and stop of the entries that a member of a bucket stands for."""
    name = parameter_of(member, named)
    if name == member:
        return name, 0, named[name].numel()
    start, _, stop = member[len(name) + 1 : -1].partition(":")
    return name, int(start), int(stop)


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel in one message: flat, one after the other; or a part of such a bucket.

    Attributes:
        device: where they are exchanged: on the parameters' device, or on the host, from copies.
        chosen: each parameter's compressor; `compressor` joins them.
    """

    slices: tuple[ParamSlice, ...]
    dtype: torch.dtype
    device: torch.device
    chosen: tuple[Compressor, ...]

    @cached_property
    def compressor(self) -> Compressor:
        """The compressor of the whole bucket."""
        return _joined(self.slices, self.chosen)

    @cached_property
    def name(self) -> str:
        """The name of its first member, which no other bucket has."""
        return self.slices[0].member

    @property
    def members(self) -> tuple[str, ...]:
        """The names of its parameters, or parts of them, in order."""
        return tuple(param.member for param in self.slices)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all its parameters."""
        return frozenset(param.name for param in self.slices)

    @cached_property
    def numel(self) -> int:
        """The number of elements of all its parameters."""
        return self.slices[-1].stop if self.slices else 0

    @property
    def edges(self) -> Sequence[int] | range:
        """Where it may be cut: anywhere, or between parameters only, where a compressor needs them whole."""
        if any(c.with_layout((Matrix(0, 1, 1),)) != c or not _sliceable(c) for c in self.chosen):
            return [param.start for param in self.slices] + [self.numel]
        return range(self.numel + 1)

    def within(self, start: int, stop: int) -> Bucket:
        """The part of it from entry `start` to `stop`."""
        slices, chosen = [], []
        for param, compressor in zip(self.slices, self.chosen, strict=True):
            a, b = max(param.start, start), min(param.stop, stop)
            if a < b:
                slices.append(
                    replace(param, start=a - start, stop=b - start, offset=param.offset + a - param.start)
                )
                chosen.append(compressor)
        return replace(self, slices=tuple(slices), chosen=tuple(chosen))

    def like(self, device: torch.device | str = "meta") -> Tensor:
        """An uninitialised tensor of its shape."""
        return torch.empty(self.numel, dtype=self.dtype, device=device)


def group_names(names: Iterable[str], named: Mapping[str, Tensor], cap: int) -> list[list[str]]:
    """Group parameters, in this order, into buckets of at most `cap` bytes, or of one parameter.

    Types and devices are not mixed.
    """
    buckets: list[list[str]] = []
    last: tuple[torch.dtype, torch.device] | None = None
    room = 0
    for name in names:
        p = named[name]
        size, kind = p.numel() * p.element_size(), (p.dtype, p.device)
        if not buckets or room < size or kind != last:
            room = cap
            buckets.append([])
        buckets[-1].append(name)
        room -= size
        last = kind
    return buckets


def divided(
    layout: Sequence[Sequence[str]], named: Mapping[str, Tensor], topology: Topology
) -> list[list[str]]:
    """The buckets, cut into smaller ones if the topology limits their size."""
    cap = most_bytes(topology)
    return [each for names in layout for each in group_names(names, named, cap)]


def most_bytes(topology: Topology, cap: int = sys.maxsize) -> int:
    """The most bytes of a bucket of at most `cap` with this topology."""
    return min(cap, topology.bucket_bytes)


def _sliceable(compressor: Compressor) -> bool:
    uses = (compressor.one_shot(step) for step in (0, *compressor.changes))
    return all(use is None or use.codec.sliceable for use in uses)


def exempting(compressor: Compressor) -> Policy:
    """The compressor for all parameters but those that it exempts."""
    return lambda _, p: compressor.exempted() if compressor.exempts(p.shape) else compressor


def fitting(compressor: Compressor, tensors: Mapping[str, Tensor]) -> Policy:
    """A policy: the compressor, adapted to the parameters that it does not exempt (`Compressor.for_model`).

    Raises:
        ConfigError: the compressor does not work for these parameters.
    """
    shapes = [p.shape for p in tensors.values() if p.numel() and not compressor.exempts(p.shape)]
    return exempting(compressor.for_model(tuple(as_matrix(shape) for shape in shapes)))


def as_matrix(shape: torch.Size, at: int = 0, numel: int | None = None) -> Matrix:
    """A parameter of this shape, or `numel` entries of it, as a matrix that begins at `at`."""
    rows = shape[0] if shape else 1
    return Matrix(at, rows, (shape.numel() if numel is None else numel) // max(rows, 1), len(shape))


def make_buckets(
    names: Iterable[Sequence[str]],
    named: Mapping[str, Tensor],
    policy: Policy,
    device: torch.device | None = None,
) -> list[Bucket]:
    """Buckets of these parameters, each with the compressor that the policy chooses, joined by `Partition`.

    `names`: of a bucket's members; see `span_of`. A parameter may be cut only where its compressor keeps
    no state. `device`: where they are exchanged; None: where the parameters are.
    """
    return [_bucket(group, named, policy, device) for group in names]


def _bucket(
    names: Sequence[str], named: Mapping[str, Tensor], policy: Policy, device: torch.device | None
) -> Bucket:
    slices, at = [], 0
    for each in names:
        name, start, stop = span_of(each, named)
        slices.append(ParamSlice(name, at, at + stop - start, named[name].shape, start))
        at = slices[-1].stop
    first = named[slices[0].name]
    chosen = tuple(choice(param.name, named[param.name], policy) for param in slices)
    return Bucket(tuple(slices), first.dtype, first.device if device is None else device, chosen)


def choice(name: str, p: Tensor, policy: Policy) -> Compressor:
    """The compressor that the policy chooses for the parameter.

    Raises:
        AttachError: the policy returned something else.
    """
    compressor = policy(name, p)
    if compressor is not None and not isinstance(compressor, Compressor):
        raise AttachError(
            f"the policy gave {compressor!r} for {name}: return a Compressor, or None to keep it dense"
        )
    return Dense() if compressor is None else compressor


def _joined(slices: Sequence[ParamSlice], chosen: Sequence[Compressor]) -> Compressor:
    if not slices:
        return Dense()
    mine: dict[Compressor, list[ParamSlice]] = {}
    for param, compressor in zip(slices, chosen, strict=True):
        mine.setdefault(compressor, []).append(param)
    (main, most), *others = sorted(mine.items(), key=lambda item: -sum(s.stop - s.start for s in item[1]))
    main = main.with_layout(tuple(param.matrix(param.start) for param in most))
    return Partition(main, tuple(_part(*other) for other in others)) if others else main


def _part(compressor: Compressor, slices: Sequence[ParamSlice]) -> Part:
    spans: list[tuple[int, int]] = []
    matrices, at = [], 0
    for param in slices:
        matrices.append(param.matrix(at))
        at += param.stop - param.start
        if spans and spans[-1][1] == param.start:
            spans[-1] = (spans[-1][0], param.stop)
        else:
            spans.append((param.start, param.stop))
    return Part(compressor.with_layout(tuple(matrices)), tuple(spans))


@dataclass(frozen=True)
class StateSlice:
    """The part of a state field that belongs to a parameter, or this rank's part of that.

    Attributes:
        tensor: a view.
        shared: whether it is equal on all ranks of the axis where the compressors meet.
        start: the element of the whole at which this part begins.
        width: the number of elements of the whole.
        by_entry: whether it has an element for each of the parameter's entries.
        mixing: whether it is valid only together with that of the other ranks; see `MixingCompressor`.
    """

    tensor: Tensor
    shared: bool
    start: int
    width: int
    by_entry: bool = True
    mixing: bool = False


def named_state(bucket: Bucket, state: State) -> dict[tuple[str, str], StateSlice]:
    """A bucket's state by (parameter, field)."""
    views: dict[tuple[str, str], StateSlice] = {}
    for field, tensor in state.items():
        owner, slices, short = _owner(bucket, field)
        widths, mixing = owner.widths(short), isinstance(owner, MixingCompressor)
        at = 0
        for i, (param, start) in enumerate(slices):
            if widths is not None:
                begin, size, offset, width = at, widths[i], 0, widths[i]
            else:
                begin, size, offset, width = (
                    start,
                    param.stop - param.start,
                    param.offset,
                    param.shape.numel(),
                )
            view = tensor[begin : begin + size]
            views[param.name, short] = StateSlice(
                view, owner.is_shared(short), offset, width, widths is None, mixing
            )
            at += size
    return views


def topology_state(
    bucket: Bucket, span: tuple[int, int], field: str, tensor: Tensor
) -> dict[tuple[str, str], StateSlice]:
    """A state field of the topology, with one element for each entry of a span of a bucket, by parameter.

    It has only the parameters of the bucket's main compressor.
    """
    inside = bucket.compressor.inside()
    mine = {param.name for param in bucket.slices if not _lies_in(param, inside)}
    return {
        (param.name, field): StateSlice(
            tensor[param.start : param.stop], False, param.offset, param.shape.numel()
        )
        for param in bucket.within(*span).slices
        if param.name in mine
    }


def _owner(bucket: Bucket, field: str) -> tuple[Compressor, list[tuple[ParamSlice, int]], str]:
    """The compressor of a field, its parameters with their starts in the tensor, and its name there."""
    inside = bucket.compressor.inside()
    if not inside:
        return bucket.compressor, [(param, param.start) for param in bucket.slices], field
    part, _, short = field.partition(".")
    owner, spans = inside[part]
    if spans is None:
        rest = [param for param in bucket.slices if not _lies_in(param, inside)]
        return owner, [(param, param.start) for param in rest], short
    mine = [param for param in bucket.slices if _lies_in(param, {part: inside[part]})]
    starts = [sum(s.stop - s.start for s in mine[:i]) for i in range(len(mine))]
    return owner, list(zip(mine, starts, strict=True)), short


def _lies_in(param: ParamSlice, inside: Mapping[str, tuple[Compressor, Spans | None]]) -> bool:
    """Whether one of the compressors has the parameter in its spans."""
    return any(a <= param.start < b for _, spans in inside.values() for a, b in spans or ())
