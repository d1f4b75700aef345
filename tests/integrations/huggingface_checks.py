"""Accelerate, and the Trainer of transformers, on two ranks."""

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import frameworks
import mlflow
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from frameworks import (
    GRADIENT,
    PROGRESS,
    STEPS,
    WORLD,
    accelerated_loop,
    batches,
    network,
    optimizer_of,
    plain_losses,
)
from rank_training import Checks, flat, raises, same_on_all_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainingArguments

import tacit
from tacit.errors import AttachError, CheckpointError, ConfigError
from tacit.integrations import accelerate, transformers
from tacit.integrations.transformers import Tacit

CHECKS, ALONE = Checks(), Checks()
check = CHECKS.add
Trained = tuple[Tensor, Tensor]
"""The losses of all passes, and the parameters."""


class Net(nn.Module):
    """Gives its own loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.net(x).float(), labels)}


def plain(algorithm: str, micro: int = 1, clip: float | None = None, bf16: bool = False) -> Trained:
    """The same training with `tacit.attach` in a loop of its own."""
    net = Net()
    autocast = torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext()
    losses = plain_losses(algorithm, net, lambda model, x, y: model(x, y)["loss"], autocast, micro, clip)
    assert same_on_all_ranks(flat(net))
    return losses, flat(net)


def same(a: Trained, b: Trained) -> None:
    assert torch.equal(a[0], b[0]), (a[0], b[0])
    assert torch.equal(a[1], b[1])


def shared_folder(own: str) -> Path:
    folder = [own]
    dist.broadcast_object_list(folder, 0)
    return Path(folder[0])


# ---- Accelerate ---------------------------------------------------------------------------------------


def accelerator(**options: Any) -> Accelerator:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def accelerated(
    algorithm: str,
    micro: int = 1,
    clip: float | None = None,
    save: Path | None = None,
    load: Path | None = None,
    **options: Any,
) -> Trained:
    with_it = accelerator(gradient_accumulation_steps=micro, **options)
    net = Net()
    losses, _ = accelerated_loop(
        with_it, net, optimizer_of(algorithm, net), algorithm, micro, clip, save, load
    )
    return losses, flat(net)


@check
def accelerate_is_a_plain_attach() -> None:
    for algorithm in (GRADIENT, PROGRESS):
        same(accelerated(algorithm, 2, 0.5), plain(algorithm, 2, 0.5))
        same(accelerated(algorithm, mixed_precision="bf16"), plain(algorithm, bf16=True))


@check
def a_run_of_accelerate_goes_on_from_its_checkpoint() -> None:
    for algorithm in (GRADIENT, PROGRESS):
        with tempfile.TemporaryDirectory() as own:
            folder = shared_folder(own)
            losses, parameters = accelerated(algorithm, save=folder)
            again = accelerated(algorithm, load=folder)
            dist.barrier()
        same(again, (losses[4:], parameters))


@check
def a_session_that_is_registered_by_itself_is_refused_where_it_is_loaded() -> None:
    """Accelerate writes rank 0's state: the error tells what to register."""
    with_it, net = accelerator(), Net()
    model, optimizer = with_it.prepare(net, optimizer_of("topk", net))
    with tacit.attach(model, optimizer, "topk") as session, tempfile.TemporaryDirectory() as own:
        folder = shared_folder(own)
        with_it.register_for_checkpointing(session)
        with_it.save_state(folder)
        dist.barrier()
        says = "give tacit.integrations.AllRanks(session)" if dist.get_rank() else "another rank cannot load"
        raises(CheckpointError, lambda: with_it.load_state(folder), says)
        dist.barrier()


@check
def what_accelerate_cannot_do_is_refused() -> None:
    net = Net()
    says = "With Accelerate, on two ranks or more: after model, optimizer = accelerator.prepare(model, "
    raises(AttachError, lambda: tacit.attach(net, optimizer_of("topk", net), "topk"), says)
    with_it = accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="bf16")])
    model, optimizer = with_it.prepare(net, optimizer_of("topk", net))
    says = "DistributedDataParallelKwargs(comm_hook=bf16) asks for a communication hook"
    raises(AttachError, lambda: accelerate.attach(with_it, model, optimizer, "topk"), says)


@check
def gradients_that_bypass_accelerates_ddp_are_an_error() -> None:
    with_it, net = accelerator(), Net()
    model, optimizer = with_it.prepare(net, optimizer_of("topk", net))
    session = accelerate.attach(with_it, model, optimizer, "topk")
    with_it.backward(net(*batches(1)[0])["loss"])
    raises(
        AttachError, optimizer.step, "gradients that 'topk' has not exchanged, as DDP did not call its hook"
    )
    session.close()


# ---- Trainer ------------------------------------------------------------------------------------------


class Recorded(Trainer):
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.losses: list[Tensor] = []

    def compute_loss(self, *given: Any, **options: Any) -> Any:
        loss = super().compute_loss(*given, **options)
        if torch.is_grad_enabled():
            self.losses.append((loss[0] if isinstance(loss, tuple) else loss).detach())
        return loss


def dataset(micro: int) -> list[dict[str, Tensor]]:
    """Every rank's batches as Trainer deals them out: one batch to each rank in turn."""
    mine = batches(STEPS * micro)
    both: list[Any] = [None] * WORLD
    dist.all_gather_object(both, mine)
    dealt = [batch for each in zip(*both, strict=True) for batch in each]
    return [{"x": x, "labels": y} for xs, ys in dealt for x, y in zip(xs, ys, strict=True)]


def trainer_of(algorithm: str, folder: Path | str, micro: int = 1, **options: Any) -> Recorded:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    net = Net()
    options = {"max_grad_norm": 0.0, "save_strategy": "no", "num_train_epochs": 1, **options}
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=micro,
        train_sampling_strategy="sequential",
        ddp_find_unused_parameters=False,
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        **options,
    )
    optimizer = optimizer_of(algorithm, net)
    still = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    data = dataset(micro)
    return Recorded(net, args, train_dataset=data, eval_dataset=data[:16], optimizers=(optimizer, still))


def train(
    algorithm: str, folder: Path | str = "unused", resume: Path | None = None, **options: Any
) -> Trained:
    trainer = trainer_of(algorithm, folder, **options)
    trainer.add_callback(Tacit(algorithm, trainer))
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return torch.stack(trainer.losses), flat(trainer.model)


@check
def the_trainer_is_a_plain_attach() -> None:
    for algorithm in (GRADIENT, PROGRESS):
        same(train(algorithm, micro=2, max_grad_norm=0.5), plain(algorithm, 2, 0.5))
        same(train(algorithm, bf16=True), plain(algorithm, bf16=True))


@check
def a_compiled_model_is_a_plain_attach() -> None:
    compiled = train(GRADIENT, torch_compile=True, torch_compile_backend="eager")
    same(compiled, plain(GRADIENT))


@check
def a_run_of_the_trainer_goes_on_from_its_checkpoint() -> None:
    for algorithm in (GRADIENT, PROGRESS):
        with tempfile.TemporaryDirectory() as own:
            folder = shared_folder(own)
            losses, parameters = train(algorithm, folder, save_strategy="steps", save_steps=4)
            dist.barrier()
            again = train(algorithm, folder, resume=folder / "checkpoint-4")
            dist.barrier()
            bare = Tacit(algorithm, trainer_of(algorithm, folder), checkpoint=folder)
            says = "write Tacit(..., checkpoint=FOLDER)"
            raises(CheckpointError, lambda bare=bare, says=says: bare._files(*_at(4)), says)
            dist.barrier()
            (folder / "checkpoint-4" / "tacit" / "rank1.pt").write_bytes(b"PK half")
            half = Tacit(algorithm, trainer_of(algorithm, folder), checkpoint=folder / "checkpoint-4")
            says = "cannot be read (it is damaged, or cut short"
            files = half._files(*_at(4))
            raises(CheckpointError, lambda file=files[1], says=says: transformers._read(file), says)
            dist.barrier()
        same(again, (losses[4:], parameters))


def _at(step: int) -> tuple[Any, Any]:
    class At:
        global_step, resume_from_checkpoint = step, None

    return At, At


@check
def replicas_are_equal_where_the_trainer_evaluates_and_loads_the_best() -> None:
    seen = []

    class Looking(Recorded):
        def evaluate(self, *given: Any, **options: Any) -> Any:
            seen.append(flat(self.model))
            return super().evaluate(*given, **options)

    algorithm = "diloco:sync_every=100"
    with tempfile.TemporaryDirectory() as own, patch.dict(globals(), {"Recorded": Looking}):
        folder = shared_folder(own)
        every = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
        _, parameters = train(algorithm, folder, load_best_model_at_end=True, **every)
        best = [*seen]
        train(algorithm, folder, save_strategy="no", eval_strategy="epoch", num_train_epochs=2)
    assert (len(best), len(seen)) == (2, 4)
    assert all(same_on_all_ranks(each) for each in seen)
    assert any(torch.equal(parameters, each) for each in best), "the best model was changed by closing"


@check
def what_the_trainer_cannot_do_is_refused() -> None:
    trainer = trainer_of("topk", "unused")
    trainer.add_callback(Tacit("topk", trainer))
    trainer.add_callback(Tacit("topk", trainer))
    raises(AttachError, trainer.train, "Tacit is among the trainer's callbacks more than once")


@check
def another_optimizer_than_the_attached_one_is_an_error() -> None:
    class Swapping(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            trainer.optimizer = trainer.accelerator.prepare(optimizer_of("topk", trainer.model))

    trainer = trainer_of("topk", "unused")
    trainer.add_callback(Tacit("topk", trainer))
    trainer.add_callback(Swapping())
    raises(AttachError, trainer.train, "and 'topk' was attached with AdamW, so it would not see the step")
    trainer.remove_callback(Swapping)
    trainer.train()  # Trainer tells callbacks of no error: what is left of the first training is ended here
    assert same_on_all_ranks(flat(trainer.model))


@check
def gradients_that_bypass_the_trainers_ddp_are_an_error() -> None:
    bypass = lambda ddp, *args, **named: ddp.module(*args, **named)  # noqa: E731
    with patch.object(DistributedDataParallel, "forward", bypass):
        says = "gradients that 'topk' has not exchanged, as DDP did not call its hook"
        raises(AttachError, lambda: train("topk"), says)


@check
def the_page_is_right() -> None:
    accelerator()
    frameworks.run_page("Accelerator(cpu=")
    accelerator()
    frameworks.run_page("use_cpu=no_gpus")


@check
def trackers_of_the_trainer_get_the_sessions_numbers_by_the_page() -> None:
    accelerator()
    sent: list[dict[str, Any]] = []
    logged = patch("wandb.Run.log", lambda _, data, *rest, **named: sent.append(data))
    with patch.dict("os.environ", WANDB_MODE="offline", WANDB_SILENT="true"), logged:
        frameworks.run_page("class Watched")
    rank0 = dist.get_rank() == 0
    assert [each["train/tacit/rounds"] for each in sent if "train/loss" in each] == ([1, 2] if rank0 else [])
    accelerator()
    env = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_EXPERIMENT_NAME": "tacit"}
    with patch.dict("os.environ", env), tempfile.TemporaryDirectory() as kept:
        mlflow.set_tracking_uri(Path(kept).as_uri())
        frameworks.run_page("class Watched", '"wandb",', '"mlflow",')
        mlflow.end_run()
        curves = [file.read_text().split() for file in Path(kept).rglob("metrics/tacit/rounds")]
    assert [[float(value) for value in each[1::3]] for each in curves] == ([[1, 2, 2]] if rank0 else [])


# ---- in one process -----------------------------------------------------------------------------------


@ALONE.add
def one_process_is_refused() -> None:
    with patch("frameworks.dist.get_rank", lambda: 0), patch(f"{__name__}.dataset", lambda _: [{}]):
        trainer = trainer_of("topk", "unused")
    trainer.add_callback(Tacit("topk", trainer))
    raises(AttachError, trainer.train, "Trainer has one process, and nobody to exchange with: start the")
    with_it, net = accelerator(), Net()
    model, optimizer = with_it.prepare(net, optimizer_of("topk", net))
    says = "the accelerator has one process, and nobody to exchange with: start the script by"
    raises(AttachError, lambda: accelerate.attach(with_it, model, optimizer, "topk"), says)
    with patch.dict("os.environ", WORLD_SIZE="2"):
        says = "2 processes were started, and each accelerator is alone"
        raises(AttachError, lambda: accelerate.attach(with_it, model, optimizer, "topk"), says)


@ALONE.add
def what_is_given_wrongly_is_refused_at_once() -> None:
    raises(ConfigError, lambda: Tacit("topk", Net()), "trainer is a Net, and no Trainer: write")
    with patch("transformers.__version__", "4.56.2"):
        says = "transformers 4.56.2 is installed, and tacit needs 4.57 or a later one"
        raises(AttachError, lambda: Tacit("topk", Net()), says)
    with patch("accelerate.__version__", "1.2.0"):
        says = "accelerate 1.2.0 is installed, and tacit needs 1.12 or a later one"
        raises(AttachError, lambda: accelerate.attach(accelerator(), Net(), None, "topk"), says)
    assert transformers.LEAST == "4.57"


if __name__ == "__main__":
    frameworks.run(CHECKS, ALONE)
