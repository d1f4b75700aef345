"""tacit side by side with what people would use in its place: the same model, data, cluster and steps.

    python benchmarks/peers.py             # about 30 minutes, and some for making the environments
    python benchmarks/peers.py --quick     # less than 10 minutes: fewer steps, one seed, six peers
    python benchmarks/peers.py --only torchft-diloco,hivemind-local
    python benchmarks/peers.py --table benchmarks/results/DATE-peers.json    # the table as Markdown

Every peer runs in a virtual environment of its own, made on first use under build/peers/, with the torch and
the NumPy of this interpreter; what is in torch itself runs here. Where pip does not find your build of torch,
say where it is: `--extra-index-url https://download.pytorch.org/whl/cpu`, or PIP_EXTRA_INDEX_URL.

A peer and its counterpart run one after the other, for each seed. All evaluate at the same steps, which is
taken out of their time; bytes are what a node's interface has sent, in training. What a peer cannot do is a
row with its message. A run that was interrupted goes on where it was, from build/peers/rows.jsonl.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kept import StateSlice, fingerprint
from launched import KEPT_LINES, heard, last_words, refuse_early
from paired import ROOT, Ticks, add_table, hardware, save
from peer_list import LOCAL, OUTER, PEERS, Environment, Peer, Unavailable, chosen
from peer_table import table
from tacit.files import put
from tacit_lab.cluster import Cluster

CLUSTER = "4x1@100mbit"
PLACE = ROOT / "build" / "peers"
STEPS, QUICK_STEPS = 120, 24
QUICK = "torch-ddp,torch-powersgd,torchft-diloco,accelerate-localsgd,hivemind-local,detonation-demo-matrices"
"""Who is there with --quick, where nobody is named: what fails takes its time to do so."""
EVERY = 8
_BECOME = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
"""What the launchers start, since they start this interpreter: it becomes the peer's."""


@dataclass(frozen=True)
class Settings:
    """What is equal for all rows of a run; `code` is what `fingerprint` says."""

    cluster: str
    steps: int
    timeout: float
    code: str


@dataclass(frozen=True)
class Side:
    """A peer, or tacit in its place."""

    peer: Peer
    name: str

    def row(self, settings: Settings, seed: int) -> dict[str, Any]:
        """What identifies a row of this side, and says what it is."""
        ours = self.name == "tacit"
        start = settings.steps // 3 // LOCAL * LOCAL
        algorithm = self.peer.ours.format(start=start) if ours else ""
        task = {
            "way": "tacit" if ours else self.peer.way,
            "steps": settings.steps,
            "every": EVERY,
            "seed": seed,
            "period": self.peer.period,
            "start": start,
            "algorithm": algorithm,
        }
        return {
            "peer": self.peer.name,
            "side": self.name,
            "who": "tacit" if ours else f"{self.peer.distribution} {version_of(self.peer)}",
            "does": f"`{algorithm}`" if ours else self.peer.does,
            "seed": seed,
            "cluster": settings.cluster,
            "code": settings.code,
            "task": task,
        }


def version_of(peer: Peer) -> str:
    """The version that is pinned, or that is here."""
    from importlib.metadata import version

    pins = peer.environment.pins if peer.environment else ()
    pinned = [pin.partition("==")[2] for pin in pins if pin.startswith(f"{peer.distribution}==")]
    return pinned[0] if pinned else version(peer.distribution)


# ---- one row ------------------------------------------------------------------------------------------


def run(row: Mapping[str, Any], python: Path, settings: Settings, logs: Path) -> dict[str, Any]:
    """Train once in the testbed; what was found, or with which words it failed."""
    script = Path(__file__).with_name("peer_rank.py")
    argv = ["-c", _BECOME, str(python), "-u", str(script), json.dumps(row["task"])]
    lines: deque[str] = deque(maxlen=KEPT_LINES)
    began = {"busy": busy(), "timeout": settings.timeout}
    before = Ticks.now()
    with TemporaryDirectory(prefix="tacit-peers-") as folder:  # for what processes leave that are killed
        result, found = heard(
            settings.cluster,
            argv,
            lambda node, line: lines.append(f"node {node}: {line}"),
            env={"PYTHONPATH": str(ROOT / "src"), "TMPDIR": folder},
            timeout=settings.timeout,
        )
    began["withheld"] = (Ticks.now() - before).withheld
    if found and not result.returncode:
        return {**began, "status": "ok", "message": "", **found[0]}
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{row['peer']}-{row['side']}-{row['seed']}.log"
    put(log, "\n".join(lines) + "\n")
    return began | {"status": "failed", "message": last_words(result, list(lines), settings.timeout)}


def busy(seconds: float = 0.5) -> float:
    """The share of the cores that others use, 0..1, in a moment when this program waits."""
    before = Ticks.now()
    time.sleep(seconds)
    since = Ticks.now() - before
    return 1.0 - since.idle / max(1, since.idle + since.busy + since.stolen)


# ---- all rows -----------------------------------------------------------------------------------------


def prepare(peers: Sequence[Peer], index: Sequence[str]) -> dict[Environment | None, Path | Unavailable]:
    """Make the environments of all peers, before anything is measured."""
    places: dict[Environment | None, Path | Unavailable] = {None: Path(sys.executable)}
    for peer in peers:
        if peer.environment is not None and peer.environment not in places:
            try:
                places[peer.environment] = peer.environment.make(PLACE, index)
            except Unavailable as error:
                places[peer.environment] = error
    return places


def measure(
    peers: Sequence[Peer],
    seeds: int,
    settings: Settings,
    places: Mapping[Environment | None, Path | Unavailable],
    kept: StateSlice,
) -> Iterator[dict[str, Any]]:
    """All rows: of each seed, each peer and then tacit in its place."""
    sides = [Side(peer, name) for peer in peers for name in ("peer", "tacit") if name == "peer" or peer.ours]
    for seed in range(seeds):
        for side in sides:
            row = side.row(settings, seed)
            place = places[side.peer.environment if side.name == "peer" else None]
            if isinstance(place, Unavailable):  # not kept: it is tried again by whoever tries again
                done = row | {"status": "failed", "message": f"does not install: {place}"}
            else:
                # What failed may do so by lack of time.
                known = kept.find(row | {"status": "ok"}) or kept.find(row | {"timeout": settings.timeout})
                done = known or row | run(row, place, settings, PLACE / "logs")
                if known is None:
                    kept.keep(done)
            print(told(done), file=sys.stderr, flush=True)
            yield done


def told(row: Mapping[str, Any]) -> str:
    """A row in a line, as it is finished."""
    head = f"{row['peer']:25} {row['side']:6} seed {row['seed']}"
    if row["status"] != "ok":
        return f"{head}  failed: {row['message']}"
    last = row["evaluations"][-1]
    return f"{head}  {row['seconds']:6.1f} s  accuracy {last['accuracy']:.3f}  busy {row['busy']:.0%}"


def main() -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    options = _options()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # as Ctrl-C: leave nothing behind
    if options.table is not None:
        print(table(options.table))
        return
    refuse_early(options.cluster)  # before anything is installed
    about = hardware()
    settings = Settings(
        options.cluster,
        options.steps,
        options.timeout,
        fingerprint("paired.py", "launched.py", "peer_rank.py"),
    )
    kept = StateSlice(PLACE / "rows.jsonl")
    places = prepare(options.only, options.index)
    rows = list(measure(options.only, options.seeds, settings, places, kept))
    result = {
        "benchmark": "peers",
        "quick": options.quick,
        "hardware": about,
        "cluster": options.cluster,
        "steps": options.steps,
        "target": options.target,
        "rows": rows,
    }
    print(table(result), file=sys.stderr if options.json else sys.stdout)
    if options.save:
        name = "peers" if len(options.only) == len(PEERS) else "peers-part"
        print(f"saved {save(name + '-quick' * options.quick, result)}", file=sys.stderr)
    if options.json:
        print(json.dumps(result))
    kept.forget()
    if any(row["side"] == "tacit" and row["status"] != "ok" for row in rows):
        raise SystemExit("a run of tacit itself has failed")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(peer.name for peer in PEERS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, one seed, six peers")
    parser.add_argument("--only", default="", help=f"one or more of {known}")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-peers.json")
    add_table(parser)
    parser.add_argument("--cluster", default=CLUSTER, help=f"default: {CLUSTER}")
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--seeds", type=int, help="how many; default: 2")
    parser.add_argument("--target", type=float, default=0.95, help="accuracy to reach; default: 0.95")
    parser.add_argument("--timeout", type=float, help="seconds for a row; default: 300, with --quick 120")
    parser.add_argument("--extra-index-url", metavar="URL", help="where pip finds your torch's build")
    options = parser.parse_args()
    try:
        options.only = chosen(options.only or QUICK * options.quick)
        Cluster.parse(options.cluster)
    except ValueError as error:
        parser.error(str(error))
    if options.steps is None:
        options.steps = QUICK_STEPS if options.quick else STEPS
    if options.timeout is None:
        options.timeout = 120.0 if options.quick else 300.0
    if options.seeds is None:
        options.seeds = 1 if options.quick else 2
    if options.steps < 1 or options.steps % LOCAL or options.steps % OUTER or options.seeds < 1:
        parser.error(
            f"--steps {options.steps} --seeds {options.seeds}: every period has to end with the run; "
            f"write a multiple of {LOCAL} and {OUTER}, such as {STEPS}, and at least one seed"
        )
    options.index = ["--extra-index-url", options.extra_index_url] if options.extra_index_url else []
    return options


if __name__ == "__main__":
    main()
