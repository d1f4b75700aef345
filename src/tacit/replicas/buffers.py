"""Buffers of replicas that step alone: BatchNorm's statistics, and other buffers of modules."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tacit.contracts import NET, NODE, AllGatherInto, AllReduce, ReduceScatter, Request
from tacit.described import checksum
from tacit.errors import AttachError, NonFinite
from tacit.exchange.joined_requests import average_, gather
from tacit.model.not_copied import ForwardSync
from tacit.model.trained_model import TrainedModel
from tacit.session import PendingRound, Session
from tacit.session.buckets import StateSlice
from tacit.session.health.nonfinite_origin import Origin, beginnings
from tacit.torch_compat import is_normalising

COMMON, MOVES, ARRIVED, MOVED = "buffer_anchor", "buffer_changes", "buffer_mean", "buffer_has_mean"
"""A checkpoint's fields of a buffer: its last value that was equal on all ranks, whether it has changed
since, the mean that was received and is not yet applied, and whether there is one.
"""

_MEANS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The types that have a mean."""
_IGNORE = (
    "write DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [name]) before you "
    "wrap the module"
)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_log = logging.getLogger("tacit")

_BufferExchange = Generator[Request, Any, dict[int, Tensor]]


class ReplicaBuffers:
    """Averages floating-point buffers along with the rounds that exchange deltas.

    A buffer is not trained, so merges, outer steps and compressors do not apply to it: its value is sent
    densely, and the answer is the mean, which lies between the smallest value and the largest. A mean that
    comes at once replaces the buffer. A late one is averaged with the replica's present value, as otherwise
    all that was gathered in the meantime would be lost.

    A round is usually one message. It has the values of the buffers that had changed on any rank in the round
    before; and for each buffer whether it has changed on this rank since it was last equal on all ranks, and
    whether it holds NaN or infinity. Buffers that begin to change follow in a second message, as do those
    with infinities, of which entries that are equal on all ranks stay as they are. So masks and tables, which
    never change, are not sent.

    Buffers of other types (counters, flags) have no mean and stay as they are on each rank; at the end and in
    `session.sync()` they become those of the first rank, as with DDP.

    Args:
        session: they are sent in its rounds.
        named: the buffers, looked up again in each round.
        share: the weight of this rank in the mean; 1 on average over the ranks.
    """

    def __init__(self, session: Session, named: Mapping[str, Tensor], share: float = 1.0) -> None:
        self._session, self._named, self._share = session, named, share
        self._scope = session.strategy.topology.scope
        self._names = [name for name, b in named.items() if b.dtype in _MEANS and b.numel()]
        self._others = [name for name, b in named.items() if b.dtype not in _MEANS and b.numel()]
        first = [named[name].detach().cpu() for name in self._names]
        self._shapes = [each.shape for each in first]
        self._common = [each.clone(memory_format=torch.contiguous_format).view(-1) for each in first]
        double = any(each.dtype == torch.float64 for each in first)
        self._kind = torch.float64 if double else torch.float32
        self._arrived = [
            torch.zeros(each.numel(), dtype=self._kind) if session.strategy.late else None for each in first
        ]
        self._moved = torch.zeros(len(first), dtype=torch.float32)
        self._moves = torch.zeros(len(first), dtype=torch.float32)
        self._fresh: dict[int, Tensor] = {}
        self.forget()
        self._pack([])

    def forget(self) -> None:
        """Forget which buffers are equal on all ranks or hold NaN, as a checkpoint may have been loaded."""
        self._odd: list[bool | None] = [None for _ in self._names]
        self._unlike: frozenset[int] | None = None

    @staticmethod
    def stages(session: Session) -> dict[str, int]:
        """The most messages of a round on each axis."""
        return {session.strategy.topology.scope: 2, **({NODE: 2, NET: 1} if session.context.by_node else {})}

    # ---- a round --------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Copy the present values into the message of the next round.

        Raises:
            AttachError: a buffer has another shape than when the session began.
        """
        if not self._names:
            return
        self._step = self._session.step
        if self._unlike is None:
            self._unlike = frozenset(self._differing(self._names))
        if (moving := self._moves.nonzero().view(-1).tolist()) != [*self._spans]:
            self._pack(moving)
        changed, self._fresh = [], {}
        for i, name in enumerate(self._names):
            b = self._row(i, self._named[name])
            changed.append(i in self._unlike or not torch.equal(_bits(b), _bits(self._common[i])))
            if changed[i] or self._odd[i] is None:
                self._odd[i] = not bool(b.isfinite().all())
            if i in self._spans:
                self._values[slice(*self._spans[i])].copy_(b)
            elif changed[i]:
                self._fresh[i] = b.to(self._kind, copy=True)
        values, flags = self._message[: len(self._values)], self._message[len(self._values) :]
        values.copy_(self._values)
        for i, span in self._spans.items():
            if self._odd[i]:
                values[slice(*span)] = 0.0  # it is sent in the second message
        if self._share != 1.0:
            values.mul_(self._share)
        flags.copy_(torch.tensor([changed, self._odd], dtype=self._kind).view(-1))

    def leave(self, pending: PendingRound) -> None:
        """Send the message that `collect` has prepared, in this round."""
        if self._names:
            self._session.submit_beside(pending, self._talk, "buffers", self._note)

    def complete(self, lag: int) -> None:
        """Apply the means that were received; `lag`: how many steps after the round was sent."""
        with torch.no_grad():
            for i in self._moved.nonzero().view(-1).tolist():
                arrived, common = self._arrived[i], self._common[i]
                assert arrived is not None
                common.copy_(arrived)
                buffer = self._same(i, self._named[self._names[i]])
                mean = common.view(self._shapes[i]).to(buffer.device)
                if lag == 0:
                    buffer.copy_(mean)
                else:
                    buffer.mul_(0.5).add_(mean, alpha=0.5)
        self._moves.copy_(self._moved)
        self._moved.zero_()
        self._unlike = frozenset()

    def forget_arrived(self) -> None:
        """Forget the means that have come in a round that has failed."""
        self._moved.zero_()

    def average(self) -> None:
        """Average the buffers now. A collective call.

        Raises:
            NonFinite: a buffer holds NaN or infinity.
        """
        if self._names:
            self.collect()
            self._note(self._ask(self._talk()))
            self.complete(0)

    def copy_first(self) -> None:
        """Overwrite buffers without a mean (counters, flags) by the first rank's. A collective call."""
        if unlike := self._differing(self._others):
            names = [self._others[i] for i in unlike]
            rows = [_bytes(self._named[name]) for name in names]
            x = torch.cat(rows)
            self._ask(_of_the_first(x, len(self._session.ranks), self._scope))
            at = 0
            for name, row in zip(names, rows, strict=True):
                b = self._named[name]
                with torch.no_grad():
                    b.copy_(x[at : at + len(row)].clone().view(b.dtype).view(b.shape))
                at += len(row)

    # ---- the exchange ---------------------------------------------------------------------------------

    def _talk(self) -> _BufferExchange:
        """The mean of each buffer that has changed on any rank, by the buffer's number."""
        message, n = self._message, len(self._names)
        if self._session.context.by_node:
            yield from _by_node(message, self._session.transport.place(NODE))
        else:
            yield from average_(message, self._scope)
        flags = (message[len(self._values) :] > 0).tolist()
        changed = [i for i in range(n) if flags[i]]
        rest = [i for i in changed if i not in self._spans or flags[n + i]]
        found = {i: message[slice(*self._spans[i])] for i in changed if i not in rest}
        if rest:
            found |= yield from self._compared(rest)
        return found

    def _compared(self, which: Sequence[int]) -> _BufferExchange:
        """The means of these buffers; entries that are not finite must be the same on all ranks."""
        began = torch.tensor([self._session.nonfinite.origin_code(self._step)], dtype=self._kind)
        mine = torch.cat([*(self._mine(i) * self._share for i in which), began])
        every = torch.stack((yield from gather(mine, self._scope)))
        found, broken, at = {}, [], 0
        for i in which:
            theirs = every[:, at : at + self._common[i].numel()]
            at += self._common[i].numel()
            equal = (_bits(theirs) == _bits(theirs[:1])).all(0)
            old = _bits(theirs[0]) == _bits(self._common[i].to(self._kind))
            may_be = theirs.isfinite().all(0) | (equal & (theirs[0].isinf() | old))
            if not bool(may_be.all()):
                broken.append(
                    (self._names[i], (~theirs.isfinite() & ~may_be).any(1).nonzero().view(-1).tolist())
                )
            mean = (theirs / len(theirs)).cumsum(0)[-1]  # in rank order, so that all get the same bits
            found[i] = torch.where(equal & ~theirs[0].isfinite(), theirs[0], mean)
        if broken:
            raise self._nonfinite(broken, self._session.nonfinite.origins_of(every[:, -1].tolist()))
        return found

    def _mine(self, i: int) -> Tensor:
        if i in self._fresh:
            return self._fresh[i]
        if i in self._spans:
            return self._values[slice(*self._spans[i])]
        return self._common[i].to(self._kind)  # it has changed only on other ranks

    def _note(self, found: Mapping[int, Tensor]) -> None:
        for i, mean in found.items():
            arrived = self._arrived[i]
            if arrived is None:
                arrived = self._arrived[i] = torch.empty(mean.numel(), dtype=self._kind)
            arrived.copy_(mean)
            self._moved[i] = 1.0

    def _nonfinite(
        self, broken: Iterable[tuple[str, Sequence[int]]], began: Mapping[int, Origin]
    ) -> NonFinite:
        ranks = self._session.context.global_ranks
        where = ", ".join(
            f"{name} on rank {', '.join(str(ranks[place]) for place in places)}" for name, places in broken
        )
        step = self._session.nonfinite.global_step(self._step)
        return NonFinite(
            f"NaN or infinity in the buffer {where}, in step {step}: no rank has applied "
            f"anything of this round. {beginnings(began, step)}Lower the learning rate, clip the "
            f"gradient, or look at the batch. To have a buffer left alone: {_IGNORE}"
        )

    # ---- rows and messages ----------------------------------------------------------------------------

    def _row(self, i: int, buffer: Tensor) -> Tensor:
        """The buffer as a flat tensor on the host, in its first type."""
        return self._same(i, buffer).detach().cpu().contiguous().view(-1).to(self._common[i].dtype)

    def _same(self, i: int, buffer: Tensor) -> Tensor:
        """The buffer itself; an error if its shape has changed."""
        if buffer.shape != self._shapes[i]:
            raise AttachError(
                f"the buffer {self._names[i]} had the shape {tuple(self._shapes[i])} when the session began, "
                f"and has {tuple(buffer.shape)} now, and replicas average it: give it its last shape before "
                f"you attach, or have it left alone: {_IGNORE}"
            )
        return buffer

    def _pack(self, moving: Sequence[int]) -> None:
        """Allocate the message: the values of these buffers, and two flags for every buffer."""
        self._spans, at = {}, 0
        for i in moving:
            self._spans[i] = at, at + self._common[i].numel()
            at += self._common[i].numel()
        self._values = torch.empty(at, dtype=self._kind)
        self._message = torch.empty(at + 2 * len(self._names), dtype=self._kind)

    def _differing(self, names: Sequence[str]) -> list[int]:
        """The numbers of the buffers that differ between ranks, without those of another shape or type."""
        if not names:
            return []
        tensors = [self._named[name].detach() for name in names]
        sums = [*map(checksum, tensors)]
        kinds = [zlib.crc32(f"{each.dtype} {each.shape}".encode()) for each in tensors]
        mine = torch.tensor([sums, kinds])
        every = torch.stack(self._ask(gather(mine, self._scope)))
        equal = (every == every[:1]).all(0)
        for i in (~equal[1]).nonzero().view(-1).tolist():
            _log.warning("buffer %s has another shape or type on other ranks: each keeps its own", names[i])
        return (equal[1] & ~equal[0]).nonzero().view(-1).tolist()

    def _ask(self, talk: Generator[Request, Any, Any]) -> Any:
        return self._session.ask(lambda: talk, "buffers")

    # ---- checkpoints --------------------------------------------------------------------------------

    def saved_state(self) -> dict[tuple[str, str], StateSlice]:
        """The state for a checkpoint, by (buffer, field), as views; always with those of pending rounds."""
        fields: dict[str, Sequence[Tensor | None]] = {
            COMMON: self._common,
            MOVES: [self._moves[i : i + 1] for i in range(len(self._names))],
        }
        if self._session.strategy.late:
            fields[ARRIVED] = self._arrived
            fields[MOVED] = [self._moved[i : i + 1] for i in range(len(self._names))]
        return {
            (self._names[i], field): StateSlice(tensor, True, 0, tensor.numel())
            for field, tensors in fields.items()
            for i, tensor in enumerate(tensors)
            if tensor is not None
        }


def found_in(model: TrainedModel) -> list[str]:
    """The names of the buffers that DDP would broadcast."""
    ignored = model.parameters_to_ignore
    named = model.module.named_buffers()
    return [n for n, b in named if n not in ignored and b.layout is torch.strided and not b.is_quantized]


def numbers_in(model: TrainedModel) -> list[str]:
    """The names of those of `found_in` that hold finite floating-point numbers, and so have a mean."""
    named = dict(model.module.named_buffers())
    return [n for n in found_in(model) if named[n].dtype in _MEANS and bool(named[n].isfinite().all())]


def variances_in(module: nn.Module) -> list[str]:
    """The names of running variances of normalization layers."""
    found = [name for name, each in module.named_modules() if is_normalising(each)]
    return [f"{name}.running_var" if name else "running_var" for name in found]


def _bits(x: Tensor) -> Tensor:
    """The same memory as integers, so that equal bits compare equal, NaN too."""
    return x.view(_BITS[x.element_size()])


def _bytes(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _by_node(x: Tensor, near: tuple[int, int]) -> Generator[Request, Any, None]:
    """Overwrite `x` with the mean over all replicas; each rank of a node exchanges its part between nodes."""
    rank, peers = near
    spans = tuple((len(x) * i // peers, len(x) * (i + 1) // peers) for i in range(peers))
    yield ReduceScatter(x, spans, NODE)
    mine = x[slice(*spans[rank])]
    if len(mine):
        yield AllReduce((mine,), NET)
    yield AllGatherInto(x, spans, NODE)


def _of_the_first(x: Tensor, peers: int, scope: str) -> Generator[Request, Any, None]:
    """Overwrite `x` with the first rank's."""
    yield AllGatherInto(x, ((0, len(x)), *[(len(x), len(x))] * (peers - 1)), scope)


class BufferBroadcasts:
    """Switches off DDP's broadcast of buffers, which is a barrier across all nodes before every forward."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp: Any = ddp
        self._before = bool(ddp.broadcast_buffers)
        self._ddp.broadcast_buffers = ForwardSync.off(self._before)

    def restore(self) -> None:
        """Let DDP broadcast buffers again, if it did."""
        self._ddp.broadcast_buffers = self._before
