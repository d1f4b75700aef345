"""A GPU's profile, for trying out plans and diagnoses without one: derived and made up, not taken on a GPU.

    python benchmarks/made_up_gpu.py             # writes it, and compares it with the emulated wire
    python benchmarks/made_up_gpu.py --compare   # compares alone

Of one H100 it was measured (benchmarks/results/2026-11-26-gpu-h100.json): how long a step of the model of
GPT-2's shape takes, how long encoding and decoding do, and how long the host is in tacit's hook. Made up, as
nobody measured it: how the step divides into its parts, when each gradient is ready, what the host launches
in which time, the copies over PCIe, the links, and what TF32 would save. The comparison is with the steps
that were measured there over an emulated wire: they had no part in what is made up but for the step's whole.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tacit.algorithms import parse
from tacit.optimizer_hooks.optimizer_facts import facts_of
from tacit.planning.cluster_prediction import predict
from tacit.planning.profile import (
    BucketCost,
    GpuLinks,
    GpuProfile,
    Launching,
    LevelCost,
    ParamReady,
    Profile,
    StepProfile,
    StrategyCost,
)
from tacit.planning.simulation.clock import Network
from tacit.planning.simulation.rehearsal import LevelScript, rehearse
from tacit_lab.recipes.models.gpt import GPT

RESULTS = Path(__file__).parent / "results"
MEASURED = RESULTS / "2026-11-26-gpu-h100.json"
SAVED = RESULTS / "2026-11-29-gpu-profile-made-up.json"
LAYOUTS = ((2, 1), (4, 1), (8, 1), (2, 8), (4, 8), (8, 8))
CODECS = {
    "bf16": ("bf16", "encode", ""),
    "int8": ("int8", "encode + EF", "decode 4"),
    "efsign": ("sign", "encode + EF", "decode 4"),
    "efsign:topology=all-gather": ("sign", "encode + EF", "decode 4"),
    "topk": ("topk 1%", "encode + EF", "decode 4"),
    "topk:ratio=0.01": ("topk 1%", "encode + EF", "decode 4"),
}
"""By algorithm, whose kernels it runs; those of `powersgd` are its products."""
PLAIN = ("ddp", "dense", "localsgd")
WIRED = {"efsign": "efsign:topology=all-gather"}
"""What one rank over an emulated wire is to be predicted as."""
_FORWARD, _OPTIMIZER = 0.032, 0.0015
"""Seconds; made up."""
_HOOK = {"bf16": 0.010, "int8": 0.021, "topk:ratio=0.01": 0.040, "efsign:topology=all-gather": 0.021}
"""The host's seconds in the hook where none were measured; made up."""


def model() -> dict[str, torch.Tensor]:
    """The parameters of the measured model, without memory."""
    with torch.device("meta"):
        made = GPT(vocabulary=50304, length=1024, width=768, heads=12, blocks=12)
    return {name: p for name, p in made.named_parameters() if p.requires_grad}


def step(seconds: float, named: Mapping[str, torch.Tensor]) -> StepProfile:
    """The step: backward passes the matrices at an even pace, from the last one to the first."""
    backward = seconds - _FORWARD - _OPTIMIZER
    worked, total, parameters = 0, sum(p.numel() for p in named.values()), []
    for name, p in reversed([*named.items()]):
        worked += p.numel()
        ready = backward * worked / total
        parameters.append(ParamReady(name, tuple(p.shape), "float32", ready))
    return StepProfile(0.0, _FORWARD, backward, _OPTIMIZER, tuple(reversed(parameters)))


def costs(profile: Profile, told: Mapping[str, Any]) -> list[StrategyCost]:
    """What each algorithm's kernels and launches cost a rank."""
    found = []
    hooks = {each["algorithm"]: each["hook_ms"] / 1e3 for each in told["steps"]}
    for text in (*PLAIN, *CODECS, "powersgd"):
        for nodes, ranks in LAYOUTS:
            scripts = rehearse(parse(text), profile, nodes, ranks)
            hook = 0.0 if text == "ddp" else hooks.get(text, _HOOK.get(text, hooks["dense"]))
            levels = tuple(_level(text, script, nodes * ranks, hook, told["kernels"]) for script in scripts)
            found.append(StrategyCost(parse(text).name, nodes, ranks, levels))
    return found


def _level(
    text: str, script: LevelScript, world: int, hook: float, kernels: Sequence[Mapping[str, Any]]
) -> LevelCost:
    buckets = []
    for bucket in script.buckets:
        segments = [0.0] * (len(bucket.messages) + 1)
        if text == "powersgd":
            products = [_seconds(kernels, "powersgd", task, bucket.numel) for task in _PRODUCTS]
            segments = [products[0], *[products[1]] * (len(segments) - 2), products[2]]
        elif text in CODECS:
            codec, encode, decode = CODECS[text]
            segments[0] = _seconds(kernels, codec, encode, bucket.numel)
            peers = (
                4 if len(segments) > 2 else world
            )  # in two phases a rank decodes as much as one peer sends
            if decode:
                segments[-1] = _seconds(kernels, codec, decode, bucket.numel) * peers / 4
        buckets.append(BucketCost(bucket.numel, tuple(segments), hook / len(script.buckets)))
    entries = sum(bucket.numel for bucket in script.buckets)
    main = 3 * _seconds(kernels, "bf16", "encode", entries) if text == "localsgd" else 0.0
    feedback = 8 * entries if text in (*CODECS, "powersgd", "localsgd") and text != "bf16" else 0
    return LevelCost(tuple(buckets), main, feedback)


_PRODUCTS = ("P = M Q", "Q = M' P", "M - P Q'")


def _seconds(kernels: Sequence[Mapping[str, Any]], codec: str, task: str, numel: int) -> float:
    """A kernel's seconds for so many entries, by the two measured sizes: a line, or in proportion to one."""
    rows = sorted(
        (each["numel"], each["us"] / 1e6)
        for each in kernels
        if (each["codec"], each["task"]) == (codec, task)
    )
    if len(rows) == 1 or numel > rows[-1][0]:
        return float(rows[-1][1] * numel / rows[-1][0])
    (small, least), (large, most) = rows
    return float(max(least, least + (most - least) * (numel - small) / (large - small)))


def made() -> Profile:
    """The profile."""
    told, named = json.loads(MEASURED.read_text()), model()
    seconds = told["wire"][0]["computing_ms"] / 1e3
    optimizer = torch.optim.SGD(named.values(), lr=1e-3, momentum=0.9)
    gpu = GpuProfile(
        name=f"{told['gpu']} (derived and made up: benchmarks/made_up_gpu.py)",
        by_nccl=True,
        in_stream=True,
        down=2.5e10,
        up=2.5e10,
        launching=Launching(forward=0.008, backward=0.012, optimizer=_OPTIMIZER),
        links=GpuLinks(rate=1.2e9, latency=3e-5, near_rate=2e11, near_latency=5e-6),
        tf32_gain=0.0,
    )
    profile = Profile(
        step=step(seconds, named),
        bucket_bytes=25 << 20,
        threads=1,
        ranks=8,
        cores=96,
        per_byte=3e-10,
        per_message=5e-5,
        buffers=0,
        state_bytes=4 * sum(p.numel() for p in named.values()),
        processor="made up",
        backend="nccl",
        torch_version=told["torch"],
        date="2026-11-29",
        gpu=gpu,
        optimizers=facts_of([optimizer], named),
    )
    return profile.with_costs(costs(profile, told))


def compared(profile: Profile, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float, float]]:
    """Steps over an emulated wire: the algorithm, Gbit/s, and the predicted and the measured seconds.

    One rank alone sends signs flat, where eight would send them in two phases.

    Args:
        rows: what was measured: of each "algorithm", "gbit", "peers" and "ms".
    """
    found = []
    for each in rows:
        rate = each["gbit"] * 1e9 / 8
        network = Network(
            each["peers"], 1, math.inf, 0.0, 96, 1, 0.0, 0.0, gpu=GpuLinks(rate, 0.0, math.inf, 0.0)
        )
        text = WIRED.get(each["algorithm"], each["algorithm"])
        seconds = predict(parse(text), profile, network).seconds
        found.append((each["algorithm"], each["gbit"], seconds, each["ms"] / 1e3))
    return found


def on_the_h100() -> list[dict[str, Any]]:
    """What was measured there over an emulated wire, for `compared`."""
    rows: list[dict[str, Any]] = json.loads(MEASURED.read_text())["wire"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compare", action="store_true", help="write nothing")
    profile = Profile.load(SAVED) if parser.parse_args().compare else made()
    for algorithm, _, predicted, measured in compared(profile, on_the_h100()):
        print(
            f"{algorithm:12} predicted {1e3 * predicted:7.1f} ms, measured {1e3 * measured:7.1f}: "
            f"{100 * (predicted / measured - 1):+5.1f} %"
        )
    if not parser.parse_args().compare:
        profile.save(SAVED)
        print(f"saved: {SAVED}")


if __name__ == "__main__":
    main()
