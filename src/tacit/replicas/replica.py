"""This rank's parameters as flat buckets, in the precision of the anchor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn

from tacit.errors import AttachError
from tacit.kernels import deltas
from tacit.kernels.dispatch import on_host
from tacit.model.trained_model import local
from tacit.session.buckets import Bucket
from tacit.torch_compat import copy_each_


class LiveTensors(Mapping[str, Tensor]):
    """This rank's parts of parameters and buffers, by name, looked up in their modules at each access.

    A module may assign a new tensor to a buffer in every step, `self.ema = 0.9 * self.ema + ...`.

    Args:
        module: has them.
        names: the names of all.
        fixed: those that stay the same objects under any name, as pruning renames them.

    Attributes:
        fixed: as the argument; by default all, looked up again.
    """

    def __init__(
        self, module: nn.Module, names: Iterable[str], fixed: Mapping[str, Tensor] | None = None
    ) -> None:
        self._fixed = fixed or {}
        self.fixed: Mapping[str, Tensor] = fixed or self
        self._homes = {
            name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names
        }

    def __getitem__(self, name: str) -> Tensor:
        found = self._fixed.get(name)
        return local(self._whole(name) if found is None else found)

    def whole(self) -> dict[str, Tensor]:
        """The tensors as they are in their modules, where a parameter may be a DTensor."""
        return {name: self._whole(name) for name in self}

    def _whole(self, name: str) -> Tensor:
        if name in self._fixed:
            return self._fixed[name]
        home, key = self._homes[name]
        found = getattr(home, key)
        if not isinstance(found, Tensor):
            raise AttachError(
                f"{name} was a tensor when the session began, and is {found!r} now: assign tensors alone to "
                "it, or close the session before"
            )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of anchors and of sums over rounds, for parameters of this type: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


LARGE = 1 << 14
"""The least number of entries for which a parameter is processed in place, and not joined with its
neighbours.
"""


@dataclass(slots=True)
class Place:
    """The position of a parameter in its bucket, and its last tensor."""

    name: str
    start: int
    stop: int
    shape: torch.Size
    dtype: torch.dtype
    where: tuple[int, tuple[int, ...]] | None = None
    view: Tensor | None = None

    def view_of(self, tensor: Tensor) -> Tensor:
        """The tensor as a row; if its memory has another order, as it is."""
        where = tensor.data_ptr(), tensor.stride()
        if self.view is None or where != self.where or tensor.shape != self.shape:
            _check_same(self, tensor)
            plain = tensor.detach()
            self.where, self.view = where, plain.view(-1) if plain.is_contiguous() else plain
        return self.view


class Replica:
    """Reads and writes this rank's parameters, bucket by bucket, in the order of their dimensions.

    Parameters in types of two bytes are rounded to the nearest number. The rounding error is added again when
    they are read, so that a step below half a unit in the last place is not undone.

    Args:
        buckets: which parameters travel together.
        named: the parameters, looked up again in each round.
        common: the anchor of each bucket, in the `wide` type; overwritten with the parameters.
        stays: whether replicas are always set to the anchor, so that unrounded values need not be stored.
    """

    def __init__(
        self, buckets: Sequence[Bucket], named: Mapping[str, Tensor], common: Sequence[Tensor], stays: bool
    ) -> None:
        self._buckets, self._named = buckets, named
        self._places = [
            [Place(param.name, param.start, param.stop, param.shape, bucket.dtype) for param in bucket.slices]
            for bucket in buckets
        ]
        self._runs = [[*_runs(places)] for places in self._places]
        largest = largest_of_types(buckets)
        narrow = {dtype: bucket for dtype, bucket in largest.items() if wide(dtype) != dtype}
        self._now = {dtype: wide_like(bucket) for dtype, bucket in largest.items()}
        self._wide = {dtype: wide_like(bucket) for dtype, bucket in narrow.items()}
        self._rounded = {dtype: bucket.like(bucket.device) for dtype, bucket in narrow.items()}
        self.put: list[Tensor | None] = [
            None if bucket.dtype not in narrow else anchor if stays else torch.empty_like(anchor)
            for bucket, anchor in zip(buckets, common, strict=True)
        ]
        """The unrounded values of each bucket; None for types that are not rounded."""
        self._own = not stays
        for i, anchor in enumerate(common):
            self.read(i, anchor)
            self._remember(i, anchor)

    def read(self, i: int, out: Tensor) -> None:
        """Overwrite `out` with the present parameters of bucket `i`."""
        self._read(self._places[i], out)

    def _read(self, places: Sequence[Place], flat: Tensor) -> None:
        _copy_(*zip(*self._pairs(places, flat), strict=True))

    def _write(self, places: Sequence[Place], flat: Tensor) -> None:
        with torch.no_grad():
            _copy_(*reversed([*zip(*self._pairs(places, flat), strict=True)]))

    def _pairs(self, places: Sequence[Place], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each of these parameters its part of `flat`, the bucket, and its tensor."""
        for place in places:
            there = place.view_of(self._named[place.name])
            here = flat[place.start : place.stop]
            yield here if there.dim() == 1 else here.view(there.shape), there

    def params(self, i: int) -> Tensor:
        """The parameters of bucket `i` before rounding; valid until the next call."""
        bucket = self._buckets[i]
        params = self._now[bucket.dtype][: bucket.numel]
        self.read(i, params)
        put = self.put[i]
        if put is not None:
            rounded = self._rounded[bucket.dtype][: bucket.numel].copy_(put)
            params.sub_(self._wide[bucket.dtype][: bucket.numel].copy_(rounded)).add_(put)
        return params

    def progress(self, i: int, anchor: Tensor, out: Tensor, also: Tensor | None = None) -> Tensor:
        """Overwrite `out` with the delta of bucket `i` from the anchor. Returns the delta before rounding.

        `also`: is overwritten with the returned values.
        """
        if self.put[i] is not None:
            exact = self.params(i).sub_(anchor)
            out.copy_(exact)
            if also is not None:
                also.copy_(exact)
            return exact
        for places in self._runs[i] if on_host(anchor) else [self._places[i]]:
            view = self._direct(places, anchor)
            if view is not None:
                out_part = part_for(view, places, out)
                second = None if also is None else part_for(view, places, also)
                deltas.subtract(view, part_for(view, places, anchor), out_part, second)
                continue
            self._read(places, out)
            here = span_of(places)
            out[here].sub_(anchor[here])
            if also is not None:
                also[here] = out[here]
        return out

    def _direct(self, places: Sequence[Place], flat: Tensor) -> Tensor | None:
        """A large parameter's tensor, if it can be processed in place with the same part of `flat`."""
        if places[-1].stop - places[0].start < LARGE or len(places) > 1:
            return None
        view = places[0].view_of(self._named[places[0].name])
        return view if type(view) is Tensor and view.device == flat.device else None

    def overwritten(self, i: int, reads: bool, entrywise: bool) -> Iterator[tuple[Sequence[Place], Tensor]]:
        """The parameters of bucket `i` before rounding, to be overwritten before the next ones are yielded.

        `reads`: whether their values are needed; otherwise they are unspecified. `entrywise`: whether they
            may be yielded in parts; large ones then in place, in their shape.
        """
        whole = self._places[i]
        flat = self._now[self._buckets[i].dtype][: whole[-1].stop]
        in_runs = entrywise and self.put[i] is None and on_host(flat) and not (reads and self._overlap(i))
        for places in self._runs[i] if in_runs else [whole]:
            view = self._direct(places, flat) if in_runs else None
            if view is not None:
                yield places, view
                continue
            if reads:
                self._read(places, flat) if in_runs else self.params(i)
            yield places, flat[span_of(places)]
            self._write(places, flat)
        if not in_runs:
            self._remember(i, flat)

    def _overlap(self, i: int) -> bool:
        """Whether parameters of bucket `i` may share memory, so that writing one may change another."""
        spans = sorted(_span(place.view_of(self._named[place.name])) for place in self._places[i])
        return any(later < end for (_, end), (later, _) in pairwise(spans))

    def widened(self, i: int, x: Tensor) -> Tensor:
        """`x`, of bucket `i`, in the `wide` type: itself, or a copy that is valid until the next call."""
        return x if self.put[i] is None else self._wide[x.dtype][: len(x)].copy_(x)

    def narrowed(self, i: int, x: Tensor) -> Tensor:
        """`x`, of bucket `i`, in the bucket's type: itself, or a copy that is valid until the next call."""
        return x if self.put[i] is None else self._rounded[self._buckets[i].dtype][: len(x)].copy_(x)

    def write(self, i: int, params: Tensor) -> None:
        """Set the parameters of bucket `i` to these values."""
        self._write(self._places[i], params)
        self._remember(i, params)

    def anchor_here(self, i: int, anchor: Tensor) -> None:
        """Take the present parameters of bucket `i` as the anchor, and as the values last written."""
        self.read(i, anchor)
        self._remember(i, anchor)

    def _remember(self, i: int, params: Tensor) -> None:
        put = self.put[i]
        if put is not None and self._own:
            put.copy_(params)


def span_of(places: Sequence[Place]) -> slice:
    """The span of neighbouring parameters in their bucket."""
    return slice(places[0].start, places[-1].stop)


def part_for(params: Tensor, places: Sequence[Place], flat: Tensor) -> Tensor:
    """The part of a bucket's flat tensor for these parameters, in the shape of `params`."""
    here = flat[span_of(places)]
    return here if params.dim() == 1 else here.view(params.shape)


def _runs(places: Iterable[Place]) -> Iterator[list[Place]]:
    """Each large parameter by itself, and the small ones between them."""
    for large, run in groupby(places, lambda place: place.stop - place.start >= LARGE):
        found = [*run]
        yield from ([place] for place in found) if large else [found]


def _span(x: Tensor) -> tuple[int, int]:
    """The first address of `x` and the one after its last, if it has entries."""
    furthest = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (1 + furthest) * x.element_size() if x.numel() else 0


def _copy_(into: Sequence[Tensor] = (), out_of: Sequence[Tensor] = ()) -> None:
    """Copy each tensor; many by one launch if both are on a GPU."""
    if into and into[0].is_cuda and out_of[0].is_cuda:
        copy_each_(into, out_of)
        return
    for here, there in zip(into, out_of, strict=True):
        here.copy_(there)


def _check_same(place: Place, tensor: Tensor) -> None:
    if tensor.shape != place.shape or tensor.dtype != place.dtype:
        raise AttachError(
            f"{place.name} had the shape {tuple(place.shape)} and the type {place.dtype} when the session "
            f"began, and has {tuple(tensor.shape)} and {tensor.dtype} now: close the session, change the "
            "model, wrap it in a new DistributedDataParallel, and attach again"
        )


def largest_of_types(buckets: Iterable[Bucket]) -> dict[torch.dtype, Bucket]:
    """The largest bucket of each type: scratch memory of its size serves all."""
    return {bucket.dtype: bucket for bucket in sorted(buckets, key=lambda bucket: bucket.numel)}


def wide_like(bucket: Bucket) -> Tensor:
    """An uninitialised tensor of the shape of the bucket, in the `wide` type."""
    return torch.empty(bucket.numel, dtype=wide(bucket.dtype), device=bucket.device)
