"""Plans which gradients travel together, and in which order, once the first steps have been seen."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from statistics import median

import torch.distributed as dist
from torch import Tensor

from tacit.contracts import WORLD, LayerwiseOverlap
from tacit.foresight.messages import Gradient, Link, MessagePlan, by_priority, merged
from tacit.hooks.forward_steps import ForwardSteps
from tacit.hooks.layerwise import LayerwiseHook
from tacit.session import Session
from tacit.transports.probing import ring_cost
from tacit.transports.process_groups import said

SKIPPED, SEEN = 3, 5
"""Rounds that are left out, as kernels are compiled and DDP's buckets change; and those looked at."""

_log = logging.getLogger("tacit")


class MessagePlanner:
    """Looks at the first rounds, and then has the hook send the messages that it has planned.

    Args:
        hook: takes the gradients.
        session: exchanges them.
        named: the parameters.
        group: all ranks.
        forward: the steps that are put off, where they are.
    """

    def __init__(
        self,
        hook: LayerwiseHook,
        session: Session,
        named: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        forward: ForwardSteps | None,
    ) -> None:
        overlap = session.strategy.overlap
        assert isinstance(overlap, LayerwiseOverlap)
        self._overlap, self._hook, self._session, self._named = overlap, hook, session, named
        self._group, self._forward = group, forward
        self._steps = 0
        self._planned = overlap.megabytes is not None and not overlap.into_forward

    def stepped(self) -> None:
        """To be called behind every step, on all ranks; of the last that is looked at a collective call."""
        self._steps += 1
        if self._steps == SKIPPED:
            self._hook.times.clear()
        if self._steps < SKIPPED + SEEN:
            return
        if not self._planned and self._hook.layout is None:
            self._session.flush()
            self._hook.use(self._plan())
        self._planned = True
        if self._forward is not None and not self._forward.at_work:
            self._forward.begin()

    def _plan(self) -> MessagePlan:
        """The plan of the first rank, as each has its own times."""
        ring = ring_cost(self._group)
        hops = 2 * (self._group.size() - 1)
        link = Link(ring.latency * hops, ring.rate * self._group.size() / max(hops, 1))
        mine = MessagePlan(tuple(tuple(each) for each in self._messages(link)))
        plan = MessagePlan(
            tuple(tuple(each) for each in json.loads(said(json.dumps(mine.messages), self._group)[0]))
        )
        if self._group.rank() == 0:
            sizes = [sum(self._named[name].nbytes for name in each) / 1e6 for each in plan.messages]
            _log.info(
                "%s: %d messages of %.2g to %.2g MB are planned, for links that carry %.4g Mbit/s of a "
                "gradient and take %.2g ms a message",
                *(self._session.strategy.name, len(sizes), min(sizes), max(sizes)),
                *(8e-6 * link.rate, 1e3 * link.latency),
            )
        return plan

    def _messages(self, link: Link) -> tuple[tuple[str, ...], ...]:
        share = self._share()
        needed = {} if self._forward is None else self._forward.needed
        ready = {name: median(times) for name, times in self._hook.times.ready.items()}
        last = max(ready.values(), default=0.0)  # what had no gradient on this rank comes with DDP's buckets
        found = [
            Gradient(name, share * p.nbytes, ready.get(name, last), needed.get(name, 0), f"{p.dtype}")
            for name, p in self._named.items()
        ]
        found.sort(key=lambda each: each.ready)
        if not self._overlap.into_forward:
            return merged(found, link).messages
        megabytes, credit = self._overlap.megabytes, self._overlap.credit
        most = None if megabytes is None else 1e6 * megabytes
        return by_priority(found, link, most, 1e6 * (credit or 0.0)).messages

    def _share(self) -> float:
        """What a gradient's bytes are on the wire, for each byte of it, by the compressor's formulas."""
        peers = self._session.transport.place(WORLD).peers
        dense = 2 * (peers - 1) / peers * sum(p.nbytes for p in self._named.values())
        return sum(cost.sent.total() for cost in self._session.store.costs) / dense if dense else 1.0
