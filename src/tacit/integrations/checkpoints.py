"""Sessions in the checkpoints of frameworks, which hold what rank 0 has: residuals differ by rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tacit.api.attached import Attached
from tacit.checkpoint.session_state import join_states
from tacit.checkpoint.sharded_state import SHARDS
from tacit.errors import CheckpointError
from tacit.model.trained_model import locals_of
from tacit.transports.process_groups import gather_objects, rank_in, ranks_of

_SHARED = "shared/"
"""How the keys begin of what is equal on all ranks."""


def state_of_rank(session: Attached) -> dict[str, Any]:
    """The state that this rank needs to go on, besides the model and the optimizer; of shards its own."""
    return {"session": locals_of(session.state_dict())}


def load_ranks(session: Attached, ranks: int, state_of: Callable[[int], Mapping[str, Any]]) -> None:
    """Go on from what all ranks have saved; those after a replica's first may lack what is shared.

    On another number of ranks, residuals are divided again, but not those of shards.

    Args:
        session: at work.
        ranks: the number of states.
        state_of: reads the state of a rank.

    Raises:
        CheckpointError: it does not fit.
    """
    if not ranks:
        raise CheckpointError(
            "the checkpoint holds no state of a tacit session: save it while a session is attached"
        )
    model = session.options.sharded
    if model is None:
        session.load_state_dict(join_states(state_of(rank)["session"] for rank in range(ranks)))
        return
    here, first, state = len(ranks_of()), ranks_of(model.process_group)[0], dict[str, Any]()
    if ranks == here:
        state = {**state_of(first)["session"], **state_of(rank_in())["session"]}
    if state.get(SHARDS) != model.shards:
        raise CheckpointError(
            f"the checkpoint was saved by {ranks} ranks, in replicas of {state.get(SHARDS, 'unknown')}, and "
            f"here are {here} in replicas of {model.shards}: start as then, as frameworks' "
            "checkpoints have no shards that could be cut again"
        )
    session.load_state_dict(state)


class AllRanks:
    """A session as a framework's checkpoint can hold it, in one state for all ranks.

    For `fabric.save` and `accelerator.register_for_checkpointing`, which write what rank 0 gives.

    Args:
        session: at work.
    """

    def __init__(self, session: Attached) -> None:
        self._session = session

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have on rank 0, and nothing elsewhere or after `close`. A collective call.

        Replicas that have stepped alone are made equal first. Not those of a sharded model, whose shards
        frameworks have written by then: the state has what each replica has of its own.
        """
        if self._session.closed:
            return {}
        options = self._session.options
        if options.sharded is None:
            self._session.sync()
        mine = state_of_rank(self._session)
        if options.group.rank():
            own = {key: each for key, each in mine["session"].items() if not key.startswith(_SHARED)}
            mine["session"] = own
        ranks = gather_objects(mine, None if options.sharded else options.group)
        return {"ranks": ranks} if ranks else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from it, on every rank.

        Raises:
            CheckpointError: it does not fit, or is of one rank alone.
        """
        ranks = state_dict.get("ranks", ())
        load_ranks(self._session, len(ranks), ranks.__getitem__)
