"""What attaching leaves as it is: random numbers, copies, names in checkpoints, hooks, the process."""

import atexit
import copy
import functools
import gc
import io
import logging
import os
import pickle
import random
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_training import Checks, flat, same_on_all_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import tacit
from tacit.algorithms.registry import ENTRIES
from tacit_lab.algorithm_facts import parameters_of

CHECKS = Checks()
check = CHECKS.add

GIVEN = {
    "onebit-adam": "freeze_step=2,refresh=1",
    "zeroone-adam": "freeze_step=2,refresh=1",
    "fusion": "megabytes=0.001",
    "priority": "megabytes=0.001",
    "streaming-diloco": "sync_every=4,fragments=2,fragment_sync_delay=1",
    "mp2": "sync_every=2,budget=1.0",  # of a model this small, all is always sent
}
"""What algorithms are given beside a period of two steps."""
ADAM = ("onebit-adam", "zeroone-adam", "desloc")
"""Which are for that optimizer."""
ALGORITHMS = [name for name, entry in ENTRIES.items() if entry.family != "parameter server"]
"""Each that needs no servers."""


def text_of(name: str) -> str:
    periodic = "sync_every" in {each.name for each in parameters_of(name)}
    given = GIVEN.get(name, "sync_every=2" if periodic else "")
    return f"{name}:{given}" if given else name


# ---- random numbers, in a script that draws them ------------------------------------------------------


def seed() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def generators() -> int:
    _, keys, *at = np.random.get_state()
    return hash((torch.get_rng_state().numpy().tobytes(), keys.tobytes(), *at, random.getstate()))


BEFORE: dict[str, object] = {}


@check
def the_process_is_as_plain_ddp_has_it() -> None:
    Training().step()
    BEFORE.update(options())


@check
def dense_is_ddp_to_the_bit_in_a_script_that_draws() -> None:
    def run(algorithm: str | None) -> Tensor:
        seed()
        data = TensorDataset(torch.randn(40, 12), torch.randint(0, 4, (40,)))
        shuffled = DataLoader(data, batch_size=8, shuffle=True)
        weighted = DataLoader(data, batch_size=8, sampler=WeightedRandomSampler(range(1, 41), 40))
        training = Training()
        with nullcontext() if algorithm is None else training.attach(algorithm):
            for x, y in [*shuffled, *weighted]:
                training.optimizer.zero_grad()
                logits = training.model(x + 0.1 * random.random() * np.random.rand())
                drawn = torch.multinomial(logits.softmax(1), 1).squeeze(1)
                (nn.functional.cross_entropy(logits, y) * (1 + (drawn == y).float().mean())).backward()
                training.optimizer.step()
        return flat(training.model)

    assert torch.equal(run("dense"), run(None))  # the first attach of this process


class Training:
    """A small model that normalises and drops out, with the optimizer that the algorithm needs."""

    def __init__(self, adam: bool = False) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
            self.model = DDP(nn.Sequential(*layers), bucket_cap_mb=0.001)
        kind: Any = torch.optim.Adam if adam else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=0.01, **({} if adam else {"momentum": 0.9}))
        self.scheduler = StepLR(self.optimizer, 100)

    def attach(self, text: str, **given: Any) -> tacit.Attached:
        return tacit.attach(self.model, self.optimizer, text, steps_per_epoch=8, epochs=2, **given)

    def step(self, session: tacit.Attached | None = None) -> int:
        """Returns where the generators are."""
        x = torch.randn(8, 12) + random.random() * np.random.rand()
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        if session is not None:
            session.observe(loss)
        self.optimizer.step()
        return generators()


# ---- every algorithm ----------------------------------------------------------------------------------


def attributes(training: Training) -> dict[str, object]:
    """Those of the model, its modules and parameters, and the optimizer; of hooks, how many there are."""
    found: dict[str, object] = {}
    things = [*training.model.modules(), *training.model.parameters(), training.optimizer]
    for i, thing in enumerate(things):
        for key in (*vars(thing), "_backward_hooks", "_post_accumulate_grad_hooks"):
            value = getattr(thing, key, None)
            found[f"{i} {type(thing).__name__}.{key}"] = len(value or ()) if "hooks" in key else type(value)
    del found["0 DistributedDataParallel._comm_hooks"]  # which stays
    groups = training.optimizer.param_groups
    found["groups"] = str([{**group, "params": len(group["params"])} for group in groups])
    return found


def keys(training: Training) -> object:
    of_optimizer = training.optimizer.state_dict()
    return [*training.model.state_dict()], [sorted(each) for each in of_optimizer["param_groups"]]


@functools.cache
def without(adam: bool) -> tuple[list[int], object, dict[str, object]]:
    """Where the generators are behind each step of plain DDP, the keys of what it saves, and what it has."""
    seed()
    training = Training(adam)
    found = [generators(), *(training.step() for _ in range(5))]
    return found, keys(training), attributes(training)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"tacit" not in file.getvalue()
    loaded: nn.Module = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    return loaded


COPIES: dict[str, Callable[[Training], nn.Module]] = {
    "deepcopy of the module": lambda training: copy.deepcopy(training.model.module),
    "deepcopy of DDP": lambda training: copy.deepcopy(training.model),
    "average": lambda training: AveragedModel(training.model.module),
    "saved module": lambda training: saved_and_loaded(training.model.module),
    "saved DDP": lambda training: saved_and_loaded(training.model),
}


def check_copies(training: Training, session: tacit.Attached) -> None:
    """Each is called, stepped and saved, and the session knows nothing of it."""

    def known() -> list[Tensor]:
        numbers = torch.tensor([session.session.step, session.metrics()["bytes_out"]])
        return [numbers, flat(training.model), *training.model.buffers()]

    session.flush()
    before = [each.clone() for each in known()]
    for name, copied in COPIES.items():
        twin = copied(training)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        assert getattr(twin, "broadcast_buffers", True), name
        twin(torch.ones(8, 12)).square().mean().backward()
        optimizer.step()
        twin.state_dict()
        assert not torch.equal(flat(twin), before[1]), name
        assert all(map(torch.equal, known(), before)), name
    for thing in (training.optimizer, training.scheduler):
        for twin in (copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))):
            getattr(twin, "optimizer", twin).step()
    assert all(map(torch.equal, known(), before)), "optimizer"


def unchanged(name: str) -> None:
    adam = name in ADAM
    generators_then, keys_then, attributes_then = without(adam)
    training = Training(adam)
    seed()
    session = training.attach(text_of(name))
    found = [generators(), *(training.step(session) for _ in range(3))]
    with torch.random.fork_rng(devices=[]):
        check_copies(training, session)
    found.append(training.step(session))
    if not session.options.periodic:
        session.flush()
        assert same_on_all_ranks(flat(training.model)), (
            "which sync() would take for a write of one rank alone"
        )
    with torch.inference_mode():
        session.sync()
        session.load_state_dict(session.state_dict())
        tacit.measure_consensus(session)
    assert keys(training) == keys_then
    found.append(training.step(session))
    session.close()
    assert [*found, generators()] == [*generators_then, generators_then[-1]], "a global generator was moved"
    others = {*attributes(training).items()} ^ {*attributes_then.items()}
    assert not others, others


for each in ALGORITHMS:
    CHECKS[each] = functools.partial(unchanged, each)


# ---- what stands around calls of tacit ----------------------------------------------------------------


class Scaled(nn.Module):
    """Its backward pass multiplies entry by entry, which autocast leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(16, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        self.weight = nn.Parameter(drawn)
        self.register_buffer("seen", torch.zeros(12, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 0.1 * x.mean(0)
        return (x * self.weight).tanh().square().mean()


@contextmanager
def default(set_: Callable[[Any], None], value: object, before: object) -> Iterator[None]:
    set_(value)
    try:
        yield
    finally:
        set_(before)


AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "another device": lambda: default(torch.set_default_device, "meta", None),
    "float64": lambda: default(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: default(torch.set_default_dtype, torch.bfloat16, torch.float32),
}


def trained_within(around: str, text: str) -> Tensor:
    model = DDP(Scaled())
    kind = torch.optim.Adam if text.startswith("onebit-adam") else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(dist.get_rank())
    within = AROUND[around]
    in_backward = nullcontext if around in ("no_grad", "inference_mode") else within
    with within():
        session = tacit.attach(model, optimizer, text)
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 12, generator=data, dtype=torch.float32))
        with in_backward():
            loss.backward()
        with in_backward():
            optimizer.step()
        with within():
            session.sync()
            session.load_state_dict(session.state_dict())
            session.metrics()
            tacit.measure_consensus(session)
    with within():
        session.close()
    return torch.cat([flat(model), *model.buffers()])


@check
def nothing_around_a_call_moves_a_number() -> None:
    for text in (
        "topk:ratio=0.2",
        "powersgd",
        "onebit-adam:freeze_step=2",
        "qsgd",
        "diloco:sync_every=2",
        "lowbit:sync_every=2",
    ):
        expected = trained_within("nothing", text)
        for around in AROUND:
            assert torch.equal(trained_within(around, text), expected), (text, around)


# ---- the process --------------------------------------------------------------------------------------


def options() -> dict[str, object]:
    """Of this process, those that a library could change."""
    return {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "types": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
        "flags": (
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.is_anomaly_enabled(),
            torch.backends.mkldnn.enabled,
        ),
        "signals": [signal.getsignal(each) for each in sorted(signal.valid_signals())],
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.gettrace()),
        "limits": (sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold(), gc.isenabled()),
        "sockets": socket.getdefaulttimeout(),
        "warnings": [*warnings.filters],
        "logging": [
            (each.level, [*each.handlers], each.disabled, each.propagate)
            for each in (logging.getLogger(), logging.getLogger("tacit"), logging.getLogger("torch"))
        ],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }


@check
def no_option_of_the_process_is_another_than_before_the_first_attach() -> None:
    now = options()
    assert {key: value for key, value in now.items() if value != BEFORE[key]} == {}


@check
def a_process_that_a_rank_forks_ends_nothing_of_the_rank() -> None:
    training = Training()
    with training.attach("diloco:sync_every=2") as session:
        training.step()
        child = os.fork()
        if child == 0:  # what leaving the block, and the interpreter's end, call; torch may hang behind that
            session.__exit__(SystemExit, SystemExit(0), None)
            atexit._run_exitfuncs()
            os._exit(0)
        training.step()
        assert os.waitpid(child, 0)[1] == 0
        training.step()


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:])
