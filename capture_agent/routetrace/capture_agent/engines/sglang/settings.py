"""Settings of capture in SGLang, and the modes that are refused.

Capture is off unless the environment of the server has

    ROUTETRACE_TARGET    host:port of routetrace-server
    ROUTETRACE_SGLANG    optional: an object of `AgentConfig` fields in JSON, such as
                         {"engine_id": "rollout-0", "linger_seconds": 0.2}; "off" turns capture off;
                         "probe": false starts without a pass over dummy tokens
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from routetrace.capture_agent.config import AgentConfig, variable
from routetrace.capture_agent.engines.sglang import seams
from routetrace.capture_agent.engines.sglang.disaggregation import Role
from routetrace.common.errors import InvalidArgument
from routetrace.common.security import Security

VARIABLE = "ROUTETRACE_SGLANG"

#: The ways to draft that are followed: earlier tokens, or a model (NEXTN, that is MTP, is EAGLE).
NGRAM = "NGRAM"
MODELS = ("EAGLE", "EAGLE3", "STANDALONE")

#: Modes that SGLang 0.5.12, or a later one that is tested, does not have. All have the others.
_LATER = {"dcp_size", "radix_cache_backend", "enable_flexkv"}
_LATER |= {"enable_pd_role_switch", "enable_unified_cache_external_linker"}

_SET_BY_US = {"layout", "shard", "boot_id", "block_size", "num_blocks", "attributes", "model"}
_SET_BY_US |= {"num_host_blocks"}
_SETTINGS = {f.name for f in fields(AgentConfig)} - _SET_BY_US | {"probe"}


@dataclass(frozen=True)
class Settings:
    """Settings of one server."""

    engine_id: str
    """Of the server; data-parallel ranks append their own."""
    agent: Mapping[str, Any]
    """Other settings of the agent."""
    probe: bool = True
    """Whether layers are tried at start."""


def settings_of(environ: Mapping[str, str] = os.environ) -> Settings | None:
    """Return the settings in an environment; None if capture is off.

    Raises:
        InvalidArgument: naming the wrong setting.
    """
    given = environ.get(VARIABLE, "")
    if given.lower() == "off":
        return None
    agent = _parsed(given) if given else {}
    if not (agent.get("target") or variable(environ, "target")):
        if given:
            raise InvalidArgument(
                field="ROUTETRACE_TARGET", value="", expected=f"host:port, beside {VARIABLE}"
            )
        return None
    if "security" in agent:  # a mapping would show its token where settings are printed
        agent["security"] = Security.of(agent["security"])
    probe = agent.pop("probe", True)
    if not isinstance(probe, bool):
        raise InvalidArgument(field=f"{VARIABLE} probe", value=probe, expected="true or false")
    engine_id = agent.pop("engine_id", "") or variable(environ, "engine_id")
    # Unique, but not the same after a restart.
    return Settings(engine_id or f"sglang-{socket.gethostname()}-{os.getpid()}", agent, probe)


def _parsed(given: str) -> dict[str, Any]:
    try:
        agent = json.loads(given)
    except ValueError:
        agent = None
    if not isinstance(agent, dict):
        # Not the value, which may hold a token.
        raise InvalidArgument(field=VARIABLE, value="<text>", expected='a JSON object or "off"')
    if unknown := sorted(set(agent) - _SETTINGS):
        raise InvalidArgument(
            field=f"{VARIABLE} setting",
            value=unknown[0],
            expected=f"one of {', '.join(sorted(_SETTINGS))}",
        )
    return agent


def refuse_unsupported(server_args: Any) -> None:
    """Refuse a server that runs in a mode with wrong or lost rows.

    Args:
        server_args: SGLang's `ServerArgs`, resolved.

    Raises:
        InvalidArgument: with the setting.
        Refused: if this version of SGLang lacks a name that a setting needs.
    """
    for name, expected in _unsupported(server_args):
        raise InvalidArgument(field=name, value=getattr(server_args, name), expected=expected)
    if server_args.enable_dp_attention:
        seams.check_found(seams.used_by(seams.DP_ATTENTION))
    if server_args.enable_hierarchical_cache:
        seams.check_found(seams.used_by(seams.HICACHE))
    if Role.of(server_args) is not Role.WHOLE:
        seams.check_found(seams.used_by(seams.PAIRS))


def _unsupported(args: Any) -> Iterator[tuple[str, str]]:
    for name, fine, expected in (
        ("pp_size", (1,), "1: stages hold different layers"),
        (
            "speculative_algorithm",
            (None, "NONE", NGRAM, *MODELS),
            f"none, {NGRAM}, {', '.join(MODELS)}: no other is tested",
        ),
        ("speculative_adaptive", (False,), "off: the number of drafts changes"),
        ("attn_cp_size", (1,), "1: tokens of a request are spread over ranks"),
        ("dcp_size", (1,), "1: tokens of a request are spread over ranks"),
        ("disaggregation_mode", (None, *(role.value for role in Role)), "a role that is known"),
        ("enable_pd_role_switch", (False,), "off: a running engine changes its role"),
        ("dllm_algorithm", (None,), "none: positions are computed several times"),
        ("enable_hisparse", (False,), "off: KV moves between slots"),
        ("enable_pdmux", (False,), "off: a prefill pass is split"),
        ("enable_two_batch_overlap", (False,), "off: halves of a batch share rows"),
        ("enable_single_batch_overlap", (False,), "off: parts of a batch share rows"),
        ("enable_lmcache", (False,), "off: KV arrives without notice"),
        ("enable_unified_cache_external_linker", (False,), "off: KV arrives without notice"),
        ("enable_flexkv", (False,), "off: KV arrives without notice"),
        ("radix_cache_backend", (None,), "the default: others move KV without notice"),
        ("is_embedding", (False,), "off: nothing is sampled"),
    ):
        if (name not in _LATER or hasattr(args, name)) and getattr(args, name) not in fine:
            yield name, expected
    if args.speculative_algorithm in MODELS and args.speculative_eagle_topk not in (None, 1):
        yield "speculative_eagle_topk", "1: trees with branches are not tested"
    role = Role.of(args)
    for roles, name, expected in (
        (
            (Role.PREFILL, Role.DECODE),
            "speculative_algorithm",
            "none in a prefill or decode engine",
        ),
        ((Role.DECODE,), "enable_hierarchical_cache", "off in a decode engine: not tested"),
    ):
        if role in roles and getattr(args, name) not in (None, False, "NONE"):
            yield name, expected
