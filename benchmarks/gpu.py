"""What tacit costs on a GPU: kernels, launches, waits, memory, steps; on one GPU, by NCCL, in a world of one.

    python benchmarks/gpu.py --all                # all parts, about 10 minutes on one GPU
    python benchmarks/gpu.py --only kernels       # encode and decode, in GB/s and in copies
    python benchmarks/gpu.py --only steps         # a step with each algorithm against plain DDP
    python benchmarks/gpu.py --only wire          # the same with an emulated wire between 8 GPUs
    python benchmarks/gpu.py --only profile       # where a step's time beyond plain DDP's goes
    python benchmarks/gpu.py --dry                # what would be measured; exchanges run emulated on the CPU

One rank starts its collectives too, so that all launches are there. What one GPU cannot show, NCCL between
machines, is not claimed: the wire is a kernel that waits for bytes / bandwidth on the exchange's stream.
Figures of one table are from one run, in interleaved blocks, with CUDA events.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from paired import conclude, hardware, paired_ratio
from tacit.compressors import BF16, FP8, QSGD, Int8, Natural, PowerSGD, Sign, TernGrad, TopK
from tacit.contracts import (
    AllGather,
    AllReduce,
    Collective,
    Context,
    FusedCodec,
    Matrix,
    OneShot,
    Payload,
    Posted,
)
from tacit.gradients.ddp_hook import HookDispatcher
from tacit.kernels import products
from tacit.kernels.dispatch import emulated_device
from tacit.prediction import MP2
from tacit.prediction.predictor import in_a_row
from tacit.session.health import device_notes
from tacit.transports import torch_distributed as transport
from tacit.transports.message_layout import empty_message, nbytes, pack_, unpack
from tacit_lab.recipes.models.gpt import GPT

PARTS = ("kernels", "steps", "wire", "profile")
ALGORITHMS = (
    "dense",
    "bf16",
    "topk",
    "topk:chunk=4096",
    "dgc",
    "powersgd",
    "efsign",
    "qsgd",
    "int8",
    "diloco:sync_every=10,bits=4",
)
KERNELS: Mapping[str, OneShot] = {
    "sign": Sign(),
    "sign by blocks": Sign(block=512),
    "qsgd 4 bits": QSGD(),
    "terngrad": TernGrad(),
    "int8": Int8(),
    "natural": Natural(),
    "bf16": BF16(),
    "fp8": FP8(),
    "topk 1%": TopK(ratio=0.01),
    "topk 1% of 4096": TopK(ratio=0.01, chunk=4096),
}
SIZES = (25_000_000, 6_500_000)
CUDA = torch.device("cuda", 0)


class Scratch:
    """A workspace that hands out the same buffers every time, as a session does."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def spare(self, field: str, like: Tensor) -> Tensor:
        return self._kept.setdefault(field, torch.empty_like(like))

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if key not in self._kept:
            self._kept[key] = torch.empty(tuple(shape), dtype=dtype, device=like.device)
        return self._kept[key]


# ---- kernels ------------------------------------------------------------------------------------------


def timed(call: Callable[[], object], times: int = 20) -> float:
    """Microseconds a call on the device: the median of five blocks."""
    found = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / times * 1000)
    return float(statistics.median(found))


def launched(call: Callable[[], object], times: int = 5) -> tuple[float, float]:
    """A call's kernels: for how many microseconds they run, and how many they are."""
    found = [took for _, took, _ in on_the_device(call, times)]
    return sum(found) * 1000 / times, len(found) / times


def on_the_device(call: Callable[[], object], times: int) -> list[tuple[float, float, str]]:
    """What the GPU does in so many calls, in order: (begin, duration) in ms, and its name."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    assert profiler.profiler is not None
    return sorted(
        (event.start_ns() / 1e6, event.duration_ns() / 1e6, event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA
    )


def measured(numel: int, codec: str, task: str, call: Callable[[], object], copy: float) -> dict[str, Any]:
    """A row of the table, which is printed too; `copy`: what a copy takes."""
    call()
    took, (runs, count) = timed(call), launched(call)
    print(
        f"{numel:>11,} {codec:17} {task:12} {took:8.0f} us {took / copy:6.2f} copies; "
        f"{count:3.0f} kernels run for {runs:6.0f} us",
        flush=True,
    )
    told = {"us": took, "copies": took / copy, "kernels_us": runs, "kernels": count}
    return {"numel": numel, "codec": codec, "task": task, **told}


def kernels() -> list[dict[str, Any]]:
    """Every codec's encode, encode with error feedback, and decode of four peers."""
    rows = []
    for numel in SIZES:
        x, out = (torch.randn(numel, device=CUDA) for _ in range(2))
        copy = timed(partial(out.copy_, x))
        for name, codec in KERNELS.items():
            for task, call in tasks_of(codec, x, out).items():
                rows.append(measured(numel, name, task, call, copy))
    return rows


def thin_products() -> list[dict[str, Any]]:
    """PowerSGD's three products, of the matrices of three blocks of GPT-2 small, by Triton and by torch."""
    shapes = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 3
    matrices, start = [], 0
    for rows, columns in shapes:
        matrices.append(Matrix(start, rows, columns))
        start += rows * columns
    places = [(m.start, m.rows, m.columns) for m in matrices]
    codec = PowerSGD(rank=4, matrices=tuple(matrices))
    x, out = (torch.randn(start, device=CUDA) for _ in range(2))
    p, q = (
        torch.randn(4 * sum(getattr(m, side) for m in matrices), device=CUDA) for side in ("rows", "columns")
    )
    copy = timed(partial(out.copy_, x))

    def by_torch(product: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        for parts in codec._parts(x, p, q):
            product(*parts)

    tasks: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "P = M Q": (
            lambda: products.times_q_(x, p, q, places, 4),
            lambda: by_torch(lambda m, a, b: torch.bmm(b, m.transpose(1, 2), out=a)),
        ),
        "Q = M' P": (
            lambda: products.times_p_(x, p, q, places, 4),
            lambda: by_torch(lambda m, a, b: torch.bmm(a, m, out=b)),
        ),
        "M - P Q'": (
            lambda: products.expand_(x, p, q, places, 4, subtract=True),
            lambda: by_torch(lambda m, a, b: m.baddbmm_(a.transpose(1, 2), b, alpha=-1e-9)),
        ),
    }
    return [
        measured(start, name, task, call, copy)
        for task, calls in tasks.items()
        for name, call in zip(("powersgd", "the same by torch"), calls, strict=True)
    ]


def tasks_of(codec: OneShot, x: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
    """What a codec does to `x`, ready to be called."""
    ctxs = [
        Context(out=out, work=Scratch(), peers=4, rank=i, health=torch.zeros(1, device=x.device))
        for i in range(4)
    ]
    residual, new_residual = torch.randn_like(x), torch.empty_like(x)
    tasks: dict[str, Callable[[], object]] = {"encode": lambda: codec.encode(x, ctxs[0])}
    if isinstance(codec, FusedCodec):
        tasks["encode + EF"] = lambda: codec.encode(x, ctxs[0], residual, new_residual)
    if not codec.additive:
        payloads = gathered([codec.encode(torch.randn_like(x), ctx) for ctx in ctxs])
        tasks["decode 4"] = lambda: codec.decode_mean_(payloads, out)
    return tasks


def gathered(payloads: Sequence[Payload]) -> list[Payload]:
    """As an all-gather leaves them: one message after the other."""
    messages = empty_message(payloads[0], len(payloads)).view(len(payloads), -1)
    for payload, message in zip(payloads, messages, strict=True):
        pack_(payload, message)
    return [unpack(message, payloads[0]) for message in messages]


def predictions() -> list[dict[str, Any]]:
    """The next change of each entry by MP²'s network, from the last two."""
    rows = []
    for numel in SIZES:
        changes, out = torch.randn(2, numel, device=CUDA), torch.empty(numel, device=CUDA)
        predictor, copy = MP2(), timed(partial(out.copy_, changes[0]))
        predictor.prepare(CUDA)
        call = partial(predictor.write, lambda piece: in_a_row(changes[:, piece]), "linear", out)  # noqa: B023
        rows.append(measured(numel, "MP2", "predict", call, copy))
    return rows


# ---- steps --------------------------------------------------------------------------------------------


@dataclass
class Training:
    """A model, its optimizer, and perhaps a session on it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    session: Any
    batch: Tensor

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = self.model(self.batch[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), self.batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()


def gpt(device: torch.device = CUDA) -> nn.Module:
    """124 million parameters, as GPT-2 small has."""
    torch.manual_seed(0)
    return GPT(vocabulary=50304, length=1024, width=768, heads=12, blocks=12).to(device)


def training(algorithm: str | None) -> Training:
    """None: plain DDP."""
    gc.collect()  # what was trained before is held by cycles
    torch.cuda.empty_cache()
    model = DDP(gpt(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    session = None if algorithm is None else tacit.attach(model, optimizer, algorithm)
    batch = torch.randint(0, 50304, (32, 1025), device=CUDA)
    return Training(model, optimizer, session, batch)


def milliseconds(each: Training, steps: int) -> float:
    """A step's, on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(steps):
        each.step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / steps


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
        torch.cuda.synchronize()
        found.append(0.0)
        each.step()
    board.answer, each.batch = real, batch
    return statistics.median(found[1:]) * 1000


def waits(each: Training) -> int:
    """What of a step torch's debug mode finds to wait for the device; the hook's one wait is an event."""
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


def peak(algorithm: str | None) -> float:
    """MiB that training takes at most."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    each = training(algorithm)
    for _ in range(3):
        each.step()
    torch.cuda.synchronize()
    found = (torch.cuda.max_memory_allocated() - before) / 2**20
    if each.session is not None:
        each.session.close()
    return found


def steps(algorithms: Sequence[str], blocks: int, count: int) -> list[dict[str, Any]]:
    """Each algorithm against plain DDP, in interleaved blocks."""
    rows = []
    plain_peak = peak(None)
    for algorithm in algorithms:
        arms = {"plain": training(None), algorithm: training(algorithm)}
        for each in arms.values():
            for _ in range(5):  # from the fourth round on buckets travel as they are
                each.step()
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for block in range(blocks):
            for name in [*arms][:: 1 if block % 2 else -1]:
                seconds[name].append(milliseconds(arms[name], count))
        ours = arms[algorithm]
        row = {
            "algorithm": algorithm,
            "ms": statistics.median(seconds[algorithm]),
            "plain_ms": statistics.median(seconds["plain"]),
            "ratio": paired_ratio(seconds[algorithm], seconds["plain"]),
            "hook_ms": hooked(ours) if ours.session.session.strategy.subject == "gradient" else 0.0,
            "buckets": len(ours.session.session.buckets),
            "waits": waits(ours),
            "active_path": ours.session.active_path,
        }
        ours.session.close()
        del arms, ours, each
        row["peak_mib"], row["plain_peak_mib"] = peak(algorithm), plain_peak
        rows.append(row)
        print(
            f"{algorithm:28} {row['ms']:7.1f} ms, plain {row['plain_ms']:6.1f}: "
            f"{row['ratio']['median']:.3f}; "
            f"host in the hook {row['hook_ms']:.1f} ms, {row['buckets']} buckets; waits {row['waits']}; "
            f"peak {row['peak_mib']:.0f} MiB, plain {row['plain_peak_mib']:.0f}",
            flush=True,
        )
    return rows


# ---- an emulated wire ---------------------------------------------------------------------------------


@contextlib.contextmanager
def wire(gbit: float, peers: int) -> Iterator[None]:
    """Have every collective take as long as it would among so many GPUs, each with a link of this rate."""
    real = transport.TorchTransport.post
    cycles = clock_rate()

    def post(self: Any, request: Collective, stage: int, key: str) -> Posted:
        payload = getattr(request, "payload", None)
        if self.in_order and payload is not None:
            size = nbytes(payload)
            sent = 2 * (peers - 1) / peers * size if isinstance(request, AllReduce) else (peers - 1) * size
            assert isinstance(request, AllReduce | AllGather)
            torch.cuda._sleep(int(sent * 8 / (gbit * 1e9) * cycles))
        return real(self, request, stage, key)

    transport.TorchTransport.post = post  # type: ignore[method-assign]
    try:
        yield
    finally:
        transport.TorchTransport.post = real  # type: ignore[method-assign]


def clock_rate() -> float:
    """Cycles a second of the counter that `_sleep` waits by."""
    torch.cuda._sleep(1000)
    return 100_000_000 / (timed(lambda: torch.cuda._sleep(100_000_000), 1) * 1e-6)


def wired(algorithms: Sequence[str], gbit: float, peers: int, count: int) -> list[dict[str, Any]]:
    """A step with each algorithm at this link; computing alone is without any exchange."""
    rows = []
    alone = training(None)
    with alone.model.no_sync():  # type: ignore[operator]
        for _ in range(3):
            alone.step()
        computing = milliseconds(alone, count)
    del alone
    for algorithm in algorithms:
        with wire(gbit, peers):
            each = training(algorithm)
            for _ in range(5):
                each.step()
            found = statistics.median(milliseconds(each, count) for _ in range(3 if count > 2 else 1))
            numbers = each.session.metrics()
            each.session.close()
        rows.append(
            {"algorithm": algorithm, "gbit": gbit, "peers": peers, "ms": found, "computing_ms": computing}
        )
        print(f"{algorithm:28} {found:8.1f} ms at {gbit:g} Gbit/s, computing {computing:.1f}", flush=True)
        assert numbers["rounds"] > 0
        del each
    return rows


# ---- where the time goes ------------------------------------------------------------------------------


@contextlib.contextmanager
def without(waiting: bool = False, notes: bool = False) -> Iterator[None]:
    """Leave out the wait before the optimizer's step, or what is noted of NaN and overflow."""
    report, noted = device_notes.DeviceReport, device_notes.BucketHealth
    replaced: list[tuple[Any, str, Any]] = []
    if waiting:
        replaced += [(report, "read", lambda self: {}), (report, "seconds", lambda self: None)]
    if notes:
        replaced += [(noted, name, lambda self, x: None) for name in ("note_given", "note_mean")]
        replaced.append((transport, "divide_", lambda flat, by, finite_probe: flat.div_(by)))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for each in replaced:
        setattr(*each)
    try:
        yield
    finally:
        for each in before:
            setattr(*each)


def hooked_by_torch() -> Training:
    """Plain DDP with torch's own hook in Python, which does what DDP does without one."""
    each = training(None)
    each.model.register_comm_hook(None, allreduce_hook)  # type: ignore[operator]
    return each


def parts(blocks: int, count: int) -> list[dict[str, Any]]:
    """A step with `dense`, and with parts of it left out, against plain DDP; in interleaved blocks."""
    arms: dict[str, tuple[Training, dict[str, bool]]] = {"plain": (training(None), {})}
    arms["torch's hook"] = hooked_by_torch(), {}
    for name, left_out in {
        "dense": {},
        "dense, not waiting": {"waiting": True},
        "dense, noting nothing": {"notes": True},
        "dense, neither": {"waiting": True, "notes": True},
    }.items():
        arms[name] = training("dense"), left_out
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(blocks + 1):
        for name in [*arms][:: 1 if block % 2 else -1]:
            each, left_out = arms[name]
            with without(**left_out):
                found = milliseconds(each, count)
            if block:  # the first is to settle
                seconds[name].append(found)
    rows = []
    for name, times in seconds.items():
        ratio = paired_ratio(times, seconds["plain"])
        rows.append({"arm": name, "ms": statistics.median(times), "ratio": ratio})
        print(f"{name:28} {rows[-1]['ms']:7.2f} ms, of plain {ratio['median']:.4f}", flush=True)
    for each, _ in arms.values():
        if each.session is not None:
            each.session.close()
    return rows


def profiled(algorithm: str | None, count: int = 3) -> dict[str, Any]:
    """A step's kernels by name, in ms; for how long the GPU did nothing; and the longest such gaps."""
    each = training(algorithm)
    for _ in range(8):
        each.step()
    found = on_the_device(each.step, count)
    by_name: dict[str, float] = {}
    gaps: list[tuple[float, str, str]] = []
    end, last, worked = found[0][0], "", 0.0
    for start, took, name in found:
        by_name[name] = by_name.get(name, 0.0) + took / count
        if start > end:
            gaps.append((start - end, last, name))
        worked += max(0.0, start + took - max(start, end))
        if start + took > end:
            end, last = start + took, name
    if each.session is not None:
        each.session.close()
    return {
        "algorithm": algorithm or "plain",
        "busy_ms": worked / count,
        "idle_ms": sum(gap for gap, *_ in gaps) / count,
        "kernels": len(found) / count,
        "by_name": by_name,
        "longest_gaps": sorted(gaps, reverse=True)[:6],
    }


def busy(row: Mapping[str, Any]) -> str:
    """In a line."""
    numbers = f"busy {row['busy_ms']:.2f} ms, idle {row['idle_ms']:.2f}, {row['kernels']:.0f} kernels"
    return f"{row['algorithm']}: {numbers}"


def where(algorithms: Sequence[str]) -> list[dict[str, Any]]:
    """What the GPU does in a step beyond what it does with plain DDP."""
    plain = profiled(None)
    rows = [plain]
    print(
        f"plain: busy {plain['busy_ms']:.2f} ms, idle {plain['idle_ms']:.2f}, {plain['kernels']:.0f} kernels"
    )
    for algorithm in algorithms:
        row = profiled(algorithm)
        more = {
            name: row["by_name"].get(name, 0.0) - plain["by_name"].get(name, 0.0)
            for name in {**row["by_name"], **plain["by_name"]}
        }
        ordered = sorted(more.items(), key=lambda each: -each[1])
        row["beyond_plain"] = {name: ms for name, ms in ordered if abs(ms) > 0.02}
        rows.append(row)
        print(busy(row))
        for name, ms in [*row["beyond_plain"].items()][:14]:
            print(f"    {ms:+8.3f} ms {name[:110]}")
        for gap, before, after in row["longest_gaps"][:3]:
            print(f"    idle {gap:.3f} ms between {before[:60]} and {after[:60]}", flush=True)
    for row in rows:
        row.pop("by_name")
    return rows


# ---- all of it ----------------------------------------------------------------------------------------


def dry() -> None:
    """Run the exchanges of all algorithms emulated on the CPU: what would be measured is known to work."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    transport.ALONE_TOO = True
    for algorithm in ALGORITHMS:
        with emulated_device():
            torch.manual_seed(0)
            model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            with tacit.attach(model, optimizer, algorithm) as session:
                for _ in range(12):
                    optimizer.zero_grad()
                    model(torch.randn(16, 64)).square().mean().backward()
                    optimizer.step()
                rounds = session.metrics()["rounds"]
                print(f"{algorithm:28} {rounds:3.0f} rounds emulated: {session.active_path}")
    print(
        f"with a GPU: kernels ({len(KERNELS)} codecs, {len(SIZES)} sizes), "
        f"steps and wire ({len(ALGORITHMS)} algorithms)"
    )
    dist.destroy_process_group()


def gpu() -> dict[str, object]:
    """The GPU and its versions."""
    properties = torch.cuda.get_device_properties(0)
    import triton

    return {
        "gpu": properties.name,
        "driver": subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "triton": triton.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="all parts")
    parser.add_argument("--only", metavar="PART,...", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer blocks")
    parser.add_argument("--dry", action="store_true", help="without a GPU: what would be measured, emulated")
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, help="of the parts steps and wire")
    parser.add_argument("--gbit", type=float, default=10.0, help="the emulated link's rate")
    parser.add_argument("--peers", type=int, default=8, help="how many GPUs the wire stands for")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    options = parser.parse_args()
    if options.dry:
        dry()
        return
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here: write --dry to see what would be measured")
    parts_wanted = options.only.split(",") if options.only else list(PARTS)
    if unknown := set(parts_wanted) - set(PARTS):
        parser.error(f"--only {options.only}: there is no part {', '.join(unknown)}, only {', '.join(PARTS)}")
    torch.cuda.set_device(0)
    store = HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=CUDA)
    transport.ALONE_TOO = True
    result: dict[str, Any] = {"benchmark": "gpu", **hardware(), **gpu()}
    if "kernels" in parts_wanted:
        result["kernels"] = [*kernels(), *predictions(), *thin_products()]
    if "steps" in parts_wanted:
        result["steps"] = steps(options.algorithms, *((4, 4) if options.quick else (10, 10)))
    if "wire" in parts_wanted:
        result["wire"] = wired(options.algorithms, options.gbit, options.peers, 2 if options.quick else 10)
    if "profile" in parts_wanted:
        result["parts"] = parts(*((4, 4) if options.quick else (10, 10)))
        result["profile"] = where([each for each in options.algorithms if "sync_every" not in each])
    dist.destroy_process_group()
    conclude(result, "", options)


if __name__ == "__main__":
    main()
