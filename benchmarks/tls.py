"""What TLS costs a worker and a server: processor time of a push of `lowbit`, with and without, in turns.

    python benchmarks/tls.py            # 40 pushes of 9 million parameters each way: half a minute
    python benchmarks/tls.py --quick    # 8

One worker and two servers, processes on one machine, connected by the loopback: one server speaks TLS 1.3,
the other plain text. A push is what `attach` makes of it: buckets are encoded in 3 bits an entry, sent,
averaged, answered in 3 bits with the error kept at the server, and decoded. Counted is the processor time of
the worker's whole process and of the server's, so other work on the machine disturbs little.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paired import conclude, hardware
from server import forked, told_of

ENTRIES, BUCKETS, BITS = 9_000_000, 4, 3
TIMEOUT = timedelta(seconds=60)
Times = dict[str, list[float]]


def serve(port: Path, secret: Any, tls: Any) -> None:
    from tacit.stores.server.process import ServerProcess

    host = ServerProcess(1, 0, secret=secret, timeout=60, tls=tls)
    port.with_suffix(".part").write_text(str(host.port))
    port.with_suffix(".part").replace(port)
    host.run()


def processor_seconds(process: int) -> float:
    """Of a process, all of its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pushed(server: Any, xs: Sequence[Any], works: Sequence[Any], number: int) -> None:
    """One push of all buckets, and its answers decoded."""
    from tacit.compressors import Blockwise
    from tacit.contracts import PayloadSpec, PushPull, ReduceEncoded
    from tacit.exchange.error_feedback import encoded

    asked, codec = [], Blockwise(BITS)
    for i, (x, work) in enumerate(zip(xs, works, strict=True)):
        payload = encoded(ReduceEncoded(codec, x, work.context(x, str(i), number)))
        piece = PayloadSpec(codec, x.numel(), x.dtype)
        back = PayloadSpec(codec, x.numel(), x.dtype, has_feedback=True)
        asked.append(server.post(PushPull((payload,), (piece,), (back,)), f"{i}/0"))
    for each, x in zip(asked, xs, strict=True):
        each.done.wait()
        codec.decode_(each.answer()[0], x)


def measured(rounds: int, folder: Path) -> dict[str, Any]:
    import torch

    from tacit.contracts import AxisRank
    from tacit.stores.client.server_connection import ServerClient
    from tacit.stores.secret import Secret
    from tacit.stores.server.payloads import BufferWorkspace
    from tacit.stores.tls import TlsServer, TlsWorker, fingerprints
    from tacit.topologies import Star
    from tacit_lab.certificates import make

    torch.set_num_threads(1)
    files, secret = (folder / "hub.pem", folder / "hub.key"), Secret(os.urandom(32).hex().encode())
    make(["127.0.0.1"], 30, *files)
    sides = {"plain": (None, None), "tls": (TlsServer(*files), TlsWorker(fingerprints(files[0])[0]))}
    about = told_of(Star(), {str(i): ENTRIES // BUCKETS for i in range(BUCKETS)})
    hosts, servers = {}, {}
    for name, (theirs, ours) in sides.items():
        port = folder / name
        hosts[name] = forked(lambda port=port, theirs=theirs: serve(port, secret, theirs))  # type: ignore[misc]
        while not port.exists():
            time.sleep(0.01)
        where = ("127.0.0.1", int(port.read_text()))
        servers[name] = ServerClient(0, where, AxisRank(0, 1), TIMEOUT, about, secret, ours)
    xs = [torch.randn(ENTRIES // BUCKETS) for _ in range(BUCKETS)]
    works = [BufferWorkspace() for _ in xs]
    worker: Times = {name: [] for name in sides}
    seconds: Times = {name: [] for name in sides}
    before: dict[str, float] = {}
    for number in range(rounds + 2):
        for name, server in servers.items():
            if number == 2:  # the first ones allocate, and compile kernels
                before[name] = processor_seconds(hosts[name])
            began, used = time.perf_counter(), time.process_time()
            pushed(server, xs, works, number)
            if number >= 2:
                worker[name].append(time.process_time() - used)
                seconds[name].append(time.perf_counter() - began)
    hub = {name: (processor_seconds(hosts[name]) - before[name]) / rounds for name in sides}
    sent = {name: server.counters.pushed / (rounds + 2) for name, server in servers.items()}
    for name, server in servers.items():
        server.close()
        os.kill(hosts[name], signal.SIGKILL)
        os.waitpid(hosts[name], 0)
    medians = {name: statistics.median(each) for name, each in worker.items()}
    return {
        "worker_processor_seconds": medians,
        "server_processor_seconds": hub,
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "bytes_out": sent["tls"],
        "rounds": rounds,
    }


def said(found: dict[str, Any]) -> str:
    lines = [f"a push of {ENTRIES / 1e6:g} million parameters, {found['bytes_out'] / 1e6:.1f} MB each way:"]
    for who in ("worker", "server"):
        plain, tls = (1e3 * found[f"{who}_processor_seconds"][name] for name in ("plain", "tls"))
        lines.append(
            f"  {who}: {plain:.1f} ms of a processor, with TLS {tls:.1f}: {100 * (tls / plain - 1):+.1f} %"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer pushes")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-tls.json")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = measured(8 if options.quick else 40, Path(folder))
    conclude(
        {"benchmark": "tls", "quick": options.quick, "hardware": hardware(), **found}, said(found), options
    )


if __name__ == "__main__":
    main()
