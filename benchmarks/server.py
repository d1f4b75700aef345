"""What a parameter server carries, and what it does where a worker is slow or dies.

    python benchmarks/server.py            # about 6 minutes
    python benchmarks/server.py --quick    # about 2 minutes: fewer rounds and runs, and no promise is judged
    python benchmarks/server.py --only rate,slow,kills

* `rate`: 4 workers push 100 MB of fp32, 50 tensors in the buckets that `attach` would cut, and pull their
mean;
  links of 1 Gbit/s, with one server and with two, in turns in one run. What counts are bytes through the
  servers' links, both ways added up, against what one link carries one way after the other: 800 MB in 6.4 s.
  Both ways at once it could be twice that.
* `slow`: asynchronous, 4 workers that take 50 ms a step and exchange 1 MB, then one of them 500 ms; how many
  steps a second the other three make.
* `kills`: two workers of one server, one killed 200 times at a random moment, and back each time. The next
  life finds how many pushes the server has taken of it, and what they have added: no push that was answered
  may be missing, none that was not sent be there, and none be added twice, or in part.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launched import in_testbed, tell
from paired import Arm, conclude, hardware, interleave, paired_ratio

RATE, SLOW = "4x1+3@1gbit", "4x1+1@1gbit"
LINE = 1e9 / 8
TENSORS, TENSOR_BYTES = 50, 2_000_000
DDP_BUCKET = 25 << 20
TIMEOUT = timedelta(seconds=40)

Addresses = Sequence[tuple[str, int]]


# ---- a worker -----------------------------------------------------------------------------------------


Lots = Mapping[str, int]
"""Of each bucket, by its name, how many entries it has."""


def joined(star: Any, homes: Mapping[str, int], buckets: Lots, me: tuple[int, int], where: Addresses) -> Any:
    """A worker's connections."""
    from tacit.contracts import AxisRank
    from tacit.stores.client.transport import ServerGroup

    about = told_of(star, buckets)
    return ServerGroup(where, AxisRank(*me), TIMEOUT, homes, about, the_secret(), star.averages)


def told_of(star: Any, buckets: Lots) -> Any:
    """What servers are told: each bucket counts as a parameter."""
    from tacit.stores.messages import RunSpec

    return RunSpec(star, (), tuple((name, (n,), "float32", None) for name, n in buckets.items()))


def the_secret() -> Any:
    """The testbed's; or one of our own, where there is none."""
    from tacit.stores.secret import Secret, find_secret

    return find_secret() or Secret(b"of a benchmark on one machine")


def shared_out(servers: int, workers: int) -> tuple[dict[str, int], dict[str, int]]:
    """Homes and lots of 100 MB, as `attach` would have them for `ps`."""
    import torch

    from tacit.algorithms.ps import ps
    from tacit.stores.client import placement

    tensors = {f"{i:02}": torch.empty(TENSOR_BYTES // 4, device="meta") for i in range(TENSORS)}
    homes = placement.homes(tensors, servers)
    cap = placement.message_cap(ps(), tensors, servers, workers, DDP_BUCKET)
    buckets = placement.cut_by_server([*tensors], tensors, homes, cap)
    return homes, {bucket[0]: sum(tensors[name].numel() for name in bucket) for bucket in buckets}


def pieces(x: Any) -> tuple[Any, Any]:
    """How a push of `x`, and its answer, are read."""
    from tacit.compressors import Dense
    from tacit.contracts import PayloadSpec

    return PayloadSpec(Dense(), x.numel(), x.dtype), PayloadSpec(None, x.numel(), x.dtype)


def asks(servers: Any, xs: Mapping[str, Any]) -> None:
    """Push all buckets, and wait for all answers."""
    from tacit.contracts import PushPull

    posted = []
    for name, x in xs.items():
        piece, back = pieces(x)
        posted.append(servers.server_of(name).post(PushPull(((x,),), (piece,), (back,)), f"{name}/0"))
    for each in posted:
        each.done.wait()
        each.answer()


def rank_main(experiment: str, rounds: int, slow: float) -> None:
    import torch.distributed as dist

    from arms import ranks
    from tacit.environment import SERVERS
    from tacit.stores.client.placement import addresses

    with ranks() as rank:
        me, where = (rank, dist.get_world_size()), addresses(os.environ[SERVERS])
        found: Any
        found, connections = (
            _rate(me, where, rounds) if experiment == "rate" else _slow(me, where, rounds, slow)
        )
        if rank == 0:
            tell(found)
        dist.barrier()  # nobody leaves a server that others still talk to
        for server in connections:
            server.close()


def _rate(me: tuple[int, int], where: Addresses, blocks: int) -> tuple[dict[str, list[float]], list[Any]]:
    """Seconds of each push and pull, of one server (the last) and of two; and the connections."""
    import torch
    import torch.distributed as dist

    from tacit.contracts import AxisRank
    from tacit.stores.client.server_connection import ServerClient
    from tacit.topologies import Star

    whole = torch.ones(TENSORS * TENSOR_BYTES // 4)
    homes, buckets = shared_out(2, me[1])
    both = joined(Star(), homes, buckets, me, where[:2])
    _, fewer = shared_out(1, me[1])
    alone = Alone(ServerClient(2, where[2], AxisRank(*me), TIMEOUT, told_of(Star(), fewer), the_secret()))

    def arm(servers: Any, buckets: Lots) -> Arm:
        xs = dict(zip(buckets, whole.split([*buckets.values()]), strict=True))

        def step() -> None:
            asks(servers, xs)
            dist.barrier()

        return Arm(step, warmup=1)

    arms = {"1": arm(alone, fewer), "2": arm(both, buckets)}
    return interleave(arms, blocks, dist.barrier), [*both.each, alone.server]


@dataclass(frozen=True)
class Alone:
    """A server that has all buckets."""

    server: Any

    def server_of(self, name: str) -> Any:
        """It."""
        return self.server


def _slow(me: tuple[int, int], where: Addresses, seconds: int, slow: float) -> tuple[list[float], list[Any]]:
    """How many steps a second each worker makes; and the connections."""
    import torch
    import torch.distributed as dist

    from tacit.contracts import PayloadSpec
    from tacit.topologies import Asynchronous, Star

    x = torch.ones(250_000)
    servers = joined(Star(Asynchronous()), {"0": 0}, {"0": x.numel()}, me, where)
    servers.server_of("0").enter(x, "0/0", PayloadSpec(None, x.numel(), x.dtype))
    dist.barrier()
    pause, steps, end = 0.05 * (slow if me[0] == 3 else 1.0), 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        time.sleep(pause)
        asks(servers, {"0": x})
        steps += 1
    all_ = [torch.zeros(1) for _ in range(me[1])]
    dist.all_gather(all_, torch.tensor([steps / seconds]))
    return [float(each) for each in all_], servers.each


# ---- in the testbed -----------------------------------------------------------------------------------


def measured(experiment: str, cluster: str, rounds: int, slow: float = 1.0) -> Any:
    from tacit_lab.testbed import Serving

    words = [__file__, "--rank", experiment, "--rounds", str(rounds), "--slow", str(slow)]
    return in_testbed(cluster, words, servers=Serving(), timeout=500)


def rate(quick: bool) -> dict[str, object]:
    seconds = measured("rate", RATE, 3 if quick else 12)
    serial = 2 * 4 * TENSORS * TENSOR_BYTES / LINE
    return {
        "seconds": seconds,
        "share_of_line": serial / statistics.median(seconds["1"]),
        "two_over_one": paired_ratio(seconds["1"], seconds["2"]),
    }


def slow(quick: bool) -> dict[str, object]:
    """Alike, uneven, alike, and so on, as other work on the machine may come and go."""
    seconds, turns = (5, 1) if quick else (10, 3)
    alike, uneven = [], []
    for _ in range(turns):
        alike.append(measured("slow", SLOW, seconds))
        uneven.append(measured("slow", SLOW, seconds, slow=10.0))
    others = [sum(b[:3]) / sum(a[:3]) for a, b in zip(alike, uneven, strict=True)]
    return {"alike": alike, "one_slow": uneven, "others": statistics.median(others), "each": others}


# ---- kills --------------------------------------------------------------------------------------------

ENTRIES = 1 << 16
LAST_PUSHES = 20
PATIENCE = 60


class Counted:
    """What a worker has pushed and been answered, over all of its lives; it survives them."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, 32)).cast("q")

    def push(self, call: Callable[[], None]) -> None:
        self._words[0] += 1
        self._words[2] += 1
        call()
        self._words[1] += 1

    @property
    def begun(self) -> int:
        """How many pushes were begun, in all."""
        return int(self._words[2])

    def check(self, clock: int, mine: Any) -> str:
        """What is wrong as a life begins, if anything is; then it is counted anew from there.

        `clock`: how many pushes the server has taken; `mine`: the entries to which each has added a half.
        """
        posted, answered = self._words[0], self._words[1]
        self._words[0] = self._words[1] = clock
        added, least = 2 * float(mine.max()), 2 * float(mine.min())
        if added != clock or least != clock:
            return f"{clock} pushes were taken, and between {least:g} and {added:g} were added"
        if not answered <= clock <= posted:
            return f"{posted} pushes were sent and {answered} answered, and {clock} are counted"
        return ""


def forked(call: Callable[[], None]) -> int:
    process = os.fork()
    if process == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return process


def ended(process: int) -> bool:
    """Wait for its end; False where it did not end well, or in time."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return False


def kill_often(seed: int, kills: int, folder: Path) -> dict[str, Any]:
    """A server, a worker that goes on, and one that is killed so often; what was counted."""
    rng, counted = random.Random(seed), (Counted(), Counted())
    told, done, port = folder / f"{seed}.told", folder / f"{seed}.done", folder / f"{seed}.port"
    host = forked(lambda: _host(port))
    while not port.exists():
        time.sleep(0.01)
    steady = forked(lambda: _life(port, 0, counted[0], told, done.exists))
    for _ in range(kills):
        doomed = forked(lambda: _life(port, 1, counted[1], told, lambda: False))
        _random_moment(rng, counted[1])
        os.kill(doomed, signal.SIGKILL)
        os.waitpid(doomed, 0)
    last = forked(lambda: _life(port, 1, counted[1], told, done.exists, LAST_PUSHES))
    well = [ended(last)]
    well += [ended(steady), ended(host)]
    lives = [json.loads(line) for line in told.read_text().splitlines()]
    wrong = [each["wrong"] for each in lives if each["wrong"]]
    if not all(well):
        wrong.append(f"seed {seed}: of the last life, the other worker and the server, well ended {well}")
    if len({each["whole"] for each in lives if "whole" in each}) != 1:
        wrong.append(f"seed {seed}: the workers have ended apart")
    clocks = [each["clock"] for each in lives if each["worker"] == 1]
    pushed = sum(a < b for a, b in pairwise(clocks[:-1]))
    return {"pushes": clocks[-1] if clocks else 0, "killed_while_pushing": pushed, "wrong": wrong}


def _random_moment(rng: random.Random, counted: Counted) -> None:
    """One time in four while it may still be joining, else when it has begun to push."""
    before, deadline = counted.begun, time.monotonic() + PATIENCE
    if rng.random() < 0.75:
        while counted.begun == before and time.monotonic() < deadline:
            time.sleep(0.001)
    time.sleep(rng.uniform(0.0, 0.2))


def _host(port: Path) -> None:
    from tacit.stores.server.process import ServerProcess

    host = ServerProcess(2, 0, secret=the_secret(), timeout=20)
    unfinished = port.with_suffix(".part")
    unfinished.write_text(str(host.port))
    unfinished.replace(port)
    host.run()


def _life(
    port: Path, worker: int, counted: Counted, told: Path, done: Callable[[], bool], pushes: int = 0
) -> None:
    """Add a half to the worker's own entries with each push, so many times, or until it is done."""
    import torch

    from tacit.contracts import PayloadSpec, PushPull
    from tacit.topologies import Asynchronous, Star

    torch.set_num_threads(1)
    where = [("127.0.0.1", int(port.read_text()))]
    servers = joined(Star(Asynchronous()), {"0": 0}, {"0": ENTRIES}, (worker, 2), where)
    server = servers.server_of("0")
    mine = slice(worker * ENTRIES // 2, (worker + 1) * ENTRIES // 2)
    back = PayloadSpec(None, ENTRIES, torch.float32)
    x = server.enter(torch.zeros(ENTRIES), "0/0", back)
    began = {"worker": worker, "clock": server.clock("0/0")}
    _tell(told, began | {"wrong": counted.check(server.clock("0/0"), x[mine])})
    push = torch.zeros(ENTRIES)
    push[mine] = 1.0
    for _ in range(pushes) if pushes else iter(lambda: not done(), False):
        counted.push(lambda: asks(servers, {"0": push}))
    if pushes:
        told.with_suffix(".done").touch()
    meet = server.post(PushPull((), (), (back,), do="meet"), "0/0")
    meet.done.wait()
    whole = meet.answer()[0][0].clone()
    ends = {"worker": worker, "clock": server.clock("0/0"), "whole": str(whole[:: ENTRIES // 2].tolist())}
    _tell(told, ends | {"wrong": counted.check(server.clock("0/0"), whole[mine])})
    server.close()


def _tell(told: Path, what: Mapping[str, object]) -> None:
    with told.open("a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


def kills(quick: bool) -> dict[str, object]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    from tacit.transports.meter import like

    for piece in pieces(torch.empty(ENTRIES)):
        like(piece)  # torch loads much for its first meta tensor, in time that lives would not have
    launches, each = (2, 10) if quick else (10, 20)
    with TemporaryDirectory() as folder:
        found = [kill_often(seed, each, Path(folder)) for seed in range(launches)]
    return {
        "runs": launches * each,
        "pushes": sum(launch["pushes"] for launch in found),
        "killed_while_pushing": sum(launch["killed_while_pushing"] for launch in found),
        "wrong": [line for launch in found for line in launch["wrong"]],
    }


# ---- all of it ----------------------------------------------------------------------------------------

EXPERIMENTS: Mapping[str, Callable[[bool], dict[str, object]]] = {"rate": rate, "slow": slow, "kills": kills}


def verdicts(found: Mapping[str, Any]) -> list[str]:
    lines = []
    if "rate" in found:
        share, ratio = found["rate"]["share_of_line"], found["rate"]["two_over_one"]
        lines.append(f"push + pull of 100 MB, 4 workers, 1 server: {share:.3f} of the line (promised 0.80)")
        quartiles = f"{ratio['q1']:.2f} to {ratio['q3']:.2f}"
        lines.append(f"2 servers: {ratio['median']:.2f} times one, quartiles {quartiles} (promised 1.7)")
    if "slow" in found:
        lines.append(
            f"one worker ten times slower: the others at {found['slow']['others']:.3f} (promised 0.95)"
        )
    if "kills" in found:
        wrong = found["kills"]["wrong"]
        while_ = f"{found['kills']['killed_while_pushing']} of them after a push"
        lines.append(
            f"{found['kills']['runs']} times a worker was killed, {while_}: {len(wrong)} wrong (promised 0)"
        )
        lines += wrong[:3]
    return lines


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and runs")
    parser.add_argument("--only", help="such as rate,kills")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-server.json")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--slow", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank, options.rounds, options.slow)
        return
    found = {
        name: EXPERIMENTS[name](options.quick)
        for name in (options.only.split(",") if options.only else EXPERIMENTS)
    }
    result = {"benchmark": "server", "quick": options.quick, "hardware": hardware(), **found}
    conclude(result, "\n".join(verdicts(found)), options)


if __name__ == "__main__":
    main()
