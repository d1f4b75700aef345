"""Members behind a NAT, and a hub by TLS that is killed again and again.

    python benchmarks/hub.py            # 2 minutes: three members, a hub that is killed three times
    python benchmarks/hub.py --quick    # one minute, and once
    python benchmarks/hub.py --crowd 64 --hubs 2    # how many members hubs serve: half a minute

Each member is a node of the testbed to which nobody can open a connection, as behind a home router; the hub
is the first node, and asks for certificates. A member takes a step each 0.1 s, and a round of `lowbit`
follows each second one. The hub is killed (kill -9), and started again a few seconds later. Told: how long a
member takes to join, to its first step; how many steps are taken, against what the pace allows while members
are there; and whether all end with equal parameters.

With --crowd there is no training: one process makes the connections of so many members, and sends what
they send in rounds of `lowbit` with eight buckets of a tiny model, and their signs of life. Counted are the
messages that hubs take and send for each second of the processor time of the busiest, and its memory for each
member.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paired import conclude, hardware

PACE, AWAY, PORT = 0.1, 5.0, 29600
CLUSTER, MEMBERS = "4x1@100mbit,10ms,nat", (1, 2, 3)


# ---- on the nodes -------------------------------------------------------------------------------------


def hub(folder: Path, seconds: float, kills: int) -> None:
    """Serve until all have ended; be killed so often in the first seconds, and away for a few each time."""
    words = ["-m", "tacit.stores.server", "--min", "1", "--host", "0.0.0.0", "--port", str(PORT)]
    words += ["--tls", str(folder / "hub.pem"), str(folder / "hub.key"), "--clip", "100"]
    words += ["--certificates", str(folder / "members.pem")]
    began = 0.0
    for kill in range(kills + 1):
        process = subprocess.Popen([sys.executable, *words])
        while not all((folder / f"end{i}").exists() for i in MEMBERS):
            if not began and all((folder / f"begun{i}").exists() for i in MEMBERS):
                began = time.monotonic()
            if kill < kills and began and time.monotonic() > began + seconds * (kill + 1) / (kills + 1):
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(AWAY if kill < kills else 0.0)


def member(folder: Path, number: int, seconds: float) -> None:
    """Train for so long, and tell how it went."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import tacit
    from tacit.api.members import MemberSession

    time.sleep(5.0 * (number - 1))  # all but the first join others that train
    dist.init_process_group("gloo")
    torch.manual_seed(number)
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    began = time.monotonic()
    session = tacit.attach(model, optimizer, "lowbit:sync_every=2", members=tacit.Members(silence=4.0))
    assert isinstance(session, MemberSession)
    joined, steps, start = 0.0, 0, session.step
    while session.step < seconds / PACE:
        now = time.monotonic()
        x = torch.randn(32, 64)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if not joined:
            joined = time.monotonic() - began
            (folder / f"begun{number}").touch()
        steps += 1
        time.sleep(max(0.0, now + PACE - time.monotonic()))
    took = time.monotonic() - began
    session.close()
    sums = [float(each.double().sum()) for each in network.parameters()]
    rounds = session.metrics()["rounds"]
    told = {"member": number, "joined": joined, "from": start, "steps": steps, "rounds": rounds}
    print(json.dumps(told | {"seconds": took, "sums": sums, "loss": float(loss.detach())}), flush=True)
    (folder / f"end{number}").touch()
    dist.destroy_process_group()


# ---- a crowd ------------------------------------------------------------------------------------------


BUCKETS, ENTRIES, BITS, ROUNDS, SIGNS = 8, 50_000, 3, 15, 100


def crowded(members: int, hubs: int) -> dict[str, Any]:
    """What hubs need for so many members; see the module."""
    import torch

    from tacit.contracts import AllGather, AllToAll
    from tacit.environment import SERVER_SECRET
    from tacit.stores.hub.link import HubLink
    from tacit.stores.hub.several import HubLinks
    from tacit.stores.secret import Secret
    from tacit.transports.relayed_group import RelayedGroup
    from tacit_lab.testbed.launch import free_port
    from tls import processor_seconds

    secret, ports = secrets.token_hex(32), [free_port() for _ in range(hubs)]
    words = ["-m", "tacit.stores.server", "--max", str(members), "--clip", "100"]
    env = os.environ | {SERVER_SECRET: secret}
    processes = [subprocess.Popen([sys.executable, *words, "--port", str(each)], env=env) for each in ports]

    def linked() -> list[HubLink]:
        return [HubLink(("127.0.0.1", port), Secret(secret.encode()), None, 60.0) for port in ports]

    def used() -> list[float]:
        return [processor_seconds(each.pid) for each in processes]

    try:
        first = linked()
        before = resident(processes[0].pid)
        # A member has connections for its texts, for its signs of life, and for its collectives.
        links = [[linked() for _ in range(3)] for _ in range(members)]
        connected = resident(processes[0].pid)
        began = used()
        for i in range(SIGNS):
            for j, ((signs, *_), *_) in enumerate(links):
                signs.set(f"life/{j}/0", json.dumps({"beat": i, "step": i, "says": {}}))
        signs_took = used()[0] - began[0]
        share = ENTRIES // members // 512 * 512 or 512
        codes = (
            torch.zeros(share * BITS // 8, dtype=torch.uint8),
            torch.ones(share // 512, dtype=torch.bfloat16),
        )
        size = sum(each.nbytes for each in codes)
        mine, parts = torch.zeros(size, dtype=torch.uint8), [size] * members
        leaving, arriving = (torch.zeros(members * size, dtype=torch.uint8) for _ in range(2))
        name = "period/1/0"
        groups = [
            [RelayedGroup(relay, f"{name} #{stage}", i, members) for stage in (1, 2)]
            for i, relay in enumerate(HubLinks(each[2]) for each in links)
        ]
        homes: list[dict[str, tuple[int, int]]] = [{} for _ in range(members)]
        began, clock = used(), time.monotonic()
        for _ in range(ROUNDS):
            for stage in (0, 1):
                works = []
                for bucket in map(str, range(BUCKETS)):
                    for i, (exchanges, gathers) in enumerate(groups):
                        if stage:
                            gathers.says(AllGather(codes), bucket, 1, homes[i])
                            works.append(gathers.all_gather_single(arriving, mine))
                        else:
                            exchanges.says(AllToAll((codes,) * members), bucket, 0, homes[i])
                            works.append(exchanges.all_to_all_single(arriving, leaving, parts, parts))
                for work in works:
                    work.wait()
        seconds = time.monotonic() - clock
        took = [end - start for start, end in zip(began, used(), strict=True)]
        after = resident(processes[0].pid)
        for link in first:
            link.close()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    messages, busiest = 4 * members * BUCKETS * ROUNDS, max(took)
    return {
        "members": members,
        "hubs": hubs,
        "signs_a_second": 2 * members * SIGNS / signs_took,
        "messages_a_second": messages / busiest,
        "rounds_a_second": ROUNDS / busiest,
        "rounds_a_second_of_the_clock": ROUNDS / seconds,
        "processor_seconds": took,
        "bytes_a_message": size * members,
        "MB_a_second": (3 * members + 1) * members * size * BUCKETS * ROUNDS / busiest / 1e6,
        "kB_a_member": 1e-3 * (connected - before) / members,
        "kB_a_member_in_rounds": 1e-3 * (after - before) / members,
    }


def resident(process: int) -> int:
    """The memory of a process, in bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def crowd_lines(found: dict[str, Any]) -> str:
    took = " and ".join(f"{each:.1f}" for each in found["processor_seconds"])
    return (
        f"{found['members']} members by {found['hubs']} hubs, for each second of the busiest's processor: "
        f"{found['rounds_a_second']:.2f} rounds of lowbit with {BUCKETS} x {ENTRIES} entries, "
        f"{found['messages_a_second']:.0f} messages, {found['MB_a_second']:.0f} MB; or of signs of life "
        f"{found['signs_a_second']:.0f} messages. {ROUNDS} rounds took {took} s of processor, and "
        f"{found['rounds_a_second_of_the_clock']:.2f} a second went by with all members in one process. "
        f"{found['kB_a_member']:.0f} kB a member that is connected, "
        f"{found['kB_a_member_in_rounds']:.0f} in rounds"
    )


# ---- around them --------------------------------------------------------------------------------------


def measured(seconds: float, kills: int) -> dict[str, Any]:
    from tacit.environment import HUB, SERVER_SECRET, TLS, TLS_CERTIFICATE, TLS_KEY
    from tacit.stores.tls import fingerprints
    from tacit_lab.certificates import make
    from tacit_lab.cluster import Cluster
    from tacit_lab.testbed import Testbed
    from tacit_lab.testbed.network.nodes import address

    told: list[dict[str, Any]] = []
    said: list[str] = []

    def listen(node: int, line: str) -> None:
        if line.startswith('{"member"'):
            told.append(json.loads(line))
        else:
            said.append(f"[node {node}] {line}")

    with TemporaryDirectory() as name, Testbed(Cluster.parse(CLUSTER)) as bed:
        folder = Path(name)
        for each in ("hub", "members"):
            make([address(0)], 30, folder / f"{each}.pem", folder / f"{each}.key")
        env = {
            HUB: f"{address(0)}:{PORT}",
            SERVER_SECRET: secrets.token_hex(32),
            TLS: fingerprints(folder / "hub.pem")[0],
            TLS_CERTIFICATE: str(folder / "members.pem"),
            TLS_KEY: str(folder / "members.key"),
        }
        words = [__file__, "--rank", str(folder), "--seconds", str(seconds), "--kills", str(kills)]
        result = bed.run(words, env=env, on_line=listen, timeout=4 * seconds + 120, restarts=0)
    if result.returncode or len(told) != len(MEMBERS):
        raise RuntimeError("\n".join([f"it ended with {result.returncode}", *said[-40:]]))
    away = kills * AWAY
    return {
        "members": sorted(told, key=lambda each: int(each["member"])),
        "equal": all(each["sums"] == told[0]["sums"] for each in told),
        "goodput": sum(each["steps"] for each in told) * PACE / sum(each["seconds"] for each in told),
        "away": away,
        "kills": kills,
        "said": [line for line in said if "rounds" in line or "is away" in line],
    }


def lines(found: dict[str, Any]) -> str:
    told = [
        f"member {each['member']}: first step after {each['joined']:.1f} s, {each['steps']} steps in "
        f"{each['seconds']:.0f} s, {each['rounds']:.0f} rounds"
        for each in found["members"]
    ]
    told.append(
        f"{found['kills']} kills of the hub, {found['away']:.0f} s away in all: steps at "
        f"{found['goodput']:.2f} of the pace, parameters {'equal' if found['equal'] else 'NOT EQUAL'}"
    )
    return "\n".join(told)


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a minute, and one kill")
    parser.add_argument("--crowd", type=int, metavar="MEMBERS", help="how many one hub serves, such as 64")
    parser.add_argument("--hubs", type=int, default=1, help="with --crowd: how many share out, such as 2")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-hub.json")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        number = int(os.environ["TACIT_WORKER"])
        if number:
            member(options.rank, number, options.seconds)
        else:
            hub(options.rank, 0.7 * options.seconds, options.kills)
        return
    if options.crowd:
        found = crowded(options.crowd, options.hubs)
        conclude({"benchmark": "hub", "hardware": hardware(), **found}, crowd_lines(found), options)
        return
    found = measured(*((45.0, 1) if options.quick else (90.0, 3)))
    conclude({"benchmark": "hub", "hardware": hardware(), **found}, lines(found), options)


if __name__ == "__main__":
    main()
