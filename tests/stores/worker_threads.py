"""Workers in threads, at servers in threads of this process: how they join, and push."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from shared_secret import SECRET
from torch import Tensor

from in_threads import in_threads
from tacit.compressors import Dense
from tacit.contracts import AxisRank, PayloadSpec, PushPull
from tacit.stores.client.server_connection import ServerClient
from tacit.stores.messages import RunSpec
from tacit.stores.secret import Secret
from tacit.stores.server.process import ServerProcess
from tacit.stores.tls import TlsWorker
from tacit.topologies import Star

N = 1000
PIECE = PayloadSpec(Dense(), N, torch.float32)
BACK = PayloadSpec(None, N, torch.float32)
MODEL = (("a", (N,), "float32", None),)


def join(
    host: ServerProcess,
    worker: int,
    workers: int = 2,
    star: Star | None = None,
    *,
    model: Any = MODEL,
    number: int = 0,
    seconds: float = 20,
    secret: Secret = SECRET,
    tls: TlsWorker | None = None,
) -> ServerClient:
    run = RunSpec(star or Star(), (), model)
    place, patience = AxisRank(worker, workers), timedelta(seconds=seconds)
    return ServerClient(number, ("127.0.0.1", host.port), place, patience, run, secret, tls)


def push(server: ServerClient, x: Tensor) -> Tensor:
    asked = server.post(PushPull(((x,),), (PIECE,), (BACK,)), "a/0")
    assert asked.done.wait(30)
    ((answer,),) = asked.answer()
    return answer.clone()


def each(*calls: Callable[[], object]) -> list[object]:
    """All at once, each in a thread; their results, or what they raised."""

    def outcome(i: int) -> object:
        try:
            return calls[i]()
        except Exception as error:
            return error

    return in_threads(len(calls), outcome, seconds=60)
