"""Profiles the first steps of a training: the computing of a step, and the costs of strategies.

If the environment variable `TACIT_STEP_PROFILE` names a file, the first session of a process takes a profile,
and rank 0 saves it there. `tacit profile` sets it, with further options, as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tacit.algorithms import parse
from tacit.algorithms.auto import candidates
from tacit.environment import STEP_PROFILE
from tacit.errors import TacitError, of_ranks
from tacit.files import spared
from tacit.levels.spec import AttachSpec
from tacit.model.trained_model import local, locals_of
from tacit.optimizer_hooks.optimizer_facts import facts_of
from tacit.planning.candidates import fitting_texts
from tacit.planning.gpu_profiler import gpu_profile, layout
from tacit.planning.profile import Profile, StrategyCost
from tacit.planning.requests import TimedSession, requested
from tacit.planning.step_timer import StepTimer
from tacit.planning.strategy_costs import measured_cost
from tacit.transports.probing import RingCost, ring_cost
from tacit.transports.process_groups import backend_of, gather_texts, ranks_of

SKIPPED, STEPS = 3, 12
"""The first steps that are skipped, in which buckets still change; and those that are measured."""
_SLOWER = 1.1
_log = logging.getLogger("tacit")


@dataclass(frozen=True)
class ProfileRequest:
    """The contents of a requested profile.

    Attributes:
        out: where it is saved.
        algorithms: text forms of the strategies whose cost is measured; if there are none, on a GPU those
            that `auto` may choose, for this cluster and one of twice as many nodes.
        layouts: the clusters for which they are measured, as (nodes, ranks of each).
        ends: whether the training ends after it.
        asked: whether the user has named the algorithms; else those that do not fit the optimizer are left
            out, and those that take its momentum get it.
    """

    out: str
    algorithms: tuple[str, ...] = ()
    layouts: tuple[tuple[int, int], ...] = ()
    ends: bool = False
    asked: bool = True


_TAKEN: list[Any] = []
"""Profiles being taken: one a process."""


def began(session: TimedSession) -> None:
    """Profile this session's training, if that is requested and no other session is profiled."""
    request = None if _TAKEN else requested(STEP_PROFILE, ProfileRequest)
    if request is not None and session.options.optimizers:
        _TAKEN.append(_Taking(session, request))


class _Taking:
    """Waits for the steps, and takes the profile after the last of them."""

    def __init__(self, session: TimedSession, request: ProfileRequest) -> None:
        self._session, self._request = session, request
        self._spec = spec = session.options
        self._timer = StepTimer(spec.model.module, spec.optimizers, spec.named)
        self._stepped = 0
        self._handle: Any = spec.optimizers[-1].register_step_post_hook(lambda *_: self._after_step())

    def _after_step(self) -> None:
        self._stepped += 1
        if self._stepped < SKIPPED + STEPS + 1:
            return
        self._handle.remove()
        self._timer.close()
        self._session.flush()
        profile = take(self._timer, self._spec)
        costs = self._costs(profile)
        sharded = self._spec.sharded
        if self._spec.group.rank() == 0 and (sharded is None or sharded.shard == 0):
            if profile.shards > 1:
                _log.warning(
                    "the profile is of a model of which %d ranks share a replica, which tacit plan and tacit "
                    "diagnose refuse: attach 'auto' or call session.diagnose() here instead",
                    profile.shards,
                )
            with spared(f"the profile is not saved in {self._request.out}"):
                profile.with_costs(costs).save(Path(self._request.out))
        if self._request.ends:
            raise SystemExit(0)

    def _costs(self, profile: Profile) -> list[StrategyCost]:
        """Measure the costs; the ranks of a machine share them out, and all compute at once, as in training.

        A collective call. Returns those of rank 0's machine, on all ranks.
        """
        request, tensors, found = self._request, locals_of(self._spec.named), []
        if profile.gpu is not None and not request.algorithms:  # later there is no GPU to measure on
            nodes = layout(self._spec)
            sizes = tuple((count * len(nodes), len(nodes[0])) for count in (1, 2))
            request = replace(request, algorithms=tuple(candidates("periodic")), layouts=sizes, asked=False)
        texts, refused = fitting_texts(request.algorithms, profile, request.asked)
        for text, why in refused.items() if request.asked else ():
            _log.warning("what %r costs was not measured: %s", text, why)
        group = self._spec.group
        machines = gather_texts(machine(), group)
        mates = [rank for rank, each in enumerate(machines) if each == machines[group.rank()]]
        for text in texts[mates.index(group.rank()) :: len(mates)]:
            try:
                found += [
                    measured_cost(parse(text), profile, count, ranks, tensors)
                    for count, ranks in request.layouts
                ]
            except Exception as error:  # the others would wait in the call below
                _log.warning("what %r costs was not measured: %s", text, error)
        everyone = gather_texts(replace(profile, costs=tuple(found)).to_json(), group)
        here = [
            Profile.from_json(each) for each, at in zip(everyone, machines, strict=True) if at == machines[0]
        ]
        return [cost for each in here for cost in each.costs]


def take(timer: StepTimer, options: AttachSpec, ring: RingCost | None = None) -> Profile:
    """Make a profile of the timed steps. A collective call; equal on all ranks.

    Args:
        options: of the session whose steps these are.
        ring: the cost of Gloo's collectives; by default it is measured now.

    Raises:
        ConfigError: no step was timed.
        TacitError: a rank could not measure.
    """
    model, group = options.model, options.group
    costs = ring_cost(group) if ring is None else ring
    gpu = gpu_profile(timer, options) if timer.on_gpu else None

    def mine() -> str:
        return Profile(
            step=timer.profile(SKIPPED),
            bucket_bytes=int(model.bucket_bytes_cap),
            threads=1 if timer.on_gpu else torch.get_num_threads(),
            ranks=1,
            cores=cores(),
            per_byte=costs.per_byte,
            per_message=costs.per_hop,
            buffers=_broadcast(model) if isinstance(model, DistributedDataParallel) else 0,
            state_bytes=_state_bytes(options.optimizers),
            processor=processor(),
            backend=backend_of(group),
            torch_version=str(torch.__version__),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            gpu=None if gpu is None else gpu(),
            optimizers=facts_of(options.optimizers, options.named),
            shards=1 if options.sharded is None else options.sharded.shards,
        ).to_json()

    everyone = [Profile.from_json(text) for text in gather_found(mine, group)]
    here = machine()
    return _chosen(everyone, gather_texts(here, group).count(here))


def gather_found(find: Callable[[], str], group: dist.ProcessGroup) -> list[str]:
    """`gather_texts` of what `find` returns. A collective call: where it fails on one rank, all raise.

    Raises:
        TacitError: it failed on a rank; there it may be of another kind.
    """
    mine, why, error = "", "", None
    try:
        mine = find()
    except Exception as raised:
        why, error = f"{type(raised).__name__}: {raised}", raised
    everyone = [json.loads(each) for each in gather_texts(json.dumps([mine, why]), group)]
    if isinstance(error, TacitError):
        raise error
    failed = {rank: each for rank, (_, each) in zip(ranks_of(group), everyone, strict=True) if each}
    if failed:
        raise TacitError(f"measuring failed on {of_ranks(failed)}: {next(iter(failed.values()))}") from error
    return [each for each, _ in everyone]


def _chosen(everyone: Sequence[Profile], here: int) -> Profile:
    """The profile of a typical rank; of the slowest, if that is clearly slower, as all wait for it.

    Ranks that share too few cores wait for all that is computed there, so the mean of their times is taken.

    Args:
        here: the number of ranks on this machine.
    """
    ranked = sorted(everyone, key=lambda each: each.step.seconds)
    chosen = ranked[len(ranked) // 2]
    if here * chosen.threads > chosen.cores:
        mean = fmean(each.step.seconds for each in ranked)
        return replace(chosen, step=chosen.step.scaled(mean / chosen.step.seconds), ranks=here)
    if ranked[-1].step.seconds > _SLOWER * chosen.step.seconds:
        chosen = ranked[-1]
    return replace(chosen, ranks=here)


def processor() -> str:
    """The processor's name and number of cores: costs with equal ones are comparable."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"


def measurable(profile: Profile) -> bool:
    """Whether what strategies cost can be measured here, too: on a GPU it is in the training alone."""
    return profile.gpu is None and profile.processor == processor()


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """A text that is equal for all processes of a machine, whatever host names its containers have."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _broadcast(ddp: DistributedDataParallel) -> int:
    """Bytes that DDP broadcasts before a forward pass."""
    if not ddp.broadcast_buffers:
        return 0
    return sum(each.numel() * each.element_size() for each in ddp.module.buffers())


def _state_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    tensors = (
        local(value)
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    return sum(each.numel() * each.element_size() for each in tensors)
