"""torchft and hivemind on the schedule of `elastic.py`: the same model, paces, nodes, kills and freezes.

    python benchmarks/elastic_peers.py dense torchft-dense localsgd:sync_every=8 torchft-local hivemind \\
        --torchft ENV/bin/python --hivemind ENV/bin/python --seconds 120 --save elastic-peers

What is no peer's name is an algorithm of tacit's, which `elastic.py` runs. The seed decides the order of
faults; each waits until all are at work, and the last 25 seconds are without.
Each needs an environment of its own with this torch: `pip install torchft==0.2.0`, `pip install
hivemind==1.1.12`. torchft's lighthouse, and the first peer of hivemind's table, run beside the nodes, where
nobody kills them. torchft averages gradients (dense), or parameters every 8 steps (local); hivemind averages
parameters when all together have taken as many samples. Goodput is as in `elastic.py`; a step that torchft
does not commit is none.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import elastic
from paired import hardware, save
from tacit_lab.cluster import Cluster
from tacit_lab.testbed import Testbed, launch

PEERS = ("torchft-dense", "torchft-local", "hivemind")
RANK = Path(__file__).with_name("elastic_peer_rank.py")
SWITCH = """
import sys, time, hivemind
at = f"/ip4/{sys.argv[1]}/tcp/{sys.argv[2]}"
dht = hivemind.DHT(host_maddrs=[at], announce_maddrs=[at], start=True)
open(sys.argv[3] + "~", "w").write(" ".join(map(str, dht.get_visible_maddrs())))
import os; os.replace(sys.argv[3] + "~", sys.argv[3])
time.sleep(1e6)
"""


def run(bed: Testbed, peer: str, seed: int, given: argparse.Namespace, folder: str) -> dict[str, Any]:
    """One training of one peer, under churn."""
    churn = given.churn
    python = given.hivemind if peer == "hivemind" else given.torchft
    there = str(Path(folder) / f"{peer}-{seed}")

    def beside(point: tuple[str, int]) -> list[str]:
        host, port = point
        if peer == "hivemind":
            return [python, "-c", SWITCH, host, str(port), there]
        lighthouse = str(Path(python).with_name("torchft_lighthouse"))
        words = ["--min_replicas", "1", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"]
        return [lighthouse, "--bind", f"{host}:{port}", *words]

    until = time.time() + given.start + given.seconds
    heard = elastic.Heard(bed.cluster.nodes, churn, seed, float("inf"))

    def on_line(node: int, line: str) -> None:
        heard.heard(node, line)
        if time.time() > until - elastic.QUIET:
            heard.churn.end()

    words = ["-m", "elastic_peer_exec", python, str(RANK), peer, str(seed), str(given.pace), str(until)]
    env = {"PEERS_AT": there, "PYTHONPATH": f"{RANK.parent}:{os.environ.get('PYTHONPATH', '')}"}
    ours, launch.store_arguments = launch.store_arguments, beside  # in place of the store of members
    try:
        limit = given.start + given.seconds + 20
        result = bed.run(words, env=env, on_line=on_line, timeout=limit, churn=heard.churn)
    finally:
        launch.store_arguments = ours
    processes = {key: said for key, said in heard.processes.items() if any("step" in each for each in said)}
    events = heard.churn.events
    counts = [
        elastic.up(said, [e for e in events if e.node == node], given.pace)
        for (node, _), said in processes.items()
    ]
    useful, seconds = sum(each[0] for each in counts), sum(each[1] for each in counts)
    pauses: dict[str, list[float]] = {"killed": [], "frozen": []}
    for e in events:
        if e.what != "back":
            longest = elastic.pause(processes, events, e.at, e.at + given.pace, given.pace)
            pauses[e.what].append(round(longest, 2))
    if not processes or result.failures:
        print(*[each for each in heard.others if "Error" in each][:30], sep="\n", file=sys.stderr)
    losses = [(line["time"], line["loss"]) for said in processes.values() for line in said if "loss" in line]
    return {
        "algorithm": peer,
        "seed": seed,
        "churn": churn,
        "faults": {how: len(each) for how, each in pauses.items()},
        "steps": useful,
        "seconds_up": round(seconds, 1),
        "goodput": round(useful * given.pace / seconds, 4) if seconds else None,
        "counted": elastic.COUNTED,
        "pauses": {how: sorted(each) for how, each in pauses.items()},
        "loss": max(losses)[1] if losses else None,
        "failures": [str(each) for each in result.failures],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", nargs="+", help=f"{', '.join(PEERS)}, or an algorithm of tacit's")
    parser.add_argument("--torchft", default=sys.executable, help="the interpreter of its environment")
    parser.add_argument("--hivemind", default=sys.executable)
    parser.add_argument("--cluster", default="6x1@100mbit")
    parser.add_argument("--pace", type=float, default=0.6)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--start", type=float, default=30, help="seconds in which all begin")
    parser.add_argument("--churn", type=float, default=20)
    parser.add_argument("--silence", type=float, default=1.0, help="of tacit's members")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--save", default="", help="the results' name")
    parser.set_defaults(hub=0)  # peers have none
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with Testbed(Cluster.parse(given.cluster)) as bed, TemporaryDirectory() as folder:
        for arm in given.arms:
            for seed in range(given.seeds):
                if arm in PEERS:
                    rows.append(run(bed, arm, seed, given, folder))
                else:
                    rows.append(elastic.run(bed, arm, seed, given.churn, given))
                print({key: value for key, value in rows[-1].items() if key != "curve"}, flush=True)
                if given.save:
                    save(given.save, {"hardware": hardware(), "settings": vars(given), "rows": rows})


if __name__ == "__main__":
    main()
