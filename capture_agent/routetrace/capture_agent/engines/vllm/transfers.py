"""Names of hand-overs of KV between engines, as both of them know them.

Reads vLLM's `Request` and `VllmConfig` alone, and imports nothing of vLLM. Where it is not certain
that a request's KV came by a hand-over, or by which, there is no name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import check_id

#: How a connector names a hand-over: by the engine and the request that send, or by an id that the
#: router gives to both sides. NixlPushConnector is not among them: it finds the sender by the
#: user's request id, which a retry has too.
_Names = Literal["sender", "router"]

_CONNECTORS: Mapping[str, _Names] = {
    "NixlConnector": "sender",
    "NixlPullConnector": "sender",
    "MooncakeConnector": "router",
    "MoRIIOConnector": "router",
}

#: States in which NIXL keeps the KV of a request for another engine.
_KEPT = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")

_OURS = "RouteTraceConnector"
_SEVERAL = "MultiConnector"


@dataclass(frozen=True)
class Transfers:
    """Hand-overs of one engine."""

    names: _Names | None = None
    """How the connector that moves KV names them; None: it does not, or there is none."""
    engine_id: str = ""
    """That connector's name of this engine."""

    @classmethod
    def of(cls, vllm_config: Any) -> Transfers:
        """Return the hand-overs of an engine.

        Of several connectors the first that has tokens loads them, and does not tell the others. So
        they have names only where one connector moves KV.
        """
        config = vllm_config.kv_transfer_config
        if config is None:
            return cls()
        movers = [_described(config)]
        if config.kv_connector == _SEVERAL:
            children = (config.kv_connector_extra_config or {}).get("connectors") or ()
            movers = [dict(child) for child in children]
        movers = [mover for mover in movers if mover.get("kv_connector") != _OURS]
        if len(movers) != 1 or movers[0].get("kv_connector_module_path"):
            return cls()  # of another module, whatever it is called
        (mover,) = movers
        names = _CONNECTORS.get(mover.get("kv_connector") or "")
        return cls(names, str(mover.get("engine_id") or config.engine_id or ""))

    def received(self, request: Any) -> str | None:
        """Return the hand-over that a request's external tokens came by.

        Args:
            request: vLLM's `Request`, which has such tokens.
        """
        params = _params_of(request)
        if self.names == "router":
            name = _id(params.get("transfer_id"))
            # MoRIIO makes one up where the router gives none; only that of a sender tells it.
            return None if name == f"sidecar-{request.request_id}" else name
        if self.names == "sender":
            return _sender(params.get("remote_engine_id"), params.get("remote_request_id"))
        return None

    def sent(self, request: Any) -> str | None:
        """Return the hand-over by which another request may take the KV of one that ends.

        Args:
            request: vLLM's `Request`, which has ended.
        """
        params, status = _params_of(request), request.status.name
        if self.names == "router":
            # A request that stops hands nothing over, and would make the name that of two.
            whole = hands_over(request) and status == "FINISHED_LENGTH_CAPPED"
            return _id(params.get("transfer_id")) if whole else None
        if self.names == "sender" and params and status in _KEPT:
            return _sender(self.engine_id, request.request_id)
        return None


def hands_over(request: Any) -> bool:
    """Whether the router has said that another engine decodes what this request computes."""
    return bool(_params_of(request).get("do_remote_decode"))


def _params_of(request: Any) -> Mapping[str, Any]:
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, Mapping) else {}


def _sender(engine_id: Any, request_id: Any) -> str | None:
    return _id(f"{engine_id}/{request_id}") if engine_id and request_id else None


def _id(name: Any) -> str | None:
    """Return a name that the server takes; None if it is none."""
    if name is None or isinstance(name, bool):
        return None
    try:
        check_id("transfer_id", str(name))
    except InvalidArgument:
        return None
    return str(name)


def _described(config: Any) -> dict[str, Any]:
    names = ("kv_connector", "kv_connector_module_path", "engine_id")
    return {name: getattr(config, name, None) for name in names}
