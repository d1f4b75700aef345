"""Checkpoints of version 3, read as if they were of version 4: other names for the same state.

torch.distributed.checkpoint reads only keys that are there, and those are of version 4: what it saved in
version 3 is first made one dict, by torch's `dcp_to_torch_save`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

VERSION = 3

KEYS = {
    "but rounds": "strategy_without_rounds",
    "rounds are": "schedules",
    "memory": "schedule_state",
    "under way": "pending_rounds",
    "lots": "buckets",
    "last met": "last_equal",
    "learning rates": "learning_rates",
}
"""What a rank keeps beside tensors."""

FIELDS = {
    "last common point": "anchor",
    "arrived": "mean",
    "sent": "local_delta",
    "put": "unrounded",
    "late mean": "delayed_mean",
    "velocity of the weight decay": "weight_decay_momentum",
    "last common value": "buffer_anchor",
    "travels": "buffer_changes",
    "arrived value": "buffer_mean",
    "has arrived": "buffer_has_mean",
}
"""What is kept of a parameter or of a buffer: the last part of a tensor's key."""

CLASSES = {
    "Then": "Cascade",
    "Select": "Partition",
    "Phases": "Scheduled",
    "Inside": "NodeRounds",
    "Keep": "LocalResidual",
    "Adopt": "ServerParams",
}
"""Of the answers that a strategy joins, those that had other names."""

_PREDICTED = re.compile(r"(shrink=[^,()]+)\)")
"""The end of a `Predicted` from before it had `rescale`, which is as False was."""
_BUFFERS = re.compile(r"(buffers='\w+')(, name=)")
"""The end of a `Strategy` from before it had `variance`, which is as "local" was."""
_CLASS = re.compile(rf"\b({'|'.join(CLASSES)})\(")
_STRATEGIES = ("strategy", "but rounds", "rounds are", "topologies")


def renewed(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state by the names of version 4, if it is of version 3; else nearly as it is. The tensors stay."""
    if state.get("version") != VERSION:
        keys = ("strategy", "strategy_without_rounds")
        texts = {key: state[key] for key in keys if isinstance(state.get(key), str)}
        return {**state, **{key: _with_later_fields(text) for key, text in texts.items()}}
    values = {key: strategy_text(value) if key in _STRATEGIES else value for key, value in state.items()}
    return {_key(key): value for key, value in values.items()} | {"version": VERSION + 1}


def strategy_text(value: Any) -> Any:
    """A strategy's text, or those of a list, by the present names of classes and values."""
    if isinstance(value, list):
        return [strategy_text(each) for each in value]
    if not isinstance(value, str):
        return value  # refused where it is read
    text = _with_later_fields(_CLASS.sub(lambda match: f"{CLASSES[match[1]]}(", value))
    return text.replace("subject='progress'", "subject='delta'")


def _with_later_fields(text: str) -> str:
    text = _PREDICTED.sub(r"\1, rescale=False)", text)
    return _BUFFERS.sub(r"\1, variance='local'\2", text)


def _key(key: str) -> str:
    owner, slash, field = key.rpartition("/")
    return f"{owner}/{FIELDS.get(field, field)}" if slash else KEYS.get(key, key)
