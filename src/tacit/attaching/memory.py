"""The memory of a strategy in addition to the model, for the error if a GPU has no room for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tacit.replicas.narrow_anchors import anchor_like
from tacit.session.buckets import Policy, fitting, make_buckets
from tacit.session.narrow_states import FIELDS
from tacit.strategy import AnyStrategy, Strategy

MIB = 2**20


def state_bytes(
    strategy: Strategy, named: Mapping[str, Tensor], policy: Policy | None = None
) -> dict[str, int]:
    """The bytes of one level's state, by label, without temporary buffers of a round."""
    if strategy.subject == "nothing":
        return {}
    buckets = make_buckets([[name] for name in named], named, policy or fitting(strategy.compressor, named))
    found: dict[str, int] = {}
    for bucket in buckets:
        for field, tensor in bucket.compressor.init(bucket.like()).items():
            name = field.rpartition(".")[2]
            narrow = strategy.residual_bits == 16 and name in FIELDS and tensor.dtype == torch.float32
            size = 2 if narrow else tensor.element_size()
            found[name] = found.get(name, 0) + tensor.numel() * size
        if strategy.subject == "delta":
            anchor = anchor_like(bucket, strategy.anchor_bits, "meta")
            found["anchor"] = found.get("anchor", 0) + anchor.nbytes
            found["delta"] = found.get("delta", 0) + bucket.numel * bucket.dtype.itemsize
            for field, tensor in strategy.merge.init(anchor).items():
                found[field] = found.get(field, 0) + tensor.numel() * tensor.element_size()
    return found


def too_large(
    strategy: AnyStrategy, named: Mapping[str, Tensor], policy: Policy | None, exchange_on: str | None
) -> str:
    """The text of the error if the GPU has no room for it."""
    parts: dict[str, int] = {}
    for level in strategy.levels:
        for name, size in state_bytes(level, named, policy).items():
            parts[name] = parts.get(name, 0) + size
    each = ", ".join(f"{name} {size / MIB:,.0f} MiB" for name, size in parts.items() if size) or "little"
    model = sum(p.numel() * p.element_size() for p in named.values())
    return (
        f"the GPU has no room for what {strategy.name!r} keeps beside a model of {model / MIB:,.0f} MiB: "
        f"{each}, and buffers of a bucket's size. "
        + ("Use a strategy without a memory, such as 'qsgd'" if exchange_on == "host" else HINT)
    )


HINT = (
    'Write attach(..., exchange_on="host"), which keeps all of it in the host\'s memory; or residual_bits=16 '
    "or anchor_bits=16, where the algorithm has it, which keeps half as much"
)
