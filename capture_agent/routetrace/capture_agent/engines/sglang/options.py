"""Options of one request, and the id of its trace.

A request may hold `custom_params={"routetrace": {...}}` in its sampling parameters (OpenAI API:
`custom_params`), an object of the options in `engines/request_options.py`; labels may also be an
object `labels`. The default trace id is SGLang's request id (`rid`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from routetrace.capture_agent.engines.request_options import (
    RequestOptions,
    parse_options,
    trace_id_option,
)
from routetrace.common.errors import InvalidArgument

#: Requests by which a server checks itself have ids that start so.
_HEALTH_CHECK = "HEALTH_CHECK"


def options_of(request_id: str, custom_params: Any) -> RequestOptions | None:
    """Return the options of a request; None if it is not captured.

    Args:
        request_id: SGLang's `rid`.
        custom_params: of its sampling parameters.

    Raises:
        InvalidArgument: naming the option, its value and the expectation.
    """
    if request_id.startswith(_HEALTH_CHECK):
        return None
    given = (custom_params or {}).get("routetrace") or {}
    if not isinstance(given, Mapping):
        raise InvalidArgument(
            field="custom_params.routetrace", value=given, expected="an object of options"
        )
    left = dict(given)
    labels = left.pop("labels", None) or {}
    if not isinstance(labels, Mapping):
        raise InvalidArgument(field="routetrace.labels", value=labels, expected="an object")
    left.update({f"label.{name}": value for name, value in labels.items()})
    trace_id = trace_id_option(left.pop("trace_id", None)) or request_id
    options = parse_options(left, trace_id, {}, "docs/sglang.md")
    return options if options.capture else None
