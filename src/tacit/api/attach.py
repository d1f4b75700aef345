"""`attach`: puts a strategy to work on a DDP model, and returns the session that ends it."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from difflib import get_close_matches
from functools import cache, wraps
from typing import TYPE_CHECKING, Literal, ParamSpec

import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tacit.algorithms import parse
from tacit.algorithms.registry import strategy_of
from tacit.api import observers
from tacit.api.attached import Attached, refuse_second
from tacit.attaching.arguments import check_kinds, model_of, optimizers_of
from tacit.attaching.requirements import fitted
from tacit.environment import ALGORITHM
from tacit.errors import AttachError, ConfigError
from tacit.levels.spec import AttachSpec
from tacit.model.sharded_model import Reduction
from tacit.model.torch_modes import shielded
from tacit.session.buckets import Policy
from tacit.strategy import AnyStrategy, AutoStrategy

if TYPE_CHECKING:
    from tacit.members.roster import Members
    from tacit.planning.decider import Decider

Given = ParamSpec("Given")
_log = logging.getLogger("tacit")


def from_env(variable: str = ALGORITHM) -> AnyStrategy:
    """The strategy that an environment variable names; plain `ddp` where it is not set, which is logged once.

    Raises:
        ConfigError: the text is no strategy.
    """
    observers.called("from_env")
    text = os.environ.get(variable, "ddp")
    if variable not in os.environ:
        _log_unset(variable)
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"environment variable {variable}={text!r}: {error}") from None


@cache
def _log_unset(variable: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        _log.warning("%s is not set: training with plain DDP ('ddp')", variable)


def _suggesting(call: Callable[Given, Attached]) -> Callable[Given, Attached]:
    """The function, whose error for an unknown argument also names the nearest known one."""
    known = [*inspect.signature(call).parameters]

    @wraps(call)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Attached:
        for name in kwargs:
            near = get_close_matches(name, known, n=1)
            if name not in known and near:
                raise TypeError(f"attach() has no argument {name!r}. Did you mean {near[0]!r}?")
        return call(*args, **kwargs)

    return called


@_suggesting
@shielded
def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    strategy: AnyStrategy | str = "auto",
    *,
    scaler: GradScaler | None = None,
    policy: Policy | None = None,
    timeout: timedelta | None = None,
    steps_per_epoch: int | None = None,
    epochs: int | None = None,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    weight: float | None = None,
    servers: Sequence[str] | None = None,
    seed: int = 0,
    exchange_on: Literal["device", "host"] | None = None,
    reduction: Reduction = "mean",
    probe: bool = False,
    decider: Decider | None = None,
    members: Members | None = None,
) -> Attached:
    """Put a strategy to work on a model of DDP or FSDP2. A collective call: every rank of the model makes it.

    Args:
        model: a DistributedDataParallel, compiled or not, or a model that `fully_shard` shards along the near
            axis of a mesh: its gradients or parameters are averaged along the far axis. Only torch's hooks
            are used, and nothing is patched.
        optimizer: the optimizer of the model's parameters, or a list of all that step them. A step counts
            when each has stepped, or when one is about to step again. Wrappers of Accelerate and Lightning
            are accepted. None is enough if gradients are exchanged.
        strategy: a value, or its text form such as "topk:ratio=0.01". By default "auto", which chooses by
            what the first steps have measured; where a rank is alone, it is "ddp".
        scaler: the GradScaler that scales the loss, if there is one. All ranks then skip a step in which a
            gradient overflows, where infinity is an error without it; replicas that step alone skip steps
            alone. Steps are then counted by backward passes: accumulate under `no_sync`. With `members` each
            skips steps alone, and steps are counted as without a scaler.
        policy: `(name, parameter) -> Compressor | None` chooses the compressor of each parameter; None: it is
            sent dense. By default it is the strategy's compressor, or dense for parameters that this exempts,
            mostly those of fewer than two dimensions.
        timeout: the time after which a peer that does not answer is an error, such as timedelta(minutes=5);
            by default that of the process group.
        steps_per_epoch: steps of the optimizer in an epoch, for strategies that depend on epochs:
            len(loader) // accumulation, where so many backward passes make one step.
        epochs: the number of epochs of the training, for strategies that change towards its end.
        mesh: the mesh of nodes x ranks of a node, for strategies by node; by default it is known from
            torchrun or Slurm. For a sharded model: the mesh of which `fully_shard` got all axes but one.
        group: for a sharded model without such a mesh, the ranks that have the same shards as this one.
        weight: the weight of this rank in averages of replicas, and in means of gradients between two
            averages: above 0, such as its number of samples (FedAvg: McMahan et al. 2017). By default all
            weights are equal.
        servers: host:port of each parameter server, in the same order everywhere; by default those that the
            launcher names (`TACIT_SERVERS`).
        seed: decides all random choices while ranks train, such as which entries are sent and how levels are
            rounded; 0 or more, the same on every rank. PowerSGD's first factors and what a server draws do
            not depend on it.
        exchange_on: for a model on a GPU, where its exchanges run: on the GPU in stream order ("device"; with
            NCCL, and a strategy that needs no value on the host), or on the host, on copies that travel by
            Gloo ("host": less memory on the GPU, as residuals and anchors are on the host). By default
            on the GPU if that is possible. `session.active_path` says which, and why.
        reduction: how gradients of a sharded model are reduced along the far axis: "mean", or "sum" if the
            loss is divided by the samples of all ranks, as torchtitan's is.
        probe: whether to measure the links between all ranks' nodes now, for about a second a pair of nodes:
            `session.links` then has them, and a topology `Auto()` weighs their latency.
        decider: for "auto": chooses the strategy by what the first steps have measured. It has the same type
            on every rank. By default the planner, which predicts how long a step takes with each candidate.
        members: for replicas that join, leave and die while training goes on: how many there may be, and
            where they find each other. Each is a process with a world of its own, or a world of ranks among
            which FSDP2 shards it; all have equally many shards (`Members(shards=)`). The session is then a
            `MemberSession`.

    Returns:
        The attached session: a context manager. `close` (or leaving the block) removes the optimizer's hooks.
        DDP keeps its communication hook for life, which then averages as plain DDP does; FSDP2's hooks are
        removed, and it then averages along its near axis only.

    Raises:
        ConfigError: the strategy's text, or a number, is wrong.
        AttachError: the model or the optimizer does not fit, or ranks differ in model or strategy.
        PeerLost: a rank is gone or frozen, or does not attach.
    """
    observers.called("attach")
    strategy = strategy_of(strategy)
    check_kinds(policy, timeout, mesh)
    trained = model_of(model, mesh, group, members is not None)
    refuse_second(trained)
    if isinstance(strategy, AutoStrategy) and members is None and trained.process_group.size() == 1:
        _log.warning("'auto' has nothing to choose, as this rank is alone: training with plain DDP ('ddp')")
        strategy, decider = strategy_of("ddp"), None
    spec = AttachSpec(
        model=trained,
        optimizers=optimizers_of(optimizer),
        strategy=strategy,
        scaler=scaler,
        policy=policy,
        timeout=timeout,
        steps_per_epoch=steps_per_epoch,
        epochs=epochs,
        mesh=mesh,
        weight=weight,
        servers=servers,
        seed=seed,
        exchange_on=exchange_on,
        reduction=reduction,
        probe=probe,
    )
    if members is not None:
        from tacit.api.members import MemberSession

        return MemberSession(spec, members)
    if isinstance(strategy, AutoStrategy):
        from tacit.api.auto import AutoSession
        from tacit.planning.planner import Planner

        return AutoSession(spec, strategy, decider or Planner())
    if decider is not None:
        raise AttachError(
            f"decider= is for 'auto', and {strategy.name!r} is named: leave it out, or write 'auto'"
        )
    if strategy.levels[0].overlap.into_forward:
        from tacit.gradients.layerwise.forward_steps import refuse_compiled

        refuse_compiled(model, strategy.name)
    return Attached(fitted(spec))
