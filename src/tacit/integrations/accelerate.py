"""For Accelerate: `attach(accelerator, model, optimizer, "dgc")` after `accelerator.prepare`.

`tacit.attach(model, optimizer, "dgc", scaler=accelerator.scaler)` does the same but for the checkpoints. With
FSDP2, the accelerator is given the `ParallelismConfig` of this module.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tacit.api.attached import Attached
from tacit.errors import AttachError
from tacit.integrations.checkpoints import AllRanks
from tacit.integrations.managed import ManagedSession, imported, require
from tacit.strategy import AnyStrategy

LEAST = "1.12"
"""The first version of Accelerate that is supported."""
accelerate = imported("accelerate", f"accelerate>={LEAST}")


_Config: Any = accelerate.ParallelismConfig


class ParallelismConfig(_Config):  # type: ignore[misc]
    """Accelerate's, by which FSDP2 gets the ranks of one replica alone, and tacit joins the replicas.

    With Accelerate's own, FSDP2 averages gradients between the replicas too, in every step (HSDP). All else
    is as there: data is dealt out to all ranks.

    Args:
        dp_replicate_size: the number of replicas, such as machines or places.
        dp_shard_size: the number of ranks that share a replica.
    """

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axis that `fully_shard` gets."""
        return ["dp_shard_cp"]


def attach(
    accelerator: Any,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    strategy: AnyStrategy | str,
    **options: Any,
) -> Attached:
    """Put a strategy to work on what `accelerator.prepare` has returned. A collective call.

    `accelerator.save_state` then saves the state of all ranks' sessions, and `load_state` loads it. Before
    that, replicas that step alone are made equal, which is a round: every rank saves, as ever. Not those of a
    sharded model: call the session's `sync` before `save_state` if its model is to be used by itself.

    Args:
        accelerator: an `accelerate.Accelerator`; its GradScaler is used, where it has one.
        model: prepared, compiled or not.
        optimizer: prepared, or several.
        strategy: a value, or its text form such as "topk:ratio=0.01".
        options: `policy`, `timeout`, `steps_per_epoch`, `epochs`, `weight`, `servers`, `seed`,
            `exchange_on`, and for sharded models `mesh`, `group` and `reduction`, as `tacit.attach` has them.

    Returns:
        The session; a context manager, which closes it.

    Raises:
        ConfigError: the text is no strategy, or an option is none.
        AttachError: Accelerate is too old, there is one process, the model is not prepared, it has a
            communication hook, or it is sharded other than by FSDP2 within each replica; and what
            `tacit.attach` refuses.
    """
    require("accelerate", accelerate.__version__, LEAST)
    managed = ManagedSession(strategy, options)
    started = os.environ.get("WORLD_SIZE", "1")
    if accelerator.num_processes == 1 and started != "1":
        raise AttachError(
            f"{started} processes were started, and each accelerator is alone, as where there is no GPU: "
            "write Accelerator(cpu=True) for processes on CPUs"
        )
    if accelerator.num_processes == 1:
        raise AttachError(
            "the accelerator has one process, and nobody to exchange with: start the script by "
            "`accelerate launch --num_processes 2` or `torchrun --nproc-per-node 2`"
        )
    refuse_hook(accelerator)
    session = managed.open(model, optimizer, accelerator.scaler, mesh_of(accelerator, managed))

    def stepped(taken: Optimizer, *_: object) -> None:
        # Loading steps by a rate of zero, so that an optimizer without state has some.
        if not managed.looked and any(group["lr"] != 0 for group in taken.param_groups):
            managed.stepped()

    for each in session.optimizers[-1:]:
        each.register_step_post_hook(stepped)
    accelerator.register_for_checkpointing(AllRanks(session))
    if session.options.sharded is None:  # else it is called when the model is written
        accelerator.register_save_state_pre_hook(lambda *_: managed.sync())
    return session


def refuse_hook(accelerator: Any) -> None:
    """Refuse a communication hook of Accelerate's own.

    Raises:
        AttachError: says where it is asked for.
    """
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    if hook is not None and getattr(hook, "value", hook) != "no":
        raise AttachError(
            f"DistributedDataParallelKwargs(comm_hook={hook}) asks for a communication hook, and DDP takes "
            "only one: leave comm_hook out. tacit's 'powersgd', 'bf16' and 'fp16' do the same"
        )


def mesh_of(accelerator: Any, managed: ManagedSession) -> DeviceMesh | None:
    """The mesh of a sharded model's replicas; None for other models, and if the user names the replicas.

    Raises:
        AttachError: the model is sharded by something else, or no replica is left to exchange with.
    """
    kind, config = accelerator.distributed_type, accelerator.parallelism_config
    if kind == "DEEPSPEED":
        raise AttachError(
            "DeepSpeed partitions the model and reduces its gradients itself, which is not supported: use "
            "FSDP2, by FullyShardedDataParallelPlugin(fsdp_version=2), or plain DDP"
        )
    if kind != "FSDP" or managed.names_replicas:
        return None
    if not accelerator.is_fsdp2:
        raise AttachError(
            "fsdp_version=1 makes a FullyShardedDataParallel (FSDP1), and only FSDP2 is supported: write "
            "FullyShardedDataParallelPlugin(fsdp_version=2), or with Trainer fsdp_config={'version': 2}; "
            "Transformers before 5.0 ignores that, and wants FSDP_VERSION=2 in the environment"
        )
    if config is None or not config.dp_replicate_enabled or "dp_replicate" in config.fsdp_dim_names:
        raise AttachError(
            "FSDP2 averages the gradients of all ranks in every step, and nothing is left to save: import "
            "ParallelismConfig from tacit.integrations.accelerate, and write parallelism_config="
            "ParallelismConfig(dp_replicate_size=REPLICAS, dp_shard_size=RANKS_OF_ONE) for the Accelerator "
            "or TrainingArguments. If you call fully_shard yourself, name the replicas by mesh= or group="
        )
    mesh: DeviceMesh = accelerator.torch_device_mesh
    return mesh
