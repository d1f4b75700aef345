"""Rows: what is copied, averaged, saved and evaluated while a session is attached."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from user_script import STEPS, TABLE, TIMED, Script, apart, flat, same


def independent(script: Script, made: Any) -> DDP:
    """Trains on with a copy beside, which is to stay as it is; `made` makes it."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        script.train(model, optimizer, 0, 5)
        at_five, copy_of_it = flat(model), made(model)
        same(copy_of_it, at_five, "the copy")
        script.train(model, optimizer, 5, STEPS)
        same(copy_of_it, at_five, "the copy, when training has gone on")
        copy_of_it(script.batch(0)[0]).sum().backward()
        made(model).state_dict()
    made(model)
    return model


@TABLE.add()
def deepcopy_of_the_module(script: Script) -> nn.Module:
    return independent(script, lambda model: copy.deepcopy(model.module))


@TABLE.add()
def deepcopy_of_the_model(script: Script) -> nn.Module:
    return independent(script, copy.deepcopy)


@TABLE.add()
def pickled_module(script: Script) -> nn.Module:
    return independent(script, lambda model: pickle.loads(pickle.dumps(model.module)))


@TABLE.add()
def module_saved_whole(script: Script) -> nn.Module:
    def through_a_file(model: DDP) -> nn.Module:
        file = io.BytesIO()
        torch.save(model.module, file)
        file.seek(0)
        module: nn.Module = torch.load(file, weights_only=False)
        return module

    return independent(script, through_a_file)


@TABLE.add()
def averaged_model(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        averaged, sum_ = AveragedModel(model.module), torch.zeros_like(flat(model))
        for step in range(STEPS):
            script.train(model, optimizer, step, step + 1)
            averaged.update_parameters(model.module)
            sum_ += flat(model)
    worst = float((flat(averaged.module) - sum_ / STEPS).abs().max())
    assert worst < 1e-5, f"the mean is off by {worst:.3g}"
    return model


@TABLE.add()
def stochastic_weight_averaging(script: Script) -> nn.Module:
    model = script.wrapped(nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)))
    optimizer = script.optimizer(model)
    rate = optimizer.param_groups[0]["lr"]
    schedule = SWALR(optimizer, swa_lr=rate / 2, anneal_epochs=2)
    with script.attached(model, optimizer) as session:
        averaged = AveragedModel(model.module)
        for step in range(STEPS):
            script.train(model, optimizer, step, step + 1)
            if step % 2 and step > 5:
                session.sync()
                averaged.update_parameters(model.module)
                schedule.step()
        update_bn([script.batch(0)[0]], averaged)
    means = torch.cat([p.detach().flatten() for p in averaged.parameters()])
    both = [torch.empty_like(means) for _ in range(2)]
    dist.all_gather(both, means)
    same(both[0], both[1], "averages of what sync() has made equal")
    return model


class Moving:
    """A moving average of this rank's parameters, as in most training scripts."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [*model.parameters()]
        self.means = [p.detach().clone() for p in self.parameters]

    def update(self) -> None:
        for mean, p in zip(self.means, self.parameters, strict=True):
            mean.lerp_(p.detach(), 0.3)

    @torch.no_grad()
    def swap(self) -> None:
        """Put the means in, or what was there before them."""
        kept = [p.clone() for p in self.parameters]
        for mean, p in zip(self.means, self.parameters, strict=True):
            p.copy_(mean)
        self.means = kept


@TABLE.add(without=TIMED)
def means_swapped_in_and_out_for_evaluation(script: Script) -> nn.Module:
    def trained(evaluates: bool) -> nn.Module:
        one = Script(script.strategy)
        model = one.wrapped()
        optimizer, means = one.optimizer(model), Moving(model)
        with one.attached(model, optimizer):
            for step in range(STEPS):
                one.train(model, optimizer, step, step + 1)
                means.update()
                if evaluates and step in (2, 7, 11):
                    means.swap()
                    one.evaluated(model.module)
                    means.swap()
        script.before = one.before
        return model

    found = trained(True)
    same(found, trained(False), "evaluating has left a trace")
    return found


@TABLE.add()
def means_swapped_in_for_good(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer, means = script.optimizer(model), Moving(model)
    with script.attached(model, optimizer) as session:
        for step in range(12):  # a round of all periods has just been
            script.train(model, optimizer, step, step + 1)
            means.update()
        means.swap()
        if script.strategy:
            session.sync()
            assert apart(model) == 0, f"apart by {apart(model):.3g} behind sync"
    return model


@TABLE.add(without=TIMED)
def evaluation_in_inference_mode(script: Script) -> nn.Module:
    def trained(mode: Any) -> nn.Module:
        one = Script(script.strategy)
        model = one.wrapped(nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 4)))
        optimizer = one.optimizer(model)
        with one.attached(model, optimizer) as session:
            for step in range(STEPS):
                one.train(model, optimizer, step, step + 1)
                if step in (1, 5, 10):
                    with mode():
                        session.sync()
                        session.state_dict()
                        model.eval()
                        model.module(one.batch(0)[0])
                        model.train()
        script.before = one.before
        return model

    found = trained(torch.inference_mode)
    same(found, trained(torch.no_grad), "not as with no_grad")
    return found


@TABLE.add(without=TIMED)
def evaluation_on_rank_0_alone(script: Script) -> nn.Module:
    def trained(evaluates: bool) -> nn.Module:
        one = Script(script.strategy)
        model = one.wrapped()
        optimizer = one.optimizer(model)
        with one.attached(model, optimizer):
            for step in range(STEPS):
                one.train(model, optimizer, step, step + 1)
                if evaluates and step % 4 == 2 and one.rank == 0:
                    one.evaluated(model.module)
        script.before = one.before
        return model

    found = trained(True)
    same(found, trained(False), "evaluating has left a trace")
    return found


@TABLE.add()
def rank_0_alone_saves_the_weights(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer = script.optimizer(model)
    file = io.BytesIO()
    with script.attached(model, optimizer):
        for step in range(STEPS):
            script.train(model, optimizer, step, step + 1)
            if step == 6 and script.rank == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    if script.rank == 0:
        file.seek(0)
        script.net().load_state_dict({k[7:]: v for k, v in torch.load(file)["model"].items()})
    return model


def continued(script: Script, saved: Any, loaded: Any) -> nn.Module:
    """Saves behind step 9 of a period and goes on; once more from what was saved; both end alike."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer) as session:
        script.train(model, optimizer, 0, 9)
        kept = saved(model, optimizer, session)
        script.train(model, optimizer, 9, STEPS)
    second = script.wrapped(script.net())
    again = script.optimizer(second)
    with script.attached(second, again, counted=False) as session:
        loaded(second, again, session, kept)
        script.train(second, again, 9, STEPS)
    same(second, model, "the resumed run")
    return second


@TABLE.add(without=TIMED)
def checkpoint_of_each_rank(script: Script) -> nn.Module:
    def saved(model: DDP, optimizer: Any, session: Any) -> Any:
        parts = model.state_dict(), optimizer.state_dict(), session.state_dict()
        return copy.deepcopy(parts)

    def loaded(model: DDP, optimizer: Any, session: Any, kept: Any) -> None:
        for each, state in zip((model, optimizer, session), kept, strict=True):
            each.load_state_dict(state)

    return continued(script, saved, loaded)


@TABLE.add(without=TIMED)
def distributed_checkpoint(script: Script) -> nn.Module:
    def parts(model: DDP, optimizer: Any, session: Any) -> dict[str, Any]:
        a, b = get_state_dict(model, optimizer)
        return {"model": a, "optimizer": b, **({"tacit": session} if script.strategy else {})}

    def saved(model: DDP, optimizer: Any, session: Any) -> str:
        path = [tempfile.mkdtemp()]
        dist.broadcast_object_list(path)
        session.sync()
        dcp.save(parts(model, optimizer, session), checkpoint_id=path[0])
        return path[0]

    def loaded(model: DDP, optimizer: Any, session: Any, path: str) -> None:
        state = parts(model, optimizer, session)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    return continued(script, saved, loaded)
