"""Which kernels run, and that it is said; each in a process of its own, as it is decided once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tacit.environment import KERNELS
from tacit.errors import ConfigError
from tacit.kernels.dispatch import find_backend

SCRIPT = Path(__file__).with_name("encode_all.py")


def encode_all(*arguments: str, **variables: str) -> dict[str, Any]:
    """What a process says that runs the kernels."""
    env = {name: value for name, value in os.environ.items() if name != KERNELS}
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | variables
    ended = subprocess.run(
        [sys.executable, SCRIPT, *arguments], env=env, capture_output=True, text=True, timeout=250
    )
    assert ended.returncode == 0, ended.stderr
    said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])  # after what Gloo of torch 2.9 prints
    return said


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    pytest.importorskip("numba")
    return encode_all()


def test_on_the_cpu_numba_runs_and_nothing_of_triton_is_loaded(usual: dict[str, Any]) -> None:
    import numba

    assert usual["path"].endswith(f"kernels: numba {numba.__version__} on cpu")
    assert usual["warned"] == []
    assert not usual["triton"]


def test_without_numba_the_bits_are_the_same_and_it_is_said_once(usual: dict[str, Any]) -> None:
    said = encode_all("--without-numba")
    assert said["bits"] == usual["bits"]
    assert "kernels: plain torch on cpu (numba cannot be imported: No module named 'numba')" in said["path"]
    (warning,) = said["warned"]
    assert "numba cannot be imported" in warning
    assert "pip install 'torch-tacit[kernels]'" in warning


def test_the_reference_can_be_asked_for(usual: dict[str, Any]) -> None:
    said = encode_all("--without-session", TACIT_KERNELS="reference")
    assert said["bits"] == usual["bits"]
    assert said["path"].endswith("kernels: plain torch on cpu (TACIT_KERNELS=reference)")
    assert said["warned"] == []


def test_a_cache_folder_that_cannot_be_written_to_only_costs_time(
    usual: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    said = encode_all("--without-session", NUMBA_CACHE_DIR=str(file / "below a file"))
    assert said["bits"] == usual["bits"]
    assert usual["path"].endswith(said["path"])


def test_a_session_in_tritons_interpreter_writes_the_same_bits(usual: dict[str, Any]) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[cuda]'")
    said = encode_all(TACIT_KERNELS="triton", TRITON_INTERPRET="1")
    assert said["bits"] == usual["bits"]
    assert said["triton"]
    assert "kernels: triton " in said["path"]
    assert said["warned"] == []


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS, "fast")
    with pytest.raises(ConfigError, match=r"TACIT_KERNELS='fast'.*'reference'"):
        find_backend.__wrapped__("cpu")


def test_a_device_that_nothing_was_written_for() -> None:
    assert find_backend("xpu")[:2] == ("torch", "plain torch on xpu (no others were written for it)")


def test_without_triton_tensors_on_cuda_take_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KERNELS, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)  # so that importing it fails
    found = find_backend.__wrapped__("cuda")
    assert (found.name, found.extra) == ("torch", "cuda")
    assert "plain torch on cuda (triton cannot be imported" in found.description
