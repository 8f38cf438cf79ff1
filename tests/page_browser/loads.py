"""Measure the page over a server with 100,000 traces, and the cost of open tabs to ingest.

    CHROMIUM=/usr/bin/chromium python -m page_browser.loads [--traces 100000] [--rounds 4]

Server, page, load and tabs are processes of their own. Prints how long the first list after a
start of the server takes, how long Chromium takes to open each view and to jump through the list,
and rows stored a second and times of acknowledgements, in turns without and with five tabs. A tab
asks as the overview does, in a process of lower priority, as the browsers of users are on other
machines. No test: a busy machine is no fault.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, expect, sync_playwright

from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server
from support.agents.feeder import Feeder
from support.pages import Browser

SMALL = ModelLayout((1, 2, 4, 5), 6, 64, 4)
LARGE = ModelLayout(tuple(range(94)), 94, 128, 8)
TOKENS = 100_000
TABS = 5
_OPEN_TAB = "import sys; from page_browser.loads import tab; tab(*sys.argv[1:])"


def tab(address: str, run: str) -> None:
    """Ask as a tab with the overview does, until the process is ended."""
    browser, tag = Browser(address), {}
    while True:
        path = f"/api/v1/runs/{run}/overview"
        answer = browser.call(path, headers=tag)
        tag = {"If-None-Match": answer.headers.get("ETag")} if answer.headers.get("ETag") else {}
        time.sleep(2)


def feed_small(target: str, count: int) -> None:
    """Store so many traces of a few rows each."""
    feeder = Feeder(target, SMALL, run="many")
    rows = np.random.default_rng(0).random((40, 4, 64)).argsort(axis=2)[..., :4].astype(np.uint8)
    for number in range(count):
        feeder.set_weight_version(number // 1000)
        labels = {"task": ("math", "code")[number % 2]}
        handle = feeder.begin(f"task-{number:06d}-s{number % 4}", prompt_len=9, labels=labels)
        feeder.step(rows, [(handle, 0, 40)])
        feeder.finish(handle, 41)
        if number % 50 == 49:
            feeder.flush()
    feeder.close()


def feed_large(target: str) -> None:
    """Store a trace of 100,000 tokens and 94 layers, with holes."""
    feeder, draw = Feeder(target, LARGE, run="large"), np.random.default_rng(1)
    handle = feeder.begin("large", prompt_len=2048)
    for start in range(0, TOKENS - 1, 512):
        if start in (5120, 40_960):
            continue
        count = min(512, TOKENS - 1 - start)
        feeder.set_weight_version(412 + start // 20_000)
        rows = draw.random((count, 94, 128), np.float32).argpartition(8, axis=2)[..., :8]
        feeder.step(rows.astype(np.uint8), [(handle, start, count)])
        feeder.flush()
    feeder.finish(handle, TOKENS)
    feeder.close()


@contextmanager
def page_process(target: str) -> Iterator[str]:
    """Run the page at a lower priority, as the server does; yield its address."""
    words = [sys.executable, "-m", "routetrace.page", "--target", target, "--listen", "127.0.0.1:0"]
    words += ["--run", "many", "--run", "large", "--run", "live"]
    with tempfile.TemporaryFile("w+") as log:
        page = subprocess.Popen(["nice", *words], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert page.stdout is not None
            address = next(word for line in page.stdout for word in line.split() if "http" in word)
            yield address.rstrip("/")
        finally:
            page.terminate()
            page.wait(30)


def first_look(address: str, traces: int) -> float:
    """Return the seconds until the list of all traces is whole."""
    browser, began = Browser(address), time.monotonic()
    while True:
        found = browser.call("/api/v1/runs/many/traces?limit=1").json
        if found.get("whole") and found["total"] == traces:
            return time.monotonic() - began
        time.sleep(0.1)


def _p50(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):6.0f} ms (p50 of {len(seconds)})"


def views(page: Page, address: str, traces: int) -> None:
    """Print how long views take from their address to what is seen."""
    for name, where, seen in (
        ("overview", "#/overview?run=many", ".figures .value"),
        (f"list of {traces:,}", "#/traces?run=many", ".row"),
        (f"trace of {TOKENS:,} x 94", "#/trace?run=large&id=large", "canvas.plot"),
    ):
        times = []
        for _ in range(15):
            page.goto("about:blank")
            began = time.monotonic()
            page.goto(f"{address}/{where}")
            page.locator(seen).first.wait_for()
            times.append(time.monotonic() - began)
        print(f"{name:32} {_p50(times)}", flush=True)
    page.goto(f"{address}/#/traces?run=many&sort=id&order=asc")
    rows = page.locator(".row")
    rows.first.wait_for()
    page.wait_for_load_state("networkidle")
    rows.first.get_by_role("link").focus()
    times = []
    for number in range(10):
        key, last = ("End", traces - 1) if number % 2 == 0 else ("Home", 0)
        began = time.monotonic()
        page.keyboard.press(key)
        expect(page.get_by_role("link", name=f"task-{last:06d}-s{last % 4}")).to_be_visible()
        times.append(time.monotonic() - began)
    print(f"{'list, from end to end':32} {_p50(times)}; {rows.count()} rows are drawn", flush=True)


def ingest(target: str, seconds: float, number: int) -> tuple[float, list[float]]:
    """Store chunks one after another; return rows a second, and seconds of each acknowledgement."""
    feeder = Feeder(target, SMALL, run="live", engine_id=f"e{number}")
    rows = np.tile(np.arange(4, dtype=np.uint8), (256, 4, 1))
    times: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        handle = feeder.begin(f"live-{number}-{len(times)}", prompt_len=9)
        feeder.step(rows, [(handle, 0, 256)])
        feeder.finish(handle, 257)
        began = time.monotonic()
        feeder.flush()
        times.append(time.monotonic() - began)
    feeder.close()
    return 256 * len(times) / seconds, times


def beside_tabs(target: str, address: str, rounds: int, seconds: float) -> None:
    """Print what open tabs cost, in turns."""
    ratios = []
    for number in range(rounds):
        figures = []
        for count in (0, TABS):
            words = ["nice", "-n", "19", sys.executable, "-c", _OPEN_TAB, address, "live"]
            tabs = [subprocess.Popen(words) for _ in range(count)]
            time.sleep(6)
            rate, times = ingest(target, seconds, 2 * number + (count > 0))
            for one in tabs:
                one.kill()
                one.wait(30)
            figures.append((rate, statistics.quantiles(times, n=100)[98]))
            print(f"{count} tabs: {rate:9,.0f} rows/s, ack p99 {1000 * figures[-1][1]:6.2f} ms")
        ratios.append((figures[1][0] / figures[0][0], figures[1][1] / figures[0][1]))
    rates, waits = zip(*ratios, strict=True)
    print(
        f"{TABS} tabs against none, median of {rounds}: rows/s {statistics.median(rates):.3f} "
        f"[{min(rates):.3f}, {max(rates):.3f}], ack p99 {statistics.median(waits):.2f} "
        f"[{min(waits):.2f}, {max(waits):.2f}]",
        flush=True,
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        settings = {"agent_timeout_seconds": 3600}
        with run_server(data_dir=data, **settings) as server:
            feed_small(server.target, args.traces)
            feed_large(server.target)
        # A server that has just started knows no summary yet.
        with (
            run_server(data_dir=data, timeout=300, **settings) as server,
            page_process(server.target) as address,
        ):
            print(f"first list: {first_look(address, args.traces):.1f} s", flush=True)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=os.environ["CHROMIUM"], args=["--no-sandbox", "--disable-gpu"]
                )
                page = browser.new_page(viewport={"width": 1440, "height": 900})
                views(page, address, args.traces)
                browser.close()
            beside_tabs(server.target, address, args.rounds, args.seconds)


if __name__ == "__main__":
    main()
