"""The texts of `Attached.active_path` and `Attached.describe`."""

from __future__ import annotations

from collections.abc import Sequence

from tacit.kernels.dispatch import find_backend
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.optimizer_hooks.taken_momentum import Taken
from tacit.session.description import one_line
from tacit.transports.process_groups import backend_of


def active_path(spec: AttachSpec, levels: Sequence[Level], taken: Taken | None) -> str:
    """See `Attached.active_path`; `taken`: the momentum that was taken from the optimizers."""
    if spec.leaves_ddp_alone:
        return "DistributedDataParallel, untouched"
    summaries = [level.session.summary for level in levels]
    return one_line(spec.strategy.name, summaries, _surroundings(spec, levels, taken))


def describe(spec: AttachSpec, levels: Sequence[Level], taken: Taken | None) -> str:
    """See `Attached.describe`."""
    lines = [active_path(spec, levels, taken)]
    for i, level in enumerate(() if spec.leaves_ddp_alone else levels):
        of = "" if len(levels) == 1 else f"level {i + 1} of {len(levels)}, "
        lines += ["", f"{of}{_surroundings(spec, levels, taken)}", *level.session.describe()]
    return "\n".join(lines)


def _surroundings(spec: AttachSpec, levels: Sequence[Level], taken: Taken | None) -> str:
    """The ranks, their backend, where exchanges run, the kernels, and the momentum."""
    peers = len(levels[-1].session.ranks)
    devices = {bucket.device.type for level in levels for bucket in level.session.buckets}
    where = dict.fromkeys(level.placing.words for level in levels if level.placing.words)
    by = ", ".join([backend_of(spec.group), *([" and ".join(where)] if where else [])])
    kernels = ", ".join(find_backend(device).description for device in sorted(devices))
    momentum = "" if taken is None else f", {taken}"
    return f"{peers} {'rank' if peers == 1 else 'ranks'} by {by}, kernels: {kernels}{momentum}"
