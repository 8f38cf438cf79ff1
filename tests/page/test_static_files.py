"""The files of the browser."""

from __future__ import annotations

import re
from pathlib import Path

from routetrace.page.static_files import StaticFiles
from support.pages import Browser, running_page


def test_the_index_names_files_under_their_version(browser: Browser) -> None:
    answer = browser.call("/")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-store"
    text = answer.body.decode()
    [version] = set(re.findall(r"/static/([^/]+)/", text))
    assert re.fullmatch(r"\d+\.\d+\.\d+.*-[0-9a-f]{12}", version)
    assert f'<link href="/static/{version}/style.css">' in text
    assert f'src="/static/{version}/app.js"' in text
    assert '<a href="#/trace">' in text
    assert '<a href="other.js">' in text  # no file
    for name, kind in (
        ("app.js", "text/javascript; charset=utf-8"),
        ("style.css", "text/css; charset=utf-8"),
        ("ui/ui.js", "text/javascript; charset=utf-8"),
    ):
        file = browser.call(f"/static/{version}/{name}")
        assert (file.status, file.headers["Content-Type"]) == (200, kind)
        assert file.headers["Cache-Control"] == "public, max-age=31536000, immutable"
        assert file.headers["X-Content-Type-Options"] == "nosniff"


def test_nothing_else_is_a_file(browser: Browser) -> None:
    [version] = set(re.findall(r"/static/([^/]+)/", browser.call("/").body.decode()))
    for path in (
        "index.html", "notes.txt", "../secret.js", "%2e%2e/secret.js", "..%2fsecret.js",
        "ui/../../secret.js", "/etc/passwd", "ui", "", "app.js/", "app.js%00",
    ):  # fmt: skip
        answer = browser.call(f"/static/{version}/{path}")
        assert (path, answer.status) == (path, 404)
    assert browser.call("/static/0.0.0-000000000000/app.js").status == 404
    assert browser.call("/app.js").status == 404
    assert browser.call("/index.html").status == 404


def test_files_are_compressed(browser: Browser) -> None:
    [version] = set(re.findall(r"/static/([^/]+)/", browser.call("/").body.decode()))
    path = f"/static/{version}/app.js"
    plain = browser.call(path)
    packed = browser.call(path, headers={"Accept-Encoding": "gzip"})
    assert packed.headers["Content-Encoding"] == "gzip"
    assert len(packed.body) < len(plain.body) / 5


def test_another_content_is_another_version(tmp_path) -> None:
    versions = set()
    for name, text in (("a.js", "1"), ("a.js", "2"), ("b.js", "2"), ("a.js", "b.js")):
        folder = tmp_path / str(len(versions))
        folder.mkdir()
        (folder / name).write_text(text)
        versions.add(StaticFiles(folder).version)
    assert len(versions) == 4


def test_a_package_without_files_says_so(server) -> None:
    with running_page(server.target, static=Path("/nowhere")) as address:
        assert Browser(address).call("/").status == 404
