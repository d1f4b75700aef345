"""What a parameter server carries, and what it does where a worker is slow or dies.

    python benchmarks/server.py            # about 6 minutes
    python benchmarks/server.py --quick    # about 2 minutes: fewer rounds and runs, and no promise is judged
    python benchmarks/server.py --only rate,slow,kills

* `rate`: 4 workers push 100 MB in 4 lots of fp32 and pull their mean, links of 1 Gbit/s, with one server and
  with two. What counts are bytes through the servers' links, both ways added up, against what one link
  carries one way after the other: 800 MB in 6.4 s. Both ways at once it could be twice that.
* `slow`: asynchronous, 4 workers that take 50 ms a step and exchange 1 MB, then one of them 500 ms; how many
  steps a second the other three make.
* `kills`: two workers of one server, one killed at a random moment, and back; every push is counted by its
  sequence number, and by what it has added to the parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paired import hardware, in_testbed, save, tell

RATE = "4x1+{servers}@1gbit"
LINE = 1e9 / 8
LOTS, LOT_BYTES = 4, 25_000_000


# ---- a worker -----------------------------------------------------------------------------------------


def joined(star: Any, numel: int, lots: int, me: tuple[int, int], where: Sequence[tuple[str, int]]) -> Any:
    """A worker's connections; lot i is on server i modulo their number."""
    from tacit.contracts import Place
    from tacit.transports.servers import Servers

    names = [str(i) for i in range(lots)]
    about = {"star": star, "rule": None, "model": [(name, (numel,), "float32") for name in names]}
    homes = {name: i % len(where) for i, name in enumerate(names)}
    return Servers(where, Place(*me), timedelta(seconds=60), homes, about)


def asks(servers: Any, xs: Sequence[Any]) -> None:
    """Push all lots, and wait for all answers."""
    from tacit.compressors import Dense
    from tacit.contracts import Ask, Piece

    piece = Piece(Dense(), xs[0].numel(), xs[0].dtype)
    back = Piece(None, xs[0].numel(), xs[0].dtype)
    posted = [servers.of(str(i)).post(Ask(((x,),), (piece,), (back,)), f"{i}/0") for i, x in enumerate(xs)]
    for each in posted:
        each.done.wait()
        each.answer()


def rank_main(experiment: str, rounds: int, slow: float) -> None:
    import torch
    import torch.distributed as dist

    from tacit.contracts import Piece
    from tacit.topologies import Asynchronous, Star
    from tacit.transports.servers import VARIABLE, addresses

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    me, where = (dist.get_rank(), dist.get_world_size()), addresses(os.environ[VARIABLE])
    if experiment == "rate":
        xs = [torch.ones(LOT_BYTES // 4) for _ in range(LOTS)]
        servers = joined(Star(), LOT_BYTES // 4, LOTS, me, where)
        seconds = []
        for _ in range(rounds + 1):
            dist.barrier()
            start = time.perf_counter()
            asks(servers, xs)
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        found: Any = seconds[1:]
    else:
        x = torch.ones(250_000)
        servers = joined(Star(Asynchronous()), 250_000, 1, me, where)
        servers.of("0").enter(x, "0/0", Piece(None, x.numel(), x.dtype))
        dist.barrier()
        pause, steps, end = 0.05 * (slow if me[0] == 3 else 1.0), 0, time.perf_counter() + rounds
        while time.perf_counter() < end:
            time.sleep(pause)
            asks(servers, [x])
            steps += 1
        all_ = [torch.zeros(1) for _ in range(me[1])]
        dist.all_gather(all_, torch.tensor([steps / rounds]))
        found = [float(each) for each in all_]
    if me[0] == 0:
        tell(found)
    for server in servers.each:
        server.close()
    dist.destroy_process_group()


# ---- in the testbed -----------------------------------------------------------------------------------


def measured(experiment: str, servers: int, rounds: int, slow: float = 1.0) -> list[float]:
    words = [__file__, "--rank", experiment, "--rounds", str(rounds), "--slow", str(slow)]
    found: list[float] = in_testbed(RATE.format(servers=servers), words, servers=True, timeout=500)
    return found


def rate(quick: bool) -> dict[str, object]:
    rounds = 2 if quick else 5
    seconds = {servers: measured("rate", servers, rounds) for servers in (1, 2)}
    serial = 2 * 4 * LOTS * LOT_BYTES / LINE
    one, two = (statistics.median(seconds[servers]) for servers in (1, 2))
    return {"seconds": seconds, "share_of_line": serial / one, "two_over_one": one / two}


def slow(quick: bool) -> dict[str, object]:
    seconds = 5 if quick else 20
    alike, uneven = measured("slow", 1, seconds), measured("slow", 1, seconds, slow=10.0)
    return {"alike": alike, "one_slow": uneven, "others": sum(uneven[:3]) / sum(alike[:3])}


# ---- kills --------------------------------------------------------------------------------------------


def forked(call: Callable[[], None]) -> int:
    process = os.fork()
    if process == 0:
        try:
            call()
        finally:
            os._exit(0)
    return process


def kill_once(port: int, seed: int, folder: Path) -> str:
    """One run; what is wrong, if anything is."""
    rng = random.Random(seed)
    host = forked(lambda: _host(port))
    ends = {0: folder / "0", 1: folder / "1"}
    for end in ends.values():
        end.unlink(missing_ok=True)
    steady = forked(lambda: _counted(port, 0, 150, ends[0]))
    doomed = forked(lambda: _counted(port, 1, 100_000, ends[1]))
    time.sleep(rng.uniform(0.02, 0.6))
    os.kill(doomed, signal.SIGKILL)
    os.waitpid(doomed, 0)
    again = forked(lambda: _counted(port, 1, 20, ends[1]))
    for process in (steady, again, host):
        os.waitpid(process, 0)
    told = [json.loads(end.read_text()) if end.exists() else None for end in ends.values()]
    if None in told:
        return f"a worker did not end: {told}"
    for worker, each in enumerate(told):
        applied = each["x"][worker] * 2
        if round(applied) != each["clock"]:
            return f"worker {worker} has pushed {each['clock']} times, and {applied} were added"
    if told[0]["x"] != told[1]["x"]:
        return f"the workers have ended apart: {told}"
    return ""


def _host(port: int) -> None:
    from tacit.server.host import Host

    Host(2, port, timeout=20).run()


def _counted(port: int, worker: int, steps: int, end: Path) -> None:
    """Add one to the worker's own entry, so many times."""
    import torch

    from tacit.contracts import Ask, Piece
    from tacit.topologies import Asynchronous, Star

    servers = joined(Star(Asynchronous()), 64, 1, (worker, 2), [("127.0.0.1", port)])
    mine = torch.zeros(64)
    back = Piece(None, 64, torch.float32)
    servers.of("0").enter(torch.zeros(64), "0/0", back)
    mine[worker] = 1.0
    for _ in range(steps):
        asks(servers, [mine])
    meet = servers.of("0").post(Ask((), (), (back,), do="meet"), "0/0")
    meet.done.wait()
    told = {"clock": servers.of("0").clock("0/0"), "x": meet.answer()[0][0][:2].tolist()}
    servers.of("0").close()
    end.write_text(json.dumps(told))


def kills(quick: bool) -> dict[str, object]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import tacit.server.host
    import tacit.transports.servers  # noqa: F401

    runs = 20 if quick else 200
    with TemporaryDirectory() as folder:
        wrong = [kill_once(21000 + run, run, Path(folder)) for run in range(runs)]
    return {"runs": runs, "wrong": [each for each in wrong if each]}


# ---- all of it ----------------------------------------------------------------------------------------

EXPERIMENTS: Mapping[str, Callable[[bool], dict[str, object]]] = {"rate": rate, "slow": slow, "kills": kills}


def verdicts(found: Mapping[str, Any]) -> list[str]:
    lines = []
    if "rate" in found:
        share, ratio = found["rate"]["share_of_line"], found["rate"]["two_over_one"]
        lines.append(f"push + pull of 100 MB, 4 workers, 1 server: {share:.3f} of the line (promised 0.80)")
        lines.append(f"2 servers: {ratio:.2f} times one (promised 1.7)")
    if "slow" in found:
        lines.append(
            f"one worker ten times slower: the others at {found['slow']['others']:.3f} (promised 0.95)"
        )
    if "kills" in found:
        wrong = found["kills"]["wrong"]
        lines.append(f"{found['kills']['runs']} runs with a worker killed: {len(wrong)} wrong (promised 0)")
        lines += wrong[:3]
    return lines


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and runs")
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help="such as rate,kills")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-server.json")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--slow", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank, options.rounds, options.slow)
        return
    found = {name: EXPERIMENTS[name](options.quick) for name in options.only.split(",")}
    result = {"benchmark": "server", "quick": options.quick, "hardware": hardware(), **found}
    print("\n".join(verdicts(found)), file=sys.stderr if options.json else sys.stdout)
    if options.save:
        print(f"saved {save('server', result)}", file=sys.stderr)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
