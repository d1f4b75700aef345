"""The progress door: after `optimizer.step`, where replicas have moved on their own."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tacit import ranges
from tacit.contracts import WORLD, Transport
from tacit.engine import drive
from tacit.exchanges import hear, say
from tacit.session import Session

_log = logging.getLogger("tacit")


class ProgressDoor:
    """Keeps the last common point of every lot, and moves it by what the peers agreed on.

    Args:
        session: exchanges the progress.
        named: the parameters; buffers that are averaged with them come behind.
    """

    def __init__(self, session: Session, named: Mapping[str, Tensor]) -> None:
        self._session = session
        self._named = named
        self.follow_lots()

    def follow_lots(self) -> None:
        """Take the present parameters as the common point, in the session's present lots."""
        lots = self._session.lots
        self._places = [
            [(self._named[slot.name].detach().view(-1), slot.start, slot.stop) for slot in lot.slots]
            for lot in lots
        ]
        self._then = [lot.like(lot.device) for lot in lots]
        self._flat = [lot.like(lot.device) for lot in lots]
        for i, then in enumerate(self._then):
            self._read(i, then)
        self._met_at: int | None = None

    def after_step(self) -> None:
        """To be called after every attempt of the optimizer."""
        session = self._session
        session.raise_failure()
        due = session.strategy.rounds.due(session.step, session.memory)
        session.step += 1
        if due:
            self.sync()

    def sync(self) -> None:
        """A round, now: afterwards all replicas are equal, to the bit. None where no step was taken since.

        Raises:
            RoundError: the round failed; no parameter has changed.
        """
        with ranges.within(self._session.strategy.name, "sync"):
            self._round()

    def _round(self) -> None:
        session = self._session
        if session.step == self._met_at:
            return
        session.discard()
        session.waiting()
        for i, (flat, then) in enumerate(zip(self._flat, self._then, strict=True)):
            self._read(i, flat)
            flat.sub_(then)
            session.submit(i, flat, lambda: None)
        session.flush()
        for i, (flat, then) in enumerate(zip(self._flat, self._then, strict=True)):
            session.strategy.merge.apply_(then, then, flat)
            self._write(i, then)
        self._met_at = session.step

    def common_point(self) -> dict[str, Tensor]:
        """Views of the last common point, by parameter."""
        lots = zip(self._session.lots, self._then, strict=True)
        return {slot.name: then[slot.start : slot.stop] for lot, then in lots for slot in lot.slots}

    def settle(self, optimizer: Optimizer, transport: Transport) -> None:
        """Average the optimizer's own state (momentum, moments), which was local.

        Whoever goes on with plain DDP would otherwise step from equal parameters with unequal momenta, and
        drift apart for good.
        """
        states = {name: optimizer.state.get(p, {}) for name, p in self._named.items()}
        fields = {
            key
            for name, state in states.items()
            for key, value in state.items()
            if torch.is_tensor(value) and value.shape == self._named[name].shape and value.dim()
        }
        if not _agreed(sorted(fields), transport):
            _log.warning("optimizers keep other state on other ranks: each goes on with its own")
            return
        for field in sorted(fields):
            for lot, flat in zip(self._session.lots, self._flat, strict=True):
                flat.zero_()
                kept = [(states[s.name][field].view(-1), s) for s in lot.slots if field in states[s.name]]
                for mine, slot in kept:
                    flat[slot.start : slot.stop] = mine
                drive(say(flat, WORLD), transport, slot=f"{field} of {lot.name}")
                for mine, slot in kept:
                    mine.copy_(flat[slot.start : slot.stop])

    def _read(self, i: int, flat: Tensor) -> None:
        for p, start, stop in self._places[i]:
            flat[start:stop] = p

    def _write(self, i: int, flat: Tensor) -> None:
        with torch.no_grad():
            for p, start, stop in self._places[i]:
                p.copy_(flat[start:stop])


def _agreed(fields: list[str], transport: Transport) -> bool:
    """Whether all ranks would average the same; where one has not stepped yet, they would not."""
    mine = torch.tensor([zlib.crc32("|".join(fields).encode())])
    answers = drive(hear(mine, WORLD), transport, slot="settle")
    return all(torch.equal(answer, answers[0]) for answer in answers)


class OwnBuffers:
    """Takes over DDP's broadcast of buffers, which is a barrier across all nodes before every forward."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp: Any = ddp
        self._before = ddp.broadcast_buffers
        self._ddp.broadcast_buffers = False

    def restore(self) -> None:
        """Hand it back."""
        self._ddp.broadcast_buffers = self._before
