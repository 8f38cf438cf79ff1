"""One HTML file: script, styles and data of a trace in it, and nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import Path

from routetrace.client import Trace, TraceDescription
from routetrace.page.one_file.content import Content, Other, content_of
from routetrace.page.one_file.joining import joined

_OWN = Path(__file__).parent
_PAGE = _OWN.parent / "static"
_STYLES = ("frame.css", "trace.css")


def document(
    trace: Trace,
    description: TraceDescription,
    target: str,
    most: int,
    other: Other | None = None,
) -> tuple[str, Content]:
    """Return the HTML of a trace, and the data in it.

    Args:
        trace: all of its rows and layers, with missing ones masked.
        description: of the same incarnation.
        target: the server, as clients name it.
        most: maximum bytes of the file, about 150 kB of which are script and styles.
        other: side that the rows are compared with.

    Raises:
        InvalidArgument: if `most` is too low.
    """
    script = joined("boot.js", (_OWN, _PAGE), lambda path: path.read_text("utf-8"))
    styles = "".join((_PAGE / name).read_text("utf-8") for name in _STYLES)
    frame = _HTML.format(
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(styles)}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'",
        title=escape(trace.trace_id),
        styles=styles,
        script=script,
        data="{data}",
    )
    content = content_of(trace, description, target, most, len(frame.encode()), other)
    before, after = frame.rsplit("{data}", 1)
    return before + content.text + after, content


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


_HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{styles}</style>
</head>
<body>
<header id="top"></header>
<main id="main" tabindex="-1">
<noscript>This file needs JavaScript to show the trace that it holds.</noscript>
</main>
<div id="live" role="status" aria-live="polite" class="unseen"></div>
<template id="data">{data}</template>
<script>{script}</script>
</body>
</html>
"""
