"""Rows: loops, and what people do in them."""

from __future__ import annotations

import os
import random
import threading
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from user_script import STEPS, TABLE, TEACHER, TIMED, Script, same

import tacit


@TABLE.add()
def accumulation(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        for step in range(STEPS):
            for i in range(3):
                with model.no_sync() if i < 2 else nullcontext():
                    (script.loss(model, 3 * step + i) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
            script.taken += 1
    return model


@TABLE.add()
def clipped_gradients(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            script.loss(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            script.taken += 1
    return model


@TABLE.add()
def autocast(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = script.batch(step)
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x)
            nn.functional.mse_loss(out.float(), y).backward()
            optimizer.step()
            script.taken += 1
    return model


@TABLE.add()
def scaled_gradients(script: Script) -> nn.Module:
    """One step overflows on rank 0."""
    model = script.wrapped()
    optimizer, scaler = script.optimizer(model), GradScaler("cpu", init_scale=2.0**10)
    with script.attached(model, optimizer, scaler=scaler, counted=False):
        for step in range(STEPS):
            optimizer.zero_grad()
            factor = torch.inf if step == 5 and script.rank == 0 else 1.0
            scaler.scale(script.loss(model, step) * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return model


@TABLE.add()
def loader_with_workers(script: Script) -> nn.Module:
    """Workers are forked in mid-training; who shuffles draws from torch's own generator."""
    x = torch.randn(112, 12, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x @ TEACHER)
    model = script.wrapped()
    optimizer = script.optimizer(model)
    loader = DataLoader(data, 16, shuffle=True, num_workers=1, multiprocessing_context="fork")
    with script.attached(model, optimizer):
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y + 0.25).backward()
                optimizer.step()
                script.taken += 1
    return model


@TABLE.add()
def distributed_sampler(script: Script) -> nn.Module:
    x = torch.randn(112, 12, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x @ TEACHER)
    model = script.wrapped()
    optimizer = script.optimizer(model)
    sampler = DistributedSampler(data)
    with script.attached(model, optimizer):
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(data, 8, sampler=sampler):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y + 0.25).backward()
                optimizer.step()
                script.taken += 1
    return model


@TABLE.add()
def forked_children(script: Script) -> nn.Module:
    """As subprocesses of old scripts, which end by `os._exit`, and one that ends as Python does."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        for step in range(STEPS):
            script.train(model, optimizer, step, step + 1)
            if step in (3, 10):
                child = os.fork()
                if child == 0:
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
    return model


def drawn() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]  # type: ignore[index]


@TABLE.add()
def random_numbers(script: Script) -> nn.Module:
    """No call of a session moves a generator."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    before = drawn()
    with script.attached(model, optimizer) as session:
        assert drawn() == before, "attach has drawn"
        script.train(model, optimizer)
        assert drawn() == before, "training has drawn"
        session.sync()
        session.state_dict()
        assert drawn() == before, "sync or state_dict has drawn"
    assert drawn() == before, "close has drawn"
    return model


@TABLE.add()
def two_models_in_a_process(script: Script) -> nn.Module:
    """A GAN's loop: each has a session, and they take turns."""
    maker, judge = (
        script.wrapped(),
        script.wrapped(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))),
    )
    of_maker, of_judge = script.optimizer(maker), script.optimizer(judge, lr=1e-3)
    with script.attached(maker, of_maker), script.attached(judge, of_judge):
        for step in range(STEPS):
            x, y = script.batch(step)
            of_judge.zero_grad()
            made = maker(x)
            real, fake = judge(torch.cat([x, y], 1)), judge(torch.cat([x, made.detach()], 1))
            (fake.mean() - real.mean() + real.square().mean() + fake.square().mean()).backward()
            of_judge.step()
            of_maker.zero_grad()
            judge.requires_grad_(False)
            (nn.functional.mse_loss(made, y) - 0.01 * judge.module(torch.cat([x, made], 1)).mean()).backward()
            judge.requires_grad_(True)
            of_maker.step()
            script.taken += 1
    return maker


@TABLE.add()
def left_early(script: Script) -> nn.Module:
    """Out of the middle of a period, by what all ranks agree on."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        for step in range(STEPS):
            script.train(model, optimizer, step, step + 1)
            done = torch.tensor(float(step == 10))
            dist.all_reduce(done)
            if done > 0:
                break
    return model


@TABLE.add()
def batches_that_fail_on_all_ranks(script: Script) -> nn.Module:
    """The loop catches what the data's reading or the forward pass has raised, and goes on."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        for step in range(STEPS):
            with suppress(RuntimeError):
                if step in (4, 9):
                    raise RuntimeError("a broken file")
                script.train(model, optimizer, step, step + 1)
    return model


@TABLE.add()
def losses_that_are_nan_on_all_ranks(script: Script) -> nn.Module:
    """All pass over the step before backward, by what all agree on."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        for step in range(STEPS):
            loss = script.loss(model, step) * (torch.nan if step == 6 and script.rank else 1.0)
            bad = loss.detach().isnan().float()
            dist.all_reduce(bad)
            if bad > 0:
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            script.taken += 1
    return model


@TABLE.add(without=TIMED)
def spikes_that_are_discarded(script: Script) -> nn.Module:
    """A step is passed over behind backward: the batch leaves no trace, as if it had not been there."""

    def trained(left_out: bool) -> nn.Module:
        one = Script(script.strategy)
        model = one.wrapped()
        optimizer = one.optimizer(model)
        with one.attached(model, optimizer) as session:
            for step in range(STEPS):
                if step == 9 and left_out:
                    continue
                optimizer.zero_grad()
                (one.loss(model, step) * (1e4 if step == 9 and one.rank == 0 else 1.0)).backward()
                norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
                if session.discard(bool(norm > 50)) if one.strategy else step == 9:
                    continue
                optimizer.step()
                one.taken += 1
        script.before = one.before
        return model

    found = trained(False)
    same(found, trained(True), "the batch has left a trace")
    return found


@TABLE.add()
def empty_batches(script: Script) -> nn.Module:
    """One rank has no samples left, and gives a loss of nothing."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        for step in range(STEPS):
            x, y = script.batch(step)
            if step > 9 and script.rank:
                x, y = x[:0], y[:0]
            optimizer.zero_grad()
            ((model(x) - y).square().sum() / 32).backward()
            optimizer.step()
            script.taken += 1
    return model


@TABLE.add()
def collectives_of_the_users_own(script: Script) -> nn.Module:
    """Metrics over all ranks, on the world's group and one of its own, in each step."""
    model = script.wrapped()
    optimizer, group = script.optimizer(model), dist.new_group()
    with script.attached(model, optimizer):
        for step in range(STEPS):
            script.train(model, optimizer, step, step + 1)
            mine = torch.full((3,), float(step + script.rank))
            for where in (None, group):
                both: Tensor = mine.clone()
                dist.all_reduce(both, group=where)
                assert both.tolist() == [2.0 * step + 1] * 3
    return model


@TABLE.add()
def one_session_behind_another(script: Script) -> nn.Module:
    model = script.wrapped()
    optimizer = script.optimizer(model)
    with script.attached(model, optimizer):
        script.train(model, optimizer, 0, 7)
    with script.attached(model, optimizer):
        script.train(model, optimizer, 7, STEPS)
    return model


@TABLE.add(without=TIMED)
def anomalies_and_determinism(script: Script) -> nn.Module:
    """With what people turn on who look for a fault."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.detect_anomaly(check_nan=True), script.attached(model, optimizer):
            script.train(model, optimizer)
    finally:
        torch.use_deterministic_algorithms(False)
    return model


@TABLE.add()
def attached_in_two_threads_at_once(script: Script) -> nn.Module:
    """One has the session, and the other the sentence."""
    model = script.wrapped()
    optimizer = script.optimizer(model)
    if script.strategy is None:
        script.train(model, optimizer)
        return model
    sessions: list[Any] = []
    errors: list[BaseException] = []
    both = threading.Barrier(2)

    def attach() -> None:
        both.wait()
        try:
            sessions.append(tacit.attach(model, optimizer, str(script.strategy)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=attach) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sessions) == 1, f"{len(sessions)} sessions, and {errors}"
    assert isinstance(errors[0], tacit.AttachError), errors
    script.train(model, optimizer)
    sessions[0].close()
    return model
