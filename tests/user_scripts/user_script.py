"""A row of the table: a script as people write it, and what each family of strategies makes of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import tacit

FAMILIES = {
    "ddp": "ddp",
    "dense": "dense",
    "topk": "topk:ratio=0.1",
    "powersgd": "powersgd:rank=2",
    "lowbit": "lowbit:sync_every=2",
    "diloco": "diloco:sync_every=4",
    "localsgd": "localsgd:sync_every=4",
    "onebit-adam": "onebit-adam:freeze_step=3,refresh=1",
    "gossip": "gossip",
    "auto": "auto",
}
"""Family -> the strategy that stands for it."""
EXACT = {"ddp", "dense"}
"""Those whose numbers are plain DDP's, to the bit."""
COMPRESSED = {"topk", "powersgd", "onebit-adam"}
GRADIENTS = {"dense", *COMPRESSED}
REPLICAS = {"lowbit", "diloco", "localsgd", "gossip"}
OURS = GRADIENTS | REPLICAS
NOT_ADAM = {"onebit-adam"}
"""What goes with Adam alone."""
TIMED = {"auto"}
"""What goes by the clock: two runs differ."""
STEPS = 14
"""Behind the tenth, `auto` has chosen."""
TEACHER = torch.randn(12, 4, generator=torch.Generator().manual_seed(9)) / 3


class Script:
    """What a script has around its feature: a model, an optimizer, and data of this rank's own.

    Attributes:
        strategy: what it attaches; None in a script of plain DDP.
        taken: steps so far.
        before: the loss of the first model that was wrapped.
    """

    def __init__(self, strategy: str | None) -> None:
        self.rank, self.strategy, self.taken = dist.get_rank(), strategy, 0
        self.before: float | None = None
        self._seed(0)

    @property
    def family(self) -> str:
        return "plain" if self.strategy is None else self.strategy.partition(":")[0]

    def net(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4))

    def wrapped(self, net: nn.Module | None = None, **options: Any) -> DDP:
        net = self.net() if net is None else net
        if self.before is None:
            self.before = self.evaluated(net)
        model = DDP(net, **options)
        self._seed(1 + self.rank)  # from here on ranks draw each for itself, as in dropout
        return model

    def optimizer(self, model: nn.Module | Sequence[Any], lr: float | None = None) -> Optimizer:
        """Of all its parameters, of these, or of these groups."""
        trained = (
            model if not isinstance(model, nn.Module) else [p for p in model.parameters() if p.requires_grad]
        )
        if self.family == "onebit-adam":
            return torch.optim.AdamW(trained, lr=0.01 if lr is None else lr, eps=1e-3)
        return torch.optim.SGD(trained, lr=0.05 if lr is None else lr, momentum=0.9)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + self.rank))
        return x, x @ TEACHER + 0.5 * self.rank

    def loss(self, model: nn.Module, step: int) -> Tensor:
        x, y = self.batch(step)
        return nn.functional.mse_loss(model(x), y)

    def train(self, model: nn.Module, optimizer: Optimizer, start: int = 0, stop: int = STEPS) -> None:
        """The loop of all tutorials."""
        for step in range(start, stop):
            optimizer.zero_grad()
            self.loss(model, step).backward()
            optimizer.step()
            self.taken += 1

    def evaluated(self, net: nn.Module) -> float:
        """The loss on what all ranks should learn."""
        x = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
        training = net.training
        try:
            with torch.no_grad():
                return float(nn.functional.mse_loss(net.eval()(x).float(), x @ TEACHER + 0.25))
        finally:
            net.train(training)

    @contextmanager
    def attached(
        self, model: nn.Module, optimizer: Any, *, counted: bool = True, **options: Any
    ) -> Iterator[Any]:
        """As `with tacit.attach`; behind it replicas are equal, and every step was seen."""
        if self.strategy is None:
            yield Nothing()
            return
        taken = self.taken
        with tacit.attach(model, optimizer, self.strategy, **options) as session:
            yield session
            seen = session.metrics()["steps"]
        # `ddp` has no hooks on optimizers inside others.
        counted = counted and self.family != "ddp"
        assert not counted or seen == self.taken - taken, f"{seen} of {self.taken - taken} steps seen"
        assert apart(model) == 0, f"replicas are apart by {apart(model)} behind close"

    def _seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)


class Nothing:
    """The session of a script of plain DDP."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **named: None


def flat(net: nn.Module, buffers: bool = True) -> Tensor:
    """All parameters, and floating-point buffers."""
    every = [*net.parameters(), *(b for b in net.buffers() if buffers and b.is_floating_point())]
    return torch.cat([each.detach().double().reshape(-1) for each in every])


def apart(net: nn.Module) -> float:
    """The largest difference between the replicas' parameters. A collective call."""
    mine = flat(net, buffers=False)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return max(float((each - every[0]).abs().max()) for each in every)


def same(found: Tensor | nn.Module, wanted: Tensor | nn.Module, what: str) -> None:
    """They have the same bits."""
    a, b = (flat(each) if isinstance(each, nn.Module) else each for each in (found, wanted))
    assert torch.equal(a, b), f"{what}: differs by {float((a - b).abs().max()):.3g}"


@dataclass(frozen=True)
class Row:
    """A feature of scripts.

    Attributes:
        script: runs it and returns the model that was trained; or None, where the script has looked itself.
        says: words -> the families that refuse it, or warn, with these words.
        without: families that have no part in it.
        also: strategies besides, that it is about.
        plain: whether plain DDP can do the same, so that `dense` is to give its bits.
        learns: whether the loss must fall.
        torch: whether the words are torch's, as DDP cannot do it either.
    """

    script: Callable[[Script], nn.Module | None]
    says: Mapping[str, Collection[str]] = field(default_factory=dict)
    without: Collection[str] = ()
    also: Sequence[str] = ()
    plain: bool = True
    learns: bool = True
    torch: bool = False

    @property
    def families(self) -> list[str]:
        return [*(family for family in FAMILIES if family not in self.without), *self.also]

    def words(self, family: str) -> str | None:
        """What this family says to it; None where it is right."""
        return next((words for words, families in self.says.items() if family in families), None)

    def run(self, family: str) -> None:
        """On this rank; an error where it is wrong."""
        script = Script(FAMILIES.get(family, family))
        found = self.script(script)
        if found is None:
            return
        ended = flat(found)  # an evaluation has DDP send buffers
        assert bool(ended.isfinite().all())
        if self.learns:
            assert script.before is not None
            after = script.evaluated(found)
            assert after < script.before, f"the loss was {script.before:.3g}, and is {after:.3g}"
        if self.plain and family in EXACT:
            plain = self.script(Script(None))
            assert plain is not None
            same(ended, plain, "not plain DDP's numbers")


class Table(dict[str, Row]):
    """Rows by name: a function's, in words."""

    def add(self, **told: Any) -> Callable[[Callable[[Script], nn.Module | None]], Callable[..., Any]]:
        def put(script: Callable[[Script], nn.Module | None]) -> Callable[..., Any]:
            self[script.__name__.replace("_", " ")] = Row(script, **told)
            return script

        return put


TABLE = Table()
