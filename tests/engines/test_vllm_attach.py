"""Attaching to vLLM, without vLLM: what is asked for, found, refused, proven and wrapped.

The modules of vLLM that are imported are stood in for by the few names that count. Real engines are
in vllm_runs.
"""

from __future__ import annotations

import copy
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from routetrace.capture_agent.engines.vllm import attach, plugin
from routetrace.capture_agent.engines.vllm.inputs import Inputs
from routetrace.capture_agent.engines.vllm.plan import External, StepPlan, pack_blocks
from routetrace.capture_agent.engines.vllm.routers import Routers
from routetrace.capture_agent.engines.vllm.settings import (
    attention_group,
    refuse_unsupported,
    settings_of,
)
from routetrace.capture_agent.engines.vllm.weights import FOLLOW
from routetrace.common.errors import InvalidArgument
from routetrace.common.model_hash import model_hash

NUM_EXPERTS, TOP_K, TOKENS = 8, 2, 5

LATE_DRAFTS = {"speculative_config": object(), "scheduler_config__async_scheduling": True}


# ---------------------------------------------------------------------------- stand-ins


class BaseRouter:
    """Chooses experts; some of them fuse shared experts into more columns."""

    def __init__(self, top_k=TOP_K, columns=0):
        self.top_k = top_k
        self._columns = columns or top_k
        self.ids = torch.randint(0, NUM_EXPERTS, (TOKENS, 1)) + torch.arange(self._columns)
        self.ids %= NUM_EXPERTS

    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        return torch.ones(len(self.ids), self._columns), self.ids


class MoERunner(torch.nn.Module):
    """One of vLLM 0.23, which has a name alone; later ones have a `layer_id`, too."""

    def __init__(self, layer, router=None, kernel=None):
        super().__init__()
        self.layer_name = f"model.layers.{layer}.mlp.experts"
        self.router = router or BaseRouter()
        self._quant_method = SimpleNamespace(
            is_monolithic=kernel is not None,
            moe_kernel=SimpleNamespace(impl=SimpleNamespace(fused_experts=kernel)),
        )
        self.routed_experts = SimpleNamespace(routing_sink=None)

    @property
    def layer(self):
        return int(self.layer_name.split(".")[2])

    def forward(self):
        if self._quant_method.is_monolithic:
            self._quant_method.moe_kernel.impl.fused_experts.run(self)
        else:
            self.router._compute_routing(None, None, None)


class SinkKernel:
    """Routes and computes in one go, and writes its ids into a sink of its layer, as in 0.32."""

    moe_config = "of this kernel"

    def __init__(self, tells=True):
        self._tells = tells

    def supports_routing_replay_capture(self):
        return self._tells

    def run(self, runner):
        if (sink := runner.routed_experts.routing_sink) is not None:
            sink.capture_fn(runner.router.ids)


class TellingKernel(SinkKernel):
    """Routes and computes in one go, and calls back with its ids, as in 0.30."""

    routing_replay_capture_fn = None

    def set_capture_fn(self, capture_fn):
        self.routing_replay_capture_fn = capture_fn

    def run(self, runner):
        if self.routing_replay_capture_fn is not None:
            self.routing_replay_capture_fn(runner.router.ids)


class RoutedExpertsSink:
    """Output buffer of the kernels of 0.32."""

    def __init__(self, moe_config, capture_fn):
        assert moe_config == SinkKernel.moe_config
        self.capture_fn = capture_fn


class MegaMoEExperts(torch.nn.Module):
    """Experts that are no MoERunner: a RoutedExpertsCaptureSource."""

    def __init__(self, layer_id, router=None):
        super().__init__()
        self.capture_fn = None
        self.layer = self.layer_id = layer_id
        self.router = router or BaseRouter()
        self.top_k = self.router.top_k

    def forward(self):
        if self.capture_fn is not None:
            self.capture_fn(self.router.ids)


class Model(torch.nn.Module):
    def __init__(self, runners, drafts=()):
        super().__init__()
        self.layers = torch.nn.ModuleList(runners)
        self.mtp = torch.nn.ModuleList(drafts)
        self.skipped = set()

    def load_weights(self, weights):
        """Makes kernels anew, as vLLM 0.30 does for fp8."""
        for layer in self.layers:
            impl = layer._quant_method.moe_kernel.impl
            impl.fused_experts = type(impl.fused_experts)()

    def forward(self, positions=None):
        for layer in [*self.layers, *self.mtp]:
            if layer.layer not in self.skipped:
                layer()


class Ranks(SimpleNamespace):
    """A process group."""


class FullAttentionSpec(SimpleNamespace):
    """Blocks of a layer that keeps every token."""


def preempt(self, request, timestamp, drop_stale_output=False):
    """The scheduler's method, from vLLM 0.27 on."""


@pytest.fixture
def vllm(monkeypatch):
    """The names of vLLM that are imported; what a test may change is returned."""
    world = SimpleNamespace(
        tp=Ranks(rank_in_group=0, world_size=1, all_gather=None),
        pp=Ranks(rank_in_group=0, world_size=1),
        context=SimpleNamespace(dp_metadata=None),
        scheduler=type("Scheduler", (), {"_preempt_request": preempt}),
    )
    names = {
        "vllm.model_executor.layers.fused_moe.layer": {"MoERunner": MoERunner},
        "vllm.model_executor.models.utils": {
            "extract_layer_index": lambda name: int(re.search(r"\d+", name)[0])
        },
        "vllm.model_executor.layers.fused_moe.router.base_router": {"BaseRouter": BaseRouter},
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer": {
            "RoutedExpertsSink": RoutedExpertsSink
        },
        "vllm.distributed.parallel_state": {
            "get_tp_group": lambda: world.tp,
            "get_pp_group": lambda: world.pp,
        },
        "vllm.distributed.utils": {
            "get_pp_indices": lambda layers, rank, size: (
                rank * layers // size,
                (rank + 1) * layers // size,
            )
        },
        "vllm.forward_context": {"get_forward_context": lambda: world.context},
        "vllm.v1.kv_cache_interface": {"FullAttentionSpec": FullAttentionSpec},
        "vllm.v1.core.sched.scheduler": {"Scheduler": world.scheduler},
    }
    for name, attributes in names.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            module = ".".join(parts[:i])
            if module not in sys.modules:
                monkeypatch.setitem(sys.modules, module, ModuleType(module))
        vars(sys.modules[name]).update(attributes)
    return world


def config_of(**changes):
    """A VllmConfig of a model with 4 layers, the first of them dense."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config={
                "num_hidden_layers": 4,
                "first_k_dense_replace": 1,
                "n_routed_experts": NUM_EXPERTS,
                "num_experts_per_tok": TOP_K,
            },
            model="tiny",
            runner_type="generate",
            is_encoder_decoder=False,
            dtype=torch.bfloat16,
            multimodal_config=None,
            quantization=None,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS, async_scheduling=False),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
            data_parallel_index=0,
            nnodes=1,
            use_ubatching=False,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            use_sequence_parallel_moe=False,
        ),
        compilation_config=SimpleNamespace(),
        speculative_config=None,
        kv_transfer_config=None,
        additional_config={},
        instance_id="boot",
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        target = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    return config


def transfer(name, extra=None, **more):
    more = {"kv_load_failure_policy": "fail", **more}
    return SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra or {}, **more)


def rows_of(capturer, model):
    capturer.begin()
    model()
    return capturer.snapshot(TOKENS).rows()


def chosen(model):
    return np.stack([layer.router.ids[:, :TOP_K].numpy() for layer in model.layers], axis=1)


def model_of(layers=(1, 2, 3), **more):
    return Model([MoERunner(layer) for layer in layers], **more)


CPU = torch.device("cpu")


# ---------------------------------------------------------------------------- what is asked for


def test_nothing_is_captured_unless_it_is_asked_for(monkeypatch):
    monkeypatch.delenv("ROUTETRACE_VLLM", raising=False)
    assert settings_of(config_of()) is None
    assert settings_of(config_of(kv_transfer_config=transfer("NixlConnector"))) is None
    assert settings_of(config_of(additional_config={"other": 1})) is None


def test_the_connector_is_found_alone_and_among_others():
    ours = {"target": "traces:7411", "run": "r", "engine_id": "e"}
    child = {"kv_connector": "RouteTraceConnector", "kv_connector_extra_config": ours}
    many = {"connectors": [{"kv_connector": "NixlConnector"}, child]}
    for config in (transfer("RouteTraceConnector", ours), transfer("MultiConnector", many)):
        found = settings_of(config_of(kv_transfer_config=config))
        assert (found.way, found.run, found.engine_id) == ("connector", "r", "e")
        assert found.agent == {"target": "traces:7411"}


def test_the_plugin_is_asked_for_by_configuration_or_environment(monkeypatch):
    found = settings_of(config_of(additional_config={"routetrace": {"linger_seconds": 0.5}}))
    assert (found.way, found.agent) == ("plugin", {"linger_seconds": 0.5})
    monkeypatch.setenv("ROUTETRACE_VLLM", "1")
    monkeypatch.setenv("ROUTETRACE_RUN", "of the environment")
    found = settings_of(config_of())
    assert (found.way, found.run) == ("plugin", "of the environment")


def test_data_parallel_ranks_are_engines_of_their_own():
    ids = set()
    for rank in range(2):
        config = config_of(
            additional_config={"routetrace": {"engine_id": "e"}},
            parallel_config__data_parallel_size=2,
            parallel_config__data_parallel_index=rank,
        )
        ids.add(settings_of(config).engine_id)
    assert ids == {"e-dp0", "e-dp1"}


def test_engines_that_nobody_named_do_not_meet():
    names = [
        settings_of(config_of(additional_config={"routetrace": {}}, instance_id=boot)).engine_id
        for boot in ("a", "b")
    ]
    assert len(set(names)) == 2
    with pytest.raises(InvalidArgument) as error:
        settings_of(config_of(additional_config={"routetrace": {}}, parallel_config__nnodes=2))
    assert error.value.field == "engine_id"


@pytest.mark.parametrize("name", ["tagret", "layout", "block_size", "model"])
def test_a_setting_that_there_is_not_is_named(name):
    with pytest.raises(InvalidArgument, match=name):
        settings_of(config_of(additional_config={"routetrace": {name: 1}}))


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "named"), [(4, False, True), (0, True, True), (0, False, False)]
)
def test_images_are_named_unless_both_caches_are_off(cache_gb, prefix_caching, named):
    assert Inputs.of(config_of()).named
    multimodal = SimpleNamespace(mm_processor_cache_gb=cache_gb)
    config = config_of(
        model_config__multimodal_config=multimodal,
        cache_config__enable_prefix_caching=prefix_caching,
    )
    assert Inputs.of(config).named is named


@pytest.mark.parametrize(
    ("kv_cache_dtype", "labels"),
    [
        ("auto", {}),
        ("bfloat16", {}),
        ("bf16", {}),
        ("fp8", {"kv_cache_dtype": "fp8_e4m3"}),
        ("fp8_e5m2", {"kv_cache_dtype": "fp8_e5m2"}),
    ],
)
def test_the_dtype_of_a_kv_cache_is_a_label_where_it_is_not_the_models(kv_cache_dtype, labels):
    config = config_of(cache_config__cache_dtype=kv_cache_dtype)
    assert Inputs.of(config).labels_of(SimpleNamespace(lora_request=None)) == labels


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"parallel_config__use_ubatching": True}, "enable_dbo"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"model_config__runner_type": "pooling"}, "runner_type"),
        ({"model_config__is_encoder_decoder": True}, "is_encoder_decoder"),
    ],
)
def test_ways_to_run_that_can_not_be_captured_are_refused(vllm, changes, field):
    refuse_unsupported(config_of())
    refuse_unsupported(config_of(speculative_config=object()))
    refuse_unsupported(config_of(scheduler_config__async_scheduling=True))
    refuse_unsupported(config_of(**LATE_DRAFTS))
    refuse_unsupported(config_of(parallel_config__decode_context_parallel_size=2))
    with pytest.raises(InvalidArgument) as error:
        refuse_unsupported(config_of(**changes))
    assert error.value.field == field


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("use_ubatching", refuse_unsupported),
        ("prefill_context_parallel_size", refuse_unsupported),
        (
            "decode_context_parallel_size",
            lambda config: attention_group(None, config.parallel_config),
        ),
        ("nnodes", settings_of),
    ],
)
def test_a_version_that_calls_an_option_otherwise_is_refused(vllm, name, read):
    config = config_of(additional_config={"routetrace": {"target": "traces:7411"}})
    delattr(config.parallel_config, name)
    with pytest.raises(InvalidArgument, match=rf"{name} is no option .* docs/vllm"):
        read(config)


OVERLAP = {"scheduler_config__async_scheduling": True}
PIPELINE = {"parallel_config__pipeline_parallel_size": 2}


def recompute(*names):
    """Connectors, with which KV that does not arrive is computed again."""
    name, extra = names[0], None
    if names[1:]:
        name, extra = "MultiConnector", {"connectors": [{"kv_connector": n} for n in names]}
    return {"kv_transfer_config": transfer(name, extra, kv_load_failure_policy="recompute")}


RECOMPUTE = recompute("NixlConnector")


@pytest.mark.parametrize("flight", [OVERLAP, PIPELINE])
@pytest.mark.parametrize(
    "names",
    [("ExampleConnector",), ("RouteTraceConnector", "LMCacheConnectorV1")],
)
def test_loads_that_fail_beside_steps_in_flight_are_refused(vllm, names, flight):
    changes = recompute(*names)
    refuse_unsupported(config_of(**changes))
    refuse_unsupported(config_of(**recompute("RouteTraceConnector", "NixlConnector"), **flight))
    with pytest.raises(InvalidArgument, match="loses count of tokens in flight") as error:
        refuse_unsupported(config_of(**changes, **flight))
    assert error.value.field == "kv_load_failure_policy"
    changes["kv_transfer_config"].kv_load_failure_policy = "fail"
    refuse_unsupported(config_of(**changes, **flight))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (LATE_DRAFTS, "async_scheduling"),
        (PIPELINE, "pipeline_parallel_size"),
        (PIPELINE | OVERLAP, "pipeline_parallel_size"),
        (RECOMPUTE | OVERLAP, "async_scheduling"),
    ],
)
def test_preemptions_that_lose_count_of_tokens_in_flight_are_refused(vllm, changes, field):
    refuse_unsupported(config_of(**changes))
    vllm.scheduler._preempt_request = lambda self, request, timestamp: None  # before 0.27
    for fine in ({"speculative_config": object()}, OVERLAP, RECOMPUTE):
        refuse_unsupported(config_of(**fine))
    with pytest.raises(InvalidArgument, match=r"0\.27") as error:
        refuse_unsupported(config_of(**changes))
    assert error.value.field == field


@pytest.mark.parametrize(
    ("connector", "refusal", "explained"),
    [
        ("RouteTraceConnector", "incompatible with expandable_segments:True", True),
        ("RouteTraceConnector", "does not support sleep mode", False),
        ("MultiConnector", "incompatible with expandable_segments:True", False),
        ("RouteTraceConnector", None, False),
    ],
)
def test_where_vllm_refuses_the_connector_the_plugin_is_named(connector, refusal, explained):
    class VllmConfig:
        kv_transfer_config = transfer(connector)

        def _verify_kv_transfer_compat(self):
            if refusal:
                raise ValueError(refusal)

    plugin._explain_refusal(VllmConfig)
    plugin._explain_refusal(object)  # a version without that check
    if refusal is None:
        VllmConfig()._verify_kv_transfer_compat()
        return
    with pytest.raises(ValueError, match=refusal) as error:
        VllmConfig()._verify_kv_transfer_compat()
    assert ("ROUTETRACE_VLLM=1" in str(error.value)) is explained


class Alone:
    """A connector."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...


class Merging(Alone):
    """A `MultiConnector` from vLLM 0.25 on."""

    def _aggregate_request_finished(self, request, per_connector_fn):
        answers = [per_connector_fn(one)[1] for one in self._connectors]
        return False, {name: value for answer in answers for name, value in answer.items()}


class OneTells(Alone):
    """A `MultiConnector` before that."""

    def _aggregate_request_finished(self, request, per_connector_fn):
        answers = [per_connector_fn(one)[1] for one in self._connectors]
        if len([answer for answer in answers if answer is not None]) > 1:
            raise RuntimeError("Only one connector can produce KV transfer params")
        return False, next(iter(answers))


@pytest.mark.parametrize(
    ("connector", "handles"), [(Merging, True), (OneTells, False), (Alone, True)]
)
def test_a_connector_among_others_names_their_hand_overs(vllm, connector, handles, caplog):
    """vLLM shows a child of a `MultiConnector` the child's own configuration alone."""

    class Scheduler:
        def __init__(self, vllm_config, kv_cache_config):
            own = copy.copy(vllm_config)
            own.kv_transfer_config = transfer("RouteTraceConnector")
            self.ours = attach.make_schedule(own, settings_of(own), kv_cache_config)
            self.requests, self.connector = {}, connector()

        def schedule(self): ...

        def update_from_output(self): ...

        def finish_requests(self): ...

    plugin._follow_schedulers(Scheduler)
    children = [{"kv_connector": name} for name in ("RouteTraceConnector", "NixlConnector")]
    config = config_of(
        kv_transfer_config=transfer("MultiConnector", {"connectors": children}, engine_id="P")
    )
    scheduler = Scheduler(config, cache())
    request = SimpleNamespace(
        request_id="r-0123abcd",
        kv_transfer_params={"do_remote_decode": True},
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    )
    assert scheduler.ours.transfers.sent(request) == "P/r-0123abcd"
    assert scheduler.ours.gives_handles is handles
    assert ("answers have no handles" in caplog.text) is not handles
    # A MultiConnector before 0.26 shows ours no blocks of a request for which another one loads KV.
    waits = SimpleNamespace(request_id="w-0123abcd")
    assert scheduler.connector.get_num_new_matched_tokens(waits, 4) == (0, False)
    shown = SimpleNamespace(get_block_ids=lambda: ([5, 6],))
    scheduler.connector.update_state_after_alloc(waits, shown, 4)
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[])
    cached.resumed_req_ids = set()
    plan = scheduler.ours.step(
        SimpleNamespace(
            preempted_req_ids=None,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={},
        )
    )
    assert plan.events[-1] == External(pack_blocks([5, 6]), 4)


def test_slots_are_those_of_the_full_attention_group(vllm):
    def group(full, block_size):
        kind = FullAttentionSpec if full else SimpleNamespace
        return SimpleNamespace(kv_cache_spec=kind(block_size=block_size))

    def wrapped(*layers):
        layers = {str(i): group(full, 16).kv_cache_spec for i, full in enumerate(layers)}
        spec = SimpleNamespace(block_size=16, kv_cache_specs=layers)
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])

    both = SimpleNamespace(kv_cache_groups=[group(False, 64), group(True, 16)])
    one = config_of().parallel_config
    assert attention_group(both, one) == (1, 16)
    assert attention_group(SimpleNamespace(kv_cache_groups=[group(False, 64)]), one) is None
    # A group with a specification for each layer keeps every token if all its layers do.
    assert attention_group(wrapped(True, True), one) == (0, 16)
    assert attention_group(wrapped(True, False), one) is None
    assert attention_group(wrapped(), one) is None
    dropping = FullAttentionSpec(block_size=16, rswa_window=64)  # vLLM's RSWASpec
    dropping = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=dropping)])
    assert attention_group(dropping, one) is None
    # A block of the scheduler is one of each rank that keeps a part of the context.
    many = config_of(parallel_config__decode_context_parallel_size=4).parallel_config
    assert attention_group(both, many) == (1, 64)


# ---------------------------------------------------------------------------- routers


def test_every_moe_layer_writes_what_it_chose(vllm):
    model = model_of()
    capturer = Routers(model, config_of(), CPU).capturer
    assert capturer.layout.layer_ids == (1, 2, 3)
    assert np.array_equal(rows_of(capturer, model), chosen(model))


def test_fused_shared_experts_are_cut_off(vllm):
    model = Model([MoERunner(layer, BaseRouter(columns=TOP_K + 1)) for layer in (1, 2, 3)])
    capturer = Routers(model, config_of(), CPU).capturer
    assert np.array_equal(rows_of(capturer, model), chosen(model))


def test_draft_layers_are_not_captured(vllm):
    model = model_of(drafts=[MoERunner(0), MoERunner(4)])
    capturer = Routers(model, config_of(), CPU).capturer
    assert np.array_equal(rows_of(capturer, model), chosen(model))


MADE_OF = {
    "routers": MoERunner,
    "kernels": lambda layer: MoERunner(layer, kernel=TellingKernel()),
    "kernels with sinks": lambda layer: MoERunner(layer, kernel=SinkKernel()),
    "capture sources": MegaMoEExperts,
}


@pytest.mark.parametrize("made_of", MADE_OF)
def test_whatever_routes_and_tells_is_captured(vllm, made_of):
    model = Model([MADE_OF[made_of](layer) for layer in (1, 2, 3)])
    capturer = Routers(model, config_of(), CPU).capturer
    assert np.array_equal(rows_of(capturer, model), chosen(model))


def bind_vllms_own(model, told):
    """As bind_routed_experts_capturer of vLLM: callbacks that are there are replaced."""
    for layer in model.layers:

        def callback(ids, layer_id=layer.layer):
            told.append((layer_id, ids))

        if isinstance(layer, MegaMoEExperts):
            layer.capture_fn = callback
        elif isinstance(kernel := layer._quant_method.moe_kernel.impl.fused_experts, TellingKernel):
            kernel.set_capture_fn(callback)
        else:
            layer.routed_experts.routing_sink = RoutedExpertsSink(kernel.moe_config, callback)


@pytest.mark.parametrize("made_of", [name for name in MADE_OF if name != "routers"])
def test_vllms_own_return_and_ours_share_the_place_of_a_callback(vllm, made_of):
    model = Model([MADE_OF[made_of](layer) for layer in (1, 2, 3)])
    routers, told = Routers(model, config_of(), CPU), []
    bind_vllms_own(model, told)
    for _ in range(2):  # asked for again, ours is there
        routers.keep()
        told.clear()
        assert np.array_equal(rows_of(routers.capturer, model), chosen(model))
        assert [layer for layer, _ in told] == [1, 2, 3]
        assert all(
            ids is layer.router.ids for (_, ids), layer in zip(told, model.layers, strict=True)
        )


@pytest.mark.parametrize("skipped", [1, 2])
def test_layers_of_a_pass_that_ended_early_are_not_taken_for_the_next_one(vllm, skipped):
    """As when an engine records a pass after one that broke off, with no step between."""
    model = model_of()
    capturer = Routers(model, config_of(), CPU).capturer
    capturer.begin()
    model.layers[skipped - 1]()
    model.skipped = {skipped}
    model()
    rows = capturer.snapshot(TOKENS).rows()
    assert capturer_valid(rows).all(axis=0).tolist() == [i != skipped for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("runners", "said"),
    [
        ([MoERunner(1), MoERunner(2)], r"\[1, 2\]"),
        ([MoERunner(layer) for layer in range(4)], r"\[0, 1, 2, 3\]"),
        ([MoERunner(1), MoERunner(2), MoERunner(2), MoERunner(3)], "one MoE per decoder layer"),
        ([], "MoE layers"),
        ([MoERunner(1), MoERunner(2), MoERunner(3, kernel=object())], "layer 3.*kernel object"),
        ([MoERunner(1, kernel=TellingKernel(tells=False)), MoERunner(2), MoERunner(3)], "layer 1"),
        ([MoERunner(1), MoERunner(2, router=object()), MoERunner(3)], "layer 2.*router object"),
        ([MoERunner(1), MoERunner(2), MoERunner(3, BaseRouter(top_k=1))], "layer 3.*top_k 1"),
    ],
)
def test_what_can_not_be_captured_is_refused_and_left_alone(vllm, runners, said):
    model = Model(runners)
    routed = [getattr(runner.router, "_compute_routing", None) for runner in runners]
    with pytest.raises(InvalidArgument, match=said):
        Routers(model, config_of(), CPU)
    assert routed == [getattr(runner.router, "_compute_routing", None) for runner in runners]


def test_a_stage_has_its_own_layers(vllm):
    vllm.pp.rank_in_group, vllm.pp.world_size = 1, 2
    config = config_of(parallel_config__pipeline_parallel_size=2)
    capturer = Routers(model_of((2, 3)), config, CPU).capturer
    assert capturer.layout.layer_ids == (2, 3)
    assert capturer.layout.moe_layer_ids == (1, 2, 3)
    with pytest.raises(InvalidArgument):
        Routers(model_of((1, 2, 3)), config, CPU)


def data_parallel(vllm, sizes, rank, tp_size=1, local_sizes=None):
    vllm.context.dp_metadata = SimpleNamespace(
        num_tokens_across_dp_cpu=torch.tensor(sizes), local_sizes=local_sizes
    )
    return config_of(
        parallel_config__data_parallel_size=len(sizes),
        parallel_config__data_parallel_rank=rank,
        parallel_config__tensor_parallel_size=tp_size,
        parallel_config__use_sequence_parallel_moe=tp_size > 1,
    )


def test_of_all_ranks_tokens_those_of_this_rank_are_taken(vllm):
    model = model_of()
    capturer = Routers(model, data_parallel(vllm, [2, 3], rank=1), CPU).capturer
    capturer.begin()
    model()
    assert np.array_equal(capturer.snapshot(3).rows(), chosen(model)[2:])


def test_shards_of_the_tokens_are_gathered(vllm):
    model = model_of()
    vllm.tp.all_gather = lambda ids, dim: torch.cat([ids, ids.flip(0)], dim)
    config = data_parallel(vllm, [2 * TOKENS - 1, 3], rank=0, tp_size=2)
    config.scheduler_config.max_num_batched_tokens = 2 * TOKENS
    capturer = Routers(model, config, CPU).capturer
    capturer.begin()
    model()
    both = np.concatenate([chosen(model), chosen(model)[::-1]])
    assert np.array_equal(capturer.snapshot(2 * TOKENS - 1).rows(), both[:-1])


@pytest.mark.parametrize(
    ("tokens", "tp_size", "rows"),
    [
        (9, 2, [*range(5), *range(4, 0, -1)]),  # a shard, and that of the other rank
        (10, 2, [*range(5), *range(4, -1, -1)]),
        (4, 5, range(4)),  # shards that were gathered, the last one padding
        (5, 2, range(5)),
        (5, 1, range(5)),
    ],
)
@pytest.mark.parametrize("axes", [(), (3,)])  # rotary positions of text, and of images
def test_tokens_are_sharded_without_data_parallelism(vllm, tokens, tp_size, rows, axes):
    model, gathered = model_of(), []

    def all_gather(ids, dim):
        gathered.append(ids)
        return torch.cat([ids, ids.flip(0)], dim)

    vllm.tp.all_gather = all_gather
    config = config_of(
        parallel_config__tensor_parallel_size=tp_size,
        scheduler_config__max_num_batched_tokens=2 * TOKENS,
    )
    capturer = Routers(model, config, CPU).capturer
    capturer.begin()
    model(positions=torch.arange(tokens).expand(*axes, tokens))
    captured = capturer.snapshot(2 * TOKENS).rows()
    assert np.array_equal(captured[:tokens], chosen(model)[list(rows)])
    assert not capturer_valid(captured[tokens:]).any()
    assert len(gathered) == (3 if tokens > TOKENS else 0)


def test_one_token_is_not_gathered(vllm):
    """A collective in each layer would cost every engine with tensor parallelism."""
    model = Model([MoERunner(layer) for layer in (1, 2, 3)])
    for layer in model.layers:
        layer.router.ids = layer.router.ids[:1]
    config = config_of(parallel_config__tensor_parallel_size=2)
    capturer = Routers(model, config, CPU).capturer
    capturer.begin()
    model(positions=torch.zeros(1))
    assert np.array_equal(capturer.snapshot(1).rows(), chosen(model))


def test_shards_of_another_number_of_ranks_are_missing(vllm, caplog):
    model = model_of()
    capturer = Routers(model, config_of(parallel_config__tensor_parallel_size=2), CPU).capturer
    capturer.begin()
    model(positions=torch.arange(4 * TOKENS))
    assert not capturer_valid(capturer.snapshot(TOKENS).rows()).any()
    assert caplog.text.count("5 rows; expected one of") == 1


def test_a_layout_of_tokens_that_is_not_known_is_missing_and_does_not_stop_the_model(vllm, caplog):
    model = model_of()
    capturer = Routers(model, data_parallel(vllm, [40, 30], rank=0), CPU).capturer
    rows = rows_of(capturer, model)
    assert not capturer_valid(rows).any()
    assert caplog.text.count("topk_ids") == 1


def capturer_valid(rows):
    return (rows[..., :1] != rows[..., 1:]).all(axis=-1)


# ---------------------------------------------------------------------------- a worker


PADDING = torch.full((1, TOP_K), -1)


class Worker:
    """A worker whose dummy batch is padding: its layers write -1, or what `dummy` says of them."""

    more: ClassVar = {}
    """Of its model runner."""

    def __init__(self, vllm_config, dummy=None, made_of=MoERunner):
        self.vllm_config = vllm_config
        self.made_of = made_of
        self.calls = []
        self.model = None
        self.dummy = dummy or {}

    def load_model(self):
        self.model = Model([self.made_of(layer) for layer in (1, 2, 3)])
        self.model_runner = SimpleNamespace(
            get_model=lambda: self.model,
            device=CPU,
            input_batch=SimpleNamespace(req_ids=[]),
            **self.more,
        )

    def initialize_from_config(self, kv_cache_config):
        self.calls.append("initialize_from_config")

    def compile_or_warm_up_model(self):
        self.calls.append("compile_or_warm_up_model")
        return "times"

    def execute_dummy_batch(self):
        for layer in self.model.layers:
            for ids in self.dummy.get(layer.layer, [PADDING]):
                layer.router.ids = ids
                layer()

    def execute_model(self, scheduler_output):
        self.model()
        return scheduler_output

    def shutdown(self):
        self.calls.append("shutdown")


ASKED = {"target": "127.0.0.1:9", "background": "thread", "close_timeout_seconds": 0}


@pytest.fixture
def worker(vllm):
    made = []

    def make(dummy=None, made_of=MoERunner, **changes):
        config = config_of(additional_config={"routetrace": ASKED}, **changes)
        one = Worker(config, dummy, made_of)
        plugin._attach_with_model(one, settings_of(config))
        one.load_model()
        made.append(one)
        return one

    yield make
    for one in made:
        one.shutdown()


def cache(num_blocks=8):
    spec = FullAttentionSpec(block_size=4)
    groups = [SimpleNamespace(kv_cache_spec=spec)]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=num_blocks)


def test_the_proof_is_a_pass_over_a_dummy_batch(worker):
    one = worker()
    one.initialize_from_config(cache())
    assert one.compile_or_warm_up_model() == "times"
    assert one.calls == ["initialize_from_config", "compile_or_warm_up_model"]


def test_a_worker_shuts_the_schedule_of_its_process_down_first(worker, monkeypatch):
    one = worker()
    one.initialize_from_config(cache())
    config = one.vllm_config
    schedule = attach.make_schedule(config, settings_of(config), cache())
    monkeypatch.setattr(schedule, "shut_down", lambda: one.calls.append("schedule"))
    one.shutdown()
    assert one.calls[-2:] == ["schedule", "shutdown"]


ONE, LATE = torch.tensor([[0, 1]]), torch.tensor([[NUM_EXPERTS, 0]])


@pytest.mark.parametrize(
    ("dummy", "said"),
    [
        ({2: []}, r"model is layers \[2\] never written;"),
        ({1: [], 2: []}, r"layers \[1, 2\] never written"),
        ({3: [ONE, ONE]}, r"layers \[3\] written twice"),
        ({3: [PADDING, PADDING]}, r"layers \[3\] written twice"),
        ({1: [ONE, PADDING]}, r"layers \[1\] written twice"),
        ({1: [LATE]}, rf"layers \[1\] out of range: id {NUM_EXPERTS} of {NUM_EXPERTS} experts"),
        ({1: [PADDING - 1]}, r"layers \[1\] out of range: id -2 of"),
        ({1: [], 2: [ONE, ONE], 3: [LATE]}, r"\[1\] never .*; .*\[2\] written twice; .*\[3\] out"),
    ],
)
def test_layers_that_do_not_write_once_are_named_at_start_and_how(worker, dummy, said):
    one = worker(dummy)
    one.initialize_from_config(cache())
    with pytest.raises(InvalidArgument, match=said):
        one.compile_or_warm_up_model()


@pytest.mark.parametrize("made_of", ["kernels", "kernels with sinks"])
def test_kernels_that_a_reload_makes_are_captured(worker, made_of):
    one = worker(made_of=MADE_OF[made_of])
    one.initialize_from_config(cache())
    one.compile_or_warm_up_model()
    one.model.load_weights(())
    attachment = attach.attachment_of(one.vllm_config)
    attachment.begin_step(StepPlan([], b"", TOKENS))
    for layer in one.model.layers:
        layer.router = BaseRouter()
    one.model()
    rows = attachment.side._capturer.snapshot(TOKENS).rows()
    assert np.array_equal(rows, chosen(one.model))


def test_one_rank_of_the_tensor_parallel_group_sends(worker, vllm):
    vllm.tp.rank_in_group = 1
    one = worker()
    one.initialize_from_config(cache())
    assert one.compile_or_warm_up_model() == "times"  # it captures all the same
    assert one.routetrace_stats() == {}
    assert one.routetrace_flush(0) is True
    vllm.tp.rank_in_group = 0
    other = worker()
    other.initialize_from_config(cache())
    assert other.routetrace_stats()["offered_rows"] == 0


def test_compiled_code_with_capture_has_a_mark_of_its_own(worker):
    one = worker()
    mark = one.vllm_config.additional_config["routetrace.compiled"]
    assert "(1, 2, 3)" in mark
    assert "Tensor[] topk_ids" in mark  # the operator that is in it


def test_the_connector_finds_its_worker_and_no_other(worker):
    one = worker()
    assert attach.attachment_of(one.vllm_config).belongs_to(one.vllm_config)
    with pytest.raises(InvalidArgument) as error:
        attach.attachment_of(config_of())
    assert error.value.field == "VLLM_PLUGINS"


def test_a_step_that_no_scheduler_made_is_let_through(worker):
    one = worker()
    one.initialize_from_config(cache())
    output = SimpleNamespace()
    assert one.execute_model(output) is output
    assert one.routetrace_stats()["offered_rows"] == 0


@pytest.mark.parametrize("runner", [1, 2])
def test_where_drafts_are_judged_late_the_batch_tells_its_positions(worker, monkeypatch, runner):
    positions = torch.arange(TOKENS)
    if runner == 1:
        buffers = {"positions": positions}
    else:
        buffers = {"input_buffers": SimpleNamespace(positions=positions)}
    monkeypatch.setattr(Worker, "more", buffers)
    told = []
    for changes in ({}, {"speculative_config": object()}, LATE_DRAFTS):
        one = worker(**changes)
        one.initialize_from_config(cache())
        monkeypatch.setattr(attach._last.side, "end_step", lambda *args: told.append(args[2]))
        one.execute_model(SimpleNamespace(routetrace_plan=StepPlan()))
    assert told[:2] == [None, None]
    assert told[2] is positions


def test_a_runner_that_has_no_positions_to_tell_is_refused(worker):
    with pytest.raises(InvalidArgument, match="--no-async-scheduling"):
        worker(**LATE_DRAFTS)


def test_weights_are_watched_once_the_model_is_loaded(worker, monkeypatch):
    loads = []

    class Loading(Model):
        def load_weights(self, weights):
            loads.append(weights)

    def load_model(self, inner=Worker.load_model):
        inner(self)
        self.model = Loading(list(self.model.layers))
        self.model.load_weights("at start")

    monkeypatch.setattr(Worker, "load_model", load_model)
    one = worker()
    one.initialize_from_config(cache())
    weights = attach._last.side._weights
    assert (weights.version, weights.untold) == (None, False)
    one.routetrace_set_weight_version(5)
    assert weights.version == 5
    one.model.load_weights("an update")
    assert (weights.version, weights.untold) == (None, True)
    getattr(one, FOLLOW)("6")
    assert weights.version == 6
    getattr(one, FOLLOW)("default")
    assert weights.version is None
    one.routetrace_set_weight_version(7)
    one.routetrace_set_weight_version(None)
    assert weights.untold
    assert loads == ["at start", "an update"]
    with pytest.raises(InvalidArgument, match="version"):
        one.routetrace_set_weight_version("7")


def test_the_model_is_named_by_configuration_and_quantization(worker):
    hashes = []
    for changes in ({}, {"model_config__model": "/elsewhere"}, {"model_config__quantization": "q"}):
        worker(**changes).initialize_from_config(cache())
        hashes.append(attach._last.side._config.model)
    assert hashes[0] == hashes[1] == model_hash(config_of().model_config.hf_config)
    assert hashes[2] == model_hash(config_of().model_config.hf_config, "q")
    assert attach.model_of(SimpleNamespace(hf_config=object())) == ""


def test_control_before_there_is_a_cache_is_refused(worker):
    one = worker()
    with pytest.raises(RuntimeError):
        one.routetrace_stats()


def connector_of(name: str, manager: str | None = None, **fields):
    """A connector of vLLM, by the names of its class and of its manager's."""
    if manager is not None:
        fields["connector_scheduler"] = SimpleNamespace(manager=type(manager, (), {})())
    return type(name, (), fields)()


OURS = connector_of("RouteTraceConnector")
HOST = connector_of("OffloadingConnector", "CPUOffloadingManager")


@pytest.mark.parametrize(
    ("connector", "told", "external"),
    [
        (None, False, True),
        (OURS, False, True),
        (HOST, True, True),
        (HOST, False, False),
        (connector_of("SimpleCPUOffloadConnector"), True, True),
        (connector_of("MultiConnector", _connectors=[OURS, HOST]), True, True),
        # A reset leaves what is behind host memory, and vLLM calls that a success.
        (connector_of("OffloadingConnector", "TieringOffloadingManager"), True, False),
        (connector_of("NixlConnector"), True, False),
        (connector_of("MultiConnector", _connectors=[HOST, connector_of("Other")]), True, False),
    ],
)
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("by_name", [True, False])
def test_resets_are_told_with_the_stores_that_they_empty(connector, told, external, done, by_name):
    resets = []

    class Scheduler:
        def __init__(self) -> None:
            self.connector = connector
            self.running = [
                SimpleNamespace(status=SimpleNamespace(name="RUNNING"), at=i) for i in "ab"
            ]
            self.routetrace_resets = self

        def preempt(self, requests) -> None:
            resets.extend(request.at for request in requests)

        def reset(self, *, external: bool) -> None:
            resets.append(external)

        def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
            self.running.pop().status.name = "PREEMPTED"
            return done

    plugin._note_resets(Scheduler)
    if by_name:
        assert Scheduler().reset_prefix_cache(reset_connector=told) is done
    else:
        assert Scheduler().reset_prefix_cache(False, told) is done
    assert resets == (["b", external] if done else ["b"])
