"""Errors as answers; a server that is away or busy."""

from __future__ import annotations

import json

import pytest

from routetrace.common import errors
from routetrace.common.errors import NotFound, Overloaded, RouteTraceError
from routetrace.page import backends, trace_endpoints
from routetrace.page.errors import TooManySignIns, answer, lost_trace
from routetrace.server.testing import free_ports
from support.pages import Browser, running_page
from support.servers.client_server import ScriptedServer, fail, truth

#: Status and kind by class; every class has one.
EXPECTED = {
    "RouteTraceError": (500, "internal"),
    "InvalidArgument": (400, "invalid_argument"),
    "ModelNotSupported": (400, "invalid_argument"),
    "MissingDependency": (500, "internal"),
    "NotFound": (404, "not_found"),
    "Incomplete": (500, "internal"),
    "Corrupt": (500, "corrupt"),
    "Fenced": (500, "internal"),
    "OutOfSequence": (500, "internal"),
    "Overloaded": (503, "overloaded"),
    "Unavailable": (503, "unavailable"),
    "DeadlineExceeded": (503, "deadline_exceeded"),
    "Unauthenticated": (401, "unauthenticated"),
    "PermissionDenied": (403, "permission_denied"),
    "Moved": (500, "internal"),
    "Closed": (503, "unavailable"),
}


def test_each_error_has_a_status() -> None:
    found = {
        name: cls
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, RouteTraceError) and name[0] != "_"
    }
    assert found.keys() == EXPECTED.keys()
    for name, cls in found.items():
        response = answer(cls("words"))
        body = json.loads(response.body)["error"]
        assert (response.status_code, body["kind"]) == EXPECTED[name], name
        assert body["message"] == "words"
        assert {"kind", "field", "value", "expected", "message"} <= body.keys()
        assert ("Retry-After" in response.headers) == (response.status_code == 503)


def test_seconds_until_another_attempt() -> None:
    assert answer(Overloaded("full", retry_after=7.6)).headers["Retry-After"] == "8"
    assert answer(Overloaded("full", retry_after=0.05)).headers["Retry-After"] == "1"
    response = answer(TooManySignIns(3.2))
    assert (response.status_code, response.headers["Retry-After"]) == (429, "3")


@pytest.mark.parametrize(
    ("message", "words", "at"),
    [
        ("trace 'x' of run 'r' has expired at 2026-01-02T03:04:05Z: its lease ran out", " d ago: ",
         1767323045.0),
        ("trace 'x' of run 'r' has expired", "'x' was forgotten: expired.", None),
    ],
)  # fmt: skip
def test_words_for_traces_that_were_forgotten(message: str, words: str, at: float | None) -> None:
    gone = NotFound(message, field="trace_id", reason="expired")
    error = lost_trace(gone, "r", "x")
    assert words in error.message
    assert error.message.startswith("'x' was forgotten")
    body = json.loads(answer(error).body)["error"]
    assert (body["reason"], body["forgotten_at"], body["details"]) == ("expired", at, message)


def test_no_id_passes_for_a_time() -> None:
    forged = "trace ' at 2026-01-02T03:04:05Z' is not in run 'r'"
    error = lost_trace(NotFound(forged, field="trace_id"), "r", "x")
    assert json.loads(answer(error).body)["error"]["forgotten_at"] is None


def test_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_CALL_S", 0.2)
    target = f"127.0.0.1:{free_ports(1)}"
    with running_page(target) as address:
        reply = Browser(address).trace("r", id="x")
        assert (reply.status, reply.error["kind"]) == (503, "unavailable")
        assert target in reply.error["message"]
        assert reply.headers["Retry-After"]


def test_a_failure_without_a_type_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("rt_secret")

    monkeypatch.setattr(trace_endpoints, "facts_of", broken)
    with ScriptedServer() as scripted:
        info = truth(3).info
        scripted.tell(lambda _: info)
        with running_page(scripted.target) as address:
            reply = Browser(address).trace("default", id="req")
    assert (reply.status, reply.error["kind"]) == (500, "internal")
    assert b"secret" not in reply.body
    assert reply.headers["Content-Security-Policy"]


def test_an_error_of_the_server_keeps_its_fields() -> None:
    with ScriptedServer() as scripted:

        def describe(request: object, context: object) -> None:
            fail(context, errors.InvalidArgument(field="run", value="'x'", expected="a name"))

        scripted.script["DescribeTrace"] = describe
        with running_page(scripted.target) as address:
            reply = Browser(address).trace("default", id="req")
    assert reply.status == 400
    assert reply.error == {
        "kind": "invalid_argument",
        "field": "run",
        "value": "'x'",
        "expected": "a name",
        "message": "run is 'x'; expected a name",
    }
