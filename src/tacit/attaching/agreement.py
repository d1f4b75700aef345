"""Ranks compare their arguments of `attach`, before anything else: a mismatch would make them hang later."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tacit.contracts import ScheduleState
from tacit.environment import CONNECTIONS
from tacit.errors import AttachError, of_ranks
from tacit.kernels.payloads import FORMAT
from tacit.levels.spec import AttachSpec, is_periodic
from tacit.model.trained_model import TrainedModel, locals_of
from tacit.session.buckets import Policy, choice, exempting
from tacit.session.learning_rates import Rates
from tacit.strategy import AnyStrategy
from tacit.transports.process_groups import connections, gathered, ranks_of

_TEXT = 400
"""The bytes of a rank's text about its argument, once it is known that others have another one."""
_SHOWN = 4
"""The number of different texts that an error repeats."""


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """An argument that must be equal on all ranks.

    Attributes:
        text: the value as a text, which is compared.
        shown: the text for the error if ranks differ.
    """

    text: str
    shown: str = ""


def agree(spec: AttachSpec) -> None:
    """Check that all ranks attach the same, by one small message. A collective call.

    Raises:
        AttachError: they do not; every rank raises it.
        RuntimeError: not all ranks attach; the process group raises it.
    """
    compared = _compared(spec)
    _compare(spec.group, compared | _shards(spec))
    if spec.sharded is not None and spec.sharded.near is not None:
        _compare(spec.sharded.near, compared)


def trained(spec: AttachSpec) -> dict[str, str]:
    """What members must have in common, by name: a checksum, and the beginning of a text for errors."""
    compared = _compared(spec) | {"number of shards": _layout(spec)}
    del compared["learning rate"], compared["scaler"]  # they change with the steps
    return {
        what: f"{thing.shown or thing.text:.200} ({zlib.crc32(thing.text.encode()):08x})"
        for what, thing in compared.items()
    }


def _compare(group: dist.ProcessGroup, compared: Mapping[str, _Compared]) -> None:
    sums = torch.tensor([zlib.crc32(thing.text.encode()) for thing in compared.values()])
    all_ = gathered(sums, group)
    for column, (what, thing) in enumerate(compared.items()):
        others = [i for i, theirs in enumerate(all_) if theirs[column] != all_[0][column]]
        if others:
            ranks = ranks_of(group)
            each = dict(zip(ranks, _gathered_texts(group, thing.shown or thing.text), strict=True))
            raise AttachError(
                f"ranks {[ranks[i] for i in others]} attach another {what} than rank {ranks[0]}: give every "
                f"rank the same one ({_by_rank(each)})"
            )


def _compared(spec: AttachSpec) -> dict[str, _Compared]:
    """The compared arguments, in order: a difference in an earlier one explains those in later ones."""
    strategy, named = spec.strategy, spec.named
    numbers = sum(p.numel() for p in named.values())
    types = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in named.values()}))
    return {
        "version of tacit": _Compared(text=f"payloads of format {FORMAT}"),
        "strategy": _Compared(
            text=f"{spec.chosen_by}{strategy!r}",
            shown=f"{strategy.name!r} {spec.chosen_by}{repr(strategy)[:200]}",
        ),
        "model": _Compared(
            text="\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in named.items()),
            shown=f"{len(named)} parameters of {numbers} numbers in {types}: {', '.join(named)}",
        ),
        "buffers": _Compared(
            text="\n".join(_buffers(strategy, spec.model)), shown="see their names, shapes and types"
        ),
        "compressor by its policy": _Compared(
            text="\n".join(_chosen(strategy, named, spec.policy)), shown="see the policy"
        ),
        "scaler": _Compared(text=_scaler(spec)),
        "steps_per_epoch or number of epochs": _Compared(text=_words(spec.schedule_state)),
        "number of connections": _Compared(text=f"{CONNECTIONS}={connections()}"),
        "seed": _Compared(text=repr(spec.seed)),
        "exchange_on": _Compared(text=repr(spec.exchange_on)),
        "reduction": _Compared(text=spec.reduction),
        "probe": _Compared(text=repr(spec.probe)),
        "optimizer": _Compared(text=_kinds(strategy, spec.optimizers)),
        "learning rate": _Compared(text=_rates(spec)),
    }


def _shards(spec: AttachSpec) -> dict[str, _Compared]:
    """The arguments that only ranks of the far axis share: their shards."""
    if spec.sharded is None:
        return {}
    mine = locals_of(spec.named)
    text = "\n".join(f"{name} {tuple(shard.shape)}" for name, shard in mine.items())
    return {"shard of the model": _Compared(text=text, shown=f"shard {spec.sharded.shard}")}


def _layout(spec: AttachSpec) -> _Compared:
    """Among how many ranks FSDP2 shards the model, and how; equal on all ranks."""
    if spec.sharded is None:
        return _Compared(text="1", shown="1, or as many as Members(shards=) says")
    placed: dict[str, Any] = dict(spec.named)
    text = "\n".join(f"{name} {p.placements}" for name, p in placed.items())
    return _Compared(text=f"{spec.sharded.shards}\n{text}", shown=str(spec.sharded.shards))


def _scaler(spec: AttachSpec) -> str:
    """The part of the scaler that must be equal on all ranks; the factor is not, if replicas step alone."""
    if spec.scaler is None:
        return "none"
    state = spec.scaler.state_dict().items()
    return "one" if spec.periodic else ", ".join(f"{key} {value}" for key, value in state)


def _words(schedule_state: ScheduleState) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in sorted(schedule_state.items())) or "none"


def _kinds(strategy: AnyStrategy, optimizers: Sequence[Optimizer]) -> str:
    if _alone(strategy):
        return "each worker's own"
    return ", ".join(each.__class__.__name__ for each in optimizers) or "none"


def _rates(spec: AttachSpec) -> str:
    if _alone(spec.strategy):
        return "each worker's own"
    return ", ".join(f"{lr!r}" for lr in Rates(spec.optimizers, spec.named).by_group()) or "none"


def _alone(strategy: AnyStrategy) -> bool:
    """Whether workers do not wait for each other; then each sets its learning rate by its steps alone."""
    return any(level.independent for level in strategy.levels)


def _buffers(strategy: AnyStrategy, model: TrainedModel) -> Iterator[str]:
    """Name, shape and type of each buffer that replicas average, if they step alone."""
    if not is_periodic(strategy):
        return
    from tacit.replicas.buffers import found_in

    found = dict(model.module.named_buffers())
    for name in found_in(model):
        yield f"{name} {tuple(found[name].shape)} {found[name].dtype}"


def _chosen(strategy: AnyStrategy, named: Mapping[str, Tensor], policy: Policy | None) -> Iterator[str]:
    """The compressor of each parameter, level by level."""
    if strategy.levels[0].subject == "nothing":
        return
    for level in strategy.levels:
        choose = policy or exempting(level.compressor)
        for name, p in named.items():
            yield f"{name} {choice(name, p, choose)!r}"


# ---- messages -----------------------------------------------------------------------------------------


def _gathered_texts(group: dist.ProcessGroup, text: str) -> list[str]:
    """The text that each rank gives, in the order of the ranks. A collective call."""
    data = text.encode()[:_TEXT]
    mine = torch.zeros(_TEXT, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    return [bytes(each.tolist()).rstrip(b"\0").decode(errors="ignore") for each in gathered(mine, group)]


def _by_rank(each: Mapping[int, str]) -> str:
    """The ranks with their texts, each shortened to its first word if these differ."""
    heads = dict(each)
    if next(iter(each.values())).startswith("'"):
        heads = {rank: text.split(" ", 1)[0] for rank, text in each.items()}
    if len(set(heads.values())) == 1:
        heads = dict(each)
    by: dict[str, list[int]] = {}
    for rank, head in heads.items():
        by.setdefault(head, []).append(rank)
    if len(by) == 1:
        return f"here: {next(iter(by))}"
    found = [f"{text} on {of_ranks(ranks)}" for text, ranks in by.items()]
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "; ".join([*found[:_SHOWN], *more])
