"""`make check-frameworks`, with an index by hand, and the table that it wrote."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts/frameworks.py"), run_name="frameworks")


class Shelf:
    """An index with one framework."""

    def __init__(self, *requires: str) -> None:
        self._requires = requires

    def metadata(self, name: str) -> str:
        lines = [f"Requires-Dist: {line}" for line in self._requires if name == "verl"]
        return "\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 7.0", *lines])

    def versions(self, name: str) -> list[Version]:
        releases = {
            "vllm": ["0.24.0", "0.25.1", "0.28.0", "0.99.0", "1.0.0"],
            "sglang": ["0.5.10.post1", "0.5.15.post1", "0.5.16", "0.5.99"],
            "transformers": ["5.6.2", "5.8.0", "5.8.1", "5.10.4", "5.99.0"],
        }
        return [Version(version) for version in releases[name]]


def results(script: dict[str, Any], *requires: str) -> dict[tuple[str, str], str]:
    by = script["tested"]()
    found = [pin for pin in script["pins"](Shelf(*requires)) if pin.framework == "verl 7.0"]
    return {(pin.package, pin.version): script["judge"](pin, by).result for pin in found}


def test_a_pin_is_what_is_installed(script: dict[str, Any]) -> None:
    found = results(
        script,
        'vllm==0.24.0; extra == "vllm"',
        'vllm<=0.99,>=0.22; extra == "newest"',
        "transformers<5.9",
        "transformers>=5.6,<5.9",
        "vllm-omni==0.1",
        "torch==2.11.0",
    )
    assert found == {
        ("vllm", "0.24.0"): "tested: `make test-vllm-older`",
        ("vllm", "0.99.0"): "untested",
        ("transformers", "5.8.1"): "tested: `make test-transformers`",
    }


def test_releases_of_one_minor_version_of_transformers_are_alike(script: dict[str, Any]) -> None:
    found = results(script, "transformers==5.8.0", "vllm==0.24.1")
    assert found["transformers", "5.8.0"] == "tested as 5.8.1: `make test-transformers`"
    assert found["vllm", ""] == "untested"  # no such release


def test_engines_without_plugins_are_named(script: dict[str, Any]) -> None:
    found = results(script, "sglang==0.5.10.post1", 'sglang[all]==0.5.99; extra == "a"')
    assert found["sglang", "0.5.10.post1"].startswith("not loaded: ")
    assert found["sglang", "0.5.99"] == "untested"


@pytest.mark.parametrize(("pin", "code"), [("vllm==0.99.0", 1), ("vllm==0.24.0", 0)])
def test_the_check_fails_where_a_version_is_not_tested(
    script: dict[str, Any],
    pin: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["frameworks.py"])
    assert script["main"](Shelf(pin)) == code
    told = capsys.readouterr().out
    assert ("1 of " in told) == bool(code)
    for name, _, _ in script["SOURCES"]:
        assert name in told


def test_an_index_that_tells_nothing_is_no_success(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["frameworks.py"])
    monkeypatch.setattr(Shelf, "metadata", lambda *_: "")
    assert script["main"](Shelf()) == 1


def test_the_table_of_the_page_says_what_the_makefile_does(script: dict[str, Any]) -> None:
    page = (ROOT / "docs/compatibility.md").read_text("utf-8")
    rows = page.split(script["BEGIN"])[1].split(script["END"])[0]
    lines = re.findall(r"^\| (.+?) \| (\w+) `(.+?)` \| (\S+) \| (.+) \|$", rows, re.M)
    assert len(lines) > 10
    by = script["tested"]()
    for framework, package, wanted, version, result in lines:
        pin = script["Pin"](framework, package, wanted, version)
        assert script["judge"](pin, by).result == result
        assert result != "untested"
