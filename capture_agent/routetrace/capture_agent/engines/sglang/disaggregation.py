"""Prefill and decode engines: which calls of SGLang show the KV that moves between them.

A prefill engine hands every request over, once its prompt is computed. A decode engine gets the KV
of the prompt from it, in slots that it has allocated, and does not compute the last token of the
prompt again. The pass that SGLang reports for such a prompt computes nothing. A request that ends
with its first token, or fails before, is in no pass of the decode engine.

Both engines are told where they meet, by the body that SGLang's router sends to both: host and port
of the prefill engine's bootstrap server, and the room there. That names the hand-over.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from routetrace.capture_agent.engines.sglang import seams
from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import check_id

#: Attribute of SGLang's `Req`: cached tokens of its only arrival, -1 if KV arrived again.
_MARK = "_routetrace_arrival"

#: Arguments of SGLang's allocation of slots for KV that arrives.
_ALLOCATION = ("self", "req", "prefix_indices", "prefix_len", "total_prefix_len")


class Role(Enum):
    """Part of an engine in the work on a request; values of SGLang's `disaggregation_mode`."""

    WHOLE = "null"
    PREFILL = "prefill"
    DECODE = "decode"

    @classmethod
    def of(cls, server_args: Any) -> Role:
        """Return the role of a server."""
        return cls(server_args.disaggregation_mode or cls.WHOLE.value)


@dataclass(frozen=True, slots=True)
class Arrival:
    """How the KV of a prompt came to a decode engine."""

    transfer_id: str
    """Of the hand-over."""
    num_cached: int
    """Leading tokens whose KV did not come by it: the engine had them in its own cache."""


def transfer_id(req: Any) -> str | None:
    """Return the id of the hand-over of a request: host:port/room; None without a name for it.

    A port that the body leaves out is the default of each engine; if the defaults differ, so do
    the ids, and no KV moves either.
    """
    host, port, room = req.bootstrap_host, req.bootstrap_port, req.bootstrap_room
    if not isinstance(host, str) or not isinstance(port, int) or not isinstance(room, int):
        return None
    if not host or is_synthetic(req):
        return None
    if _is_local(host):
        scope = _network()
        if scope is None:
            return None
        host = f"{scope}/{host}"
    try:
        check_id("transfer_id", name := f"{host}:{port}/{room}")
    except InvalidArgument:
        return None
    return name


def _is_local(host: str) -> bool:
    """Whether a host names another machine on each machine."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


@cache
def _network() -> str | None:
    """Return a name of this machine's network, as containers see it; None where there is none.

    Engines that meet at a loopback address share it; pairs on other machines do not.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return None


def note_arrival(req: Any, num_cached: int) -> None:
    """Note that KV is about to be written to slots of a request.

    What arrives after a retraction is another pass of the prefill engine, or comes back from host
    memory: a request to which KV arrives again before its first pass has no arrival.
    """
    setattr(req, _MARK, -1 if hasattr(req, _MARK) else num_cached)


def arrival_of(req: Any) -> Arrival | None:
    """Return how the KV of a request came; None if it came in no way that has a name."""
    num_cached = getattr(req, _MARK, -1)
    name = transfer_id(req) if num_cached >= 0 else None
    return None if name is None else Arrival(name, num_cached)


def hook_transfers(capture: Callable[[], Any], moves: bool = True) -> None:
    """Hook a decode engine's calls for KV that another engine sends.

    Args:
        capture: returns the capture of this process, None without one.
        moves: whether KV moves at all: SGLang's backend `fake` moves none.

    Raises:
        Refused: if this version of SGLang lacks a name.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def allocated(slots: Any, *args: Any, **named: Any) -> None:
        if (current := capture()) is None:
            return
        given = dict(zip(_ALLOCATION, args, strict=False)) | named
        if moves and "req" in given:
            cached = given.get("total_prefix_len") or given.get("prefix_len") or 0
            current.arrives(given["req"], cached)
        current.loaded(slots)

    seams.check_found([seams.RECEIVED])
    wanted = (seams.RECEIVED, allocated), (seams.RECOMPUTED, _uncaptured)
    hooks = [(place, hook) for seam, hook in wanted if (place := seam.place) is not None]
    for name, hook in hooks:
        HookRegistry.register(name, hook, HookType.AFTER)
    HookRegistry.apply_hooks()
    seams.check_applied([name for name, _ in hooks])


def _uncaptured(payload: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
    """Have the prefill engine compute KV again without rows: the trace has those of the samples."""
    options = {"custom_params": {"routetrace": {"capture": False}}}
    return {**payload, "sampling_params": {**payload["sampling_params"], **options}}


def is_synthetic(req: Any) -> bool:
    """Whether no engine computes the prompt of a request: a decode engine's warm-up."""
    host: object = req.bootstrap_host
    return host == seams.SYNTHETIC_HOST
