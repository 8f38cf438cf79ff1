"""`routetrace page`: the web page of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routetrace.cli.arguments import AsJson
from routetrace.cli.connection import Connection
from routetrace.cli.output import note, write_json
from routetrace.page.config import DEFAULT_LISTEN, PageConfig
from routetrace.page.start import start


def page(
    connection: Connection,
    listen: Annotated[
        str, typer.Option(help="Address to listen on; port 0 picks a free port.")
    ] = DEFAULT_LISTEN,
    run: Annotated[
        list[str] | None,
        typer.Option(help="Run to show; several: these; all that a token covers if none is given."),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Further name of this machine, host or host:port, in addresses of the page, such "
            "as that of a tunnel; several: each of them."
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="PEM file of the page's certificate and its chain; enables HTTPS."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="PEM file of the private key of --tls-cert.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow other machines without TLS or tokens.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Serve a web page of the server's traces, until Ctrl-C.

    A server with tokens asks each person for theirs, in the browser; that of the command is not
    used.
    """
    config = PageConfig(
        target=connection.target,
        listen=listen,
        runs=tuple(run or ()),
        hosts=tuple(host or ()),
        insecure=insecure,
        timeout=connection.timeout,
        tls_cert=str(tls_cert or ""),
        tls_key=str(tls_key or ""),
        security=connection.security,
    )

    def ready(address: str) -> None:
        if as_json:
            write_json({"address": address, "target": config.target})
        else:
            print(address, flush=True)
            note(f"the page of {config.target}; Ctrl-C ends it")

    start(config, ready)
