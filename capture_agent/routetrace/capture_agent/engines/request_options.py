"""Options of one request, in the words that all engines share.

trace_id       id of the trace; the same on a prefill and a decode engine
group          labels, by which readers find traces
session
sample
label.<name>
capture        false: the request is not captured
handoff        true: another engine continues this trace
ttl_seconds    lease of the trace after its last change
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from routetrace.capture_agent.step_path.checks import labels_of, number
from routetrace.codec.records import KV_CACHE_DTYPE_LABEL
from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import check_id

#: Prefix of the names of options.
PREFIX = "routetrace."

#: Other names of dtypes of KV caches, in vLLM ("Quantized KV Cache") and in SGLang ("Server Args").
_DTYPES = {"fp8": "fp8_e4m3", "bf16": "bfloat16"}

_LABEL = "label."
_LABELS = ("group", "session", "sample")


@dataclass(frozen=True)
class RequestOptions:
    """Options of one request."""

    trace_id: str
    """Trace of its rows."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the trace."""
    capture: bool = True
    """Whether it is captured."""
    handoff: bool = False
    """Whether another engine continues the trace."""
    ttl_seconds: int = 0
    """Lease of the trace after its last change; 0: the server's default."""


def parse_options(
    given: Mapping[str, Any], trace_id: str, labels: Mapping[str, str], page: str
) -> RequestOptions:
    """Return the options of a request.

    Args:
        given: by name, but for the trace id.
        trace_id: of the request.
        labels: of the engine, where the request gives no others.
        page: that lists the options.

    Raises:
        InvalidArgument: naming the option, its value and the expectation.
    """
    left = dict(given)
    check_id(f"{PREFIX}trace_id", trace_id)
    names = [key for key in left if key in _LABELS or key.startswith(_LABEL)]
    added = {key.removeprefix(_LABEL): str(left.pop(key)) for key in names}
    capture = _flag("capture", left.pop("capture", True))
    handoff = _flag("handoff", left.pop("handoff", False))
    ttl_seconds = left.pop("ttl_seconds", 0)
    if isinstance(ttl_seconds, bool) or not isinstance(ttl_seconds, (int, float)):
        raise _wrong("ttl_seconds", ttl_seconds, "a number of seconds")
    ttl_seconds = number(f"{PREFIX}ttl_seconds", int(ttl_seconds), 1 << 32)
    if left:
        key = next(iter(left))
        raise _wrong(key, left[key], f"an option that {page} lists")
    return RequestOptions(trace_id, labels_of({**labels, **added}), capture, handoff, ttl_seconds)


def trace_id_option(value: object) -> str | None:
    """Return the option `trace_id`; None if it is not given.

    Raises:
        InvalidArgument: if it is no id.
    """
    if value is None:
        return None
    if not isinstance(value, (str, int)) or isinstance(value, bool) or value == "":
        raise _wrong("trace_id", value, "a string")
    return str(value)


def kv_cache_labels(kv_cache_dtype: str, dtype: str) -> dict[str, str]:
    """Return the label of an engine's KV cache, if its dtype is not that of the model.

    Args:
        kv_cache_dtype: as the engine is configured; "auto" is that of the model.
        dtype: of the model, such as "torch.bfloat16".
    """
    name = _DTYPES.get(kv_cache_dtype, kv_cache_dtype)
    same = name in ("auto", dtype.removeprefix("torch."))
    return {} if same else {KV_CACHE_DTYPE_LABEL: name}


def _flag(key: str, value: object) -> bool:
    # JSON callers may send 0 and 1: vllm_xargs has no booleans in some versions.
    if value in (True, False):
        return bool(value)
    if value in ("true", "false"):
        return value == "true"
    raise _wrong(key, value, "true or false")


def _wrong(key: str, value: object, expected: str) -> InvalidArgument:
    return InvalidArgument(field=PREFIX + key, value=value, expected=expected)
