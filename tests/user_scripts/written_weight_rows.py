"""Rows: weights that the script writes itself, and parameters that it replaces."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from optimizer_rows import CHANGED
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization
from user_script import GRADIENTS, OURS, REPLICAS, STEPS, TABLE, TIMED, Script

ONE = {"had other bits on rank 1 than on rank 0": {"ddp"} | GRADIENTS | TIMED}
"""What is told of a rank that alone has written its parameters."""
STILL = 1e-9
"""A learning rate that moves nothing: written weights must stay."""


def other(script: Script) -> dict[str, Tensor]:
    torch.manual_seed(77)
    return script.net().state_dict()


def off(model: nn.Module, wanted: dict[str, Tensor]) -> float:
    """How far parameters are, relative to what they should be."""
    pairs = [(p, wanted[name.removeprefix("module.")]) for name, p in model.named_parameters()]
    return sum(float((p - w).norm()) for p, w in pairs) / sum(float(w.norm()) for _, w in pairs)


def stays(
    script: Script, at: int, write: Callable[[nn.Module, dict[str, Tensor]], object], syncs: bool = False
) -> nn.Module:
    """All ranks write the same before step `at`, and may say so by sync: it is there behind close."""
    model = script.wrapped()
    optimizer, wanted = script.optimizer(model, lr=STILL), other(script)
    with script.attached(model, optimizer) as session:
        script.train(model, optimizer, 0, at)
        write(model.module, wanted)
        if syncs:
            session.sync()
        script.train(model, optimizer, at, STEPS)
    far = off(model, wanted)
    assert far < 1e-4, f"the written weights have moved by {far:.2g} of their norm"
    return model


@TABLE.add(learns=False)
def weights_loaded_before_the_first_step(script: Script) -> nn.Module:
    return stays(script, 0, lambda net, wanted: net.load_state_dict(wanted))


@TABLE.add(learns=False, says=CHANGED)
def weights_loaded_in_mid_training(script: Script) -> nn.Module:
    return stays(script, 7, lambda net, wanted: net.load_state_dict(wanted))


@TABLE.add(learns=False)
def weights_loaded_in_mid_training_and_synchronised(script: Script) -> nn.Module:
    return stays(script, 7, lambda net, wanted: net.load_state_dict(wanted), syncs=True)


@TABLE.add(learns=False, says=CHANGED)
def weights_copied_in(script: Script) -> nn.Module:
    def write(net: nn.Module, wanted: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(wanted[name])

    return stays(script, 6, write)


@TABLE.add(learns=False, says=CHANGED)
def weights_copied_into_data(script: Script) -> nn.Module:
    def write(net: nn.Module, wanted: dict[str, Tensor]) -> None:
        for name, p in net.named_parameters():
            p.data.copy_(wanted[name])

    return stays(script, 9, write)


@TABLE.add(learns=False, says=CHANGED)
def data_assigned(script: Script) -> nn.Module:
    def write(net: nn.Module, wanted: dict[str, Tensor]) -> None:
        for name, p in net.named_parameters():
            p.data = wanted[name].clone()

    return stays(script, 8, write)


@TABLE.add(learns=False)
def rolled_back(script: Script) -> nn.Module:
    """Weights and the optimizer's state go back to those of step 4."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer) as session:
        script.train(model, optimizer, 0, 4)
        session.sync()
        kept = copy.deepcopy(model.module.state_dict()), copy.deepcopy(optimizer.state_dict())
        script.train(model, optimizer, 4, 9)
        model.module.load_state_dict(kept[0])
        session.sync()
        optimizer.load_state_dict(kept[1])
        for group in optimizer.param_groups:
            group["lr"] = STILL
        script.train(model, optimizer, 9, STEPS)
    far = off(model, kept[0])
    assert far < 1e-3, f"the weights of step 4 have moved by {far:.2g} of their norm"
    return model


@TABLE.add(says={"so they may leave those bounds": {"lowbit"}})
def clipped_weights(script: Script) -> nn.Module | None:
    """The critic of a Wasserstein GAN: behind each step its weights are clamped."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        for step in range(STEPS):
            script.train(model, optimizer, step, step + 1)
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.1, 0.1)
    largest = max(float(p.abs().max()) for p in model.parameters())
    assert script.family == "lowbit" or largest <= 0.1 + 1e-7, (
        f"a weight is {largest}, where the clamp is 0.1"
    )
    return model


def replaced(script: Script, replace: Callable[[nn.Module], object]) -> nn.Module:
    """A layer's parameters become others in mid-training, from equal replicas on all ranks alike."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer) as session:
        script.train(model, optimizer, 0, 8)
        session.sync()
        replace(model.module[0])
        session.sync()
        script.train(model, optimizer, 8, STEPS)
    return model


@TABLE.add()
def pruning(script: Script) -> nn.Module:
    return replaced(script, lambda layer: prune.l1_unstructured(layer, "weight", 0.5))


@TABLE.add()
def pruning_made_permanent(script: Script) -> nn.Module:
    def cut(layer: nn.Module) -> None:
        prune.l1_unstructured(layer, "weight", 0.5)
        prune.remove(layer, "weight")

    return replaced(script, cut)


class Doubled(nn.Module):
    """Half of what is kept, twice."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


@TABLE.add(
    says={
        "as a parametrization puts it elsewhere": GRADIENTS | TIMED,
        "parameters that were not used in producing loss": REPLICAS | {"ddp"},
    },
    torch=True,
)
def parametrized_in_mid_training(script: Script) -> nn.Module:
    return replaced(script, lambda layer: register_parametrization(layer, "weight", Doubled()))


@TABLE.add(says={"is another Parameter than when the session began": OURS | TIMED}, without={"ddp"})
def weight_norm_in_mid_training(script: Script) -> nn.Module:
    return replaced(script, parametrizations.weight_norm)


def parametrized(script: Script, kind: Callable[[nn.Module], nn.Module]) -> nn.Module:
    net = nn.Sequential(kind(nn.Linear(12, 24)), nn.Tanh(), nn.Linear(24, 4))
    model = script.wrapped(net)
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        script.train(model, optimizer)
    return model


@TABLE.add()
def weight_norm(script: Script) -> nn.Module:
    return parametrized(script, parametrizations.weight_norm)


@TABLE.add()
def spectral_norm(script: Script) -> nn.Module:
    return parametrized(script, parametrizations.spectral_norm)


@TABLE.add()
def orthogonal(script: Script) -> nn.Module:
    return parametrized(script, parametrizations.orthogonal)


@TABLE.add()
def buffers_assigned_anew(script: Script) -> nn.Module:
    net = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 4))
    model = script.wrapped(net)
    optimizer = script.optimizer(model)
    norm = net[1]
    with script.attached(model, optimizer):
        for step in range(STEPS):
            script.train(model, optimizer, step, step + 1)
            if step in (3, 8):
                norm.running_mean, norm.running_var = norm.running_mean.clone(), norm.running_var.clone()
    return model


@TABLE.add(says={"torch.float64 now": OURS | TIMED}, without={"ddp"})
def module_in_another_type(script: Script) -> nn.Module:
    """In mid-training: DDP's buckets and the session's are of the type that was."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        script.train(model, optimizer, 0, 5)
        model.double()
        for step in range(5, STEPS):
            optimizer.zero_grad()
            x, y = script.batch(step)
            nn.functional.mse_loss(model(x.double()), y.double()).backward()
            optimizer.step()
            script.taken += 1
    model.float()
    return model


def on_one_rank(script: Script, syncs: bool) -> None:
    """Rank 0 alone loads weights before step 7: behind close all have the mean of both."""
    model = script.wrapped()
    optimizer, wanted, before = script.optimizer(model, lr=STILL), other(script), model.module.state_dict()
    mean = {name: (w + before[name]) / 2 for name, w in wanted.items()}
    with script.attached(model, optimizer) as session:
        script.train(model, optimizer, 0, 7)
        if script.rank == 0:
            model.module.load_state_dict(wanted)
        if syncs:
            session.sync()
        script.train(model, optimizer, 7, STEPS)
    far = off(model, mean)
    assert far < 1e-4, f"the parameters are {far:.2g} of their norm away from the mean of both"


@TABLE.add(says=ONE | CHANGED)
def weights_loaded_on_one_rank(script: Script) -> None:
    on_one_rank(script, syncs=False)


@TABLE.add(says=ONE)
def weights_loaded_on_one_rank_and_synchronised(script: Script) -> None:
    on_one_rank(script, syncs=True)
