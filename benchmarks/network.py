"""What a network gives: the emulated links as they are, and what several connections bring over them.

    python benchmarks/network.py            # about 25 minutes
    python benchmarks/network.py --quick    # about 8 minutes: fewer connections, latencies and seconds
    python benchmarks/network.py --table benchmarks/results/DATE-network.json

* `links`: one-way delay by UDP, the rate of four TCP connections, and what the relay takes, if there is one.
* `tcp`: the rate of 1 to 8 connections by latency, loss and congestion control, once they have started.
* `gloo`: all-reduces of 64 MB in pieces of 4 MB, with the interface named 1 to 8 times: bit/s.
* `buffers`: one connection and four, as the kernel has its buffers, and with up to 64 MB.
* `ddp`: steps of plain DDP on 38 MB of gradients, by the buckets' size and the interface's namings; then with
  such buffers, and then without TCP's slow start after a pause.
* `attached`: steps of algorithms that average all numbers, on the same gradients, by
  `TACIT_CONNECTIONS`; there and back through the arms.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launched import heard, last_words, tell
from markdown_tables import markdown
from paired import add_table, conclude, hardware
from tacit_lab.testbed.network.nodes import INTERFACE, address

LINKS = ("2x1@100mbit,1ms", "2x1@100mbit,30ms", "2x1@1gbit,10ms", "2x1@1gbit,10ms,0.01%loss")
TCP = (
    *("2x1@1gbit", "2x1@1gbit,30ms", "2x1@1gbit,100ms"),
    *("2x1@100mbit,30ms,0.1%loss", "2x1@100mbit,30ms,1%loss", "2x1@100mbit,100ms,0.1%loss"),
)
GLOO = ("2x1@1gbit", "2x1@1gbit,30ms", "2x1@1gbit,100ms")
DDP = ("2x1@1gbit,30ms",)
ATTACHED = ("2x1@1gbit,30ms", "2x1@1gbit")
BUFFERS = ("2x1@1gbit,30ms", "2x1@1gbit,100ms")
QUICK = {LINKS: LINKS[1:3], TCP: (TCP[1], TCP[3]), GLOO: GLOO[1:2], BUFFERS: BUFFERS[:1]}
PARTS = {"links": LINKS, "tcp": TCP, "gloo": GLOO, "buffers": BUFFERS, "ddp": DDP, "attached": ATTACHED}
ALGORITHMS = ("dense", "localsgd:sync_every=1")
CONTROLS = ("reno", "cubic", "bbr")
CONNECTIONS = (1, 2, 4, 8)
_PORT, _PINGS = 6000, 100
_PIECES, _PIECE = 16, 4 << 20
_GLOO_ROUNDS, _STEPS = 6, 12
_LEFT_OUT = "left out: congestion control"
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: what still waits is not sent


def _connections(quick: bool) -> tuple[int, ...]:
    return (1, 4) if quick else CONNECTIONS


def _joined(rank: int) -> Iterator[socket.socket]:
    """The connections that the second rank accepts and the first one makes, without end."""
    if rank:
        with socket.create_server((address(1), _PORT), backlog=64) as server:
            while True:
                yield server.accept()[0]
    while True:
        try:
            yield socket.create_connection((address(1), _PORT))
        except ConnectionRefusedError:  # it does not listen yet
            time.sleep(0.1)


def _send(connection: socket.socket, control: str) -> None:
    data = bytes(1 << 18)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    try:
        while True:
            connection.sendall(data)
    except OSError:
        return


def left_out(controls: Sequence[str]) -> dict[str, str]:
    """The congestion controls that this process may not use: why not, and what to do."""
    found = {}
    with socket.socket() as trial:
        for control in controls:
            try:
                trial.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
            except PermissionError:
                found[control] = (
                    f"{_LEFT_OUT} {control!r}, which is not permitted here; as root on the host: sysctl -w "
                    f"net.ipv4.tcp_allowed_congestion_control='reno cubic {control}'"
                )
            except OSError as error:
                found[control] = (
                    f"{_LEFT_OUT} {control!r}, which this kernel does not have ({error.strerror}); as root "
                    f"on the host: modprobe tcp_{control}"
                )
    return found


def _receive(connection: socket.socket, counts: list[int]) -> None:
    buffer = bytearray(1 << 20)
    try:
        while count := connection.recv_into(buffer):
            counts.append(count)
    except OSError:
        return


def _carried(rank: int, found: Iterator[socket.socket], count: int, control: str, seconds: float) -> float:
    """The bit/s of payload that so many connections carry in the last two thirds of some seconds."""
    meeting = next(found)
    opened, counts = [next(found) for _ in range(count)], list[int]()
    work = [(_receive, counts) if rank else (_send, control)] * count
    for each, (do, what) in zip(opened, work, strict=True):
        threading.Thread(target=do, args=(each, what), daemon=True).start()
    rate = 0.0
    if rank:
        time.sleep(seconds / 3)
        start, before = time.monotonic(), sum(counts)
        time.sleep(2 * seconds / 3)
        rate = 8 * (sum(counts) - before) / (time.monotonic() - start)
        meeting.sendall(struct.pack("d", rate))
    else:
        rate = struct.unpack("d", meeting.recv(8, socket.MSG_WAITALL))[0]
    for each in opened:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        with suppress(OSError):  # the other end was first
            each.shutdown(socket.SHUT_RDWR)
        each.close()
    meeting.close()
    return rate


def _echo(datagrams: socket.socket) -> None:
    while True:
        data, peer = datagrams.recvfrom(64)
        datagrams.sendto(data, peer)


def _delay(rank: int, found: Iterator[socket.socket]) -> float:
    """The median of seconds one way, by UDP; at the first rank."""
    datagrams, trips = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), list[float]()
    if rank:
        datagrams.bind((address(1), _PORT))
        threading.Thread(target=_echo, args=(datagrams,), daemon=True).start()
        next(found)
        return 0.0
    next(found)
    datagrams.settimeout(1)
    while len(trips) < _PINGS:
        with suppress(TimeoutError):  # it was lost
            start = time.perf_counter()
            datagrams.sendto(b"ping", (address(1), _PORT))
            datagrams.recv(64)
            trips.append(time.perf_counter() - start)
    return statistics.median(trips) / 2


def _larger_buffers() -> None:
    """Have TCP's buffers grow to 64 MB on the node of the calling process."""
    for name in ("tcp_rmem", "tcp_wmem"):
        setting = Path("/proc/sys/net/ipv4", name)
        least, first, _ = setting.read_text().split()
        setting.write_text(f"{least} {first} {64 << 20}")


def _steady() -> None:
    """Have TCP send as fast after a pause as before it."""
    Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")


def _group(connections: int) -> Any:
    """A process group of Gloo that has so many connections between two ranks."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = ",".join([INTERFACE] * connections)
    return dist.new_group(backend="gloo")


def _model() -> Any:
    from torch import nn

    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(9)))


def _ddp(quick: bool) -> dict[str, float]:
    """Seconds of a step, by MB of a bucket and how often the interface is named."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    found = {}
    for name, setting in (("", None), (", buffers", _larger_buffers), (", no slow start", _steady)):
        if setting is not None:
            setting()
        for bucket, count in ((25, 1), (25, 4), (4, 1), (4, 4)):
            model = _model()
            wrapped = DistributedDataParallel(model, process_group=_group(count), bucket_cap_mb=bucket)
            took = []
            for _ in range(_STEPS // (2 if quick else 1)):
                start = time.perf_counter()
                loss = wrapped(torch.ones(8, 1024)).sum()
                loss.backward()
                took.append(time.perf_counter() - start)
            found[f"{bucket} MB x {count}{name}"] = statistics.median(took[2:])
    dist.destroy_process_group()
    return found


def _attached(quick: bool) -> dict[str, float]:
    """Seconds of a step, by algorithm and `TACIT_CONNECTIONS`; the better of two medians."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import tacit
    from tacit.environment import CONNECTIONS as VARIABLE

    dist.init_process_group("gloo")
    arms = [(each, count) for each in ALGORITHMS for count in _connections(quick)]
    found: dict[str, float] = {}
    for algorithm, count in (*arms, *reversed(arms)):
        os.environ[VARIABLE] = str(count)
        model = DistributedDataParallel(_model())
        optimizer, took = torch.optim.SGD(model.parameters(), lr=1e-6), []
        with tacit.attach(model, optimizer, algorithm):
            for _ in range(_STEPS // (2 if quick else 1)):
                dist.barrier()
                start = time.perf_counter()
                model(torch.ones(8, 1024)).sum().backward()
                optimizer.step()
                took.append(time.perf_counter() - start)
                optimizer.zero_grad()
        name = f"{algorithm} x {count}"
        found[name] = min(statistics.median(took[4:]), found.get(name, float("inf")))
    dist.destroy_process_group()
    return found


def _gloo(quick: bool) -> dict[str, float]:
    """Bit/s of all-reduces, by how often the interface is named: bytes that leave a rank, over seconds."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found, data = {}, [torch.ones(_PIECE // 4) for _ in range(_PIECES)]
    for count in _connections(quick):
        group, took = _group(count), []
        for _ in range(_GLOO_ROUNDS):
            dist.barrier(group)
            start = time.perf_counter()
            for work in [dist.all_reduce(each, group=group, async_op=True) for each in data]:
                work.wait()
            took.append(time.perf_counter() - start)
        found[str(count)] = 8 * _PIECES * _PIECE / statistics.median(took[1:])
    dist.destroy_process_group()
    return found


def rank_main(part: str, quick: bool) -> None:
    """Measure one part on one cluster; the first rank tells."""
    rank, seconds, found = int(os.environ["RANK"]), 3.0 if quick else 6.0, dict[str, Any]()
    groups = {"gloo": _gloo, "ddp": _ddp, "attached": _attached}
    if part in groups:
        found = groups[part](quick)
    else:
        joined = _joined(rank)
        if part == "links":
            found = {"delay": _delay(rank, joined), "rate": _carried(rank, joined, 4, "cubic", seconds)}
        elif part == "buffers":
            for name in ("as they are", "64 MB"):
                for count in (1, 4):
                    found[f"{count}, {name}"] = _carried(rank, joined, count, "cubic", seconds)
                _larger_buffers()
        else:
            refused = left_out(CONTROLS)
            print(*refused.values(), sep="\n")
            for control in (each for each in CONTROLS if each not in refused):
                for count in _connections(quick):
                    found[f"{control} {count}"] = _carried(rank, joined, count, control, seconds)
    if rank == 0:
        tell(found)


def row(part: str, cluster: str, quick: bool) -> dict[str, Any]:
    """One cluster's measurement, with what the relay took."""
    lines: list[str] = []
    words = [__file__, "--rank", part, *(["--quick"] if quick else [])]
    result, told = heard(cluster, words, lambda node, line: lines.append(f"node {node}: {line}"))
    if not result.ok or not told:
        raise SystemExit(f"{part} on {cluster}: {last_words(result, lines)}\n" + "\n".join(lines[-5:]))
    relay = result.relayed
    about = {} if relay is None else {"cores": relay.cores, "late": relay.late, "doubt": relay.doubt}
    for line in dict.fromkeys(line for line in lines if _LEFT_OUT in line):
        print(line, file=sys.stderr)
    print(cluster, told[0], about, file=sys.stderr, flush=True)
    return {"cluster": cluster, "found": told[0], "relay": about}


def table(result: Mapping[str, Any]) -> str:
    """A saved result as Markdown."""
    parts = []
    for found in result["rows"].values():
        names = [*dict.fromkeys(name for row in found for name in row["found"])]
        lines = []
        for row in found:
            cores = f"{row['relay']['cores']:.2f}" if row["relay"] else "–"
            doubt = " (does not count)" if row["relay"].get("doubt") else ""
            cells = [_shown(name, row["found"].get(name)) for name in names]
            lines.append([row["cluster"], *cells, cores + doubt])
        heads = {"delay": "ms one way", "rate": "Mbit/s, 4 connections"}
        head = ["cluster", *(heads.get(name, name) for name in names), "cores of the relay"]
        parts.append(markdown(head, lines))
    return "\n\n".join(parts)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name == "delay":
        return f"{1e3 * value:.2f}"
    return f"{1e3 * value:.0f} ms" if " x " in name else f"{value / 1e6:.3g}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer connections, latencies and seconds")
    parser.add_argument("--only", metavar="PART", choices=[*PARTS], help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-network.json")
    add_table(parser)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.table is not None:
        print(table(options.table))
        return
    if options.rank:
        rank_main(options.rank, options.quick)
        return
    found = {
        part: [row(part, each, options.quick) for each in (quick if options.quick else clusters)]
        for part, clusters in PARTS.items()
        for quick in (QUICK.get(clusters, clusters),)
        if options.only in (None, part)
    }
    result = {"benchmark": "network", "quick": options.quick, "hardware": hardware(), "rows": found}
    conclude(result, table(result), options)


if __name__ == "__main__":
    main()
