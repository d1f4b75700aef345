"""What an attached session keeps in a checkpoint, and how it comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tacit.contracts import WORLD, Transport
from tacit.doors.ddp import GradientDoor
from tacit.doors.optimizer import ProgressDoor
from tacit.errors import CheckpointError
from tacit.session import Session

VERSION = 1


def save(
    session: Session, transport: Transport, gradient: GradientDoor | None, progress: ProgressDoor | None
) -> dict[str, Any]:
    """The state as a dict of plain values and tensors (copies).

    Tensors are keyed by parameter, under `shared/` where they are equal on all ranks and under `rank{r}/`
    where they are this rank's own, so that torch.distributed.checkpoint keeps each of them apart.
    """
    state: dict[str, Any] = {
        "version": VERSION,
        "strategy": repr(session.strategy),
        "ranks": transport.peers(WORLD),
        "step": session.step,
        "round": session.round,
        "lots": [[slot.name for slot in lot.slots] for lot in session.lots],
        "layout": gradient.layout if gradient is not None else None,
    }
    tensors = _tensors(session, transport, progress)
    return state | {key: tensor.clone() for key, tensor in tensors.items()}


def load(
    state: Mapping[str, Any],
    session: Session,
    transport: Transport,
    gradient: GradientDoor | None,
    progress: ProgressDoor | None,
) -> None:
    """Go on from a saved state.

    Raises:
        CheckpointError: it is another strategy's, another model's, of another number of ranks or of a newer
            version, or it is not whole; nothing has been changed then.
    """
    _check(state, session, transport)
    expected = _tensors(session, transport, progress)
    missing = [key for key in expected if key not in state]
    wrong = [key for key in expected if key in state and state[key].shape != expected[key].shape]
    if missing or wrong:
        key = (missing or wrong)[0]
        raise CheckpointError(
            f"the checkpoint {'lacks' if missing else 'has another shape for'} {key!r}: it is not whole, "
            "or of another model"
        )
    session.recut(state["lots"])
    if progress is not None:
        progress.follow_lots()
    for key, tensor in _tensors(session, transport, progress).items():
        tensor.copy_(state[key])
    session.step, session.round = state["step"], state["round"]
    if gradient is not None:
        gradient.resume(state["layout"])


def _check(state: Mapping[str, Any], session: Session, transport: Transport) -> None:
    if not {"version", "strategy", "ranks", "lots"} <= state.keys():
        raise CheckpointError(
            "this is no state of a tacit session, or it was cut short: load what state_dict gave"
        )
    if state["version"] > VERSION:
        raise CheckpointError(
            f"the checkpoint is of version {state['version']}, and this tacit reads up to {VERSION}: "
            "update tacit"
        )
    if state["strategy"] != repr(session.strategy):
        raise CheckpointError(
            f"the checkpoint is of {state['strategy']}, and attached is {session.strategy!r}: attach the "
            "same strategy, or start without the session's state"
        )
    if state["ranks"] != transport.peers(WORLD):
        raise CheckpointError(
            f"the checkpoint is of {state['ranks']} ranks, and these are {transport.peers(WORLD)}: what each "
            "rank owes cannot be shared out anew yet; start without the session's state"
        )
    saved, here = ({n for lot in lots for n in lot} for lots in (state["lots"], _names(session)))
    if saved != here:
        raise CheckpointError(
            f"the checkpoint is of another model: {sorted(saved ^ here)[0]} is in one of them only"
        )


def _names(session: Session) -> list[list[str]]:
    return [[slot.name for slot in lot.slots] for lot in session.lots]


def _tensors(session: Session, transport: Transport, progress: ProgressDoor | None) -> dict[str, Tensor]:
    """Views of everything that is kept."""
    own = f"rank{transport.rank(WORLD)}"
    tensors = {
        f"{'shared' if kept.shared else own}/{name}/{field}": kept.tensor
        for (name, field), kept in session.named_state().items()
    }
    if progress is not None:
        tensors |= {
            f"shared/{name}/last common point": then for name, then in progress.common_point().items()
        }
    return tensors
