"""How a worker and a bucket begin: what of a worker's first words is refused, and what serves the bucket."""

from __future__ import annotations

from typing import Any

import torch

from tacit.contracts import PayloadSpec
from tacit.errors import AttachError
from tacit.server.averager import Averager
from tacit.server.desks import Enter, Meet, Push
from tacit.server.keeper import Keeper
from tacit.server.limits import check_model, lot_of
from tacit.server.rules import rule_of
from tacit.server.seats import Shard, Spec
from tacit.topologies.star import Asynchronous, Star
from tacit.transports.messages import About, Hello
from tacit.transports.pairs import Header, Kind


def check_place(hello: Hello, number: int, workers: int) -> None:
    """Refuse a worker that is none of this server's, or tells what cannot be.

    Raises:
        AttachError: says why.
    """
    worker = hello.worker
    if hello.workers != workers or not 0 <= worker < workers:
        raise AttachError(
            f"worker {worker} is one of {hello.workers}, and server {number} waits for {workers}: start it "
            f"with --workers {hello.workers}"
        )
    if hello.server != number:
        raise AttachError(
            f"worker {worker} takes server {number} for server {hello.server}: list the servers in the "
            "same order everywhere"
        )
    if not 0 < hello.timeout < 1e9:
        raise AttachError(f"worker {worker} has a time-out of {hello.timeout} s, which is none")
    check_model(hello.about.model, len(hello.about.rules))
    for rule in hello.about.rules:
        rule_of(rule)


def differs(hello: Hello, ours: About) -> str:
    """What of a worker is not as it is with the others."""
    mine, who = hello.about, f"worker {hello.worker}"
    if mine.star != ours.star:
        return f"{who} attaches {mine.star}, and the server keeps {ours.star}: give all the same strategy"
    if mine.rules != ours.rules:
        return f"{who} has the optimizer {mine.rules}, and the server {ours.rules}: give all the same one"
    pairs = zip([*mine.model, None], [*ours.model, None], strict=False)
    one, other = next((a, b) for a, b in pairs if a != b)
    return (
        f"{who} has another model: its {_words(one)} is the server's {_words(other)}. Give all workers the "
        "same model, and start a server with another model without the old --checkpoint"
    )


def _words(parameter: Any) -> str:
    if parameter is None:
        return "end of the parameters"
    name, shape, dtype, *_ = parameter
    return f"parameter {name} of shape {shape} and {dtype}"


def service_of(about: About, workers: int, spec: Spec) -> Averager | Keeper:
    """What serves a bucket, as the first worker that knows of it has declared it.

    Where the server steps, parameters that no rule moves are what workers move by themselves: each pushes how
    far, and nobody waits.
    """
    star = about.star
    assert isinstance(star, Star)
    if star.averages:
        return Averager(workers, spec.key)
    assert spec.back is not None
    if not about.rules:
        return Keeper(workers, star, spec.back, None, spec.key)
    rules = {name: rule for name, *_, rule in about.model}
    number = rules[lot_of(spec.key, frozenset(rules)) or ""]
    if number is None:
        return Keeper(workers, Star(Asynchronous()), spec.back, None, spec.key)
    return Keeper(workers, star, spec.back, rule_of(about.rules[number]), spec.key)


def content(header: Header, spec: Spec, body: Any, shard: Shard) -> object:
    """What a frame says to a service."""
    match header.kind:
        case Kind.PUSH:
            return Push(spec.arriving.unpack(), spec.pieces, spec.pulls, header.lr)
        case Kind.OFFER:
            back: PayloadSpec = shard.service.back
            return Enter(torch.empty(0, dtype=back.dtype) if body is None else body.view(back.dtype))
        case Kind.ENTER:
            return Enter()
        case _:
            return Meet()
