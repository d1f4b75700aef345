"""Trials on meta tensors, which have shapes and no values: by them tacit finds out what is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tacit.contracts.common import Payload
from tacit.contracts.context import Context, Workspace
from tacit.errors import ConfigError, PayloadError, first_line

if TYPE_CHECKING:
    from tacit.contracts.compressor import OneShot


class NoMemory(Workspace):
    """Meta tensors, whatever is asked for."""

    def spare(self, field: str, like: Tensor) -> Tensor:
        """One like the state field."""
        return torch.empty_like(like, device="meta")

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """One of that shape and type."""
        return torch.empty(tuple(shape), dtype=dtype, device="meta")


@contextmanager
def on_meta(compressor: object) -> Iterator[None]:
    """Turn the failure of a compressor on meta tensors, in the block, into an error that says what to do.

    Raises:
        ConfigError: names it.
    """
    try:
        yield
    except (RuntimeError, TypeError) as error:  # what torch raises where a value is asked for
        raise ConfigError(
            f"{compressor} cannot be tried on meta tensors, which have shapes and no values, and by which "
            f"tacit finds out what is sent: {first_line(error)}. Where x.is_meta, look at no value, and "
            "return a payload of the shapes that you always return"
        ) from error


def formed(codec: OneShot, payload: Payload, x: Tensor, apart_from: Tensor | None = None) -> Payload:
    """What `encode` has returned of `x`; with other parts than peers expect, a collective ends the process.

    Args:
        apart_from: what was encoded, where it is overwritten before the payload has left.

    Raises:
        ConfigError: it is no tuple of tensors, or one of them lies in `apart_from`.
        PayloadError: its parts have other sizes or types.
    """
    whole = isinstance(payload, tuple)
    for part in payload if whole else ():  # in the hot path, where a generator takes longer
        whole = whole and isinstance(part, Tensor)
    if not whole:
        raise ConfigError(
            f"encode of {codec} has returned a {type(payload).__name__}, where a tuple of tensors belongs: "
            "of a single one write `return (codes,)`"
        )
    if apart_from is not None:
        for i, part in enumerate(payload):
            if _lies_in(part, apart_from):
                raise ConfigError(
                    f"part {i} of what encode of {codec} has returned shares memory with the x that it was "
                    "given, from which error feedback subtracts what is sent, before it is sent: return a "
                    "copy, such as x.to(dtype, copy=True), or write into ctx.scratch(...)"
                )
    if not x.is_meta:
        codec.check(payload, x)
    return payload


def _lies_in(part: Tensor, x: Tensor) -> bool:
    if part.is_meta:  # where all addresses are 0
        return part.untyped_storage() is x.untyped_storage()
    start = x.data_ptr()
    return start <= part.data_ptr() < start + x.numel() * x.element_size()


@lru_cache(1 << 10)
def payload_like(codec: OneShot, numel: int, dtype: torch.dtype) -> Payload:
    """A payload for so many entries, on meta tensors.

    Raises:
        ConfigError: the codec cannot be tried on them.
    """
    x = torch.empty(numel, dtype=dtype, device="meta")
    with on_meta(codec):
        return formed(codec, codec.encode(x, Context(out=x, work=NoMemory(), peers=1)), x)


def check_like(codec: OneShot, payload: Payload, out: Tensor) -> None:
    """Check that a payload's parts are as those that the codec makes of a meta tensor like `out`.

    Raises:
        PayloadError: they are not.
    """
    wanted = payload_like(codec, out.numel(), out.dtype)
    if _form(payload) != _form(wanted):
        raise PayloadError(
            f"a payload of {codec} for {out.numel()} entries is {_form(payload)}, and {_form(wanted)} where "
            "x is a meta tensor: its shapes must follow from the shape of x alone, on every rank and in "
            "every step; fill what varies up to a fixed length"
        )


def _form(payload: Payload) -> list[str]:
    return [f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}" for part in payload]
