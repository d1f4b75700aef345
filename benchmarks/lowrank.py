"""PowerSGD's arithmetic against that of torch's own hook: a row of `compressors.py`; one rank, no network.

Both make P, orthogonalise it, make Q, and multiply P Q'; torch's hook orthogonalises the old Q too, and with
`batch_tensors_with_same_shape` copies matrices of one shape together and back. Ours also fills what lies
between the matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from time import thread_time

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from paired import Arm, interleave, paired_ratio
from tacit.compressors import PowerSGD
from tacit.contracts import Context, Matrix

NAME = "powersgd rank 4"
RANK = 4
VECTOR = 512
"""Entries between two matrices: biases and norms."""

SHAPES: Mapping[str, Sequence[tuple[int, int]]] = {
    "vgg-11": [(512, 4608)] * 3 + [(512, 2304), (256, 2304), (256, 1152), (128, 576)],
    "transformer": [(512, 2048), (2048, 512), (512, 512), (1536, 512)] * 6,
    "small layers": [(128, 512), (512, 128), (128, 128), (384, 128)] * 12,
}
"""Rows and columns, in the order of backward."""


class _Scratch:
    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def spare(self, field: str, like: Tensor) -> Tensor:
        return self._kept.setdefault(field, torch.empty_like(like))

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._kept.setdefault(key, torch.empty(tuple(shape), dtype=dtype))


def matrices(shapes: Sequence[tuple[int, int]]) -> tuple[Matrix, ...]:
    """Where they lie in one flat tensor, with a vector behind each."""
    found, at = [], 0
    for rows, columns in shapes:
        found.append(Matrix(at, rows, columns))
        at += rows * columns + VECTOR
    return tuple(found)


def ours(placed: Sequence[Matrix], x: Tensor) -> Callable[[], object]:
    """One exchange of `PowerSGD`, whose requests are answered at once."""
    compressor = PowerSGD(rank=RANK, matrices=tuple(placed))
    state = compressor.init(x)
    ctx = Context(out=torch.empty_like(x), work=_Scratch(), peers=1, name="bucket")

    def exchange() -> None:
        talk = compressor.exchange(x, state, ctx)
        try:
            request = next(talk)
            while True:
                request = talk.send(request.payload)  # type: ignore[union-attr]
        except StopIteration:
            pass

    return exchange


def torchs(placed: Sequence[Matrix], x: Tensor, batched: bool) -> Callable[[], object]:
    """What `powerSGD_hook` computes, in its order."""
    groups: dict[object, list[Tensor]] = defaultdict(list)
    for i, m in enumerate(placed):
        view = x[m.start : m.start + m.rows * m.columns].view(m.rows, m.columns)
        groups[(m.rows, m.columns) if batched else i].append(view)
    generator = torch.Generator().manual_seed(0)
    ps = [torch.empty(len(g), g[0].shape[0], RANK) for g in groups.values()]
    first = [torch.randn(len(g), g[0].shape[1], RANK, generator=generator) for g in groups.values()]
    qs = [torch.empty_like(q) for q in first]
    back = [torch.empty_like(m) for g in groups.values() for m in g]

    def compute() -> None:
        given = [torch.stack(g) if len(g) > 1 else g[0].unsqueeze(0) for g in groups.values()]
        for q, before in zip(qs, first, strict=True):
            q.copy_(before)
            _orthogonalize(q)
        for m, q, p in zip(given, qs, ps, strict=True):
            torch.bmm(m, q, out=p)
        for p in ps:
            _orthogonalize(p)
        for m, p, q in zip(given, ps, qs, strict=True):
            torch.bmm(m.transpose(1, 2), p, out=q)
        at = 0
        for m, p, q in zip(given, ps, qs, strict=True):
            if len(m) == 1:
                torch.bmm(p, q.transpose(1, 2), out=back[at].unsqueeze(0))
            else:
                for mean, out in zip(torch.bmm(p, q.transpose(1, 2), out=m), back[at:], strict=False):
                    out.copy_(mean)
            at += len(m)

    return compute


def measure(blocks: int) -> list[dict[str, object]]:
    """Ours and torch's two ways in turn, for each list of matrices; the bar: no slower than the faster."""
    rows = []
    for name, shapes in SHAPES.items():
        placed = matrices(shapes)
        numel = sum(m.rows * m.columns + VECTOR for m in placed)
        x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        often = max(1, 20_000_000 // numel)
        arms = {
            "ours": Arm(ours(placed, x), often, 2),
            "torch": Arm(torchs(placed, x, batched=False), often, 2),
            "torch, batched": Arm(torchs(placed, x, batched=True), often, 2),
        }
        seconds = interleave(arms, blocks, lambda: None, thread_time)
        ratios = {arm: paired_ratio(seconds["ours"], seconds[arm]) for arm in ("torch", "torch, batched")}
        rows.append(
            {
                "row": NAME,
                "matrices": name,
                "numel": numel,
                "least_ms": {arm: 1e3 * min(each) for arm, each in seconds.items()},
                "median_ms": {arm: 1e3 * sorted(each)[blocks // 2] for arm, each in seconds.items()},
                "over_torch": ratios,
                "met": all(each["median"] <= 1.0 for each in ratios.values()),
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """The rows as text."""
    lines = [f"{NAME + ', ms: least (median)':32} {'ours':>16} {'torch':>16} {'torch, batched':>16}"]
    for row in rows:
        least, median = row["least_ms"], row["median_ms"]
        assert isinstance(least, dict)
        assert isinstance(median, dict)
        cells = "".join(f"{f'{least[arm]:.2f} ({median[arm]:.2f})':>17}" for arm in least)
        lines.append(f"{row['matrices']:14} {row['numel']:17,}{cells} {'met' if row['met'] else 'MISSED'}")
    return "\n".join(lines)
