"""`python -m routetrace.page`: the page without the `routetrace` command and its packages."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading

from routetrace.common.errors import InvalidArgument, RouteTraceError
from routetrace.common.security import Security
from routetrace.common.version import installed_version
from routetrace.page.config import DEFAULT_LISTEN, DEFAULT_TARGET, PageConfig
from routetrace.page.start import start

#: Priority below that of the server, whose child this is.
_NICE = 10


def _end_with_input() -> None:
    """Stop the page once the server that holds the other end of standard input has ended."""
    while os.read(0, 1 << 12):  # not of the buffered stream, which ends the interpreter badly
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Serve the page until it is stopped; exit with 1 if it cannot, 2 for a wrong argument."""
    # Errors of gRPC are reported as ours; its log lines are for developers.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    parser = argparse.ArgumentParser(
        prog="python -m routetrace.page",
        description="Serve the web page of a routetrace-server.",
        epilog="TLS to the server: ROUTETRACE_TLS, ROUTETRACE_CA_FILE and so on; docs/page.md.",
    )
    add = parser.add_argument
    target = os.environ.get("ROUTETRACE_TARGET") or DEFAULT_TARGET
    add("--target", metavar="HOST:PORT", default=target, help="server")
    add("--shown-target", metavar="HOST:PORT", default="", help="name of the server in texts")
    add("--listen", metavar="HOST:PORT", default=DEFAULT_LISTEN, help="address to listen on")
    add("--run", action="append", default=[], metavar="RUN", help="run to show; several; or all")
    add("--host", action="append", default=[], metavar="HOST", help="further name of the page")
    add("--insecure", action="store_true", help="allow other machines without TLS or tokens")
    add("--tls-cert", metavar="FILE", default="", help="PEM file of the page's certificate")
    add("--tls-key", metavar="FILE", default="", help="PEM file of its key")
    add(
        "--child",
        action="store_true",
        help="end when standard input ends, and leave the processor to others; for the server",
    )
    add("--version", action="version", version=installed_version())
    given = parser.parse_args()
    if given.child:
        os.nice(_NICE)
        threading.Thread(target=_end_with_input, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = PageConfig(
            target=given.target,
            shown_target=given.shown_target,
            listen=given.listen,
            runs=tuple(given.run),
            hosts=tuple(given.host),
            insecure=given.insecure,
            tls_cert=given.tls_cert,
            tls_key=given.tls_key,
            security=Security.from_environment(),
        )
        start(config, lambda address: print(address, flush=True))
    except RouteTraceError as error:
        print(f"routetrace.page: {error.message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InvalidArgument) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
