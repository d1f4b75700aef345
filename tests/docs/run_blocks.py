"""Run the pages' blocks, given as JSON on standard input, on one rank; tell for each what went wrong.

The blocks of a page share their names, as for one who types them one after the other. What a block uses and
no page explains (`model`, `loader`, ...) is made anew for each block that uses it. Whatever strategy a block
makes, it must be possible to attach it.
"""

import ast
import dis
import json
import sys
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ChainedScheduler, MultiStepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tacit


class Writer:
    """What takes numbers as TensorBoard's does."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert isinstance(value, (int, float))


class Given:
    """The world of one block; what it does not ask for is not made."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.made:
            self.made[name] = getattr(self, name)()
        return self.made[name]

    def network(self) -> nn.Module:
        layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(64, 10))

    def model(self) -> nn.Module:
        return DistributedDataParallel(self["network"], gradient_as_bucket_view=True)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self["model"].parameters(), lr=0.05, momentum=0.9)

    def data(self) -> TensorDataset:
        return TensorDataset(torch.randn(256, 64), torch.randint(10, (256,)))

    def loader(self) -> list[tuple[Tensor, Tensor]]:
        return [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(3)]

    def criterion(self) -> Callable[..., Tensor]:
        return cross_entropy

    def loss(self) -> Tensor:
        return torch.tensor(1.0)

    def train(self) -> Callable[[int], None]:
        def train(steps: int) -> None:
            for x, y in self["loader"][:1] * steps:
                self["optimizer"].zero_grad()
                cross_entropy(self["model"](x), y).backward()
                self["optimizer"].step()

        return train

    def session(self) -> tacit.Attached:
        return tacit.attach(self["model"], self["optimizer"], "topk")

    def writer(self) -> Writer:
        return Writer()

    def rank(self) -> int:
        return 0

    def step(self) -> int:
        return 1


PLAIN = {
    "tacit": tacit,
    "torch": torch,
    "nn": nn,
    "DistributedDataParallel": DistributedDataParallel,
    "ChainedScheduler": ChainedScheduler,
    "MultiStepLR": MultiStepLR,
    "DataLoader": DataLoader,
    "DistributedSampler": DistributedSampler,
}


def needed(code: CodeType) -> set[str]:
    """The names that it uses before it has made them itself."""
    made: set[str] = set()
    used: set[str] = set()
    for each in dis.get_instructions(code):
        if each.opname in ("STORE_NAME", "STORE_GLOBAL"):
            made.add(each.argval)
        elif each.opname in ("LOAD_NAME", "LOAD_GLOBAL") and each.argval not in made:
            used.add(each.argval)
    return used.union(*(needed(each) for each in code.co_consts if isinstance(each, CodeType)))


def run(text: str, where: str, known: dict[str, Any]) -> str | None:
    """What went wrong, if anything."""
    given, before, shown = Given(), dict(known), []
    code = compile(ast.Interactive(ast.parse(text, where).body), where, "single")
    known |= PLAIN | {name: given[name] for name in sorted(needed(code) & vars(Given).keys())}
    sys.displayhook = shown.append  # what stands there without a name
    try:
        exec(code, known)
    except Exception:
        return traceback.format_exc()
    finally:
        for each in [*known.values(), *given.made.values()]:
            if isinstance(each, (tacit.Attached, tacit.CommState)):
                each.close()
    return attached([*shown, *(each for name, each in known.items() if each is not before.get(name))])


def attached(made: list[Any]) -> str | None:
    """What goes wrong where the strategies among these are attached."""
    for strategy in made:
        if isinstance(strategy, (tacit.Strategy, tacit.Levels)):
            given = Given()
            try:
                tacit.attach(
                    given["model"], given["optimizer"], strategy, steps_per_epoch=1000, epochs=10
                ).close()
            except Exception:
                return f"{strategy} cannot be attached:\n{traceback.format_exc()}"
    return None


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    told, known = sys.stdout, {}
    sys.stdout = sys.stderr  # what the blocks print is not what this program says
    page = None
    for where, text in json.load(sys.stdin):
        if where.partition(":")[0] != page:
            page, known = where.partition(":")[0], {"__name__": "page"}
            sys.modules["page"] = type(sys)("page")  # dataclasses look their module up
        print(json.dumps([where, run(text, where, known)]), file=told, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
