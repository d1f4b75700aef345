"""For Accelerate: `attach(accelerator, model, optimizer, "dgc")` after `accelerator.prepare`.

`tacit.attach(model, optimizer, "dgc", scaler=accelerator.scaler)` does the same but for the checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tacit.api.attached import Attached
from tacit.errors import AttachError
from tacit.integrations.checkpoints import AllRanks
from tacit.integrations.managed import ManagedSession, imported, require
from tacit.strategy import AnyStrategy

LEAST = "1.12"
"""The first version of Accelerate that is supported."""
accelerate = imported("accelerate", f"accelerate>={LEAST}")


def attach(
    accelerator: Any,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    strategy: AnyStrategy | str,
    **options: Any,
) -> Attached:
    """Put a strategy to work on what `accelerator.prepare` has returned. A collective call.

    `accelerator.save_state` then saves the state of all ranks' sessions, and `load_state` loads it. Before
    that, replicas that step alone are made equal, which is a round: every rank saves, as ever.

    Args:
        accelerator: an `accelerate.Accelerator`; its GradScaler is used, where it has one.
        model: prepared, compiled or not.
        optimizer: prepared, or several.
        strategy: a value, or its text form such as "topk:ratio=0.01".
        options: `policy`, `timeout`, `steps_per_epoch`, `epochs`, `weight`, `servers`, `seed` and
            `exchange_on`, as `tacit.attach` has them.

    Returns:
        The session; a context manager, which closes it.

    Raises:
        ConfigError: the text is no strategy, or an option is none.
        AttachError: Accelerate is too old, there is one process, the model is not prepared, or it has a
            communication hook; and what `tacit.attach` refuses.
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
    session = managed.open(model, optimizer, accelerator.scaler)
    for each in session.optimizers[-1:]:
        each.register_step_post_hook(lambda *_: managed.stepped())
    accelerator.register_for_checkpointing(AllRanks(session))
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
