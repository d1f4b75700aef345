"""How the peers' answer is applied."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from tacit import checks
from tacit.contracts import (
    Application,
    Merge,
    State,
    add_mean_,
)
from tacit.errors import ConfigError
from tacit.exports import on_first_use
from tacit.kernels.deltas import move_

if TYPE_CHECKING:
    from tacit.merges.mix import Mix
else:
    __getattr__ = on_first_use(__name__)

__all__ = [
    "Average",
    "CommonPoint",
    "EagerStep",
    "Elastic",
    "LocalResidual",
    "Mix",
    "OuterStep",
    "Replace",
    "ServerParams",
    "SlowMo",
    "StaleMean",
]


@dataclass(frozen=True)
class Replace(Merge):
    """The mean replaces what was exchanged: the gradient."""

    subject: ClassVar[Literal["gradient"]] = "gradient"

    def apply_(
        self,
        params: Tensor,
        anchor: Tensor,
        mean: Tensor,
        local_delta: Tensor | None,
        state: State,
        at: Application,
    ) -> None:
        """Overwrite `params` by the mean."""
        params.copy_(mean)


@dataclass(frozen=True)
class Average(Merge):
    """The anchor moves by the mean of the replicas' deltas, and so to the mean of the replicas.

    Steps that a replica takes before a late answer are added to it (CoCoD-SGD: Shen et al., IJCAI 2019).
    """

    entrywise: ClassVar[bool] = True
    reads_params: ClassVar[Literal["late"]] = "late"

    def apply_(
        self,
        params: Tensor,
        anchor: Tensor,
        mean: Tensor,
        local_delta: Tensor | None,
        state: State,
        at: Application,
    ) -> None:
        """`anchor + mean`, the same bits on all ranks, as both are; one replica alone stays as it is."""
        if at.lag and local_delta is not None:
            anchor.add_(mean)
            params.add_(mean).sub_(local_delta)
        elif at.peers == 1 and at.lag == 0:
            add_mean_(anchor, mean, params)
            params.copy_(anchor)
        else:
            move_(anchor, mean, params)


@dataclass(frozen=True)
class LocalResidual(Merge):
    """The anchor moves by the mean of what was sent; a replica keeps the rest of its delta.

        anchor <- anchor + mean
        params <- anchor + the part of this replica's delta that was not sent

    What a compressor leaves out stays in the replica that made it, and is sent in a later round: nothing
    is lost. It takes the place of `ErrorFeedback`, whose residual is not in the parameters. With a random
    part of the entries in every round it is SPARTA (Exo Labs 2025).
    """

    keeps_unsent: ClassVar[bool] = True
    entrywise: ClassVar[bool] = True
    reads_params: ClassVar[Literal["never"]] = "never"
    needs_local_delta: ClassVar[Literal["always"]] = "always"

    @property
    def meets(self) -> bool:
        """False: replicas differ by what was not sent."""
        return False

    def apply_(
        self,
        params: Tensor,
        anchor: Tensor,
        mean: Tensor,
        local_delta: Tensor | None,
        state: State,
        at: Application,
    ) -> None:
        """Set `params` to the new anchor plus what was not sent."""
        assert local_delta is not None
        move_(anchor, mean, params, local_delta)


@dataclass(frozen=True)
class CommonPoint(LocalResidual):
    """`LocalResidual` whose result is the anchor, with answers that may come late.

    In `sync` and at the end all replicas move to the anchor, without a round: what each has not sent is set
    aside, and added again after the next step. The answer to a round that started some steps ago is added
    to the replica as it is then: params <- params + (mean - what this rank sent).

    With a server that keeps the parameters and answers with the difference to them (`Star` with a `pull`),
    each worker has an anchor for itself, which the server knows; in `sync` and at the end the replicas move
    to the server's parameters.
    """

    ends_at_anchor: ClassVar[bool] = True


@dataclass(frozen=True)
class ServerParams(Merge):
    """Each replica takes the parameters of a parameter server, and has an anchor for itself.

    Where the answer is applied late, the steps that the replica has taken meanwhile are added to it.

    Attributes:
        whole: whether the answer is the server's parameters; else it is their difference to what this
            worker has.
    """

    entrywise: ClassVar[bool] = True
    reads_params: ClassVar[Literal["late"]] = "late"
    subject: ClassVar[Literal["server"]] = "server"

    whole: bool = True

    def __post_init__(self) -> None:
        checks.flag("whole", self.whole)

    @property
    def meets(self) -> bool:
        """False: the server's parameters change between the answers to two workers."""
        return False

    def apply_(
        self,
        params: Tensor,
        anchor: Tensor,
        mean: Tensor,
        local_delta: Tensor | None,
        state: State,
        at: Application,
    ) -> None:
        """Set `anchor` to the server's parameters; `params` too, plus the steps made in the meantime."""
        if at.lag and local_delta is not None:
            params.sub_(anchor).sub_(local_delta)
        if self.whole:
            anchor.copy_(mean)
        else:
            anchor.add_(mean)
        if at.lag and local_delta is not None:
            params.add_(anchor)
        else:
            params.copy_(anchor)


@dataclass(frozen=True)
class StaleMean(Merge):
    """A replica moves towards the mean of what was sent, the less the later that comes.

    The merge of DASO (Coquelin et al. 2021):

        anchor <- anchor + mean                                    the mean of what was sent
        params <- (c S * params + P * anchor) / (c S + P)          S steps later, of P averaged

    The weight of an answer falls with its age S, which is the actual lag. One that is applied at once
    replaces the replica's parameters.

    Attributes:
        staleness: c, how much a step counts, above 0; the paper's is 2.
    """

    entrywise: ClassVar[bool] = True
    reads_params: ClassVar[Literal["late"]] = "late"
    needs_local_delta: ClassVar[Literal["never"]] = "never"

    staleness: float = 2.0

    def __post_init__(self) -> None:
        _check("staleness", self.staleness, lambda v: v > 0, "above 0, such as 2")

    def apply_(
        self,
        params: Tensor,
        anchor: Tensor,
        mean: Tensor,
        local_delta: Tensor | None,
        state: State,
        at: Application,
    ) -> None:
        """Move `params` towards the mean."""
        if not at.lag:
            move_(anchor, mean, params)
        else:
            anchor.add_(mean)
            own = self.staleness * at.lag
            torch.lerp(anchor, params, own / (own + at.parties), out=params)


@dataclass(frozen=True)
class OuterStep(Merge):
    """An outer SGD with minus the mean delta as gradient (DiLoCo: Douillard et al. 2023, algorithm 1).

        v    <- momentum * v - mean
        anchor <- anchor - lr * (momentum * v - mean)        with `nesterov`; else anchor - lr * v
        params <- local * params + (1 - local) * anchor

    It equals torch's SGD. With lr=1 and without Nesterov it is BMUF (Chen & Huo, ICASSP 2016) with
    block learning rate 1; with momentum 0 too, plain averaging.

    Attributes:
        lr: the outer learning rate, above 0.
        momentum: the outer momentum, from 0 to below 1.
        local: the share of its own parameters that a replica keeps, from 0 to below 1 (Streaming
            DiLoCo's alpha: Douillard et al. 2025; one minus Overlap-Local-SGD's). "steps": the steps that it
            has taken since the round left are added to the new anchor, so that each delta travels once.
    """

    entrywise: ClassVar[bool] = True

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    local: float | Literal["steps"] = 0.0

    def __post_init__(self) -> None:
        _check("lr", self.lr, lambda v: v > 0, "above 0, such as 0.7")
        _check("momentum", self.momentum, lambda v: 0 <= v < 1, "from 0 to below 1, such as 0.9")
        if self.local != "steps":
            _check("local", self.local, lambda v: 0 <= v < 1, "from 0 to below 1, such as 0.5, or 'steps'")

    @property
    def meets(self) -> bool:
        """Whether replicas are equal after an answer that comes at once, as `local` is 0."""
        return self.local in (0, "steps")

    def init(self, like: Tensor) -> State:
        """The outer momentum: zeros; nothing if `momentum` is 0."""
        return {"momentum": torch.zeros_like(like)} if self.momentum else {}

    @property
    def reads_params(self) -> Literal["always", "late", "never"]:  # type: ignore[override]
        return "late" if self.local == "steps" else "always" if self.local else "never"

    def apply_(
        self,
        params: Tensor,
        anchor: Tensor,
        mean: Tensor,
        local_delta: Tensor | None,
        state: State,
        at: Application,
    ) -> None:
        """Make an outer step of `anchor`, and pull `params` to it."""
        since = None
        if self.local == "steps" and at.lag and local_delta is not None:
            since = params.sub_(anchor).sub_(local_delta)
        if not self.momentum:
            anchor.add_(mean, alpha=self.lr)
        else:
            v = state["momentum"].mul_(self.momentum).sub_(mean)
            if self.nesterov:
                anchor.add_(mean, alpha=self.lr).sub_(v, alpha=self.lr * self.momentum)
            else:
                anchor.sub_(v, alpha=self.lr)
        if since is not None:
            since.add_(anchor)
        elif self.local and self.local != "steps":
            torch.lerp(anchor, params, self.local, out=params)
        else:
            params.copy_(anchor)


@dataclass(frozen=True)
class EagerStep(OuterStep):
    """An outer step by the mean delta of the period before, and at once by this replica's share of its own.

    Eager DiLoCo (Kale, Douillard & Donchev 2025, arXiv 2502.12996), for answers that come `period` steps
    late. With d the steps of this replica since the round left, of P replicas:

        anchor <- the outer step by the mean delta of that round
        params <- anchor + s d,   s = lr (1 + momentum) / P; lr / P without Nesterov

    So a replica steps by its own part of a mean before the others' parts have come; d is sent as s d.
    Where replicas are made equal, d counts whole.

    Attributes:
        period: the steps from round to round.
    """

    entrywise: ClassVar[bool] = True
    reads_params: ClassVar[Literal["late"]] = "late"

    local: float | Literal["steps"] = "steps"
    period: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole("period", self.period, 1, None, "write the steps from round to round, such as 32")

    def apply_(
        self,
        params: Tensor,
        anchor: Tensor,
        mean: Tensor,
        local_delta: Tensor | None,
        state: State,
        at: Application,
    ) -> None:
        """Make an outer step of `anchor`, and add the steps since to it."""
        share = self.lr * (1 + self.momentum * self.nesterov) / at.peers
        if at.since_equal > self.period:  # else no answer had come when the round left, and d was sent whole
            mean.div_(share)
        super().apply_(params, anchor, mean, local_delta, state, at)
        if at.lag == self.period:
            params.sub_(anchor).mul_(share).add_(anchor)


@dataclass(frozen=True)
class SlowMo(Merge):
    """Slow momentum, in units of the gradient (Wang et al., ICLR 2020).

        u    <- momentum * u - mean / lr
        anchor <- anchor - slow_lr * lr * u;   params <- anchor

    `lr` is the learning rate of the parameter's group in that step, so that a schedule of it scales the
    momentum too.

    Attributes:
        slow_lr: above 0; the paper's alpha.
        momentum: from 0 to below 1; the paper's beta.
    """

    by_learning_rate: ClassVar[bool] = True
    entrywise: ClassVar[bool] = True
    reads_params: ClassVar[Literal["never"]] = "never"

    slow_lr: float = 1.0
    momentum: float = 0.7

    def __post_init__(self) -> None:
        _check("slow_lr", self.slow_lr, lambda v: v > 0, "above 0, such as 1.0")
        _check("momentum", self.momentum, lambda v: 0 <= v < 1, "from 0 to below 1, such as 0.7")

    def init(self, like: Tensor) -> State:
        """The slow momentum: zeros."""
        return {"momentum": torch.zeros_like(like)}

    def apply_(
        self,
        params: Tensor,
        anchor: Tensor,
        mean: Tensor,
        local_delta: Tensor | None,
        state: State,
        at: Application,
    ) -> None:
        """Make a slow step of `anchor`, and copy it to `params`; where the learning rate is 0, average."""
        if at.lr == 0:
            anchor.add_(mean)
        else:
            u = state["momentum"].mul_(self.momentum).sub_(mean, alpha=1 / at.lr)
            anchor.sub_(u, alpha=self.slow_lr * at.lr)
        params.copy_(anchor)


@dataclass(frozen=True)
class Elastic(Merge):
    """Replicas and a centre pull at each other (EASGD: Zhang, Choromanska & LeCun, NIPS 2015).

        x_r  <- x_r - (beta / P) * (x_r - centre);   centre <- centre + beta * mean_r (x_r - centre)

    The anchor is the centre variable. Replicas stay different; the centre is what all take when a session
    closes, and after `sync`.

    Attributes:
        beta: above 0, below 2; the paper's P times alpha.
    """

    entrywise: ClassVar[bool] = True
    needs_local_delta: ClassVar[Literal["always"]] = "always"

    beta: float = 0.9

    def __post_init__(self) -> None:
        _check("beta", self.beta, lambda v: 0 < v < 2, "above 0 and below 2, such as 0.9")

    @property
    def meets(self) -> bool:
        """False: replicas stay different."""
        return False

    def apply_(
        self,
        params: Tensor,
        anchor: Tensor,
        mean: Tensor,
        local_delta: Tensor | None,
        state: State,
        at: Application,
    ) -> None:
        """Pull the replica to the centre, and the centre to the replicas."""
        assert local_delta is not None
        params.sub_(local_delta, alpha=self.beta / at.peers)
        anchor.add_(mean, alpha=self.beta)

    def consolidate_(self, anchor: Tensor, mean: Tensor, alone: Tensor | None = None) -> None:
        """Pull the centre to the replicas once more."""
        anchor.add_(mean, alpha=self.beta)


def _check(name: str, value: Any, possible: Callable[[float], bool], range_: str) -> None:
    number = isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)
    if not (number and possible(value)):
        raise ConfigError(f"{name}={value!r} is not possible: write a number {range_}")
