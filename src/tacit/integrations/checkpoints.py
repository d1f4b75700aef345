"""Sessions in the checkpoints of frameworks, which hold what rank 0 has: residuals differ by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tacit.api.attached import Attached
from tacit.checkpoint.session_state import join_states
from tacit.checkpoint.sharded_state import refuse_shards
from tacit.errors import CheckpointError
from tacit.transports.process_groups import gather_objects

_SHARED = "shared/"
"""How the keys begin of what is equal on all ranks."""


def state_of_rank(session: Attached) -> dict[str, Any]:
    """The state that this rank needs to go on, besides the model and the optimizer, which all ranks share."""
    return {"session": session.state_dict()}


def load_ranks(session: Attached, states: Sequence[Mapping[str, Any]]) -> None:
    """Go on from what all ranks have saved, in their order; those after the first may lack what is shared.

    On another number of ranks, residuals are divided again.

    Raises:
        CheckpointError: it does not fit.
    """
    if not states:
        raise CheckpointError(
            "the checkpoint holds no state of a tacit session: save it while a session is attached"
        )
    session.load_state_dict(join_states(state["session"] for state in states))


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

        Replicas that have stepped alone are made equal first.

        Raises:
            CheckpointError: the model is sharded; says what to save it with.
        """
        if self._session.closed:
            return {}
        self._session.sync()
        mine = state_of_rank(self._session)
        refuse_shards(mine["session"])
        if self._session.options.group.rank():
            own = {key: each for key, each in mine["session"].items() if not key.startswith(_SHARED)}
            mine["session"] = own
        ranks = gather_objects(mine, self._session.options.group)
        return {"ranks": ranks} if ranks else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from it, on every rank.

        Raises:
            CheckpointError: it does not fit, or is of one rank alone.
        """
        load_ranks(self._session, state_dict.get("ranks", ()))
