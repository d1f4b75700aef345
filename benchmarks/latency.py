"""What latency changes: how long a collective takes, which algorithm is fastest, and which is hidden.

    python benchmarks/latency.py            # about 20 minutes
    python benchmarks/latency.py --quick    # about 8 minutes: one cluster
    python benchmarks/latency.py --table benchmarks/results/DATE-latency.json

* `collectives`: ms of each, by the bytes of a payload; at once after the one before, after a pause of a
  second, and after such a pause where TCP goes on as fast as before it. `ring` is Gloo's all-gather.
* `silence`: ms of two of them, by the time since the one before; the row `silence` has that, in ms.
* `steps`: ms a step of `digits` (1 million parameters) by the algorithm, one after the other.
* `hidden`: the same on one cluster where a step without communication takes about so many ms, as each
  rank rests for most of them, as if a GPU computed; the share of steps that send nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from launched import heard, last_words, tell
from markdown_tables import markdown
from paired import add_table, conclude, hardware

FAR = "4x1@100mbit,30ms"
CLUSTERS = ("4x1@100mbit,1ms", "4x1@100mbit,10ms", FAR, "4x1@100mbit,30ms,0.1%loss", "4x1@100mbit,100ms")
PARTS = {"collectives": (FAR,), "silence": (FAR,), "steps": CLUSTERS, "hidden": (FAR,)}
PERIOD, LATE = 32, "lowbit:sync_every=2,late=1"
ALGORITHMS = (
    *("ddp", "dense:topology=halving-doubling", "dense:topology=direct"),
    *("powersgd", "powersgd:topology=direct"),
    *("topk", "lowbit", "lowbit:topology=all-gather", LATE, "diloco", "streaming-diloco"),
)
STREAMING = "streaming-diloco:fragment_sync_delay=24"
HIDDEN = {
    (22, 0): (LATE, "streaming-diloco", STREAMING),
    (22, 1): ("streaming-diloco", STREAMING),
    (50, 0): (LATE, "streaming-diloco", STREAMING),
    (100, 0): (LATE, "lowbit:late=1", "streaming-diloco"),
    (200, 0): ("lowbit:late=1", "lowbit"),
}
"""(ms of a step, whether TCP starts fast after a pause) -> algorithms."""
SIZES = (64, 16 << 10, 64 << 10, 256 << 10)
_PAUSES = (0.0, 0.3, 0.6, 1.2)
_PAUSE, _COMPUTING, _WARM, _ALONE = 1.0, 0.012, 2, "compute-only"


def _steady() -> None:
    """Have TCP send as fast after a pause as before it, on the node of the calling process."""
    Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")


def _collectives(quick: bool, silent: bool) -> dict[str, list[float]]:
    """ms, by collective and pause; one number for each size."""
    import torch
    import torch.distributed as dist

    from arms import ranks
    from tacit.contracts import AllGather, AllReduce, AllToAll, Collective
    from tacit.transports.torch_distributed import TorchTransport

    def ring(x: torch.Tensor) -> None:
        dist.all_gather_into_tensor(torch.empty(dist.get_world_size() * len(x), dtype=x.dtype), x)

    def one(make: Callable[[torch.Tensor], Collective]) -> Callable[[torch.Tensor], None]:
        def carry_out(x: torch.Tensor) -> None:
            done = threading.Event()
            posted = transport.post(make(x), 0, str(len(x)))
            posted.on_done(done.set)
            done.wait()
            posted.answer()

        return carry_out

    found: dict[str, list[float]] = {}
    with ranks():
        assert dist.group.WORLD is not None
        transport = TorchTransport(dist.group.WORLD, timedelta(minutes=2))
        transport.open({"world": 1})
        kinds = {
            "all-reduce": one(lambda x: AllReduce((x.view(torch.float32),), "world")),
            "all-gather": one(lambda x: AllGather((x,), "world")),
            "all-to-all": one(lambda x: AllToAll(((x,),) * dist.get_world_size(), "world")),
            "ring": ring,
        }
        of_two = [(kind, pause) for kind in ("all-gather", "all-to-all") for pause in _PAUSES]
        for kind, pause in of_two if silent else ():
            times = [_medians(kinds[kind], size, pause, 3) for size in SIZES]
            found[f"{kind}, {pause:g} s"] = [took for took, _ in times]
            found[f"silence, {kind}, {pause:g} s"] = [silence for _, silence in times]
        every = () if silent else (("", 0.0), (", pause", _PAUSE), (", pause, steady", _PAUSE))
        for name, pause in every:
            if name.endswith("steady"):
                _steady()
            for kind, do in kinds.items():
                count = 3 if quick or pause else 5
                found[kind + name] = [_medians(do, size, pause, count)[0] for size in SIZES]
        transport.close()
    return found


def _medians(do: Callable[[Any], None], size: int, pause: float, times: int) -> tuple[float, float]:
    """The ms of the rank that took longest, and since the one before; the first ones do not count."""
    import torch
    import torch.distributed as dist

    took, silences, x = [], [], torch.zeros(size, dtype=torch.uint8)
    ended = time.perf_counter()
    for _ in range(_WARM + times):
        dist.barrier()
        time.sleep(pause)
        dist.barrier()
        start = time.perf_counter()
        silences.append(1e3 * (start - ended))
        do(x)
        ended = time.perf_counter()
        longest = torch.tensor([1e3 * (ended - start)])
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        took.append(float(longest))
    return statistics.median(took[_WARM:]), statistics.median(silences[_WARM:])


def _steps(algorithms: Sequence[str], length: float = 0.0) -> dict[str, float]:
    """ms a step of each arm; `length`: of a step without communication, in seconds."""
    from arms import Trainer, ranks

    found: dict[str, list[float]] = {}
    with ranks(600):
        for arm in (_ALONE, *(each for name in algorithms for each in (name, _ALONE))):
            trainer = Trainer(arm, work=_work(max(0.0, length - _COMPUTING)))
            _timed(trainer, max(4, _steps_of(arm) // 2))
            found.setdefault(arm, []).append(1e3 * _timed(trainer, _steps_of(arm)))
            trainer.close()
    return {arm: statistics.mean(each) for arm, each in found.items()}


def _timed(trainer: Any, steps: int) -> float:
    """Seconds of a step of the rank that takes longest, with as many rounds begun as ended."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    longest = torch.tensor([(time.perf_counter() - start) / steps])
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def _steps_of(arm: str) -> int:
    """How many steps are timed: whole periods, after half of them."""
    return 2 * PERIOD if "diloco" in arm else 32 if "late" in arm or arm == _ALONE else 6


def _work(rest: float) -> Any:
    from arms import Work
    from tacit_lab import recipes

    recipe = recipes.get("digits")
    batch = next(iter(recipe.train_batches(0, int(os.environ["RANK"]), 4, seed=0)))

    def rested() -> Any:
        time.sleep(rest)
        return batch

    return Work(recipe.model(0), recipe.optimizer, rested, recipe.loss)


def rank_main(part: str, quick: bool) -> None:
    """Measure one part on one cluster; the first rank tells."""
    if part in ("collectives", "silence"):
        found: Mapping[str, Any] = _collectives(quick, part == "silence")
    elif part == "steps":
        found = _steps(ALGORITHMS)
    else:
        ms, steady = map(int, part.split())
        if steady:
            _steady()
        found = _steps(HIDDEN[ms, steady], ms / 1e3)
    if os.environ["RANK"] == "0":
        tell(found)


def row(part: str, cluster: str, quick: bool) -> dict[str, Any]:
    """One measurement, with the share of a core that the relay of the links took at most."""
    lines: list[str] = []
    words = [__file__, "--rank", part, *(["--quick"] if quick else [])]
    result, told = heard(cluster, words, lambda node, line: lines.append(f"node {node}: {line}"))
    if not result.ok or not told:
        raise SystemExit(f"{part} on {cluster}: {last_words(result, lines)}\n" + "\n".join(lines[-5:]))
    cores = None if result.relayed is None else result.relayed.cores
    print(part, cluster, told[0], cores, file=sys.stderr, flush=True)
    return {"part": part, "cluster": cluster, "found": told[0], "relay_cores": cores}


def table(result: Mapping[str, Any]) -> str:
    """A saved result as Markdown."""
    parts = []
    for part, rows in result["rows"].items():
        if part in ("collectives", "silence"):
            head = ["ms", *(f"{size:,} bytes" for size in SIZES)]
            lines = [[name, *(f"{ms:.0f}" for ms in each)] for name, each in rows[0]["found"].items()]
        elif part == "steps":
            head = ["ms a step", *(row["cluster"] for row in rows)]
            lines = [[arm, *(f"{row['found'][arm]:.0f}" for row in rows)] for arm in rows[0]["found"]]
        else:
            head = ["ms of a step alone, steady", "algorithm", "ms a step", "of computing"]
            lines = [
                [row["part"], arm, f"{ms:.0f}", f"{row['found'][_ALONE] / ms:.2f}"]
                for row in rows
                for arm, ms in row["found"].items()
            ]
        cores = [row["relay_cores"] for row in rows if row["relay_cores"] is not None]
        relay = f"\n\nThe relay of the links took {max(cores):.2f} of a core at most." if cores else ""
        parts.append(markdown(head, lines) + relay)
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one cluster")
    parser.add_argument("--only", metavar="PART", choices=[*PARTS], help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--cluster", help="in place of the others")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-latency.json")
    add_table(parser)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.table is not None:
        print(table(options.table))
        return
    if options.rank:
        rank_main(options.rank, options.quick)
        return
    rows: dict[str, list[dict[str, Any]]] = {}
    for part, clusters in PARTS.items():
        if options.only in (None, part):
            asked = [f"{ms} {steady}" for ms, steady in HIDDEN] if part == "hidden" else [part]
            on = (options.cluster,) if options.cluster else (FAR,) if options.quick else clusters
            rows[part] = [row(each, cluster, options.quick) for cluster in on for each in asked]
    result = {"benchmark": "latency", "quick": options.quick, "hardware": hardware(), "rows": rows}
    conclude(result, table(result), options)


if __name__ == "__main__":
    main()
