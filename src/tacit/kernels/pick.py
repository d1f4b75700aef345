"""Which version of the kernels runs: numba on the CPU, Triton on CUDA, plain torch where those are missing.

All give the same bits. Where the fast one is missing, a warning says so once, and `active_path` always.

The environment variable `TACIT_KERNELS` chooses otherwise: "reference" takes plain torch everywhere; "triton"
takes Triton on any device, which on the CPU means its interpreter (`TRITON_INTERPRET=1`), for tests.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.errors import ConfigError, installing

VARIABLE = "TACIT_KERNELS"
FAST = {"cpu": "numba", "cuda": "triton"}
EXTRAS = {"numba": "kernels", "triton": "cuda"}


class Pick(NamedTuple):
    """A version ("numba", "triton" or "torch"), and the words for `active_path`.

    Where the fast one is missing: why, and the extra of the package that brings it.
    """

    version: str
    words: str
    missing: str = ""
    extra: str = ""


@cache
def pick(device: str) -> Pick:
    """What there is for the tensors of this type of device.

    Raises:
        ConfigError: `TACIT_KERNELS` is none of its words.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", "reference", "triton"):
        raise ConfigError(
            f"environment variable {VARIABLE}={chosen!r} is neither 'reference' (plain torch) nor 'triton': "
            "unset it, and the fastest that is installed is taken"
        )
    if chosen == "reference":
        return Pick("torch", f"plain torch on {device} ({VARIABLE}=reference)")
    fast = chosen or FAST.get(device)
    if fast is None:
        return Pick("torch", f"plain torch on {device} (no others were written for it)")
    try:
        version = import_module(fast).__version__
    except Exception as error:  # what is installed and broken fails in many ways
        missing = f"{fast} cannot be imported: {error}"
        return Pick("torch", f"plain torch on {device} ({missing})", missing, EXTRAS[fast])
    without = "".join(f"; {name} in plain torch ({why})" for name, why in _failed.items())
    return Pick(fast, f"{fast} {version} on {device}{without if fast == 'triton' else ''}")


def path(device: str = "cpu") -> str:
    """Which version is at work on this type of device; warns, once, where that is not the fast one."""
    found = pick(device)
    if found.missing:
        _warn(device, found)
    return found.version


@cache
def _warn(device: str, found: Pick) -> None:
    warnings.warn(
        f"compressors on {device} run in plain torch, up to 60 times as slow, as {found.missing}. Run "
        f"{installing(found.extra)}, or set {VARIABLE}=reference if that is what you want",
        RuntimeWarning,
        stacklevel=3,
    )


_emulated = False


def on_host(x: Tensor) -> bool:
    """Whether the host may look at values of `x` at once; elsewhere it would wait for what was launched."""
    return x.is_cpu and not _emulated


@contextmanager
def emulated_device() -> Iterator[None]:
    """Treat tensors on the CPU as a GPU's inside the block: for tests of what runs there, without one."""
    global _emulated
    before, _emulated = _emulated, True
    try:
        yield
    finally:
        _emulated = before


def fits(*tensors: Tensor) -> bool:
    """Whether numba's kernels take these tensors: on the CPU, of fp32, fp64 or uint8."""
    return _are(tensors, (torch.float32, torch.float64, torch.uint8)) and path() == "numba"


def fits32(*tensors: Tensor) -> bool:
    """`fits`, for the kernels that are compiled for fp32 alone."""
    return _are(tensors, (torch.float32,)) and path() == "numba"


def _are(tensors: Sequence[Tensor], kinds: tuple[torch.dtype, ...]) -> bool:
    # In the hot path, where a generator takes three times as long.
    for tensor in tensors:  # noqa: SIM110
        if tensor.dtype not in kinds or not on_host(tensor):
            return False
    return True


_warming = "cpu"


def warming() -> str:
    """The type of device that tensors on "meta" stand for: what is compiled for it is compiled with them."""
    return _warming


@contextmanager
def warm_up_for(device: str) -> Iterator[None]:
    """Tensors on "meta" stand for those of this type of device inside the block."""
    global _warming
    before, _warming = _warming, device
    try:
        yield
    finally:
        _warming = before


# ---- Triton -------------------------------------------------------------------------------------------


class NotStarted(Exception):
    """A Triton kernel did not compile for the device at hand, or could not be launched."""


_failed: dict[str, str] = {}
TRITON_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def fits_triton(*tensors: Tensor) -> bool:
    """Whether the Triton kernels take these tensors: contiguous, all of one type, on a device that has them.

    The types are fp32, bf16 and fp16.
    """
    kind = tensors[0].dtype
    return kind in TRITON_TYPES and all(x.dtype == kind and on_triton(x) for x in tensors)


def on_triton(x: Tensor) -> bool:
    """Whether Triton's kernels run on its device; of a tensor that is contiguous, whatever its type."""
    return x.is_contiguous() and path(x.device.type) == "triton"


def fits_triton32(*tensors: Tensor) -> bool:
    """`fits_triton`, for the kernels that are written for fp32 alone."""
    return tensors[0].dtype == torch.float32 and fits_triton(*tensors)


def by_triton(name: str, *arguments: object) -> bool:
    """Call `MODULE.FUNCTION` of `kernels.cuda`; False where its kernels do not compile: then, and ever after.

    That is said once, and by `active_path`.
    """
    if name in _failed:
        return False
    module, _, function = name.partition(".")
    try:
        getattr(import_module(f"tacit.kernels.cuda.{module}"), function)(*arguments)
    except NotStarted as error:
        _failed[name] = str(error)
        pick.cache_clear()
        warnings.warn(
            f"{name} runs in plain torch from now on, more slowly, as Triton did not start {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True
