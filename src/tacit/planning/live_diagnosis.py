"""Times the next steps of a training on all ranks, and says behind them where their time goes.

If the environment variable `TACIT_DIAGNOSE` names a file, the first session of a process is diagnosed, and
rank 0 saves and logs what was found. `tacit diagnose` sets it, with what else it wants, as JSON.
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
from tacit.optimizer_hooks.every_step import behind_steps
from tacit.planning.culprits import diagnosed
from tacit.planning.diagnosis import Diagnosis, Facts, RankSteps
from tacit.planning.requests import TimedSession, requested
from tacit.planning.step_profiler import cores, machine
from tacit.planning.step_timer import StepTimer, StepTimes
from tacit.planning.what_if import considered
from tacit.timelines import Span
from tacit.transports.interfaces import Interface, congestion_control, interfaces, socket_buffer
from tacit.transports.process_groups import rank_in, said

__all__ = ["DiagnoseRequest", "Diagnosing", "began"]

SETTLING, STEPS = 5, 20
"""So many steps are left out, as buckets settle in them; then so many are looked at."""
_MOST = 500
_log = logging.getLogger("tacit")


@dataclass(frozen=True)
class DiagnoseRequest:
    """What a launcher asks for.

    Attributes:
        out: where the diagnosis is saved.
        steps: how many are looked at; 0: as many as are enough.
        ends: whether the training ends behind it.
        tells: whether rank 0 logs it.
    """

    out: str
    steps: int = 0
    ends: bool = False
    tells: bool = True


_ASKED: list[Any] = []
"""Diagnoses that the environment has asked for: one a process."""


def began(session: TimedSession) -> None:
    """Diagnose this session's training, if that was asked for and no other's was."""
    request = None if _ASKED else requested(DIAGNOSE, DiagnoseRequest)
    if request is not None and session.options.optimizers:
        _ASKED.append(Diagnosing(session, request.steps or None, request))


class Diagnosing:
    """Times the next steps; behind the last of them all ranks compare. Every rank makes one at the same step.

    Args:
        session: at work.
        steps: how many are looked at; where not given, 20, or two periods of the strategy.
        request: of a launcher.

    Attributes:
        result: what was found, equal on all ranks; None before.

    Raises:
        AttachError: there is no optimizer whose steps could be timed, or the model is on a GPU.
        ConfigError: so many steps are not possible.
    """

    def __init__(
        self, session: TimedSession, steps: int | None = None, request: DiagnoseRequest | None = None
    ) -> None:
        _check(session.options, steps)
        self.result: Diagnosis | None = None
        self._session, self._request, self._wanted = session, request, steps
        self._begin()
        # Behind the optimizer's own hooks, so that what a session does there is in the step.
        self._handle = behind_steps(self._stepped)

    def _begin(self) -> None:
        options = self._session.options
        self._period = options.period
        self._steps = self._wanted or min(_MOST, max(STEPS, 2 * self._period))
        self._strategy = repr(options.strategy)
        self._count = 0
        self._before: Sequence[Interface] = ()
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
        elif self._count == SETTLING:
            self._before = interfaces()
        elif self._count == SETTLING + self._steps:
            after = interfaces()
            self._end()
            self._session.flush()
            self._conclude(after)

    def _end(self) -> None:
        self._handle.remove()
        self._timer.close()

    def _conclude(self, after: Sequence[Interface]) -> None:
        """Compare with the other ranks, and tell. A collective call."""
        options = self._session.options
        mine = self._mine(after)
        everyone = [RankSteps.from_json(text) for text in said(mine.to_json(), options.group)]
        idle = len(options.named) - len(set().union(*(step.ready for step in self._timer.steps)))
        unused = max(int(each) for each in said(str(idle), options.group))
        facts = Facts(
            algorithm=options.strategy.name,
            period=self._period,
            ranks=tuple(everyone),
            searched=options.ddp is not None and options.ddp.find_unused_parameters,
            unused=unused,
        )
        facts, notes = considered(facts, self._timer, options, self._session.links)
        # What encoding costs is measured by each rank for itself: all go by the first one's.
        self.result = Diagnosis.from_json(said(diagnosed(facts, notes).to_json(), options.group)[0])
        if rank_in() == 0 and (self._request is None or self._request.tells):
            _log.warning("diagnosis of %s", self.result)
        if self._request is not None:
            self._obey(self._request)

    def _obey(self, request: DiagnoseRequest) -> None:
        assert self.result is not None
        if self._session.options.group.rank() == 0:
            with spared(f"the diagnosis is not saved in {request.out}"):
                self.result.save(Path(request.out))
        if request.ends:
            raise SystemExit(0)

    def _mine(self, after: Sequence[Interface]) -> RankSteps:
        """What this rank has measured."""
        steps = [*self._timer.steps]
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
            threads=torch.get_num_threads(),
            cores=cores(),
            passes=max(step.passes for step in steps),
            buffer=socket_buffer(),
            congestion_control=congestion_control(),
        )
        return _with_interface(here, self._before, after, self._steps)


def _check(options: AttachSpec, steps: int | None) -> None:
    if not options.optimizers:
        raise AttachError("diagnose() counts steps of the optimizer: give attach the optimizer")
    if any(p.is_cuda for p in options.named.values()):
        raise AttachError(
            "diagnose() cannot look at steps on a GPU: its clock knows processors. Use torch.profiler there"
        )
    if steps is not None:
        checks.whole("steps", steps, 2, _MOST, "write how many steps are looked at, such as 20")


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
    """With what the busiest interface has sent, and with a faster one, if there is any."""
    had = {each.name: each.sent for each in before}
    grown = [(each.sent - had[each.name], each) for each in after if each.name in had]
    if not grown:
        return here
    sent, busiest = max(grown, key=lambda pair: pair[0])
    faster = max((each for each in after if each.rate), key=lambda each: each.rate or 0.0, default=None)
    other = faster is not None and busiest.rate is not None and (faster.rate or 0.0) > busiest.rate
    return replace(
        here,
        sent=sent / steps,
        interface=busiest.name,
        rate=busiest.rate,
        faster=faster.name if other and faster is not None else "",
        faster_rate=faster.rate if other and faster is not None else None,
    )
