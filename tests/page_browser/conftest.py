"""A server with known traces, a page of it, and a browser in which nothing may go wrong unseen.

The tests need Chromium and playwright, which `make test-page` provides: without the path of a
browser in CHROMIUM this folder has no tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest

from routetrace.client import Agreement, RouteClient
from routetrace.client.agreement import Choices
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import ServerProcess, run_server
from support.agents.feeder import Feeder
from support.pages import running_page

CHROMIUM = os.environ.get("CHROMIUM", "")
if CHROMIUM:
    from playwright.sync_api import BrowserContext, Page, sync_playwright

    from .watched import WAIT_MS, Watched
    from .watched import open_trace as open_trace_of
else:
    collect_ignore_glob = ["test_*.py"]

LAYOUT = ModelLayout((1, 2, 4, 5), 6, 300, 3)
NUM_TOKENS = 100_000
CHUNK = 16_384
#: A weight version that a JavaScript number would round.
LARGE_VERSION = 2**60 + 1
#: Ranges of positions of the trace "holes" that no agent reported; the second is one token.
HOLES = ((512, 1024), (61_803, 61_804), (90_000, 92_048))
#: Ids that an address, a page, a shell or a reader could take for something else.
ODD_IDS = (
    '<img src=x onerror="alert(1)">',
    "</script><script>alert(2)</script>",
    "user\u202egnp.exe",
    "/ # ? % & = + %00 ..",
    "a'b\"c\\d\ne\u200bf",
    "y" * 512,
)
ODD_ENGINE = "<u>" + "w" * 120
ODD_LABELS = {"<b>k": "\u202egnp", "x</script>": "<i>" + "z" * 200}


def rows_of(count: int) -> np.ndarray:
    """Ids [count, layers, top_k]: three neighbours from a place that position and layer give."""
    first = np.arange(count)[:, None] * 7 + np.arange(4)[None, :] * 31
    return ((first[:, :, None] + np.arange(3)) % 300).astype(np.uint16)


ROWS = rows_of(NUM_TOKENS)


def _feed(feeder: Feeder, name: str, tokens: int, holes=(), reason: str = "stop", **begin) -> None:
    handle = feeder.begin(name, prompt_len=min(40, tokens - 1), **begin)
    at = 0
    for version, (start, stop) in enumerate([*holes, (tokens - 1, tokens - 1)], 410):
        feeder.set_weight_version(version)
        for first in range(at, start, CHUNK):
            rows = ROWS[first : min(first + CHUNK, start)]
            feeder.step(rows, [[handle, first, len(rows)]])
        at = stop
    feeder.finish(handle, tokens, reason=reason)
    feeder.flush()


def _feed_loaded(feeder: Feeder) -> None:
    """A trace whose prompt was loaded from elsewhere, but for its end."""
    handle = feeder.begin(
        "loaded", prompt_len=200, num_computed_tokens=128, num_external_tokens=128
    )
    feeder.step(ROWS[128:250], [[handle, 128, 122]])
    feeder.finish(handle, 251)
    feeder.flush()


#: Reported training steps, two of them alone and some left out; the first with other weights; the
#: first that is worse, and the layers that are.
STEPS = (*range(100, 130), 140, *range(150, 160))
UPDATE = 4
WORSE, WORSE_LAYERS = 120, (2, 4)
ODD_WORDS = "<img src=x onerror=alert(3)>\u202erows are shifted"


def agreement_at(step: int) -> Agreement:
    """Layer 5 has no cells in the last step."""
    layers = {
        layer: Choices(1000, 300 + step % 7 if step >= WORSE and layer in WORSE_LAYERS else 5, 0, 0)
        for layer in LAYOUT.layer_ids
    }
    if step == STEPS[-1]:
        layers[5] = Choices()
    rows = {step // UPDATE - age: Choices(1000 - 100 * age, 10 * age, 0, 0) for age in range(3)}
    return Agreement(by_layer=layers, by_version=rows, tokens=400, differing_tokens=step % 400)


def report(client: RouteClient) -> None:
    """Report all steps; the last one with odd words, and with odd ids."""
    for step in STEPS:
        last = step == STEPS[-1]
        client.report_agreement(
            step,
            agreement_at(step),
            weight_version=step // UPDATE,
            diagnosis=ODD_WORDS if last else "",
            trace_ids=ODD_IDS[:3] if last else (),
        )


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """Run "r": large traces with and without holes, odd ids, an incarnation that was aborted."""
    with run_server(agent_timeout_seconds=3600) as server:
        feeder = Feeder(server.target, LAYOUT, run="r")
        _feed(feeder, "whole", NUM_TOKENS)
        _feed(feeder, "holes", NUM_TOKENS, HOLES)
        _feed(feeder, "one hole", NUM_TOKENS, HOLES[1:2])
        _feed(feeder, "short", 60, labels={"task": "math"})
        for name in ODD_IDS:
            _feed(feeder, name, 60, labels=ODD_LABELS)
        _feed_loaded(feeder)
        feeder.finish(feeder.begin("no rows", prompt_len=1), 1)
        _feed(feeder, "whole blocks", 129)
        feeder.begin("just begun", prompt_len=7)
        feeder.set_weight_version(LARGE_VERSION)
        handle = feeder.begin("large version", prompt_len=7)
        feeder.step(ROWS[:20], [[handle, 0, 20]])
        feeder.finish(handle, 21)
        handle = feeder.begin("twice", prompt_len=10)
        feeder.step(ROWS[:50], [[handle, 0, 50]])
        feeder.finish(handle, 200, reason="abort")
        _feed(feeder, "twice", 81)
        feeder.close()
        with RouteClient(server.target, run="r") as client:
            report(client)
        other = Feeder(server.target, LAYOUT, run="second run", engine_id=ODD_ENGINE)
        _feed(other, "elsewhere", 30)
        other.close()
        yield server


@pytest.fixture(scope="session")
def address(server: ServerProcess) -> Iterator[str]:
    with running_page(server.target) as address:
        yield address.rstrip("/")


if CHROMIUM:

    @pytest.fixture(scope="session")
    def chromium() -> Iterator[object]:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
            yield browser
            browser.close()

    @pytest.fixture
    def context(chromium) -> Iterator[BrowserContext]:
        context = chromium.new_context(
            viewport={"width": 1440, "height": 900},
            color_scheme="light",
            permissions=["clipboard-read", "clipboard-write"],
        )
        context.set_default_timeout(WAIT_MS)
        yield context
        context.close()

    @pytest.fixture
    def watched(context, address: str) -> Iterator[Watched]:
        """A tab. Fails the test for a dialog, a word in the console, or a request elsewhere."""
        watched = Watched(context.new_page(), {urlsplit(address).netloc})
        yield watched
        watched.check()

    @pytest.fixture
    def page(watched: Watched) -> Page:
        return watched.page

    @pytest.fixture
    def open_trace(page: Page, address: str):
        """Open a trace by its id; wait for its grid."""
        return lambda trace_id, more="": open_trace_of(page, address, trace_id, more)
