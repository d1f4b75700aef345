"""`tacit certificate`: what a parameter server or a worker shows by TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tacit.errors import ConfigError
from tacit.files import output
from tacit_lab import certificates


def command(
    names: Annotated[
        list[str],
        typer.Argument(
            help="The names and addresses under which it is reached, e.g. hub.example.org 203.0.113.5; of a "
            "worker any one name"
        ),
    ],
    out: Annotated[
        str, typer.Option(help="Where to write NAME.pem, the certificate, and NAME.key, e.g. hub")
    ] = "hub",
    days: Annotated[int, typer.Option(help="For how many days it is valid, e.g. 365")] = 365,
) -> None:
    """Make a certificate that is signed by itself, and its key, for TLS. E.g. tacit certificate 203.0.113.5

    It prints the fingerprint, which others need to know; without the package cryptography, openssl's command.
    """
    from tacit import checks  # loads torch

    checks.whole("--days", days, 1, 36500, "write how many, such as 365")
    unfit = [name for name in names if not name or not name.isascii() or set(name) & set(" ,/:\"'") - {":"}]
    if unfit:
        raise ConfigError(
            f"{unfit[0]!r} is no name or address of a machine: write one such as hub.example.org"
        )
    certificate, key = Path(f"{out}.pem"), Path(f"{out}.key")
    output(certificate, "--out")
    if certificate.exists() or key.exists():
        raise ConfigError(f"{certificate} or {key} is there already, and may be in use: give another --out")
    try:
        certificates.make(names, days, certificate, key)
    except ImportError:
        typer.echo("There is no package cryptography here (pip install 'torch-tacit[tls]'). By openssl:\n")
        typer.echo(certificates.openssl_command(names, days, certificate, key))
        typer.echo(f"openssl x509 -in {certificate} -noout -fingerprint -sha256")
        return
    from tacit.stores.tls import fingerprints

    typer.echo(f"Certificate: {certificate}\nKey: {key}, which nobody else may see")
    typer.echo(f"Fingerprint: {fingerprints(certificate)[0]}")
