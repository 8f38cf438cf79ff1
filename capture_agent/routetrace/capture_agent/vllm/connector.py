"""The official way: a KV connector that moves no KV, but sees every step and every request."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from routetrace.capture_agent.vllm.attach import Attachment, attachment_of, make_schedule
from routetrace.capture_agent.vllm.schedule import Schedule, StepPlan
from routetrace.capture_agent.vllm.settings import settings_of
from routetrace.v1.errors import InvalidArgument

_log = logging.getLogger(__name__)


@dataclass
class RouteTraceMetadata(KVConnectorMetadata):
    """What travels from the scheduler to the workers with every step."""

    plan: StepPlan = field(default_factory=StepPlan)


class RouteTraceConnector(KVConnectorBase_V1, SupportsHMA):
    """Carries the routing of one engine to routetrace-server; see docs/vllm.md.

    Args:
        vllm_config: vLLM's configuration.
        role: scheduler or worker.
        kv_cache_config: of the KV cache.

    Raises:
        InvalidArgument: if the engine can not be captured.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = settings_of(vllm_config)
        if settings is None:
            raise InvalidArgument(
                field="kv_connector",
                value=vllm_config.kv_transfer_config.kv_connector,
                expected="RouteTraceConnector",
            )
        self._schedule: Schedule | None = None
        self._attachment: Attachment | None = None
        self._request_ids: list[str] | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._schedule = make_schedule(vllm_config, settings, kv_cache_config)
        else:
            self._attachment = attachment_of(vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: preempted requests go on as they would without a connector."""
        return False

    # ------------------------------------------------------------------ scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """No KV comes from here."""
        assert self._schedule is not None
        self._schedule.lookup(request, num_computed_tokens)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing to load; another connector may."""
        assert self._schedule is not None
        self._schedule.allocate(request, blocks)

    def build_connector_meta(self, scheduler_output: Any) -> RouteTraceMetadata:
        """The plan of a step."""
        assert self._schedule is not None
        return RouteTraceMetadata(self._schedule.step(scheduler_output))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Notes the end; the client is told which trace it can ask for."""
        assert self._schedule is not None
        handle = self._schedule.finish(request)
        return False, {"routetrace": handle} if handle else None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for models with several KV cache groups."""
        return self.request_finished(request, [])

    # ------------------------------------------------------------------ worker

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self._request_ids = None
        if self._attachment is not None:
            self._attachment.begin_step()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load; model runner V2 tells the batch here."""
        self._request_ids = kwargs.get("request_ids")

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to save."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """A step ends: called once after each, whether or not it had a forward pass."""
        if self._attachment is not None and self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, RouteTraceMetadata)
            self._attachment.end_step(metadata.plan, self._request_ids)
        return None, None
