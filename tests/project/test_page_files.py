"""The browser's files of the page: the platform alone, and few bytes of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from routetrace.page import one_file
from routetrace.page.static_files import DIRECTORY

ONE_FILE = Path(one_file.__file__).parent
FILES = sorted(path for path in DIRECTORY.rglob("*") if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
#: Ways to turn text into markup, code or inline style, or to bring other files in.
FORBIDDEN = (
    r"\b(inner|outer)HTML\b",
    r"\binsertAdjacentHTML\b",
    r"\bdocument\.write\b",
    r"\beval\b",
    r"\bnew Function\b",
    r"javascript:",
    r"\bcssText\b",
    r"""["'\s]style=|["']style["'],""",
    r"\bsrcdoc\b",
    r"sourceMappingURL",
    r"\b(https?|wss?|ftp)://(?!www\.w3\.org/2000/svg\b)",
    r"@import\b",
    r"\burl\(",
)


OWN = sorted(ONE_FILE.glob("*.js"))


def test_they_are_few_bytes() -> None:
    assert sum(path.stat().st_size for path in OWN) <= 30_000
    assert sum(path.stat().st_size for path in FILES) <= 260_000  # 90 kB compressed
    assert {path.suffix for path in FILES} == {".js", ".css", ".html", ".svg"}


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_nothing_makes_markup_of_text_or_comes_from_elsewhere(pattern: str) -> None:
    found = [
        f"{path.name}: {match[0]}"
        for path in (*FILES, *OWN)
        for match in re.finditer(pattern, path.read_text("utf-8"))
    ]
    assert not found


def test_the_patterns_find_what_they_are_for() -> None:
    samples = [
        "e.innerHTML = x", "e.insertAdjacentHTML(x)", "document.write(x)", "eval(x)",
        "new Function(x)", "a.href = 'javascript:1'", "e.style.cssText = x",
        'e.setAttribute("style", x)', "f.srcdoc = x", "//# sourceMappingURL=x",
        "import 'https://example.org/x.js'", "@import 'x.css'", "background: url(x)",
    ]  # fmt: skip
    for pattern, sample in zip(FORBIDDEN, samples, strict=True):
        assert re.search(pattern, sample), pattern


@pytest.mark.parametrize(
    "path", [*SCRIPTS, *OWN], ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_modules_are_short_and_name_files_beside_them(path) -> None:
    text = path.read_text("utf-8")
    lines = text.splitlines()
    assert len(lines) < 400
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("// "), "the first line says what the module is for"
    for name in re.findall(r'\bfrom "([^"]+)"|\bimport\("', text):
        assert name.startswith("./")
        assert (path.parent / name).is_file() or (DIRECTORY / name).is_file()


def test_modules_import_without_cycles_and_none_lies_unused() -> None:
    imports = {
        path.name: set(re.findall(r'\bfrom "\./([^"]+)"', path.read_text("utf-8")))
        for path in SCRIPTS
    }
    index = (DIRECTORY / "index.html").read_text("utf-8")
    reached: set[str] = set()
    pending = re.findall(r'src="([^"]+\.js)"', index)
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += imports[name]
    assert reached == set(imports)
    # Named in the document, they are loaded side by side; found one in the other, one by one.
    preloaded = re.findall(r'<link rel="modulepreload" href="([^"]+)">', index)
    assert preloaded == sorted(set(imports) - {"app.js"})
    left = dict(imports)
    while left:
        leaves = {name for name, needs in left.items() if not needs & left.keys()}
        assert leaves, f"a cycle among {sorted(left)}"
        left = {name: needs for name, needs in left.items() if name not in leaves}
