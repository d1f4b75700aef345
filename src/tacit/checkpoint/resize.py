"""A checkpoint of another number of ranks, or of another topology: residuals are divided again.

The mean of all residuals is what the group's mean has not yet received. When W ranks become W', each new one
gets the mean of the old residuals, so that their mean stays as it was. If the ranks of a node divide a
residual, the same is done with nodes in place of ranks. State that is divided among all ranks, or equal on
all of them, stays as it is.

The residual of the compressed means of `TwoPhase` is divided among all ranks. If no rank has it any more, as
the run goes on by all-gather, every rank adds it to its residual: their mean, again, stays.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tacit import described
from tacit.checkpoint.saved_values import CHOICE, OWN_OF, SavedValues, own_text
from tacit.errors import CheckpointError
from tacit.session import Session
from tacit.session.bucket_states import is_topologys

KEY = re.compile(r"(?P<owner>[^/]+)/(?P<level>[0-9]{1,9})/(?P<name>.*)/(?P<field>[^/]+)")

_OWNER = re.compile(r"shared(?: by [0-9-]+)?|(?:rank|node)(?P<number>[0-9]{1,9})")


class SavedShares:
    """A checkpoint's tensors of all ranks that saved it.

    Args:
        state: the joined state of all ranks.
        values: the plain values of the state.

    Raises:
        ValueError: the key of a tensor has another value.
    """

    def __init__(self, state: Mapping[str, Any], values: SavedValues) -> None:
        self._ranks, self._nodes = values.ranks, len(values.nodes)
        self._state, self._known = state, {each.name for each in fields(SavedValues)} | {CHOICE}
        self._owners: defaultdict[tuple[int, str, str], dict[str, Tensor]] = defaultdict(dict)
        for key, value in state.items():
            if match := KEY.fullmatch(key):
                name = int(match["level"]), match["name"], match["field"]
                self._owners[name][match["owner"]] = described.tensor(value, key, finite=False)

    def state_of(self, level: int, name: str, field: str, shared: bool, by_node: bool, width: int) -> Tensor:
        """The state for each new rank, or node: a flat tensor of `width` elements.

        Raises:
            CheckpointError: the part of an old rank is missing.
        """
        found = self._owners[level, name, field]
        owners = [*found][:1] or ["all"] if shared else self._owners_of_old(by_node)
        for owner in owners:
            if owner not in found or found[owner].shape != (width,):
                raise CheckpointError(
                    f"the checkpoint is of another number of ranks, and what {owner} kept of {name}/{field} "
                    "is not in it: load what all ranks saved as one, by "
                    "session.load_state_dict(tacit.join_states([...])), or after torch's dcp_to_torch_save"
                )
        if shared:
            return found[owners[0]]
        return torch.stack([found[owner] for owner in owners]).mean(0)

    def expect(self, level: int, keys: Iterable[tuple[str, str]], topologys: Collection[str]) -> None:
        """Declare which (parameter, field) of a level, and of its topology, may be in the state."""
        wanted = {*keys}
        for (of, name, field), found in self._owners.items():
            if of == level and ((name, field) in wanted or (is_topologys(field) and name in topologys)):
                self._known |= {f"{owner}/{level}/{name}/{field}" for owner in found if self._saved(owner)}

    def refuse_others(self, last: int) -> None:
        """Refuse keys that no rank with this strategy saves.

        Args:
            last: the farthest level, to which the values in the ranks' texts belong.

        Raises:
            CheckpointError: names the first such key.
        """
        for key in self._state:
            if key.startswith(OWN_OF) and self._saved(owner := key.removeprefix(OWN_OF)):
                listed = own_text(self._state, key)["listed"]
                self._known |= {key, *(f"{owner}/{last}/{name}/{field}" for name, field, _ in listed)}
        for key in (each for each in self._state if each not in self._known):
            raise CheckpointError(
                f"the checkpoint has {key!r:.200}, which no session of its strategy saves: it was changed, "
                "or put together of several; load what state_dict gave"
            )

    def _saved(self, owner: str) -> bool:
        """Whether this rank or node saved the state, or it is the shared part."""
        match = _OWNER.fullmatch(owner)
        most = self._nodes if owner.startswith("node") else self._ranks
        return match is not None and (match["number"] is None or int(match["number"]) < most)

    def names(self, level: int, field: str) -> set[str]:
        """The parameters with this field in the state."""
        return {name for of, name, each in self._owners if (of, each) == (level, field)}

    def of_topology(self, level: int) -> dict[tuple[str, str], Tensor]:
        """The topology's state, by (parameter, field)."""
        return {
            (name, field): next(iter(found.values()))
            for (of, name, field), found in self._owners.items()
            if of == level and is_topologys(field)
        }

    def _owners_of_old(self, by_node: bool) -> list[str]:
        if by_node:
            return [f"node{i}" for i in range(self._nodes)]
        return [f"rank{i}" for i in range(self._ranks)]


def topology_residuals(i: int, session: Session, shares: SavedShares) -> dict[tuple[str, str], Tensor]:
    """The topology's residuals.

    Raises:
        CheckpointError: no compressor here has residuals.
        ValueError: one is no tensor of floats.
    """
    expected = session.store.widths()
    found = shares.of_topology(i)
    for (name, field), new_residual in [*found.items()]:
        described.tensor(new_residual, f"{name}/{field}", dtypes=described.FLOATS)
        if (name, field) in expected:
            continue
        if not bool(new_residual.any()):
            del found[name, field]
            continue
        residual = session.store.residuals(name)
        if not residual or new_residual.shape != (expected[name, residual[0]][1],):
            raise CheckpointError(
                f"the checkpoint holds residuals of the means of {name}, and its compressor here has "
                "none: put ErrorFeedback around it, or attach what the checkpoint was taken with"
            )
    return found
