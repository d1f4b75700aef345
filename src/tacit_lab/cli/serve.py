"""`tacit serve`: the hub of members that come and go, and who is there."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tacit.environment import HUB
from tacit.errors import TestbedError

if TYPE_CHECKING:
    from tacit.stores.hub.link import HubLink

_SECONDS = 10.0


def command(
    least: Annotated[
        int, typer.Option("--min", help="Have members wait until there are so many, e.g. 2")
    ] = 1,
    most: Annotated[int, typer.Option("--max", help="How many there may be, e.g. 8")] = 64,
    host: Annotated[
        str, typer.Option(help="The address to listen on; for all that the machine has, e.g. 0.0.0.0")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where members find it, e.g. 29600")] = 29600,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the secret, which only you can read, e.g. secret; by default "
            "TACIT_SERVER_SECRET, or the file that TACIT_SERVER_SECRET_FILE names",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    tls: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="CERTIFICATE KEY",
            help="Speak TLS 1.3, with what tacit certificate has made, e.g. --tls hub.pem hub.key",
            show_default=False,
        ),
    ] = None,
    certificates: Annotated[
        Path | None,
        typer.Option(
            help="File with the certificates of the members that may connect, e.g. members.pem",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option(
            help="Put a member out that pushes more than so many times as much as the others do in the "
            "median, or NaN, e.g. 100",
            show_default=False,
        ),
    ] = None,
    status: Annotated[
        bool,
        typer.Option(
            "--status",
            help="Ask the hub that runs, at TACIT_HUB or else at --host and --port, who is there; it needs "
            "the secret, and TACIT_TLS where there is TLS, e.g. tacit serve --status",
        ),
    ] = False,
) -> int:
    """Be the hub of members that come and go: python -m tacit.stores.server. E.g. tacit serve --min 2 --max 8

    It ends by Ctrl-C or SIGTERM. Members keep what is trained, and fill a hub that is started again.
    """
    if status:
        _print_status(f"{host}:{port}", secret_file)
        return 0
    from tacit.stores.server.__main__ import main  # it imports torch

    words = ["--min", str(least), "--max", str(most), "--host", host, "--port", str(port)]
    words += [] if secret_file is None else ["--secret-file", str(secret_file)]
    words += [] if tls is None else ["--tls", *map(str, tls)]
    words += [] if clip is None else ["--clip", str(clip)]
    words += [] if certificates is None else ["--certificates", str(certificates)]
    return main(words)


def _print_status(here: str, secret_file: Path | None) -> None:
    """Who takes part, by the hub's texts; of several hubs that share out, by those of the first.

    Raises:
        TestbedError: it cannot be reached.
    """
    if secret_file is not None:
        from tacit.environment import SERVER_SECRET_FILE

        os.environ[SERVER_SECRET_FILE] = str(secret_file)
    hubs = os.environ.get(HUB, here).split("+")
    with ExitStack() as over:
        links = [_linked(each, (i + 1, len(hubs)), over) for i, each in enumerate(hubs)]
        for line in _lines(links[0]):
            typer.echo(line)
        for i, link in enumerate(links[1:]):
            typer.echo(f"{link.name}: hub {i + 2} of {len(hubs)}")


def _linked(text: str, place: tuple[int, int], over: ExitStack) -> HubLink:
    from tacit.stores.hub.link import HubWay

    way = HubWay(text, place, trains=False)
    try:
        link = way.connected(_SECONDS)
    except RuntimeError as error:
        raise TestbedError(f"{way.name} cannot be asked: {error}. Is it there? {HUB} names it") from error
    over.callback(link.close)
    return link


def _lines(link: HubLink) -> list[str]:
    from tacit.members.lives import life_key
    from tacit.members.record import GONE, Life, Period
    from tacit.members.roster import arrivals

    least, most = json.loads(link.get("limits"))
    period = Period.of(link.get("period").decode()) if link.check(["period"]) else Period()
    found = [f"{link.name}: period {period.number}, {len(period.members)} members (min {least}, max {most})"]
    for each in period.members:
        key = life_key(each.id, 0)
        life = Life(**json.loads(link.get(key))) if link.check([key]) else Life(step=each.step)
        extra = f", {life.extra} more beyond its periods" if life.extra else ""
        unsent = f", {life.unsent} since its last round" if life.unsent else ""
        gone = ", gone" if life.waits == GONE else ""
        found.append(f"  {each.name}: step {life.step}{extra}{unsent}{gone}")
    (said,) = link.multi_get([f"arrived/{period.number + 1}"])
    waiting = arrivals(said.decode())
    ended = link.ask("gone", [f"{id}/0" for id in waiting])
    names = [each.name for id, each in waiting.items() if f"{id}/0" not in ended]
    return found + [f"  {name} waits for period {period.number + 1}" for name in names]
