"""Signing in and out, and what becomes of a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from routetrace.client import Security
from routetrace.server.testing import run_server
from support.pages import running_page
from support.servers.guarded import entry, feed, replace

from .watched import Watched, link

TOKEN = "rt_all_and_secret"
OTHERS = entry("rt_b", "of-b", ("read",), ("b",))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(entry(TOKEN, "all") + OTHERS)
    path.chmod(0o600)
    return path


@pytest.fixture
def guarded(tokens: Path) -> Iterator[str]:
    with run_server(tokens_file=tokens, agent_timeout_seconds=3600) as server:
        feed(server.target, Security(token=TOKEN), "a", "one")
        feed(server.target, Security(token=TOKEN), "b", "two")
        with running_page(server.target) as address:
            yield address.rstrip("/")


@pytest.fixture
def tab(context, guarded: str) -> Iterator[Watched]:
    watched = Watched(context.new_page(), {urlsplit(guarded).netloc})
    # The browser itself says in its console which answers were no success.
    watched.allowed += ["status of 401", "status of 403"]
    yield watched
    watched.check()


def sign_in(tab: Watched, token: str) -> None:
    tab.page.get_by_label("Token", exact=True).fill(token)
    tab.page.get_by_role("button", name="Sign in").click()


@pytest.mark.quick
def test_in_and_out(tab: Watched, guarded: str) -> None:
    page = tab.page
    page.goto(f"{guarded}/{link('one', '&run=a')}")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    assert page.locator("nav").is_hidden()
    sign_in(tab, "wrong")
    expect(page.get_by_role("alert")).to_have_text("This token is not valid.")
    sign_in(tab, TOKEN)
    expect(page.locator("h1 bdi")).to_have_text("one")
    expect(page.get_by_role("combobox", name="Run")).to_have_value("a")
    told = page.evaluate(
        "JSON.stringify([performance.getEntries(), location.href, {...localStorage},"
        " {...sessionStorage}, document.cookie, document.documentElement.outerHTML])"
    )
    assert TOKEN not in told
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    page.reload()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_revoked_token(tab: Watched, guarded: str, tokens: Path) -> None:
    page = tab.page
    page.goto(f"{guarded}/{link('one', '&run=a')}")
    sign_in(tab, TOKEN)
    expect(page.locator("h1 bdi")).to_have_text("one")
    replace(tokens, OTHERS)
    tokens.chmod(0o600)
    words = "Signed out: the token is not valid any more."
    expect(page.get_by_text(words)).to_be_visible(timeout=60_000)
    assert page.locator("canvas").count() == 0


def test_a_token_of_one_run(tab: Watched, guarded: str) -> None:
    page = tab.page
    page.goto(f"{guarded}/#/")
    sign_in(tab, "rt_b")
    field = page.get_by_label("Run of the token")
    expect(field).to_be_focused()
    field.fill("b")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.keyboard.press("/")
    page.get_by_role("searchbox", name="Part of the id").fill("two")
    page.keyboard.press("Enter")
    expect(page.locator("h1 bdi")).to_have_text("two")
    page.goto(f"{guarded}/{link('one', '&run=a')}")
    expect(page.get_by_role("heading", level=1)).to_have_text("Your token does not cover run a")
    assert page.locator("canvas").count() == 0
