"""The bare hook: a strategy for torch's `register_comm_hook(state, hook)`, without `attach`."""

# No `from __future__ import annotations` here: DDP checks the hook's annotations as objects.
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tacit.algorithms.registry import strategy_of
from tacit.api import observers
from tacit.api.attached import Attached, refuse_second
from tacit.attaching.arguments import check_kinds, ddp_of
from tacit.attaching.requirements import fitted
from tacit.errors import AttachError
from tacit.gradients.ddp_hook import HookDispatcher
from tacit.levels.spec import AttachSpec
from tacit.model.not_copied import NotCopied
from tacit.model.torch_modes import shielded
from tacit.session.buckets import Policy
from tacit.strategy import AnyStrategy, AutoStrategy
from tacit.timelines import Timeline
from tacit.torch_compat import GradBucket

_INSTEAD = {
    "delta": "exchanges after optimizer.step, which no communication hook sees: write "
    "tacit.attach(model, optimizer, {!r})",
    "nothing": "leaves DDP as it is: register no hook, or one with 'dense'",
}


class CommState(NotCopied):
    """The `state` of `comm_hook`: a strategy at work on one DDP model's gradients.

    Made after DDP and before the hook is registered. A collective call: every rank of the model's group makes
    it. As no optimizer is known, a step counts when its backward has ended.

    Args:
        model: the wrapped model, without a communication hook.
        strategy: a value, or its text form such as "topk:ratio=0.01"; one that exchanges gradients.
        scaler: as for `attach`; so are `policy`, `timeout`, `mesh` and `seed`.

    Raises:
        ConfigError: the strategy's text is wrong.
        AttachError: the model or the strategy does not fit, or ranks differ in them.
    """

    @shielded
    def __init__(
        self,
        model: DistributedDataParallel,
        strategy: AnyStrategy | str,
        *,
        scaler: GradScaler | None = None,
        policy: Policy | None = None,
        timeout: timedelta | None = None,
        mesh: DeviceMesh | None = None,
        seed: int = 0,
    ) -> None:
        observers.called("CommState")
        strategy = strategy_of(strategy)
        if isinstance(strategy, AutoStrategy):
            raise AttachError(
                f"{strategy.name!r} chooses after an optimizer.step, which no communication hook sees: "
                f"write tacit.attach(model, optimizer, {strategy.name!r})"
            )
        (nearest, *farther) = strategy.levels
        if farther or nearest.subject != "gradient":
            why = _INSTEAD["delta" if farther else nearest.subject]
            raise AttachError(f"{strategy.name!r} {why.format(strategy.name)}")
        if nearest.overlap.layerwise:
            raise AttachError(
                f"{strategy.name!r} takes gradients before DDP's communication hook gets them: "
                f"write tacit.attach(model, optimizer, {strategy.name!r})"
            )
        check_kinds(policy, timeout, mesh)
        model = ddp_of(model)
        refuse_second(model)
        spec = fitted(
            AttachSpec(
                model=model,
                optimizers=[],
                strategy=strategy,
                scaler=scaler,
                policy=policy,
                timeout=timeout,
                mesh=mesh,
                seed=seed,
            )
        )
        self._dispatcher = HookDispatcher.unregistered(model)
        self._attached = Attached(spec, self._dispatcher)
        self._known = {id(p) for p in model.parameters()}

    def _answer(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if not self._known.issuperset(map(id, bucket.parameters())):
            raise AttachError("this CommState was made for another model: make one for each DDP object")
        return self._dispatcher.answer(bucket)

    def metrics(self) -> dict[str, float]:
        """The numbers of this rank; see `Attached.metrics`."""
        return self._attached.metrics()

    def timeline(self) -> Timeline:
        """What this rank was doing when; see `Attached.timeline`."""
        return self._attached.timeline()

    @property
    def active_path(self) -> str:
        """What is really at work, in one sentence; see `Attached.active_path`."""
        return self._attached.active_path

    def describe(self) -> str:
        """What is really at work, in lines; see `Attached.describe`."""
        return self._attached.describe()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; see `Attached.state_dict`."""
        return self._attached.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, bit for bit; see `Attached.load_state_dict`."""
        self._attached.load_state_dict(state_dict)

    def close(self) -> None:
        """End the session: the hook stays, as torch cannot take it away, and averages as plain DDP does."""
        self._attached.close()

    def __enter__(self) -> Self:
        self._attached.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._attached.__exit__(kind, error, trace)


def comm_hook(state: CommState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook: `ddp.register_comm_hook(tacit.CommState(ddp, "topk:ratio=0.01"), tacit.comm_hook)`.

    Raises:
        AttachError: the state is no `CommState`, or is that of another model.
        RoundError: a round failed; the message names the rank. Backward raises it.
    """
    if not isinstance(state, CommState):
        raise AttachError(
            f"the state of comm_hook is a {type(state).__name__}: write "
            "ddp.register_comm_hook(tacit.CommState(ddp, 'topk:ratio=0.01'), tacit.comm_hook)"
        )
    return state._answer(bucket)
