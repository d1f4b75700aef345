"""Each rank's replica in a checkpoint, where parameters have equal names on all ranks and different values.

torch.distributed.checkpoint saves one copy of each name: the first moment of one rank, the second of another.
So does a file that rank 0 writes for all. The session therefore saves each rank's replica with its state, and
restores it after whatever the user loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tacit import described
from tacit.checkpoint.saved_values import OWN_OF, OwnText, own_text
from tacit.contracts import WORLD
from tacit.errors import CheckpointError
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.model.not_copied import OnlyHere
from tacit.model.trained_model import local
from tacit.optimizer_hooks.global_hooks import before_steps
from tacit.replicas.buffers import found_in
from tacit.replicas.replica import LiveTensors
from tacit.torch_compat import is_normalising

OWN = "own"
"""The field of a parameter or a buffer; `own.0.exp_avg`: that of the first optimizer's state of it."""

Key = tuple[str, str]
"""(parameter or buffer, field)."""


class OwnReplica:
    """Parameters, buffers and optimizers' state of a replica that steps alone; of others BatchNorm's.

    Until the first step after a load it holds the loaded values, and restores them whenever the model or an
    optimizer loads a state.

    Args:
        spec: the arguments of attach.
        levels: near to far; the list may still be filled.
    """

    def __init__(self, spec: AttachSpec, levels: Sequence[Level]) -> None:
        self._spec, self._levels = spec, levels
        model = spec.model
        self._alone = spec.periodic
        named = dict(model.module.named_buffers())
        norms = {name for name, each in model.module.named_modules() if is_normalising(each)}
        found = [n for n in found_in(model) if named[n].dtype in described.REAL]
        buffers = [n for n in found if self._alone or n.rpartition(".")[0] in norms]
        self._buffers = LiveTensors(model.module, buffers)
        self._loaded: dict[Key, Tensor | float] = {}
        self._handles: list[Any] = []

    # ---- saving ---------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """The state for a checkpoint: copies on the host, and a list of all values, with plain numbers."""
        listed: list[tuple[str, str, float | None]] = []
        state: dict[str, Any] = {}
        for name, field, value in self._present():
            listed.append((name, field, None if isinstance(value, Tensor) else value))
            if isinstance(value, Tensor):
                state[self._key(name, field)] = value.detach().reshape(-1).to("cpu", copy=True)
        own = self._levels[-1].session.transport.place(WORLD).rank
        text = OwnText(listed=listed, checksums={})
        return state | {f"{OWN_OF}rank{own}": json.dumps(text)} if listed else {}

    def not_by_entry(self) -> set[tuple[int, str, str]]:
        """The fields that do not have one entry for each entry of the parameter."""
        named = self._spec.named
        return {
            (len(self._levels) - 1, name, field)
            for name, field, value in self._present()
            if isinstance(value, Tensor) and name in named and value.shape != local(named[name]).shape
        }

    def _present(self) -> Iterator[tuple[str, str, Tensor | float]]:
        """All present values; numbers are, for example, Adam's count of steps."""
        for name in self._buffers:
            yield name, OWN, self._buffers[name]
        for name, p in self._spec.named.items() if self._alone else ():
            yield name, OWN, local(p)
            for i, optimizer in enumerate(self._spec.optimizers):
                for field, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor):
                        value = local(value) if value.dim() else value.item()
                    if type(value) in (int, float) or isinstance(value, Tensor):
                        yield name, f"{OWN}.{i}.{field}", value

    def _key(self, name: str, field: str, rank: int | None = None) -> str:
        own = self._levels[-1].session.transport.place(WORLD).rank
        return f"rank{own if rank is None else rank}/{len(self._levels) - 1}/{name}/{field}"

    # ---- loading --------------------------------------------------------------------------------------

    def found(self, state: Mapping[str, Any], saved_by: int) -> dict[Key, Tensor | float]:
        """This rank's part of a checkpoint by `saved_by` ranks; by another number, the mean of all parts.

        Raises:
            CheckpointError: a value is missing.
            ValueError: a value cannot be one that was saved.
        """
        own, peers = self._levels[-1].session.transport.place(WORLD)
        resized = saved_by != peers
        ranks = range(saved_by) if resized else [own]
        found: dict[Key, Tensor | float] = {}
        here = {(name, field): value for name, field, value in self._present() if field == OWN}
        for name, field, number in self._listed(state, ranks[0]):
            if number is not None:
                found |= {} if resized else {(name, field): number}
                continue
            keys = [self._key(name, field, rank) for rank in ranks]
            missing = [key for key in keys if key not in state]
            if len(missing) == len(keys) and (name, OWN) in here and not _numel(here[name, OWN]):
                continue  # other ranks have all of it
            if missing:
                raise CheckpointError(
                    f"the checkpoint holds {missing[0]!r}, and it was not read: call "
                    "get_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict before "
                    "dcp.load, which makes the optimizer's state; on another number of ranks, load what all "
                    "ranks saved as one, by tacit.join_states or torch's dcp_to_torch_save"
                )
            like = here.get((name, field), state[keys[0]])
            each = [described.tensor(state[key], key, (_numel(like),), finite=False) for key in keys]
            found[name, field] = torch.stack(each).double().mean(0).to(each[0].dtype) if resized else each[0]
        return found

    def _listed(self, state: Mapping[str, Any], rank: int) -> list[tuple[str, str, float | None]]:
        """The values that the rank saved; empty in older checkpoints."""
        key = f"{OWN_OF}rank{rank}"
        if key not in state:
            others = [each for each in state if each.startswith(OWN_OF)]
            if others:
                raise CheckpointError(
                    f"the checkpoint has {others[0]!r} and lacks {key!r}, so it is another rank's: load on "
                    "every rank what it has saved itself, or all states joined by join_states"
                )
            return []
        return own_text(state, key)["listed"]

    def take(self, found: dict[Key, Tensor | float]) -> None:
        """Restore the values that were found, now and after each load by the user until the next step.

        Parameters that were equal on all ranks are loaded by the user.
        """
        self.drop()
        progress, named = self._levels[-1].progress, self._spec.named
        if progress is not None and progress.steps_since_equal is None:
            found = {key: each for key, each in found.items() if key[1] != OWN or key[0] not in named}
        self._loaded = found
        self._put()
        if self._levels[-1].strategy.independent:  # they may be changed from now on
            self._loaded = {key: each for key, each in found.items() if key[1] != OWN}
        if self._loaded:
            module: Any = self._spec.model.module
            self._handles = [module.register_load_state_dict_post_hook(OnlyHere(self._put))]
            for each in self._spec.optimizers:
                self._handles.append(each.register_load_state_dict_post_hook(self._put))
            self._handles.append(before_steps(self._stepping))

    def _put(self, *_: Any) -> None:
        if not self._loaded:
            return
        with torch.no_grad():
            for name, field, there in self._present():
                mine = self._loaded.get((name, field))
                if isinstance(there, Tensor) and isinstance(mine, Tensor) and there.numel() == mine.numel():
                    there.copy_(mine.view(there.shape))
                elif isinstance(mine, int | float) and mine != there:
                    self._set(name, field, mine)

    def _set(self, name: str, field: str, number: float) -> None:
        _, i, key = field.split(".", 2)
        state = self._spec.optimizers[int(i)].state[self._spec.named[name]]
        if isinstance(state[key], Tensor):
            state[key].fill_(number)
        else:
            state[key] = number

    def _stepping(self, optimizer: Optimizer) -> None:
        # torch.distributed.checkpoint steps with a rate of 0 if an optimizer has no state yet.
        mine = any(optimizer is each for each in self._spec.optimizers)
        if mine and any(group.get("lr") != 0 for group in optimizer.param_groups):
            self.drop()

    def drop(self) -> None:
        """Drop the loaded values."""
        self._loaded = {}
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _numel(value: Tensor | float) -> int:
    return value.numel() if isinstance(value, Tensor) else 1
