"""Pictures of the pages: each is there and named, and as large as `make screenshots` promises."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
#: An image in Markdown: alt text, target.
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
#: An image for each theme: target of the dark one, alt text, target of the light one.
_THEMED = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">'
    r'\s*<img alt="([^"]+)" src="([^"]+)">\s*</picture>'
)
_FENCES = re.compile(r"^ *(```+).*?^ *\1", re.M | re.S)
#: As in scripts/screenshots/views.py, which needs a browser.
WIDTH, HEIGHT = 1440, 900
MOST_BYTES, MOST_BYTES_IN_ALL = 150_000, 800_000


def named() -> list[tuple[Path, str, Path, Path | None]]:
    """Images as (page, alt text, file, the one of the dark theme)."""
    found: list[tuple[Path, str, Path, Path | None]] = []
    for page in PAGES:
        text = _FENCES.sub("", page.read_text("utf-8"))
        place = page.parent
        found += [
            (page, alt, (place / target).resolve(), None)
            for alt, target in _IMAGE.findall(text)
            if "://" not in target
        ]
        themed = _THEMED.findall(text)
        assert len(themed) == len(re.findall(r"<(?:img|source)\b", text)) / 2, page
        found += [
            (page, alt, (place / light).resolve(), (place / dark).resolve())
            for dark, alt, light in themed
        ]
    return found


def size_of(file: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n", file
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_every_image_of_a_page_exists() -> None:
    images = named()
    assert {page.name for page, *_ in images} >= {"README.md", "page.md", "experts.md"}
    for page, _, *files in images:
        assert all(file.is_file() for file in files if file), (page, files)


def test_every_picture_of_the_page_is_named_with_its_theme() -> None:
    pictures = set(IMAGES.iterdir())
    of_pages = [one for one in named() if one[2].parent == IMAGES]
    assert pictures == {file for *_, light, dark in of_pages for file in (light, dark) if file}
    for page, alt, light, dark in of_pages:
        assert light.stem.endswith("-light"), page
        other = light.with_stem(light.stem.removesuffix("light") + "dark")
        assert dark == (other if other in pictures else None), page
        assert len(alt) > 100, f"{page.name} does not say what is seen on {light.name}"


def test_pictures_of_the_page_have_the_promised_sizes() -> None:
    sizes = {file: file.stat().st_size for file in IMAGES.iterdir()}
    assert {file.stem for file in sizes} == {
        "overview-light", "overview-dark", "traces-light", "trace-light", "trace-dark",
        "report-light", "experts-light", "mismatch-light",
    }  # fmt: skip
    for file, size in sizes.items():
        width, height = size_of(file)
        assert width == WIDTH, file
        assert HEIGHT <= height <= 2 * HEIGHT, file
        assert size <= MOST_BYTES, file
    assert sum(sizes.values()) <= MOST_BYTES_IN_ALL


def test_the_script_promises_the_same() -> None:
    text = (ROOT / "scripts" / "screenshots" / "views.py").read_text("utf-8")
    assert f"WIDTH, HEIGHT = {WIDTH}, {HEIGHT}\n" in text
    assert f"MOST_BYTES, MOST_BYTES_IN_ALL = {MOST_BYTES:_}, {MOST_BYTES_IN_ALL:_}\n" in text


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_no_picture_is_ignored_by_git() -> None:
    files = sorted(str(file) for file in IMAGES.iterdir())
    done = subprocess.run(
        ["git", "check-ignore", *files], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
