"""The table of kernels, and which version runs: numba on the CPU, Triton on CUDA, else plain torch.

All give the same bits. Where the compiled version is missing, a warning says so once, and `active_path`
always. A row of the table is a function marked by `kernel`; its versions bear its name and take its arguments
in the modules of that name in `numba`, `triton` and `reference`.

The environment variable `TACIT_KERNELS` chooses otherwise: "reference" takes plain torch everywhere; "triton"
takes Triton on any device, which on the CPU means its interpreter (`TRITON_INTERPRET=1`), for tests.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from importlib import import_module
from inspect import signature
from itertools import chain
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from tacit.environment import KERNELS
from tacit.errors import ConfigError, installing

P = ParamSpec("P")
R = TypeVar("R")
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
    """Spans of the flat `x`, of at most `most` entries, that fit into a cache.

    On a GPU it is one span, as launches cost more than a cache saves.
    """
    size = most if on_host(x) else max(x.numel(), 1)
    for start in range(0, x.numel(), size):
        yield slice(start, min(start + size, x.numel()))


_plain = False


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run no compiled kernel in the block: the bits are the same, and compilers take a second to load."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


@contextmanager
def emulated_device() -> Iterator[None]:
    """Treat tensors on the CPU as a GPU's inside the block: for tests of what runs there, without one."""
    global _emulated
    before, _emulated = _emulated, True
    try:
        yield
    finally:
        _emulated = before


# ---- the table ------------------------------------------------------------------------------------------

FP32 = (torch.float32,)
REALS = (torch.float32, torch.float64)
"""On the CPU; what is written for both is compiled for both."""
HALVES = (torch.float32, torch.bfloat16, torch.float16)
"""On a GPU."""


def kernel(
    *entries: str,
    numba: Sequence[torch.dtype] = FP32,
    triton: Sequence[torch.dtype] = HALVES,
    loads_numba: bool = True,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a row of the table out of a function, whose body runs where tensors are on "meta".

    A compiled version takes contiguous entries of one of its types, all of one type and on one device. What
    it does not take goes to `reference`; where that has no such function, the body runs too.

    Args:
        entries: the arguments that decide; of several tensors the last one does. All but the first may be
            None.
        numba: the types of the numba version, none where there is none; `triton`: those of Triton's.
        loads_numba: whether its version runs too where numba has not been loaded, which takes 120 MB and a
            second, too much for what torch can do as well.
    """

    def row(body: Callable[P, R]) -> Callable[P, R]:
        parameters = signature(body)
        module = body.__module__.rpartition(".")[2]
        first, *others = map([*parameters.parameters].index, entries)
        types = {"numba": numba, "triton": triton}
        versions: dict[str, Callable[..., Any]] = {}

        @wraps(body)
        def run(*given: P.args, **named: P.kwargs) -> R:
            arguments: tuple[Any, ...] = given
            if named:
                bound = parameters.bind(*given, **named)
                bound.apply_defaults()
                arguments = bound.args
            x = arguments[first]
            x = x[-1] if isinstance(x, tuple | list) else x
            if x.is_meta:
                if loads_numba or numba_is_loaded():
                    warm_up(module)
                return body(*given, **named)
            backend, dtype = "torch", x.dtype
            if (dtype in numba or dtype in triton) and (loads_numba or "numba" in sys.modules):
                fits = x.is_contiguous()
                for i in others:
                    other = arguments[i] if i < len(arguments) else None
                    if other is not None:
                        y = other[-1] if isinstance(other, tuple) else other
                        fits = fits and y.dtype == dtype and y.device == x.device and y.is_contiguous()
                if fits:
                    backend = "torch" if _plain else active_backend(x.device.type)
                    if dtype not in types.get(backend, ()) or (backend == "numba" and _emulated):
                        backend = "torch"
            if backend not in versions:
                versions[backend] = _version(backend, module, body)
            result: R = versions[backend](*arguments)
            return result

        return run

    return row


def _version(backend: str, module: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """The version of a row, whose body this is."""
    if backend == "numba":
        return getattr(numba_kernels(module), body.__name__)  # type: ignore[no-any-return]
    try:
        plain = getattr(import_module(f"tacit.kernels.reference.{module}"), body.__name__, body)
    except ModuleNotFoundError:
        plain = body
    return partial(run_triton, f"{module}.{body.__name__}", plain) if backend == "triton" else plain


# ---- numba ----------------------------------------------------------------------------------------------


def address(tensor: Tensor | None) -> int:
    """Where it begins; 0 where there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def addresses(tensors: Sequence[Tensor]) -> Any:
    """Where these tensors begin, as int64; keep them alive as long."""
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def columns(payloads: Sequence[Sequence[Tensor]]) -> Any:
    """Where the first tensors of all payloads begin, where the second ones do, and so on."""
    each = chain.from_iterable(zip(*payloads, strict=True))
    return np.fromiter(map(Tensor.data_ptr, each), np.int64).reshape(-1, len(payloads))


def arrays(*tensors: Tensor) -> list[Any]:
    """The tensors as arrays, in the same memory."""
    return [tensor.detach().numpy() for tensor in tensors]


def numba_is_loaded() -> bool:
    """Whether something has loaded numba: that is 120 MB and a second, too much for what torch can do too."""
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


def warmed_up_for() -> str:
    """The type of device that tensors on "meta" stand for now."""
    return _meta_device


@contextmanager
def warm_up_for(device: str) -> Iterator[None]:
    """Tensors on "meta" stand for those of this type of device inside the block; of "meta" for none."""
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


def run_triton(name: str, otherwise: Callable[..., Any], *given: object) -> Any:
    """Call `MODULE.FUNCTION` of `kernels.triton`; `otherwise` if it does not compile, then and ever after.

    That is said once by a warning, and always by `active_path`.
    """
    if name not in _failed:
        module, _, function = name.partition(".")
        try:
            return getattr(import_module(f"tacit.kernels.triton.{module}"), function)(*given)
        except LaunchError as error:
            _failed[name] = str(error)
            find_backend.cache_clear()
            warnings.warn(
                f"{name} runs in plain torch from now on, more slowly, as Triton did not start {error}",
                RuntimeWarning,
                stacklevel=3,
            )
    return otherwise(*given)


def run_opaque(name: str, by_host: Callable[..., Tensor], *given: Any) -> Tensor:
    """Call a function of `kernels.triton` that has no twin in torch; without Triton, `by_host` waits."""
    if active_backend(given[0].device.type) == "triton":
        found: Tensor = run_triton(name, by_host, *given)
        return found
    return by_host(*given)
