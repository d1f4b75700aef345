"""Where a step's time beyond plain DDP's goes on a GPU: waits, notes, each kernel; a part of `gpu.py`."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from gpu_checks import Check, Row, Setting, milliseconds, on_the_device
from gpu_steps import BLOCKS, STEPS, Training, interleaved, training
from paired import paired_ratio
from tacit.session.health import device_notes
from tacit.transports import torch_distributed as transport

PROFILED = ("dense", "topk", "powersgd")
LISTED = 0.02
"""Milliseconds a step by which a kernel takes more than with plain DDP, or less, to be listed."""


@contextlib.contextmanager
def without(waiting: bool = False, notes: bool = False) -> Iterator[None]:
    """Leave out the wait before the optimizer's step, or what is noted of NaN and overflow."""
    report, noted = device_notes.DeviceReport, device_notes.BucketHealth
    replaced: list[tuple[Any, str, Any]] = []
    if waiting:
        replaced += [(report, "read", lambda self: {}), (report, "seconds", lambda self: None)]
    if notes:
        replaced += [(noted, name, lambda self, x: None) for name in ("note_given", "note_mean")]
        replaced.append((transport, "divide_", lambda flat, by, finite_probe: flat.div_(by)))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for each in replaced:
        setattr(*each)
    try:
        yield
    finally:
        for each in before:
            setattr(*each)


def hooked_by_torch(device: torch.device) -> Training:
    """Plain DDP with torch's own hook in Python, which does what DDP does without one."""
    each = training(None, device)
    each.model.register_comm_hook(None, allreduce_hook)  # type: ignore[operator]
    return each


def parts(setting: Setting) -> Row:
    """A step with `dense`, and with parts of it left out, against plain DDP; in interleaved blocks."""
    device = setting.device
    trained = {"plain": training(None, device), "torch's hook": hooked_by_torch(device)}
    left_out: dict[str, dict[str, bool]] = {
        "dense": {},
        "dense, not waiting": {"waiting": True},
        "dense, noting nothing": {"notes": True},
        "dense, neither": {"waiting": True, "notes": True},
    }
    trained |= {name: training("dense", device) for name in left_out}

    def block(name: str) -> Callable[[int], float]:
        def timed(count: int) -> float:
            with without(**left_out.get(name, {})):
                return milliseconds(trained[name].step, count, device)

        return timed

    arms = {name: block(name) for name in trained}
    interleaved(arms, 1, STEPS)  # to settle
    took = interleaved(arms, *((2, 2) if setting.small else (BLOCKS, STEPS)))
    rows = []
    for name, times in took.items():
        ratio = paired_ratio(times, took["plain"])
        rows.append({"arm": name, "ms": statistics.median(times), "ratio": ratio})
        print(f"{name:28} {rows[-1]['ms']:7.2f} ms, of plain {ratio['median']:.4f}", flush=True)
    for each in trained.values():
        each.close()
    return {"rows": rows}


def profiled(algorithm: str | None, device: torch.device, count: int = 3) -> Row:
    """A step's kernels by name, in ms; for how long the GPU did nothing; and the longest such gaps."""
    each = training(algorithm, device)
    for _ in range(8):
        each.step()
    found = on_the_device(each.step, count, device)
    by_name: dict[str, float] = {}
    gaps: list[tuple[float, str, str]] = []
    end, last, worked = found[0][0], "", 0.0
    for start, took, name in found:
        by_name[name] = by_name.get(name, 0.0) + took / count
        if start > end:
            gaps.append((start - end, last, name))
        worked += max(0.0, start + took - max(start, end))
        if start + took > end:
            end, last = start + took, name
    each.close()
    return {
        "algorithm": algorithm or "plain",
        "busy_ms": worked / count,
        "idle_ms": sum(gap for gap, *_ in gaps) / count,
        "kernels": len(found) / count,
        "by_name": by_name,
        "longest_gaps": sorted(gaps, reverse=True)[:6],
    }


def where(setting: Setting, algorithm: str) -> Row:
    """What the GPU does in a step beyond what it does with plain DDP."""
    plain, ours = (profiled(each, setting.device) for each in (None, algorithm))
    before, after = plain.pop("by_name"), ours.pop("by_name")
    more = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {**after, **before}}
    ordered = sorted(more.items(), key=lambda each: -each[1])
    beyond = {name: ms for name, ms in ordered if abs(ms) > LISTED}
    for row in (plain, ours):
        numbers = f"busy {row['busy_ms']:.2f} ms, idle {row['idle_ms']:.2f}, {row['kernels']:.0f} kernels"
        print(f"{row['algorithm']}: {numbers}")
    for name, ms in [*beyond.items()][:14]:
        print(f"    {ms:+8.3f} ms {name[:110]}")
    for gap, last, next_ in ours["longest_gaps"][:3]:
        print(f"    idle {gap:.3f} ms between {last[:60]} and {next_[:60]}", flush=True)
    return {"plain": plain, **ours, "beyond_plain": beyond}


CHECKS = [
    Check("profile: parts of dense", 25, "what of dense costs beyond plain DDP", parts),
    *(
        Check(
            f"profile: {each}",
            10,
            f"each kernel of {each} beyond plain DDP's",
            partial(where, algorithm=each),
        )
        for each in PROFILED
    ),
]
