"""`attach`: a strategy begins its work on a DDP model; closing what it returns ends it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tacit.algorithms import parse
from tacit.contracts import WORLD
from tacit.doors import footprint, state
from tacit.doors.ddp import GradientDoor, Switchboard, no_exchange, plain_mean
from tacit.doors.optimizer import OwnBuffers, ProgressDoor
from tacit.errors import AttachError, ConfigError, PeerLost
from tacit.lots import Policy, cut
from tacit.session import Session
from tacit.strategy import Strategy
from tacit.transports.rollcall import RollCall
from tacit.transports.torch import TorchTransport, abort

VARIABLE = "TACIT_ALGORITHM"

_ATTACHED: WeakKeyDictionary[DistributedDataParallel, Attached] = WeakKeyDictionary()
_SESSIONS: dict[str, int] = {}


def from_env(variable: str = VARIABLE) -> Strategy:
    """The strategy that an environment variable names; plain `ddp` where it is not set.

    Raises:
        ConfigError: the text is no strategy.
    """
    footprint.called("from_env")
    text = os.environ.get(variable, "ddp")
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"environment variable {variable}={text!r}: {error}") from None


def attach(
    model: DistributedDataParallel,
    optimizer: Optimizer | None,
    strategy: Strategy | str,
    *,
    policy: Policy | None = None,
    timeout: timedelta | None = None,
) -> Attached:
    """Put a strategy to work on a DDP model. A collective call: every rank of the model's group makes it.

    Args:
        model: the wrapped model; torch is entered by its own hooks, and nothing is patched.
        optimizer: of the model's parameters. None will do for strategies that exchange gradients.
        strategy: a value, or its text form such as "topk:ratio=0.01".
        policy: `(name, parameter) -> Compressor | None`: which compressor handles which parameter; None
            keeps it dense. Without it: the strategy's, and dense for parameters of fewer than two dimensions
            where its compressor exempts them.
        timeout: after which a peer that does not answer is an error; the process group's where not given.

    Returns:
        The attached session: a context manager. `close` (or leaving the block) takes the hooks away.

    Raises:
        ConfigError: the strategy's text is wrong.
        AttachError: the model or the optimizer does not fit, or ranks differ in model or strategy.
    """
    footprint.called("attach")
    strategy = parse(strategy) if isinstance(strategy, str) else strategy
    named = _checked(model, optimizer, strategy)
    attached = Attached(model, optimizer, strategy, named, policy, timeout)
    _ATTACHED[model] = attached
    footprint.began(attached.session)
    return attached


def _checked(model: object, optimizer: Optimizer | None, strategy: Strategy) -> dict[str, Tensor]:
    if not isinstance(model, DistributedDataParallel):
        raise AttachError(
            f"the model is a {type(model).__name__}, not a DistributedDataParallel: write "
            "attach(DistributedDataParallel(model), optimizer, ...)"
        )
    if model in _ATTACHED:
        raise AttachError(
            f"{_ATTACHED[model].session.strategy.name!r} is attached to this model already: close it first"
        )
    if optimizer is None and strategy.subject == "progress":
        raise AttachError(f"{strategy.name!r} exchanges after optimizer.step: give attach the optimizer")
    named = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
    if strategy.subject != "nothing":
        for name, p in named.items():
            if p.device.type != "cpu":
                raise AttachError(
                    f"{name} is on {p.device}: only parameters on the CPU (Gloo) are supported as yet. Use "
                    "'ddp', which leaves DDP as it is"
                )
            if not p.is_floating_point():
                raise AttachError(f"{name} is {p.dtype}: only real floating-point parameters are supported")
    _check_optimizer(named, optimizer)
    return named


def _check_optimizer(named: dict[str, Tensor], optimizer: Optimizer | None) -> None:
    if optimizer is None:
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in named.values()):
        raise AttachError(
            "the optimizer holds no parameter of this model: give attach the optimizer that was made with "
            "model.parameters()"
        )


class Attached:
    """A session at work on a DDP model, and the way out of it."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer | None,
        strategy: Strategy,
        named: dict[str, Tensor],
        policy: Policy | None,
        timeout: timedelta | None,
    ) -> None:
        group = model.process_group
        self._model, self._group, self._optimizer = model, group, optimizer
        self._handles: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._door: ProgressDoor | None = None
        self._gradient_door: GradientDoor | None = None
        self._rollcall: RollCall | None = None
        quiet = strategy.subject == "nothing"
        board = None if quiet else Switchboard.of(model)
        tensors = named if strategy.subject != "progress" else {**named, **_float_buffers(model)}
        lots = [] if quiet else cut(reversed(tensors), tensors, int(model.bucket_bytes_cap))
        self._transport = TorchTransport(group, timeout or _timeout(group))
        self.session = Session(strategy, tensors, self._transport, lots, policy, self._lr)
        self.strategy = strategy
        if not quiet:
            _agree(group, strategy, named)
            self._transport.open(self.session.stages)
        self._watch()
        self._enter(tensors, board)

    def _lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"]) if self._optimizer is not None else 0.0

    # ---- in -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._transport.peers(WORLD) == 1:
            return
        ranks = dist.get_process_group_ranks(self._group)
        name = "-".join(map(str, ranks))
        _SESSIONS[name] = _SESSIONS.get(name, 0) + 1
        self._rollcall = RollCall(
            dist.distributed_c10d._get_default_store(),
            f"{name}/{_SESSIONS[name]}",
            dist.get_rank(),
            ranks,
            lambda: self.session.step if self.strategy.subject == "nothing" else self.session.round,
            self._peer_lost,
        )
        self.session.explain = self._explain

    def _peer_lost(self, error: PeerLost) -> None:
        self.session.failure = self.session.failure or error
        self._abort()

    def _abort(self) -> None:
        """End what may hang: our own collectives, or DDP's where it was left to itself."""
        self._transport.abort()
        if self.strategy.subject == "nothing":
            abort(self._group)

    def _explain(self, error: BaseException) -> BaseException:
        if isinstance(self.session.failure, PeerLost):
            return self.session.failure
        assert self._rollcall is not None
        found = self._rollcall.alarm(_first_line(error))
        found.__cause__ = error
        return found

    def _enter(self, tensors: dict[str, Tensor], board: Switchboard | None) -> None:
        if board is not None:
            self._undo.append(lambda: setattr(board, "answer", plain_mean(self._group)))
            if self.strategy.subject == "gradient":
                self._gradient_door = board.answer = GradientDoor(self.session, tensors)
            else:
                board.answer = no_exchange
                self._door = ProgressDoor(self.session, tensors)
                self._undo.append(OwnBuffers(self._model).restore)
        if self._optimizer is not None:
            self._handles.append(self._optimizer.register_step_post_hook(self._after_step))

    def _after_step(self, *_: Any) -> None:
        if self._door is not None:
            self._door.after_step()
        else:
            self.session.step += 1

    # ---- at work --------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until nothing is under way; before a checkpoint, say. Raises what went wrong."""
        self.session.flush()

    def sync(self) -> None:
        """Make all replicas equal now, by a round where the strategy lets them differ. A collective call."""
        self.session.flush()
        if self._door is not None:
            self._door.sync()

    def state_dict(self) -> dict[str, Any]:
        """The session for a checkpoint (`Stateful`): counters, lots, and all state that it keeps.

        For torch.save each rank saves its own, as residuals differ by rank; torch.distributed.checkpoint
        keeps them apart by their keys. Waits until nothing is under way.
        """
        self.flush()
        return state.save(self.session, self._transport, self._gradient_door, self._door)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, bit for bit; load the model and the optimizer too.

        Raises:
            CheckpointError: it does not fit, or is not whole; nothing has been changed then.
        """
        self.flush()
        state.load(state_dict, self.session, self._transport, self._gradient_door, self._door)

    def metrics(self) -> dict[str, float]:
        """The session in numbers; see `Session.metrics`."""
        return self.session.metrics()

    @property
    def active_path(self) -> str:
        """What is really at work: the strategy, the transport, the lots."""
        s = self.session
        if s.strategy.subject == "nothing":
            return "DistributedDataParallel, untouched"
        peers, backend = self._transport.peers(WORLD), dist.get_backend(self._group)
        kinds = sorted({repr(lot.compressor) for lot in s.lots}, key=len)[:1]
        return f"{s.strategy.name}: {len(s.lots)} lots, {kinds[0]}, {peers} ranks by {backend}"

    # ---- out ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Make replicas and their optimizers equal, drain, and take all hooks away; idempotent.

        A collective call.
        """
        if self._model not in _ATTACHED:
            return
        try:
            if self.session.failure is None:
                self.sync()
                self._settle()
        finally:
            self._leave()

    def _settle(self) -> None:
        if self._door is not None and self._optimizer is not None:
            self._door.settle(self._optimizer, self._transport)

    def _leave(self) -> None:
        _ATTACHED.pop(self._model, None)
        for handle in self._handles:
            handle.remove()
        for undo in self._undo:
            undo()
        if self._rollcall is not None:
            self._rollcall.close()
        self.session.close()
        footprint.ended(self.session)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        lost = self._lost(error) if self.session.failure is None else None
        self._leave()
        if lost is not None:
            raise lost from error

    def _lost(self, error: BaseException) -> PeerLost | None:
        """An error came out of the block: is a peer to blame, or must the peers be told of this rank?"""
        if self._rollcall is None:
            return None
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            self.session.failure = lost = self._rollcall.alarm(_first_line(error))
            return lost
        # The peers may be waiting for this rank: tell them, and do not wait for them.
        self._rollcall.leave(f"{type(error).__name__}: {error}")
        self.session.failure = error
        self._abort()
        return None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _timeout(group: dist.ProcessGroup) -> timedelta:
    device = torch.device("cpu")
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def _float_buffers(model: DistributedDataParallel) -> dict[str, Tensor]:
    return {n: b for n, b in model.module.named_buffers() if b.is_floating_point() and b.numel()}


def _agree(group: dist.ProcessGroup, strategy: Strategy, named: dict[str, Tensor]) -> None:
    """Check that all ranks mean the same: one small message, so that a mismatch is no hang later."""
    mine = [repr(strategy), *(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in named.items())]
    sums = torch.tensor([zlib.crc32(line.encode()) for line in (mine[0], "\n".join(mine[1:]))])
    all_ = [torch.empty_like(sums) for _ in range(group.size())]
    dist.all_gather(all_, sums, group=group)
    for what, column in (("strategy", 0), ("model", 1)):
        different = [rank for rank, theirs in enumerate(all_) if theirs[column] != all_[0][column]]
        if different:
            raise AttachError(
                f"ranks {different} attach another {what} than rank 0: give every rank the same one "
                f"(here: {mine[0] if column == 0 else f'{len(named)} parameters'})"
            )
