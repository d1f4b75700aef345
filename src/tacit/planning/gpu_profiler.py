"""The GPU in a profile: its copies, its links, and what two switches that are off would save."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tacit.errors import AttachError
from tacit.levels.device_placement import HOST
from tacit.levels.node_layout import read_nodes
from tacit.levels.spec import AttachSpec
from tacit.model.trained_model import local
from tacit.moments import Watch
from tacit.planning.profile import GpuLinks, GpuProfile
from tacit.planning.simulation.clock import nccl_hops
from tacit.planning.step_timer import StepTimer
from tacit.transports.gpu_rings import near_ring, ring
from tacit.transports.process_groups import backend_on, gathered

_COPIED = 16 << 20
_TIMES = 3
_SIDE, _HAS_TF32 = 4096, (8, 0)
"""Of a product; and the least version of GPUs with TF32."""
_IMAGES, _PIXELS = 32, 28
"""Of a convolution: how many images, and their height and width."""


def gpu_profile(timer: StepTimer, options: AttachSpec) -> Callable[[], GpuProfile]:
    """Measure the links of the ranks' GPUs. A collective call.

    Args:
        timer: has timed steps.

    Returns:
        A function that measures all else, of this rank's GPU; no collective call.
    """
    first = local(next(iter(options.named.values())))
    # In emulation Gloo stands for it.
    by_nccl = not first.is_cuda or backend_on(options.group, first.device) == "nccl"
    links = gpu_links(options, first.device) if by_nccl else GpuLinks()

    def mine() -> GpuProfile:
        watch = Watch(device=first.device)
        down, up = _copies(watch, first)
        return GpuProfile(
            name=torch.cuda.get_device_name(first.device),
            by_nccl=by_nccl,
            in_stream=by_nccl and options.exchange_on != HOST,
            down=down,
            up=up,
            launching=timer.launching,
            links=links,
            tf32_gain=tf32_gain(timer, options, watch),
            channels_last_gain=channels_last_gain(timer, options, watch),
        )

    return mine


def _copies(watch: Watch, like: Tensor) -> tuple[float, float]:
    """Bytes a second of copies to pinned memory, and back."""
    here = torch.empty(_COPIED, dtype=torch.uint8, device=like.device)
    there = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=like.is_cuda)
    ways = (
        lambda: there.copy_(here, non_blocking=True),
        lambda: here.copy_(there, non_blocking=True),
    )
    down, up = (_COPIED / _least(watch, way) for way in ways)
    return down, up


def _least(watch: Watch, work: Callable[[], object]) -> float:
    """The seconds of some work on the GPU, the least of a few; the first does not count."""
    work()
    return max(1e-9, min(watch.took(work) for _ in range(_TIMES)))


def gpu_links(options: AttachSpec, device: torch.device) -> GpuLinks:
    """Measure rings of NCCL: of all ranks, and inside each node. A collective call; equal on all ranks."""
    group = options.group
    world = group.size()
    if world == 1:
        return GpuLinks()
    nodes = layout(options)
    each = len(nodes[0])
    if len(nodes) == 1:
        rate, least = ring(group, range(world), device)
        return GpuLinks(near_rate=rate, near_latency=least / nccl_hops("AllReduce", world))
    near_rate, near_least = near_ring(group, nodes, device)
    rate, least = ring(group, range(world), device)
    found = [near_rate if math.isfinite(near_rate) else 0.0, near_least]
    rows = gathered(torch.tensor(found, dtype=torch.float64), group)
    return GpuLinks(
        rate=rate,
        latency=least / nccl_hops("AllReduce", len(nodes)),
        near_rate=min(float(row[0]) for row in rows),
        near_latency=max(float(row[1]) for row in rows) / max(1, nccl_hops("AllReduce", each)),
    )


def layout(options: AttachSpec) -> Sequence[Sequence[int]]:
    """The ranks of each node; if nodes are not known, or of shards, each rank is one. A collective call."""
    alone = [[rank] for rank in range(options.group.size())]
    if options.sharded is not None:
        return alone
    try:
        return read_nodes(options.group, options.mesh)
    except AttachError:
        return alone


# ---- switches that are off ------------------------------------------------------------------------------


def tf32_gain(timer: StepTimer, options: AttachSpec, watch: Watch) -> float:
    """The share of a product of float32 matrices that TF32 would save on this GPU, where it is off."""
    first = local(next(iter(options.named.values())))
    off = torch.get_float32_matmul_precision() == "highest" and not timer.autocast
    if not off or first.dtype != torch.float32 or torch.cuda.get_device_capability(first.device) < _HAS_TF32:
        return 0.0
    x = torch.ones(_SIDE, _SIDE, dtype=torch.float32, device=first.device)
    now = _least(watch, lambda: torch.mm(x, x))
    torch.set_float32_matmul_precision("high")
    try:
        return max(0.0, 1 - _least(watch, lambda: torch.mm(x, x)) / now)
    finally:
        torch.set_float32_matmul_precision("highest")


def channels_last_gain(timer: StepTimer, options: AttachSpec, watch: Watch) -> float:
    """The share of a convolution that `torch.channels_last` would save on this GPU, where it is off.

    The model's largest one in 16 bits is measured, on images of 28 x 28: by such tensors it is known to gain.
    """
    if options.sharded is not None:
        return 0.0  # a rank has a part of each weight
    kinds = [each for each in options.model.module.modules() if type(each) is nn.Conv2d]
    largest = max(kinds, key=lambda each: each.weight.numel(), default=None)
    if largest is None or largest.weight.is_contiguous(memory_format=torch.channels_last):
        return 0.0
    dtype = torch.get_autocast_dtype("cuda") if timer.autocast else largest.weight.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        return 0.0
    weight = largest.weight.detach().to(dtype)
    shape = (_IMAGES, largest.in_channels, _PIXELS, _PIXELS)
    x = torch.ones(shape, dtype=dtype, device=weight.device)

    def convolved(memory_format: torch.memory_format) -> float:
        here, there = (each.contiguous(memory_format=memory_format) for each in (x, weight))
        return _least(watch, lambda: nn.functional.conv2d(here, there, groups=largest.groups))

    return max(0.0, 1 - convolved(torch.channels_last) / convolved(torch.contiguous_format))
