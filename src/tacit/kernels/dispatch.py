"""Which version of the kernels runs: numba on the CPU, Triton on CUDA, plain torch where those are missing.

All give the same bits. Where the compiled version is missing, a warning says so once, and `active_path`
always.

The environment variable `TACIT_KERNELS` chooses otherwise: "reference" takes plain torch everywhere; "triton"
takes Triton on any device, which on the CPU means its interpreter (`TRITON_INTERPRET=1`), for tests.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tacit.environment import KERNELS
from tacit.errors import ConfigError, installing

COMPILED = {"cpu": "numba", "cuda": "triton"}
EXTRAS = {"numba": "kernels", "triton": "cuda"}


class Backend(NamedTuple):
    """A version of the kernels ("numba", "triton" or "torch"), and its description for `active_path`.

    Where the compiled one is missing: why, and the extra of the package that brings it.
    """

    name: str
    description: str
    missing: str = ""
    extra: str = ""


@cache
def find_backend(device: str) -> Backend:
    """The version for tensors on this type of device.

    Raises:
        ConfigError: `TACIT_KERNELS` is none of its words.
    """
    chosen = os.environ.get(KERNELS, "")
    if chosen not in ("", "reference", "triton"):
        raise ConfigError(
            f"environment variable {KERNELS}={chosen!r} is neither 'reference' (plain torch) nor 'triton': "
            "unset it, and the fastest that is installed is taken"
        )
    if chosen == "reference":
        return Backend("torch", f"plain torch on {device} ({KERNELS}=reference)")
    compiled = chosen or COMPILED.get(device)
    if compiled is None:
        return Backend("torch", f"plain torch on {device} (no others were written for it)")
    try:
        version = import_module(compiled).__version__
    except Exception as error:  # what is installed and broken fails in many ways
        missing = f"{compiled} cannot be imported: {error}"
        return Backend("torch", f"plain torch on {device} ({missing})", missing, EXTRAS[compiled])
    failed = "".join(f"; {name} in plain torch ({why})" for name, why in _failed.items())
    return Backend(compiled, f"{compiled} {version} on {device}{failed if compiled == 'triton' else ''}")


@cache
def active_backend(device: str = "cpu") -> str:
    """The name of the version for this type of device; warns, once, where the compiled one is missing."""
    found = find_backend(device)
    if found.missing:
        _warn(device, found)
    return found.name


@cache
def _warn(device: str, found: Backend) -> None:
    warnings.warn(
        f"compressors on {device} run in plain torch, up to 60 times as slow, as {found.missing}. Run "
        f"{installing(found.extra)}, or set {KERNELS}=reference if that is what you want",
        RuntimeWarning,
        stacklevel=3,
    )


_emulated = False


def on_host(x: Tensor) -> bool:
    """Whether the host may look at values of `x` at once; elsewhere it would wait for what was launched."""
    return x.is_cpu and not _emulated


def pieces(x: Tensor, most: int) -> Iterator[slice]:
    """Stretches of the flat `x`, of at most so many entries, that a cache holds.

    Elsewhere than on the host it is one, as launches cost more than a cache saves.
    """
    size = most if on_host(x) else max(x.numel(), 1)
    for start in range(0, x.numel(), size):
        yield slice(start, min(start + size, x.numel()))


@contextmanager
def emulated_device() -> Iterator[None]:
    """Treat tensors on the CPU as a GPU's inside the block: for tests of what runs there, without one."""
    global _emulated
    before, _emulated = _emulated, True
    try:
        yield
    finally:
        _emulated = before


# ---- numba ----------------------------------------------------------------------------------------------


def numba_takes(*tensors: Tensor) -> bool:
    """Whether numba's kernels take these tensors: contiguous, on the CPU, of fp32, fp64 or uint8."""
    for tensor in tensors:  # in the hot path, as below, where a generator takes three times as long
        if tensor.dtype not in _NUMBA_TYPES or not tensor.is_cpu or not tensor.is_contiguous():
            return False
    return not _emulated and active_backend() == "numba"


def numba_takes_fp32(*tensors: Tensor) -> bool:
    """`numba_takes`, for the kernels that are compiled for fp32 alone."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
            return False
    return not _emulated and active_backend() == "numba"


_NUMBA_TYPES = (torch.float32, torch.float64, torch.uint8)


def addresses(tensors: Sequence[Tensor]) -> Any:
    """Where these tensors begin, as int64; keep them alive as long."""
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def numba_is_loaded() -> bool:
    """Whether something has loaded numba: that is 130 MB and a second, too much for what torch can do too."""
    return "numba" in sys.modules


@cache
def numba_kernels(name: str) -> Any:
    """The module `kernels.numba.NAME`; its kernels are compiled when it is first asked for."""
    return import_module(f"tacit.kernels.numba.{name}")


_meta_device = "cpu"


def warm_up(name: str) -> None:
    """Compile the kernels of `name` now, if they are compiled beforehand for what "meta" stands for.

    Called for tensors on "meta", so that the first round need not compile.
    """
    if active_backend(_meta_device) == "numba":
        numba_kernels(name)


@contextmanager
def warm_up_for(device: str) -> Iterator[None]:
    """Tensors on "meta" stand for those of this type of device inside the block."""
    global _meta_device
    before, _meta_device = _meta_device, device
    try:
        yield
    finally:
        _meta_device = before


# ---- Triton ---------------------------------------------------------------------------------------------


class LaunchError(Exception):
    """A Triton kernel did not compile for the device at hand, or could not be launched."""


_failed: dict[str, str] = {}
TRITON_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def triton_takes(*tensors: Tensor) -> bool:
    """Whether the Triton kernels take these tensors: contiguous, all of one type, on a device that has them.

    The types are fp32, bf16 and fp16.
    """
    dtype = tensors[0].dtype
    return dtype in TRITON_TYPES and all(x.dtype == dtype and on_triton(x) for x in tensors)


def on_triton(x: Tensor) -> bool:
    """Whether Triton's kernels run on its device; of a tensor that is contiguous, whatever its type."""
    return x.is_contiguous() and active_backend(x.device.type) == "triton"


def triton_takes_fp32(*tensors: Tensor) -> bool:
    """`triton_takes`, for the kernels that are written for fp32 alone."""
    return tensors[0].dtype == torch.float32 and triton_takes(*tensors)


def run_triton(name: str, *arguments: object) -> bool:
    """Call `MODULE.FUNCTION` of `kernels.triton`; False if it does not compile, then and ever after.

    That is said once by a warning, and always by `active_path`.
    """
    if name in _failed:
        return False
    module, _, function = name.partition(".")
    try:
        getattr(import_module(f"tacit.kernels.triton.{module}"), function)(*arguments)
    except LaunchError as error:
        _failed[name] = str(error)
        find_backend.cache_clear()
        warnings.warn(
            f"{name} runs in plain torch from now on, more slowly, as Triton did not start {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True
