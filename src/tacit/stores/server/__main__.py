"""One parameter server: `python -m tacit.stores.server --workers 4 --host 10.0.0.5 --port 29600`.

With `--min 1 --max 64` in place of `--workers` it is the hub of members that come and go (docs/elastic.md).
Workers and members know it by a secret that both have: TACIT_SERVER_SECRET, or a file that only you can read.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tacit import checks
from tacit.environment import FOOTPRINT, SERVER_SECRET, SERVER_SECRET_FILE
from tacit.errors import ConfigError, TacitError
from tacit.files import put, spared
from tacit.stores import secret
from tacit.stores.server.allowed_types import with_modules
from tacit.stores.server.process import ServerProcess
from tacit.stores.tls import TlsServer

_NAME = "tacit.stores.server"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until all workers have left, or SIGTERM; 0, or 2 where what was asked for cannot be."""
    options = arguments().parse_args(argv)
    logging.basicConfig(format=f"{_NAME}: %(message)s")
    torch.set_num_threads(1)
    try:
        _check(options)
        tls = _tls(options)
        if options.workers is None:
            return _serve_members(options, tls)
        server = ServerProcess(
            options.workers,
            options.port,
            options.number,
            secret=_secret(options.secret_file),
            host=options.host,
            timeout=options.timeout,
            checkpoint=None if options.checkpoint is None else (options.checkpoint, options.every),
            allowed=with_modules(options.modules),
            tls=tls,
        )
    except TacitError as error:
        print(f"{_NAME}: {error}", file=sys.stderr, flush=True)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    if server.resumed:
        text = f"{_NAME}: server {server.number} goes on from {options.checkpoint}"
        print(text, file=sys.stderr, flush=True)
    who = f"{_NAME}: server {server.number} of {options.workers} workers"
    print(f"{who} at port {server.port}{_known(tls)}", file=sys.stderr, flush=True)
    server.run()
    _write_stats(options.number, server.stats())
    return 0


def _serve_members(options: argparse.Namespace, tls: TlsServer | None) -> int:
    """Be the hub of members until SIGTERM or SIGINT."""
    from tacit.stores.hub.hub import Hub

    where = options.host, options.port
    hub = Hub(where, _secret(options.secret_file), _limits(options), tls, options.clip)
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    print(f"{_NAME}: a hub at port {hub.port}{_known(tls)}", file=sys.stderr, flush=True)
    over.wait()
    hub.close()
    return 0


def _known(tls: TlsServer | None) -> str:
    return "" if tls is None else f", with the certificate {tls.fingerprint}"


def _limits(options: argparse.Namespace) -> tuple[int, int]:
    """How many members there must be, and may be."""
    least = 1 if options.min is None else options.min
    return least, max(64, least) if options.max is None else options.max


def _check(options: argparse.Namespace) -> None:
    """Refuse numbers that cannot be."""
    members = options.min is not None or options.max is not None
    if members == (options.workers is not None):
        raise ConfigError(
            "a server has either --workers, how many there are, or --min and --max of members that come and "
            "go: give one of them, such as --min 1 --max 64"
        )
    if members:
        if options.checkpoint is not None or options.modules or options.number:
            raise ConfigError(
                "--checkpoint, --import and --number are for --workers: members keep the state of the "
                "training, and a hub that is started again is filled by them"
            )
        least, most = _limits(options)
        checks.whole("--min", least, 1, None, "it is how many must be there")
        checks.whole("--max", most, least, None, "it is how many may be there, at least --min")
        if options.clip is not None:
            checks.real(
                "--clip", options.clip, "write how many times as much as others, such as 100", above=1
            )
        return
    if options.clip is not None:
        raise ConfigError("--clip is for members (--min, --max): leave it out")
    checks.whole("--workers", options.workers, 1, None, "write how many there are, such as 4")
    checks.whole("--number", options.number, 0, None, "write which server it is, from 0")
    checks.real("--every", options.every, "write seconds, such as 30", above=0)
    if options.timeout is not None:
        checks.real("--timeout", options.timeout, "write seconds, such as 60", above=0)


def _tls(options: argparse.Namespace) -> TlsServer | None:
    if options.tls is not None:
        certificate, key = options.tls
        return TlsServer(certificate, key, options.certificates)
    if options.certificates is not None:
        raise ConfigError("--certificates are shown by TLS alone: give --tls CERTIFICATE KEY, too")
    return None


def _secret(file: Path | None) -> secret.Secret:
    found = secret.find_secret(file)
    if found is None:
        raise ConfigError(
            f"no secret was given by which workers and servers know each other: set {SERVER_SECRET} to the "
            f"same 16 bytes or more for all of them ({secret.MAKE} makes some), or give a file that only you "
            f"can read by --secret-file or {SERVER_SECRET_FILE}"
        )
    return found


def _write_stats(number: int, stats: dict[str, Any]) -> None:
    """Write what the server has counted to the folder that `tacit run` has named, if it has."""
    folder = os.environ.get(FOOTPRINT)
    if folder is not None:
        with spared(f"the servers' counters are not saved in {folder}"):
            put(Path(folder, f"server{number}.json"), json.dumps({"rank": number, **stats}))


def arguments() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {_NAME}", description=__doc__)
    parser.add_argument("--workers", type=int, help="how many there are, such as 4")
    parser.add_argument(
        "--min",
        type=int,
        help="in place of --workers: be the hub of members that come and go, and have them wait until there "
        "are so many, such as 1",
    )
    parser.add_argument("--max", type=int, help="how many members there may be, such as 64")
    parser.add_argument(
        "--clip",
        type=float,
        help="put a member out that pushes more than so many times as much as the others do in the median, "
        "or NaN, such as 100. Where not given, only what has another size than the others' is refused",
    )
    parser.add_argument("--port", type=int, required=True, help="where workers find it, such as 29600")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen on, such as 10.0.0.5, or 0.0.0.0 for all that the machine has; where not "
        "given 127.0.0.1, for workers on this machine alone",
    )
    parser.add_argument(
        "--secret-file",
        type=Path,
        help="file with the secret, which only you can read, such as key",
    )
    parser.add_argument(
        "--tls",
        type=Path,
        nargs=2,
        metavar=("CERTIFICATE", "KEY"),
        help="speak TLS 1.3, with this certificate and its private key, such as --tls hub.pem hub.key; tacit "
        "certificate makes them",
    )
    parser.add_argument(
        "--certificates",
        type=Path,
        help="file with the certificates of the workers that may connect, such as workers.pem; "
        "one that is taken out of it is out at once. Where not given, workers show none",
    )
    parser.add_argument("--number", type=int, default=0, help="which of several servers it is, from 0")
    parser.add_argument(
        "--timeout",
        type=float,
        help="seconds after which a worker that others wait for is gone; where not given, the workers' own: "
        "that of attach(..., timeout=), or of their process group",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="file to save its state to, and to resume from if it is there, such as server0.pt",
    )
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module with compressors of your own, which workers may use then, such as my_codecs; may be "
        "given several times",
    )
    parser.add_argument("--every", type=float, default=30, help="seconds between two saves")
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may still wait for workers that are gone
