"""Settings of capture in vLLM's configuration.

    connector   kv_transfer_config names RouteTraceConnector, alone or in a MultiConnector; settings
                are its kv_connector_extra_config
    plugin      additional_config has an object "routetrace", the settings; or the environment has
                ROUTETRACE_VLLM=1

Settings are fields of `AgentConfig`: target, run, engine_id, linger_seconds, queue_bytes, ...;
`security` is an object of the fields of `Security`.
"""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from routetrace.capture_agent.config import AgentConfig, variable
from routetrace.common.errors import InvalidArgument
from routetrace.common.security import Security

#: Name of the connector class.
CONNECTOR = "RouteTraceConnector"

#: A connector that loads KV for requests that wait, and never for one that runs.
_WAITS = "NixlConnector"

Way = Literal["connector", "plugin"]

_SET_BY_US = {"layout", "shard", "boot_id", "block_size", "num_blocks", "model", "attributes"}
_SET_BY_US |= {"num_host_blocks"}
_SETTINGS = {f.name for f in fields(AgentConfig)} - _SET_BY_US


@dataclass(frozen=True)
class Settings:
    """Settings of one engine."""

    way: Way
    """Source of steps and requests."""
    run: str
    """Namespace of the traces."""
    engine_id: str
    """Of this data-parallel rank."""
    boot_id: str
    """Of this start of the engine; the same in all its processes."""
    agent: Mapping[str, Any]
    """Other settings of the agent."""


def settings_of(vllm_config: Any) -> Settings | None:
    """Return the settings in a `VllmConfig`; None if capture is not configured.

    Raises:
        InvalidArgument: naming the wrong setting.
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
            value=unknown[0],  # not its value, which may be a token
            expected=f"one of {', '.join(sorted(_SETTINGS))}",
        )
    agent = dict(given)
    if "security" in agent:  # a mapping would show its token where settings are printed
        agent["security"] = Security.of(agent["security"])
    run = agent.pop("run", "") or variable(os.environ, "run")
    engine_id = agent.pop("engine_id", "") or variable(os.environ, "engine_id")
    boot_id = str(vllm_config.instance_id)
    parallel = vllm_config.parallel_config
    if not engine_id:
        # Unique, but not the same after a restart.
        engine_id = f"vllm-{socket.gethostname()}-{boot_id}"
        if _read(parallel, "nnodes") > 1:
            raise InvalidArgument(
                field="engine_id", value="", expected="a name: the engine spans several hosts"
            )
    rank = parallel.data_parallel_index
    if rank or parallel.data_parallel_size > 1:
        engine_id = f"{engine_id}-dp{rank}"
    way: Way = "plugin" if by_connector is None else "connector"
    return Settings(way, run, engine_id, boot_id, agent)


def _connectors(config: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return names and settings of the connectors in a `KVTransferConfig`, or None."""
    if config is None:
        return []
    extra = config.kv_connector_extra_config or {}
    if config.kv_connector != "MultiConnector":
        return [(config.kv_connector, extra)]
    return [
        (child.get("kv_connector"), child.get("kv_connector_extra_config") or {})
        for child in extra.get("connectors", ())
    ]


def _connector_settings(config: Any) -> Mapping[str, Any] | None:
    ours = (dict(extra) for name, extra in _connectors(config) if name == CONNECTOR)
    return next(ours, None)


def _plugin_settings(config: Any) -> Mapping[str, Any] | None:
    given = config.get("routetrace") if isinstance(config, dict) else None
    if given is None and os.environ.get("ROUTETRACE_VLLM") == "1":
        return {}
    if given is not None and not isinstance(given, dict):
        raise InvalidArgument(
            field="additional_config['routetrace']", value=given, expected="an object of settings"
        )
    return given


def _read(config: Any, name: str) -> Any:
    """Return an option that vLLM 0.23 to 0.33 have; another version may call it otherwise."""
    if not hasattr(config, name):
        raise InvalidArgument(
            field=name,
            value=f"no option of {type(config).__name__}",
            expected="an option: without it a way to run with wrong rows cannot be detected",
            remedy="use a version of vLLM that docs/vllm.md names as tested",
        )
    return getattr(config, name)


def refuse_unsupported(vllm_config: Any) -> None:
    """Raise InvalidArgument if the engine runs in a mode with wrong or lost rows."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    overlap, transfer = (
        vllm_config.scheduler_config.async_scheduling,
        vllm_config.kv_transfer_config,
    )
    policy = "fail" if transfer is None else transfer.kv_load_failure_policy
    in_flight = overlap or parallel.pipeline_parallel_size > 1
    # They may load KV for a request that runs, which has a step in flight when the load fails.
    at_once = {name for name, _ in _connectors(transfer)} - {CONNECTOR, _WAITS}
    for field, value, fine, why in (
        ("enable_dbo", _read(parallel, "use_ubatching"), False,
         "off: halves of a batch that overlap write to the same rows"),
        ("prefill_context_parallel_size", _read(parallel, "prefill_context_parallel_size"), 1,
         "1: tokens of a request are spread over ranks"),
        ("runner_type", model.runner_type, "generate", "'generate': others sample no tokens"),
        ("is_encoder_decoder", bool(model.is_encoder_decoder), False, "a decoder-only model"),
        ("kv_load_failure_policy", policy if in_flight and at_once else "fail", "fail",
         "'fail', or one step at a time (--no-async-scheduling, one pipeline stage), or "
         f"{_WAITS} alone: vLLM loses count of tokens in flight where KV does not arrive"),
    ):  # fmt: skip
        if value != fine:
            raise InvalidArgument(field=field, value=value, expected=why)
    if _counts_stale_tokens():
        return
    for field, value, fine, why in (
        ("async_scheduling", overlap and vllm_config.speculative_config is not None, False,
         "off (--no-async-scheduling) with speculative decoding in vLLM below 0.27: a reset of its "
         "prefix cache drops tokens that the model goes on from"),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1,
         "1, or vLLM 0.27 or newer: older ones start preempted requests again before they have "
         "the tokens in flight, and sample them twice"),
        ("async_scheduling", overlap and policy == "recompute", False,
         "off (--no-async-scheduling) with kv_load_failure_policy 'recompute' in vLLM below 0.27: "
         "it loses count of tokens in flight where KV does not arrive"),
    ):  # fmt: skip
        if value != fine:
            raise InvalidArgument(field=field, value=value, expected=why)


def _counts_stale_tokens() -> bool:
    """Whether vLLM knows how many tokens of a preempted request are in flight.

    Versions before 0.27 drop as many outputs as there were tokens, drafts included.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    return "drop_stale_output" in inspect.signature(Scheduler._preempt_request).parameters


def judges_drafts_late(vllm_config: Any) -> bool:
    """Whether a step is planned before the drafts of the last one are judged."""
    drafts = vllm_config.speculative_config is not None
    return drafts and bool(vllm_config.scheduler_config.async_scheduling)


def attention_group(kv_cache_config: Any, parallel_config: Any) -> tuple[int, int] | None:
    """Return the KV cache group that keeps every token, and its block size; None without one.

    Sliding windows and states recycle their blocks, so that their slots do not identify tokens.
    Under decode context parallelism the scheduler's block is one block of each rank.
    """
    ranks = _read(parallel_config, "decode_context_parallel_size")
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        # A group of layers of several sizes has a specification of each (DeepSeek-V4's).
        spec = group.kv_cache_spec
        layers = [*getattr(spec, "kv_cache_specs", {"": spec}).values()]
        if layers and all(map(_keeps_all, layers)):
            return index, int(spec.block_size) * ranks
    return None


def _keeps_all(layer: Any) -> bool:
    """Whether a layer keeps the KV of every token; R-SWA, which counts as full, drops some."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return isinstance(layer, FullAttentionSpec) and not hasattr(layer, "rswa_window")
