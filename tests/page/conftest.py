"""Two servers with known traces, one open and one with tokens, and pages of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from routetrace.client import Security
from routetrace.server.testing import ServerProcess, run_server
from support.agents.feeder import Feeder
from support.pages import Browser, running_page
from support.servers.client_server import LAYOUT, WIDE, rows_of
from support.servers.guarded import Pki, entry, feed

NUM_ROWS = 700
IDS = rows_of(LAYOUT, NUM_ROWS, 1)
HOLE = (200, 230)
#: Of everything that an address, a page or a log could take for something else.
ODD = '<img src=x onerror=alert(1)>/#?%&\u202e" </script>'


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """Without tokens; run "r": a whole trace of two versions, one with a hole, wide ids."""
    with run_server(agent_timeout_seconds=3600) as server:
        feeder = Feeder(server.target, LAYOUT, run="r")
        for name, hole in (("whole", (600, 600)), ("hole", HOLE), (ODD, (600, 600))):
            handle = feeder.begin(name, prompt_len=100, labels={"task": "math"})
            for version, (start, stop) in enumerate([(0, hole[0]), (hole[1], NUM_ROWS)], 7):
                feeder.set_weight_version(version)
                feeder.step(IDS[start:stop], [[handle, start, stop - start]])
            feeder.finish(handle, NUM_ROWS + 1)
        feeder.close()
        feeder = Feeder(server.target, WIDE, run="a/trace", engine_id="e1")
        handle = feeder.begin("wide")
        feeder.set_weight_version(2**60)
        feeder.step(rows_of(WIDE, 90, 2), [[handle, 0, 90]])
        feeder.finish(handle, 91)
        feeder.close()
        yield server


@pytest.fixture(scope="session")
def page(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A page of the open server, with files of its own."""
    folder = tmp_path_factory.mktemp("static")
    (folder / "index.html").write_text(
        '<!doctype html><link href="style.css"><script type="module" src="./app.js"></script>'
        '<a href="#/trace">trace</a><a href="other.js">other</a>'
    )
    (folder / "app.js").write_text("import './ui/ui.js';\n" + "// words\n" * 500)
    (folder / "style.css").write_text("body { color: black }")
    (folder / "notes.txt").write_text("not for browsers")
    (folder / "ui").mkdir()
    (folder / "ui" / "ui.js").write_text("export const one = 1;")
    (folder.parent / "secret.js").write_text("outside")
    with running_page(server.target, static=folder) as address:
        yield address


@pytest.fixture
def browser(page: str) -> Browser:
    return Browser(page)


@dataclass
class Guarded:
    """A server with tokens."""

    target: str
    tokens: Path


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """With tokens: of runs "a", "b", of all, and one to feed."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    tokens.write_text(ENTRIES)
    tokens.chmod(0o600)
    with run_server(tokens_file=tokens, agent_timeout_seconds=3600) as server:
        security = Security(token="rt_all")
        feed(server.target, security, "a", "one")
        feed(server.target, security, "b", "two")
        yield Guarded(server.target, tokens)


ENTRIES = "\n".join(
    [
        entry("rt_all", "all"),
        entry("rt_a", "of-a", ("read",), ("a",)),
        entry("rt_b", "of-b", ("read",), ("b",)),
        entry("rt_feeds", "feeds", ("ingest",)),
    ]
)


@pytest.fixture
def guarded_page(guarded: Guarded) -> Iterator[str]:
    with running_page(guarded.target, runs=("a", "b")) as address:
        yield address


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


def column_of(part: bytes, layers: int) -> np.ndarray:
    """A tile as an array [layers, 256]."""
    return np.frombuffer(part, np.uint8).reshape(layers, 256)
