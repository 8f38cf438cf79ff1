"""Checks of every request, and headers of every answer."""

from __future__ import annotations

import pytest

from routetrace.page.guard import Hosts
from support.pages import Browser, running_page

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
PATHS = ("/", "/api/v1/session", "/static/x/y.js", "/nothing", "/api/v1/runs/r/trace?id=whole")


@pytest.mark.parametrize("path", PATHS)
def test_another_host_is_refused_before_anything_else(browser: Browser, path: str) -> None:
    port = browser.host.rpartition(":")[2]
    for host in (
        "evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:80",
        f"127.0.0.1:{port}.evil", f"127.0.0.1.evil:{port}", f"0x7f.1:{port}", "", f"[::2]:{port}",
        f"127.0.0.1:{port}:{port}", f"user@127.0.0.1:{port}",
    ):  # fmt: skip
        answer = browser.call(path, headers={"Host": host, "Sec-Fetch-Site": "cross-site"})
        assert (host, answer.status) == (host, 421)
        assert answer.error["kind"] == "wrong_host"
    for method in ("POST", "DELETE", "OPTIONS", "PUT"):
        headers: dict[str, str | None] = {"Host": "evil.example", "Origin": None}
        assert browser.call(path, method, headers=headers).status == 421
    assert browser.call(path).status != 421


def test_a_request_without_a_host_is_refused(browser: Browser) -> None:
    browser.connection._http_vsn, browser.connection._http_vsn_str = 10, "HTTP/1.0"
    assert browser.call("/", headers={"Host": None}).status == 421


def test_names_of_this_machine_are_hosts(browser: Browser) -> None:
    port = browser.host.rpartition(":")[2]
    for host in (f"localhost:{port}", f"[::1]:{port}", f"127.0.0.1:{port}", f"LOCALHOST:{port}"):
        assert browser.call("/api/v1/session", headers={"Host": host}).status == 200


def test_further_hosts(server) -> None:
    with running_page(server.target, hosts=("tunnel:9000", "Page.example")) as address:
        browser = Browser(address)
        for host, status in (
            ("tunnel:9000", 200), ("page.example", 200), ("page.example:1", 200),
            ("tunnel:9001", 421), ("tunnel", 421), ("x.page.example", 421),
        ):  # fmt: skip
            assert browser.call("/api/v1/session", headers={"Host": host}).status == status


def test_hosts_of_a_certificate_and_of_default_ports() -> None:
    hosts = Hosts("10.0.0.1", 443, (), lambda: ("page.example", "*.pages.example", "[fd00::1]"))
    for host in ("page.example", "PAGE.example:443", "a.pages.example", "[fd00::1]", "10.0.0.1"):
        assert host in hosts
    for host in ("page.example:80", "a.b.pages.example", "pages.example", "x.example"):
        assert host not in hosts
    assert "page.example" not in Hosts("10.0.0.1", 8443, (), lambda: ("page.example",))


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none", "odd"])
def test_calls_of_other_pages_are_refused(browser: Browser, site: str) -> None:
    """Another port of 127.0.0.1 is the same site."""
    answer = browser.call("/api/v1/session", headers={"Sec-Fetch-Site": site})
    assert (answer.status, answer.error["kind"]) == (403, "cross_site")
    assert browser.call("/", headers={"Sec-Fetch-Site": site}).status == 200  # a link may lead here


def test_calls_of_programs_say_nothing_of_a_site(browser: Browser) -> None:
    assert browser.call("/api/v1/session", headers={"Sec-Fetch-Site": None}).status == 200


def test_the_origin_of_a_call_is_this_page(browser: Browser) -> None:
    port = int(browser.host.rpartition(":")[2])
    body = {"token": "rt_x"}
    for origin in (
        "http://evil.example", f"http://127.0.0.1:{port + 1}", "null", "", f"http://localhost:{port}",
        f"{browser.origin}.evil", None,
    ):  # fmt: skip
        headers = {"Origin": origin, "Sec-Fetch-Site": None}
        for method in ("POST", "DELETE"):
            answer = browser.call("/api/v1/session", method, body=body, headers=headers)
            assert (origin, answer.status) == (origin, 403)
        if origin is not None:
            assert browser.call("/api/v1/session", headers=headers).status == 403
    assert browser.call("/api/v1/session", "POST", body=body).status == 204
    assert browser.call("/api/v1/session", headers={"Origin": browser.origin}).status == 200


def test_a_form_of_another_page_is_no_sign_in(browser: Browser) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None):
        headers = {"Content-Type": kind}
        answer = browser.call("/api/v1/session", "POST", body={"token": "x"}, headers=headers)
        assert answer.status == 403
    headers = {"Content-Type": "application/json; charset=utf-8"}
    answer = browser.call("/api/v1/session", "POST", body={"token": "x"}, headers=headers)
    assert answer.status == 204


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["", "evil.example"])
def test_every_answer_has_the_headers(browser: Browser, path: str, host: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        answer = browser.call(path, method, headers={"Host": host or browser.host})
        headers = answer.headers
        assert headers["Content-Security-Policy"] == CSP
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Cache-Control"] == "no-store"
        assert not [name for name in headers if name.lower().startswith("access-control-")]
        assert "Server" not in headers


def test_errors_name_kind_and_words(browser: Browser) -> None:
    answer = browser.call("/api/v1/nothing")
    assert answer.status == 404
    assert answer.error == {
        "kind": "not_found",
        "field": "",
        "value": "",
        "expected": "",
        "message": "There is nothing at this path.",
    }
    assert browser.call("/api/v1/session/").status == 404
    assert browser.call("/api/v1/runs/r/trace", "POST", body={}).status == 405
