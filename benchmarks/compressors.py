"""What compressing costs: every kernel in multiples of one `copy_` of the same tensor, on one thread.

    python benchmarks/compressors.py            # about 5 minutes
    python benchmarks/compressors.py --quick    # about 1 minute
    python benchmarks/compressors.py --bars     # only the rows that have a bar
    python benchmarks/compressors.py --json     # the last line on stdout is one JSON object

A row is a compressor and a task: encode; encode with error feedback (add what is owed, encode, keep the
rest); decode and add up the payloads of four peers; of sparse ones, scatter four alone, with
positions already unpacked and nothing to zero; of entropy coding, code and decode what has been encoded.
PowerSGD is held against the arithmetic of torch's own hook on
the same matrices (`lowrank.py`), and its bar is that. Each row is timed in blocks with `copy_` between them,
and then three times in plain torch, at three sizes: 25 million entries and 9.2 million (a large and a
middling bucket), and 270 thousand (one that stays in the second-level cache). The clock is the thread's own
processor time, so that being interrupted does not count.

To measure another compressor, add a row to `ROWS`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import thread_time
from typing import Literal
from unittest.mock import patch

import torch
from torch import Tensor

import lowrank
from paired import Arm, hardware, interleave, paired_ratio, save
from tacit.compressors import (
    BF16,
    FP8,
    FP16,
    QSGD,
    Blockwise,
    EntropyCoded,
    ErrorFeedback,
    Int8,
    MajoritySign,
    Natural,
    OneBit,
    Sign,
    TernGrad,
    Threshold,
    TopK,
)
from tacit.contracts import Compressor, Context, OneShot, Payload, ReduceEncoded
from tacit.exchange.error_feedback import encoded
from tacit.kernels import dispatch
from tacit.kernels.positions import scatter_add_, unpack_positions

SIZES = (25_000_000, 9_200_000, 270_000)
PEERS = 4
SMALL = 1_000_000
"""Below it, the bar for small tensors holds."""

Task = Literal["encode", "encode + EF", "decode 4", "scatter 4", "shorten", "restore", "exchange"]


@dataclass(frozen=True)
class Row:
    """A compressor at a task.

    Attributes:
        large: the bar, in copies of the tensor, for tensors that fill no cache; None: not promised.
        small: the bar for small tensors; None: that for large ones.
    """

    codec: Compressor
    task: Task
    large: float | None = None
    small: float | None = None

    def bar(self, numel: int) -> float | None:
        """The bar at this size."""
        return self.small if numel < SMALL and self.small is not None else self.large


ROWS: Mapping[str, Row] = {
    "sign": Row(Sign(), "encode"),
    "sign + EF": Row(Sign(), "encode + EF", 2.75, 3.0),
    "sign, add 4": Row(Sign(), "decode 4", 3.25),
    "sign by blocks + EF": Row(Sign(block=512), "encode + EF", 2.75, 3.0),
    "onebit + EF": Row(OneBit(), "encode + EF"),
    "onebit, add 4": Row(OneBit(), "decode 4"),
    "majority, count 4": Row(MajoritySign(), "decode 4"),
    "qsgd 4 bits": Row(QSGD(), "encode", 3.5, 5.0),
    "qsgd 4 bits, add 4": Row(QSGD(), "decode 4", 3.25),
    "qsgd 4 bits, by norm": Row(QSGD(scale="norm"), "encode"),
    "qsgd 3 bits": Row(QSGD(bits=3), "encode"),
    "terngrad": Row(TernGrad(), "encode", 3.0, 4.0),
    "terngrad, add 4": Row(TernGrad(), "decode 4", 3.25),
    "int8": Row(Int8(), "encode", 2.0, 2.5),
    "int8 + EF": Row(Int8(), "encode + EF", 2.75, 3.0),
    "int8, add 4": Row(Int8(), "decode 4", 3.25),
    "blocks of 3 bits": Row(Blockwise(3), "encode", 4.0),
    "blocks of 3 bits + EF": Row(Blockwise(3), "encode + EF", 4.0),
    "blocks of 3 bits, add 4": Row(Blockwise(3), "decode 4", 4.0),
    "blocks of 2 bits + EF": Row(Blockwise(2), "encode + EF", 4.0),
    "blocks of 2 bits, add 4": Row(Blockwise(2), "decode 4", 4.0),
    "3 bits, entropy coding": Row(EntropyCoded(3), "shorten", 8.0, 20.0),
    "3 bits, entropy decoding": Row(EntropyCoded(3), "restore", 8.0, 20.0),
    "2 bits, entropy coding": Row(EntropyCoded(2), "shorten", 8.0, 20.0),
    "2 bits, entropy decoding": Row(EntropyCoded(2), "restore", 8.0, 20.0),
    "natural": Row(Natural(), "encode"),
    "natural, add 4": Row(Natural(), "decode 4"),
    "bf16": Row(BF16(), "encode"),
    "fp16": Row(FP16(), "encode"),
    "fp8": Row(FP8(), "encode"),
    "fp8, add 4": Row(FP8(), "decode 4"),
    "topk 1%": Row(TopK(ratio=0.01), "encode"),
    "topk 1% + EF": Row(TopK(ratio=0.01), "encode + EF", 2.5, 5.0),
    "topk 0.1% + EF": Row(TopK(ratio=0.001), "encode + EF", 2.5, 5.0),
    "topk 1%, add 4": Row(TopK(ratio=0.01), "decode 4"),
    "topk 1%, scatter 4": Row(TopK(ratio=0.01), "scatter 4", 1.25),
    "stc 1% + EF": Row(TopK(ratio=0.01, values=Sign()), "encode + EF"),
    "threshold 1% + EF": Row(Threshold(tau=2.6, capacity=0.02), "encode + EF"),
}


# ---- one row ------------------------------------------------------------------------------------------


class Scratch:
    """A workspace that hands out the same buffers every time, as a session does."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def spare(self, field: str, like: Tensor) -> Tensor:
        if field not in self._kept:
            self._kept[field] = torch.empty_like(like)
        return self._kept[field]

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if key not in self._kept:
            self._kept[key] = torch.empty(tuple(shape), dtype=dtype)
        return self._kept[key]


def prepared(row: Row, x: Tensor) -> Callable[[], object]:
    """The row's task on `x`, ready to be called again and again."""
    out = torch.empty_like(x)
    codec = row.codec
    assert isinstance(codec, OneShot)
    if row.task in ("decode 4", "scatter 4"):
        # Peers say different things: entries that all of them choose would be in the cache by the second.
        given = [x.roll(rank * x.numel() // 7) for rank in range(PEERS)]
        payloads = [codec.encode(each, _context(out, rank)) for rank, each in enumerate(given)]
        if row.task == "scatter 4":
            return _scatter(codec, payloads, out)
        return lambda: codec.decode_mean_(payloads, out)
    ctx = _context(out, 0)
    if row.task in ("shorten", "restore"):
        assert codec.varies
        return _code(codec, codec.encode(x, ctx), x.numel(), back=row.task == "restore")
    if row.task == "encode":
        return lambda: codec.encode(x, ctx)
    feedback = ErrorFeedback(codec)
    residual = {"residual": 0.1 * x.flip(0)}

    def encode() -> object:
        request = next(feedback.exchange(x, residual, ctx))
        assert isinstance(request, ReduceEncoded)
        return encoded(request)

    return encode


def _scatter(codec: OneShot, payloads: Sequence[Payload], out: Tensor) -> Callable[[], object]:
    assert isinstance(codec, TopK)
    k = codec.most(out.numel())
    entries = [(unpack_positions(packed, out.numel(), k), values) for values, packed in payloads]

    def scatter() -> None:
        for index, values in entries:
            scatter_add_(index, values, out, 1 / PEERS)

    return scatter


def _code(codec: OneShot, payload: Payload, numel: int, back: bool) -> Callable[[], object]:
    message = codec.shortened(payload, numel)
    target = tuple(part.clone() for part in payload)

    def restore() -> None:
        codec.restore_(message, numel, target)

    return restore if back else lambda: codec.shortened(payload, numel)


def _context(out: Tensor, rank: int) -> Context:
    return Context(out=out, work=Scratch(), peers=PEERS, rank=rank, name="bucket")


@contextmanager
def plain() -> Iterator[None]:
    """The kernels' versions in plain torch."""
    with patch.object(dispatch, "active_backend", lambda device="cpu": "torch"):
        yield


def measure(name: str, numel: int, blocks: int) -> dict[str, object]:
    """Time a row, `copy_` and the plain torch version in turn."""
    row = ROWS[name]
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(x)
    task = prepared(row, x)

    def plainly() -> None:
        with plain():
            task()

    often = max(1, 2_000_000 // numel)
    copy = Arm(lambda: target.copy_(x), 4 * often, 1)
    seconds = interleave({"copy": copy, "ours": Arm(task, 2 * often, 1)}, blocks, lambda: None, thread_time)
    slow = interleave({"copy": copy, "torch": Arm(plainly, 1, 1)}, 5, lambda: None, thread_time)
    multiple = paired_ratio(seconds["ours"], seconds["copy"])
    least = min(a / b for a, b in zip(seconds["ours"], seconds["copy"], strict=True))
    torchs = paired_ratio(slow["torch"], slow["copy"])
    bar = row.bar(numel)
    return {
        "row": name,
        "task": row.task,
        "numel": numel,
        "copy_ms": 1e3 * sorted(seconds["copy"])[blocks // 2],
        "copies": multiple | {"least": least},
        "copies_plain_torch": torchs,
        "bar": bar,
        "met": None if bar is None else multiple["median"] <= bar,
    }


# ---- all rows -----------------------------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """The rows as text."""
    lines = [
        f"{'row':24} {'entries':>10} {'copy ms':>8} {'copies (quartiles), least':>27} "
        f"{'plain torch':>11} {'bar':>5}"
    ]
    for row in rows:
        copies, torches = row["copies"], row["copies_plain_torch"]
        assert isinstance(copies, dict)
        assert isinstance(torches, dict)
        spread = f"{copies['median']:.2f} ({copies['q1']:.2f}-{copies['q3']:.2f}), {copies['least']:.2f}"
        bar = "" if row["bar"] is None else f"{row['bar']:5.2f} {'met' if row['met'] else 'MISSED'}"
        lines.append(
            f"{row['row']:24} {row['numel']:10,} {row['copy_ms']:8.3f} {spread:>27} "
            f"{torches['median']:11.1f} {bar}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer blocks: about 1 minute")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-compressors.json")
    parser.add_argument(
        "--only", action="append", choices=[*ROWS, lowrank.NAME], help="one row alone; may be repeated"
    )
    parser.add_argument("--bars", action="store_true", help="the rows that have a bar, and no others")
    parser.add_argument("--numel", type=int, action="append", help="another size; may be repeated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    out = sys.stderr if options.json else sys.stdout
    blocks = 5 if options.quick else 15
    barred = [name for name, row in ROWS.items() if row.large or not options.bars]
    names = [name for name in options.only or barred if name in ROWS]
    rows = [measure(name, numel, blocks) for name in names for numel in options.numel or SIZES]
    low_rank = lowrank.measure(blocks) if lowrank.NAME in (options.only or [lowrank.NAME]) else []
    result = {
        "benchmark": "compressors",
        "quick": options.quick,
        "kernels": dispatch.active_backend(),
        "hardware": hardware(),
        "rows": rows,
        "low_rank": low_rank,
    }
    machine = result["hardware"]
    assert isinstance(machine, dict)
    print("one thread of: " + ", ".join(f"{key} {value}" for key, value in machine.items()), file=out)
    print(table(rows), file=out)
    if low_rank:
        print(lowrank.table(low_rank), file=out)
    missed = [f"{row['row']} at {row['numel']:,}" for row in (*rows, *low_rank) if row["met"] is False]
    print(f"missed: {', '.join(missed) or 'none'}", file=out)
    if options.save:
        print(f"saved {save('compressors', result)}", file=sys.stderr)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
