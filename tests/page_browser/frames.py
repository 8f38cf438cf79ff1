"""Measure frames while a grid of 100,000 tokens and 94 layers is panned and zoomed.

    CHROMIUM=/usr/bin/chromium python -m page_browser.frames

Prints, for each colouring and zoom, the times between frames and those of drawing, in ms. The data
is made in the browser: 804 rectangles, then as many as a server gives at most, tiles and ids. No
test: a busy machine is no fault.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

from playwright.sync_api import Page, sync_playwright

from routetrace.page.static_files import DIRECTORY, TYPES

#: Pixels of a token, by name.
SCALES = {"whole trace": 0.0, "1 px a token": 1.0, "ids, 28 px a token": 28.0}
COLOURINGS = ("state", "weights", "source", "changed")

_MEASURE = """async ([colouring, scale, rectangles, seconds]) => {
  const { Grid } = await import("/grid.js");
  const tokens = 100000, layers = 94, topK = 8;
  const present = Object.fromEntries(["t0", "t1", "l0", "l1", "version", "source", "attempt",
    "cached"].map((name) => [name, []]));
  const many = rectangles > 10000;
  const step = Math.ceil((2 * tokens) / rectangles);
  for (let t = 0, i = 0; t < tokens; t += step, i += 1)
    for (const [l0, l1] of [[0, 47], [47, 94]]) {
      const one = {
        t0: t, t1: Math.min(tokens - 1, t + step), l0, l1, cached: i % 2,
        version: 410 + Math.floor((i * 6) / (tokens / step)) + (many ? i % 6 : 0),
        source: many ? i % 4 : l0 ? 1 : 0, attempt: t > 71000 ? 1 : 0,
      };
      for (const [name, value] of Object.entries(one)) present[name].push(value);
    }
  const missing = {
    t0: [512, 9871, 41216, 57001], t1: [1024, 9872, 43008, 57002],
    l0: [0, 0, 0, 47], l1: [94, 94, 94, 94],
    reason: ["kv_unknown", "not_captured", "queue_full", "corrupt"],
  };
  const made = (length, most) => Uint8Array.from({ length }, (_, i) => (i * 40503 >>> 7) % most);
  const bytes = made(256 * layers, 255);
  const ids = made(64 * layers * topK, 128);
  const valid = new Uint8Array(64 * layers).fill(1);
  const source = {
    key: 1, tokens, numRows: tokens - 1, promptLen: 2048, topK, numExperts: 128, levels: 10,
    layerIds: Array.from({ length: layers }, (_, i) => i),
    segments: { present, missing }, values: ["changed"],
    tile: async () => bytes, rows: async () => ({ ids, valid }),
  };
  const draws = [];
  const grid = new Grid({
    label: "", onCell() {}, onTrouble() {}, onMove() {}, onDraw: (ms) => draws.push(ms),
  });
  document.body.replaceChildren(grid.element);
  grid.setSource(source);
  grid.setColouring(colouring);
  const v = grid.viewport;
  await new Promise((done) => setTimeout(done, 100));
  v.start = tokens * 0.4; v.scale = scale; v.top = 20; v.moved();
  await new Promise((done) => setTimeout(done, 600));
  draws.length = 0;
  const gaps = [], began = performance.now();
  let last = began;
  await new Promise((done) => {
    const turn = (now) => {
      gaps.push(now - last); last = now;
      const t = (now - began) / 1000;
      v.pan(22 * Math.cos(t * 0.8) + 6, 5 * Math.sin(t));
      v.zoom(Math.exp(0.006 * Math.sin(t * 1.7)));
      if (t < seconds) requestAnimationFrame(turn); else done();
    };
    requestAnimationFrame(turn);
  });
  grid.stop();
  return [gaps.slice(2), draws];
}"""


class _Files(SimpleHTTPRequestHandler):
    """The page's files, as they lie, and an empty document with its styles."""

    extensions_map = TYPES

    def do_GET(self) -> None:
        if self.path != "/empty":
            return super().do_GET()
        body = (
            b'<!doctype html><html lang="en"><link rel="stylesheet" href="frame.css">'
            b'<link rel="stylesheet" href="trace.css"><body></body></html>'
        )
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _figures(values: list[float]) -> str:
    parts = statistics.quantiles(values, n=100)
    return " / ".join(f"{v:5.1f}" for v in (parts[49], parts[94], parts[98], max(values)))


def _measure(page: Page, seconds: float) -> None:
    print("p50 / p95 / p99 / max, ms", flush=True)
    for rectangles in (804, 20_000):
        for colouring in COLOURINGS:
            for name, scale in SCALES.items():
                gaps, draws = page.evaluate(_MEASURE, [colouring, scale, rectangles, seconds])
                print(
                    f"{rectangles:6} rectangles  {colouring:8} {name:19} "
                    f"frames {_figures(gaps)}   drawing {_figures(draws)}",
                    flush=True,
                )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4)
    seconds = parser.parse_args().seconds
    handler = partial(_Files, directory=str(DIRECTORY))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ["CHROMIUM"], args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"http://127.0.0.1:{server.server_port}/empty")
        _measure(page, seconds)
        browser.close()
    server.shutdown()


if __name__ == "__main__":
    main()
