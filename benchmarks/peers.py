"""tacit side by side with what people would use in its place: the same model, data, clusters and steps.

    python benchmarks/peers.py             # what is missing; all of it: an hour and a half on a quiet machine
    python benchmarks/peers.py --only torchft-diloco,hivemind-local
    python benchmarks/peers.py --rates     # the part that needs no quiet: learning rates and accuracies
    python benchmarks/peers.py --table     # of what is there, as Markdown; --publish writes docs/peers.md
    python benchmarks/peers.py --quick     # less than 10 minutes: six peers, few steps, nothing is kept

Every peer runs in a virtual environment of its own, made on first use under build/peers/, with the torch and
the NumPy of this interpreter; tacit, and what is in torch itself, in another one. Where pip does not find
your build of torch, say where it is: `--extra-index-url https://download.pytorch.org/whl/cpu`, or
PIP_EXTRA_INDEX_URL.

First each side trains on nodes whose links are as fast as the machine allows, as accuracy does not depend on
them: at three learning rates, of which another seed chooses, and then with each seed at that rate. What fails
there is a row with its message, and is not tried again. Then, on each slow cluster and with each seed, a peer
and tacit in its place train one after the other, in turns the one and the other first: seconds, the bytes
that a node's interface has sent, memory.

Each finished run is a line of benchmarks/results/peers-runs.jsonl, with its date, its commit and a
fingerprint: of tacit that of its algorithm, of a peer its version. A call makes what is not there: trainings
with another fingerprint, and times of other sources.
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

import fingerprints
from kept import StateSlice, fingerprint
from launched import KEPT_LINES, heard, last_words, refuse_early
from paired import RESULTS, ROOT, Ticks, hardware
from peer_list import LOCAL, PEERS, TORCH, Environment, Peer, Unavailable, chosen
from peer_table import ABSENT, CHOOSING, UNSHAPED, publish, rate_of, stands, table
from runs import lines as read_lines
from tacit.files import put

CLUSTERS = ("4x1@100mbit", "4x1@100mbit,30ms")
RATES = (1.0, 0.5, 2.0)
"""The recipe's first: what fails there is not tried with others."""
SEEDS = 3
TRAINED, TIMED, QUICK_STEPS = 120, 72, 24
"""Steps of a training for its accuracy, of one for its seconds, and of both with --quick."""
TIMEOUT = 240.0
QUICK = (
    "torch-powersgd,torchft-diloco,accelerate-localsgd,deepspeed-bf16,hivemind-local,detonation-demo-matrices"
)
"""Who is there with --quick, where nobody is named."""
PLACE = ROOT / "build" / "peers"
FILE = RESULTS / "peers-runs.jsonl"
_BECOME = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
"""What the launchers start, since they start this interpreter: it becomes the peer's."""


@dataclass(frozen=True)
class Side:
    """A peer, or tacit in its place."""

    peer: Peer
    name: str

    def row(self, cluster: str, steps: int, every: int, seed: int, rate: float) -> dict[str, Any]:
        """What identifies a run of this side, and says what it is."""
        ours = self.name == "tacit"
        third = steps // 3 // LOCAL * LOCAL
        algorithm = self.peer.ours.format(third=third) if ours else ""
        task = {
            "way": "tacit" if ours else self.peer.way,
            "steps": steps,
            "every": every,
            "seed": seed,
            "period": self.peer.period,
            "start": third,
            "rate": rate,
            "algorithm": algorithm,
        }
        return {
            "peer": self.peer.name,
            "side": self.name,
            "who": "tacit" if ours else self.peer.who,
            "arm": self.peer.ours if ours else self.peer.way,
            "cluster": cluster,
            "task": task,
        }


def sides(peers: Sequence[Peer], first: str = "peer") -> Iterator[Side]:
    """Both of each peer, or the peer alone where tacit in its place stands beside another."""
    for peer in peers:
        for name in ("peer", "tacit") if first == "peer" else ("tacit", "peer"):
            if name == "peer" or peer.ours:
                yield Side(peer, name)


# ---- one run ------------------------------------------------------------------------------------------


def run(row: Mapping[str, Any], python: Path, timeout: float) -> dict[str, Any]:
    """Train once in the testbed; what was found, or with which words it failed."""
    script = Path(__file__).with_name("peer_rank.py")
    argv = ["-c", _BECOME, str(python), "-u", str(script), json.dumps(row["task"])]
    lines: deque[str] = deque(maxlen=KEPT_LINES)
    began = {"busy": busy()}
    before = Ticks.now()
    with TemporaryDirectory(prefix="tacit-peers-") as folder:  # for what processes leave that are killed
        result, found = heard(
            row["cluster"],
            argv,
            lambda node, line: lines.append(f"node {node}: {line}"),
            env={"PYTHONPATH": str(ROOT / "src"), "TMPDIR": folder},
            timeout=timeout,
        )
    began["withheld"] = (Ticks.now() - before).withheld
    if found and not result.returncode:
        return {**began, "status": "ok", "message": "", **found[0]}
    logs = PLACE / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    put(logs / f"{row['peer']}-{row['side']}.log", "\n".join(lines) + "\n")
    return began | {"status": "failed", "message": last_words(result, list(lines), timeout)}


def busy(seconds: float = 0.5) -> float:
    """The share of the cores that others use, 0..1, in a moment when this program waits."""
    before = Ticks.now()
    time.sleep(seconds)
    since = Ticks.now() - before
    return 1.0 - since.idle / max(1, since.idle + since.busy + since.stolen)


# ---- all runs -----------------------------------------------------------------------------------------


class Record:
    """The finished runs, to which those are added that are missing.

    Args:
        places: the interpreter of each environment, or why there is none.
        source: what tells the sources from any others.
        until: the `time.monotonic()` after which no run begins.
    """

    def __init__(
        self,
        path: Path,
        places: Mapping[Environment, Path | Unavailable],
        source: str,
        timeout: float = TIMEOUT,
        until: float = float("inf"),
    ) -> None:
        self._kept, self._places, self._source = StateSlice(path), places, source
        self._timeout, self._until = timeout, until

    def trained(self, side: Side, steps: int, every: int, seed: int, rate: float) -> dict[str, Any]:
        """A training for its accuracy; whose it is beside which peer does not matter."""
        row = side.row(UNSHAPED, steps, every, seed, rate)
        return self._done(side, row, {name: row[name] for name in ("who", "cluster", "task")})

    def timed(self, side: Side, cluster: str, steps: int, seed: int, rate: float) -> dict[str, Any]:
        """A training for its seconds, which is evaluated at the end alone."""
        row = side.row(cluster, steps, steps, seed, rate)
        return self._done(side, row, row | {"source": self._source, "status": "ok"})

    def _done(self, side: Side, row: Mapping[str, Any], alike: Mapping[str, Any]) -> dict[str, Any]:
        known = self._kept.find(alike)
        if known is not None and not known["message"].startswith(ABSENT) and stands(known):
            return known
        if time.monotonic() > self._until:
            raise SystemExit("the minutes are over; the same command goes on from here")
        algorithm = row["task"]["algorithm"]
        mark = fingerprints.fingerprint(algorithm) if algorithm else None
        about = {**row, "hardware": hardware(), "source": self._source, "fingerprint": mark}
        place = self._places[side.peer.environment if side.name == "peer" else TORCH]
        if isinstance(place, Unavailable):
            done = {**about, "status": "failed", "message": f"{ABSENT}: {place}"}
        else:
            done = {**about, **run(row, place, self._timeout)}
        self._kept.keep(done)
        print(told(done), file=sys.stderr, flush=True)
        return done


def train(
    record: Record, peers: Sequence[Peer], rates: Sequence[float], seeds: int, steps: int
) -> dict[Side, float]:
    """Train each side at each learning rate, and at the best of them with each seed: those rates.

    A side that fails has none.
    """
    best = {}
    for side in sides(peers):
        tried = []
        for rate in rates:
            tried.append(record.trained(side, steps, LOCAL, CHOOSING, rate))
            if tried[0]["status"] != "ok":
                break
        chosen_rate = rate_of(tried)
        if chosen_rate is not None:
            best[side] = chosen_rate
            for seed in range(seeds):
                record.trained(side, steps, LOCAL, seed, chosen_rate)
    return best


def measure(
    record: Record, peers: Sequence[Peer], best: Mapping[Side, float], cluster: str, seeds: int, steps: int
) -> None:
    """The seconds of each peer that trains, and of tacit in its place, seed by seed."""
    for seed in range(seeds):
        for peer in peers:
            pair = [side for side in sides([peer], "tacit" if seed % 2 else "peer") if side in best]
            for side in pair if len(pair) == 2 else ():
                record.timed(side, cluster, steps, seed, best[side])


def prepare(peers: Sequence[Peer], index: Sequence[str]) -> dict[Environment, Path | Unavailable]:
    """Make the environments of tacit and all peers, before anything is measured."""
    places: dict[Environment, Path | Unavailable] = {}
    for environment in dict.fromkeys((TORCH, *(peer.environment for peer in peers))):
        try:
            places[environment] = environment.make(PLACE, index)
        except Unavailable as error:
            places[environment] = error
    return places


def told(row: Mapping[str, Any]) -> str:
    """A run in a line, as it is finished."""
    task = row["task"]
    head = f"{row['peer']:25} {row['side']:6} {row['cluster']:16} seed {task['seed']:4} rate {task['rate']}"
    if row["status"] != "ok":
        return f"{head}  failed: {row['message']}"
    last = row["evaluations"][-1]
    return f"{head}  {row['seconds']:6.1f} s  accuracy {last['accuracy']:.3f}  busy {row['busy']:.0%}"


def main() -> None:
    """Make the runs that are missing, and print the tables."""
    options = _options()
    # As Ctrl-C: leave nothing behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    quick = PLACE / "quick-runs.jsonl"
    path = quick if options.quick else FILE
    if not options.table:
        refuse_early(CLUSTERS[0])  # before anything is installed
        source = fingerprint("paired.py", "launched.py", "peer_rank.py")
        until = time.monotonic() + 60 * options.minutes
        record = Record(path, prepare(options.only, options.index), source, until=until)
        steps = (QUICK_STEPS, QUICK_STEPS) if options.quick else (TRAINED, TIMED)
        rates, seeds = (RATES[:1], 1) if options.quick else (RATES, SEEDS)
        best = train(record, options.only, rates, seeds, steps[0])
        for cluster in () if options.rates else CLUSTERS[: 1 if options.quick else None]:
            measure(record, options.only, best, cluster, seeds, steps[1])
    rows = list(read_lines(path, json.loads))
    print(table(rows))
    if options.publish:
        print(f"wrote {publish(rows)}", file=sys.stderr)
    if options.quick:
        quick.unlink()
        if any(row["side"] == "tacit" and row["status"] != "ok" for row in rows):
            raise SystemExit("a run of tacit itself has failed")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(peer.name for peer in PEERS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, one seed, six peers")
    parser.add_argument("--only", default="", help=f"one or more of {known}")
    parser.add_argument("--rates", action="store_true", help="learning rates and accuracies, no times")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--table", action="store_true", help="run nothing; the tables of what is there")
    parser.add_argument("--publish", action="store_true", help="write the tables into docs/peers.md")
    parser.add_argument("--extra-index-url", metavar="URL", help="where pip finds your torch's build")
    options = parser.parse_args()
    if options.quick and (options.table or options.publish or options.rates):
        parser.error("--quick keeps nothing: write it without --table, --publish, --rates")
    try:
        options.only = chosen(options.only or QUICK * options.quick)
    except ValueError as error:
        parser.error(str(error))
    options.index = ["--extra-index-url", options.extra_index_url] if options.extra_index_url else []
    return options


if __name__ == "__main__":
    main()
