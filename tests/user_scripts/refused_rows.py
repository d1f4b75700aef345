"""Rows: what cannot be right, so that somebody must say it."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from user_script import COMPRESSED, EXACT, OURS, REPLICAS, STEPS, TABLE, TIMED, Script

import tacit


def gradients_that_never_left(script: Script, how: str) -> nn.Module:
    """Steps by gradients that no rank has shared."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    micro = 4
    with script.attached(model, optimizer):
        for i in range(4 * STEPS + 2):
            last, end = i % micro == micro - 1, i == 4 * STEPS + 1
            quiet = {"module": False, "tail": not last, "first": i % micro > 0, "forgotten": False}[how]
            with model.no_sync() if quiet else nullcontext():
                called = model.module if how == "module" else model
                (script.loss(called, i) / micro).backward()
            if last or (end and how == "tail"):
                optimizer.step()
                optimizer.zero_grad()
                script.taken += 1
    return model


@TABLE.add(says={"no_sync": OURS - REPLICAS}, without={"ddp", *TIMED}, plain=False)
def the_module_is_called_in_place_of_ddp(script: Script) -> nn.Module:
    return gradients_that_never_left(script, "module")


@TABLE.add(says={"no_sync": OURS - REPLICAS}, without={"ddp", *TIMED}, plain=False)
def the_last_micro_batches_are_not_synchronised(script: Script) -> nn.Module:
    return gradients_that_never_left(script, "tail")


@TABLE.add(says={"no_sync": OURS - REPLICAS}, without={"ddp", *TIMED}, plain=False)
def the_first_micro_batch_is_synchronised_in_place_of_the_last(script: Script) -> nn.Module:
    return gradients_that_never_left(script, "first")


@TABLE.add(says={"a second backward in step": COMPRESSED}, without=TIMED)
def no_sync_is_forgotten(script: Script) -> nn.Module:
    return gradients_that_never_left(script, "forgotten")


@TABLE.add(says={"is attached to this model already": {*OURS, *EXACT, *TIMED}})
def attached_twice(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        script.train(model, optimizer, 0, 3)
        tacit.attach(model, optimizer, "topk")
    return model


@TABLE.add(says={"Join": {*OURS, *TIMED}}, without={"ddp"})
def join(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer), Join([model]):
        script.train(model, optimizer, 0, STEPS - script.rank)
    return model


@TABLE.add(says={"steps": {*OURS, *TIMED}}, without={"ddp"}, plain=False)
def more_batches_on_one_rank(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        script.train(model, optimizer, 0, STEPS + 4 * script.rank)
    return model


@TABLE.add(says={"NaN or infinity in": {*OURS, *TIMED}}, without={"ddp"}, plain=False)
def losses_that_are_nan_on_one_rank(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            (script.loss(model, step) * (torch.nan if step == 6 and script.rank else 1.0)).backward()
            optimizer.step()
            script.taken += 1
    return model


@TABLE.add(says={"steps": {*OURS, *TIMED}}, without={"ddp"}, plain=False)
def a_batch_is_passed_over_on_one_rank(script: Script) -> nn.Module:
    """The loss was NaN there, and the script knows only of its own."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        for step in range(STEPS):
            if not (step == 6 and script.rank):
                script.train(model, optimizer, step, step + 1)
    return model


@TABLE.add(says={"state_dict": {"efsign", "onebit-adam"}}, also=("efsign",), without=TIMED)
def rank_0_alone_asks_for_the_sessions_state(script: Script) -> nn.Module:
    model = script.wrapped(nn.Sequential(nn.Linear(12, 256), nn.Tanh(), nn.Linear(256, 4)))
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer) as session:
        script.train(model, optimizer, 0, 6)
        if script.rank == 0:
            session.state_dict()
        script.train(model, optimizer, 6, STEPS)
    return model


@TABLE.add(
    says={"rank 0 waits in session.discard() after 6 steps": {*OURS, *TIMED}}, without={"ddp"}, plain=False
)
def rank_0_alone_discards_a_step(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer) as session:
        for step in range(STEPS):
            optimizer.zero_grad()
            script.loss(model, step).backward()
            if script.rank == 0 and step == 6:
                session.discard()
            optimizer.step()
            script.taken += 1
    return model
