"""Which version of the kernels runs: numba on the CPU, Triton on CUDA, plain torch where those are missing.

All give the same bits. Where the fast one is missing, a warning says so once, and `active_path` always.

The environment variable `TACIT_KERNELS` chooses otherwise: "reference" takes plain torch everywhere; "triton"
takes Triton on any device, which on the CPU means its interpreter (`TRITON_INTERPRET=1`), for tests.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
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
    return Pick(fast, f"{fast} {version} on {device}")


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


def fits(*tensors: Tensor) -> bool:
    """Whether numba's kernels take these tensors: on the CPU, of fp32, fp64 or uint8."""
    return _are(tensors, (torch.float32, torch.float64, torch.uint8)) and path() == "numba"


def fits32(*tensors: Tensor) -> bool:
    """`fits`, for the kernels that are compiled for fp32 alone."""
    return _are(tensors, (torch.float32,)) and path() == "numba"


def _are(tensors: Sequence[Tensor], kinds: tuple[torch.dtype, ...]) -> bool:
    # In the hot path, where a generator takes three times as long.
    for tensor in tensors:  # noqa: SIM110
        if tensor.dtype not in kinds or not tensor.is_cpu:
            return False
    return True


def fits_triton(*tensors: Tensor) -> bool:
    """Whether the Triton kernels take these tensors: of fp32, contiguous, on a device that has them."""
    return all(
        x.dtype == torch.float32 and x.is_contiguous() and path(x.device.type) == "triton" for x in tensors
    )
