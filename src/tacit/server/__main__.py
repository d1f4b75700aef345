"""One parameter server: `python -m tacit.server --workers 4 --port 29600`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tacit.errors import TacitError
from tacit.server.host import Host


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until all workers have left, or SIGTERM; 0, or 2 where what was asked for cannot be."""
    options = arguments().parse_args(argv)
    logging.basicConfig(format="tacit.server: %(message)s")
    torch.set_num_threads(1)
    try:
        host = Host(
            options.workers,
            options.port,
            options.number,
            options.timeout,
            options.checkpoint,
            options.every,
        )
    except TacitError as error:
        print(f"tacit.server: {error}", file=sys.stderr, flush=True)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    if host.resumed:
        text = f"tacit.server: server {host.number} goes on from {options.checkpoint}"
        print(text, file=sys.stderr, flush=True)
    host.run()
    _leave(options.number, host.facts())
    return 0


def _leave(number: int, facts: dict[str, Any]) -> None:
    """Where `tacit run` has named a folder, leave there what the server has counted."""
    folder = os.environ.get("TACIT_FOOTPRINT")
    if folder is not None:
        file = Path(folder, f"server{number}.json")
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps({"rank": number, **facts}), encoding="utf-8")
        unfinished.replace(file)


def arguments() -> argparse.ArgumentParser:
    """What may stand behind it."""
    parser = argparse.ArgumentParser(prog="python -m tacit.server", description=__doc__)
    parser.add_argument("--workers", type=int, required=True, help="how many there are, such as 4")
    parser.add_argument("--port", type=int, required=True, help="where workers find it, such as 29600")
    parser.add_argument("--number", type=int, default=0, help="which of several servers it is, from 0")
    parser.add_argument(
        "--timeout", type=float, default=60, help="seconds after which a worker that others wait for is gone"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="file to save its state to, and to resume from if it is there, such as server0.pt",
    )
    parser.add_argument("--every", type=float, default=30, help="seconds between two saves")
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may still wait for workers that are gone
