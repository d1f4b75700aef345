"""Times the next steps of a training on all ranks, and then reports where their time goes.

If the environment variable `TACIT_DIAGNOSE` names a file, the first session of a process is diagnosed, and
rank 0 saves and logs the diagnosis. `tacit diagnose` sets it, with further options, as JSON.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.optim import Optimizer

from tacit import checks
from tacit.environment import DIAGNOSE
from tacit.errors import AttachError
from tacit.files import spared
from tacit.levels.spec import AttachSpec
from tacit.model.trained_model import local
from tacit.optimizer_hooks.global_hooks import after_steps
from tacit.planning.culprits import diagnosed
from tacit.planning.diagnosis import Diagnosis, Facts, RankSteps
from tacit.planning.requests import TimedSession, requested
from tacit.planning.step_profiler import cores, gather_found, machine
from tacit.planning.step_timer import StepTimer, StepTimes
from tacit.planning.what_if import considered
from tacit.timelines import Span
from tacit.transports.network_interfaces import (
    Interface,
    Segments,
    congestion_control,
    interfaces,
    segments,
)
from tacit.transports.process_groups import connections, gather_texts, rank_in

SETTLING, STEPS = 5, 20
"""The steps that are skipped, in which buckets still change; and those that are measured."""
_MOST = 500
_IDLE = 0.05
"""An interface that sends less than this share of the busiest one's bytes is idle."""
_log = logging.getLogger("tacit")


@dataclass(frozen=True)
class DiagnoseRequest:
    """The diagnosis that a launcher requests.

    Attributes:
        out: where the diagnosis is saved; "": nowhere.
        steps: how many are measured; 0: the default.
        ends: whether the training ends after it.
        logs:  whether rank 0 logs it.
    """

    out: str
    steps: int = 0
    ends: bool = False
    logs: bool = True


def needs(steps: int) -> str:
    """What a script must do to be diagnosed. `steps`: how many are measured; 0: the default."""
    return (
        "it must train a model of DistributedDataParallel, or attach tacit with its optimizer, and take "
        f"{SETTLING + (steps or STEPS) + 2} steps or more"
    )


_ASKED: list[Any] = []
"""Diagnoses that the environment has requested: one a process."""


def began(session: TimedSession) -> None:
    """Diagnose this session's training, if that is requested and no other session is diagnosed."""
    request = None if _ASKED else requested(DIAGNOSE, DiagnoseRequest)
    if request is not None and session.options.optimizers:
        _ASKED.append(Diagnosing(session, request.steps or None, request))


class Diagnosing:
    """Times the next steps; after the last one all ranks compare. Every rank makes one at the same step.

    Args:
        session: at work.
        steps: how many are measured; by default 20, or two periods of the strategy.
        request: a launcher's request.

    Attributes:
        result: the diagnosis, equal on all ranks; None before.

    Raises:
        AttachError: there is no optimizer whose steps could be timed.
        ConfigError: so many steps are not possible.
    """

    def __init__(
        self, session: TimedSession, steps: int | None = None, request: DiagnoseRequest | None = None
    ) -> None:
        _check(session.options, steps)
        self.result: Diagnosis | None = None
        self._session, self._request, self._wanted = session, request, steps
        self._begin()
        # After the optimizer's hooks, so that a session's work there is in the step.
        self._handle = after_steps(self._stepped)

    def _begin(self) -> None:
        options = self._session.options
        self._period = options.period
        self._steps = self._wanted or min(_MOST, max(STEPS, 2 * self._period))
        self._strategy = repr(options.strategy)
        self._count = 0
        self._before: Sequence[Interface] = ()
        self._segments = Segments()
        self._timer = StepTimer(options.model.module, options.optimizers, options.named, self._steps)

    def _stepped(self, optimizer: Optimizer) -> None:
        if self._session.closed:
            self._end()
        elif optimizer is self._session.options.optimizers[-1]:
            self._after_step()

    def _after_step(self) -> None:
        self._count += 1
        if repr(self._session.options.strategy) != self._strategy:  # 'auto' has chosen
            self._timer.close()
            self._begin()
        elif self._count == SETTLING - 1:
            self._timer.run_ahead()
        elif self._count == SETTLING:
            self._before, self._segments = interfaces(), segments()
        elif self._count == SETTLING + self._steps:
            after = interfaces()
            self._end()
            self._session.flush()
            self._conclude(after)

    def _end(self) -> None:
        self._handle.remove()
        self._timer.close()

    def _conclude(self, after: Sequence[Interface]) -> None:
        """Compare with the other ranks, and report. A collective call."""
        options = self._session.options
        found = gather_found(lambda: self._mine(after).to_json(), options.group)
        everyone = [RankSteps.from_json(text) for text in found]
        idle = len(options.named) - len(set().union(*(step.ready for step in self._timer.steps)))
        unused = max(int(each) for each in gather_texts(str(idle), options.group))
        facts = Facts(
            algorithm=options.strategy.name,
            period=self._period,
            ranks=tuple(everyone),
            searched=options.ddp is not None and options.ddp.find_unused_parameters,
            unused=unused,
            connections=connections() * (1 + os.environ.get("GLOO_SOCKET_IFNAME", "").count(",")),
            sockets=_of_nccl("NCCL_SOCKET_NTHREADS") * _of_nccl("NCCL_NSOCKS_PERTHREAD"),
        )
        facts, notes = considered(facts, self._timer, options, self._session.links)
        # Each rank has measured the cost of encoding: all use that of the first.
        told = gather_found(lambda: diagnosed(facts, notes).to_json(), options.group)
        self.result = Diagnosis.from_json(told[0])
        if rank_in() == 0 and (self._request is None or self._request.logs):
            _log.warning("diagnosis of %s", self.result)
        if self._request is not None:
            self._obey(self._request)

    def _obey(self, request: DiagnoseRequest) -> None:
        assert self.result is not None
        if request.out and self._session.options.group.rank() == 0:
            with spared(f"the diagnosis is not saved in {request.out}"):
                self.result.save(Path(request.out))
        if request.ends:
            raise SystemExit(0)

    @property
    def _device(self) -> torch.device:
        return local(next(iter(self._session.options.named.values()))).device

    def _mine(self, after: Sequence[Interface]) -> RankSteps:
        """This rank's measurements."""
        steps = self._timer.steps
        waits = [
            span
            for level in self._session.levels
            for record in level.session.stats.records
            for span in record.waits
        ]
        here = RankSteps(
            rank=rank_in(),
            node=int(os.environ.get("GROUP_RANK", rank_in())),
            host=socket.gethostname(),
            machine=machine(),
            wall=tuple(step.wall for step in steps),
            data=tuple(step.data for step in steps),
            exposed=tuple(_exposed(step, waits) for step in steps),
            parts=_parts(steps),
            threads=1 if self._timer.on_gpu else torch.get_num_threads(),
            cores=cores(),
            gpu=torch.cuda.get_device_name(self._device) if self._timer.on_gpu else "",
            launching=self._timer.launching.forward if self._timer.on_gpu else 0.0,
            queued=self._timer.queued,
            passes=max(step.passes for step in steps),
            resent=segments().resent_since(self._segments),
            congestion_control=congestion_control(),
        )
        return _with_interface(here, self._before, after, self._steps)


def _of_nccl(variable: str) -> int:
    """A number of NCCL's environment; 1 where it is not set, as on most machines."""
    text = os.environ.get(variable, "")
    return max(1, int(text)) if text.isdigit() else 1


def _check(options: AttachSpec, steps: int | None) -> None:
    if not options.optimizers:
        raise AttachError("diagnose() counts steps of the optimizer: give attach the optimizer")
    if steps is not None:
        checks.whole("steps", steps, 2, _MOST, "write how many steps are measured, such as 20")


def _exposed(step: StepTimes, waits: Sequence[Span]) -> float:
    """Seconds of a step in which the training waited for an exchange."""
    begun, last, stepping, ended = step.marks
    waiting = max(0.0, step.exchanging - step.between) if torch.get_num_threads() == 1 else step.exchanging
    elsewhere = _overlap(waits, begun, ended) - _overlap(waits, last, stepping)
    return min(step.wall, waiting + max(0.0, elsewhere))


def _overlap(spans: Sequence[Span], begun: float, ended: float) -> float:
    return sum(max(0.0, min(ended, span.ended) - max(begun, span.begun)) for span in spans)


def _parts(steps: Sequence[StepTimes]) -> dict[str, float]:
    return {
        "loading": median(step.waited for step in steps),
        "data": median(max(0.0, step.data - step.waited) for step in steps),
        "forward": median(step.forward for step in steps),
        "backward": median(step.backward for step in steps),
        "optimizer": median(step.optimizer for step in steps),
    }


def _with_interface(
    here: RankSteps, before: Sequence[Interface], after: Sequence[Interface], steps: int
) -> RankSteps:
    """Add the bytes of the busiest interface, and a faster interface, if there is one."""
    had = {each.name: each.sent for each in before}
    grown = [(each.sent - had[each.name], each) for each in after if each.name in had]
    if not grown:
        return here
    sent, busiest = max(grown, key=lambda pair: pair[0])
    faster = max((each for each in after if each.rate), key=lambda each: each.rate or 0.0, default=None)
    other = faster is not None and busiest.rate is not None and (faster.rate or 0.0) > busiest.rate
    idle = [
        each.name
        for each in after
        if each.physical and each.rate and each.rate == busiest.rate and each.name in had
        if each.name != busiest.name and each.sent - had[each.name] < _IDLE * sent
    ]
    return replace(
        here,
        sent=sent / steps,
        interface=busiest.name,
        rate=busiest.rate,
        faster=faster.name if other and faster is not None else "",
        faster_rate=faster.rate if other and faster is not None else None,
        idle=tuple(idle),
    )
