"""`routetrace view`: the file holds the trace, and nothing that a browser would fetch or parse."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routetrace.client import InvalidArgument, RouteClient, Trace, TraceDescription
from routetrace.page import one_file
from routetrace.page.one_file import joining
from routetrace.page.segments import segments_of
from routetrace.page.tiles import changed, differing
from routetrace.server.testing import ServerProcess, run_server
from routetrace.trainers.comparison import compare_traces
from support.agents.feeder import Feeder
from support.commands import commands
from support.servers.client_server import LAYOUT, WIDE, rows_of

ODD = '</template></script><img src=x onerror="alert(1)">\u202e'
HOLE = (1000, 1300)
ROWS = 4000


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server(agent_timeout_seconds=3600) as server:
        for name, layout in (("narrow", LAYOUT), ("wide", WIDE)):
            feeder = Feeder(server.target, layout, run="view", engine_id=name)
            ids = rows_of(layout, ROWS)
            handle = feeder.begin(name, prompt_len=5, labels={"odd": ODD})
            for start, stop in ((0, HOLE[0]), (HOLE[1], ROWS)):
                feeder.step(ids[start:stop], [[handle, start, stop - start]])
            feeder.finish(handle, ROWS + 1)
            if name == "narrow":
                handle = feeder.begin(ODD, prompt_len=5)
                feeder.step(ids[:20], [[handle, 0, 20]])
                feeder.finish(handle, 21)
                feeder.finish(feeder.begin("empty", prompt_len=1), 1)
                handle = feeder.begin("reported", prompt_len=5)
                feeder.step(ids[:300], [[handle, 0, 300]])
                feeder.preempt(handle, 300)
                feeder.resume(handle, 0)
                feeder.step(ids[1:301], [[handle, 0, 300]])
                feeder.finish(handle, 301)
            feeder.close()
        with RouteClient(server.target, run="view") as client:
            # A report of some positions alone, one of which differs in a layer.
            ids = rows_of(LAYOUT, ROWS)[50:200]
            ids[30, 2] = (ids[30, 2] + 1) % LAYOUT.num_experts
            client.report_routing("reported", ids, token_start=50, step=7)
        yield server


@pytest.fixture
def cli(server, monkeypatch):
    return commands(monkeypatch, server.target, "view")


def read(server: ServerProcess, trace_id: str) -> Trace:
    return described(server, trace_id)[0]


def described(server: ServerProcess, trace_id: str) -> tuple[Trace, TraceDescription]:
    with RouteClient(server.target, run="view") as client:
        return client.get(trace_id, missing="mask"), client.describe(trace_id)


class Page(HTMLParser):
    """Elements of a file, and the text of each."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._in: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self._in.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._in.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._in:
            self.texts[self._in[-1]] = self.texts.get(self._in[-1], "") + data


@dataclass
class Data:
    """The data of a file, as its documentation lays it out."""

    header: dict[str, Any]
    tiles: list[list[bytes]]
    rows: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]
    other: Data | None = None
    """Tiles and rows of the other side."""


def data_of(page: Page) -> Data:
    body = gzip.decompress(base64.b64decode(page.texts["template"]))
    (size,) = struct.unpack_from("<I", body)
    header = json.loads(body[4 : 4 + size])
    at = 4 + size

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        assert at <= len(body)
        return body[at - count : at]

    layers, top_k = len(header["facts"]["layer_ids"]), header["facts"]["top_k"]
    sides = []
    for _ in range(1 + ("other" in header)):
        tiles = [[take(layers * 256) for _ in range(count)] for count in header["tiles"]]
        rows = {}
        for start, stop in header["ranges"]:
            n, width = stop - start, header["width"]
            ids = np.frombuffer(take(n * layers * top_k * width), f"<u{width}")
            valid = np.frombuffer(take(n * layers), np.uint8)
            rows[start, stop] = ids.reshape(n, layers, top_k), valid.reshape(n, layers)
        sides.append(Data(header, tiles, rows))
    assert at == len(body)
    sides[0].other = sides[1] if sides[1:] else None
    return sides[0]


@pytest.mark.parametrize("trace_id", ["narrow", "wide", ODD, "empty"])
def test_the_file_holds_the_trace(cli, server, tmp_path: Path, trace_id: str):
    path = tmp_path / "t.html"
    cli("view", trace_id, "-o", path)
    trace, description = described(server, trace_id)
    data = data_of(Page(path.read_text("utf-8")))
    facts = data.header["facts"]
    assert (facts["trace_id"], facts["num_rows"]) == (trace_id, len(trace))
    assert facts["coverage"] == pytest.approx(trace.coverage)
    assert sum(facts["missing_cells"].values()) == int((~trace.valid).sum())
    assert facts["labels"] == trace.labels
    assert data.header["segments"] == segments_of(trace, description.origins)
    levels = changed(trace)
    assert len(data.tiles) == len(levels) == facts["levels"]
    for z, tiles in enumerate(data.tiles):
        assert tiles == [levels.tile(z, x) for x in range(levels.tiles(z))]
    assert [*data.rows] == ([(0, len(trace))] if len(trace) else [])
    for ids, valid in data.rows.values():
        assert np.array_equal(valid.astype(bool), trace.valid)
        assert np.array_equal(ids[trace.valid], trace.topk_ids[trace.valid])


@pytest.mark.parametrize("side", ["report:trainer", "latest"])
def test_the_file_holds_another_side(cli, server, tmp_path: Path, side: str):
    path = tmp_path / "t.html"
    cli("view", "reported", "-o", path, "--against", side)
    with RouteClient(server.target, run="view") as client, client.reports("trainer") as reports:
        trace = client.get("reported")
        if side == "latest":
            other = client.get("reported", policy="latest")
        else:
            other = reports.get("reported", missing="mask")
    data = data_of(Page(path.read_text("utf-8")))
    found = data.header["other"]
    assert found["name"] == side
    assert (found["report"] or {}).get("step") == (None if side == "latest" else "7")
    assert data.header["facts"]["incarnations"] == []
    of = compare_traces(trace, other)
    assert of.differing > 0
    assert (found["diff"]["differing"], found["diff"]["cells"]) == (of.differing, of.cells)
    levels = differing(trace, other)
    for z, tiles in enumerate(data.other.tiles):
        assert tiles == [levels.tile(z, x) for x in range(levels.tiles(z))]
    [(ids, valid)] = data.other.rows.values()
    there = np.zeros_like(valid, bool)
    there[other.token_start : other.token_stop] = other.valid
    assert np.array_equal(valid.astype(bool), there)
    assert np.array_equal(ids[there], other.topk_ids[other.valid])
    [(ids, valid)] = data.rows.values()
    assert np.array_equal(ids, trace.topk_ids)


def test_a_side_that_is_not_there_is_named(cli, tmp_path: Path):
    words = ("view", "reported", "-o", tmp_path / "t.html", "--against")
    assert "--against is 'trainer'; expected report:NAME" in cli(*words, "trainer", code=2).output
    assert "view@report:trainer" in cli(*words, "report:unknown", code=1).output
    assert "incarnation" in cli(*words, "#7", code=1).output
    assert not (tmp_path / "t.html").exists()


def test_rows_around_holes_are_there_where_all_do_not_fit(server):
    trace, description = described(server, "narrow")
    whole, _ = one_file.document(trace, description, "h:1", 32 << 20)
    # Another moment of writing may compress to some bytes less.
    _, content = one_file.document(trace, description, "h:1", len(whole.encode()) - 100)
    assert content.ranges
    assert sum(stop - start for start, stop in content.ranges) < len(trace)
    for at in (HOLE[0] - 128, HOLE[0] - 1, HOLE[1], HOLE[1] + 127):
        assert any(start <= at < stop for start, stop in content.ranges), at
    assert all(start % 64 == 0 for start, _ in content.ranges)


def test_no_file_is_larger_than_asked_for(server):
    trace, description = described(server, "wide")
    size = len(one_file.document(trace, description, "h:1", 32 << 20)[0].encode())
    with pytest.raises(InvalidArgument) as caught:
        one_file.document(trace, description, "h:1", 100_000)
    assert caught.value.field == "--max-size"
    least = int(re.findall(r"\d+", caught.value.expected)[0])
    with pytest.raises(InvalidArgument):
        one_file.document(trace, description, "h:1", least - 100)
    held = []
    for most in (least + 100, *range(least + 1000, size, (size - least) // 9), size + 100):
        text, content = one_file.document(trace, description, "h:1", most)
        assert len(text.encode()) <= most
        held.append(sum(stop - start for start, stop in content.ranges))
    assert held == sorted(held)
    assert (held[0], held[-1]) == (0, len(trace))


@pytest.mark.parametrize("trace_id", ["narrow", ODD])
def test_nothing_but_its_own_script_runs(cli, tmp_path: Path, trace_id: str):
    path = tmp_path / "t.html"
    cli("view", trace_id, "-o", path)
    page = Page(path.read_text("utf-8"))
    tags = [tag for tag, _ in page.found]
    assert tags.count("script") == tags.count("style") == tags.count("template") == 1
    assert {"img", "link", "iframe", "base"}.isdisjoint(tags)
    attributes = {name for _, attrs in page.found for name in attrs}
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "href")]
    assert page.texts["title"] == trace_id
    policy = next(a for _, a in page.found if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(one.split(" ", 1) for one in str(policy["content"]).split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["trusted-types"] == "'none'"
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.texts[kind].encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"
    code = page.texts["script"] + page.texts["style"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import", code)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ((), "-o"),
        (("-o", "{tmp}/t.txt"), "--output"),
        (("-o", "{tmp}/none/t.html"), "--output"),
        (("-o", "{tmp}/there.html"), "--output"),
    ],
)
def test_wrong_paths(cli, tmp_path: Path, words: tuple[str, ...], field: str):
    (tmp_path / "there.html").write_text("mine")
    done = cli("view", "narrow", *(w.format(tmp=tmp_path) for w in words), "--json", code=2)
    assert json.loads(done.stderr.splitlines()[-1])["field"] == field
    assert (tmp_path / "there.html").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["there.html"]
    cli("view", "narrow", "-o", tmp_path / "there.html", "--force")
    assert (tmp_path / "there.html").stat().st_size > 100_000


def modules(**texts: str):
    def read_text(path: Path) -> str:
        return texts[path.stem]

    return read_text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('import x from "./b.js";\n', "not understood"),
        ('import * as b from "./b.js";\n', "not understood"),
        ('import { default as b } from "https://x/b.js";\n', "not understood"),
        ("export default 1;\n", "not understood"),
        ("export let a = 1;\n", "not understood"),
        ("export { a };\n", "not understood"),
        ('const a = await import("./b.js");\n', "not understood"),
        ("const a = import.meta.url;\n", "not understood"),
        ('const a = "</script>";\n', "not understood"),
        ('const a = "<!--";\n', "not understood"),
        ('import { a } from "./none.js";\n', "missing"),
        ('import { a } from "./a.js";\n', "circle"),
    ],
)
def test_what_the_joiner_does_not_know_is_refused(tmp_path: Path, text: str, why: str):
    for name in ("a", "b"):
        (tmp_path / f"{name}.js").write_text("")
    with pytest.raises(ValueError, match=why):
        joining.joined("a.js", (tmp_path,), modules(a=text, b="export const a = 1;\n"))


def test_joined_modules_come_after_those_that_they_import(tmp_path: Path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.js").write_text("")
    texts = {
        "a": 'import { one as two } from "./b.js";\nimport {\n  three,\n} from "./c.js";\nf();\n',
        "b": 'import { three } from "./c.js";\nexport function one() {}\n'
        "export async function x() {}\n",
        "c": "export const three = 3;\n",
    }
    text = joining.joined("a.js", (tmp_path,), modules(**texts))
    assert [line for line in text.splitlines() if line.startswith(("const", "return"))] == [
        "const $m0 = (() => {", "const three = 3;", "return { three };",
        "const $m1 = (() => {", "const { three } = $m0;", "return { one, x };",
        "const $m2 = (() => {", "const { one: two } = $m1;", "const { three } = $m0;",
        "return {  };",
    ]  # fmt: skip
