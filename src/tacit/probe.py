"""Measures the links of the cluster that a launcher starts this on, and prints and saves them.

On each machine, as a training is started there::

    torchrun --nnodes 4 --nproc-per-node 1 ... -m tacit.probe --out links.json

`tacit probe --cluster 4x1@100mbit` runs it on an emulated cluster.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from tacit.errors import TacitError
from tacit.files import output
from tacit.levels.node_layout import read_nodes
from tacit.links import Links
from tacit.transports.probing import measure
from tacit.transports.process_groups import joined_world


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the links, on every rank; rank 0 prints the result."""
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m tacit.probe",
        description="Measure the links between all nodes, and within each.",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the links there, e.g. links.json")
    parser.add_argument("--json", action="store_true", help="print them as one line of JSON")
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="how long a measured transfer takes, e.g. 0.5"
    )
    options = parser.parse_args(argv)
    if not 0 < options.seconds <= 60:
        parser.error(f"--seconds {options.seconds} is not possible: write a number above 0, up to 60")
    if "RANK" not in os.environ:
        parser.error(
            "no launcher has said which rank this is, as RANK is not set: write torchrun --nnodes 4 "
            "--nproc-per-node 1 ... -m tacit.probe on each machine, or tacit probe --cluster 4x1@100mbit"
        )
    if options.out is not None:
        output(options.out, "--out")
    with joined_world(timedelta(seconds=120)) as (rank, group):
        links = measure(group, read_nodes(group, None), seconds=options.seconds)
        if rank == 0:
            _tell(links, options.out, as_json=options.json)


def _tell(links: Links, out: Path | None, *, as_json: bool) -> None:
    print(links.to_json().strip() if as_json else links, flush=True)
    if out is not None:
        links.save(out)
        print(f"Links: {out}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except TacitError as error:
        raise SystemExit(f"tacit.probe: {error}") from None
