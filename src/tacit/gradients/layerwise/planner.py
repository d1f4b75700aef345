"""Plans which gradients travel together, and in which order, from the times of the first steps."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.contracts import WORLD
from tacit.exchange.joined_requests import average_
from tacit.gradients.layerwise.forward_steps import ForwardSteps
from tacit.gradients.layerwise.hook import LayerwiseHook
from tacit.gradients.layerwise.message_plan import (
    Gradient,
    Link,
    LinkUse,
    MessagePlan,
    by_priority,
    by_size,
    fitted,
    merged,
)
from tacit.session import Session
from tacit.session.buckets import span_of
from tacit.transports.probing import ring_cost
from tacit.transports.process_groups import gather_texts

SKIPPED, SEEN = 3, 5
"""The rounds that are skipped, as kernels are compiled and DDP's buckets change; and those that are measured.

As many are measured again by the first plan, as a link carries less while ranks compute."""

_PROBED, _PROBES = (1 << 8, 1 << 22), 5
"""The entries of the means by which a device's link is measured, and how often each is taken."""

_log = logging.getLogger("tacit")


class MessagePlanner:
    """Measures the first rounds, plans messages, and lets the hook send them.

    Args:
        hook: takes the gradients.
        session: exchanges them.
        named: the parameters.
        group: the process group of all ranks.
        forward: puts steps off until the next forward pass; None: they are not.
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
        self._overlap, self._hook, self._session, self._named = overlap, hook, session, named
        self._group, self._forward = group, forward
        self._steps = self._tried = 0
        self._idle: Link | None = None
        self._few = LinkUse(0.0, 0.0, 0)

    def stepped(self) -> None:
        """Note a step, on all ranks. A collective call in the steps after which a plan is made."""
        self._steps += 1
        hook = self._hook
        if self._steps == SKIPPED:
            hook.times.clear()
            hook.link.clear()
        if self._steps >= SKIPPED + SEEN and not hook.is_planned:
            self._use(self._first_plan())
        if self._forward is not None and hook.is_at_work and not self._forward.at_work:
            self._forward.begin()
        if self._idle is not None and hook.is_at_work:
            self._tried += 1
            if self._tried == 1:
                hook.link.clear()
            if self._tried == 1 + SEEN:
                link, self._idle = fitted(self._few, hook.link.seen(self._share()), self._idle), None
                self._use(self._agreed(link))

    def _use(self, plan: MessagePlan) -> None:
        if self._forward is not None:
            self._forward.complete()
        self._session.flush()
        self._hook.use(plan)

    def _first_plan(self) -> MessagePlan:
        if self._overlap.megabytes is not None and not self._overlap.into_forward:
            unplanned = [Gradient(name, p.nbytes, 0.0) for name, p in self._named.items()]
            return by_size(self._in_buckets(unplanned), 1e6 * self._overlap.megabytes)
        if self._session.context.in_stream:
            return self._agreed(self._link_of_device())
        ring = ring_cost(self._group)
        hops = 2 * (self._group.size() - 1)
        self._few = self._hook.link.seen(self._share())
        # A message takes processor time from computing, too.
        cost = (ring.trip + ring.per_hop) * hops
        self._idle = Link(cost, ring.rate_of_sums * self._group.size() / max(hops, 1))
        return self._agreed(self._idle)

    def _link_of_device(self) -> Link:
        """What a mean costs in stream order, with nothing else under way: by two sizes. A collective call."""
        device, took = self._session.lanes.device, []
        for size in _PROBED:
            x = torch.zeros(size, device=device, dtype=torch.float32)
            seconds = []
            for _ in range(_PROBES):
                began = perf_counter()
                self._session.ask(partial(average_, x, WORLD), "probe", of=x, counted=False)
                if x.is_cuda:
                    torch.cuda.current_stream(device).synchronize()
                seconds.append(perf_counter() - began)
            took.append(min(seconds))
        small, large = (4 * size for size in _PROBED)
        rate = (large - small) / max(took[1] - took[0], 1e-9)
        return Link(took[0], rate)

    def _agreed(self, link: Link) -> MessagePlan:
        """The plan of the first rank, for all ranks, as each has measured other times."""
        mine = json.dumps(self._planned(link).messages)
        plan = MessagePlan(tuple(tuple(each) for each in json.loads(gather_texts(mine, self._group)[0])))
        if self._group.rank() == 0:
            stretches = [[span_of(member, self._named) for member in each] for each in plan.messages]
            sizes = [
                sum((stop - start) * self._named[name].itemsize for name, start, stop in each) / 1e6
                for each in stretches
            ]
            _log.info(
                "%s: %d messages of %.2g to %.2g MB are planned, for links that carry %.4g Mbit/s of a "
                "gradient and take %.2g ms a message",
                *(self._session.strategy.name, len(sizes), min(sizes), max(sizes)),
                *(8e-6 * link.rate, 1e3 * link.latency),
            )
        return plan

    def _planned(self, link: Link) -> MessagePlan:
        share, cut = self._share(), self._cuttable()
        needed = {} if self._forward is None else self._forward.needed
        ready = self._hook.times.seconds()
        last = max(ready.values(), default=0.0)
        found = self._in_buckets(
            Gradient(
                *(name, share * p.nbytes, ready.get(name, last), needed.get(name, 0)),
                entries=p.numel() if name in cut else 0,
            )
            for name, p in self._named.items()
        )
        if not self._overlap.into_forward:
            return merged(found, link)
        megabytes, credit = self._overlap.megabytes, self._overlap.credit
        most = None if megabytes is None else 1e6 * megabytes
        return by_priority(found, link, most, 1e6 * (credit or 0.0), self._overlap.split)

    def _in_buckets(self, gradients: Iterable[Gradient]) -> list[Gradient]:
        """The gradients in the order of DDP's buckets, which is backward's; no message spans two buckets."""
        by_name = {each.name: each for each in gradients}
        layout = self._hook.buffers.layout
        return [replace(by_name[name], bucket=i) for i, names in enumerate(layout) for name in names]

    def _cuttable(self) -> set[str]:
        """The parameters that may be cut into slices, as their compressors have no state."""
        session = self._session
        kept = {name for name, _ in session.store.named_state()}
        anywhere = [bucket for bucket in session.buckets if isinstance(bucket.edges, range)]
        return {name for bucket in anywhere for name in bucket.names} - kept

    def _share(self) -> float:
        """The bytes on the wire for each byte of a gradient, by the compressor's formulas."""
        peers = self._session.transport.place(WORLD).peers
        dense = 2 * (peers - 1) / peers * sum(p.nbytes for p in self._named.values())
        return sum(cost.sent.total() for cost in self._session.store.costs) / dense if dense else 1.0
