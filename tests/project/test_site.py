"""The site that `make docs` builds, and facts that its pages quote from elsewhere."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from routetrace.capture_agent.engines.sglang.seams import TESTED
from support.version_pairs import PAIRS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / side / "routetrace" for side in ("proto", "server", "client", "capture_agent")]
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
COMPATIBILITY = (ROOT / "docs" / "compatibility.md").read_text("utf-8")


# ---------------------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout
    return folder


@pytest.mark.long
def test_every_page_is_on_the_site(site):
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    for page in pages:
        built = site / page.relative_to(ROOT).with_suffix(".html")
        assert (built.with_name("index.html") if page.stem == "README" else built).is_file(), page
    home = (site / "index.html").read_text("utf-8")
    assert 'href="docs/troubleshooting.html"' in home
    assert (site / "docs" / "experts" / "real-qwen-load.png").is_file()
    for theme in ("light", "dark"):
        assert f'"docs/images/trace-{theme}.png"' in home
        assert (site / "docs" / "images" / f"trace-{theme}.png").is_file()


@pytest.mark.long
def test_pages_load_nothing_from_elsewhere(site):
    loaded = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\ssrc="?([^" >]+)"""
        r"""|<link\b(?![^>]*rel="?canonical)[^>]*\shref="?([^" >]+)"""
    )
    for page in site.rglob("*.html"):
        found = [a or b for a, b in loaded.findall(page.read_text("utf-8"))]
        assert found, page
        assert not [url for url in found if "//" in url], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text("utf-8"))


@pytest.mark.long
def test_no_markdown_is_left_as_text(site):
    """As where a list follows a paragraph without an empty line, which GitHub would take."""
    for page in site.rglob("*.html"):
        article = re.search(r"<article.*?</article>", page.read_text("utf-8"), re.S)
        if article is None:  # the page of a wrong address
            assert page.name == "404.html"
            continue
        text = re.sub(r"<(pre|code|script)\b.*?</\1>|<!--.*?-->", "", article[0], flags=re.S)
        assert not re.search(r"```|\n[*-] |\n\| |\]\(", text), page


@pytest.mark.long
@pytest.mark.parametrize("package", ["client", "capture_agent"])
def test_the_reference_has_every_public_name(site, package):
    text = (site / "docs" / "api" / f"{package}.html").read_text("utf-8")
    names = importlib.import_module(f"routetrace.{package}").__all__
    for name in set(names) - {"__version__"}:
        assert f'id="routetrace.{package}.{name}"' in text, name


# ---------------------------------------------------------------------------- error messages


def quotes() -> list[str]:
    """Messages that the page quotes, one a line."""
    fences = re.findall(r"^```text\n(.*?)^```$", TROUBLESHOOTING, re.M | re.S)
    return [line for fence in fences for line in fence.splitlines()]


@cache
def pieces() -> frozenset[str]:
    """Literal parts of the strings of the sources, without the values that they are filled with."""

    def strings(tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value

    found: set[str] = set()
    for folder in SOURCES:
        for file in folder.rglob("*.py"):
            for text in strings(ast.parse(file.read_text("utf-8"))):
                found.update(re.split(r"%[-\d.]*[srdfg]|{\w*(?::\w+)?}", text))
    # Shorter ones would make up any sentence.
    return frozenset(piece for piece in found if len(piece) >= 4 or not re.search(r"\w", piece))


def is_of_the_sources(quote: str) -> bool:
    """Whether a message is put together from literal parts of the sources and `<values>`."""
    return all(_tiled(part) for part in re.split(r"<[^>]*>", quote))


def _tiled(text: str) -> bool:
    ends = {0}
    for end in range(1, len(text) + 1):
        if any(text[start:end] in pieces() for start in ends):
            ends.add(end)
    return len(text) in ends


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_message_exists(quote):
    assert is_of_the_sources(quote)


def test_a_message_that_does_not_exist_is_seen():
    assert len(quotes()) > 30
    for quote in quotes():
        longest = max(re.findall(r"[a-z]{4,}", re.sub(r"<[^>]*>", "", quote)), key=len)
        assert not is_of_the_sources(quote.replace(longest, longest[::-1])), longest
    assert not is_of_the_sources("cannot reach the server; check that it runs")


# ---------------------------------------------------------------------------- versions


def row(name: str) -> list[str]:
    """The cells of a row of the page on compatibility."""
    (found,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", COMPATIBILITY, re.M)
    return [cell.strip() for cell in found.split("|")]


def setting(name: str) -> str:
    """A variable of the Makefile."""
    (found,) = re.findall(rf"^{name}\s*\?= (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    return found


def test_allowed_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needs = {re.split(r"[>=<]", need)[0]: need for need in project["dependencies"]}
    assert needs.keys() == {"grpcio", "protobuf", "numpy", "zstandard"}
    for name in ("grpcio", "numpy"):
        floor = needs[name].removeprefix(f"{name}>=")
        assert row(name)[0] == f"{floor} and newer"
    assert needs["protobuf"] == "protobuf>=4.25,<8"
    assert row("protobuf")[0] == "4.25 to 7"
    assert row("Python")[0] == f"{project['requires-python'].removeprefix('>=')} and newer"
    (transformers,) = (n for n in project["optional-dependencies"]["dev"] if "transformers" in n)
    floor = f"{transformers.removeprefix('transformers>=')} and newer"
    assert row("Transformers: capture")[0].startswith(floor)
    oldest = setting("REPLAY").split()[0]
    assert row("Transformers: replay")[0] == f"{oldest.removesuffix('.0')} and newer"


def test_tested_versions_are_those_of_the_tests():
    for at, name in enumerate(("protobuf", "grpcio")):
        pinned = [pair[at].partition("==")[2] or "newest" for pair in PAIRS.values()]
        assert row(name)[1] == ", ".join(pinned)
    constraints = (ROOT / "constraints" / "dev.txt").read_text("utf-8")
    # Older Pythons come first.
    pins = re.findall(r"^transformers==([\d.]+)", constraints, re.M)[-1:]
    captured = (*setting("TRANSFORMERS").split(), *pins)
    for name, tested in (
        ("vLLM", setting("VLLM").split()),
        ("SGLang", (*setting("SGLANG_OLDER").split(), *setting("SGLANG").split())),
        ("Transformers: capture", captured),
        ("Transformers: replay", (*setting("REPLAY").split(), *captured)),
    ):
        versions = ", ".join(tested)
        assert re.match(rf"{re.escape(versions)}(, on the CPU.*)?$", row(name)[1])
    assert row("torch")[1] == f"{setting('TORCH').removeprefix('torch==')}, for the CPU"
    trainers = (ROOT / "scripts" / "trainers_env.sh").read_text("utf-8")
    for name, package in (("Megatron-Core", "megatron-core"), ("verl", "verl"), ("SkyRL", "skyrl")):
        assert f"'{package}=={row(name)[1]}'" in trainers
    image = re.search(r"python:([\d.]+)-slim", (ROOT / "docker" / "Dockerfile").read_text("utf-8"))
    assert image
    assert f"{image[1]} in the images" in row("Python")[1]


def test_the_versions_of_sglang_are_those_of_its_targets():
    assert (*setting("SGLANG_OLDER").split(), setting("SGLANG")) == TESTED
    page = (ROOT / "docs" / "sglang.md").read_text("utf-8").split("\n## Versions\n")[1]
    assert tuple(re.findall(r"^\| (0\.[\w.]+) \|", page.split("\n## ")[0], re.M)) == TESTED


def test_the_versions_of_vllm_are_those_of_its_targets():
    page = (ROOT / "docs" / "vllm.md").read_text("utf-8").split("\n## Versions\n")[1]
    rows = dict(re.findall(r"^\| (0\.\d+\.\d+) \|.*\| (.*) \|$", page.split("\n## ")[0], re.M))
    targets = [*setting("VLLM").split(), *setting("VLLM_SCHEDULERS").split(",")]
    assert rows.keys() > set(targets)
    for version, tested in rows.items():
        assert tested.startswith("CPU: " if version in targets else "no target: "), version


def test_formats_are_those_of_the_server():
    index = importlib.import_module("routetrace.server.index.records.format")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert row(version)[1] == f"format {index.FORMAT}"
