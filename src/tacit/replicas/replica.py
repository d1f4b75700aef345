"""This rank's parameters as flat buckets, in the precision of the anchor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn

from tacit.errors import AttachError
from tacit.kernels import deltas
from tacit.kernels.dispatch import on_host
from tacit.model.trained_model import local
from tacit.session.buckets import Bucket, ParamSlice
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

    def steady(self, names: Sequence[str]) -> list[Tensor] | None:
        """These, where each stays the same object, and is no shard of another; else None."""
        found = [self._fixed[name] for name in names if name in self._fixed]
        whole = len(found) == len(names) and not any(hasattr(each, "to_local") for each in found)
        return found if whole else None

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


class Run:
    """Neighbouring parameters of a bucket that are processed together: a large one, or small ones.

    Attributes:
        params: the slice of each in the bucket.
        here: the span of all in the bucket; `numel`: its length.
        lies: a large parameter's tensor, if it can be processed in place with the bucket's flat tensors.
    """

    def __init__(self, params: Sequence[ParamSlice], first: int = 0) -> None:
        self.params, self._first = params, first
        self.here = slice(params[0].start, params[-1].stop)
        self.numel = params[-1].stop - params[0].start
        self.lies: Tensor | None = None
        self._sizes = [param.stop - param.start for param in params]
        self._large = len(params) == 1 and _large(params[0])
        self._views: list[Tensor] = []
        self._alike = False

    def follow(self, views: Sequence[Tensor], device: torch.device) -> None:
        """Note the bucket's parameters as they are in memory now; its flat tensors are on this device."""
        self._views = [*views[self._first : self._first + len(self.params)]]
        self._alike = all(type(view) is Tensor and view.device == device for view in self._views)
        self.lies = self._views[0] if self._large and self._alike else None

    def of(self, flat: Tensor, like: Tensor) -> Tensor:
        """The part of a bucket's flat tensor for these parameters, in the shape of `like`."""
        part = flat[self.here]
        return part if like.dim() == 1 else part.view(like.shape)

    def read(self, row: Tensor) -> None:
        """Overwrite `row`, the part of a bucket's flat tensor for these parameters, with their values."""
        self._copy_(self._parts(row), self._views)

    def write(self, row: Tensor) -> None:
        """Overwrite their values with `row`."""
        self._copy_(self._views, self._parts(row))

    def _parts(self, row: Tensor) -> list[Tensor]:
        parts = zip(row.split_with_sizes(self._sizes), self._views, strict=True)
        return [part if view.dim() == 1 else part.view(view.shape) for part, view in parts]

    def _copy_(self, into: list[Tensor], out_of: list[Tensor]) -> None:
        if self._alike:
            copy_each_(into, out_of)
            return
        for here, there in zip(into, out_of, strict=True):
            here.copy_(there)

    def within(self, some: Sequence[ParamSlice]) -> slice:
        """The span of some of these parameters among them; all of it, if they are all, in any shape."""
        if len(some) == len(self.params):
            return slice(None)
        return slice(some[0].start - self.here.start, some[-1].stop - self.here.start)


class PlacedBucket:
    """The parameters of a bucket, as they are in memory now.

    Args:
        bucket: its parameters.
        named: looks them up.

    Attributes:
        whole: all of them; `runs`: the same, in the parts that are processed separately.
        overlap: whether some may share memory, so that writing one may change another.
    """

    def __init__(self, bucket: Bucket, named: Mapping[str, Tensor]) -> None:
        self._bucket, self._named = bucket, named
        self._names = [param.name for param in bucket.slices]
        self._steady = named.steady(self._names) if isinstance(named, LiveTensors) else None
        self.whole = Run(bucket.slices)
        on_device = not on_host(
            torch.empty(0, dtype=bucket.dtype, device=bucket.device)
        )  # where launches cost more
        self.runs = [self.whole] if on_device else [*_runs(bucket.slices)]
        self.overlap = False
        self._where: list[object] = []

    @property
    def longest_row(self) -> int:
        """The number of entries of the longest run that is not processed in place."""
        return max((run.numel for run in self.runs if run.lies is None), default=0)

    def find(self) -> None:
        """Look each up: as a row; if its memory has another order, as it is.

        Raises:
            AttachError: one has another shape or type than when the session began.
        """
        found = self._steady or [self._named[name] for name in self._names]
        where: list[object] = [(x.data_ptr(), x.stride(), x.shape) for x in found]
        if where != self._where:
            self._follow(found)
            self._where = where

    def _follow(self, found: Sequence[Tensor]) -> None:
        for param, x in zip(self._bucket.slices, found, strict=True):
            _check_same(param, self._bucket.dtype, x)
        plain = [x.detach() for x in found]
        views = [x.view(-1) if x.is_contiguous() else x for x in plain]
        for run in {self.whole, *self.runs}:
            run.follow(views, self._bucket.device)
        spans = sorted(map(_span, views))
        self.overlap = any(later < end for (_, end), (later, _) in pairwise(spans))


class Replica:
    """Reads and writes this rank's parameters, bucket by bucket, in the order of their dimensions.

    Parameters in types of two bytes are rounded to the nearest number. The rounding error is added again when
    they are read, so that a step below half a unit in the last place is not undone.

    Args:
        buckets: which parameters travel together.
        named: the parameters, looked up again in each round.
        common: the anchor of each bucket, in the `wide` type or bf16; overwritten with the parameters.
        stays: whether replicas are always set to the anchor, so that unrounded values need not be stored.
        whole: whether rounds need all parameters of a bucket in a row.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        named: Mapping[str, Tensor],
        common: Sequence[Tensor],
        stays: bool,
        whole: bool = True,
    ) -> None:
        self._buckets = buckets
        self._placed = [PlacedBucket(bucket, named) for bucket in buckets]
        largest = largest_of_types(buckets)
        narrow = {dtype: bucket for dtype, bucket in largest.items() if wide(dtype) != dtype}
        self._wide = {dtype: wide_like(bucket) for dtype, bucket in narrow.items()}
        self._rounded = {dtype: bucket.like(bucket.device) for dtype, bucket in narrow.items()}
        self.put: list[Tensor | None] = [
            None if bucket.dtype not in narrow else anchor if stays else wide_like(bucket)
            for bucket, anchor in zip(buckets, common, strict=True)
        ]
        """The unrounded values of each bucket; None for types that are not rounded."""
        self._own = not stays
        for i, anchor in enumerate(common):
            self.anchor_here(i, anchor)
        longest: dict[torch.dtype, int] = {}
        for bucket, placed, put in zip(buckets, self._placed, self.put, strict=True):
            in_row = whole or put is not None or placed.overlap
            numel = bucket.numel if in_row else placed.longest_row
            longest[bucket.dtype] = max(numel, longest.get(bucket.dtype, 0))
        self._now = {dtype: wide_like(largest[dtype], numel) for dtype, numel in longest.items()}

    def _row(self, i: int, numel: int) -> Tensor:
        """Uninitialised memory, valid until the next call; where no round asks for as much, anew."""
        now, bucket = self._now[self._buckets[i].dtype], self._buckets[i]
        return now[:numel] if numel <= now.numel() else wide_like(bucket, numel)

    def read(self, i: int, out: Tensor) -> None:
        """Overwrite `out` with the present parameters of bucket `i`."""
        placed = self._placed[i]
        placed.find()
        placed.whole.read(out)

    def params(self, i: int) -> Tensor:
        """The parameters of bucket `i` before rounding; valid until the next call."""
        params, put = self._row(i, self._buckets[i].numel), self.put[i]
        self.read(i, params)
        if put is not None:
            params.sub_(self.widened(i, self.narrowed(i, put))).add_(put)
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
        placed = self._placed[i]
        placed.find()
        for run in placed.runs:
            if (view := run.lies) is not None:
                second = None if also is None else run.of(also, view)
                deltas.subtract(view, run.of(anchor, view), run.of(out, view), second)
                continue
            moved = out[run.here]
            run.read(moved)
            moved.sub_(anchor[run.here])
            if also is not None:
                also[run.here] = moved
        return out

    def apply_kept(
        self,
        i: int,
        anchor: Tensor,
        mean: Tensor,
        subtract: Callable[[Tensor], None],
        move: Callable[[Tensor, Tensor, Tensor], None],
    ) -> None:
        """Add `mean` to the anchor, and set the parameters to the anchor and what is left of their delta.

        All in place: `mean` is overwritten with the delta from the anchor before, from which `subtract`
        subtracts what was sent. `move`: `deltas.move_anchor_`, or what stands for it. Of a bucket whose type
        is not rounded, whose parameters have been looked up for this round.
        """
        runs = self._placed[i].runs
        for run in runs:
            common, by, params = anchor[run.here], mean[run.here], run.lies
            if params is None:
                params = self._row(i, run.numel)
                run.read(params)
            move(common.view(params.shape), by.view(params.shape), params)
        subtract(mean)
        for run in runs:
            common, left, params = anchor[run.here], mean[run.here], run.lies
            if params is not None:
                deltas.move_(common.view(params.shape), None, params, left.view(params.shape))
                continue
            torch.add(common, left, out=left)
            run.write(left)

    def overwritten(self, i: int, reads: bool, entrywise: bool) -> Iterator[tuple[Run, Tensor]]:
        """The parameters of bucket `i` before rounding, to be overwritten before the next ones are yielded.

        `reads`: whether their values are needed; otherwise they are unspecified. `entrywise`: whether they
            may be yielded in parts; large ones then in place, in their shape.
        """
        placed = self._placed[i]
        placed.find()
        if not entrywise or self.put[i] is not None or (reads and placed.overlap):
            params = self.params(i) if reads else self._row(i, self._buckets[i].numel)
            yield placed.whole, params
            placed.whole.write(params)
            self._remember(i, params)
            return
        for run in placed.runs:
            if run.lies is not None:
                yield run, run.lies
                continue
            row = self._row(i, run.numel)
            if reads:
                run.read(row)
            yield run, row
            run.write(row)

    def widened(self, i: int, x: Tensor) -> Tensor:
        """`x`, of bucket `i`, in the `wide` type: itself, or a copy that is valid until the next call."""
        return x if self.put[i] is None else self._wide[x.dtype][: len(x)].copy_(x)

    def narrowed(self, i: int, x: Tensor) -> Tensor:
        """`x`, of bucket `i`, in the bucket's type: itself, or a copy that is valid until the next call."""
        return x if self.put[i] is None else self._rounded[self._buckets[i].dtype][: len(x)].copy_(x)

    def write(self, i: int, params: Tensor) -> None:
        """Set the parameters of bucket `i` to these values."""
        placed = self._placed[i]
        placed.find()
        placed.whole.write(params)
        self._remember(i, params)

    def anchor_here(self, i: int, anchor: Tensor) -> None:
        """Take the present parameters of bucket `i` as the anchor, and as the values last written."""
        self.read(i, anchor)
        self._remember(i, anchor)

    def _remember(self, i: int, params: Tensor) -> None:
        put = self.put[i]
        if put is not None and self._own:
            put.copy_(params)


def _large(param: ParamSlice) -> bool:
    return param.stop - param.start >= LARGE


def _runs(params: Sequence[ParamSlice]) -> Iterator[Run]:
    """Each large parameter by itself, and the small ones between them."""
    first = 0
    for large, each in groupby(params, _large):
        found = [*each]
        for together in [[param] for param in found] if large else [found]:
            yield Run(together, first)
            first += len(together)


def _span(x: Tensor) -> tuple[int, int]:
    """The first address of `x` and the one after its last, if it has entries."""
    furthest = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (1 + furthest) * x.element_size() if x.numel() else 0


def _check_same(param: ParamSlice, dtype: torch.dtype, tensor: Tensor) -> None:
    if tensor.shape != param.shape or tensor.dtype != dtype:
        raise AttachError(
            f"{param.name} had the shape {tuple(param.shape)} and the type {dtype} when the session "
            f"began, and has {tuple(tensor.shape)} and {tensor.dtype} now: close the session, change the "
            "model, wrap it in a new DistributedDataParallel, and attach again"
        )


def largest_of_types(buckets: Iterable[Bucket]) -> dict[torch.dtype, Bucket]:
    """The largest bucket of each type: scratch memory of its size serves all."""
    return {bucket.dtype: bucket for bucket in sorted(buckets, key=lambda bucket: bucket.numel)}


def wide_like(bucket: Bucket, numel: int | None = None) -> Tensor:
    """An uninitialised tensor of the shape of the bucket, or of `numel` entries, in the `wide` type."""
    return torch.empty(
        bucket.numel if numel is None else numel, dtype=wide(bucket.dtype), device=bucket.device
    )
