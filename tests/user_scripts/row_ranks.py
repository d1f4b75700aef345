"""Runs rows of the table: two ranks for each, forked from this process, which has imported all.

A line of JSON on stdin names a row and a family; the answer is one of what became of each rank. A pair of
processes of its own costs a tenth of a second, and no row can harm the next.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist
from all_rows import TABLE

from tacit.errors import TacitError

WORLD = 2
ANSWER = timedelta(seconds=30)
"""That a peer may take."""
LIMIT, GRACE = 120.0, 45.0
"""Seconds for a row, and for one rank when the other has ended with an error."""


def outcome(name: str, family: str) -> dict[str, Any]:
    """Run it on this rank."""
    said: list[str] = []
    ear = logging.Handler(logging.WARNING)
    ear.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tacit").addHandler(ear)
    try:
        TABLE[name].run(family)
    except Exception as error:
        ours = isinstance(error, TacitError)
        return {"error": str(error), "ours": ours, "said": said, "trace": traceback.format_exc()}
    return {"error": None, "ours": False, "said": said, "trace": ""}


def rank_main(
    rank: int, listener: socket.socket, out: int, log: IO[bytes], name: str, family: str
) -> NoReturn:
    """A rank, from its fork to its end, which its parent makes."""
    os.setpgrp()
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    faulthandler.dump_traceback_later(LIMIT - 5)
    port = listener.getsockname()[1]
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": WORLD,
        "LOCAL_WORLD_SIZE": WORLD,
        "GROUP_RANK": 0,
    }
    os.environ.update({key: str(value) for key, value in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    try:
        given = {"master_listen_fd": listener.detach()} if rank == 0 else {}
        store = dist.TCPStore(
            "127.0.0.1", port, WORLD, rank == 0, timeout=ANSWER, wait_for_workers=False, **given
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=ANSWER)
        told = outcome(name, family)
    except BaseException:
        told = {"error": "not even begun", "ours": False, "said": [], "trace": traceback.format_exc()}
    os.write(out, json.dumps(told).encode() + b"\n")
    while True:
        signal.pause()  # the store is rank 0's


def ran(name: str, family: str) -> dict[str, Any]:
    """What became of each rank."""
    begun = time.monotonic()
    pipes = [os.pipe() for _ in range(WORLD)]
    ranks: list[int] = []
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener, tempfile.TemporaryFile() as log:
        for rank, (_, out) in enumerate(pipes):
            pid = os.fork()
            if pid == 0:
                rank_main(rank, listener, out, log, name, family)
            ranks.append(pid)
        try:
            for _, out in pipes:
                os.close(out)
            told = answers([mine for mine, _ in pipes])
        finally:
            for pid in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            for mine, _ in pipes:
                os.close(mine)
        if None in told:
            log.seek(0)
            print(log.read().decode(errors="replace")[-8000:], file=sys.stderr, flush=True)
    return {"ranks": told, "seconds": time.monotonic() - begun}


def answers(pipes: list[int]) -> list[dict[str, Any] | None]:
    """One a rank; None of a rank that has died, or did not end in time."""
    parts = dict.fromkeys(pipes, b"")
    until = time.monotonic() + LIMIT
    with selectors.DefaultSelector() as ready:
        for pipe in pipes:
            ready.register(pipe, selectors.EVENT_READ)
        while ready.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in ready.select(left):
                data = os.read(key.fd, 1 << 16)
                parts[key.fd] += data
                if not data or parts[key.fd].endswith(b"\n"):
                    ready.unregister(key.fd)
                    if not data or json.loads(parts[key.fd])["error"] is not None:
                        until = min(until, time.monotonic() + GRACE)
    return [json.loads(part) if part.endswith(b"\n") else None for part in parts.values()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(ran(*json.loads(line))), flush=True)
