"""The arguments of every public call, in order; * stands before those that are keywords alone."""

from __future__ import annotations

READ = "options **keywords"
CALLS = {
    "client.RouteClient.__init__": "target * run timeout security config options",
    "client.RouteClient.get": "request_id * layer_ids token_start token_stop incarnation nonce"
    f" num_tokens token_ids pin_memory {READ}",
    "client.RouteClient.get_many": "trace_ids * concurrency errors layer_ids token_start token_stop"
    f" pin_memory progress {READ}",
    "client.RouteClient.expert_load": f"trace_ids ranges * layer_ids concurrency progress {READ}",
    "client.RouteClient.fetch": f"plan * out pin_memory concurrency {READ}",
    "client.RouteClient.prefetch": f"plans * max_bytes pin_memory concurrency progress {READ}",
    "client.RouteClient.follow": "trace_id * layer_ids token_start token_stop incarnation nonce"
    f" {READ}",
    "client.RouteClient.locate": "sequences * weight_versions labels indexes equal timeout",
    "client.RouteClient.stat": "trace_id * incarnation timeout",
    "client.RouteClient.describe": "trace_id * incarnation policy origins timeout",
    "client.RouteClient.explain": "trace_id position * layer_id incarnation nonce policy"
    " weight_version timeout",
    "client.RouteClient.find": "* labels states limit retirable_through timeout",
    "client.RouteClient.watch": "* timeout",
    "client.RouteClient.delete": "*trace_ids missing_ok timeout",
    "client.RouteClient.retire_through": "weight_version * timeout",
    "client.RouteClient.renew": "trace_ids * ttl_seconds timeout",
    "client.RouteClient.forget_engine": "engine_id * timeout",
    "client.RouteClient.server_info": "* timeout",
    "client.RouteClient.agents": "* timeout",
    "client.RouteClient.history": "* after timeout",
    "client.RouteClient.report_routing": "trace_id topk_ids * valid layer_ids token_start step"
    " weight_version reporter incarnation timeout",
    "client.RouteClient.reports": "reporter",
    "client.RouteClient.report_agreement": "step agreement * weight_version reporter diagnosis"
    " trace_ids timeout",
    "client.RouteClient.agreement_history": "* start stop timeout",
    "client.AgreementHistory.change": "",
    "client.Agreement.metrics": "prefix * weight_version",
    "client.RouteClient.get_blocks": "engine_id block_ids num_tokens * token_start layer_ids"
    " missing timeout",
    "client.RouteClient.bind": "engine_id request_id block_ids num_tokens * num_computed_tokens"
    " token_ids step trace_id prompt_len labels ttl_seconds timeout",
    "client.RouteClient.close": "",
    "client.AsyncRouteClient.aclose": "",
    "client.ClientConfig.__init__": "* target run timeout security max_message_bytes grpc_options",
    "client.ClientConfig.from_env": "environ **overrides",
    "client.ReadOptions.__init__": (
        "* missing wait_for timeout policy prefix_rows weight_version equal"
    ),
    "client.Trace.tokens": "start stop",
    "client.Trace.layers": "layer_ids",
    "client.Trace.split": "prompt_len num_output_tokens",
    "client.Trace.to_torch": "device dtype",
    "client.Trace.routed_experts": "* fill",
    "client.Trace.require_valid": "",
    "client.Trace.verify_tokens": "token_ids",
    "client.Trace.validate": "",
    "client.Trace.equals": "other",
    "client.ExpertLoad.of": "trace",
    "client.RunHistory.commit_seconds": "share",
    "client.Rows.layers": "layer_ids",
    "client.Rows.to_torch": "device dtype",
    "client.Rows.per_sample": "",
    "client.SampleRows.of": "trace num_tokens",
    "client.FetchPlan.make": "layout batch rank",
    "client.FetchPlan.with_locations": "locations",
    "client.Sample.of": "trace_id num_tokens * token_ids padded_len incarnation nonce",
    "client.Sample.turns": "traces * token_ids padded_len incarnation",
    "client.Sample.padding": "length",
    "client.Segment.__init__": "trace_id start stop at incarnation num_tokens nonce",
    "client.MicroBatch.packed": "samples * align total_len",
    "client.MicroBatch.padded": "samples seq_len * padding_side starts",
    "client.MicroBatch.from_mask": "input_ids attention_mask",
    "client.MicroBatch.from_position_ids": "input_ids position_ids * num_tokens",
    "client.MicroBatch.from_cu_seqlens": "input_ids cu_seqlens",
    "client.Rank.__init__": "layer_ids cp_size cp_rank cp_layout sp_size sp_rank flatten",
    "client.ModelLayout.__init__": "layer_ids num_hidden_layers num_experts top_k moe_layer_ids",
    "client.ModelLayout.from_config": "config",
    "capture_agent.CaptureAgent.__init__": "config * own_thread predecessor **fields",
    "capture_agent.CaptureAgent.begin": "request_id * trace_id prompt_len labels ttl_seconds"
    " num_computed_tokens num_external_tokens block_ids prompt_token_ids transfer_id nonce index",
    "capture_agent.CaptureAgent.step": "rows spans",
    "capture_agent.CaptureAgent.skip": "spans",
    "capture_agent.CaptureAgent.step_slots": "rows slots",
    "capture_agent.CaptureAgent.add_blocks": "handles block_ids",
    "capture_agent.CaptureAgent.rewind": "handle position * step",
    "capture_agent.CaptureAgent.preempt": "handle num_computed_tokens",
    "capture_agent.CaptureAgent.resume": "handle num_computed_tokens * block_ids"
    " num_external_tokens num_tokens",
    "capture_agent.CaptureAgent.finish": "handle num_tokens * reason token_ids transfer_id",
    "capture_agent.CaptureAgent.mark_external": "block_ids",
    "capture_agent.CaptureAgent.copy_blocks": "sources targets",
    "capture_agent.CaptureAgent.reset_prefix_cache": "",
    "capture_agent.CaptureAgent.reset_external_kv": "",
    "capture_agent.CaptureAgent.set_weight_version": "version",
    "capture_agent.CaptureAgent.flush": "timeout",
    "capture_agent.CaptureAgent.stats": "",
    "capture_agent.CaptureAgent.close": "timeout",
    "capture_agent.AgentConfig.from_env": "environ **overrides",
    "capture_agent.AgentConfig.__init__": "target engine_id layout run shard boot_id block_size"
    " num_blocks background attributes frame_rows codec linger_seconds flush_interval_seconds"
    " security queue_bytes spill_dir spill_bytes ring_bytes close_timeout_seconds"
    " model external_kv_emptied num_host_blocks",
}
