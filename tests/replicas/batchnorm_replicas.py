"""Replicas of a small network with BatchNorm in threads of one process, for every way to apply an answer."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from in_threads import in_threads
from tacit.checkpoint import session_state
from tacit.contracts import Collective, Posted, PushPull
from tacit.replicas.buffers import ReplicaBuffers
from tacit.replicas.fragments import fragments
from tacit.replicas.replica import LiveTensors
from tacit.replicas.rounds_after_step import OptimizerHook
from tacit.session import Session, Training
from tacit.session.buckets import group_names
from tacit.stores.messages import Message
from tacit.stores.protocol import FrameKind
from tacit.stores.server.parameter_service import ParameterService
from tacit.stores.service import Sender
from tacit.strategy import Strategy
from tacit.testing.ranks import RankWithServer
from tacit.transports.loopback import Answer, Loopback
from tacit.transports.message_layout import nbytes

LR = 0.1


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


class WithServer(RankWithServer):
    """The transport of a worker that has a parameter server too, in the same process."""

    def __init__(self, net: Loopback, rank: int, buckets: dict[str, AtServer]) -> None:
        super().__init__(net, rank)
        self._me, self._buckets = rank, buckets

    def post(self, request: Collective, stage: int, key: str) -> Posted:
        if not isinstance(request, PushPull):
            return super().post(request, stage, key)
        return self._buckets[key].push(self._me, request)


class AtServer:
    """A bucket at the server; its messages are taken one after the other."""

    def __init__(self, strategy: Strategy, x: Tensor, workers: int) -> None:
        back = strategy.topology.back(x)  # type: ignore[attr-defined]
        self._service = ParameterService(workers, strategy.topology, back)  # type: ignore[arg-type]
        self._state, self._clocks = self._service.start(), [0] * workers
        self._lock = threading.Lock()
        for worker in range(workers):
            for each in (Message(FrameKind.ENTER), Message(FrameKind.OFFER, payloads=((x,),))):
                _, self._state = self._service.on(Sender(worker, 1), each, self._state)

    def push(self, worker: int, ask: PushPull) -> Posted:
        answer = Answer(sum(map(nbytes, ask.payloads)))
        with self._lock:
            self._clocks[worker] += 1
            payloads = tuple(tuple(t.clone() for t in payload) for payload in ask.payloads)
            push = Message(FrameKind.PUSH, self._clocks[worker], payloads, ask.pieces, ask.pulls, ask.lr)
            replies, self._state = self._service.on(Sender(worker, 1), push, self._state)
            (reply,) = replies
            assert reply.refused is None, reply.refused
            answer.give(tuple(tuple(t.clone() for t in payload) for payload in reply.payloads))
        return answer


@dataclass
class Member:
    """One rank; also what `tacit.checkpoint` keeps of a level."""

    module: nn.Module
    session: Session
    progress: OptimizerHook
    strategy: Strategy
    gradient: None = None
    taken: None = None

    def save(self) -> dict[str, object]:
        self.session.flush()
        return {
            "module": copy.deepcopy(self.module.state_dict()),
            "tacit": session_state.save(self.strategy, [self]),
        }

    def load(self, saved: Mapping[str, object]) -> None:
        self.module.load_state_dict(saved["module"])  # type: ignore[arg-type]
        session_state.load(saved["tacit"], self.strategy, [self])  # type: ignore[arg-type]


class Normed:
    """Replicas of P ranks, all with the same strategy."""

    def __init__(
        self,
        strategy: Strategy,
        peers: int = 3,
        make: Callable[[], nn.Module] = network,
        schedule_state: dict[str, float] | None = None,
        rates: Mapping[str, float] | None = None,
        share: Callable[[int], float] = lambda rank: 1.0,
    ) -> None:
        self.net, services = Loopback(peers), dict[str, AtServer]()
        self._peers, self._strategy = peers, strategy
        self._make, self._memory, self._rates, self._share = make, schedule_state, rates, share
        self.members = [self._member(rank, services) for rank in range(peers)]
        apart = strategy.independent
        for bucket in self.members[0].session.buckets if apart else ():
            named = LiveTensors(self.members[0].module, [param.name for param in bucket.slices])
            x = torch.cat([each.detach().reshape(-1) for each in named.values()])
            services[bucket.name] = AtServer(strategy, x, peers)

    def _member(self, rank: int, services: dict[str, AtServer]) -> Member:
        strategy, module = self._strategy, self._make()
        named = dict(module.named_parameters())
        apart = strategy.independent
        floats = [name for name, b in module.named_buffers() if b.is_floating_point()]
        tensors = {**named, **(dict(LiveTensors(module, floats)) if apart else {})}
        buckets = [
            bucket
            for part in fragments(tensors, strategy.parts)
            for group in ([n for n in part if n in named], [n for n in part if n not in named])
            for bucket in group_names(group, tensors, cap=200)
        ]
        rates = self._rates or dict.fromkeys(named, LR)
        session = Session(
            strategy,
            tensors,
            WithServer(self.net, rank, services),
            buckets,
            policy=lambda name, _: strategy.compressor if name in named else None,
            training=Training(rates=lambda: rates, schedule_state=self._memory),
        )
        names = [name for name, _ in module.named_buffers()]
        buffers = None if apart else ReplicaBuffers(session, LiveTensors(module, names), self._share(rank))
        variances = [name for name in floats if name.endswith("running_var")]
        door = OptimizerHook(
            session,
            LiveTensors(module, tensors),
            self._share(rank),
            lambda: rates,
            buffers,
            variances if apart else (),
        )
        return Member(module, session, door, strategy)

    def each(self, work: Callable[[int, Member], None]) -> None:
        """Have every replica do it, in a thread of its own."""
        in_threads(len(self.members), lambda rank: work(rank, self.members[rank]), seconds=60)

    def train(
        self,
        steps: int,
        after: Callable[[int, int, nn.Module], None] = lambda rank, step, module: None,
        spread: float = 0.14,
    ) -> None:
        """Steps of SGD on data of each rank's own; `after` is called with the rank, the step, the module."""

        def work(rank: int, member: Member) -> None:
            for _ in range(steps):
                step, module = member.session.step, member.module
                g = torch.Generator().manual_seed(1000 * step + rank)
                x = spread * torch.randn(16, 6, generator=g)
                y = torch.randint(0, 3, (16,), generator=g)
                module.zero_grad()
                loss = nn.functional.cross_entropy(module(x), y)
                loss.backward()
                member.progress.observations.observe(1.0)
                with torch.no_grad():
                    for p in module.parameters():
                        p.sub_(LR * p.grad)  # type: ignore[operator]
                member.progress.after_step()
                after(rank, step, module)

        self.each(work)

    def sync(self) -> None:
        self.each(lambda _, member: member.progress.sync())

    def close(self) -> None:
        for member in self.members:
            member.session.close()
