"""Start of the page, where the packages that it needs may be missing."""

from __future__ import annotations

from collections.abc import Callable

from routetrace.client import RouteClient
from routetrace.common.errors import InvalidArgument, MissingDependency, RouteTraceError
from routetrace.page.config import PageConfig

_PACKAGES = ("starlette", "uvicorn", "cryptography")
#: Seconds for the server to answer a caller without a token.
_PROBE_S = 2.0


def start(config: PageConfig, ready: Callable[[str], None]) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Args:
        config: settings of the page.
        ready: called with the page's address once it listens.

    Raises:
        MissingDependency: if the extra `page` is not installed.
        InvalidArgument: if other machines could reach the page, and the server needs no token.
        RouteTraceError: as `routetrace.page.serving.Page`.
    """
    try:
        from routetrace.page.serving import Page
    except ImportError as error:
        lacking = (error.name or "").partition(".")[0]
        if lacking not in _PACKAGES:
            raise
        install = "pip install '.[page]' in a checkout"
        raise MissingDependency(
            f"{lacking} is not installed: {install}", package=lacking, install=install
        ) from error
    _check_tokens(config)
    page = Page(config)
    ready(page.address)
    page.run()


def _check_tokens(config: PageConfig) -> None:
    """Refuse a server without tokens; one that is away is asked again at each sign-in."""
    if not config.needs_tokens:
        return
    with RouteClient(config.target, security=config.security) as client:
        try:
            client.server_info(timeout=_PROBE_S)
        except InvalidArgument:
            raise
        except RouteTraceError:  # it asks for a token, or is away
            return
    raise config.exposed("tokens_file at the server")
