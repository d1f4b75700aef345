"""The Triton kernels: right in the interpreter, compiled for CUDA, and right on a GPU where there is one."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tacit.environment import KERNELS
from tacit.kernels.entry_buffers import EntryBuffer, Selection
from tacit.kernels.levels import BY_NORM
from tacit.kernels.payload_layout import position_bytes

pytest.importorskip(
    "triton",
    minversion="3.7",  # the interpreters before convert arrays in a way that NumPy forbids now
    reason="triton 3.7 or newer is not installed: pip install -e '.[cuda]'",
)

CHECKS = Path(__file__).with_name("triton_checks.py")
FAMILIES = [
    *("signs or payloads or means", "levels", "int8 or exponents or fp8 or rounding", "blocks or entropy"),
    *(
        "pass or chosen or chunk or buffer",
        "positions or scattering or outside or orthogonal or products or predictions",
    ),
]


WAITS = "host_sync"
"""What the checks are of that nothing waits for a device: here only some of them, and of one size."""
NONE_WAITS = (
    "(select or signs or exponents) and 5000 and dtype0 or positions or scattering or outside or orthogonal"
)


def checked(chosen: str, result: Path, *files: Path, **variables: str) -> dict[str, str]:
    """Run checks in a process of their own, as Triton reads its variables when it is imported.

    Returns:
        What went wrong in each check, by file and name; "" where nothing did.
    """
    env = {name: value for name, value in os.environ.items() if name not in (KERNELS, "TRITON_INTERPRET")}
    words = ["-q", "-p", "no:cacheprovider", f"--junitxml={result}", "-k", chosen, *map(str, files)]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        env=env | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
    )
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    found = {}
    for case in ElementTree.parse(result).iter("testcase"):
        wrong = [each.text or "it failed" for each in case if each.tag in ("failure", "error")]
        found[f"{case.get('classname')} {case.get('name')}"] = "\n".join(wrong)
    assert ended.returncode == any(found.values()), ended.stdout + ended.stderr
    return found


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All checks in Triton's interpreter, in one process."""
    files = (CHECKS, CHECKS.with_name("test_host_sync.py"))
    result = tmp_path_factory.mktemp("interpreter") / "result.xml"
    chosen = f"{CHECKS.stem} or {WAITS} and ({NONE_WAITS})"
    return checked(chosen, result, *files, TRITON_INTERPRET="1", TACIT_KERNELS="triton")


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All checks on the device, in one process."""
    return checked(CHECKS.stem, tmp_path_factory.mktemp("gpu") / "result.xml", CHECKS)


def of_family(family: str, found: dict[str, str]) -> dict[str, str]:
    """Those of the checks whose function has one of the words in its name."""
    words = family.split(" or ")
    names = {each: each.rpartition(" ")[2].partition("[")[0] for each in found if WAITS not in each}
    return {each: found[each] for each, name in names.items() if any(word in name for word in words)}


def assert_right(found: dict[str, str]) -> None:
    """Hold that there are checks, and that nothing went wrong in them."""
    assert found
    wrong = {name: error for name, error in found.items() if error}
    assert not wrong, "\n\n".join(f"{name}:\n{error}" for name, error in wrong.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_in_the_interpreter(family: str, interpreted: dict[str, str]) -> None:
    assert_right(of_family(family, interpreted))


def test_nothing_waits_for_them(interpreted: dict[str, str]) -> None:
    assert_right({name: error for name, error in interpreted.items() if WAITS in name})


def test_each_check_is_of_a_family(interpreted: dict[str, str]) -> None:
    seen = {name for family in FAMILIES for name in of_family(family, interpreted)}
    assert {name for name in interpreted if WAITS not in name} == seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family: str, on_gpu: dict[str, str]) -> None:
    assert_right(of_family(family, on_gpu))


KINDS = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.float16: "*fp16", torch.bfloat16: "*i16",
    torch.uint8: "*u8", torch.uint16: "*u16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def kind(argument: object) -> str:
    if isinstance(argument, torch.Tensor):
        return KINDS[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


def compiled(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], capability: int = 90) -> list[str]:
    """The PTX of the kernels that a call would start, compiled for this compute capability: 90 is 9.0."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from tacit.kernels.triton import (
        byte_planes,
        entropy,
        launch,
        mp2_network,
        orthogonal,
        positions,
        products,
        select,
        signs,
    )  # fmt: skip

    written: list[str] = []

    def launched(kernel: Any, programs: int, on: torch.Tensor, *args: object, **constants: object) -> None:
        if programs:
            names = kernel.arg_names
            signature = {name: kind(each) for name, each in zip(names, args, strict=False)}
            varies = {each.name for each in kernel.params if each.do_not_specialize}
            constants |= {  # a number that is 1 is compiled in
                name: 1
                for name, each in zip(names, args, strict=False)
                if type(each) is int and each == 1 and name not in varies
            }
            options = {"enable_fp_fusion": False}
            options |= {name: constants.pop(name) for name in [*constants] if name not in names}
            fixed = {(names.index(name),): each for name, each in constants.items()}
            source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), fixed)
            made = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            assert made.asm["cubin"]
            written.append(made.asm["ptx"])

    for module in (byte_planes, entropy, launch, mp2_network, orthogonal, positions, products, select, signs):
        monkeypatch.setattr(module, "launch", launched)
    call()
    return written


def calls(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Each kernel that takes entries of this type, in the ways that differ most."""
    from tacit.kernels.triton import (
        blockwise,
        exponents,
        fp8,
        int8,
        levels,
        mp2_network,
        positions,
        select,
        signs,
    )  # fmt: skip

    x, means = torch.ones(1024, dtype=dtype), torch.ones(8)
    many, few = torch.ones(2, 512), torch.ones(2, 1)
    units = torch.ones(8, dtype=torch.bfloat16)
    codes, index = torch.zeros(1024, dtype=torch.uint8), torch.zeros(1024, dtype=torch.int32)
    room = EntryBuffer(index, x)
    return {
        "signs": lambda: signs.encode_signs(x, codes, means, means, False, x, x),
        "signs and zeros": lambda: signs.encode_signs(x, codes, means, None, True, x, x),
        "sign": lambda: signs.encode_sign(x, codes, means, means, x, x),
        "add signs": lambda: signs.add_signs_([(codes, means, means)], 0.5, x, fresh=False),
        "sign of one": lambda: signs.encode_sign(x[:1], codes, means[:1], means, x[:1], x[:1]),
        "all of one": lambda: [
            signs.encode_signs(x[:513], codes, means, means, False, x, x),
            signs.add_signs_([(codes, means, means)], 0.5, x[:513], fresh=False),
            int8.encode_int8(x[:513], codes, means, x, x),
            int8.add_int8_([(codes, means)], 0.5, x[:513], fresh=False),
            blockwise.encode_blocks(x[:513], 3, codes, units, x, x),
            blockwise.add_blocks_([(codes, units)], 3, 0.5, x[:513], fresh=False),
            exponents.encode_exponents(x[:513], 7, codes, codes),
            exponents.add_exponents_([(codes, codes)], 0.5, x[:513], fresh=False),
            levels.quantize(x[:513], 4, 512, 2.5, 7, codes, means),
            levels.add_levels_([(codes, means)], 4, 512, 0.5, x[:513], fresh=False),
            select.select_largest(x[:1], 1, room, x, x),
            select.select_in_chunks(x[:1], 1, 1, room, x, x),
        ],
        "QSGD": lambda: levels.quantize(x, 4, 512, BY_NORM, 7, codes, means),
        "5 bits": lambda: levels.quantize(x, 5, 512, 2.5, 7, codes, means),
        "add levels": lambda: levels.add_levels_([(codes, means)], 3, 512, 0.5, x, fresh=False),
        "int8": lambda: int8.encode_int8(x, codes, means, x, x),
        "add int8": lambda: int8.add_int8_([(codes, means)], 0.5, x, fresh=False),
        "blocks of 3 bits": lambda: blockwise.encode_blocks(x, 3, codes, units, x, x),
        "blocks of 2 bits": lambda: blockwise.encode_blocks(x, 2, codes, units),
        "add blocks of 3 bits": lambda: blockwise.add_blocks_([(codes, units)], 3, 0.5, x, fresh=False),
        "add blocks of 2 bits": lambda: blockwise.add_blocks_([(codes, units)], 2, 0.5, x, fresh=False),
        "add fp8": lambda: fp8.add_fp8_([(codes, means[:1])], torch.float8_e4m3fn, 0.5, x, fresh=False),
        "add fp8 of 2 bits": lambda: fp8.add_fp8_(
            [(codes, means[:1])], torch.float8_e5m2, 0.5, x, fresh=False
        ),
        "scatter": lambda: positions.scatter(index, x, x, 0.5),
        "scatter of all": lambda: [
            positions.scatter_all_([Selection(index, x)] * 2, x, 0.5, fresh) for fresh in (False, True)
        ],
        "MP2": lambda: mp2_network.predict_changes(x, many, many, many, 8, 5.0, x[:512]),
        "MP2 in a row": lambda: mp2_network.predict_changes(x, few, few, many, 4, 5.0, x[:512]),
        "exponents": lambda: exponents.encode_exponents(x, 7, codes, codes),
        "add exponents": lambda: exponents.add_exponents_([(codes, codes)], 0.5, x, fresh=False),
        "select": lambda: select.select_largest(x, 10, room, x, x),
        "select without memory": lambda: select.select_largest(x, 10, room),
        "select in chunks": lambda: select.select_in_chunks(x, 3, 1000, room, x, x),
    }


def calls_of_fp32() -> dict[str, Callable[[], object]]:
    """Those that take fp32 only, or no entries."""
    from tacit.kernels.triton import (
        byte_planes,
        entropy,
        narrow,
        orthogonal,
        positions,
        products,
        select,
        signs,
    )

    matrices = ((0, 16, 32), (512, 32, 16))
    x, many, units = torch.ones(1024), torch.ones(512 * 1025), torch.ones(1024, dtype=torch.bfloat16)
    codes, index = torch.zeros(70_000, dtype=torch.uint8), torch.zeros(1024, dtype=torch.int32)
    room, few = EntryBuffer(index, x), (3_000_000, 300)
    size = position_bytes(*few)  # in low parts of two bytes
    coded, length = codes.clone(), torch.zeros((), dtype=torch.int32)
    rows, lengths = coded.view(2, -1), length.repeat(2)
    return {
        "times Q": lambda: products.times_q_(x, x, x, matrices, 4),
        "times Q of rank 1": lambda: products.times_q_(x, x, x, matrices, 1),
        "times P": lambda: products.times_p_(x, x, x, matrices, 4),
        "P Q'": lambda: products.expand_(x, x, x, matrices, 4, subtract=False),
        "less P Q'": lambda: products.expand_(x, x, x, matrices, 4, subtract=True),
        "sign of many": lambda: signs.encode_sign(many, codes, torch.ones(1025), x),
        "round at random": lambda: narrow.round_at_random(x, 7, units),
        "select reaching": lambda: select.select_reaching(x, 0.5, room, x, x),
        "bitmap": lambda: positions.pack_positions(index, 1024, 1024, codes[:128]),
        "pack": lambda: positions.pack_positions(index[:300], *few, codes[:size]),
        "unpack": lambda: positions.unpack_all([codes[:size]], *few),
        "unpack a bitmap": lambda: positions.unpack_all([*codes[:512].view(4, -1)], 1024, 1024),
        "clear": lambda: positions.clear_(index, x),
        "clear bf16": lambda: positions.clear_(index, x.bfloat16()),
        "places of one": lambda: [
            positions.pack_positions(index[:1], 1, 1, codes[:1]),
            positions.unpack_all([codes[:1]], 1, 1),
            positions.scatter(index[:1], x[:1], x[:1], 0.5),
            positions.clear_(index[:1], x[:1]),
            orthogonal.scale_(x[:1], (1,), 1),
            orthogonal.orthogonalize_(x[:1], (1,), 1),
            select.select_reaching(x[:1], 0.5, room, x, x),
        ],
        "entropy": lambda: [entropy.encode_codes(codes[:30_900], 2, 153_600, coded)],
        "entropy of 3 bits": lambda: [entropy.encode_codes(codes[:192], 3, 512, coded)],
        "entropy back": lambda: [entropy.decode_codes(rows, lengths, 2, 153_600, codes[:61_800].view(2, -1))],
        "entropy back of 3 bits": lambda: [
            entropy.decode_codes(rows, lengths, 3, 512, codes[:384].view(2, -1))
        ],
        "entropy of one": lambda: [
            entropy.encode_codes(codes[:2], 4, 3, coded),
            entropy.decode_codes(rows[:1], lengths[:1], 4, 3, codes[:2].view(1, 2)),
        ],
        "byte planes": lambda: [byte_planes.encode(codes.view(2, -1), coded, length)],
        "byte planes back": lambda: [byte_planes.decode(rows, lengths, lengths, codes.view(2, 2, -1))],
        "byte planes of one": lambda: [
            byte_planes.encode(codes[:1].view(1, 1), coded, length),
            byte_planes.decode(rows[:1], lengths[:1], lengths[:1], codes[:1].view(1, 1, 1)),
        ],
        "scale": lambda: orthogonal.scale_(x, (100, 156), 4),
        "orthogonalize": lambda: orthogonal.orthogonalize_(x, (100, 156), 4),
    }


INEXACT = re.compile(
    r"\b(?:(?:fma|mad)\.\w+\.f(?:32|64)|(?:add|sub|mul)\.ftz|(?:div|sqrt|rcp)\.(?:full|approx))"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_compile_and_nothing_is_fused_or_approximate(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton interprets here, and does not compile")
    for name, call in (calls(dtype) | (calls_of_fp32() if dtype == torch.float32 else {})).items():
        written = compiled(monkeypatch, call)
        assert written, name
        for ptx in written:
            assert INEXACT.findall(ptx) == [], name


@pytest.mark.parametrize("name", ["select", "select in chunks", "scatter of all", "add blocks of 3 bits"])
def test_they_compile_for_older_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton interprets here, and does not compile")
    for ptx in compiled(monkeypatch, calls(torch.float32)[name], 80):
        assert "sm_80" in ptx
        assert INEXACT.findall(ptx) == []


NARROW = re.compile(r"\b(?:add|sub)\.[su]16\b|\bcvt\.rn\.f32\.[su](?:8|16)\b")


@pytest.mark.parametrize("bits", [3, 4, 7, 8])
def test_levels_of_blocks_are_not_told_apart_by_numbers_of_16_bits(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one lane in the last block ptxas 13.0 left out every other subtraction of that kind."""
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton interprets here, and does not compile")
    from tacit.kernels.triton import blockwise

    units, codes = torch.ones(8, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.uint8)
    for numel in (1, 7, 519):
        payloads, out = [(codes, units)], torch.ones(numel)
        add = partial(blockwise.add_blocks_, payloads, bits, 0.5, out, fresh=False)
        for ptx in compiled(monkeypatch, add):
            assert NARROW.findall(ptx) == []


def test_they_are_started_without_fused_multiply_add() -> None:
    from tacit.kernels.triton.launch import launch

    started: list[dict[str, object]] = []
    kernel = {(3,): lambda *args, **options: started.append(options)}
    launch(kernel, 3, torch.ones(1), SIZE=4)
    launch({}, 0, torch.ones(1))
    assert started == [{"SIZE": 4, "enable_fp_fusion": False}]
