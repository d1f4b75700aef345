"""A Triton kernel that does not compile: plain torch instead, said once; and what is compiled beforehand."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from tacit.kernels import (
    blockwise,
    dispatch,
    exponents,
    int8,
    levels,
    merge,
    orthogonal,
    positions,
    select,
    signs,
)
from tacit.kernels.entry_buffers import Selection, new_buffer
from tacit.kernels.reference import int8 as int8_reference


class Broken:
    """A kernel that no compiler takes."""

    __name__ = "encode_kernel"

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_it(*args: object, **options: object) -> None:
            raise RuntimeError("at 4:1:\n  no such thing on this device")

        return compile_it


@pytest.fixture
def _triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[cuda]'")
    monkeypatch.setattr(dispatch, "_failed", {})
    monkeypatch.setattr(dispatch, "active_backend", lambda device="cpu": "triton")
    monkeypatch.delenv("TACIT_KERNELS", raising=False)
    dispatch.find_backend.cache_clear()
    yield
    dispatch.find_backend.cache_clear()


@pytest.mark.usefixtures("_triton")
def test_what_does_not_compile_runs_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from tacit.kernels.triton import int8 as int8_triton

    monkeypatch.setattr(int8_triton, "encode_kernel", Broken())
    x, residual = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    new_residual, expected = torch.empty(1000), x + residual
    codes, units = torch.empty(1000, dtype=torch.uint8), torch.empty(2)
    assert "plain torch" not in dispatch.find_backend("cuda").description
    with pytest.warns(RuntimeWarning, match="encode_int8 runs in plain torch.*encode_kernel.*no such thing"):
        int8.encode_int8(x, codes, units, residual, new_residual)
    written = [each.clone() for each in (codes, units)]
    int8_reference.encode_int8(expected, codes, units)
    assert torch.equal(written[0], codes)
    assert torch.equal(written[1], units)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        int8.encode_int8(x, codes, units)
    words = dispatch.find_backend("cuda").description
    assert words.startswith("triton ")
    assert "int8.encode_int8 in plain torch (encode_kernel: RuntimeError: at 4:1: no such thing" in words


def largest(x: torch.Tensor) -> None:
    select.select_largest(x, 3)


def in_chunks(x: torch.Tensor) -> None:
    select.select_in_chunks(x, 3, 100, new_buffer(x, 30))


BEFOREHAND: list[tuple[str, Callable[[torch.Tensor], None]]] = [
    ("select", largest),
    ("select", in_chunks),
    ("signs", lambda x: signs.encode_signs(x, x, x, None)),
    ("signs", lambda x: signs.encode_sign(x, x, x, x)),
    ("levels", lambda x: levels.quantize(x, 4, 512, 0.0, 1, x, x)),
    ("int8", lambda x: int8.encode_int8(x, x, x)),
    ("blockwise", lambda x: blockwise.encode_blocks(x, 3, x, x)),
    ("exponents", lambda x: exponents.encode_exponents(x, 1, x, x)),
    ("positions", lambda x: positions.pack_positions(x, 100, 10, x)),
    ("orthogonal", lambda x: orthogonal.scale_(x, (10,), 2)),
    ("orthogonal", lambda x: orthogonal.orthogonalize_(x, (10,), 2)),
    ("merge", lambda x: void(merge.merge_largest(chosen(x), chosen(x), 3, new_buffer(x, 3)))),
]


def chosen(x: torch.Tensor) -> Selection:
    return Selection(x, x)


def void(result: object) -> None:
    """Nothing."""


@pytest.mark.parametrize("number", range(len(BEFOREHAND)))
def test_what_is_compiled_beforehand_is_for_the_device_that_meta_stands_for(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, call = BEFOREHAND[number]
    asked: list[str] = []
    compiled: list[str] = []

    def active_backend(device: str = "cpu") -> str:
        asked.append(device)
        return "numba" if device == "cpu" else "triton"

    monkeypatch.setattr(dispatch, "active_backend", active_backend)
    monkeypatch.setattr(dispatch, "numba_kernels", compiled.append)
    x = torch.empty(1000, device="meta")
    call(x)
    with dispatch.warm_up_for("cuda"):
        call(x)
    assert compiled == [name]
    call(x)
    assert asked == ["cpu", "cuda", "cpu"]
    assert compiled == [name, name]
