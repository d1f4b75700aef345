"""A block in which nothing may wait for a device: what would, on a GPU, is an error; found without one.

Usage: `with emulated_device(), NoHostSync(): ...`
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class HostSync(AssertionError):
    """What was called would make the host wait for the device, or would make a tensor elsewhere."""


WAITS = {
    "_local_scalar_dense": "a value is read (.item(), bool(), int(), float(), or a slice by a tensor)",
    "item": "a value is read",
    "is_nonzero": "a value is read (bool())",
    "equal": "a value is read (torch.equal)",
    "allclose": "a value is read (torch.allclose)",
    "nonzero": "the size of the result is not known beforehand",
    "nonzero_numpy": "the size of the result is not known beforehand",
    "argwhere": "the size of the result is not known beforehand",
    "masked_select": "the size of the result is not known beforehand",
    "bincount": "the size of the result is not known beforehand",
    "isin": "it sorts out what is unique",
}
MADE = {
    getattr(torch, name)
    for name in (
        "empty", "zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn", "randint", "randperm",
        "empty_strided", "scalar_tensor",
    )
}  # fmt: skip
READ = {
    Tensor.cpu: "it copies to the host",
    Tensor.numpy: "it is read on the host",
    Tensor.tolist: "it is read on the host",
    torch.tensor: "the values come from the host",
    torch.as_tensor: "the values come from the host",
    torch.asarray: "the values come from the host",
    torch.from_numpy: "the values come from the host",
    torch.frombuffer: "the values come from the host",
    Tensor.new_tensor: "the values come from the host",
}
TO = Tensor.to


class NoHostSync:
    """Inside the block, what makes the host wait raises `HostSync`, and so does what names no device.

    Holds for this thread.
    """

    def __init__(self) -> None:
        self._entered = ExitStack()

    def __enter__(self) -> NoHostSync:
        self._entered.enter_context(_Functions())
        self._entered.enter_context(_Operations())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()


_open = threading.local()


@contextmanager
def looking() -> Iterator[None]:
    """A block in a `NoHostSync` in which this thread may look: in place of a kernel, and for a `Read`."""
    before, _open.now = getattr(_open, "now", False), True
    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else 0
    if mode:
        torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        _open.now = before
        if mode:
            torch.cuda.set_sync_debug_mode(mode)


class _Functions:
    """Sees calls as they are written: below, every factory has a device.

    Stands in for the few functions it asks about: a `TorchFunctionMode` is called for all others too.
    """

    def __init__(self) -> None:
        self._thread, self._patch = threading.get_ident(), pytest.MonkeyPatch()

    def __enter__(self) -> None:
        for func in {*READ, *MADE, TO}:
            of_tensors = func is getattr(Tensor, func.__name__, None)
            self._patch.setattr(Tensor if of_tensors else torch, func.__name__, self._watched(func))

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _watched(self, func: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **given: Any) -> Any:
            if threading.get_ident() == self._thread and not getattr(_open, "now", False):
                _refuse(func, args, given)
            return func(*args, **given)

        return watched


def _refuse(func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> None:
    if func in READ:
        raise HostSync(f"{_name(func)}: {READ[func]}")
    if func in MADE and given.get("device") is None and given.get("out") is None:
        raise HostSync(f"{_name(func)} without device= makes a tensor on the host")
    if func is TO and "cpu" in (*args[1:], given.get("device")):
        raise HostSync("Tensor.to('cpu'): it copies to the host")


class _Operations(TorchDispatchMode):
    """Sees what runs, also where it is written as something else."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and the guard against it takes a third of the time."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if id(func) not in _NEVER and _may_wait(func):
            name = func.overloadpacket.__name__
            why = WAITS.get(name) or _why(name, args, given)
            if why and not getattr(_open, "now", False):
                raise HostSync(f"aten.{name}: {why}")
        return func(*args, **given)


INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
BY_ARGUMENTS = {*INDEXED, "repeat_interleave", "_to_copy", "copy_"}


_NEVER: dict[int, Any] = {}
"""Functions no call of which waits, by their ids: they are called a million times, and their hash is slow."""


def _may_wait(func: Any) -> bool:
    """Whether some call of it waits."""
    name = func.overloadpacket.__name__
    found = name in WAITS or name in BY_ARGUMENTS or "unique" in name
    if not found:
        _NEVER[id(func)] = func
    return found


def _why(name: str, args: Sequence[Any], given: Mapping[str, Any]) -> str:
    """Why this call waits, by its arguments; nothing where it does not."""
    if "unique" in name:
        return "the size of the result is not known beforehand"
    if name == "repeat_interleave" and given.get("output_size") is None:
        return "the size of the result is not known beforehand: give output_size"
    if name in INDEXED:
        return _indexed(name, args)
    if name == "_to_copy" and given.get("device") not in (None, args[0].device):
        return f"it copies from {args[0].device} to {given['device']}"
    if name == "copy_" and args[0].device != args[1].device:
        return f"it copies from {args[1].device} to {args[0].device}"
    return ""


def _indexed(name: str, args: Sequence[Any]) -> str:
    indices = [each for each in args[1] if each is not None]
    if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
        return "how many a mask has must be read: take torch.where or masked_fill_"
    if name != "index" and args[2].dim() == 0:
        return "a number comes from the host: take index_fill_"
    if any(each.device != args[0].device for each in indices):
        return "the indices are on another device"
    return ""


def _name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__qualname__", None) or getattr(func, "__name__", func))


@contextmanager
def unsynchronized() -> Iterator[None]:
    """On a GPU: whatever waits for it inside the block raises, as far as torch notices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype, torch says
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
