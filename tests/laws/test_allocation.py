"""After the second step nothing large is allocated, by torch or by numpy, whatever the compressor."""

import dataclasses
import re
import tracemalloc
from collections.abc import Callable, Sequence

import pytest
import torch
from laws import tensors
from table import NUMEL, TABLE
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tacit.compressors.wrappers import Part
from tacit.contracts import AllGather, AllReduce, AllToAll, Compressor, Context, Matrix, State
from tacit.topologies import Flat

LARGEST = 1 << 16
"""Bytes that a single allocation may have."""
SHAPE = 50, 80
"""So many times the rows and columns of the table's matrices: 1 % of the 4 million is more than 64 KiB."""
SMALLER = 25, 40
"""Enough for what allocates all entries."""
FEW = re.compile("topk|threshold|qsgd|phases|powersgd|low rank")
"""Rows with buffers of far fewer entries than there are, which are above LARGEST only in the larger shape."""

BY_NUMPY = {
    "entropy coded + ef",
    "byte coded int8 + ef",
    "byte coded qsgd",
    "byte coded bf16 + ef",
    "byte coded topk 30% + ef",
}
"""Of those that allocate, the ones that do it by NumPy too."""
ALLOCATES = {
    "dense, momentum corrected": "what was sent, to clear momentum where it was: all entries",
    "bf16, momentum corrected, + ef": "what was sent, to clear momentum where it was: all entries",
    "lag, momentum corrected": "what was sent, to clear momentum where it was: all entries",
    "dense, clipped, + ef": "the multiple that was sent: all entries",
    "entropy coded + ef": "messages, whose length is another one in every round, and the peers' codes",
    "byte coded int8 + ef": "messages of another length in each round, and the peers' payloads",
    "byte coded qsgd": "messages of another length in each round, and the peers' payloads",
    "byte coded bf16 + ef": "messages of another length in each round, and the peers' payloads",
    "byte coded topk 30% + ef": "messages of another length in each round, and the peers' payloads",
    "topk 30% in parts + ef": "messages, and the peers' payloads",
    "randomk 5%": "positions, drawn anew in every round",
    "randomk 5% + ef": "positions, drawn anew in every round",
    "randomk 100%": "positions, drawn anew in every round",
    "predicted": "positions, whose turn it is, and what a piece is predicted from",
    "predicted + ef": "positions, whose turn it is, and what a piece is predicted from",
    "predicted, at first": "positions: all",
    "predicted, small ones whole": "positions, whose turn it is, and what a piece is predicted from",
    "predicted, at random": "positions, whose turn it is, and what a piece is predicted from",
    "predicted, by layers": "positions, whose turn it is, and what a piece is predicted from",
    "predicted, in bf16": "positions, whose turn it is, and what a piece is predicted from",
    "predicted, the largest sent": "positions, those that were sent, and what a piece is predicted from",
    "nowcast": "what a piece is predicted from",
    "cosine transform, topk 1%": "the transform: all coefficients",
    "cosine transform, topk 1% + ef that decays": "the transform: all coefficients",
    "cosine transform, signs, + ef": "the transform: all coefficients",
    "demo": "the transform: all coefficients",
    # Baselines in plain torch.
    "3lc + ef": "codes: all",
    "natural dithering": "levels: all",
    "natural dithering 3 bits, buckets of 64": "levels: all",
    "count sketch + ef": "hashes, drawn anew in every round",
    "chunks + ef": "chunks, and what is sent of them",
    "sampled entries": "probabilities: all",
    "sampled spectrum": "a decomposition",
    "adacomp + ef": "sums with the residual: all",
    "adacomp of small bins, full, + ef": "sums with the residual: all",
    "oktopk 1% + ef": "what is chosen, and comes",
}
"""What still does, and what for."""


def enlarged(value: object, rows: int, columns: int) -> object:
    """A compressor for so many times as many rows and columns of entries."""
    factor = rows * columns
    if isinstance(value, Matrix):
        return Matrix(value.start * factor, value.rows * rows, value.columns * columns)
    if isinstance(value, Part):
        spans = tuple((start * factor, stop * factor) for start, stop in value.spans)
        return Part(enlarged(value.compressor, rows, columns), spans)  # type: ignore[arg-type]
    if isinstance(value, tuple):
        return tuple(enlarged(each, rows, columns) for each in value)
    if isinstance(value, Compressor):
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}  # type: ignore[arg-type]
        fields = {name: enlarged(each, rows, columns) for name, each in given.items()}
        return dataclasses.replace(value, **fields)  # type: ignore[type-var]
    return value


class StateSlice:
    """A workspace that hands out the same buffers every round, and swaps them as a session does."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def spare(self, field: str, like: Tensor) -> Tensor:
        if field not in self.buffers:
            self.buffers[field] = torch.empty_like(like)
        return self.buffers[field]

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if key not in self.buffers:
            self.buffers[key] = torch.empty(tuple(shape), dtype=dtype)
        return self.buffers[key]

    def swap(self, old: State, new: State) -> None:
        for field, tensor in new.items():
            if self.buffers.get(field) is tensor:
                self.buffers[field] = old[field]


class Steps:
    """One rank of two that say the same, step after step; its peer's payload is its own."""

    def __init__(self, compressor: Compressor, numel: int) -> None:
        self.compressor, (self.x, self.out) = compressor, tensors(2, numel)
        self.state, self.work, self.round = compressor.init(torch.empty(numel)), StateSlice(), 0

    def __call__(self) -> None:
        ctx = Context(out=self.out, work=self.work, peers=2, round=self.round, name="bucket")
        talk = Flat().conduct(self.x, self.compressor, self.state, ctx)
        answer: object = None
        try:
            while True:
                request = talk.send(answer)
                if isinstance(request, AllToAll):
                    answer = [request.payloads[0]] * 2
                    continue
                assert isinstance(request, AllReduce | AllGather)
                answer = (
                    request.payload if isinstance(request, AllReduce) else [request.payload, request.payload]
                )
        except StopIteration as end:
            self.work.swap(self.state, end.value.state)
            self.state, self.round = end.value.state, self.round + 1


def by_torch(step: Callable[[], object]) -> list[tuple[int, str]]:
    """Allocations of torch above LARGEST: bytes, and the operation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.events() or []
    return [(e.self_cpu_memory_usage, e.name) for e in events if e.self_cpu_memory_usage > LARGEST]


def by_numpy(step: Callable[[], object]) -> int:
    """The most that Python and numpy held beyond what they had."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        step()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", TABLE)
def test_nothing_large_is_allocated_after_the_second_step(name: str) -> None:
    rows, columns = SHAPE if FEW.search(name) and name not in ALLOCATES else SMALLER
    step = Steps(enlarged(TABLE[name].compressor, rows, columns), rows * columns * NUMEL)  # type: ignore[arg-type]
    for _ in range(2):
        step()
    found = by_torch(step)
    if name in ALLOCATES:
        assert found, f"{name} allocates nothing large any more: take it out of the list"
    else:
        assert not found
    assert (by_numpy(step) <= 2 * LARGEST) == (name not in BY_NUMPY)


def test_what_is_allocated_is_seen() -> None:
    """The measure itself: a tensor and an array just above the limit, and just below."""
    for numel, seen in ((LARGEST // 4 + 64, True), (LARGEST // 4 - 64, False)):
        assert bool(by_torch(lambda n=numel: torch.empty(n).add_(1))) == seen  # type: ignore[misc]
    assert by_numpy(lambda: torch.zeros(3 * LARGEST).numpy().copy()) > 2 * LARGEST
