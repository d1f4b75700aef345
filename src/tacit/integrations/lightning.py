"""A callback for Lightning's Trainer: `Trainer(strategy="ddp", callbacks=[Tacit("dgc")])`.

Works with `lightning` and with `pytorch_lightning`. Where both are installed, import the one that you use
before this module.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from tacit.errors import AttachError
from tacit.integrations.checkpoints import AllRanks
from tacit.integrations.managed import ManagedSession, imported, require
from tacit.strategy import AnyStrategy
from tacit.torch_compat import lightning_hook

LEAST = "2.6"
"""The first version of Lightning that was tried."""
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

_REFUSED = {
    "FSDPStrategy": "makes a FullyShardedDataParallel (FSDP1)",
    "DeepSpeedStrategy": "has DeepSpeed partition the model and reduce its gradients",
}


def _found() -> list[Any]:
    """The packages that the program has imported; where it has none, one that is installed."""
    installed = [name for name in _PACKAGES if find_spec(name.partition(".")[0]) is not None]
    names = [name for name in _PACKAGES if name in sys.modules] or installed[:1] or _PACKAGES[:1]
    return [imported(name, f"lightning>={LEAST}") for name in names]


_FOUND = _found()
_Callback: Any = type("_Callback", tuple(each.Callback for each in _FOUND), {})


class Tacit(_Callback):  # type: ignore[misc]
    """Attaches a strategy when training starts, and closes the session when it ends.

    Lightning's checkpoints then hold the state of all ranks' sessions, and a run that goes on from one goes
    on with it. Before a validation and a checkpoint, replicas that step alone are made equal.

    Args:
        strategy: a value, or its text form such as "topk:ratio=0.01".
        options: `policy`, `timeout`, `steps_per_epoch`, `epochs`, `weight`, `servers`, `seed`,
            `exchange_on`, and for sharded models `mesh`, `group` and `reduction`, as `tacit.attach` has them.

    Raises:
        ConfigError: the text is no strategy, or an option is none.
        AttachError: Lightning is too old.
    """

    def __init__(self, strategy: AnyStrategy | str, **options: Any) -> None:
        for each in _FOUND:
            require("lightning", each.__version__, LEAST)
        self._managed = ManagedSession(strategy, options)
        self._loaded: dict[str, Any] = {}
        self._first = 0
        self._sharded: list[Any] = []

    @property
    def session(self) -> Any:
        """The `tacit.Attached` session while training goes on, as for `session.observe(loss)`; else None."""
        return self._managed.session

    @property
    def state_key(self) -> str:
        """By which checkpoints name the session's state, whatever the strategy."""
        return "tacit"

    # ---- Lightning calls these ------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a trainer that cannot work, before anything is made."""
        if sum(isinstance(each, Tacit) for each in trainer.callbacks) > 1:
            raise AttachError(
                "Tacit is among the trainer's callbacks more than once, and one strategy exchanges at a "
                "time: leave one of them"
            )
        if stage != "fit":
            return
        name = type(trainer.strategy).__name__
        if name in _REFUSED:
            raise AttachError(
                f"{name} {_REFUSED[name]}, which is not supported: write "
                "Trainer(strategy=ModelParallelStrategy()), and call fully_shard (FSDP2) in configure_model"
            )
        if trainer.world_size == 1:
            raise AttachError(
                f"the trainer has one process ({name}), and nobody to exchange "
                'with: write Trainer(devices=2, strategy="ddp"), or Trainer(devices=1, num_nodes=2, ...)'
            )
        if lightning_hook(trainer.strategy) is not None:
            raise AttachError(
                "the trainer's strategy has a communication hook (DDPStrategy(ddp_comm_hook=...)), and DDP "
                'takes only one: leave it out, as in Trainer(strategy="ddp")'
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, now that the optimizers are there and a checkpoint is loaded."""
        model, mesh = trainer.strategy.model, getattr(trainer.strategy, "device_mesh", None)
        self._sharded = [each for each in model.modules() if hasattr(each, "set_requires_all_reduce")]
        if not self._sharded and not isinstance(model, DistributedDataParallel):
            raise AttachError(
                f"{type(trainer.strategy).__name__} has made no DistributedDataParallel of the model, and "
                'configure_model has not called fully_shard (FSDP2): write Trainer(strategy="ddp"), or for '
                "FSDP2 Trainer(strategy=ModelParallelStrategy())"
            )
        sampler = getattr(trainer.train_dataloader, "sampler", None)
        dealt = getattr(sampler, "num_replicas", trainer.world_size)
        if self._sharded and dealt < trainer.world_size:
            raise AttachError(
                f"ModelParallelStrategy gives several ranks the same batches, {dealt} to "
                f"{trainer.world_size} ranks, as for tensor parallelism: write DataLoader(..., "
                "sampler=DistributedSampler(dataset)) in train_dataloader, which deals out to all ranks"
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        session = self._managed.open(model, trainer.optimizers, scaler, mesh)
        self._first = trainer.global_step
        loaded, self._loaded = self._loaded, {}
        if loaded:
            AllRanks(session).load_state_dict(loaded)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, i: int) -> None:
        """Have a sharded model's gradients exchanged once a step, as those of DDP are."""
        every, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
        last = (i + 1) % every == 0 or i + 1 >= batches or trainer.is_last_batch
        for each in self._sharded:
            each.set_requires_all_reduce(last, recurse=False)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Check after the first step that something was exchanged."""
        if trainer.global_step > self._first:
            self._managed.stepped()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validate the mean of the replicas."""
        self._managed.sync()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Be equal for what is saved without asking callbacks for their state."""
        if any(getattr(each, "save_weights_only", False) for each in trainer.checkpoint_callbacks):
            self._managed.sync()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close."""
        self._managed.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let go."""
        self._managed.fail(exception)

    def state_dict(self) -> dict[str, Any]:
        """Of all ranks on rank 0; all of them are asked when a checkpoint is made."""
        if self._sharded:
            self._managed.sync()
        return {} if self._managed.session is None else AllRanks(self._managed.session).state_dict()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save what replicas of shards are since `state_dict`: the shards that are there are older copies."""
        if self._sharded and self._managed.session is not None and self._managed.session.options.periodic:
            checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until training starts."""
        self._loaded = state_dict
