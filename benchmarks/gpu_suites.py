"""The tests that need a GPU, in processes of their own, and how long they take; a part of `gpu.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch

from gpu_checks import Check, Row, Setting
from paired import ROOT

SHARED = "tests/cuda/test_nccl_ranks.py"
LIMIT = 300.0
"""Seconds that all of tests/cuda should take at most."""
NEEDS = """'ranks: four of NCCL' needs NCCL 2.30 or later, and is skipped with an older one. To preload it:
    pip install --no-deps --target build/nccl nvidia-nccl-cu13    # cu12 if torch is built for CUDA 12
    LD_PRELOAD=build/nccl/nvidia/nccl/lib/libnccl.so.2 python benchmarks/gpu.py --only ranks"""
TAIL = 4000
"""Characters of what pytest said that are kept where a test fails."""


def pytest(setting: Setting, words: Sequence[str]) -> Row:
    """Run tests: how many passed, failed and were skipped; on a CPU they are only collected.

    If all were skipped, "skipped" is why.
    """
    torch.cuda.empty_cache()
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--tb=short", *words]
    begun = time.perf_counter()
    ended = subprocess.run(
        [*command, *(["--collect-only"] if setting.small else [])],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
        timeout=setting.seconds,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    last = ended.stdout.strip().splitlines()[-1:]
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", "".join(last))}
    print(f"{' '.join(words)}: {''.join(last).strip('= ')}", flush=True)
    row = {"words": [*words], "seconds": seconds, "counts": counts}
    if ended.returncode:
        row["said"] = (ended.stdout + ended.stderr)[-TAIL:]
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+: (.*)", ended.stdout, re.MULTILINE)
    if not setting.small and counts.keys().isdisjoint({"passed", "failed", "error", "errors"}) and reasons:
        return row | {"skipped": reasons[0]}
    passed = not ended.returncode and bool(setting.small or counts.get("passed"))
    return row | {"verdicts": [{"what": f"{' '.join(words)}: passed", "is": counts, "met": passed}]}


def on_one_gpu(setting: Setting) -> Row:
    """What is left of tests/cuda; judged is the time of both parts, where the first has run."""
    row = pytest(setting, ["tests/cuda", f"--ignore={SHARED}"])
    shared = setting.found.get(FIRST.name)
    if shared is not None and "verdicts" in shared and "verdicts" in row:
        took = row["seconds"] + shared["seconds"]
        row["verdicts"].append(
            {"what": "tests/cuda: seconds", "is": took, "goal": LIMIT, "met": took <= LIMIT}
        )
    return row


FIRST = Check(
    "ranks: four of NCCL", 140, "all algorithms equal on four ranks of NCCL", partial(pytest, words=[SHARED])
)
CHECKS = [
    Check("ranks: one and two", 140, "all algorithms by one rank of NCCL, and two of Gloo", on_one_gpu),
    Check(
        "laws",
        45,
        "no compressor waits, the Triton kernels have the CPU's bits",
        partial(pytest, words=["tests/laws/test_on_device.py", "tests/kernels/test_triton.py"]),
    ),
]
