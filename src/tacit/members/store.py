"""`python -m tacit.members.store`: the store by which members find each other; it needs torch alone."""

from __future__ import annotations

import argparse
import signal
import threading

from tacit.errors import ConfigError, first_line
from tacit.transports.member_links import served


def main(arguments: list[str] | None = None) -> None:
    """Serve until a signal ends it.

    Raises:
        ConfigError: the port is taken.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tacit.members.store",
        description="Keeps the texts by which replicas find each other. It may be started again: members "
        "that live write themselves in again.",
    )
    parser.add_argument("--host", default="0.0.0.0", help="the address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=29400, help="the port (default: 29400; 0: any free one)")
    given = parser.parse_args(arguments)
    try:
        store = served(given.host, given.port)
    except RuntimeError as error:
        raise ConfigError(f"cannot serve {given.host}:{given.port}: {first_line(error)}") from error
    over = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: over.set())
    print(f"members find each other at port {store.port}", flush=True)
    over.wait()


if __name__ == "__main__":
    main()
