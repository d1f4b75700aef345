"""What a hub does with the shares of a collective: it adds them up, or puts them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from tacit import described
from tacit.described import Whole
from tacit.errors import PayloadError

TYPES = {
    str(each).removeprefix("torch."): each
    for each in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}
_OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True)
class ShareSpec:
    """What a rank says of its share of a collective.

    Attributes:
        group: whose collective it is, and `key` which of these.
        rank: whose share, of `size`.
        do: what becomes of the shares.
        op, dtype: how "reduce" adds them up.
        sizes: for "exchange", the bytes for each rank.
        root: whose share "broadcast" is about, and who gets what "gather to" gathers.
        by: the member's name.
        bucket: what the share is about, where it is to be compared with the others'; `stage`: the how
            manieth message of it.
        parts: the types of the numbers that follow each other in it, and the bytes of each; for "exchange"
            for each rank, or for all alike.
    """

    group: str
    key: str
    rank: Whole
    size: Whole
    do: Literal["reduce", "gather", "gather to", "exchange", "broadcast", "send", "receive"]
    op: str = "sum"
    dtype: str = "float32"
    sizes: list[Whole] = field(default_factory=list)
    root: Whole = 0
    by: str = ""
    bucket: str = ""
    stage: Whole = 0
    parts: list[list[tuple[str, Whole]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not (self.rank < self.size and self.root < self.size):
            raise PayloadError(f"a share of rank {self.rank}, root {self.root}, of {self.size}")
        if self.do == "reduce" and (self.op not in _OPERATIONS or self.dtype not in TYPES):
            raise PayloadError(f"a share to be reduced by {self.op:.20} as {self.dtype:.20}")
        if self.do == "exchange" and len(self.sizes) != self.size:
            raise PayloadError(f"a share in {len(self.sizes)} parts, for {self.size} ranks")
        if any(dtype not in TYPES for row in self.parts for dtype, _ in row):
            raise PayloadError("a share of numbers of an unknown type")
        if len(self.parts) not in (0, 1, self.size):
            raise PayloadError(f"a share that says of {len(self.parts)} ranks what it holds for them")

    @property
    def waits_for(self) -> int:
        """How many shares make it whole."""
        return 2 if self.do in ("send", "receive") else self.size

    @property
    def together(self) -> tuple[Any, ...]:
        """What must be equal in all shares of one collective."""
        kind = "send" if self.do == "receive" else self.do
        return kind, self.size, self.op, self.dtype, self.root

    @property
    def differs(self) -> bool:
        """Whether each rank's share may have another form."""
        return self.do == "exchange" and not self.bucket

    @property
    def form(self) -> str:
        """What says how its bytes are read."""
        return "" if self.differs else repr((self.bucket, self.stage, self.sizes, self.parts))


def read_spec(text: bytes) -> ShareSpec:
    """A share's description.

    Raises:
        ValueError: it is none.
    """
    found: ShareSpec = described.read(
        text.decode("utf-8", "replace"), Annotated[ShareSpec, described.JSON], "a share"
    )
    return found


def answers(specs: Mapping[int, ShareSpec], shares: Mapping[int, Tensor]) -> dict[int, Sequence[Tensor]]:
    """What each rank gets, as bytes, when all shares have come; by rank.

    Their forms are equal, where they may not differ (`bounds`).

    Raises:
        PayloadError: they do not fit together.
    """
    ranks = sorted(specs)
    first = specs[ranks[0]]
    whole = [shares[rank] for rank in ranks]
    match first.do:
        case "send" | "receive":
            sent = next(rank for rank in ranks if specs[rank].do == "send")
            return {rank: [shares[sent]] if rank != sent else [] for rank in ranks}
        case "reduce":
            total = _reduced(whole, first)
            return {rank: [total] for rank in ranks}
        case "gather":
            together = torch.cat(whole)
            return {rank: [together] for rank in ranks}
        case "gather to":
            return {rank: whole if rank == first.root else [] for rank in ranks}
        case "broadcast":
            return {rank: [shares[first.root]] for rank in ranks}
        case "exchange":
            if first.differs:
                parts = [torch.split(shares[rank], specs[rank].sizes) for rank in ranks]
                return {rank: [each[rank] for each in parts] for rank in ranks}
            columns = torch.split(torch.stack(whole), first.sizes, dim=1)
            return {rank: [columns[rank].reshape(-1)] for rank in ranks}


def _reduced(whole: Sequence[Tensor], spec: ShareSpec) -> Tensor:
    """In the order of ranks, so that all get the same bits whoever came first."""
    dtype = TYPES[spec.dtype]
    if len({each.numel() for each in whole}) > 1 or whole[0].numel() % dtype.itemsize:
        sizes = sorted({each.numel() for each in whole})
        raise PayloadError(f"shares of {sizes} bytes cannot be added up: do all train the same model?")
    total = whole[0].view(dtype).clone()
    for each in whole[1:]:
        _OPERATIONS[spec.op](total, each.view(dtype), out=total)
    return total.view(torch.uint8)
