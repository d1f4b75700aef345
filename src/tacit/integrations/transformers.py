"""A callback for the Trainer of Hugging Face: `trainer.add_callback(Tacit("diloco", trainer))`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from tacit import described
from tacit.errors import AttachError, CheckpointError, ConfigError
from tacit.integrations.accelerate import mesh_of, refuse_hook
from tacit.integrations.checkpoints import load_ranks, state_of_rank
from tacit.integrations.managed import ManagedSession, imported, require
from tacit.strategy import AnyStrategy

LEAST = "4.57"
"""The first version of transformers that is supported."""
transformers = imported("transformers", f"transformers[torch]>={LEAST}")
_Callback: Any = transformers.TrainerCallback


class Tacit(_Callback):  # type: ignore[misc]
    """Attaches a strategy when training begins, and closes the session when it ends.

    Every rank writes its session into the folder of each checkpoint, as `tacit/rank0.pt` and so on. Before an
    evaluation and a checkpoint, replicas that step alone are made equal.

    Args:
        strategy: a value, or its text form such as "topk:ratio=0.01".
        trainer: the Trainer with the callback; it passes the model to callbacks without its wrapper.
        checkpoint: the folder of `trainer.train(resume_from_checkpoint=...)`, which callbacks do not get. By
            default: `args.resume_from_checkpoint`, else the one of `args.output_dir` with the step. False:
            the session starts anew, also if training goes on from a checkpoint.
        options: `policy`, `timeout`, `steps_per_epoch`, `epochs`, `weight`, `servers`, `seed`,
            `exchange_on`, and for sharded models `mesh`, `group` and `reduction`, as `tacit.attach` has them.

    Raises:
        ConfigError: the text is no strategy, an option is none, or `trainer` is no Trainer.
        AttachError: transformers is too old.
    """

    def __init__(
        self,
        strategy: AnyStrategy | str,
        trainer: Any,
        *,
        checkpoint: str | Path | Literal[False] | None = None,
        **options: Any,
    ) -> None:
        require("transformers", transformers.__version__, LEAST)
        if not hasattr(trainer, "model_wrapped"):
            raise ConfigError(
                f"trainer is a {type(trainer).__name__}, and no Trainer: write "
                'trainer.add_callback(Tacit("diloco", trainer))'
            )
        self._managed = ManagedSession(strategy, options)
        self._trainer, self._checkpoint = trainer, checkpoint

    @property
    def session(self) -> Any:
        """The `tacit.Attached` session while training goes on, as for `session.observe(loss)`; else None."""
        return self._managed.session

    # ---- Trainer calls these --------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attach, now that model and optimizer are wrapped; and load a checkpoint's session."""
        trainer = self._trainer
        if sum(isinstance(each, Tacit) for each in trainer.callback_handler.callbacks) > 1:
            raise AttachError(
                "Tacit is among the trainer's callbacks more than once, and one strategy exchanges at a "
                "time: leave one of them"
            )
        if args.world_size == 1:
            raise AttachError(
                "Trainer has one process, and nobody to exchange with: start the script by "
                "`torchrun --nproc-per-node 2` or `accelerate launch --num_processes 2`"
            )
        refuse_hook(trainer.accelerator)
        if self._managed.session is not None:
            self._managed.fail(RuntimeError("the training before was ended by an error"))
        scaler, mesh = trainer.accelerator.scaler, mesh_of(trainer.accelerator, self._managed)
        session = self._managed.open(trainer.model_wrapped, trainer.optimizer, scaler, mesh)
        if state.global_step and self._checkpoint is not False:
            files = self._files(args, state)
            load_ranks(session, len(files), lambda rank: _read(files[rank]))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check after the first step that something was exchanged; make replicas equal where that is due."""
        self._managed.stepped()
        self._be_equal(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Be equal for what follows."""
        self._be_equal(control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write this rank's session next to Trainer's files."""
        session = self._managed.session
        if session is None or args.save_only_model:
            return
        folder = _folder_of(args, state) / "tacit"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state_of_rank(session), folder / f"rank{args.process_index}.pt")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close."""
        self._managed.close()

    def _be_equal(self, control: Any) -> None:
        """Before Trainer evaluates, saves, or ends and loads the best model: its control says so."""
        if control.should_evaluate or control.should_save or control.should_training_stop:
            self._managed.sync()

    def _files(self, args: Any, state: Any) -> list[Path]:
        """What all ranks have written, in their order."""
        named = self._checkpoint or args.resume_from_checkpoint
        folder = (Path(named) if isinstance(named, str | Path) else _folder_of(args, state)) / "tacit"
        files = [folder / f"rank{rank}.pt" for rank in range(len([*folder.glob("rank*.pt")]))]
        if not files or not all(file.exists() for file in files):
            raise CheckpointError(
                f"training goes on from step {state.global_step}, and {folder} has no sessions of all ranks: "
                "write Tacit(..., checkpoint=FOLDER) with the folder that train(resume_from_checkpoint=...) "
                "is given, or checkpoint=False to begin without their state"
            )
        return files


def _read(file: Path) -> Any:
    try:
        return described.load(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the session in {file} cannot be read ({error}): resume from an earlier checkpoint"
        ) from error


def _folder_of(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
