"""Scenarios, and their sizes in each share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from neighbours.place import ATTACKER


@dataclass(frozen=True)
class Scenario:
    """One attack.

    Attributes:
        attack: module and function.
        ci: arguments of the function in the share of CI, which leaves the attack out if there are
            none; in the full one it has its defaults.
        settings: of the server.
        tenant: whose token the attacker has; none if empty.
        source: address that the attacker connects from, if that matters.
        proxied: whether all tenants reach the server through HAProxy.
        judged: whether the figures of speed have goals; gRPC without a proxy cannot keep them where
            no option of it refuses what it decodes.
    """

    attack: str
    ci: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    tenant: str = ATTACKER
    source: str = ""
    proxied: bool = False
    judged: bool = True


SCENARIOS = {
    "stalled reads": Scenario("reads.stalled", {"count": 300}),
    "waiting reads": Scenario("reads.waiting", {"count": 3000}),
    "list by state": Scenario("reads.list_by_state", {"traces": 6000}),
    "watches": Scenario("reads.watch", {"traces": 6000, "count": 300}),
    "retire": Scenario("reads.retire"),
    "growing trace": Scenario("reads.growing"),
    "blocks read": Scenario("reads.blocks", {"ids": 1_000_000}),
    "bind, far step": Scenario("writes.bind_step", {"calls": 20}),
    "bind, many blocks": Scenario("writes.bind_blocks"),
    "begins": Scenario("writes.many_begins", {"chunks": 2}),
    "slot maps": Scenario("writes.slot_maps", {}),
    "crash loop": Scenario("writes.crash_loop", {"names": 300}),
    "drop reasons": Scenario("writes.heartbeat"),
    "rapid reset": Scenario("wire.rapid_reset", {"streams": 40_000}, tenant=""),
    "unfinished calls": Scenario("wire.unfinished_calls", {"streams": 4000}, tenant=""),
    "HPACK bomb": Scenario("wire.hpack_bomb", {"frames": 100}, tenant="", judged=False),
    "health watches": Scenario("wire.watches", tenant=""),
    "half HTTP": Scenario("wire.half_http", {"count": 300}, tenant=""),
    "full store": Scenario(
        "writes.fill", {}, {"store_capacity": 64 << 20, "sweep_interval_seconds": 1}
    ),
    "full index": Scenario(
        "writes.fill_index", None, {"memory_limit": 384 << 20, "sweep_interval_seconds": 1}
    ),
    "rapid reset, proxied": Scenario(
        "wire.rapid_reset", {"streams": 40_000}, tenant="", source="127.0.0.2", proxied=True
    ),
    "HPACK bomb, proxied": Scenario(
        "wire.hpack_bomb", {}, tenant="", source="127.0.0.3", proxied=True
    ),
}


@dataclass(frozen=True)
class Share:
    """Times and sizes.

    Attributes:
        calm_s: seconds of the idle and of the honest phase.
        attack_s: longest time of an attack.
        small: whether the scenarios' sizes of CI count.
        alone: whether each scenario has a server of its own.
    """

    calm_s: float
    attack_s: float
    small: bool
    alone: bool


SHARES = {"ci": Share(1.5, 1.5, True, False), "full": Share(5.0, 12.0, False, True)}
