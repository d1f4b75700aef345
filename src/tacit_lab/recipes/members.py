"""Train a recipe as one of members that come and go, and print signs of it for the command."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tacit.api.attach import attach
from tacit.api.members import MemberSession
from tacit.environment import INTERFACE, NODE, NODES
from tacit.members.roster import Members
from tacit.timelines import now
from tacit_lab.recipes.progress import MemberSign
from tacit_lab.recipes.recipe import Batch, Recipe, optimizer_of
from tacit_lab.recipes.training import EVERY, Task
from tacit_lab.testbed.network import counters


def train(task: Task, recipe: Recipe, silence: float) -> None:
    """Train until all members have taken the steps of the whole run, from where they are.

    Each node has the samples that it would have if all nodes trained all the time.

    Args:
        silence: seconds after which a member that gives no sign of life is given up.

    Raises:
        TacitError: the algorithm does not fit the model or members, or too few of them are left.
    """
    assert task.strategy is not None
    nodes = int(os.environ[NODES])
    module = recipe.model(task.seed)
    optimizer = optimizer_of(recipe, module, task.strategy, task.rate)
    rates = [group["lr"] for group in optimizer.param_groups]
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    per_epoch = recipe.steps_per_epoch(nodes)
    session = attach(
        *(model, optimizer, task.strategy),
        steps_per_epoch=per_epoch,
        epochs=task.epochs,
        seed=task.seed,
        members=Members(silence=silence),
    )
    assert isinstance(session, MemberSession)
    member = _Teller(session, sum(p.numel() for p in module.parameters()), task.epochs * per_epoch)
    member.say()
    while session.step < member.steps:
        for inputs, targets in _batches(task, recipe, session.step, per_epoch):
            step = session.step
            factor = recipe.rate((step + 0.5) / member.steps)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.zero_grad()
            loss = recipe.loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            session.observe(loss)
            optimizer.step()
            taken = session.step != step + 1  # the state of others
            member.stepped(len(targets), loss, taken)
            if taken:
                break
    place, size = session.members.place, session.members.size
    session.close()
    member.ended(*recipe.evaluate(module, place, size))


def _batches(task: Task, recipe: Recipe, step: int, per_epoch: int) -> Iterator[Batch]:
    """The rest of this node's batches of the epoch in which this step is."""
    epoch, at = divmod(step, per_epoch)
    node, nodes = int(os.environ[NODE]), int(os.environ[NODES])
    return islice(recipe.train_batches(epoch, node, nodes, task.seed), at, None)


class _Teller:
    """Counts what this process has trained on, and says so."""

    def __init__(self, session: MemberSession, parameters: int, steps: int) -> None:
        self.steps = steps
        self._session, self._parameters = session, parameters
        self._samples = self._useful = self._lost = self._settled = 0
        self._round, self._period = session.session.round, session.members.number
        self._said = 0.0

    def stepped(self, samples: int, loss: Tensor, taken: bool) -> None:
        """Note a step of so many samples, and whether others' state replaces all since the last round."""
        self._samples += samples
        if taken:
            self._lost += self._samples - self._settled
            self._settled = self._samples
        if self._session.session.round != self._round:
            self._round, self._settled = self._session.session.round, self._samples
            self._useful = self._samples - self._lost
        period = self._session.members.number
        if period != self._period or time.perf_counter() - self._said > EVERY:
            self._period = period
            self.say(loss=loss.item())

    def ended(self, loss: float, accuracy: float) -> None:
        """Say that all steps are taken, and what came of them."""
        self._useful = self._samples - self._lost
        self.say(loss=loss, accuracy=accuracy, metrics=self._session.metrics())

    def say(self, **more: Any) -> None:
        """Print a sign."""
        self._said = time.perf_counter()
        interface, members = os.environ.get(INTERFACE), self._session.members
        sign = MemberSign(
            node=int(os.environ[NODE]),
            process=os.getpid(),
            at=now(),
            parameters=self._parameters,
            steps=self.steps,
            step=self._session.step,
            round=self._round,
            period=members.number,
            members=members.size,
            samples=self._samples,
            useful=self._useful,
            sent=counters.transmitted(interface) if interface else None,
            **more,
        )
        print(sign.to_line(), flush=True)
