"""A Triton kernel that does not compile: plain torch instead, said once; and what is compiled beforehand."""

import warnings
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from tacit.kernels import exponents, int8, levels, merge, orthogonal, pick, positions, select, signs


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
    monkeypatch.setattr(pick, "_failed", {})
    monkeypatch.setattr(pick, "path", lambda device="cpu": "triton")
    monkeypatch.delenv(pick.VARIABLE, raising=False)
    pick.pick.cache_clear()
    yield
    pick.pick.cache_clear()


@pytest.mark.usefixtures("_triton")
def test_what_does_not_compile_runs_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from tacit.kernels.cuda import int8 as cuda

    monkeypatch.setattr(cuda, "encode_kernel", Broken())
    x, residual = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    new_residual, expected = torch.empty(1000), x + residual
    codes, units = torch.empty(1000, dtype=torch.uint8), torch.empty(2)
    assert "plain torch" not in pick.pick("cuda").words
    with pytest.warns(RuntimeWarning, match="int8.encode runs in plain torch.*encode_kernel.*no such thing"):
        int8.encode_int8_owed(x, residual, new_residual, codes, units)
    written = [each.clone() for each in (codes, units)]
    int8.encode_int8_torch(expected, codes, units)
    assert torch.equal(written[0], codes)
    assert torch.equal(written[1], units)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        int8.encode_int8(x, codes, units)
    words = pick.pick("cuda").words
    assert words.startswith("triton ")
    assert "int8.encode in plain torch (encode_kernel: RuntimeError: at 4:1: no such thing" in words


def largest(x: torch.Tensor) -> None:
    select.select_largest(x, 3)


def in_chunks(x: torch.Tensor) -> None:
    select.select_in_chunks(x, 3, 100, select.new_room(x, 30))


BEFOREHAND: list[tuple[ModuleType, Callable[[torch.Tensor], None]]] = [
    (select, largest),
    (select, in_chunks),
    (signs, lambda x: signs.encode_signs(x, x, x, None)),
    (signs, lambda x: signs.encode_sign(x, x, x, x)),
    (levels, lambda x: levels.quantize(x, 4, 512, 0.0, 1, x, x)),
    (int8, lambda x: int8.encode_int8(x, x, x)),
    (exponents, lambda x: exponents.encode_exponents(x, 1, x, x)),
    (positions, lambda x: positions.pack_positions(x, 100, 10, x)),
    (orthogonal, lambda x: orthogonal.scale_(x, (10,), 2)),
    (orthogonal, lambda x: orthogonal.orthogonalize_(x, (10,), 2)),
    (merge, lambda x: void(merge.merge_largest(chosen(x), chosen(x), 3, select.new_room(x, 3)))),
]


def chosen(x: torch.Tensor) -> select.Chosen:
    return select.Chosen(x, x)


def void(result: object) -> None:
    """Nothing."""


@pytest.mark.parametrize("number", range(len(BEFOREHAND)))
def test_what_is_compiled_beforehand_is_for_the_device_that_meta_stands_for(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, call = BEFOREHAND[number]
    asked: list[str] = []
    monkeypatch.setattr(module, "path", lambda device="cpu": asked.append(device) or "torch")
    x = torch.empty(1000, device="meta")
    call(x)
    with pick.warm_up_for("cuda"):
        call(x)
    call(x)
    assert asked == ["cpu", "cuda", "cpu"]
