"""Make the pictures of the web page in docs/images: `make screenshots`.

    CHROMIUM=PATH PYTHONPATH=tests:scripts python -m screenshots [--view NAME]... [--out DIR]

A real server, real capture agents of simulated engines, the real page in a real Chromium. Ends with
1 and the reason, where the page shows an error or its console has a word.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from playwright.sync_api import Error as BrowserError

from routetrace.client import RouteClient
from routetrace.server.testing import run_server
from support.pages import running_page

from . import reports, views
from .rollouts import RUN, Rollouts

IMAGES = Path(__file__).parents[2] / "docs" / "images"
#: Times as long as planned that the engines may take, on a machine with other work.
_PATIENCE = 4


def main() -> int:
    """Return 0, or 1 if a picture could not be made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--view", action="append", choices=views.VIEWS, help="only this one; may be repeated"
    )
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures")
    parser.add_argument(
        "--seconds", type=int, default=60, metavar="N",
        help="length of the run, 30 at least; the chart of the overview is of 600 (60)",
    )  # fmt: skip
    given = parser.parse_args()
    if given.seconds < 30:
        parser.error(f"--seconds: {given.seconds}: expected 30 or more")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not chromium:
        print("screenshots: Chromium is not there: set CHROMIUM=PATH", file=sys.stderr)
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        take(chromium, given.out, given.view or list(views.VIEWS), given.seconds)
    # The browser's waits fail with AssertionError.
    except (views.Unfit, BrowserError, AssertionError, RuntimeError, TimeoutError) as error:
        print(f"screenshots: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def take(chromium: str, folder: Path, names: list[str], seconds: int) -> None:
    """Fill a server for some seconds and write the pictures of views, all of them or none.

    Raises:
        Unfit: if a picture must not be published.
    """
    begun = time.monotonic()
    with (
        # Short, so that an engine that is killed is soon known to be gone.
        run_server(agent_timeout_seconds=6, heartbeat_seconds=1, store_capacity="2GiB") as server,
        running_page(server.target, runs=(RUN,)) as address,
        views.camera(chromium, address) as camera,
        RouteClient(server.target, run=RUN) as client,
        # Somebody looks at the run from its start: the page has series of what it has seen itself.
        Rollouts(server.target, seconds) as rollouts,
        camera.opened(views.VIEWS["overview"].address, views.LIGHT),
    ):
        rollouts.wait(_PATIENCE * seconds)
        reports.report(client, reports.read(client))
        reports.report_long(client)
        pictures = {
            f"{name}-{theme}.png": camera.take(name, theme)
            for name in dict.fromkeys(names)
            for theme in views.VIEWS[name].themes
        }
    sizes = {name: len(picture) for name, picture in pictures.items()}
    print(*(f"{name}  {size:,} bytes" for name, size in sizes.items()), sep="\n")
    views.check_sizes(sizes)
    for name, picture in pictures.items():
        (folder / name).write_bytes(picture)
    print(f"{sum(sizes.values()):,} bytes in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
