"""The memory of a session in addition to model and optimizer, found by walking over its objects."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from tacit.kernels.thread_scratch import all_scratch
from tacit.model.trained_model import local

FIELDS = {
    "_anchor": "anchor",
    "_anchors": "anchor",
    "_flat": "delta",
    "mine": "own delta",
    "unsent": "own delta",
    "_given": "own delta",
    "_aside": "own delta",
    "put": "exact parameters",
    "_kept": "kept variance",
    "spares": "second buffers",
    "_scratch": "scratch",
    "held": "scratch",
    "_now": "scratch",
    "_wide": "scratch",
    "_rounded": "scratch",
    "_before": "scratch",
    "_messages": "messages",
    "_slotted": "messages",
    "_outgoing": "messages",
    "_theirs": "messages",
    "_moved": "messages",
    "_stored": "store",
}
"""The label of tensors below an attribute of this name; all others are "others"."""
STATES = ("_states", "states")
"""Attributes below which each state is labelled by its name, such as `residual`."""


def footprint(holders: Iterable[object], model: nn.Module, optimizers: Iterable[Any]) -> dict[str, int]:
    """The bytes of tensors in these objects of tacit, by label, the largest first.

    A tensor's memory is counted once. That of the model, its gradients and the optimizers' state is not
    counted.
    """
    seen = {storage for storage, _ in map(_storage, _models_own(model, optimizers))}
    found: Counter[str] = Counter()
    for label, tensor in (*_below(holders), *(("scratch", each) for each in all_scratch())):
        storage, size = _storage(tensor)
        if storage not in seen:
            seen.add(storage)
            found[label] += size
    return dict(found.most_common())


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = local(tensor).untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _models_own(model: nn.Module, optimizers: Iterable[Any]) -> Iterator[Tensor]:
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor
        if tensor.grad is not None:
            yield tensor.grad
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (each for each in state.values() if isinstance(each, Tensor))


def _below(holders: Iterable[object]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that can be reached through objects of tacit and containers, with its label.

    The nearest come first, as the attribute of a tensor's holder describes it best.
    """
    seen: set[int] = set()
    waiting: deque[tuple[str, object]] = deque(("others", each) for each in holders)
    while waiting:
        label, each = waiting.popleft()
        if isinstance(each, Tensor):
            if not each.is_meta:
                yield label, each
        elif id(each) not in seen:
            seen.add(id(each))
            waiting += _parts(label, each)


def _parts(label: str, each: object) -> list[tuple[str, object]]:
    if isinstance(each, Mapping):
        by_name = label in STATES and all(isinstance(key, str) for key in each)
        return [(_last(key) if by_name else label, value) for key, value in each.items()]
    if isinstance(each, list | tuple | set | frozenset):
        return [(label, value) for value in each]
    kind = type(each)
    if not kind.__module__.startswith("tacit.") or isinstance(each, nn.Module):
        return []
    names = [*vars(each)] if hasattr(each, "__dict__") else []
    names += [name for base in kind.__mro__ for name in vars(base).get("__slots__", ())]
    held = ((name, getattr(each, name, None)) for name in names)
    return [(_label(name, label), value) for name, value in held if value is not None]


def _label(attribute: str, label: str) -> str:
    return attribute if attribute in STATES else FIELDS.get(attribute, "others" if label in STATES else label)


def _last(key: str) -> str:
    return key.rpartition(".")[2]
