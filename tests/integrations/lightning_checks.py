"""Lightning's Trainer and Fabric, on two ranks."""

import importlib
import tempfile
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import frameworks
import lightning
import torch
import torch.distributed as dist
from frameworks import GRADIENT, PROGRESS, STEPS, batches, network, optimizer_of, plain_losses
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from rank_training import Checks, flat, raises, same_on_all_ranks
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import tacit
from tacit.errors import AttachError, CheckpointError, ConfigError
from tacit.integrations import AllRanks
from tacit.integrations.lightning import Tacit

EPOCHS = 2
CHECKS, ALONE = Checks(), Checks()
check = CHECKS.add


class Module(lightning.LightningModule):
    """As in Lightning's own documentation."""

    def __init__(self, algorithm: str) -> None:
        super().__init__()
        self.net, self.algorithm = network(), algorithm
        self.losses: list[Tensor] = []
        self.data: list[tuple[Tensor, Tensor]] = []
        """By their number, as a loader without a state begins anew where a run goes on."""

    def training_step(self, batch: tuple[Tensor, Tensor], i: int) -> Tensor:
        x, y = batch
        if self.data:
            x, y = self.data[i + self.trainer.current_epoch * len(self.data) // EPOCHS]
        loss = cross_entropy(self.net(x), y)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.seen = flat(self.net)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.algorithm, self.net)


def fit(
    algorithm: str, micro: int = 1, ckpt: Path | None = None, module: Module | None = None, **options: Any
) -> Module:
    """What was trained for STEPS steps of the optimizer."""
    module = module or Module(algorithm)
    options.setdefault("callbacks", [Tacit(algorithm)])
    options.setdefault("strategy", "ddp")
    validated = options.pop("validated", None)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=frameworks.WORLD,
        max_epochs=EPOCHS,
        accumulate_grad_batches=micro,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in options["callbacks"]),
        **options,
    )
    module.data = batches(STEPS * micro)
    loader = DataLoader(batches(STEPS * micro // EPOCHS), batch_size=None)
    trainer.fit(module, loader, validated, ckpt_path=ckpt)
    return module


def plain(
    algorithm: str, micro: int = 1, clip: float | None = None, bf16: bool = False, prefix: str = "net"
) -> tuple[Tensor, Tensor]:
    """The losses and the parameters of the same training with `tacit.attach` in a loop of its own."""
    net = network()
    if prefix:  # what entries travel is drawn by the parameters' names
        net = nn.Sequential(OrderedDict([(prefix, net)]))
    autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if bf16 else nullcontext()
    losses = plain_losses(
        algorithm, net, lambda model, x, y: cross_entropy(model(x), y), autocast, micro, clip
    )
    return losses, flat(net)


def same(module: Module, expected: tuple[Tensor, Tensor]) -> None:
    losses, parameters = expected
    assert torch.equal(torch.stack(module.losses), losses), (module.losses, losses)
    assert torch.equal(flat(module.net), parameters)
    assert same_on_all_ranks(parameters)


@check
def the_trainer_is_a_plain_attach() -> None:
    for algorithm in (GRADIENT, PROGRESS):
        same(fit(algorithm), plain(algorithm))


@check
def the_trainer_accumulates_and_clips() -> None:
    for algorithm in (GRADIENT, PROGRESS):
        same(fit(algorithm, micro=2, gradient_clip_val=0.5), plain(algorithm, micro=2, clip=0.5))


@check
def the_trainer_autocasts() -> None:
    for algorithm in (GRADIENT, PROGRESS):
        same(fit(algorithm, precision="bf16-mixed"), plain(algorithm, bf16=True))


@check
def the_trainers_scaler_is_the_sessions() -> None:
    """A gradient that overflows on one rank is passed over on both; the next steps are taken."""

    class Overflowing(Module):
        def training_step(self, batch: tuple[Tensor, Tensor], i: int) -> Tensor:
            loss = super().training_step(batch, i)
            return loss * torch.inf if len(self.losses) == 4 and dist.get_rank() == 1 else loss

    for algorithm in ("topk:ratio=0.1", "localsgd:sync_every=2"):
        plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=256.0))
        module = fit(algorithm, module=Overflowing(algorithm), plugins=[plugin])
        assert same_on_all_ranks(flat(module.net)), algorithm
        assert bool(flat(module.net).isfinite().all())
        assert plugin.scaler.get_scale() == 128.0


@check
def a_run_of_the_trainer_goes_on_from_its_checkpoint() -> None:
    for algorithm in (GRADIENT, PROGRESS):
        with tempfile.TemporaryDirectory() as own:
            folder = [own]
            dist.broadcast_object_list(folder, 0)
            each = {"dirpath": folder[0], "every_n_train_steps": 5, "save_top_k": -1, "filename": "{step}"}
            whole = fit(algorithm, callbacks=[Tacit(algorithm), ModelCheckpoint(**each)])
            file = Path(folder[0]) / "step=5.ckpt"
            resumed = fit(algorithm, ckpt=file)
            dist.barrier()
        assert torch.equal(torch.stack(resumed.losses), torch.stack(whole.losses[5:])), algorithm
        assert torch.equal(flat(resumed.net), flat(whole.net)), algorithm


@check
def replicas_are_equal_where_the_trainer_validates() -> None:
    module = fit("localsgd:sync_every=100", validated=DataLoader(batches(1), batch_size=None))
    assert same_on_all_ranks(module.seen)


@check
def replicas_are_equal_where_the_trainer_saves_weights_alone() -> None:
    algorithm, seen = "localsgd:sync_every=100", []

    class Looking(ModelCheckpoint):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append(flat(module.net))

    fit(algorithm, callbacks=[Tacit(algorithm), Looking(save_weights_only=True, save_top_k=0)])
    assert len(seen) == EPOCHS
    assert all(same_on_all_ranks(each) for each in seen)


class Unsynced(Module):
    """Its gradients never reach DDP's hook."""

    def __init__(self, algorithm: str) -> None:
        super().__init__(algorithm)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        cross_entropy(self.net(x), y).backward()
        optimizer.step()


@check
def gradients_that_bypass_the_trainers_ddp_are_an_error() -> None:
    with patch.object(DistributedDataParallel, "forward", lambda ddp, *args: ddp.module(*args)):
        says = "gradients that 'topk' has not exchanged, as DDP did not call its hook"
        raises(AttachError, lambda: fit("topk", module=Unsynced("topk")), says)


@check
def an_error_in_the_trainer_is_left_as_it_is() -> None:
    class Failing(Module):
        def training_step(self, batch: tuple[Tensor, Tensor], i: int) -> Tensor:
            if i == 1:
                raise ZeroDivisionError("of the user's own")
            return super().training_step(batch, i)

    callback = Tacit("topk")
    with_it = {"module": Failing("topk"), "callbacks": [callback]}
    raises(ZeroDivisionError, lambda: fit("topk", **with_it), "of the user's own")
    assert callback.session is None
    dist.barrier()
    same(fit("topk", callbacks=[callback]), plain("topk"))


@check
def what_the_trainer_cannot_do_is_refused() -> None:
    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        raise AssertionError

    strategy = DDPStrategy(ddp_comm_hook=hook)
    raises(AttachError, lambda: fit("topk", strategy=strategy), "DDPStrategy(ddp_comm_hook=...)")
    twice = [Tacit("topk"), Tacit("dgc")]
    raises(
        RuntimeError, lambda: fit("topk", callbacks=twice), "more than one stateful callback of type `Tacit`"
    )


# ---- Fabric -------------------------------------------------------------------------------------------


def fabric_run(algorithm: str, folder: Path | None = None, resume: bool = False) -> tuple[Tensor, Tensor]:
    fabric = Fabric(accelerator="cpu", devices=frameworks.WORLD, strategy="ddp")
    fabric.launch()
    net, losses = network(), []
    model, optimizer = fabric.setup(net, optimizer_of(algorithm, net))
    with tacit.attach(model, optimizer, algorithm) as session:
        state = {"model": model, "optimizer": optimizer, "tacit": AllRanks(session)}
        if resume:
            fabric.load(folder / "state.ckpt", state)
        for i, (x, y) in enumerate(batches(STEPS)):
            if resume and i < 4:
                continue
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
            if i == 3 and folder is not None:
                fabric.save(folder / "state.ckpt", state)
    return torch.stack(losses), flat(net)


@check
def fabric_is_a_plain_attach() -> None:
    for algorithm in (GRADIENT, PROGRESS):
        for a, b in zip(fabric_run(algorithm), plain(algorithm, prefix=""), strict=True):
            assert torch.equal(a, b), algorithm


@check
def a_run_of_fabric_goes_on_from_its_checkpoint() -> None:
    for algorithm in (GRADIENT, PROGRESS):
        with tempfile.TemporaryDirectory() as own:
            folder = [own]
            dist.broadcast_object_list(folder, 0)
            losses, parameters = fabric_run(algorithm, Path(folder[0]))
            again, same_parameters = fabric_run(algorithm, Path(folder[0]), resume=True)
            dist.barrier()
        assert torch.equal(again, losses[4:]), algorithm
        assert torch.equal(parameters, same_parameters), algorithm


@check
def a_model_that_fabric_has_not_wrapped_is_refused() -> None:
    net = network()
    says = "With Fabric, on two ranks or more: after model, optimizer = fabric.setup(model, optimizer)"
    raises(AttachError, lambda: tacit.attach(net, optimizer_of("topk", net), "topk"), says)
    empty = AllRanks(tacit.attach(*_ddp(), "topk"))
    raises(CheckpointError, lambda: empty.load_state_dict({}), "holds no state of a tacit session")


def _ddp() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    net = network()
    return DistributedDataParallel(net), optimizer_of("topk", net)


@check
def the_page_is_right() -> None:
    frameworks.run_page("AutoEncoder")
    frameworks.run_page("fabric.setup")


# ---- in one process -----------------------------------------------------------------------------------


@ALONE.add
def a_trainer_of_one_process_is_refused() -> None:
    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[Tacit("topk")])
    says = "the trainer has one process (SingleDeviceStrategy), and nobody to exchange with: write Trainer("
    raises(AttachError, lambda: trainer.fit(Module("topk"), [0]), says)


@ALONE.add
def what_shards_otherwise_than_fsdp2_is_refused_by_its_name() -> None:
    strategy = FSDPStrategy()
    of_fsdp1 = SimpleNamespace(strategy=strategy, callbacks=[], world_size=4)
    says = (
        "FSDPStrategy makes a FullyShardedDataParallel (FSDP1), which is not supported: write Trainer("
        "strategy=ModelParallelStrategy()), and call fully_shard (FSDP2) in configure_model"
    )
    raises(AttachError, lambda: Tacit("topk").setup(of_fsdp1, None, "fit"), says)
    of_fsdp1.strategy = type("DeepSpeedStrategy", (), {})()
    raises(AttachError, lambda: Tacit("topk").setup(of_fsdp1, None, "fit"), "has DeepSpeed partition the mod")


@ALONE.add
def a_callback_that_is_added_later_a_second_time_is_refused() -> None:
    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[Tacit("topk")])
    trainer.callbacks.append(Tacit("dgc"))
    raises(
        AttachError, lambda: trainer.fit(Module("topk"), [0]), "Tacit is among the trainer's callbacks more"
    )


@ALONE.add
def both_packages_of_lightning_take_it() -> None:
    import pytorch_lightning

    from tacit.integrations import lightning as door

    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, callbacks=[importlib.reload(door).Tacit("topk")]
    )

    class Other(pytorch_lightning.LightningModule):
        training_step = Module.training_step
        configure_optimizers = Module.configure_optimizers

    raises(AttachError, lambda: trainer.fit(Other(), [0]), "the trainer has one process")


@ALONE.add
def what_is_no_option_is_refused_at_once() -> None:
    raises(ConfigError, lambda: Tacit("tpok"), "tpok")
    made = SimpleNamespace(strategy=SimpleNamespace(model=nn.Linear(2, 2)))  # as those for sharded models do
    raises(
        AttachError, lambda: Tacit("topk").on_train_start(made, None), "has made no DistributedDataParallel"
    )
    raises(ConfigError, lambda: Tacit("topk", ratio=0.1), "ratio= is no option here")
    with patch("lightning.pytorch.__version__", "2.5.6"):
        says = (
            "lightning 2.5.6 is installed, and tacit needs 2.6 or a later one: pip install 'lightning>=2.6'"
        )
        raises(AttachError, lambda: Tacit("topk"), says)


if __name__ == "__main__":
    frameworks.run(CHECKS, ALONE)
