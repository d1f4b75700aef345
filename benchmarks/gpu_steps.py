"""A step with each algorithm against plain DDP, on one GPU that launches its collectives; a part of `gpu.py`.

There is no network in the figures of `steps`. The wire of `wired` is emulated: a kernel that waits on the
exchange's stream for bytes / bandwidth.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from gpu_checks import CPU, Check, Row, Setting, microseconds, milliseconds, synchronize, verdict
from paired import paired_ratio
from tacit.contracts import AllGather, AllReduce, Collective, Posted
from tacit.gradients.ddp_hook import HookDispatcher
from tacit.transports import torch_distributed as transport
from tacit.transports.message_layout import nbytes
from tacit_lab.recipes.models.gpt import GPT

GOALS = {"dense": 1.005, "topk": 1.02, "powersgd": 1.02, "lowbit": 1.02}
"""How many times as long as with plain DDP a step should take at most."""
IN_THE_HOOK = 15.0
"""Milliseconds that the host should spend there in a step, at most."""
FIRST, REST = tuple(GOALS), ("topk:chunk=4096",)
LATER = (
    "lowbit:bits=2,entropy=true",
    "efsign",
    "gtopk:ratio=0.01",
    "threshold:tau=0.001",
    "uneven",
    "fusion",
    "priority",
    "dear",
    "gossip",
    "choco",
    "lag",
)
"""For which a run of 12 minutes has no time; a second one has."""
WIRED = ("dense", "topk", "powersgd", "efsign")
"""What sends by all-reduce and all-gather alone, whose bytes among more ranks one rank can tell."""
GBIT = (1.0, 10.0, 100.0)
PEERS = 8
"""How many GPUs the wire stands for, each with a link of its own."""
WORDS = 50304
BLOCKS, STEPS = 6, 6


@dataclass
class Training:
    """A model, its optimizer, and perhaps a session on it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    session: Any
    batch: Tensor

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.batch.device.type, dtype=torch.bfloat16):
            scores = self.model(self.batch[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), self.batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


def training(algorithm: str | None, device: torch.device) -> Training:
    """124 million parameters, as GPT-2 small has; few on a CPU. None: plain DDP."""
    gc.collect()  # what was trained before is held by cycles
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    if device.type == "cpu":
        net, batch = GPT(vocabulary=64, length=16, width=32, heads=2, blocks=1), (2, 17)
    else:
        net, batch = GPT(vocabulary=WORDS, length=1024, width=768, heads=12, blocks=12), (32, 1025)
    model = DDP(net.to(device), gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    session = None if algorithm is None else tacit.attach(model, optimizer, algorithm)
    return Training(model, optimizer, session, torch.randint(0, 64, batch, device=device))


def hooked(each: Training, times: int = 5) -> float:
    """Milliseconds a step that the host spends in tacit's hook; with little to compute, so no queue fills."""
    board = HookDispatcher.of(each.model)  # type: ignore[arg-type]
    real, batch, found = board.answer, each.batch, [0.0]

    def answer(bucket: Any) -> Any:
        start = time.perf_counter()
        future = real(bucket)
        found[-1] += time.perf_counter() - start
        return future

    board.answer, each.batch = answer, batch[:1, :17]
    for _ in range(times):
        synchronize(batch.device)
        found.append(0.0)
        each.step()
    board.answer, each.batch = real, batch
    return statistics.median(found[1:]) * 1000


def waits(each: Training) -> int | None:
    """What of a step torch's debug mode finds to wait for a GPU; the hook's one wait is an event."""
    if each.batch.is_cpu:
        return None
    found = 0

    def count(message: Warning | str, *_: object, **__: object) -> None:
        nonlocal found
        found += "synchronizing" in str(message)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        before, warnings.showwarning = warnings.showwarning, count
        try:
            each.step()
        finally:
            warnings.showwarning = before
            torch.cuda.set_sync_debug_mode("default")
    return found


def peak(algorithm: str | None, device: torch.device) -> float | None:
    """MiB of a GPU that training takes at most."""
    if device == CPU:
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    each = training(algorithm, device)
    for _ in range(3):
        each.step()
    torch.cuda.synchronize()
    found = (torch.cuda.max_memory_allocated() - before) / 2**20
    each.close()
    return found


def interleaved(
    arms: Mapping[str, Callable[[int], float]], blocks: int, count: int
) -> dict[str, list[float]]:
    """Milliseconds a step by arm and block, A B B A and so on; an arm takes how many steps a block has."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(blocks):
        for name in [*arms][:: 1 if block % 2 else -1]:
            found[name].append(arms[name](count))
    return found


def steps(setting: Setting, algorithm: str) -> Row:
    """An algorithm against plain DDP, in interleaved blocks."""
    device = setting.device
    arms = {"plain": training(None, device), algorithm: training(algorithm, device)}
    for each in arms.values():
        for _ in range(5):  # from the fourth round on buckets travel as they are
            each.step()
    blocks = {name: partial(milliseconds, each.step, device=device) for name, each in arms.items()}
    took = interleaved(blocks, *((2, 2) if setting.small else (BLOCKS, STEPS)))
    ours = arms[algorithm]
    level = ours.session.session
    in_hook = level.strategy.subject == "gradient" and not level.strategy.overlap.layerwise
    row = {
        "algorithm": algorithm,
        "ms": statistics.median(took[algorithm]),
        "plain_ms": statistics.median(took["plain"]),
        "ratio": paired_ratio(took[algorithm], took["plain"]),
        "hook_ms": hooked(ours) if in_hook else 0.0,
        "buckets": len(level.buckets),
        "waits": waits(ours),
        "active_path": ours.session.active_path,
    }
    ours.close()
    del arms, ours, each, level, blocks
    row["peak_mib"] = peak(algorithm, device)
    row["plain_peak_mib"] = peak(None, device) if algorithm == "dense" else None
    print(
        f"{algorithm:28} {row['ms']:7.1f} ms, plain {row['plain_ms']:6.1f}: {row['ratio']['median']:.3f}; "
        f"host in the hook {row['hook_ms']:.1f} ms, {row['buckets']} buckets; waits {row['waits']}; "
        f"peak {row['peak_mib'] or 0:.0f} MiB",
        flush=True,
    )
    verdicts = [verdict(f"{algorithm}: host in the hook, ms", row["hook_ms"], IN_THE_HOOK)] if in_hook else []
    if algorithm in GOALS:
        verdicts.append(
            verdict(f"{algorithm}: a step, of plain DDP's", row["ratio"]["median"], GOALS[algorithm])
        )
    return {**row, "verdicts": verdicts}


# ---- an emulated wire ---------------------------------------------------------------------------------


@contextlib.contextmanager
def wire(gbit: float, peers: int, device: torch.device) -> Iterator[None]:
    """Have every collective take as long as it would among so many GPUs, each with a link of this rate."""
    real = transport.TorchTransport.post
    cycles = clock_rate(device)

    def post(self: Any, request: Collective, stage: int, key: str) -> Posted:
        payload = getattr(request, "payload", None)
        if self.in_order and payload is not None:
            size = nbytes(payload)
            sent = 2 * (peers - 1) / peers * size if isinstance(request, AllReduce) else (peers - 1) * size
            assert isinstance(request, AllReduce | AllGather)
            seconds = sent * 8 / (gbit * 1e9)
            time.sleep(seconds) if device == CPU else torch.cuda._sleep(int(seconds * cycles))
        return real(self, request, stage, key)

    transport.TorchTransport.post = post  # type: ignore[method-assign]
    try:
        yield
    finally:
        transport.TorchTransport.post = real  # type: ignore[method-assign]


def clock_rate(device: torch.device) -> float:
    """Cycles a second of the counter that a GPU's `_sleep` waits by."""
    if device == CPU:
        return 0.0
    torch.cuda._sleep(1000)
    return 1_000_000 / (microseconds(lambda: torch.cuda._sleep(1_000_000), device) * 1e-6)


def wired(setting: Setting, algorithms: Sequence[str], rates: Sequence[float]) -> Row:
    """A step with each algorithm at these links; computing alone is without any exchange."""
    device, rows = setting.device, []
    alone = training(None, device)
    with alone.model.no_sync():  # type: ignore[operator]
        for _ in range(3):
            alone.step()
        computing = milliseconds(alone.step, 3, device)
    del alone
    for algorithm in algorithms:
        each = training(algorithm, device)
        for _ in range(5):
            each.step()
        for gbit in rates:
            with wire(gbit, PEERS, device):
                each.step()
                found = milliseconds(each.step, 2, device)
            rows.append({"algorithm": algorithm, "gbit": gbit, "ms": found})
            print(f"{algorithm:28} {found:8.1f} ms at {gbit:g} Gbit/s, computing {computing:.1f}", flush=True)
        assert each.session.metrics()["rounds"] > 0
        each.close()
        del each
    return {"peers": PEERS, "computing_ms": computing, "rows": rows}


def _steps(algorithm: str) -> Check:
    shows = f"a step with {algorithm} against plain DDP: time, host's time, waits, memory"
    return Check(f"steps: {algorithm}", 14, shows, partial(steps, algorithm=algorithm))


FIRST_STEPS, MORE_STEPS, LATER_STEPS = ([*map(_steps, each)] for each in (FIRST, REST, LATER))
WIRE = Check(
    "wire",
    60,
    "a step at 1, 10 and 100 Gbit/s between 8 GPUs, emulated",
    partial(wired, algorithms=WIRED, rates=GBIT),
)
