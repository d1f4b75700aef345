"""`tacit probe`: what the links of an emulated cluster carry."""

from __future__ import annotations

from typing import Annotated

import typer

from tacit.files import output, put
from tacit_lab.cli import parsing
from tacit_lab.cli.interrupts import interruptible

_LIMIT = 600.0


def command(
    cluster: Annotated[
        str,
        typer.Option(help="The cluster to emulate, NODESxRANKS@RATE,LATENCY, e.g. 4x1@100mbit"),
    ] = "4x1@100mbit",
    seconds: Annotated[
        float, typer.Option(help="How long a measured transfer takes, in seconds, e.g. 0.5")
    ] = 0.1,
    out: Annotated[
        str | None,
        typer.Option(
            help="Where to save the links, as JSON, e.g. links.json", metavar="FILE", show_default=False
        ),
    ] = None,
    page: Annotated[
        str | None,
        typer.Option(
            help="Where to draw them, as a page for a browser, e.g. links.html",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the links as one line of JSON, e.g. tacit probe --json | jq")
    ] = False,
) -> None:
    """Measure latency and bandwidth between all nodes, and within them: one stream, several, both ways.

    On real machines: torchrun ... -m tacit.probe. E.g. tacit probe --cluster 4x1@100mbit --out links.json
    """
    shape = parsing.cluster(cluster, 0)
    wanted = parsing.seconds("--seconds", seconds, 0.5)
    saved, drawn = parsing.path("--out", out), parsing.path("--page", page)
    for option, path in (("--out", saved), ("--page", drawn)):
        if path is not None:
            output(path, option)
    from tacit.errors import ProbeError
    from tacit.links import Links
    from tacit_lab.reports.links import page as drawing
    from tacit_lab.testbed import Testbed

    found: list[str] = []

    def listen(node: int, line: str) -> None:
        if line.startswith("{"):
            found.append(line)
        elif line.strip():
            typer.echo(f"node {node}: {line}", err=True)

    with interruptible(), Testbed(shape) as bed:
        words = ["-m", "tacit.probe", "--json", "--seconds", str(wanted)]
        result = bed.run(words, on_line=listen, timeout=_LIMIT + 10 * wanted * shape.nodes)
    if result.returncode or len(found) != 1:
        raise ProbeError(f"the links of {cluster} could not be measured: a rank ended with an error")
    links = Links.from_json(found[0])
    typer.echo(found[0] if as_json else str(links))
    if saved is not None:
        links.save(saved)
    if drawn is not None:
        put(drawn, drawing(links, f"tacit probe --cluster {cluster}"))
    for name, path in (("Links", saved), ("Page", drawn)):
        if path is not None:
            typer.echo(f"{name}: {path}", err=as_json)
