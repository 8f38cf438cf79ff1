"""What vLLM's configuration says: whether capture is asked for, by which way, and with what.

    connector   kv_transfer_config names RouteTraceConnector, alone or in a MultiConnector; settings
                are its kv_connector_extra_config
    plugin      additional_config has a "routetrace"; settings are what it holds. Or the
                environment has ROUTETRACE_VLLM=1

Settings are fields of `AgentConfig`: target, run, engine_id, mode, linger_s, queue_bytes, ...;
`security` is an object of the fields of `Security`.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from routetrace.capture_agent.config import AgentConfig, security_of
from routetrace.v1.errors import InvalidArgument

#: Name of the connector, and of the module that has it.
CONNECTOR = "RouteTraceConnector"

Way = Literal["connector", "plugin"]

_SET_BY_US = {"layout", "shard", "boot_id", "block_size", "num_blocks", "attributes"}
_SETTINGS = {f.name for f in fields(AgentConfig)} - _SET_BY_US


@dataclass(frozen=True)
class Settings:
    """Where the routing of one engine goes."""

    way: Way
    """How steps and requests are followed."""
    run: str
    """Namespace of the traces."""
    engine_id: str
    """Of this data-parallel rank."""
    boot_id: str
    """Of this boot of the engine; the same in all its processes."""
    agent: Mapping[str, Any]
    """Other settings of the agent."""


def settings_of(vllm_config: Any) -> Settings | None:
    """The settings in a `VllmConfig`; None if nothing is to be captured.

    Raises:
        InvalidArgument: naming the setting that is wrong.
    """
    by_connector = _connector_settings(vllm_config.kv_transfer_config)
    by_plugin = _plugin_settings(vllm_config.additional_config)
    given = by_plugin if by_connector is None else by_connector
    if given is None:
        return None
    unknown = sorted(set(given) - _SETTINGS)
    if unknown:
        raise InvalidArgument(
            field="routetrace setting",
            value=unknown[0],  # and not what it holds: it may be a token
            expected=f"one of {', '.join(sorted(_SETTINGS))}",
        )
    agent = dict(given)
    if "security" in agent:  # at once: a mapping would show its token where settings are printed
        agent["security"] = security_of(agent["security"])
    run = agent.pop("run", "") or os.environ.get("ROUTETRACE_RUN", "") or "default"
    engine_id = agent.pop("engine_id", "") or os.environ.get("ROUTETRACE_ENGINE_ID", "")
    boot_id = str(vllm_config.instance_id)
    parallel = vllm_config.parallel_config
    if not engine_id:
        # Nobody named it: unique, though not the same after a restart.
        engine_id = f"vllm-{socket.gethostname()}-{boot_id}"
        if getattr(parallel, "nnodes", 1) > 1:
            raise InvalidArgument(
                field="engine_id", value="", expected="a name: the engine spans several hosts"
            )
    rank = parallel.data_parallel_index
    if rank or parallel.data_parallel_size > 1:
        engine_id = f"{engine_id}-dp{rank}"
    way: Way = "plugin" if by_connector is None else "connector"
    return Settings(way, run, engine_id, boot_id, agent)


def _connector_settings(config: Any) -> Mapping[str, Any] | None:
    if config is None:
        return None
    extra = config.kv_connector_extra_config or {}
    if config.kv_connector == CONNECTOR:
        return dict(extra)
    if config.kv_connector == "MultiConnector":
        for child in extra.get("connectors", ()):
            if child.get("kv_connector") == CONNECTOR:
                return dict(child.get("kv_connector_extra_config") or {})
    return None


def _plugin_settings(config: Any) -> Mapping[str, Any] | None:
    given = config.get("routetrace") if isinstance(config, dict) else None
    if given is None and os.environ.get("ROUTETRACE_VLLM") == "1":
        return {}
    if given is not None and not isinstance(given, dict):
        raise InvalidArgument(
            field="additional_config['routetrace']", value=given, expected="an object of settings"
        )
    return given


def refuse_unsupported(vllm_config: Any) -> None:
    """Raises InvalidArgument if the engine runs in a way in which rows would be wrong or lost."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    for field, value, fine, why in (
        ("enable_dbo", getattr(parallel, "use_ubatching", False), False,
         "off: halves of a batch that overlap write to the same rows"),
        ("decode_context_parallel_size", getattr(parallel, "decode_context_parallel_size", 1), 1,
         "1: blocks of a request are spread over ranks"),
        ("prefill_context_parallel_size", getattr(parallel, "prefill_context_parallel_size", 1), 1,
         "1: tokens of a request are spread over ranks"),
        ("speculative_config", bool(speculative) and bool(scheduler.async_scheduling), False,
         "no asynchronous scheduling beside it (--no-async-scheduling): the scheduler "
         "does not know positions before drafts are judged"),
        ("runner_type", model.runner_type, "generate", "'generate': others sample no tokens"),
        ("is_encoder_decoder", bool(model.is_encoder_decoder), False, "a decoder-only model"),
    ):  # fmt: skip
        if value != fine:
            raise InvalidArgument(field=field, value=value, expected=why)


def attention_group(kv_cache_config: Any) -> tuple[int, int] | None:
    """The KV cache group that keeps every token, and its block size; None if there is none.

    Sliding windows and states recycle their blocks: slots of theirs say nothing of a token.
    """
    from vllm.v1.kv_cache_interface import is_full_attention_spec

    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if is_full_attention_spec(group.kv_cache_spec):
            return index, int(group.kv_cache_spec.block_size)
    return None
