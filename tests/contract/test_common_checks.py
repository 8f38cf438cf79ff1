"""Checks of arguments that all sides share: their messages."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from routetrace.client import _arguments
from routetrace.common import checks
from routetrace.common.errors import InvalidArgument, kind_of
from routetrace.common.target import unreachable


class _Item:
    pass


@pytest.mark.parametrize(
    ("choices", "or_none", "expected"),
    [
        (("a",), False, "'a'"),
        (("a",), True, "'a' or None"),
        (("a", "b"), False, "'a' or 'b'"),
        (("a", "b", "c"), False, "'a', 'b' or 'c'"),
        (("a", "b"), True, "'a', 'b' or None"),
    ],
)
def test_choices_read_well(choices, or_none, expected):
    with pytest.raises(InvalidArgument) as caught:
        checks.choice("word", "x", choices, or_none=or_none)
    assert str(caught.value) == f"word is 'x'; expected {expected}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "None"),
        ("text", "a str"),
        (1, "an int"),
        (np.zeros(1), "an ndarray"),
        (np.uint8(1), "a uint8"),
        (OrderedDict(), "an OrderedDict"),
        (Path(), f"a {type(Path()).__name__}"),
        (_Item(), "an _Item"),
    ],
)
def test_kinds_have_their_articles(value, expected):
    assert kind_of(value) == expected


@pytest.mark.parametrize("value", ["1", None, True, np.True_, 1j, [1], np.zeros(1)])
def test_numbers_are_checked_for_type(value):
    for check, expected in (
        (lambda: checks.real("x", value, 0, 9), "expected a number"),
        (lambda: checks.real("x", value, 0, 9, "seconds"), "expected a number of seconds"),
        (lambda: checks.seconds("x", value), "expected a number of seconds above 0"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            check()
        assert str(caught.value).endswith(f"; {expected}")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -1, np.float32("nan")])
def test_numbers_are_checked_for_range(value):
    for check, expected in (
        (lambda: checks.real("x", value, 0, 9), "expected a finite number in [0, 9]"),
        (lambda: checks.seconds("x", value), "above 0, up to 31536000"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            check()
        assert str(caught.value).endswith(expected)


@pytest.mark.parametrize("value", [1, 1.0, np.int64(1), np.float32(1)])
def test_numbers_become_floats(value):
    for number in (checks.real("x", value, 0, 9), checks.seconds("x", value)):
        assert type(number) is float
        assert number == 1


def test_an_unknown_keyword_is_one_class():
    error = checks.unknown_keyword("get", "time_out", ["timeout", "missing"])
    assert isinstance(error, TypeError)
    assert str(error) == (
        "get() got an unexpected keyword argument 'time_out'; did you mean 'timeout'? expected "
        "one of timeout, missing"
    )
    assert _arguments.UnknownKeyword is checks.UnknownKeyword
    assert _arguments.unknown_keyword is checks.unknown_keyword


_LAST = "failed to connect to all addresses; last error: "


@pytest.mark.parametrize(
    ("details", "text"),
    [
        # gRPC 1.62 and 1.85: a silent port, the same under TLS, one that drops packets, HTTP/1.
        (f"{_LAST}UNKNOWN: ipv4:h:1: connection attempt timed out before receiving SETTINGS frame",
         "no answer from h:1 in 5 s, though it takes connections"),
        (f"{_LAST}UNKNOWN: ipv4:h:1: Handshake read failed",
         "no answer from h:1 in 5 s, though it takes connections"),
        (f"{_LAST}UNAVAILABLE: ipv4:h:1: Handshake read failed (Endpoint closing)",
         "no answer from h:1 in 5 s, though it takes connections"),
        (f"{_LAST}UNKNOWN: ipv4:h:1: Failed to connect to remote host: FD Shutdown",
         "cannot connect to h:1 (no answer in 5 s)"),
        (f"{_LAST}UNKNOWN: ipv4:h:1: tcp handshaker shutdown",
         "cannot connect to h:1 (no answer in 5 s)"),
        (f"{_LAST}INTERNAL: ipv4:h:1: Trying to connect an http1.x server",
         "h:1 speaks HTTP/1, not gRPC"),
        (f"{_LAST}INTERNAL: ipv4:h:1: Failed parsing HTTP/2 (Expected SETTINGS frame as the first "
         "frame, got frame type 80) (Trying to connect an http1.x server (HTTP status 400))",
         "h:1 speaks HTTP/1, not gRPC"),
        (f"{_LAST}UNAVAILABLE: ipv4:h:1: Failed parsing HTTP/2", "h:1 does not speak gRPC"),
        ("UNAVAILABLE: Stream removed (ping timeout)", "no answer from h:1 any more"),
        ("CANCELLED: CANCELLED", "h:1 cancelled the call"),
        ("UNAVAILABLE: the deadline of the disk", "h:1: UNAVAILABLE: the deadline of the disk"),
    ],
)  # fmt: skip
def test_words_of_grpc_are_named_by_their_cause(details: str, text: str) -> None:
    options = [("grpc.min_reconnect_backoff_ms", 5000)]
    assert unreachable("h:1", details, "", options).startswith(text)


def test_an_attempt_takes_twenty_seconds_where_no_option_says_otherwise() -> None:
    details = f"{_LAST}UNKNOWN: ipv4:h:1: tcp handshaker shutdown"
    for options in ((), [("grpc.min_reconnect_backoff_ms", "5")]):
        assert "no answer in 20 s" in unreachable("h:1", details, "", options)
