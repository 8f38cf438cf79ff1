"""What a user says about one request, and how its trace is called.

`SamplingParams.extra_args` (HTTP: `vllm_xargs`) may hold, all optional:

    routetrace.trace_id       the trace's name; the same on a prefill and a decode engine
    routetrace.group          labels, by which readers look traces up; so do
    routetrace.session        routetrace.session and routetrace.sample,
    routetrace.label.<name>   and any other
    routetrace.capture        false: no routing of this request is kept
    routetrace.handoff        true: another engine goes on with this trace
    routetrace.ttl_seconds    life of the trace after its last change

Without a trace id the trace is called as the user called the request: `X-Request-Id`, or the id
given to `AsyncLLM.generate`. Ids that nobody chose (the counter of the `LLM` class) name no trace.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from routetrace.capture_agent.checks import labels_of, number
from routetrace.capture_agent.config import check_id
from routetrace.v1.errors import InvalidArgument

_PREFIX = "routetrace."
_LABEL = "label."
_LABELS = ("group", "session", "sample")

# vLLM makes "<user's>-<8 hex digits>" of a request id, and "<i>_<that>" of its n > 1 samples.
_RANDOM = re.compile(r"-[0-9a-f]{8}$")
_SAMPLE = re.compile(r"^(\d+)_(?=.)")
# What the HTTP server puts before an X-Request-Id; completions count their prompts behind it.
_KIND = re.compile(r"^(?:cmpl|chatcmpl|generate-tokens|resp)-")
_FIRST_PROMPT = re.compile(r"^(cmpl-.*)-0$")
_COUNTER = re.compile(r"^\d+$")


@dataclass(frozen=True)
class RequestOptions:
    """Options of one request."""

    trace_id: str
    """Trace that its rows belong to."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the trace."""
    capture: bool = True
    """Whether its routing is kept."""
    handoff: bool = False
    """Whether another engine goes on with the trace."""
    ttl_seconds: int = 0
    """Life of the trace after its last change; 0: the server's default."""


def options_of(
    request_id: str, extra_args: Mapping[str, Any] | None, engine_id: str
) -> RequestOptions:
    """Options of a request.

    Args:
        request_id: vLLM's internal id of it.
        extra_args: of its sampling parameters.
        engine_id: makes names of traces whose requests nobody named.

    Raises:
        InvalidArgument: naming the key, its value and what was expected.
    """
    given = {
        key.removeprefix(_PREFIX): value
        for key, value in (extra_args or {}).items()
        if key.startswith(_PREFIX)
    }
    sample, name = split_request_id(request_id)
    trace_id = _string("trace_id", given.pop("trace_id", None)) or name
    if trace_id is None:
        trace_id = f"{engine_id}/{request_id}"
    elif sample is not None:
        trace_id = f"{trace_id}/{sample}"
    check_id(f"{_PREFIX}trace_id", trace_id)
    labels: dict[str, str] = {}
    for key in [k for k in given if k in _LABELS or k.startswith(_LABEL)]:
        labels[key.removeprefix(_LABEL)] = str(given.pop(key))
    if sample is not None:
        labels.setdefault("sample", str(sample))
    capture = _flag("capture", given.pop("capture", True))
    handoff = _flag("handoff", given.pop("handoff", False))
    ttl_seconds = given.pop("ttl_seconds", 0)
    if isinstance(ttl_seconds, bool) or not isinstance(ttl_seconds, (int, float)):
        raise _wrong("ttl_seconds", ttl_seconds, "a number of seconds")
    ttl_seconds = number(f"{_PREFIX}ttl_seconds", int(ttl_seconds), 1 << 32)
    if given:
        key = next(iter(given))
        raise _wrong(key, given[key], "an option that docs/vllm.md lists")
    return RequestOptions(trace_id, labels_of(labels), capture, handoff, ttl_seconds)


def split_request_id(request_id: str) -> tuple[int | None, str | None]:
    """Takes vLLM's internal request id apart.

    Returns:
        The index among the samples of one request with n > 1, else None; and what the user called
        the request, None if nobody gave it a name.
    """
    sample = _SAMPLE.match(request_id)
    index = None
    if sample:
        index, request_id = int(sample.group(1)), request_id[sample.end() :]
    name = _RANDOM.sub("", request_id)
    name = _KIND.sub("", _FIRST_PROMPT.sub(r"\1", name))
    return index, None if _COUNTER.match(name) else name


def _string(key: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, int)) or isinstance(value, bool) or value == "":
        raise _wrong(key, value, "a string")
    return str(value)


def _flag(key: str, value: object) -> bool:
    # JSON callers may send 0 and 1: vllm_xargs knows no booleans in some versions.
    if value in (True, False):
        return bool(value)
    if value in ("true", "false"):
        return value == "true"
    raise _wrong(key, value, "true or false")


def _wrong(key: str, value: object, expected: str) -> InvalidArgument:
    return InvalidArgument(field=_PREFIX + key, value=value, expected=expected)
