"""Compare the versions that RL frameworks pin with those that are tested: `make check-frameworks`.

The newest wheel of each framework is read, not installed. Where a range is allowed, the newest
version of the index counts. Frameworks that are on no index have the pins of their sources, with
their day. Ends with 1 if a version is neither tested nor known to load no plugins.

    python scripts/frameworks.py --write    # the table of docs/compatibility.md, too
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple, Protocol

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/compatibility.md"
BEGIN, END = "<!-- frameworks: make check-frameworks -->\n", "<!-- end of frameworks -->\n"

ENGINES = ("vllm", "sglang", "transformers")
FRAMEWORKS = ("verl", "skyrl", "trl", "ms-swift", "openrlhf", "areal")
#: Of frameworks that are on no index, as of the day of their sources.
SOURCES: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("NeMo-RL", "2026-08-22", {"vllm": "==0.25.1", "transformers": "<5.9"}),
    ("prime-rl", "2026-08-21", {"vllm": "==0.28.0", "transformers": "==5.6.2"}),
    ("slime", "2026-08-23", {"sglang": "==0.5.15.post1"}),
    ("miles", "2026-08-23", {"sglang": "==0.5.16"}),
)
#: Versions of SGLang in which routetrace cannot start, nor say so.
WITHOUT_PLUGINS = SpecifierSet("<=0.5.10.post1")
#: Versions of vLLM that run on a GPU alone.
ON_GPU = ("0.33.0",)


class Index(Protocol):
    """A package index."""

    def metadata(self, name: str) -> str:
        """Return the metadata of the newest wheel of a package; "" if there is none."""

    def versions(self, name: str) -> list[Version]:
        """Return the releases of a package."""


class Pip:
    """The index that pip is configured for."""

    def metadata(self, name: str) -> str:
        """Return the metadata of the newest wheel of a package; "" if there is none."""
        with tempfile.TemporaryDirectory() as folder:
            command = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
            if self._run(*command, name) is None:
                return ""
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as file:
                inside = next(n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
                return file.read(inside).decode("utf-8")

    def versions(self, name: str) -> list[Version]:
        """Return the releases of a package."""
        listing = self._run("index", "versions", name) or ""
        found = re.search(r"^Available versions: (.*)$", listing, re.M)
        return [Version(version) for version in found[1].split(", ")] if found else []

    def _run(self, *command: str) -> str | None:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", *command],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout if done.returncode == 0 else None


class Pin(NamedTuple):
    """The version of a package that a framework requires."""

    framework: str
    package: str
    wanted: str
    version: str
    """The one that is installed; "" if no release fits."""


class Row(NamedTuple):
    """A line of the table."""

    pin: Pin
    result: str
    """The target that tests it, why it is not loaded, or `untested`."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The columns of the table."""
        pin = self.pin
        return pin.framework, f"{pin.package} `{pin.wanted}`", pin.version or "none", self.result


def tested() -> dict[str, dict[str, str]]:
    """Return the targets of the Makefile that test a version, by package and version."""
    text = (ROOT / "Makefile").read_text("utf-8")

    def setting(name: str) -> list[str]:
        found = re.search(rf"^{name}\s*\?= (.*)$", text, re.M)
        assert found, name
        return found[1].replace(",", " ").split()

    pinned = (ROOT / "constraints/dev.txt").read_text("utf-8")
    of: dict[str, list[tuple[str, Iterable[str]]]] = {
        "vllm": [
            ("make test-vllm-scheduler", setting("VLLM_SCHEDULERS")),
            ("make test-vllm-older", re.findall(r"test-vllm VLLM=(\S+)", text)),
            ("make test-vllm", setting("VLLM")),
            ("make test-gpu", ON_GPU),
        ],
        "sglang": [
            ("make test-sglang-older", setting("SGLANG_OLDER")),
            ("make test-sglang", setting("SGLANG")),
        ],
        "transformers": [
            ("make test-transformers", [*setting("REPLAY"), *setting("TRANSFORMERS")]),
            ("make test", re.findall(r"^transformers==([\d.]+)", pinned, re.M)),
        ],
    }
    return {
        package: {version: target for target, versions in targets for version in versions}
        for package, targets in of.items()
    }


def pins(index: Index) -> Iterator[Pin]:
    """Yield what frameworks pin, one line for each version that is installed.

    Raises:
        LookupError: if the index has no wheel of a framework.
    """
    releases = {name: index.versions(name) for name in ENGINES}
    for framework in FRAMEWORKS:
        text = index.metadata(framework)
        if not text:
            raise LookupError(f"{framework} has no wheel on the index")
        metadata = Parser().parsestr(text)
        name = f"{framework} {metadata['Version']}"
        wanted: dict[str, set[str]] = {}
        for line in metadata.get_all("Requires-Dist") or ():
            asked = Requirement(line)
            if asked.name.lower() in ENGINES and str(asked.specifier):
                wanted.setdefault(asked.name.lower(), set()).add(str(asked.specifier))
        yield from _pins_of(name, wanted, releases)
    for framework, day, given in SOURCES:
        wanted = {package: {specifier} for package, specifier in given.items()}
        yield from _pins_of(f"{framework} ({day})", wanted, releases)


def _pins_of(
    framework: str, wanted: Mapping[str, set[str]], releases: Mapping[str, list[Version]]
) -> Iterator[Pin]:
    for package in ENGINES:
        found: dict[str, str] = {}
        for specifier in sorted(wanted.get(package, ())):
            fitting = list(SpecifierSet(specifier).filter(releases[package]))
            newest = str(max(fitting)) if fitting else ""
            # Of several ways to say the same, the shortest.
            if newest not in found or len(specifier) < len(found[newest]):
                found[newest] = specifier
        for version, specifier in sorted(found.items()):
            yield Pin(framework, package, specifier, version)


def judge(pin: Pin, by: Mapping[str, Mapping[str, str]]) -> Row:
    """Return what routetrace does with a version."""
    known = by[pin.package]
    if pin.version in known:
        return Row(pin, f"tested: `{known[pin.version]}`")
    try:
        version = Version(pin.version)
    except InvalidVersion:
        return Row(pin, "untested")
    if pin.package == "transformers":  # releases of one minor version have the same routers
        for other, target in known.items():
            if Version(other).release[:2] == version.release[:2]:
                return Row(pin, f"tested as {other}: `{target}`")
    if pin.package == "sglang" and version in WITHOUT_PLUGINS:
        return Row(pin, "not loaded: SGLang has no plugins (`sglang.srt.plugins`) there")
    return Row(pin, "untested")


def table(rows: Iterable[Row], day: str) -> str:
    """Return the table of docs/compatibility.md."""
    head = ("framework", "asks for", "gets", "routetrace")
    lines = [head, tuple("---" for _ in head), *(row.cells for row in rows)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{BEGIN}As of {day}:\n\n{text}{END}"


def main(index: Index | None = None) -> int:
    """Return 1 if a version is neither tested nor known to load no plugins."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="also into docs/compatibility.md")
    args = parser.parse_args()
    by = tested()
    try:
        rows = [judge(pin, by) for pin in pins(index or Pip())]
    except LookupError as error:
        print(error)
        return 1
    for row in rows:
        print("  ".join(map(str.ljust, row.cells, (22, 56, 14, 0))))
    if args.write:
        text = PAGE.read_text("utf-8")
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        PAGE.write_text(before + table(rows, today) + after, "utf-8")
    missing = [row for row in rows if row.result == "untested"]
    if missing:
        print(f"{len(missing)} of {len(rows)} versions are not tested")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
