"""Ids and labels of anybody's choice are text, and links to them open them."""

from __future__ import annotations

import ast
import json
import re

import pytest
from playwright.sync_api import Page, expect

from .conftest import ODD_IDS
from .watched import expect_no_scroll, link


def spelled(text: str) -> str:
    """Text as the page shows it."""
    return re.sub("[\u202e\u200b\n]", lambda c: f"\\u{ord(c[0]):04x}", text)


@pytest.mark.quick
@pytest.mark.parametrize("trace_id", ODD_IDS, ids=range(len(ODD_IDS)))
def test_an_odd_id_is_text(page: Page, address: str, open_trace, trace_id: str) -> None:
    open_trace(trace_id)
    expect(page.locator("h1 bdi")).to_have_text(spelled(trace_id), use_inner_text=False)
    assert page.locator("h1 bdi").evaluate("e => e.textContent") == spelled(trace_id)
    assert (
        page.locator(
            "main img, main script, main b:not(.timeline *):text('k'), main i:text('z')"
        ).count()
        == 0
    )
    assert page.locator("script").count() == 1
    labels = page.locator(".labels bdi").all_text_contents()
    assert sorted(labels) == sorted(["<b>k=\\u202egnp", "x</script>=<i>" + "z" * 200])
    assert page.title() == f"{spelled(trace_id)} · routetrace"
    expect_no_scroll(page)


@pytest.mark.quick
def test_the_field_opens_an_odd_id(page: Page, address: str) -> None:
    for trace_id in ODD_IDS:
        if "\n" in trace_id:
            continue  # a field has one line
        page.goto(f"{address}/#/traces?run=r")
        page.get_by_role("searchbox", name="Part of the id").fill(trace_id)
        page.keyboard.press("Enter")
        expect(page.locator("h1 bdi")).to_have_text(spelled(trace_id))
        assert page.evaluate("location.hash").startswith(link(trace_id)[:9])


def test_a_stray_percent_is_text(page: Page, address: str, watched) -> None:
    watched.allowed.append("404")
    page.goto(f"{address}/#/trace?id=50%")
    expect(page.get_by_role("heading", level=1)).to_have_text("There is no such trace")
    assert page.get_by_role("textbox", name="Id of a trace").input_value() == "50%"


@pytest.mark.parametrize("trace_id", ODD_IDS, ids=range(len(ODD_IDS)))
def test_copied_python_names_the_trace(page: Page, open_trace, trace_id: str) -> None:
    open_trace(trace_id)
    page.get_by_role("button", name="Copy as Python").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    code = page.evaluate("navigator.clipboard.readText()")
    texts = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert trace_id in texts, json.dumps(code)
