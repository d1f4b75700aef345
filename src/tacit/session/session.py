"""A strategy at work on named tensors."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tacit.contracts import WORLD, Outcome, Request, ScheduleState, Transport
from tacit.errors import NonFinite, PeerLost, RoundError, TacitError
from tacit.exchange.combinators import say
from tacit.exchange.health import overflow
from tacit.exchange.lane import Job, Lane, StreamLane, drive
from tacit.overlap import Delayed
from tacit.session.buckets import Bucket, Policy, StateSlice, fitting
from tacit.session.description import detail, sentence
from tacit.session.health import MEANS, BucketHealth, DeviceReport, Report, mark
from tacit.session.nonfinite_origin import Origin, beginnings, decode, encode
from tacit.session.plan import SessionContext
from tacit.session.rescaling import Rescaling
from tacit.session.state import StateStore
from tacit.session.stats import KEPT, CommStats, RoundTimer
from tacit.session.topology_choice import choose
from tacit.strategy import Strategy
from tacit.transports.devices import ByDevice
from tacit.transports.meter import Cost, counted
from tacit.transports.wire import divide_

T = TypeVar("T")

SCALER_HINT = ". With a GradScaler, write attach(..., scaler=scaler): such a step is then passed over"

SHOWN = ("period", "delay", "local")
"""The keys of a schedule's memory that are worth showing where they change."""


@dataclass(eq=False)
class PendingRound:
    """One round of some buckets, from its start until all of them have landed.

    Attributes:
        moment: when it began: the step, the number of the round, the learning rate.
        parted: whether the ranks of a node may differ in what they give.
        beside: how many exchanges of it that are none of a bucket have not ended.
        sent: bytes that this rank has sent in it, by the collectives' formulas.
        seconds: how long it was under way, once it has landed.
        rates: the learning rates of the parameters whose residual is rescaled in it.
        idle: the parameters that took no part in backward on any rank.
        over: set when it has landed, or has failed.
        judged: whether what the device has noted of it was read, and nothing was wrong.
        began: when that was on the device, where the host does not wait for it; and then `pending`: what is
            to be read when the device has come so far.
    """

    buckets: tuple[int, ...]
    moment: Mapping[str, Any]
    diverged_in_node: bool = False
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    beside: int = 0
    sent: int = 0
    skipped: bool = False
    seconds: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)
    idle: set[str] = field(default_factory=set)
    timer: RoundTimer = field(default_factory=RoundTimer)
    over: threading.Event = field(default_factory=threading.Event)
    ended: bool = False
    judged: bool = False
    began: Any = None
    device_report: DeviceReport | None = None


class Session:
    """A strategy at work on named tensors.

    State is made eagerly, by a dry run of one exchange of every bucket on meta tensors. A round exchanges
    every bucket once; the new states replace the old ones only when all buckets have landed, so that a round
    that fails leaves no trace.

    Args:
        strategy: what to do.
        named: the trainable parameters, by name.
        transport: answers the requests.
        names: the buckets: which parameters travel together, in which order.
        policy: chooses each parameter's compressor; None: the strategy's, and dense for parameters of fewer
            than two dimensions where the compressor exempts them.
        lr: reads the present learning rate.
        memory: what else the rounds need to know of the training.
        rates: reads the present learning rate of each parameter; for what is owed of gradients.
        idle: see `SessionContext`.
        seed: part of every random draw.
        trained: the names of what DDP would exchange; all where not said.
        device: see `SessionContext`.
        in_stream: whether exchanges run on a device in stream order, and the host waits for none of them:
            what went wrong in a round is then noted there, and `verify` reads it. Else each is looked at.
    """

    def __init__(
        self,
        strategy: Strategy,
        named: Mapping[str, Tensor],
        transport: Transport,
        names: Sequence[Sequence[str]],
        policy: Policy | None = None,
        lr: Callable[[], float] = lambda: 0.0,
        schedule_state: ScheduleState | None = None,
        rates: Callable[[], Mapping[str, float]] | None = None,
        idle: Callable[[str], bool] | None = None,
        seed: int = 0,
        trained: Collection[str] | None = None,
        device: torch.device | None = None,
        in_stream: bool = False,
    ) -> None:
        self.step = 0
        self.round = 0
        """How many rounds have landed; `begun`, how many have left."""
        self.begun = 0
        self.posted, self.posted_at = 0, time.monotonic()
        """How many exchanges this rank has given to its lane, and when the last of them."""
        self.failure: BaseException | None = None
        self.scale: Callable[[], float | Tensor] | None = None
        """Reads the factor on all gradients, where a GradScaler puts one: what is not finite then makes the
        round void on all ranks, where without it it is an error. On the device where `in_stream`."""
        self.in_stream = in_stream
        self.skipped = False
        """Whether the last round was void: all buckets have landed, and no state was kept."""
        self.rate: Callable[[int], float] | None = None
        """Reads the present learning rate of a bucket, where not all have the same."""
        self.explain: Callable[[BaseException], BaseException] = lambda error: error
        self.tell: Callable[[BaseException], None] = lambda error: None
        """Called with an error that all ranks of the scope know of, and no others."""
        self.origin: Callable[[int], Origin | None] = lambda step: None
        """Where what is not finite began on this rank, as seen from a step; None where that is not known."""
        self.stats = CommStats()
        self.schedule_log: deque[tuple[int, ScheduleState]] = deque(maxlen=KEPT)
        """(step, values): what of the memory is worth showing, noted where it changes; the last thousand."""
        self.more_stages: Mapping[str, int] = {}
        """How many times what is submitted beside the buckets speaks on each axis."""
        self.replicated_in_node: frozenset[str] = frozenset()
        """What the ranks of a node have alike after every step, but where the rounds have parted them."""
        self._leader: Session | None = None
        self.schedule_state = {**strategy.rounds.start(), **(schedule_state or {})}
        self.transport = transport
        named_ = named if trained is None else {name: named[name] for name in trained}
        self._dense = sum(p.numel() * p.element_size() for p in named_.values())
        self._lr = lr
        self._lane: Lane | StreamLane | None = None
        self._host_lane: Lane | None = None
        self._unverified: list[PendingRound] = []
        self._ending = threading.Lock()
        self._heard = False
        self._pending: dict[int, PendingRound] = {}
        policy = policy or fitting(strategy.compressor, named)
        session_context = SessionContext(
            strategy.topology, transport, dict(named), policy, idle, seed, device, in_stream
        )
        self.choice = choose(session_context, names)
        """The topology at work, and how it compares where the strategy leaves it open; for good."""
        self.strategy = replace(strategy, topology=self.choice.topology)
        self._context = replace(session_context, topology=self.choice.topology)
        self._hold(names)
        self.rescaling = Rescaling(rates or dict) if strategy.subject == "gradient" else None
        """What is owed of gradients follows the learning rate; progress is in units of the parameters."""

    @property
    def schedule_state(self) -> ScheduleState:
        """What the rounds remember, and need to know of the training; for rounds that follow, the others'."""
        return self._memory if self._leader is None else self._leader.schedule_state

    @schedule_state.setter
    def schedule_state(self, schedule_state: ScheduleState) -> None:
        self._memory = schedule_state
        shown = {key: schedule_state[key] for key in SHOWN if key in schedule_state}
        if shown != (self.schedule_log[-1][1] if self.schedule_log else {}):
            self.schedule_log.append((self.step, shown))

    def follow(self, leader: Session) -> None:
        """Go by what the rounds of this one remember."""
        self._leader = leader

    # ---- buckets and their states ------------------------------------------------------------------------

    @property
    def buckets(self) -> list[Bucket]:
        """Which parameters travel together."""
        return self._store.buckets

    @property
    def costs(self) -> list[Cost]:
        """What a round of each bucket costs this rank at most; `metrics` counts what was really posted."""
        return self._store.costs

    @property
    def ranks(self) -> list[int]:
        """The replicas that agree in a round."""
        return self._context.ranks

    @property
    def parties(self) -> int:
        """How many meet where compressors meet: the replicas, or by node, the nodes."""
        return self._context.coordinate.here.peers

    @property
    def by_node(self) -> bool:
        """Whether the ranks of a node share out what crosses between nodes."""
        return self._context.by_node

    @property
    def stages(self) -> dict[str, int]:
        """How many times the longest exchange speaks on each axis; see `StateStore.stages`."""
        return dict(Counter(self._store.stages) | Counter(self.more_stages))

    def rebucket(self, names: Sequence[Sequence[str]], carry: bool = True) -> None:
        """Travel in these buckets from now on; state follows its parameters. Not during a round.

        A collective call where ranks share the buckets out: what a rank keeps may now be another's. Not one
        without `carry`: then all state is as it is at first.
        """
        before = self.whole_state() if carry else {}
        self._hold(names)
        with self._explaining():
            self.transport.open(self.stages)
        self.restore({key: kept.tensor for key, kept in before.items()})

    def _hold(self, names: Sequence[Sequence[str]]) -> None:
        self._store = StateStore(self._context, names)
        ranks, me = len(self.ranks), self._context.me
        self._healths = [
            BucketHealth(bucket, nonfinite_flags, ranks, me)
            for bucket, nonfinite_flags in zip(self.buckets, self._store.words, strict=True)
            if self.in_stream
        ]

    def named_state(self) -> dict[tuple[str, str], StateSlice]:
        """All state that this rank keeps, by (parameter, field)."""
        return self._store.named_state()

    def widths(self) -> dict[tuple[str, str], tuple[bool, int]]:
        """Of each (parameter, field) whether all ranks keep it in common, and its number of elements."""
        return self._store.widths()

    def gathered(self) -> Generator[Request, Any, dict[tuple[str, str], StateSlice]]:
        """All state of this rank's node, put together from what its ranks keep; see `StateStore.gathered`."""
        return self._store.gathered()

    def whole_state(self) -> dict[tuple[str, str], StateSlice]:
        """See `gathered`. A collective call where ranks share the buckets out.

        Raises:
            RoundError: it failed.
        """
        return self.drive(self.gathered())

    def drive(self, exchange: Generator[Request, Any, T], param: str = "alone") -> T:
        """Run an exchange to its end in this thread, where nothing else is under way.

        Raises:
            RoundError: it failed.
        """
        with self._explaining():
            return drive(exchange, self.transport, param)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Say of a failed collective whose fault it was, as the lane does."""
        try:
            yield
        except RuntimeError as error:
            found = self._explained(error)
            self.failure = self.failure or found
            raise found from (None if found is error else error)

    def restore(self, whole: Mapping[tuple[str, str], Tensor]) -> set[str]:
        """Take what is this rank's of the state that `gathered` gave; see `StateStore.restore`."""
        return self._store.restore(whole)

    def residuals(self, name: str) -> list[str]:
        """In which field ranks owe of a parameter, if in one; see `StateStore.residuals`."""
        return self._store.residuals(name)

    # ---- one exchange ---------------------------------------------------------------------------------

    def open(self, i: int, x: Tensor) -> Generator[Request, Any, Outcome]:
        """The exchange of bucket `i`; its mean overwrites `x`, which is flat.

        Raises:
            NonFinite: `x` holds NaN or infinity on some rank, and there is no `scale`; raised on all of them,
                naming the parameter and the rank.
        """
        if self.in_stream:
            return (yield from self._open_in_stream(i, x))
        bucket, nonfinite_flags, me = self.buckets[i], self._store.words[i], self._context.me
        pending = self._pending_of(i)
        scale = self._scale_of(bucket)
        assert not isinstance(scale, Tensor), "a factor on a device is for what is in stream"
        nonfinite_flags.zero_()
        if len(nonfinite_flags) > len(self.ranks):
            nonfinite_flags[len(self.ranks) :] = torch.tensor(self._idle_here(bucket))
        finite_probe, independent = None, self.strategy.topology.independent
        if bucket.compressor.hides_nonfinite or independent:
            nonfinite_flags[me] = self._first_broken(bucket, x, scale, pending)
        else:
            finite_probe = torch.zeros(MEANS)
            if scale != 1.0:
                x.div_(scale)
        outcome = yield from self._talk(i, x, pending, finite_probe=finite_probe)
        if scale != 1.0:
            x.mul_(scale)
        nonfinite_flags, idle = nonfinite_flags[: len(self.ranks)], nonfinite_flags[len(self.ranks) :]
        self._note_idle(bucket, idle, pending)
        if finite_probe is None:
            self._check(bucket, nonfinite_flags, pending)
        # In types of two bytes a level may be beyond what the entry was, and so beyond the type.
        if (finite_probe is not None or bucket.dtype.itemsize < 4) and not _finite(outcome.mean):
            if independent:
                self._check_mean(bucket, outcome.mean, nonfinite_flags, pending)
            if self.scale is not None:  # the mean is equal on all ranks, so all of them see it
                pending.skipped = True
                return outcome
            nonfinite_flags.zero_()
            nonfinite_flags[me] = (
                0.0 if finite_probe is None else self._told_place(_first_infinite(finite_probe), pending)
            )
            yield from say(nonfinite_flags, self.strategy.topology.scope)
            self._check_mean(bucket, outcome.mean, nonfinite_flags, pending)
        return outcome

    def _talk(
        self, i: int, x: Tensor, pending: PendingRound, **more: Any
    ) -> Generator[Request, Any, Outcome]:
        bucket = self.buckets[i]
        moment = pending.moment if self.rate is None else {**pending.moment, "lr": self.rate(i)}
        replicated_in_node = not pending.diverged_in_node and self.replicated_in_node.issuperset(
            param.name for param in bucket.slices
        )
        rescale = self.rescaling.factors(bucket, pending.rates) if self.rescaling and pending.rates else ()
        talk = self._store.talk(
            i, x, replicated_in_node=replicated_in_node, rescale=rescale, **moment, **more
        )
        outcome, sent = yield from counted(talk, self.transport.place)
        pending.sent += sent
        return outcome

    def _open_in_stream(self, i: int, x: Tensor) -> Generator[Request, Any, Outcome]:
        """The same, where what went wrong is noted on the device: `verify` reads it."""
        bucket, health, pending = self.buckets[i], self._healths[i], self._pending_of(i)
        scale = self._scale_of(bucket)
        scaled = isinstance(scale, Tensor) or scale != 1.0
        health.begin(partial(self._idle_here, bucket) if health.tells_of_idle else None)
        if bucket.compressor.hides_nonfinite:
            health.note_given(x)
        if scaled:
            x.div_(scale)
        finite_probe = None if bucket.compressor.hides_nonfinite else health.finite_probe
        outcome = yield from self._talk(i, x, pending, finite_probe=finite_probe, health=health.overflow)
        if scaled:
            x.mul_(scale)
        if finite_probe is not None or bucket.dtype.itemsize < 4:
            health.note_mean(outcome.mean)
        return outcome

    def _idle_here(self, bucket: Bucket) -> list[float]:
        """Of each parameter, whether it took no part in this rank's backward."""
        assert self._context.idle is not None
        return [float(self._context.idle(param.name)) for param in bucket.slices]

    def _note_idle(self, bucket: Bucket, shares: Tensor, pending: PendingRound) -> None:
        """Note which parameters were idle on all ranks: of each the share of ranks, or none is told."""
        for param, share in zip(bucket.slices, shares.tolist(), strict=False):
            if share > 1 - 0.5 / len(self.ranks):  # a mean of ones, but for rounding
                pending.idle.add(param.name)

    def _scale_of(self, bucket: Bucket) -> float | Tensor:
        """What to divide a gradient by: residuals outlive the scaler's factor, and norms are not those of it.

        1 where what arrives scales with what is given: the factor is there to keep it from vanishing on its
        way.
        """
        if self.scale is None or all(each.scales for each in bucket.chosen):
            return 1.0
        return self.scale()

    def _first_broken(self, bucket: Bucket, x: Tensor, scale: float, pending: PendingRound) -> int:
        """Divide `x`; 0 where it is finite, else the number of the parameter in which it began not to be.

        Where a round can be void, `x` then becomes zeros, which no compressor minds.
        """
        finite_probe = torch.zeros(())
        divide_(x, scale, finite_probe)
        if bool(finite_probe.isfinite()) or _finite(x):
            return 0
        broken = [_finite(x[param.start : param.stop]) for param in bucket.slices].index(False)
        if self.scale is not None:
            x.zero_()
        began = self.origin(pending.moment["step"]) or Origin(bucket.slices[broken].name)
        return encode(began, self._names)

    @property
    def _names(self) -> list[str]:
        return [name for bucket in self.buckets for name in bucket.names]

    def told_origin(self, step: int) -> int:
        """Where what is not finite began on this rank, as a number for `origins_of`; 0 where not known."""
        began = self.origin(step)
        return 0 if began is None else encode(began, self._names)

    def origins_of(self, numbers: Sequence[float]) -> dict[int, Origin]:
        """What the ranks have told so, of those that have."""
        each = zip(self.ranks, map(round, numbers), strict=True)
        return {rank: decode(number, self._names) for rank, number in each if number > 0}

    def _told_place(self, place: int, pending: PendingRound) -> int:
        """In which mean this rank had it first, and where it had begun."""
        return 0 if not place else place + (MEANS + 1) * self.told_origin(pending.moment["step"])

    def _check(self, bucket: Bucket, nonfinite_flags: Tensor, pending: PendingRound) -> None:
        if not bool(nonfinite_flags.any()):
            return
        if self.scale is not None:
            pending.skipped = True
            return
        # Where replicas go on without each other, the word is this rank's own: nobody has averaged it.
        times = 1 if self.strategy.topology.independent else len(nonfinite_flags)
        found = self.origins_of([float(w) * times for w in nonfinite_flags])
        where = ", ".join(f"{began.name} on rank {rank}" for rank, began in found.items())
        raise self._nonfinite(where, pending.moment["step"], "this rank has pushed nothing", found)

    def _check_mean(
        self, bucket: Bucket, mean: Tensor, nonfinite_flags: Tensor, pending: PendingRound
    ) -> None:
        names = [param.name for param in bucket.slices if not _finite(mean[param.start : param.stop])]
        # The first to have it: what others gave to later means came of the first.
        told = [divmod(round(float(w) * len(nonfinite_flags)), MEANS + 1) for w in nonfinite_flags]
        first = min((place for _, place in told if place), default=0)
        blamed = {rank for rank, (_, place) in zip(self.ranks, told, strict=True) if 0 < place <= first}
        began = self.origins_of([number for number, _ in told])
        began = {rank: origin for rank, origin in began.items() if rank in blamed}
        if blamed and blamed == began.keys():
            names = [*dict.fromkeys(origin.name for origin in began.values())]
        who = ", ".join(map(str, sorted(blamed)))
        where = f"on rank {who}" if who else "summed over the ranks, each of which is finite"
        so = "this rank has taken nothing of what came back"
        raise self._nonfinite(f"{', '.join(names)} {where}", pending.moment["step"], so, began)

    def _nonfinite(self, where: str, step: int, independent: str, found: Mapping[int, Origin]) -> NonFinite:
        """`apart`: what is so where replicas go on without each other; `found`: where it began, by rank."""
        gradient = self.strategy.subject == "gradient"
        what = "the gradient of" if gradient else "the parameter"
        hint = SCALER_HINT if gradient and not self.late else ""
        so = independent if self.strategy.topology.independent else "no rank has applied anything"
        return NonFinite(
            f"NaN or infinity in {what} {where}, in step {step}: {so} of this step. "
            f"{beginnings(found, step)}Lower the learning rate, clip the gradient, or look at the batch{hint}"
        )

    # ---- rounds ---------------------------------------------------------------------------------------

    def talks(self) -> bool:
        """Whether a round follows the step that is under way."""
        return self.strategy.rounds.due(self.step, self.schedule_state)

    def begin(self, buckets: Sequence[int] | None = None) -> PendingRound:
        """Start a round of these buckets, of which none is under way; of all, where not said.

        Raises:
            RoundError: an earlier round of them turns out to have failed.
        """
        self.verify(range(len(self.buckets)) if buckets is None else buckets)
        rounds = self.strategy.rounds
        round_index = rounds.round_index(self.step, self.schedule_state)
        moment = {
            "step": self.step,
            "round": self.begun,
            "lr": self._lr(),
            "round_index": self.begun if round_index is None else round_index,
        }
        diverged_in_node = rounds.diverged_in_node(self.step, self.schedule_state)
        pending = PendingRound(
            tuple(range(len(self.buckets)) if buckets is None else buckets), moment, diverged_in_node
        )
        if self.rescaling is not None:
            pending.rates = self.rescaling.changes()
        self.begun += 1
        self._pending |= dict.fromkeys(pending.buckets, pending)
        return pending

    def _pending_of(self, i: int) -> PendingRound:
        return self._pending[i] if i in self._pending else self.begin()

    def submit(
        self,
        i: int,
        x: Tensor,
        completed: Callable[[], None],
        new_residual: Tensor | None = None,
        ready: Callable[[], None] | None = None,
    ) -> None:
        """Exchange bucket `i` in the lane; `landed` is called there, also after a failure.

        Args:
            owed: `x` once more, from which what the peers have seen of it is taken when they have.
            ready: called in the lane before `x` is read; waits until it may be.
        """
        pending = self._pending_of(i)
        pending.timer.begin()
        bucket = self.buckets[i]
        if self.in_stream and pending.began is None:
            pending.began = mark(bucket.device)

        def complete(outcome: Outcome) -> None:
            if new_residual is not None:
                outcome.sent.subtract_from_(new_residual)
            self.complete(i, outcome)
            completed()

        def fail(error: BaseException) -> None:
            self.failure = error
            pending.over.set()
            completed()

        inline = bucket.compressor.inline and ready is None
        self._post(Job(bucket.name, lambda: self._open_when(ready, i, x), complete, fail, inline))

    def _open_when(
        self, ready: Callable[[], None] | None, i: int, x: Tensor
    ) -> Generator[Request, Any, Outcome]:
        if ready is not None:
            ready()
        return self.open(i, x)

    def submit_beside(
        self,
        pending: PendingRound,
        open: Callable[[], Generator[Request, Any, T]],
        param: str,
        completed: Callable[[T], None],
    ) -> None:
        """Exchange in this round what is none of its buckets, of which none has been submitted yet.

        `landed` is called in the lane, with the answer.
        """
        pending.beside += 1
        pending.timer.begin()

        def complete(answer: tuple[T, int]) -> None:
            found, sent = answer
            completed(found)
            pending.sent += sent
            pending.beside -= 1
            self._ended(pending)

        def fail(error: BaseException) -> None:
            self.failure = error
            pending.over.set()

        self._post(Job(param, partial(self._counted, open), complete, fail), self._beside)

    def _post(self, job: Job, lane: Lane | StreamLane | None = None) -> None:
        self.posted, self.posted_at = self.posted + 1, time.monotonic()
        (lane or self._running).submit(job)

    @property
    def _running(self) -> Lane | StreamLane:
        if self._lane is None and self.in_stream:
            self._lane = StreamLane(self._on_device, self._explained, self._device, self.strategy.name)
        elif self._lane is None:
            self._lane = Lane(self.transport, self._explained, self.strategy.name)
        return self._lane

    @property
    def _beside(self) -> Lane | StreamLane:
        """The lane of what lies on the host."""
        if not isinstance(self.transport, ByDevice):
            return self._running
        if self._host_lane is None:
            self._host_lane = Lane(self.transport.host, self._explained, self.strategy.name)
        return self._host_lane

    @property
    def _on_device(self) -> Transport:
        return self.transport.device if isinstance(self.transport, ByDevice) else self.transport

    @property
    def _device(self) -> torch.device:
        return self.buckets[0].device if self.buckets else torch.device("cpu")

    def inside(self) -> AbstractContextManager[object]:
        """What is launched inside the block goes to the stream of the exchanges, where there is one."""
        return self._lane.inside() if isinstance(self._lane, StreamLane) else nullcontext()

    def waiting(self) -> None:
        """Say that training waits for what is under way from now on: until then it was hidden."""
        for pending in [*self._pending.values(), *self._unverified]:
            if pending.timer.wait() and pending.device_report is not None:
                pending.device_report.waits(mark(self._device))

    def wait(self, pending: PendingRound) -> None:
        """Wait until all lots of this round have landed.

        Raises:
            RoundError: it failed, or an earlier one did.
        """
        if pending.timer.wait() and pending.device_report is not None:
            pending.device_report.waits(mark(self._device))
        pending.over.wait()
        self.raise_failure()
        if pending in self._unverified:
            self._verify(pending)  # that waits on the host, and for no later round

    def ask(self, open: Callable[[], Generator[Request, Any, T]], param: str, of: Tensor | None = None) -> T:
        """The answer to an exchange that is none of a bucket, in its turn behind all that was submitted.

        `of`: what travels, where it is no message of the host's own.

        Raises:
            RoundError: it failed, or an earlier exchange did.
        """
        lane = self._beside if of is None or of.device != self._device else self._running
        found = self._ask_at_once([(open, param)], lane)[0]
        self._join()
        return found

    def _join(self) -> None:
        if isinstance(self._lane, StreamLane):
            self._lane.join()

    def _ask_at_once(
        self,
        asked: Sequence[tuple[Callable[[], Generator[Request, Any, T]], str]],
        lane: Lane | StreamLane | None = None,
    ) -> list[T]:
        answers: dict[int, T] = {}
        over = [threading.Event() for _ in asked]

        def complete(i: int, found: tuple[T, int]) -> None:
            answer, sent = found
            self.stats.sent(sent)
            answers[i] = answer
            over[i].set()

        def fail(i: int, error: BaseException) -> None:
            self.failure = error
            over[i].set()

        waited_for = [pending for pending in [*self._pending.values()] if pending.timer.wait()]
        for i, (open, param) in enumerate(asked):
            opened = partial(self._counted, open)
            self._post(Job(param, opened, partial(complete, i), partial(fail, i)), lane)
        for each in over:
            each.wait()
        for pending in waited_for:
            pending.timer.go_on()
        self.raise_failure()
        return [answers[i] for i in range(len(asked))]

    def _counted(
        self, open: Callable[[], Generator[Request, Any, T]]
    ) -> Generator[Request, Any, tuple[T, int]]:
        return counted(open(), self.transport.place)

    def agree(self, xs: Sequence[Tensor]) -> bool:
        """Whether the buckets need more than a round for all to agree; then `xs` now are what they agree on.

        Of all buckets at once: a server ends a round without the workers that meet, bucket by bucket, and one
        that meets in one bucket and not yet in the next would wait for another that waits for its push there.

        Raises:
            RoundError: it failed, or an earlier exchange did.
        """
        talks = [self.strategy.topology.agree(x) for x in xs]
        asked = [
            (_always(talk), bucket.name)
            for talk, bucket in zip(talks, self.buckets, strict=True)
            if talk is not None
        ]
        if asked:
            self._ask_at_once(asked)
        return bool(asked)

    def complete(self, i: int, outcome: Outcome) -> None:
        """Note that bucket `i` has landed; the last one of a round commits it, unless it is void."""
        pending = self._pending[i]
        pending.outcomes[i] = outcome
        self._ended(pending)

    def _ended(self, pending: PendingRound) -> None:
        with self._ending:  # two lanes may end the last two exchanges of a round at once
            if pending.ended or len(pending.outcomes) < len(pending.buckets) or pending.beside:
                return
            pending.ended = True
            for each in pending.buckets:
                del self._pending[each]
        if not self.in_stream:
            self._keep(pending)
        else:
            with self.inside():
                told = [(i, self._healths[i]) for i in pending.buckets]
                pending.device_report = DeviceReport(told, pending.began)
            self._unverified.append(pending)
        pending.over.set()

    def _keep(self, pending: PendingRound, seconds: tuple[float, float] | None = None) -> None:
        """Keep what a round has led to, unless it is void. `seconds`: as the device measured it."""
        self.skipped = pending.skipped
        if not self.skipped:
            self._store.commit(pending.outcomes, pending.idle)
            if self.rescaling is not None and pending.rates:
                self.rescaling.commit(pending.rates, pending.idle)
        pending.seconds = self.stats.ended(
            pending.timer, self.round, pending.moment["step"], pending.sent, self.skipped, seconds
        )
        self.round += 1

    def verify(self, buckets: Collection[int] | None = None) -> None:
        """Keep the rounds of which the device has noted nothing wrong; a call for what is `in_stream`.

        Waits for the rounds of these buckets, of all where not said, until the device has run them. To be
        called before anything of their answers is applied for good.

        Raises:
            NonFinite: as `open`.
            Overflow: what was finite became too large on the way.
        """
        for pending in [*self._unverified]:
            assert pending.device_report is not None
            due = buckets is None or not set(buckets).isdisjoint(pending.buckets)
            # Early only where that asks nobody anything: other ranks' devices may not have come so far.
            if due or pending.judged or (pending.device_report.done and pending.device_report.quiet):
                self._verify(pending)

    def check(self) -> None:
        """As `verify` of all, but nothing is kept yet: for who launches something now, and has time later.

        Raises:
            NonFinite, Overflow: as `verify`.
        """
        for pending in [*self._unverified]:
            if not pending.judged:
                self._look(pending)

    def _verify(self, pending: PendingRound) -> None:
        if not pending.judged:
            self._look(pending)
        self._unverified.remove(pending)
        assert pending.device_report is not None
        self._keep(pending, pending.device_report.seconds())

    def _look(self, pending: PendingRound) -> None:
        assert pending.device_report is not None
        try:
            reports = pending.device_report.read()
            self.raise_failure()  # a peer may have been lost meanwhile, and its collectives given up
            for i, report in reports.items():
                self._judge(self.buckets[i], report, pending, pending.outcomes[i].mean)
        except TacitError as error:
            self._unverified.remove(pending)
            self.failure = self.failure or (
                self._explained(error) if isinstance(error, RoundError) else error
            )
            self.raise_failure()
        pending.judged = True

    def _judge(self, bucket: Bucket, report: Report, pending: PendingRound, mean: Tensor) -> None:
        """Whether the device has noted anything wrong of a bucket.

        Raises:
            NonFinite, Overflow: it has.
        """
        self._note_idle(bucket, report.idle, pending)
        if report.given and bucket.compressor.hides_nonfinite:
            self._check(bucket, self._told_first(bucket, report, pending), pending)
        if report.overflow and not pending.skipped:
            where = ", ".join(str(self.ranks[place]) for place in report.overflow)
            raise overflow(bucket.name, pending.moment["step"], bucket.dtype, f" of rank {where}")
        if not report.mean:
            return
        if self.scale is not None:
            pending.skipped = True
            return
        told = torch.zeros(len(self.ranks))
        place = 0 if bucket.compressor.hides_nonfinite else _first_infinite(report.finite_probe)
        told[self._context.me] = self._told_place(place, pending)
        self.ask(lambda: say(told, self.strategy.topology.scope), "nonfinite")
        self._check_mean(bucket, mean, told, pending)

    def _told_first(self, bucket: Bucket, report: Report, pending: PendingRound) -> Tensor:
        """What every rank says of the parameter in which it began, as `_check` reads it."""
        told = torch.zeros(len(self.ranks))
        if self.scale is not None:
            return told.fill_(1.0)  # that is all that is asked for
        if report.first is not None:
            began = self.origin(pending.moment["step"]) or Origin(bucket.slices[report.first].name)
            told[self._context.me] = encode(began, self._names)
        self.ask(lambda: say(told, self.strategy.topology.scope), "nonfinite")
        return told

    @property
    def broken(self) -> Tensor | None:
        """Whether the round that has just ended will be void, on the device; None where there is none."""
        if not self._unverified:
            return None
        self._join()
        return torch.stack([self._healths[i].broken for i in self._unverified[-1].buckets]).any()

    def discard(self) -> None:
        """Forget what has landed of an unfinished round."""
        self._pending.clear()
        self._unverified.clear()
        self.begun = self.round

    def resume(self, step: int, round: int, schedule_state: ScheduleState) -> None:
        """Count on from there."""
        self.step, self.round, self.begun, self.schedule_state = step, round, round, schedule_state

    def _explained(self, error: BaseException) -> BaseException:
        # A server knows which connection broke, and the ranks together why: it may have been the second.
        if isinstance(error, PeerLost) or not isinstance(error, RoundError):
            return self.explain(error)
        self.tell(error)
        return error

    def flush(self) -> None:
        """Wait until nothing is under way.

        Raises:
            RoundError: the round under way failed, or an earlier one did.
        """
        self.waiting()
        for lane in (self._lane, self._host_lane):
            if lane is not None:
                lane.flush()
        self.raise_failure()
        self.verify()
        self._join()

    @property
    def late(self) -> bool:
        """Whether rounds are under way while training goes on."""
        return isinstance(self.strategy.overlap, Delayed) or self.strategy.rounds.late

    @property
    def unheard(self) -> bool:
        """Whether a late round has failed, and nobody was told."""
        return self.late and self.failure is not None and not self._heard

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.failure is not None:
            self._heard = True
            raise self.failure

    def close(self) -> None:
        """Drain and end the lane."""
        for lane in (self._lane, self._host_lane):
            if lane is not None:
                lane.close()
        self._lane = self._host_lane = None

    @property
    def summary(self) -> str:
        """What is really at work, in a few words."""
        has_feedback = any(self.residuals(param.name) for bucket in self.buckets for param in bucket.slices)
        return sentence(self.strategy, self.buckets, has_feedback)

    def describe(self) -> list[str]:
        """What is really at work, in lines: the strategy, why this topology, and each bucket."""
        sent = [cost.sent.total() for cost in self.costs]
        return list(detail(self.strategy, self.choice, self.buckets, sent))

    def metrics(self) -> dict[str, float]:
        """The session in numbers.

        `steps`; `rounds`; `void_rounds`, of these, that came to nothing as a scaled gradient overflowed;
        `bytes_out`, sent by this rank by the collectives' formulas; `closing_bytes_out`, sent by closing it;
        `ddp_bytes_out`, what DDP would have sent in as many steps; `compression`, the last over the first;
        `exchange_seconds`, with a round under way; `exposed_seconds`, of these, with training waiting;
        `compute_share`, the share of the time between rounds that was not spent waiting; `lag`, how many
        steps after its round had left an answer was applied, on average.
        """
        self.verify()
        peers = self.transport.place(WORLD).peers
        return self.stats.metrics(self.step, 2 * (peers - 1) / peers * self._dense)


def _always(x: T) -> Callable[[], T]:
    """What gives just this."""
    return lambda: x


def _first_infinite(finite_probe: Tensor) -> int:
    """1 + the place of the first number that is not finite; 0 where all are."""
    broken = finite_probe.isfinite().logical_not().nonzero()
    return 1 + int(broken[0]) if len(broken) else 0


def _finite(x: Tensor) -> bool:
    """Whether all entries are finite: one pass that reads; a second one only if the sum is not."""
    return x.is_meta or bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())
