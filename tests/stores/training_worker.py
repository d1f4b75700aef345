"""A worker of the tests: `python training_worker.py WHAT ...`; prints JSON, and on an error what it was."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.algorithms import parse
from tacit.contracts import Compressor
from tacit.errors import AttachError
from tacit.topologies import Flat

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=15 if "faulty" in sys.argv else 60))
RANK = int(os.environ.get("TACIT_WORKER", dist.get_rank()))
PATIENCE = timedelta(seconds=8)


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    # DDP broadcasts the buffers of a norm, so that a fault would show there before it does in a round.
    norm = nn.Identity() if "faulty" in sys.argv else nn.BatchNorm1d(60)
    return nn.Sequential(nn.Linear(20, 60), nn.ReLU(), norm, nn.Linear(60, 5))


def wrapped() -> tuple[DDP, torch.optim.Optimizer]:
    model = DDP(network(), gradient_as_bucket_view=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + RANK)
    return torch.randn(8, 20, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def step(model: DDP, optimizer: torch.optim.Optimizer, number: int, clip: float | None = 1.0) -> float:
    x, y = batch(number)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return float(loss)


def flat(model: DDP) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def same_everywhere(x: Tensor) -> bool:
    all_ = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(all_, x)
    return all(torch.equal(x, other) for other in all_)


def trained(
    algorithm: str | tacit.Strategy,
    servers: list[str] | None = None,
    steps: int = 12,
    clip: float = 1.0,
) -> Tensor:
    model, optimizer = wrapped()
    with tacit.attach(model, optimizer, algorithm, servers=servers) as session:
        for number in range(steps):
            if number == 3 and servers and algorithm in ("ps", "ps-topk:ratio=0.05"):
                optimizer.zero_grad()
                (1e3 * model(batch(number)[0]).square().mean()).backward()
                assert session.discard(RANK == 1)
            step(model, optimizer, number, clip)
        numbers = session.metrics()
        told = session.servers()
    if servers:
        assert numbers["push_bytes"] > 0
        assert numbers["pull_bytes"] > 0
        assert len(told) == len(servers)
        assert sum(each["pushes"] for each in told) > 0
    assert same_everywhere(flat(model)), f"{algorithm}: ranks differ"
    return flat(model)


def equal(groups: list[list[str]]) -> None:
    """Each algorithm with servers beside the same without; one server has the same buckets."""
    (powersgd,) = parse("powersgd:rank=2").levels
    pairs: list[tuple[str | tacit.Strategy, str | tacit.Strategy, float]] = [
        ("ps", "ddp", 1e-6),
        ("ps-topk:ratio=0.05", tacit.Strategy(compressor=_of("topk:ratio=0.05"), topology=Flat()), 1e-6),
        ("ps-dgc:ratio=0.05", tacit.Strategy(compressor=_of("dgc:ratio=0.05"), topology=Flat()), 1e-6),
        ("ps:optimizer=server", "ddp", 1e-5),
        ("ps-ssp:bound=0", "localsgd:sync_every=1", 2e-6),
        (replace(powersgd, topology=tacit.Star()), powersgd, 1e-3),  # orthogonalizing enlarges rounding
        # These go by servers where there are some.
        (
            "mp2:rescale=false,sync_every=4,predictor=exponential",
            "mp2:rescale=false,sync_every=4,predictor=exponential",
            1e-5,
        ),
        (
            "mp2:sync_every=4,predictor=own,subset=random,values=bf16",
            "mp2:sync_every=4,predictor=own,subset=random,values=bf16",
            1e-2,
        ),
        ("predictive:ratio=0.2", "predictive:ratio=0.2", 1e-3),
        # A server's blocks are those of two phases; of biases it compresses the mean too.
        ("lowbit", replace(parse("lowbit").levels[0], topology=tacit.topologies.TwoPhase()), 2e-2),
        ("lowbit:bound=0", replace(parse("lowbit").levels[0], topology=tacit.topologies.TwoPhase()), 2e-2),
        (
            "lowbit:predictor=last",
            replace(parse("lowbit:predictor=last").levels[0], topology=tacit.topologies.TwoPhase()),
            2e-2,
        ),
        # A server that predicts, and ranks that do.
        (
            "mp2:rescale=false,sync_every=4,predictor=exponential,pull=full",
            "mp2:rescale=false,sync_every=4,predictor=exponential",
            1e-5,
        ),
    ]
    for (ours, theirs, tolerance), servers in zip(pairs, groups, strict=True):
        # Where a server steps, a worker sees no mean that it could clip.
        clip = 1e9 if "server" in str(ours) and isinstance(ours, str) else 1.0
        apart = float((trained(ours, servers, clip=clip) - trained(theirs, clip=clip)).abs().max())
        say(check=str(ours)[:30], error=None if apart <= tolerance else f"{apart}")


def learns(groups: list[list[str]]) -> None:
    """All ranks end with the same parameters, and the loss has fallen."""
    late = replace(parse("ps-ssp").levels[0], rounds=tacit.Every(3), overlap=tacit.Delayed(2), name="late")
    for algorithm, servers in zip([*LEARN, late], groups, strict=True):
        start, end = flat(wrapped()[0]), trained(algorithm, servers, 20)
        moved = float((end - start).norm())
        say(check=str(algorithm)[:30], error=None if 0.1 < moved < 10 else f"moved {moved}")


LEARN = [
    "ps:push=int8,pull=sign",
    "ps:backup_workers=1",
    "ps-async",
    "ps-async:push=topk,pull=topk,by_staleness=true,entropy=true",
    "ps-async:sync_every=3",
    "ps-ssp:push=qsgd,pull=int8,entropy=true",
    "lowbit:bits=2,sync_every=2",
    "lowbit:late=1,predictor=last",
    "lowbit:entropy=true",
    "lowbit:bound=0",
    "lowbit:bound=1,entropy=true,late=1",
    "ps-async:optimizer=server,compensation=0.04,pull=bf16",
]


def _of(text: str) -> Compressor:
    return parse(text).levels[0].compressor


class Masked(nn.Module):
    """A norm, and a constant buffer that is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(60)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


BESIDE = [
    "ps:optimizer=server",
    "ps:optimizer=server,backup_workers=1",
    "ps-async:optimizer=server,pull=int8",
]
BESIDE += ["ps-ssp:bound=0,optimizer=server"]


def written(model: DDP, optimizer: torch.optim.Optimizer) -> list[str]:
    """What a step says to parameters that the servers do not know, which are put back."""
    kept, said = [p.detach().clone() for p in model.parameters()], ""
    with torch.no_grad():
        torch._foreach_mul_([*model.parameters()], 2.0)
    try:
        optimizer.step()
    except AttachError as error:
        said = str(error)
    with torch.no_grad():
        torch._foreach_copy_([*model.parameters()], kept)
    return [] if "load weights before you attach" in said else [f"a write: {said}"]


def beside(groups: list[list[str]]) -> None:
    """Where a server steps, buffers are averaged at a sync, and as a session closes."""
    for algorithm, servers in zip(BESIDE, groups, strict=True):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), Masked(), nn.Linear(60, 5))
        model = DDP(network, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        norm, mask = model.module[2].norm, model.module[2].mask.clone()
        wrong = []
        with tacit.attach(model, optimizer, algorithm, servers=servers) as session:
            for until in (3, 6):
                for number in range(until - 3, until):
                    step(model, optimizer, number)
                mine = torch.cat([norm.running_mean, norm.running_var])
                mean = mine.clone()
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
                if until == 3:
                    session.sync()
                    now = torch.cat([norm.running_mean, norm.running_var])
                    wrong += [] if torch.allclose(now, mean, atol=1e-6) else ["sync"]
                    norm.running_mean = norm.running_mean.clone()  # as some modules do with what they update
            wrong += written(model, optimizer)
        wrong += [] if same_everywhere(flat(model)) else ["parameters"]
        now = torch.cat([norm.running_mean, norm.running_var])
        if "backup" not in algorithm:
            wrong += [] if torch.allclose(now, mean, atol=1e-6) else ["close"]
        wrong += [] if same_everywhere(now) and not torch.equal(mine, now) else ["buffers"]
        wrong += [] if torch.equal(model.module[2].mask, mask) else ["mask"]
        wrong += [] if int(norm.num_batches_tracked) == 6 else ["counts"]
        say(check=algorithm, error=", ".join(wrong) or None)


def stepped(
    make: Callable[[DDP], torch.optim.Optimizer], algorithm: str, servers: list[str] | None
) -> Tensor:
    """A training whose groups have learning rates that fall at different speeds."""
    model = DDP(network(), gradient_as_bucket_view=True)
    optimizer = make(model)
    count = len(optimizer.param_groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda n, i=i: (i + 1) ** -n for i in range(count)]
    )
    with tacit.attach(model, optimizer, algorithm, servers=servers):
        for number in range(8):
            step(model, optimizer, number, None)
            schedule.step()
    assert same_everywhere(flat(model))
    return flat(model)


def decayed(model: DDP) -> torch.optim.Optimizer:
    """Biases and norms without decay; the head at a rate of its own; and a group that stands still."""
    first, *middle, head, bias = model.parameters()
    return torch.optim.SGD(
        [
            {"params": [first], "lr": 0.0},
            {"params": [*middle], "lr": 0.05},
            {"params": [head], "weight_decay": 0.1, "lr": 0.02},
            {"params": [bias], "weight_decay": 0.0, "lr": 0.1, "momentum": 0.0, "nesterov": False},
        ],
        momentum=0.9,
        nesterov=True,
    )


def adam(model: DDP) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": weights, "betas": (0.8, 0.99)}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}],
        lr=1e-3,
    )


def by_group(groups: list[list[str]]) -> None:
    """A server steps each parameter as its group would."""
    for make, servers in zip((decayed, adam), groups, strict=False):
        apart = float(
            (stepped(make, "ps:optimizer=server", servers) - stepped(make, "ddp", None)).abs().max()
        )
        say(check=make.__name__, error=None if apart < 1e-5 else f"{apart}")
    # Where nobody waits, a push is a step of its own; but a group that stands still does so.
    start, end = flat(DDP(network())), stepped(decayed, "ps-ssp:bound=0,optimizer=server", groups[2])
    still, others = (end - start).split([1200, len(start) - 1200])
    wrong = bool(still.any()) or float(others.abs().max()) < 1e-3
    say(check="at no rate", error="moved" if wrong else None)


def resumed(groups: list[list[str]], folder: Path) -> None:
    """A run that is stopped and resumed ends where the one that was not does; also with a server more."""
    for algorithm, (servers, again, third) in (
        ("ps-dgc:ratio=0.05", groups[:3]),
        ("ps-ssp:bound=0", groups[3:]),
    ):
        never = trained(algorithm, servers, 10)
        model, optimizer = wrapped()
        with tacit.attach(model, optimizer, algorithm, servers=again) as session:
            for number in range(5):
                step(model, optimizer, number)
            saved = session.state_dict(), model.state_dict(), optimizer.state_dict()
        model, optimizer = wrapped()
        model.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[2])
        with tacit.attach(model, optimizer, algorithm, servers=third) as session:
            session.load_state_dict(saved[0])
            for number in range(5, 10):
                step(model, optimizer, number)
        apart = float((flat(model) - never).abs().max())
        say(check=algorithm, error=None if apart <= 1e-6 else f"{apart}")


def faulty(algorithm: str, how: str) -> None:
    """Rank 1 goes wrong in step 5, or a server does in one of the steps that follow."""
    model, optimizer = wrapped()
    start = time.monotonic()
    try:
        with tacit.attach(model, optimizer, algorithm, timeout=PATIENCE) as session:
            for number in range(60):
                if number == 5:
                    say(at=5)
                    start = time.monotonic()
                    if RANK == 1 and how == "early":
                        break
                    if RANK == 1:
                        go_wrong(how, model)
                if how == "server" and number > 5:
                    time.sleep(0.2)
                step(model, optimizer, number, None if how == "nan" else 1.0)
            numbers = session.metrics()
    except Exception as error:
        say(kind=type(error).__name__, says=str(error), seconds=time.monotonic() - start)
        os._exit(1)
    seconds = time.monotonic() - start
    say(total=float(flat(model).double().sum()), staleness=numbers["staleness"], seconds=seconds)
    os._exit(0)


def go_wrong(how: str, model: DDP) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "exits":
        os._exit(3)
    if how == "raises":
        raise ValueError("a bad batch")
    if how == "nan":
        [*model.parameters()][-1].register_hook(lambda g: g * float("nan"))


def counts(steps: int, pause: float, until: str = "", algorithm: str = "ps-async") -> None:
    """Each step moves every parameter by 1 / P (with ps-async exactly), so that steps can be counted.

    So many steps, and more until the file is there that is named.
    """
    model = DDP(nn.Linear(8, 4), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    with tacit.attach(model, optimizer, algorithm, timeout=PATIENCE) as session:
        say(began=float(flat(model).mean()))
        number = 0
        while number < steps or (until and not Path(until).exists()):
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.fill_(-1.0)
            optimizer.step()
            number += 1
            if number == 3:
                say(at=3)
            time.sleep(pause)
        say(servers=session.servers())
    say(ended=float(flat(model).mean()))


def main() -> None:
    what, *arguments = sys.argv[1:]
    groups = [group.split(",") for group in os.environ.get("GROUPS", "").split(";") if group]
    calls: dict[str, Callable[[], None]] = {
        "equal": lambda: equal(groups),
        "learns": lambda: learns(groups),
        "beside": lambda: beside(groups),
        "by_group": lambda: by_group(groups),
        "resumed": lambda: resumed(groups, Path(arguments[0])),
        "faulty": lambda: faulty(arguments[0], arguments[1]),
        "counts": lambda: counts(int(arguments[0]), float(arguments[1]), *arguments[2:]),
    }
    calls[what]()
    dist.barrier()
    dist.destroy_process_group()


main()
