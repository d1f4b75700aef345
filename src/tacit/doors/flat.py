"""A tensor's elements in one row, without copying them."""

from __future__ import annotations

from torch import Tensor

from tacit.errors import AttachError

__all__ = ["flat_view"]


def flat_view(tensor: Tensor) -> Tensor:
    """All elements of a tensor in the order of its memory, of shape (numel,).

    Convolutions that are laid out channels-last are dense, but cannot be viewed as a row in the order of
    their dims. DDP's buckets hold their gradients in the order of memory, too.

    Raises:
        AttachError: The tensor has gaps, or elements that lie over each other.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            raise AttachError(
                f"a parameter of shape {tuple(tensor.shape)} has the strides {tensor.stride()}: it has gaps "
                "or overlaps, give its module a dense one, parameter.contiguous()"
            )
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))
