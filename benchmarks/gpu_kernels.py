"""What each codec costs on a GPU, in microseconds and in copies of what it encodes; a part of `gpu.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from gpu_checks import Check, Row, Setting, microseconds, on_the_device, verdict
from tacit.compressors import (
    BF16,
    FP8,
    QSGD,
    Blockwise,
    ByteCoded,
    EntropyCoded,
    Int8,
    Natural,
    PowerSGD,
    Sign,
    TernGrad,
    ThreeLC,
    Threshold,
    TopK,
)
from tacit.contracts import Context, FusedCodec, Matrix, OneShot, Payload
from tacit.kernels import merge, products, select
from tacit.kernels.entry_buffers import EntryBuffer
from tacit.kernels.narrow import round_at_random
from tacit.kernels.orthogonal import orthogonalize_
from tacit.prediction import MP2
from tacit.prediction.predictor import in_a_row
from tacit.transports.message_layout import empty_message, pack_, unpack

KERNELS: Mapping[str, OneShot] = {
    "topk 1%": TopK(ratio=0.01),
    "topk 1% of 4096": TopK(ratio=0.01, chunk=4096),
    **{f"blocks of {bits} bits": Blockwise(bits=bits) for bits in (2, 3, 4)},
    "int8": Int8(),
    "qsgd 4 bits": QSGD(),
    "bf16": BF16(),
    "fp8": FP8(),
    "sign": Sign(),
    "sign by blocks": Sign(block=512),
    "terngrad": TernGrad(),
    "natural": Natural(),
    "threshold 1%": Threshold(tau=2.576),
}
TOPK, *OTHERS = KERNELS
SHORTENED: Mapping[str, OneShot] = {
    **{f"blocks of {bits} bits": EntropyCoded(bits=bits) for bits in (2, 3)},
    **{name: ByteCoded(KERNELS[name]) for name in ("bf16", "int8", "qsgd 4 bits", TOPK)},
    "three-lc": ThreeLC(),
}
"""Codecs whose messages have a length that depends on the values."""
SOME = (TOPK, "int8", "qsgd 4 bits", "sign")
GOALS = {
    ("topk 1%", "encode + EF"): 3.0,
    ("topk 1% of 4096", "encode + EF"): 2.5,
    **{(f"blocks of {bits} bits", "encode + EF"): 2.0 for bits in (2, 3, 4)},
}
"""In copies."""
COUNTED = {
    ("topk 1%", "encode + EF"): 1.61,
    ("topk 1% of 4096", "encode + EF"): 1.52,
    ("blocks of 2 bits", "encode + EF"): 1.53,
    ("blocks of 3 bits", "encode + EF"): 1.55,
    ("blocks of 4 bits", "encode + EF"): 1.56,
    ("topk 1%", "decode 4"): 0.59,
    ("blocks of 2 bits", "decode 4"): 0.60,
    ("blocks of 3 bits", "decode 4"): 0.69,
    ("blocks of 4 bits", "decode 4"): 0.75,
    ("residual in bf16", "round"): 0.75,
    ("blocks of 2 bits", "entropy code"): 0.08,
    ("blocks of 3 bits", "entropy code"): 0.19,
    ("blocks of 2 bits", "and back"): 0.08,
    ("blocks of 3 bits", "and back"): 0.20,
}
"""What reading and writing memory alone would take, in copies: by counting bytes."""
DECODED = 1.5
"""What decoding four peers should take at most, in copies."""
LARGE, MEDIUM, TINY = 25_000_000, 6_500_000, 20_000
BLOCK = ((2304, 768), (768, 768), (3072, 768), (768, 3072))
"""The matrices of a block of GPT-2 small."""


class Scratch:
    """A workspace that hands out the same buffers every time, as a session does."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def spare(self, field: str, like: Tensor) -> Tensor:
        return self._kept.setdefault(field, torch.empty_like(like))

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if key not in self._kept:
            self._kept[key] = torch.empty(tuple(shape), dtype=dtype, device=like.device)
        return self._kept[key]


def measured(
    setting: Setting, numel: int, codec: str, task: str, call: Callable[[], object], copy: float
) -> Row:
    """A row of the table, which is printed too; `copy`: what a copy takes."""
    call()
    took, times = microseconds(call, setting.device), 5
    found = [each for _, each, _ in on_the_device(call, times, setting.device)]
    runs, count = sum(found) * 1000 / times, len(found) / times
    print(
        f"{numel:>11,} {codec:17} {task:12} {took:8.0f} us {took / copy:6.2f} copies; "
        f"{count:3.0f} kernels run for {runs:6.0f} us"
        + (f"; by counting bytes {counted:.2f} copies" if (counted := COUNTED.get((codec, task))) else ""),
        flush=True,
    )
    told = {"us": took, "copies": took / copy, "kernels_us": runs, "kernels": count, "counted": counted}
    return {"numel": numel, "codec": codec, "task": task, **told}


def codecs(setting: Setting, numel: int, names: Sequence[str]) -> Row:
    """Encode, encode with error feedback, and decode of four peers."""
    numel = TINY if setting.small else numel
    x, out = (torch.randn(numel, device=setting.device) for _ in range(2))
    copy = microseconds(partial(out.copy_, x), setting.device)
    rows = [
        measured(setting, numel, name, task, call, copy)
        for name in names
        for task, call in tasks_of(KERNELS[name], x, out).items()
    ]
    return {"copy_us": copy, "rows": rows, "verdicts": [*judged(rows)] if numel == LARGE else []}


def judged(rows: Sequence[Row]) -> list[Row]:
    """What the goals say of these rows."""
    decoded = [(row, DECODED) for row in rows if row["task"] == "decode 4"]
    goals = [(row, GOALS[key]) for row in rows if (key := (row["codec"], row["task"])) in GOALS]
    return [
        verdict(f"{row['codec']}, {row['task']}: copies", row["copies"], most)
        for row, most in [*goals, *decoded]
    ]


def tasks_of(codec: OneShot, x: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
    """What a codec does to `x`, ready to be called."""
    ctxs = [
        Context(out=out, work=Scratch(), peers=4, rank=i, health=torch.zeros(1, device=x.device))
        for i in range(4)
    ]
    residual, new_residual = torch.randn_like(x), torch.empty_like(x)
    tasks: dict[str, Callable[[], object]] = {"encode": lambda: codec.encode(x, ctxs[0])}
    if isinstance(codec, FusedCodec):
        tasks["encode + EF"] = lambda: codec.encode(x, ctxs[0], residual, new_residual)
    if not codec.additive:
        payloads = gathered([codec.encode(torch.randn_like(x), ctx) for ctx in ctxs])
        tasks["decode 4"] = lambda: codec.decode_mean_(payloads, out)
    return tasks


def gathered(payloads: Sequence[Payload]) -> list[Payload]:
    """As an all-gather leaves them: one message after the other."""
    messages = empty_message(payloads[0], len(payloads)).view(len(payloads), -1)
    for payload, message in zip(payloads, messages, strict=True):
        pack_(payload, message)
    return [unpack(message, payloads[0]) for message in messages]


def thin_products(setting: Setting) -> Row:
    """PowerSGD's three products, of the matrices of three blocks of GPT-2 small, by Triton and by torch."""
    matrices, start = [], 0
    for rows, columns in [(16, 8), (8, 16)] if setting.small else BLOCK * 3:
        matrices.append(Matrix(start, rows, columns))
        start += rows * columns
    places = [(m.start, m.rows, m.columns) for m in matrices]
    codec = PowerSGD(rank=4, matrices=tuple(matrices))
    x, out = (torch.randn(start, device=setting.device) for _ in range(2))
    p, q = (
        torch.randn(4 * sum(getattr(m, side) for m in matrices), device=setting.device)
        for side in ("rows", "columns")
    )
    copy = microseconds(partial(out.copy_, x), setting.device)

    def by_torch(product: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        for parts in codec._parts(x, p, q):
            product(*parts)

    tasks: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "P = M Q": (
            lambda: products.times_q_(x, p, q, places, 4),
            lambda: by_torch(lambda m, a, b: torch.bmm(b, m.transpose(1, 2), out=a)),
        ),
        "Q = M' P": (
            lambda: products.times_p_(x, p, q, places, 4),
            lambda: by_torch(lambda m, a, b: torch.bmm(a, m, out=b)),
        ),
        "M - P Q'": (
            lambda: products.expand_(x, p, q, places, 4, subtract=True),
            lambda: by_torch(lambda m, a, b: m.baddbmm_(a.transpose(1, 2), b, alpha=-1e-9)),
        ),
    }
    lengths = [m.rows for m in matrices]
    found = [measured(setting, start, "powersgd", "orthogonal", lambda: orthogonalize_(p, lengths, 4), copy)]
    found += [
        measured(setting, start, name, task, call, copy)
        for task, calls in tasks.items()
        for name, call in zip(("powersgd", "the same by torch"), calls, strict=True)
    ]
    return {"copy_us": copy, "rows": found}


def rounding(setting: Setting) -> Row:
    """A residual that is kept in bf16, rounded at random."""
    numel = TINY if setting.small else LARGE
    x, out = torch.randn(numel, device=setting.device), torch.empty(numel, device=setting.device)
    copy, narrow = (
        microseconds(partial(out.copy_, x), setting.device),
        torch.empty_like(x, dtype=torch.bfloat16),
    )
    call = partial(round_at_random, x, 7, narrow)
    return {"copy_us": copy, "rows": [measured(setting, numel, "residual in bf16", "round", call, copy)]}


def entropy_coding(setting: Setting) -> Row:
    """What a codec has made, in as many bits as its values ask for, and back."""
    numel = TINY if setting.small else LARGE
    x, out = (torch.randn(numel, device=setting.device) for _ in range(2))
    copy, found = microseconds(partial(out.copy_, x), setting.device), []
    health = torch.zeros(1, device=x.device)
    for name, codec in SHORTENED.items():
        payload = codec.encode(x, Context(out=out, work=Scratch(), peers=4, health=health))
        message, length = codec.shortened_on_device(payload, numel)
        tasks: dict[str, Callable[[], object]] = {}
        tasks["entropy code"] = partial(codec.shortened_on_device, payload, numel)
        for task, peers in (("and back", 1), ("four back", 4)):
            arrived = message[: int(length)].repeat(peers, 1), length.repeat(peers)
            back = tuple(each.new_empty((peers, *each.shape)) for each in payload)
            tasks[task] = partial(codec.restore_on_device_, *arrived, numel, back)
        found += [measured(setting, numel, name, task, call, copy) for task, call in tasks.items()]
    return {"copy_us": copy, "rows": found}


def merges(setting: Setting) -> Row:
    """One swap of gTop-k: two lists of 1 % become one, and a rank finds which of its entries were kept."""
    numel = TINY if setting.small else LARGE
    x, residual, one_more = (torch.randn(numel, device=setting.device) for _ in range(3))
    copy, k = microseconds(partial(residual.copy_, x), setting.device), numel // 100
    one, other = (select.select_largest(each, k) for each in (x, one_more))

    def room(entries: int) -> EntryBuffer:
        return EntryBuffer(x.new_empty(entries, dtype=torch.int32), x.new_empty(entries))

    both, kept, lists = room(2 * k), room(k), (room(k).positions, room(k).positions)
    whole = merge.merge_largest(one, other, k, both)
    arrived, _ = merge.common_positions(one.positions, whole.positions, *lists)
    tasks: dict[str, Callable[[], object]] = {
        "merge": partial(merge.merge_largest, one, other, k, both),
        "common": partial(merge.common_positions, one.positions, whole.positions, *lists),
        "keep": partial(merge.keep_arrived, one, arrived, kept, residual),
    }
    found = [measured(setting, numel, "gtopk 1%", task, call, copy) for task, call in tasks.items()]
    return {"copy_us": copy, "rows": found}


def predictions(setting: Setting) -> Row:
    """The next change of each entry by MP²'s network, from the last two."""
    numel = TINY if setting.small else LARGE
    changes = torch.randn(2, numel, device=setting.device)
    out = torch.empty(numel, device=setting.device)
    predictor, copy = MP2(), microseconds(partial(out.copy_, changes[0]), setting.device)
    predictor.prepare(setting.device)
    call = partial(predictor.write, lambda piece: in_a_row(changes[:, piece]), "linear", out)
    return {"copy_us": copy, "rows": [measured(setting, numel, "MP2", "predict", call, copy)]}


FIRST = Check(
    "kernels: topk", 8, "what encoding by topk takes, in copies", partial(codecs, numel=LARGE, names=[TOPK])
)
CHECKS = [
    Check("kernels: others", 20, "what all other codecs take", partial(codecs, numel=LARGE, names=OTHERS)),
    Check("kernels: PowerSGD", 8, "PowerSGD's products by Triton and by torch", thin_products),
    Check("kernels: rounding", 4, "what rounding residuals to bf16 takes", rounding),
    Check("kernels: entropy", 12, "what entropy coding takes, and back", entropy_coding),
    Check("kernels: gTop-k", 6, "what a swap of gTop-k takes, by torch alone", merges),
    Check("kernels: MP2", 6, "what MP²'s network takes", predictions),
    Check("kernels: less", 12, "the same of 6.5 million entries", partial(codecs, numel=MEDIUM, names=SOME)),
]
