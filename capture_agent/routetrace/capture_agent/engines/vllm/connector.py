"""KV connector that moves no KV, but sees every step and every request."""

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

from routetrace.capture_agent.engines.vllm.attach import Attachment, attachment_of, make_schedule
from routetrace.capture_agent.engines.vllm.plan import StepPlan
from routetrace.capture_agent.engines.vllm.schedule import Schedule
from routetrace.capture_agent.engines.vllm.settings import settings_of
from routetrace.common.errors import InvalidArgument

_log = logging.getLogger(__name__)


@dataclass
class RouteTraceMetadata(KVConnectorMetadata):
    """Metadata from the scheduler to the workers, one a step."""

    plan: StepPlan = field(default_factory=StepPlan)


class RouteTraceConnector(KVConnectorBase_V1, SupportsHMA):
    """Carries the routing of one engine to routetrace-server; see docs/vllm.md.

    Args:
        vllm_config: vLLM's configuration.
        role: scheduler or worker.
        kv_cache_config: of the KV cache.

    Raises:
        InvalidArgument: if the engine cannot be captured.
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
        """False: preemption works as without a connector."""
        return False

    # ------------------------------------------------------------------ scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return no tokens: no KV comes from here."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Return at once: no KV is loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> RouteTraceMetadata:
        """Return the plan of a step."""
        assert self._schedule is not None
        return RouteTraceMetadata(self._schedule.step(scheduler_output))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note the end of a request; return the handle of its trace for the client."""
        assert self._schedule is not None
        handle = self._schedule.finish(request)
        told = handle is not None and self._schedule.gives_handles
        return False, {"routetrace": handle} if told else None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same for models with several KV cache groups."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """Return True: there is no KV to forget, so nothing is in the way of a reset."""
        return True

    # ------------------------------------------------------------------ worker

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        self._request_ids = None
        if self._attachment is not None:
            assert isinstance(connector_metadata, RouteTraceMetadata)
            self._attachment.begin_step(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Note the order of the batch, which model runner V2 passes here."""
        self._request_ids = kwargs.get("request_ids")

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: no KV is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Return at once: no KV is saved."""

    def wait_for_save(self) -> None:
        """Return at once: no KV is saved."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """End a step: vLLM calls this once a step, with or without a forward pass."""
        if self._attachment is not None and self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, RouteTraceMetadata)
            self._attachment.end_step(metadata.plan, self._request_ids)
        return None, None
