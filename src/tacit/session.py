"""A strategy at work: its lots and their states, its rounds, its lane, its numbers."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.contracts import WORLD, Context, Mean, Outcome, Request, State, Transport
from tacit.engine import Job, Lane
from tacit.errors import NonFinite, RoundError
from tacit.exchanges import fuse, on, totalled
from tacit.lots import Kept, Lot, Policy, cut, make_lots, named_state
from tacit.strategy import Strategy
from tacit.transports.meter import Bill, Rehearsal, rehearse


class Buffers:
    """A lot's second state buffers and scratch memory, allocated at attach as the rehearsal asked."""

    def __init__(self, lot: Lot, state: State, rehearsal: Rehearsal) -> None:
        self.spares = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        self._scratch = {
            key: torch.empty(shape, dtype=dtype, device=lot.device)
            for key, (shape, dtype) in rehearsal.scratched.items()
        }

    def spare(self, field: str, like: Tensor) -> Tensor:
        """See `contracts.Workspace`."""
        return self.spares[field]

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `contracts.Workspace`."""
        return self._scratch[key]


@dataclass(frozen=True)
class RoundRecord:
    """What one round cost on this rank.

    Attributes:
        bytes_out: sent by this rank, by the formulas of the collectives.
        seconds: from the first lot's start to the last one's landing.
        exposed_seconds: of these, how long the training waited.
        apart_seconds: since the round before; None for the first.
    """

    round: int
    step: int
    bytes_out: int
    seconds: float
    exposed_seconds: float
    apart_seconds: float | None


@dataclass
class _Clock:
    first: float = 0.0
    waiting: float | None = None
    last_end: float | None = None


@dataclass
class Totals:
    """Sums over all rounds of a session."""

    rounds: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    apart_seconds: float = 0.0
    exposed_when_apart: float = 0.0


class Session:
    """A strategy at work on named tensors.

    State is made eagerly, by rehearsing one exchange of every lot on meta tensors. A round exchanges every
    lot once; the new states replace the old ones only when all lots have landed, so that a round that fails
    leaves no trace.

    Args:
        strategy: what to do.
        named: the trainable parameters, by name.
        transport: answers the wishes.
        names: the lots: which parameters travel together, in which order.
        policy: chooses each parameter's compressor; None: the strategy's, and dense for parameters of fewer
            than two dimensions where the compressor exempts them.
        lr: reads the present learning rate.
    """

    def __init__(
        self,
        strategy: Strategy,
        named: Mapping[str, Tensor],
        transport: Transport,
        names: Sequence[Sequence[str]],
        policy: Policy | None = None,
        lr: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.strategy = strategy
        self.step = 0
        self.round = 0
        self.failure: BaseException | None = None
        self.explain: Callable[[BaseException], BaseException] = lambda error: error
        self.records: deque[RoundRecord] = deque(maxlen=1000)
        self.totals = Totals()
        self._named = dict(named)
        self._transport = transport
        self._policy = policy or self._default_policy
        self._lr = lr
        self._lane: Lane | None = None
        self._outcomes: dict[int, Outcome] = {}
        self._clock = _Clock()
        self.lots: list[Lot] = []
        self._states: list[State] = []
        self.recut(names)

    def _default_policy(self, name: str, p: Tensor) -> Any:
        compressor = self.strategy.compressor
        return None if compressor.exempts(p.shape) else compressor

    # ---- lots and their states ------------------------------------------------------------------------

    def recut(self, names: Sequence[Sequence[str]]) -> None:
        """Travel in these lots from now on; state follows its parameters. Not during a round."""
        before = self.named_state()
        self.lots = make_lots(names, self._named, self._policy)
        self._states = [lot.compressor.init(lot.like(lot.device)) for lot in self.lots]
        for key, view in self.named_state().items():
            if key in before:
                view.tensor.copy_(before[key].tensor)
        rehearsals = [Rehearsal() for _ in self.lots]
        self.bills = [self._rehearse(lot, r) for lot, r in zip(self.lots, rehearsals, strict=True)]
        self._buffers = [Buffers(*each) for each in zip(self.lots, self._states, rehearsals, strict=True)]
        self._words = [torch.zeros(self._transport.peers(WORLD)) for _ in self.lots]

    def _rehearse(self, lot: Lot, rehearsal: Rehearsal) -> Bill:
        x = lot.like()
        state = lot.compressor.init(x)
        peers = self._transport.peers(WORLD)
        ctx = Context(out=x, work=rehearsal, peers=peers, name=lot.name)
        word = torch.empty(peers, device="meta")
        outcome, bill = rehearse(self._talk(lot, x, state, ctx, word), peers)
        before, after = ({k: v.shape for k, v in each.items()} for each in (state, outcome.state))
        assert before == after, f"{lot.compressor} changes the shape of its state"
        return bill

    def named_state(self) -> dict[tuple[str, str], Kept]:
        """All state by (parameter, field)."""
        views: dict[tuple[str, str], Kept] = {}
        for lot, state in zip(self.lots, self._states, strict=True):
            views |= named_state(lot, state)
        return views

    @property
    def stages(self) -> int:
        """How many times the longest exchange speaks, however lots are cut, and once more after a NaN.

        The larger a lot, the less of it rides along in another message: the largest is all that can be one.
        """
        names = [slot.name for lot in self.lots for slot in lot.slots]
        largest = make_lots(cut(names, self._named, cap=sys.maxsize), self._named, self._policy)
        return 1 + max((self._rehearse(lot, Rehearsal()).stages for lot in largest), default=0)

    # ---- one exchange ---------------------------------------------------------------------------------

    def open(self, i: int, x: Tensor) -> Generator[Request, Any, Outcome]:
        """The exchange of lot `i`; its mean overwrites `x`, which is flat.

        Raises:
            NonFinite: `x` holds NaN or infinity on some rank; raised on all of them, naming the parameter
                and the rank.
        """
        lot, word = self.lots[i], self._words[i]
        ctx = Context(
            out=x,
            work=self._buffers[i],
            peers=self._transport.peers(WORLD),
            rank=self._transport.rank(WORLD),
            step=self.step,
            round=self.round,
            lr=self._lr(),
            name=lot.name,
        )
        word.zero_()
        if lot.compressor.swallows:
            word[ctx.rank] = self._first_broken(lot, x)
            outcome = yield from self._talk(lot, x, self._states[i], ctx, word)
        else:
            outcome = yield from self._talk_openly(lot, x, self._states[i], ctx, word)
        self._check(lot, word)
        return outcome

    def _talk_openly(
        self, lot: Lot, x: Tensor, state: State, ctx: Context, word: Tensor
    ) -> Generator[Request, Any, Outcome]:
        """An exchange whose mean shows a NaN of any rank; only then the ranks ask each other whose it is."""
        total = torch.zeros(())
        outcome = yield from totalled(self._talk(lot, x, state, ctx, word), total)
        if _finite(outcome.mean):
            return outcome
        word[ctx.rank] = 0.0 if bool(total.isfinite()) else 1.0
        yield Mean((word,), WORLD)
        names = [slot.name for slot in lot.slots if not _finite(outcome.mean[slot.start : slot.stop])]
        ranks = [str(rank) for rank, w in enumerate(word) if w > 0]
        raise self._nonfinite(f"{', '.join(names)} on rank {', '.join(ranks)}")

    def _talk(
        self, lot: Lot, x: Tensor, state: State, ctx: Context, word: Tensor
    ) -> Generator[Request, Any, Outcome]:
        talk = self.strategy.topology.conduct(x, lot.compressor, state, ctx)
        if not lot.compressor.swallows:
            return (yield from talk)
        outcome, _ = yield from fuse([talk, on(WORLD, _say(word))])
        assert isinstance(outcome, Outcome)
        return outcome

    def _first_broken(self, lot: Lot, x: Tensor) -> int:
        """0 where `x` is finite, else 1 + the place in the lot of the first parameter that is not."""
        if _finite(x):
            return 0
        return 1 + [_finite(x[slot.start : slot.stop]) for slot in lot.slots].index(False)

    def _check(self, lot: Lot, word: Tensor) -> None:
        if not bool(word.any()):
            return
        peers = self._transport.peers(WORLD)
        found = [(rank, round(float(w) * peers) - 1) for rank, w in enumerate(word) if w > 0]
        where = ", ".join(f"{lot.slots[slot].name} on rank {rank}" for rank, slot in found)
        raise self._nonfinite(where)

    def _nonfinite(self, where: str) -> NonFinite:
        what = "the gradient of" if self.strategy.subject == "gradient" else "the parameter"
        return NonFinite(
            f"NaN or infinity in {what} {where}, in step {self.step}: no rank has applied anything of this "
            "step. Lower the learning rate, clip the gradient, or look at the batch"
        )

    # ---- rounds ---------------------------------------------------------------------------------------

    def submit(self, i: int, x: Tensor, landed: Callable[[], None]) -> None:
        """Exchange lot `i` in the lane; `landed` is called there, also after a failure."""
        if self._lane is None:
            self._lane = Lane(self._transport, self._explained)
        if not self._clock.first:
            self._clock.first = time.perf_counter()

        def land(outcome: Outcome) -> None:
            self.land(i, outcome)
            landed()

        def fail(error: BaseException) -> None:
            self.failure = error
            landed()

        lot = self.lots[i]
        self._lane.submit(Job(lot.name, lambda: self.open(i, x), land, fail, lot.compressor.light))

    def waiting(self) -> None:
        """Say that training waits for the round from now on: until then it was hidden."""
        self._clock.waiting = time.perf_counter()

    def land(self, i: int, outcome: Outcome) -> None:
        """Note that lot `i` has landed; the last one commits the round."""
        self._outcomes[i] = outcome
        if len(self._outcomes) == len(self.lots):
            self._commit()

    def discard(self) -> None:
        """Forget what has landed of an unfinished round."""
        self._outcomes.clear()
        self._clock.first = 0.0

    def _commit(self) -> None:
        for i, outcome in self._outcomes.items():
            old = self._states[i]
            self._states[i] = dict(outcome.state)
            for name, tensor in outcome.state.items():
                if tensor is self._buffers[i].spares.get(name):
                    self._buffers[i].spares[name] = old[name]
        self._outcomes.clear()
        self._record()
        self.round += 1

    def _record(self) -> None:
        now, clock = time.perf_counter(), self._clock
        record = RoundRecord(
            round=self.round,
            step=self.step,
            bytes_out=sum(sum(bill.sent.values()) for bill in self.bills),
            seconds=now - clock.first,
            exposed_seconds=now - clock.waiting if clock.waiting else 0.0,
            apart_seconds=now - clock.last_end if clock.last_end else None,
        )
        self._clock = _Clock(last_end=now)
        self.records.append(record)
        totals = self.totals
        totals.rounds += 1
        totals.bytes_out += record.bytes_out
        totals.seconds += record.seconds
        totals.exposed_seconds += record.exposed_seconds
        if record.apart_seconds is not None:
            totals.apart_seconds += record.apart_seconds
            totals.exposed_when_apart += record.exposed_seconds

    def _explained(self, error: BaseException) -> BaseException:
        return error if isinstance(error, RoundError) else self.explain(error)

    def flush(self) -> None:
        """Wait until nothing is under way.

        Raises:
            RoundError: the round under way failed, or an earlier one did.
        """
        if self._lane is not None:
            self._lane.flush()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Drain and end the lane."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    def metrics(self) -> dict[str, float]:
        """The session in numbers.

        `rounds`, `steps`; `bytes_out`, sent by this rank by the collectives' formulas; `exchange_seconds`,
        with a round under way; `exposed_seconds`, of these, with training waiting; `compute_share`, the share
        of the time between rounds that was not spent waiting; `compression`, dense bytes over sent bytes.
        """
        totals = self.totals
        dense = sum(lot.numel * lot.dtype.itemsize for lot in self.lots) * totals.rounds
        peers = self._transport.peers(WORLD)
        share = totals.exposed_when_apart / totals.apart_seconds if totals.apart_seconds else 0.0
        return {
            "steps": self.step,
            "rounds": totals.rounds,
            "bytes_out": totals.bytes_out,
            "exchange_seconds": totals.seconds,
            "exposed_seconds": totals.exposed_seconds,
            "compute_share": 1.0 - share,
            "compression": 2 * (peers - 1) / peers * dense / totals.bytes_out if totals.bytes_out else 1.0,
        }


def _say(word: Tensor) -> Generator[Request, Any, None]:
    yield Mean((word,))


def _finite(x: Tensor) -> bool:
    """Whether all entries are finite: one pass that reads; a second one only if the sum is not."""
    return x.is_meta or bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())
