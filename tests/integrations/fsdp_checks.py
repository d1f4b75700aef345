"""Models that FSDP2 shards within each of two replicas, in frameworks: on two nodes of two ranks."""

import tempfile
from collections import OrderedDict
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import frameworks
import lightning
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate import ParallelismConfig as AcceleratesOwn
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from frameworks import STEPS, accelerated_loop, batches
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from rank_training import Checks, raises, same_on_all_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import tacit
from tacit.errors import AttachError, CheckpointError
from tacit.integrations import AllRanks, accelerate
from tacit.integrations import lightning as of_lightning
from tacit.integrations import transformers as of_transformers

CHECKS = Checks()
check = CHECKS.add
GRADIENT, PROGRESS, SCALED = "topk:ratio=0.1", "diloco:sync_every=3,bits=4", "lowbit:bits=4,sync_every=2"
ALGORITHMS = (GRADIENT, PROGRESS, SCALED)
SAVED = ((PROGRESS, False), (SCALED, True))
"""What is resumed, and whether from whole tensors rather than shards: both ways, where replicas lie apart."""
EPOCHS = 2
Trained = tuple[Tensor, Tensor]
"""The losses of all passes, and the parameters."""


class Net(nn.Module):
    """Gives its own loss, as models of transformers do; of some rows one rank has more, or all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(20, 41), nn.Linear(41, 40), nn.Linear(40, 5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.scale * self.last(self.second(self.first(x).relu()).relu())
        return {"loss": cross_entropy(found.float(), labels)}


LAYERS = ("first", "second")
"""Which modules are sharded one by one: those of 200 parameters and more."""


def shard(net: nn.Module, near: DeviceMesh, **options: Any) -> None:
    for name in LAYERS:
        fully_shard(getattr(net, name), mesh=near, **options)
    fully_shard(net, mesh=near, **options)


def own_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("far", "near"))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0)


def whole(net: Any) -> Tensor:
    """All parameters of this rank's replica."""
    return torch.cat([p.detach().full_tensor().reshape(-1) for p in net.parameters()])


def trained_plainly(
    algorithm: str, micro: int = 1, clip: float | None = None, bf16: bool = False, prefix: str = ""
) -> Trained:
    """The same training with `tacit.attach` in a loop of its own."""
    mesh, net, losses = own_mesh(), Net(), []
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    shard(net, mesh["near"], mp_policy=policy if bf16 else MixedPrecisionPolicy())
    model = nn.Sequential(OrderedDict([(prefix, net)])) if prefix else net
    optimizer = optimizer_of(model)
    with tacit.attach(model, optimizer, algorithm, mesh=mesh):
        for i, (x, y) in enumerate(batches(STEPS * micro)):
            last = i % micro == micro - 1
            net.set_requires_all_reduce(last) if prefix else net.set_requires_gradient_sync(last)
            loss = net(x, y)["loss"]
            (loss / micro).backward()
            losses.append(loss.detach())
            if last:
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    assert same_on_all_ranks(whole(net))
    return torch.stack(losses), whole(net)


plain = cache(trained_plainly)


def same(a: Trained, b: Trained) -> None:
    assert torch.equal(a[0], b[0]), (a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert same_on_all_ranks(a[1])


def shared_folder(own: str) -> Path:
    folder = [own]
    dist.broadcast_object_list(folder, 0)
    return Path(folder[0])


# ---- Accelerate ---------------------------------------------------------------------------------------


_begin = PartialState.__init__


def _with_gpus(state: Any, cpu: bool = True, **options: Any) -> None:
    """Accelerate leaves FSDP out where there are no GPUs, so it is told that these ranks have some."""
    _begin(state, cpu=True, **options)
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


patch.object(PartialState, "__init__", _with_gpus).start()


def begin_anew() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def two_replicas() -> accelerate.ParallelismConfig:
    return accelerate.ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)


def accelerator(version: int = 2, states: str = "FULL_STATE_DICT", **options: Any) -> Accelerator:
    begin_anew()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="size_based_wrap", min_num_params=210, state_dict_type=states
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin, **options)


def accelerated(
    algorithm: str,
    micro: int = 1,
    clip: float | None = None,
    save: Path | None = None,
    load: Path | None = None,
    states: str = "FULL_STATE_DICT",
    **options: Any,
) -> Trained:
    with_it = accelerator(
        2, states, gradient_accumulation_steps=micro, parallelism_config=two_replicas(), **options
    )
    net = Net()
    losses, model = accelerated_loop(with_it, net, optimizer_of(net), algorithm, micro, clip, save, load)
    return losses, whole(model)


@check
def accelerate_is_a_plain_attach() -> None:
    for algorithm in ALGORITHMS:
        same(accelerated(algorithm, 2, 0.5), plain(algorithm, 2, 0.5))
    same(accelerated(GRADIENT, mixed_precision="bf16"), plain(GRADIENT, bf16=True))


@check
def a_run_of_accelerate_goes_on_from_its_checkpoint() -> None:
    for algorithm, whole_state in (*SAVED, (GRADIENT, False)):
        states = "FULL_STATE_DICT" if whole_state else "SHARDED_STATE_DICT"
        with tempfile.TemporaryDirectory() as own:
            folder = shared_folder(own)
            losses, parameters = accelerated(algorithm, save=folder, states=states)
            dist.barrier()
            again = accelerated(algorithm, load=folder, states=states)
            dist.barrier()
        same(again, (losses[4:], parameters))


@check
def accelerate_deals_data_out_to_all_ranks() -> None:
    with_it = accelerator(parallelism_config=two_replicas())
    loader = with_it.prepare(DataLoader(torch.arange(16), batch_size=2))
    mine = torch.cat([*loader])
    everyone = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(everyone, mine)
    assert torch.cat(everyone).sort().values.tolist() == [*range(16)]


@check
def what_is_sharded_by_hand_is_attached_by_the_mesh_or_the_group_that_is_named() -> None:
    mesh, found = own_mesh(), []
    for named in ({"mesh": mesh}, {"group": mesh.get_group("far")}):
        with_it, net = accelerator(), Net()
        shard(net, mesh["near"])
        model, optimizer = with_it.prepare(net, optimizer_of(net))
        with accelerate.attach(with_it, model, optimizer, GRADIENT, **named):
            for x, y in batches(STEPS):
                with_it.backward(model(x, y)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        found.append(whole(model))
    for each in found:
        assert torch.equal(each, plain(GRADIENT)[1])


@check
def a_checkpoint_of_other_replicas_is_refused() -> None:
    with_it, net = accelerator(parallelism_config=two_replicas()), Net()
    model, optimizer = with_it.prepare(net, optimizer_of(net))
    with accelerate.attach(with_it, model, optimizer, GRADIENT) as session:
        saved = [AllRanks(session).state_dict()]
        dist.broadcast_object_list(saved, 0)
        says = "was saved by 3 ranks, in replicas of unknown, and here are 4 in replicas of 2: start as then"
        fewer = {"ranks": saved[0]["ranks"][:3]}
        raises(CheckpointError, lambda: AllRanks(session).load_state_dict(fewer), says)
        other = {"ranks": [{"session": each["session"] | {"shards": 4}} for each in saved[0]["ranks"]]}
        raises(CheckpointError, lambda: AllRanks(session).load_state_dict(other), "4 ranks, in replicas of 4")
        AllRanks(session).load_state_dict(saved[0])


@check
def what_accelerate_shards_otherwise_is_refused() -> None:
    says = (
        "averages the gradients of all ranks in every step, and nothing is left to save: import Parallelism"
    )
    for config in (
        AcceleratesOwn(dp_replicate_size=2, dp_shard_size=2),
        accelerate.ParallelismConfig(dp_shard_size=4),
        None,
    ):
        with_it, net = accelerator(parallelism_config=config), Net()
        model, optimizer = with_it.prepare(net, optimizer_of(net))
        raises(AttachError, partial(accelerate.attach, with_it, model, optimizer, "topk"), says)
    with_it = accelerator(version=1)
    says = "fsdp_version=1 makes a FullyShardedDataParallel (FSDP1)"
    raises(AttachError, lambda: accelerate.attach(with_it, Net(), None, "topk"), says)
    partitioned = SimpleNamespace(
        num_processes=4, ddp_handler=None, scaler=None, distributed_type="DEEPSPEED", parallelism_config=None
    )
    says = "DeepSpeed partitions the model and reduces its gradients itself"
    raises(AttachError, lambda: accelerate.attach(partitioned, Net(), None, "topk"), says)


# ---- Trainer ------------------------------------------------------------------------------------------


class Recorded(Trainer):
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.losses: list[Tensor] = []

    def compute_loss(self, *given: Any, **options: Any) -> Any:
        loss = super().compute_loss(*given, **options)
        self.losses.append((loss[0] if isinstance(loss, tuple) else loss).detach())
        return loss


def dataset(micro: int) -> list[dict[str, Tensor]]:
    """Every rank's batches as Trainer deals them out: one batch to each rank in turn."""
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, batches(STEPS * micro))
    dealt = [batch for each in zip(*everyone, strict=True) for batch in each]
    return [{"x": x, "labels": y} for xs, ys in dealt for x, y in zip(xs, ys, strict=True)]


def train(
    algorithm: str, folder: Path | str = "unused", resume: Path | None = None, micro: int = 1, **options: Any
) -> tuple[Trained, Recorded]:
    begin_anew()
    options = {"max_grad_norm": 0.0, "save_strategy": "no", "fsdp_version": 2, **options}
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=micro,
        train_sampling_strategy="sequential",
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        fsdp=True,
        fsdp_config={
            "version": options.pop("fsdp_version"),
            "auto_wrap_policy": "SIZE_BASED_WRAP",
            "min_num_params": 210,
            "state_dict_type": options.pop("states", "FULL_STATE_DICT"),
        },
        parallelism_config=options.pop("parallelism_config", two_replicas()),
        optim="adamw_torch",
        learning_rate=0.01,
        lr_scheduler_type="constant",
        **options,
    )
    trainer = Recorded(Net(), args, train_dataset=dataset(micro))
    trainer.add_callback(of_transformers.Tacit(algorithm, trainer))
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return (torch.stack(trainer.losses), whole(trainer.model)), trainer


@check
def the_trainer_is_a_plain_attach() -> None:
    for algorithm in ALGORITHMS:
        same(train(algorithm, micro=2, max_grad_norm=0.5)[0], plain(algorithm, 2, 0.5))
    same(train(GRADIENT, bf16=True)[0], plain(GRADIENT, bf16=True))


@check
def a_run_of_the_trainer_goes_on_from_its_checkpoint_and_saves_the_model() -> None:
    for algorithm, whole_state in SAVED:
        states = "FULL_STATE_DICT" if whole_state else "SHARDED_STATE_DICT"
        with tempfile.TemporaryDirectory() as own:
            folder = shared_folder(own)
            options = {"save_strategy": "steps", "save_steps": 4, "states": states}
            (losses, parameters), _ = train(algorithm, folder, **options)
            dist.barrier()
            again, trainer = train(algorithm, folder, resume=folder / "checkpoint-4", states=states)
            if whole_state:
                trainer.save_model(str(folder / "model"))
            dist.barrier()
            if whole_state:
                saved = load_file(folder / "model" / "model.safetensors")
                named = [saved[name].reshape(-1) for name, _ in trainer.model.named_parameters()]
                assert torch.equal(torch.cat(named), again[1])
            dist.barrier()
        same(again, (losses[4:], parameters))


@check
def what_the_trainer_shards_otherwise_is_refused() -> None:
    config = AcceleratesOwn(dp_replicate_size=2, dp_shard_size=2)
    raises(AttachError, lambda: train("topk", parallelism_config=config), "nothing is left to save: import")


# ---- Lightning ----------------------------------------------------------------------------------------


class Module(lightning.LightningModule):
    def __init__(self, micro: int, axis: str) -> None:
        super().__init__()
        self.net, self.axis = Net(), axis
        self.losses: list[Tensor] = []
        self.data = batches(STEPS * micro)
        """By their number, as a loader without a state begins anew where a run goes on."""

    def configure_model(self) -> None:
        shard(self.net, self.device_mesh[self.axis])

    def training_step(self, _: object, i: int) -> Tensor:
        x, y = self.data[i + self.trainer.current_epoch * len(self.data) // EPOCHS]
        loss: Tensor = self.net(x, y)["loss"]
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.net)


def fit(
    algorithm: str,
    micro: int = 1,
    ckpt: Path | None = None,
    axis: str = "tensor_parallel",
    loader: Any = None,
    distributed: bool = True,
    **options: Any,
) -> Module:
    options.setdefault("callbacks", [of_lightning.Tacit(algorithm)])
    module = Module(micro, axis)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        num_nodes=2,
        strategy=ModelParallelStrategy(save_distributed_checkpoint=distributed),
        max_epochs=EPOCHS,
        accumulate_grad_batches=micro,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=loader is not None,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in options["callbacks"]),
        **options,
    )
    trainer.fit(module, loader or DataLoader(range(STEPS * micro // EPOCHS), batch_size=None), ckpt_path=ckpt)
    return module


def of(module: Module) -> Trained:
    return torch.stack(module.losses), whole(module.net)


@check
def lightning_is_a_plain_attach() -> None:
    for algorithm in ALGORITHMS:
        same(of(fit(algorithm, 2, gradient_clip_val=0.5)), plain(algorithm, 2, 0.5, prefix="net"))


@check
def a_run_of_lightning_goes_on_from_its_checkpoint() -> None:
    for algorithm, whole_state in SAVED:
        with tempfile.TemporaryDirectory() as own:
            folder = shared_folder(own)
            each = {"dirpath": folder, "every_n_train_steps": 5, "save_top_k": -1, "filename": "{step}"}
            saving = [of_lightning.Tacit(algorithm), ModelCheckpoint(**each)]
            first = fit(algorithm, callbacks=saving, distributed=not whole_state)
            dist.barrier()
            resumed = fit(algorithm, ckpt=folder / "step=5.ckpt", distributed=not whole_state)
            dist.barrier()
        losses, parameters = of(first)
        same(of(resumed), (losses[5:], parameters))


@check
def what_lightning_deals_out_twice_is_refused() -> None:
    says = "gives several ranks the same batches, 2 to 4 ranks, as for tensor parallelism: write DataLoader"
    for axis in ("tensor_parallel", "data_parallel"):
        loader = DataLoader(range(STEPS), batch_size=1)
        raises(AttachError, lambda axis=axis, loader=loader: fit("topk", axis=axis, loader=loader), says)


# ---- the page -----------------------------------------------------------------------------------------


@check
def the_page_is_right() -> None:
    for word in ("fsdp_version=2", "fsdp=True", "configure_model"):
        begin_anew()
        frameworks.run_page(word)


if __name__ == "__main__":
    frameworks.run(CHECKS, Checks(), nodes=2)
