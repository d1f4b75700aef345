"""The Triton kernels: right in the interpreter, compiled for CUDA, and right on a GPU where there is one."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tacit.kernels.levels import BY_NORM
from tacit.kernels.pick import VARIABLE

pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[cuda]'")

CHECKS = Path(__file__).with_name("triton_checks.py")
FAMILIES = ["signs or payloads", "levels", "int8 or exponents", "pass or chosen or scattering or outside"]


def checked(family: str, **variables: str) -> None:
    """Run the checks of a family in a process of its own: Triton reads its variables when it is imported."""
    env = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "TRITON_INTERPRET")}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", family, str(CHECKS)],
        env=env | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_the_interpreter(family: str) -> None:
    checked(family, TRITON_INTERPRET="1", TACIT_KERNELS="triton")


@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family: str) -> None:
    checked(family)


def compiled(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[str]:
    """The PTX of the kernels that a call would start, compiled for compute capability 9.0."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from tacit.kernels.cuda import entries, launch

    kinds = {torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64"}
    written: list[str] = []

    def kind(argument: object) -> str:
        if isinstance(argument, torch.Tensor):
            return kinds[argument.dtype]
        return "fp32" if isinstance(argument, float) else "i32"

    def start(kernel: Any, programs: int, on: torch.Tensor, *args: object, **constants: object) -> None:
        if programs:
            names = kernel.arg_names
            signature = {name: kind(each) for name, each in zip(names, args, strict=False)}
            fixed = {(names.index(name),): each for name, each in constants.items()}
            source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), fixed)
            made = compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
            assert made.asm["cubin"]
            written.append(made.asm["ptx"])

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(entries, "start", start)
    call()
    return written


def calls() -> dict[str, Callable[[], object]]:
    """Each kernel, in the ways that differ most."""
    from tacit.kernels.cuda import entries, exponents, int8, levels, signs

    x, means = torch.ones(1024), torch.ones(8)
    codes, index = torch.zeros(1024, dtype=torch.uint8), torch.zeros(1024, dtype=torch.int32)
    return {
        "signs": lambda: signs.encode(x, x, x, codes, means, means, keep=True),
        "add signs": lambda: signs.add([(codes, means, means)], 0.5, x, fresh=False),
        "QSGD": lambda: levels.quantize(x, 4, 512, BY_NORM, 7, codes, means),
        "5 bits": lambda: levels.quantize(x, 5, 512, 2.5, 7, codes, means),
        "add levels": lambda: levels.add([(codes, means)], 3, 512, 0.5, x, fresh=False),
        "int8": lambda: int8.encode(x, x, x, codes, means),
        "add int8": lambda: int8.add([(codes, means)], 0.5, x, fresh=False),
        "exponents": lambda: exponents.encode(x, 7, codes, codes),
        "add exponents": lambda: exponents.add([(codes, codes)], 0.5, x, fresh=False),
        "select": lambda: entries.sift(x, 0.5, index, x, x, x),
        "scatter": lambda: entries.scatter(index, x, 0.5, x),
    }


INEXACT = re.compile(r"\b(?:(?:fma|mad)\.\w+\.f32|(?:add|sub|mul)\.ftz|(?:div|sqrt|rcp)\.(?:full|approx))")


@pytest.mark.timeout(300)
def test_all_compile_and_nothing_is_fused_or_approximate(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton interprets here, and does not compile")
    for name, call in calls().items():
        written = compiled(monkeypatch, call)
        assert written, name
        for ptx in written:
            assert INEXACT.findall(ptx) == [], name


def test_they_are_started_without_fused_multiply_add() -> None:
    from tacit.kernels.cuda.launch import start

    started: list[dict[str, object]] = []
    kernel = {(3,): lambda *args, **options: started.append(options)}
    start(kernel, 3, torch.ones(1), SIZE=4)
    start({}, 0, torch.ones(1))
    assert started == [{"SIZE": 4, "enable_fp_fusion": False}]
