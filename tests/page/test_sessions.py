"""Sign-in, cookies, revoked tokens, and what each token may see."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from routetrace.client import RouteClient, Security
from routetrace.common.errors import InvalidArgument, Unauthenticated, Unavailable
from routetrace.page.config import PageConfig
from routetrace.page.errors import TooManySignIns
from routetrace.page.sessions import LIFETIME_S, Caller, Sessions, SignIns
from support.pages import Browser, running_page
from support.servers.guarded import entry, replace
from support.waiting import wait_for

from .conftest import ENTRIES, Guarded

SESSION = "/api/v1/session"


def test_an_open_server_needs_no_sign_in(browser: Browser, server) -> None:
    answer = browser.call(SESSION)
    assert answer.status == 200
    info = answer.json
    assert info["user"] is None
    assert info["expires"] is None
    assert info["target"] == server.target
    assert {"r", "a/trace"} <= set(info["runs"])
    assert re.match(r"\d+\.\d+\.\d+", info["version"])
    assert "Set-Cookie" not in answer.headers


def test_a_server_with_tokens_asks_for_one(guarded_page: str, guarded: Guarded) -> None:
    browser = Browser(guarded_page)
    for answer in (browser.call(SESSION), browser.trace("a", id="one")):
        assert answer.status == 401
        assert answer.error["kind"] == "unauthenticated"
        assert answer.error["message"] == f"Sign in: {guarded.target} needs a token."
        assert "Set-Cookie" not in answer.headers


def test_sign_in_and_out(guarded_page: str) -> None:
    browser = Browser(guarded_page)
    answer = browser.sign_in("rt_a")
    assert (answer.status, answer.body) == (204, b"")
    port = browser.host.rpartition(":")[2]
    assert re.fullmatch(
        rf"routetrace-{port}=[\w-]{{43}}; HttpOnly; Max-Age=43200; Path=/; SameSite=strict",
        answer.headers["Set-Cookie"],
    )
    info = browser.call(SESSION).json
    assert (info["user"], info["runs"]) == ("of-a", ["a"])  # of those that the page shows
    assert info["expires"] > 0
    assert browser.trace("a", id="one").status == 200
    cookies = {**browser.cookies}
    assert browser.call(SESSION, "DELETE").status == 204
    assert not browser.cookies
    browser.cookies = cookies  # the session has ended, not just its cookie
    assert browser.call(SESSION).status == 401
    assert browser.trace("a", id="one").status == 401


def test_a_second_sign_in_ends_the_first(guarded_page: str) -> None:
    browser = Browser(guarded_page)
    browser.sign_in("rt_a")
    [first] = browser.cookies.values()
    browser.sign_in("rt_b")
    assert browser.call(SESSION).json["user"] == "of-b"
    browser.cookies = dict.fromkeys(browser.cookies, first)
    assert browser.call(SESSION).status == 401


def test_no_cookie_but_that_of_a_session_is_one(guarded_page: str) -> None:
    browser = Browser(guarded_page)
    browser.sign_in("rt_a")
    [(name, value)] = browser.cookies.items()
    for other in (value[:-1], value + "x", "", "x" * 43, value.swapcase()):
        browser.cookies = {name: other}
        assert browser.call(SESSION).status == 401


def test_a_token_sees_its_own_runs_alone(guarded_page: str) -> None:
    first, second = Browser(guarded_page), Browser(guarded_page)
    assert first.sign_in("rt_a").status == second.sign_in("rt_b").status == 204
    for end, params in (
        ("", {}), ("segments", {}), ("tile", {"what": "changed", "z": 0, "x": 0}),
        ("rows", {"start": 0, "stop": 4}), ("explain", {"position": 0}),
    ):  # fmt: skip
        assert first.trace("a", end, id="one", **params).status == 200
        # Kept for the first, and never shown to the second.
        refused = second.trace("a", end, id="one", **params)
        assert (refused.status, refused.error["kind"]) == (403, "permission_denied")
        assert refused.error["message"] == "Your token does not cover run 'a'."
        assert second.trace("b", end, id="two", **params).status == 200


@pytest.mark.parametrize(
    ("end", "params"),
    [
        ("", {}),
        ("segments", {}),
        ("tile", {"what": "changed", "z": 0, "x": 0}),
        ("rows", {"start": 0, "stop": 4}),
        ("explain", {"position": 0}),
    ],
)
def test_a_revoked_token_ends_its_sessions(
    guarded_page: str, guarded: Guarded, end: str, params: dict[str, object]
) -> None:
    """At the next call, though the answer is kept."""
    name = f"short-{end or 'facts'}"
    browser, other = Browser(guarded_page), Browser(guarded_page)
    replace(guarded.tokens, ENTRIES + entry(f"rt_{name}", name, ("read",), ("a",)))
    try:
        wait_for(lambda: browser.sign_in(f"rt_{name}").status == 204)
        assert other.sign_in(f"rt_{name}").status == 204
        assert browser.trace("a", end, id="one", **params).status == 200
    finally:
        replace(guarded.tokens, ENTRIES)
    with RouteClient(guarded.target, run="a", security=Security(token=f"rt_{name}")) as client:
        wait_for(lambda: is_refused(client))
    answer = browser.trace("a", end, id="one", **params)
    assert answer.status == 401
    assert answer.error["message"] == "Signed out: the token is not valid any more."
    assert not browser.cookies
    assert other.call(SESSION).status == 401


def test_a_session_does_not_come_back_with_its_token(guarded_page: str, guarded: Guarded) -> None:
    browsers = Browser(guarded_page), Browser(guarded_page)
    known = ENTRIES + entry("rt_back", "back", ("read",), ("a",))
    replace(guarded.tokens, known)
    try:
        wait_for(lambda: browsers[0].sign_in("rt_back").status == 204)
        assert browsers[1].sign_in("rt_back").status == 204
        cookies = [{**browser.cookies} for browser in browsers]
        replace(guarded.tokens, ENTRIES)
        wait_for(lambda: browsers[0].call(SESSION).status == 401)
        replace(guarded.tokens, known)
        with RouteClient(guarded.target, run="a", security=Security(token="rt_back")) as client:
            wait_for(lambda: not is_refused(client))
        for browser, held in zip(browsers, cookies, strict=True):
            browser.cookies = held
            assert browser.call(SESSION).status == 401
    finally:
        replace(guarded.tokens, ENTRIES)


def is_refused(client: RouteClient) -> bool:
    """Whether the server does not take the token of a client."""
    try:
        client.server_info()
    except Unauthenticated:
        return True
    return False


def test_wrong_sign_ins_are_bounded(guarded_page: str) -> None:
    browser = Browser(guarded_page)
    for number in range(5):
        answer = browser.sign_in(f"wrong-{number}")
        assert (answer.status, answer.error["kind"]) == (401, "unauthenticated")
    answer = browser.sign_in("rt_a")  # right, and not looked at
    assert answer.status == 429
    assert 1 <= int(answer.headers["Retry-After"]) <= 10
    assert answer.error["message"].startswith("Too many wrong sign-ins. Try again in")
    assert "Set-Cookie" not in answer.headers


def test_right_sign_ins_are_not_bounded(guarded_page: str) -> None:
    browser = Browser(guarded_page)
    assert [browser.sign_in("rt_a").status for _ in range(8)] == [204] * 8


class TestSignIns:
    def test_five_wrong_ones_in_ten_seconds(self) -> None:
        now = [100.0]
        sign_ins = SignIns(lambda: now[0])

        def wrong(address: str = "10.0.0.1") -> None:
            with pytest.raises(Unauthenticated), sign_ins.attempt(address):
                raise Unauthenticated("wrong")

        for _ in range(5):
            wrong()
            now[0] += 1
        with pytest.raises(TooManySignIns) as caught, sign_ins.attempt("10.0.0.1"):
            raise AssertionError
        assert caught.value.retry_after == 5
        wrong("10.0.0.2")
        now[0] = 110.5  # the first one is too old
        wrong()
        with pytest.raises(TooManySignIns), sign_ins.attempt("10.0.0.1"):
            raise AssertionError

    def test_attempts_in_progress_count(self) -> None:
        sign_ins = SignIns(lambda: 1.0)
        blocks = [sign_ins.attempt("10.0.0.1") for _ in range(6)]
        for block in blocks[:5]:
            block.__enter__()
        with pytest.raises(TooManySignIns):
            blocks[5].__enter__()

    def test_a_server_that_is_away_is_no_guess(self) -> None:
        sign_ins = SignIns(lambda: 1.0)
        for _ in range(9):
            with pytest.raises(Unavailable), sign_ins.attempt("10.0.0.1"):
                raise Unavailable("away")
        with sign_ins.attempt("10.0.0.1"):
            pass


class TestSessions:
    def test_a_session_ends_after_twelve_hours(self) -> None:
        now = [0.0]
        sessions = Sessions(lambda: now[0])
        cookie = sessions.open(Caller("rt_a", "a"))
        now[0] = LIFETIME_S - 1
        found = sessions.find(cookie)
        assert found is not None
        assert (found.token, found.user, found.expires) == ("rt_a", "a", 43200)
        now[0] = LIFETIME_S
        assert sessions.find(cookie) is None

    def test_the_oldest_make_room(self) -> None:
        sessions = Sessions()
        cookies = [sessions.open(Caller("rt_a")) for _ in range(1001)]
        assert sessions.find(cookies[0]) is None
        assert all(map(sessions.find, cookies[1:]))
        assert len(set(cookies)) == 1001

    def test_a_token_is_not_printed(self) -> None:
        assert "rt_a" not in repr(Caller("rt_a", "a"))


def test_bodies_that_are_no_sign_in(guarded_page: str) -> None:
    for body, field in (
        (b"", "body"), (b"rt_secret", "body"), (b"[]", "token"), ({"token": ""}, "token"),
        ({"token": 5}, "token"), ({"token": "rt_a", "run": 5}, "run"),
        (b'{"token": "' + b"x" * 20_000 + b'"}', "body"), ({"token": "rt secret"}, "token"),
        ({"token": "\ud800secret"}, "token"), (b"[" * 16_000, "body"),
        (b'{"a":' * 3000, "body"), ({"token": "\0secret"}, "token"),
    ):  # fmt: skip
        answer = Browser(guarded_page).call(SESSION, "POST", body=body)
        assert (answer.status, answer.error["field"]) == (400, field)
        assert b"secret" not in answer.body
        assert "Set-Cookie" not in answer.headers


def test_a_sign_in_names_the_run_that_its_token_covers(guarded: Guarded) -> None:
    with running_page(guarded.target) as address:
        browser = Browser(address)
        refused = browser.sign_in("rt_a")
        assert refused.status == 403
        assert refused.error["message"] == "Your token does not cover run 'default'."
        assert browser.sign_in("rt_a", run="a").status == 204
        assert browser.call(SESSION).json["runs"] == ["a"]


def test_a_token_that_may_not_read(guarded_page: str) -> None:
    answer = Browser(guarded_page).sign_in("rt_feeds")
    assert (answer.status, answer.error["kind"]) == (403, "permission_denied")
    assert answer.error["message"] == "token feeds does not cover the scope 'read'"


def test_a_page_of_some_runs_shows_no_others(guarded: Guarded) -> None:
    with running_page(guarded.target, runs=("b",)) as address:
        browser = Browser(address)
        assert browser.sign_in("rt_all").status == 204
        assert browser.call(SESSION).json["runs"] == ["b"]
        refused = browser.trace("a", id="one")
        assert (refused.status, refused.error["field"]) == (403, "run")
        assert browser.trace("b", id="two").status == 200


# ---------------------------------------------------------------------------- other machines


@pytest.mark.parametrize("listen", ["0.0.0.0:7410", "[::]:0", "10.0.0.1:80", "page.example:80"])
def test_other_machines_need_tls(listen: str) -> None:
    expected = (
        f"listen is '{listen}', which other machines can reach: expected tls_cert and tls_key, "
        "a loopback address, or insecure to be set"
    )
    with pytest.raises(InvalidArgument) as caught:
        PageConfig(listen=listen)
    assert caught.value.message == expected
    assert PageConfig(listen=listen, insecure=True)
    config = PageConfig(listen=listen, tls_cert="c.pem", tls_key="c.key")
    assert config.needs_tokens
    for local in ("127.0.0.1:7410", "localhost:0", "[::1]:7410"):
        assert not PageConfig(listen=local).needs_tokens


def test_other_machines_need_tokens(server, guarded: Guarded, pki) -> None:
    """Though the server needs none."""
    tls = {"listen": "0.0.0.0:0", "tls_cert": str(pki.server.cert), "tls_key": str(pki.server.key)}
    for target, run, status in ((server.target, "r", 403), (guarded.target, "a", 204)):
        with running_page(target, **tls) as address:
            browser = Browser(address.replace("0.0.0.0", "127.0.0.1"), pki.ca)
            for answer in (browser.call(SESSION), browser.trace("r", id="whole")):
                assert (answer.status, answer.error["kind"]) == (401, "unauthenticated")
            answer = browser.sign_in("rt_all", run=run)
            assert answer.status == status
            if status == 403:
                assert "needs no token" in answer.error["message"]
                assert browser.call(SESSION).status == 401
            else:
                assert re.match(r"__Host-routetrace-\d+=", answer.headers["Set-Cookie"])
                assert "; Secure" in answer.headers["Set-Cookie"]
                assert browser.trace("a", id="one").status == 200


def test_a_page_has_no_token_of_its_own(guarded: Guarded, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("rt_all")
    for given in ({"token": "rt_all"}, {"token_file": str(file)}):
        security = Security(**given)
        with running_page(guarded.target, runs=("a",), security=security) as address:
            assert Browser(address).trace("a", id="one").status == 401
        assert "rt_all" not in repr(PageConfig(security=security))


def test_no_token_is_in_an_answer_or_a_log(
    guarded_page: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(0)
    browser = Browser(guarded_page)
    answers = [
        browser.sign_in("rt_a_wrong_secret"),
        browser.sign_in("rt_a"),
        browser.call(SESSION),
        browser.trace("a", id="one"),
        browser.trace("b", id="two"),
        browser.trace("a", id="rt_other"),
    ]
    for answer in answers:
        assert b"rt_a" not in answer.body
        assert "rt_a" not in str(answer.headers)
    printed = capfd.readouterr()
    assert "rt_a" not in caplog.text + printed.out + printed.err
    assert "GET" not in caplog.text + printed.out + printed.err  # no access log
