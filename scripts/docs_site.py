"""Hook of mkdocs: builds the site from the pages where they stand in the repository.

Pages of the navigation, those that they link to, and linked files keep the paths of the repository,
so that no link has to be rewritten and no page is copied into docs/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

_FENCES = re.compile(r"^ *(```+).*?^ *\1", re.M | re.S)
_TARGETS = re.compile(
    r"\]\((?!\w+:|#)([^)\s#]+)[^)]*\)"
    # Pictures for each theme, which Markdown has no words for.
    r"|<(?:img|source)\b[^>]*\ssrc(?:set)?=\"([^\"]+)\""
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the pages of the navigation and all that they lead to, beside the theme's files."""
    found = Files([file for file in files if file.src_dir != config.docs_dir])
    assert config.nav is not None
    for path in reached(list(_pages(config.nav))):
        found.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return found


def reached(paths: list[str]) -> list[str]:
    """Return these paths of the repository and those that pages among them link to, in turn.

    Targets that do not exist are left out, so that mkdocs reports them where they stand.
    """
    found = dict.fromkeys(paths)
    waiting = [path for path in paths if path.endswith(".md")]
    while waiting:
        page = waiting.pop()
        for target in linked(page):
            if target not in found:
                found[target] = None
                if target.endswith(".md"):
                    waiting.append(target)
    return list(found)


def linked(page: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to."""
    file = ROOT / page
    text = _FENCES.sub("", file.read_text("utf-8"))
    for target in _TARGETS.finditer(text):
        path = (file.parent / (target[1] or target[2])).resolve()
        if path.is_file() and path.is_relative_to(ROOT):
            yield path.relative_to(ROOT).as_posix()


def _pages(nav: list[Any]) -> Iterator[str]:
    """Yield the pages of a navigation, at any depth."""
    for entry in nav:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from _pages(value)
