"""Whether all ranks attach the same: compared before anything else, so that a mismatch is no hang later."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tacit.contracts import ScheduleState
from tacit.errors import AttachError, of_ranks
from tacit.hooks.buffers import found_in
from tacit.hooks.grad_scaler import agreed_on
from tacit.hooks.learning_rates import Rates
from tacit.kernels.payloads import FORMAT
from tacit.session.buckets import Policy, choice, exempting
from tacit.strategy import AnyStrategy
from tacit.transports.devices import control

_TEXT = 400
"""Bytes in which a rank says what it has, once it is known that others have something else."""
_SHOWN = 4
"""How many different answers an error repeats."""


@dataclass(frozen=True, kw_only=True)
class _Thing:
    """What must be the same on all ranks.

    Attributes:
        text: all of it.
        shown: what to say of it where it is not.
    """

    text: str
    shown: str = ""


@dataclass(frozen=True)
class Meant:
    """What a rank gives to `attach` beside its model and its strategy."""

    named: Mapping[str, Tensor]
    optimizers: Sequence[Optimizer] = ()
    scaler: GradScaler | None = field(default=None, kw_only=True)
    policy: Policy | None = field(default=None, kw_only=True)
    schedule_state: ScheduleState = field(default_factory=dict, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    exchange_on: str | None = field(default=None, kw_only=True)


def agree(model: DistributedDataParallel, strategy: AnyStrategy, meant: Meant) -> None:
    """Check that all ranks mean the same: one small message. A collective call, also where DDP is left alone.

    Raises:
        AttachError: they do not, or not all of them attach; on every rank.
    """
    things = _things(model, strategy, meant)
    sums = torch.tensor([zlib.crc32(thing.text.encode()) for thing in things.values()])
    all_ = _everybodys(model, sums)
    for column, (what, thing) in enumerate(things.items()):
        different = [rank for rank, theirs in enumerate(all_) if theirs[column] != all_[0][column]]
        if different:
            each = _told(model, thing.shown or thing.text)
            raise AttachError(
                f"ranks {different} attach another {what} than rank 0: give every rank the same one "
                f"({_by_rank(each)})"
            )


def _things(model: DistributedDataParallel, strategy: AnyStrategy, meant: Meant) -> dict[str, _Thing]:
    """In the order in which they are looked at: what comes first explains what follows."""
    named = meant.named
    numbers = sum(p.numel() for p in named.values())
    return {
        "version of tacit": _Thing(text=f"payloads of format {FORMAT}"),
        "strategy": _Thing(text=repr(strategy), shown=f"{strategy.name!r} {repr(strategy)[:200]}"),
        "model": _Thing(
            text="\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in named.items()),
            shown=f"{len(named)} parameters of {numbers} numbers: {', '.join(named)}",
        ),
        "buffers": _Thing(
            text="\n".join(_buffers(strategy, model)), shown="see their names, shapes and types"
        ),
        "compressor by its policy": _Thing(
            text="\n".join(_chosen(strategy, named, meant.policy)), shown="see the policy"
        ),
        "scaler": _Thing(text=agreed_on(meant.scaler, strategy)),
        "steps_per_epoch or number of epochs": _Thing(text=_words(meant.schedule_state)),
        "seed": _Thing(text=repr(meant.seed)),
        "exchange_on": _Thing(text=repr(meant.exchange_on)),
        "optimizer": _Thing(text=_kinds(strategy, meant.optimizers)),
        "learning rate": _Thing(text=_rates(strategy, meant)),
    }


def _words(schedule_state: ScheduleState) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in sorted(schedule_state.items())) or "none"


def _kinds(strategy: AnyStrategy, optimizers: Sequence[Optimizer]) -> str:
    if _alone(strategy):
        return "each worker's own"
    return ", ".join(type(each).__name__ for each in optimizers) or "none"


def _rates(strategy: AnyStrategy, meant: Meant) -> str:
    if _alone(strategy):
        return "each worker's own"
    return ", ".join(f"{lr!r}" for lr in Rates(meant.optimizers, meant.named).by_group()) or "none"


def _alone(strategy: AnyStrategy) -> bool:
    """Whether workers go on without each other: then a rate is what each makes of its own steps."""
    return any(level.topology.independent for level in strategy.levels)


def _buffers(strategy: AnyStrategy, model: DistributedDataParallel) -> Iterator[str]:
    """What of them replicas that move on their own average."""
    periodic = any(level.subject == "delta" for level in strategy.levels)
    found = dict(model.module.named_buffers())
    for name in found_in(model) if periodic else ():
        yield f"{name} {tuple(found[name].shape)} {found[name].dtype}"


def _chosen(strategy: AnyStrategy, named: Mapping[str, Tensor], policy: Policy | None) -> Iterator[str]:
    """Which compressor each parameter came to, level by level."""
    if strategy.levels[0].subject == "nothing":
        return
    for level in strategy.levels:
        choose = policy or exempting(level.compressor)
        for name, p in named.items():
            yield f"{name} {choice(name, p, choose)!r}"


# ---- messages -----------------------------------------------------------------------------------------


def _everybodys(model: DistributedDataParallel, mine: Tensor) -> list[Tensor]:
    """What each rank gives, in their order."""
    all_ = [torch.empty_like(mine) for _ in range(model.process_group.size())]
    try:
        group = control(model.process_group)
        dist.all_gather(all_, mine, group=group)
    except RuntimeError as error:
        raise AttachError(
            "not every rank attaches to its model, or one is gone: call tacit.attach on all ranks, and "
            f"before the first step. The group said: {next(iter(str(error).splitlines()), 'nothing')}"
        ) from error
    return all_


def _told(model: DistributedDataParallel, text: str) -> list[str]:
    """What every rank says; a collective call, of ranks that know that they differ."""
    data = text.encode()[:_TEXT]
    mine = torch.zeros(_TEXT, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    return [bytes(each.tolist()).rstrip(b"\0").decode(errors="ignore") for each in _everybodys(model, mine)]


def _by_rank(each: Sequence[str]) -> str:
    """Who says what: the shortest beginnings of the texts that tell them apart."""
    heads = [text.split(" ", 1)[0] for text in each] if each[0].startswith("'") else list(each)
    if len(set(heads)) == 1:
        heads = list(each)
    by = {text: [rank for rank, head in enumerate(heads) if head == text] for text in dict.fromkeys(heads)}
    if len(by) == 1:
        return f"here: {heads[0]}"
    found = [f"{text} on {of_ranks(ranks)}" for text, ranks in by.items()]
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "; ".join([*found[:_SHOWN], *more])
