"""Options of one request, and the id of its trace.

`SamplingParams.extra_args` (HTTP: `vllm_xargs`) may hold, all optional:

    routetrace.trace_id       id of the trace; the same on a prefill and a decode engine
    routetrace.group          labels, by which readers find traces
    routetrace.session
    routetrace.sample
    routetrace.label.<name>
    routetrace.capture        false: the request is not captured
    routetrace.handoff        true: another engine continues this trace
    routetrace.transfer_id    hand-over of KV, where the connector names none: with handoff the one
                              by which its own goes, else the one by which it came
    routetrace.ttl_seconds    lease of the trace after its last change

The default trace id is the user's request id: `X-Request-Id`, or the id given to
`AsyncLLM.generate`. Generated ids (the counter of the `LLM` class) are no trace ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from routetrace.capture_agent.engines.request_options import (
    PREFIX,
    RequestOptions,
    parse_options,
    trace_id_option,
)
from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import check_id

# vLLM turns a request id into "<id>-<8 hex digits>", and its n > 1 samples into "<i>_<that>".
_RANDOM = re.compile(r"-[0-9a-f]{8}$")
_SAMPLE = re.compile(r"^(\d+)_(?=.)")
# Prefixes of the HTTP server before an X-Request-Id; completions append the index of the prompt.
_KIND = re.compile(r"^(?:cmpl|chatcmpl|generate-tokens|resp)-")
_FIRST_PROMPT = re.compile(r"^(cmpl-.*)-0$")
_COUNTER = re.compile(r"^\d+$")


@dataclass(frozen=True)
class Options(RequestOptions):
    """Options of one request to vLLM."""

    transfer_id: str | None = None
    """Hand-over of its KV; None: as the connector names it."""


def options_of(request_id: str, extra_args: Mapping[str, Any] | None, engine_id: str) -> Options:
    """Return the options of a request.

    Args:
        request_id: vLLM's internal id.
        extra_args: of its sampling parameters.
        engine_id: prefix of the trace ids of requests with generated ids.

    Raises:
        InvalidArgument: naming the key, its value and the expectation.
    """
    given = {
        key.removeprefix(PREFIX): value
        for key, value in (extra_args or {}).items()
        if key.startswith(PREFIX)
    }
    sample, name = split_request_id(request_id)
    trace_id = trace_id_option(given.pop("trace_id", None)) or name
    if trace_id is None:
        trace_id = f"{engine_id}/{request_id}"
    elif sample is not None:
        trace_id = f"{trace_id}/{sample}"
    labels = {} if sample is None else {"sample": str(sample)}
    transfer_id = given.pop("transfer_id", None)
    if transfer_id is not None:
        if not isinstance(transfer_id, str):
            raise InvalidArgument(
                field=f"{PREFIX}transfer_id", value=transfer_id, expected="a string"
            )
        check_id(f"{PREFIX}transfer_id", transfer_id)
    options = parse_options(given, trace_id, labels, "docs/vllm.md")
    return Options(**vars(options), transfer_id=transfer_id)


def split_request_id(request_id: str) -> tuple[int | None, str | None]:
    """Split vLLM's internal request id.

    Returns:
        The index among the samples of one request with n > 1, else None; and the user's request
        id, None if it was generated.
    """
    sample = _SAMPLE.match(request_id)
    index = None
    if sample:
        index, request_id = int(sample.group(1)), request_id[sample.end() :]
    name = _RANDOM.sub("", request_id)
    name = _KIND.sub("", _FIRST_PROMPT.sub(r"\1", name))
    return index, None if _COUNTER.match(name) else name
