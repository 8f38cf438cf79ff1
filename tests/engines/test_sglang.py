"""Capture in SGLang, without SGLang: settings, options, order of events, calls of the agent."""

import sys
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from routetrace.capture_agent.engines.request_options import RequestOptions
from routetrace.capture_agent.engines.sglang import capture as captures
from routetrace.capture_agent.engines.sglang import plugin, seams, speculation, tap
from routetrace.capture_agent.engines.sglang import probe as probes
from routetrace.capture_agent.engines.sglang.options import options_of
from routetrace.capture_agent.engines.sglang.ranks import Ranks, ranks_of
from routetrace.capture_agent.engines.sglang.requests import NO_HANDLE, Deliveries, Requests
from routetrace.capture_agent.engines.sglang.settings import refuse_unsupported, settings_of
from routetrace.capture_agent.engines.sglang.timeline import Timeline
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.common.model_hash import model_hash
from support.sglang_capture import Agent, Passes, Request, args_of, capturing, has_all_names, req_of

# ---------------------------------------------------------------------- settings


def test_off_by_default():
    assert settings_of({}) is None
    assert settings_of({"ROUTETRACE_TARGET": "h:1", "ROUTETRACE_SGLANG": "off"}) is None


def test_a_target_turns_it_on():
    settings = settings_of({"ROUTETRACE_TARGET": "h:1", "ROUTETRACE_ENGINE_ID": "e"})
    assert settings is not None
    assert (settings.engine_id, settings.agent) == ("e", {})
    settings = settings_of({"ROUTETRACE_SGLANG": '{"target": "h:1", "linger_seconds": 0.5}'})
    assert settings is not None
    assert settings.agent == {"target": "h:1", "linger_seconds": 0.5}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("[]", "ROUTETRACE_SGLANG"),
        ("{", "ROUTETRACE_SGLANG"),
        ('{"target": "h:1", "layout": 3}', "layout"),
        ('{"target": "h:1", "no_such": 3}', "no_such"),
        ('{"target": "h:1", "model": "0123456789abcdef"}', "model"),
        ('{"linger_seconds": 3}', "ROUTETRACE_TARGET"),
        ('{"target": "h:1", "probe": 1}', "probe"),
    ],
)
def test_wrong_settings_are_named(given, named):
    with pytest.raises(InvalidArgument, match=named):
        settings_of({"ROUTETRACE_SGLANG": given})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pp_size", 2),
        ("speculative_algorithm", "DFLASH"),
        ("speculative_adaptive", True),
        ("enable_pd_role_switch", True),
        ("attn_cp_size", 2),
        ("dllm_algorithm", "x"),
        ("enable_hisparse", True),
        ("enable_lmcache", True),
        ("enable_flexkv", True),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, value):
    refuse_unsupported(args_of(pp_size=1, disaggregation_mode="null"))
    refuse_unsupported(args_of(speculative_algorithm="NGRAM", speculative_eagle_topk=4))
    refuse_unsupported(args_of(speculative_algorithm="EAGLE", speculative_eagle_topk=1))
    with pytest.raises(InvalidArgument, match=name):
        refuse_unsupported(args_of(**{name: value}))


def test_trees_of_a_model_that_drafts_have_no_branches():
    args = args_of(speculative_algorithm="EAGLE", speculative_eagle_topk=4)
    with pytest.raises(InvalidArgument, match="speculative_eagle_topk"):
        refuse_unsupported(args)


@pytest.fixture
def sglang(monkeypatch):
    """Names that this version of SGLang has: a set, at first all of the newest tested one."""
    return has_all_names(monkeypatch)


def test_dp_attention_needs_the_number_of_tokens_before_padding(sglang):
    args = args_of(enable_dp_attention=True)
    refuse_unsupported(args)
    sglang.discard(seams.NUM_TOKENS.places[0])
    refuse_unsupported(args_of())
    with pytest.raises(seams.Refused) as refusal:
        refuse_unsupported(args)
    assert str(refusal.value) == (
        "routetrace: cannot capture from SGLang 0.5.99: it lacks "
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch._original_num_tokens, which "
        "--enable-dp-attention needs; use SGLang 0.5.23, or leave the setting out; see "
        "docs/sglang.md"
    )


def test_host_memory_needs_the_names_that_show_its_copies(sglang):
    args = args_of(enable_hierarchical_cache=True)
    refuse_unsupported(args)
    sglang.discard(seams.WRITES[0].places[0])
    refuse_unsupported(args_of())
    with pytest.raises(seams.Refused, match=r"HiCacheController.write, which --enable-hier"):
        refuse_unsupported(args)


def test_a_class_that_is_not_there_has_no_names():
    assert seams.HOST_MADE.place is None


def test_without_the_seams_a_server_does_not_start():
    with pytest.raises(SystemExit, match=r"run_batch.* use SGLang 0\.5\.12 or .* docs/sglang"):
        seams.check()
    with pytest.raises(SystemExit, match="did not apply"):
        seams.check_applied(["json.dumps"])


def test_one_place_of_several_will_do(sglang):
    """SGLang 0.5.12 has its scheduler's parts in the scheduler."""
    for seam in (seams.ANSWERED, seams.ABORTED, *seams.UPDATES.values()):
        sglang.discard(seam.places[0])
        with pytest.raises(seams.Refused):
            seams.check()
        sglang.add(seam.places[-1])
        assert seam.place == seam.places[-1]
    seams.check()


def test_what_a_version_does_not_give_is_said_once(sglang, caplog):
    seams.tell_lost()
    assert not caplog.records
    sglang -= {seams.RENAMED.places[0], seams.GRAPHS.places[0], seams.BEGUN.places[0]}
    seams.check()
    seams.tell_lost()
    (record,) = caplog.records
    assert record.message == (
        f"routetrace: SGLang 0.5.99 does not give {seams.RENAMED.lost}; {seams.GRAPHS.lost}"
    )


def test_each_seam_is_refused_or_said():
    for seam in seams.table():
        assert seam.since in seams.TESTED
        assert not seam.used_by or seam.lost is None, seam
        assert seam.since == seams.TESTED[0] or seam.used_by or seam.lost is not None, seam


def test_a_start_that_misses_an_attribute_is_refused_with_a_remedy():
    with (
        pytest.raises(seams.Refused, match=r"no attribute 'page_size'; use SGLang 0\.5\.12 or"),
        seams.refusing(),
    ):
        getattr(SimpleNamespace(), "page_size")  # noqa: B009


@pytest.mark.parametrize("name", ["enable_lmcache", "pp_size", "dllm_algorithm"])
def test_a_mode_that_has_another_name_is_not_taken_for_one_that_is_off(name):
    args = args_of()
    delattr(args, name)
    with pytest.raises(seams.Refused, match=name), seams.refusing():
        refuse_unsupported(args)


@pytest.mark.parametrize(
    ("dp_size", "parallel", "runner", "suffix"),
    [
        (1, {"dp_rank": 0}, {}, ""),
        (2, {"dp_rank": 1}, {}, "-dp1"),
        (2, {}, {"ps": SimpleNamespace(dp_rank=1)}, "-dp1"),  # SGLang 0.5.16
        (2, {}, {"dp_rank": 1}, "-dp1"),  # SGLang 0.5.15
        (2, None, {"dp_rank": None}, "-dp0"),  # SGLang 0.5.12
    ],
)
def test_each_replica_is_an_engine(monkeypatch, dp_size, parallel, runner, suffix):
    context = None if parallel is None else lambda: SimpleNamespace(**parallel)
    found = {seams.ATTENTION_RANK.places[0]: lambda: 3, seams.PARALLEL.places[0]: context}
    monkeypatch.setattr(seams, "found", found.get)
    runner = SimpleNamespace(server_args=args_of(dp_size=dp_size), **runner)
    assert ranks_of(runner) == Ranks(3, suffix)


def test_a_server_whose_replica_has_no_rank_does_not_start(monkeypatch):
    found = {seams.ATTENTION_RANK.places[0]: lambda: 0}
    monkeypatch.setattr(seams, "found", found.get)
    runner = SimpleNamespace(server_args=args_of(dp_size=2))
    with pytest.raises(seams.Refused, match="dp_rank"), seams.refusing():
        ranks_of(runner)


def test_a_model_runner_without_a_capturer_is_refused(monkeypatch):
    """As MLX's: SGLang would serve, and nothing would be captured."""
    monkeypatch.setattr(plugin, "_attached", True)
    plugin._workers_made(None, "scheduler")
    monkeypatch.setattr(plugin, "_attached", False)
    with pytest.raises(SystemExit, match="makes no capturer of routed experts"):
        plugin._workers_made(None, "scheduler")


# ---------------------------------------------------------------------- options


def test_the_model_of_an_engine():
    config = {"hidden_size": 8, "_name_or_path": "/node-1/step-7"}
    model = plugin._model(SimpleNamespace(hf_config=config, quantization="fp8"))
    assert model == model_hash({"hidden_size": 8}, "fp8")
    assert model != model_hash(config)
    plain = SimpleNamespace(hf_config=config, quantization=None)
    assert plugin._model(plain) == model_hash(config)


def test_a_configuration_without_a_hash_is_no_reason_to_stop(caplog):
    assert plugin._model(SimpleNamespace(hf_config=None)) == ""
    assert "no hash" in caplog.text


@pytest.mark.parametrize(
    ("given", "version", "keeps"),
    [
        (
            {
                "weight_version": "7",
                "remote_instance_weight_loader_start_seed_via_transfer_engine": True,
            },
            None,
            True,
        ),
        ({"weight_version": "default"}, None, True),
        ({"weight_version": "7"}, 7, True),
        ({"enable_memory_saver": True}, None, False),
        ({"enable_memory_saver": True, "enable_weights_cpu_backup": True}, None, True),
    ],
)
def test_an_engine_tells_its_model_and_the_version_that_it_was_started_with(
    monkeypatch, given, version, keeps
):
    monkeypatch.setattr(plugin, "ranks_of", lambda _: Ranks(0, ""))
    monkeypatch.setattr(tap, "Tap", lambda *_: Passes())
    configs = []
    monkeypatch.setattr(captures, "CaptureAgent", lambda config, **_: configs.append(config))
    for name in ("_capture", "_tapped", "_attached", "_keeps_weights"):
        monkeypatch.setattr(plugin, name, None)
    facts = {"num_hidden_layers": 3, "num_experts": 16, "num_experts_per_tok": 2}
    config = {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [1], **facts}
    args = args_of(model_path="m", kv_cache_dtype="auto", **given)
    runner = SimpleNamespace(
        is_draft_worker=False,
        server_args=args,
        model_config=SimpleNamespace(hf_config=config, quantization="fp8", dtype="bfloat16"),
        page_size=4,
        max_token_pool_size=64,
    )
    settings = settings_of({"ROUTETRACE_SGLANG": '{"target": "h:1", "engine_id": "e"}'})
    assert settings is not None
    plugin._attach(runner, settings)
    (told,) = configs
    assert told.model == model_hash(config, "fp8")
    assert plugin._capture.weights.version == version
    assert plugin._keeps_weights is keeps
    plugin._capture.close()


def test_options():
    options = options_of("rid", None)
    assert options is not None
    assert options.trace_id == "rid"
    given = {"trace_id": "t", "labels": {"a": 1}, "group": "g", "ttl_seconds": 5}
    options = options_of("rid", {"routetrace": given, "other": 1})
    assert options is not None
    assert (options.trace_id, options.ttl_seconds) == ("t", 5)
    assert options.labels == {"a": "1", "group": "g"}
    assert options_of("rid", {"routetrace": {"capture": False}}) is None
    assert options_of("HEALTH_CHECK_1", None) is None


@pytest.mark.parametrize(
    ("given", "named"),
    [("x", "custom_params"), ({"tracid": "t"}, "tracid"), ({"labels": 3}, "labels")],
)
def test_wrong_options_are_named(given, named):
    with pytest.raises(InvalidArgument, match=named):
        options_of("rid", {"routetrace": given})


# ---------------------------------------------------------------------- order of events


def test_events_wait_for_the_passes_before_them_alone():
    log = []
    timeline = Timeline(lambda event: event())
    timeline.add(lambda: log.append("at once"))
    timeline.launch("a")
    timeline.add(lambda: log.append("after a"))
    timeline.launch("b")
    timeline.add(lambda: log.append("after b"))
    assert log == ["at once"]
    timeline.arrive("a", lambda: log.append("a"))
    assert log[1:] == ["a", "after a"]
    with pytest.raises(RuntimeError):
        timeline.arrive("c", lambda: None)
    timeline.arrive("b", lambda: log.append("b"))
    assert log[3:] == ["b", "after b"]
    timeline.launch("c")
    timeline.add(lambda: log.append("lost"))
    (event,) = timeline.clear()
    timeline.add(event)
    assert log[5:] == ["lost"]


# ---------------------------------------------------------------------- rows


class Capturer:
    """As much of SGLang's capturer as is used, with two layers of which one is MoE."""

    num_layers, topk_size = 3, 2

    def __init__(self, *_, **__):
        self.device_cache = SimpleNamespace(buffer=torch.zeros((8, 3, 3), dtype=torch.int32))

    def _get_local_slice(self, forward_batch, can_run_graph, cuda_graph_batch):
        return self.device_cache.buffer[: len(forward_batch.out_cache_loc), :, :2]

    def on_forward_end(self, *_, **__):
        raise AssertionError("SGLang's own would write into its table")


@pytest.fixture
def seams_of_sglang(monkeypatch):
    """A module of SGLang whose capturer is off."""
    module = SimpleNamespace(RoutedExpertsCapturer=Capturer, current=None)
    module.get_global_experts_capturer = lambda: module.current
    module.set_global_experts_capturer = lambda capturer: setattr(module, "current", capturer)
    monkeypatch.setattr(seams, "found", lambda _: module)
    return module


RUNNER = SimpleNamespace(
    model=None,
    model_config=None,
    server_args=args_of(disable_shared_experts_fusion=False),
    max_running_requests=1,
    device="cpu",
)


@pytest.mark.parametrize(("experts", "dtype"), [(16, torch.uint8), (300, torch.int16)])
def test_rows_are_private_and_a_layer_that_does_not_write_is_seen(seams_of_sglang, experts, dtype):
    layout = ModelLayout((0, 2), 3, experts, 2)
    rows_of = tap.Tap(RUNNER, layout)
    capturer, taken = seams_of_sglang.current, []
    rows_of.on_forward_end(lambda fb, rows, slots, native: taken.append((rows, slots)) or "carried")
    buffer = capturer.device_cache.buffer
    assert buffer.dtype == dtype
    batch = SimpleNamespace(out_cache_loc=torch.tensor([5, 6]))
    buffer[:2, 0], buffer[:2, 2] = torch.tensor([3, 4, 0]), torch.tensor([7, 1, 0])
    assert capturer.on_forward_end(batch, False, None, True) == "carried"
    buffer[:2, 0] = torch.tensor([9, 8, 0])
    capturer.on_forward_end(forward_batch=batch, can_run_graph=False, cuda_graph_batch=None)
    (first, slots), (second, _) = taken
    assert first.tolist() == [[[3, 4], [7, 1]]] * 2
    assert slots.tolist() == [5, 6]
    narrow = second.numpy().view(layout.dtype)
    unwritten = np.iinfo(layout.dtype).max
    assert narrow.tolist() == [[[9, 8], [unwritten] * 2]] * 2


def test_rows_of_sglangs_own_return_outlive_the_buffer(seams_of_sglang):
    """SGLang 0.5.15 returns a part of its buffer with a pass, and copies it later."""

    class Own(Capturer):
        def on_forward_end(self, forward_batch, *_):
            rows = self._get_local_slice(forward_batch, False, None)
            return Output(rows, forward_batch.out_cache_loc)

    class Output:
        def __init__(self, topk, slots):
            self.topk, self.slots, self.name = topk, slots, "experts"

    capturer = seams_of_sglang.current = Own()
    rows_of, carried = tap.Tap(RUNNER, ModelLayout((0, 2), 3, 16, 2)), []
    rows_of.on_forward_end(lambda fb, rows, slots, native: carried.append(native))
    capturer.device_cache.buffer[:2] = torch.tensor([3, 4, 0])
    batch = SimpleNamespace(out_cache_loc=torch.tensor([5, 6]))
    capturer.on_forward_end(batch, False, None, True)
    (native,) = carried
    assert rows_of.unwritten_layers() == [0, 2]
    assert native.topk.tolist() == [[[3, 4]] * 3] * 2
    copy = Output(native.topk, batch.out_cache_loc)
    assert not rows_of._is_part(copy)


def test_padding_and_passes_of_other_ranks_leave_no_rows(seams_of_sglang):
    """A rank of data-parallel attention pads its batch; its pass may have no token of its own."""
    rows_of = tap.Tap(RUNNER, ModelLayout((0, 2), 3, 16, 2))
    capturer, taken = seams_of_sglang.current, []
    rows_of.on_forward_end(lambda fb, rows, slots, native: taken.append((rows, slots)))
    buffer = capturer.device_cache.buffer

    def launch(length):
        buffer[:4] = torch.tensor([3, 4, 0])
        slots = torch.tensor([5, 6, 7, 0][:length] + [0] * (4 - length))
        batch = SimpleNamespace(out_cache_loc=slots, _original_num_tokens=length)
        capturer.on_forward_end(batch, False, None, True)

    launch(3)
    ((rows, slots),) = taken
    assert rows.tolist() == [[[3, 4]] * 2] * 3
    assert slots.tolist() == [5, 6, 7]
    launch(0)
    assert len(taken) == 1
    assert rows_of.unwritten_layers() == [0, 2]


def test_a_pass_that_verifies_drafts_has_room(seams_of_sglang):
    rows_of = tap.Tap(RUNNER, ModelLayout((0, 2), 3, 16, 2), num_drafts=11)
    buffer = seams_of_sglang.current.device_cache.buffer
    assert buffer.shape == (11, 3, 3)
    assert rows_of.unwritten_layers() == [0, 2]


def test_a_rank_without_agent_takes_no_rows(seams_of_sglang):
    tap.Tap(RUNNER, ModelLayout((0, 2), 3, 16, 2)).ignore()
    assert seams_of_sglang.current.on_forward_end("batch", False, None) is None


class Eager:
    """As much of SGLang's eager runner as is used: a pass in which some layers show their ids."""

    def __init__(self, capturer, shown):
        self.capturer, self.shown, self.passes = capturer, shown, []

    def _alloc_dummy_decode_buffers(self, batch_size, *, num_tokens_per_req):
        return batch_size * num_tokens_per_req

    def _dummy_run(self, batch_size, *, buffers, **how):
        self.passes.append(buffers)
        for layer in self.shown(how):
            self.capturer.device_cache.buffer[:buffers, layer] = torch.tensor([1, 3, 0])


@pytest.fixture
def tapped(seams_of_sglang, monkeypatch):
    """A tap, and a runner whose layers of a pass `shown` names."""
    module = SimpleNamespace(ForwardMode=SimpleNamespace(EXTEND="extend"))
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.forward_batch_info", module)

    def make(shown):
        rows_of = tap.Tap(RUNNER, ModelLayout((0, 2), 3, 16, 2))
        eager = Eager(seams_of_sglang.current, shown)
        backend = SimpleNamespace(get_cuda_graph_seq_len_fill_value=lambda: 1)
        return rows_of, SimpleNamespace(eager_runner=eager, attn_backend=backend)

    return make


def test_a_probe_passes_where_every_moe_layer_shows_its_ids(tapped):
    rows_of, runner = tapped(lambda _: [0, 2])
    probes.probe(runner, rows_of)
    assert runner.eager_runner.passes == [1, 4]
    assert rows_of.unwritten_layers() == [0, 2]  # nothing of it is left for the first real pass


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_layer_that_a_fused_kernel_routes_is_refused_by_name(tapped, kind):
    def shown(how):
        return [0] if ("forward_mode_override" in how) == (kind == "prefill") else [0, 2]

    rows_of, runner = tapped(shown)
    with pytest.raises(InvalidArgument, match=rf"layers \[2\] show no ids in a {kind} pass"):
        probes.probe(runner, rows_of)


def test_a_backend_without_graphs_is_probed_too(tapped):
    class Backend:
        def get_cuda_graph_seq_len_fill_value(self):
            raise NotImplementedError

    rows_of, runner = tapped(lambda _: [2])
    runner.attn_backend = Backend()
    with pytest.raises(InvalidArgument, match=r"layers \[0\]"):
        probes.probe(runner, rows_of)
    with pytest.raises(NotImplementedError):
        runner.attn_backend.get_cuda_graph_seq_len_fill_value()


def test_without_a_dummy_pass_a_server_starts_and_the_log_says_so(tapped, caplog):
    rows_of, runner = tapped(lambda _: [])
    runner.eager_runner._dummy_run = None  # not even callable
    probes.probe(runner, rows_of)
    assert "no decode pass" in caplog.text
    assert "no prefill pass" in caplog.text
    probes.probe(SimpleNamespace(), rows_of)
    assert "has no dummy pass" in caplog.text


def test_a_capturer_of_another_model_is_refused(seams_of_sglang):
    with pytest.raises(InvalidArgument, match="3 layers of 2 experts"):
        tap.Tap(RUNNER, ModelLayout((0, 2), 3, 16, 4))


# ---------------------------------------------------------------------- calls of the agent


@pytest.fixture
def agent():
    return Agent()


class Both:
    """The half that follows the scheduler, and the half that reports to the agent."""

    def __init__(self):
        free = []
        self.requests = Requests(
            lambda req: options_of(req.rid, None) if req.capture else None, free
        )
        self.deliveries = Deliveries(4, free)

    def __getattr__(self, name):
        return getattr(self.requests if hasattr(self.requests, name) else self.deliveries, name)


@pytest.fixture
def requests():
    return Both()


def deliver(requests, agent, reqs, positions, counts, slots, prefixes=()):
    plan = requests.plan(reqs, np.array(positions), np.array(counts), 0)
    rows = np.arange(sum(counts), dtype=np.uint8)[:, None, None]
    requests.deliver(plan, rows, np.array(slots), np.array(prefixes, np.int64), agent)


def test_blocks_follow_slots(requests, agent):
    a, b = Request("a", list(range(6))), Request("b", list(range(5)))
    deliver(requests, agent, [a, b], [0, 4], [6, 1], [8, 9, 10, 11, 16, 17, 20], [40, 41, 42, 43])
    assert agent.calls == [
        ("begin", "a", 0, [2, 4]),
        ("begin", "b", 4, [10, 5]),
        ("step", list(range(7)), [[101, 0, 6], [102, 4, 1]]),
    ]
    agent.calls.clear()
    deliver(requests, agent, [a, b], [6, 5], [1, 1], [18, 21])
    deliver(requests, agent, [a, b], [7, 6], [1, 1], [19, 22])
    deliver(requests, agent, [a, b], [8, 7], [1, 1], [24, 23])
    assert [call for call in agent.calls if call[0] != "step"] == [("add_blocks", [101], [6])]


def test_requests_have_the_labels_of_their_engine():
    begun = []

    class Begun(Agent):
        def begin(self, request_id, **facts):
            begun.append(facts["labels"])
            return super().begin(request_id, **facts)

    options = RequestOptions("t", {"group": "g"})
    requests = Requests(lambda _: options, [])
    deliveries = Deliveries(4, [], {"kv_cache_dtype": "fp8_e5m2"})
    plan = requests.plan([Request("a", [1, 2])], np.array([0]), np.array([2]), 0)
    rows = np.zeros((2, 1, 1), np.uint8)
    deliveries.deliver(plan, rows, np.array([4, 5]), np.zeros(0, np.int64), Begun())
    assert begun == [{"group": "g", "kv_cache_dtype": "fp8_e5m2"}]


def test_chunks_that_go_on_get_blocks_at_page_starts(requests, agent):
    a = Request("a", list(range(12)))
    deliver(requests, agent, [a], [0], [3], [0, 1, 2])
    deliver(requests, agent, [a], [3], [8], [3, 8, 9, 10, 11, 4, 5, 6])
    assert agent.calls[2] == ("add_blocks", [101, 101], [2, 1])


def test_a_retracted_request_resumes_even_where_the_batch_looks_the_same(requests, agent):
    a = Request("a", list(range(4)))
    deliver(requests, agent, [a], [0], [4], [4, 5, 6, 7])
    a.output_ids = [9]
    noted = requests.retract(a, 5)
    assert noted is not None
    assert noted[1] == 4
    requests.report_retraction(*noted, agent)
    assert requests.retract(a, 5) is None
    deliver(requests, agent, [a], [0], [5], [8, 9, 10, 11, 12])
    assert ("preempt", 101, 4) in agent.calls
    assert ("resume", 101, 0, [2, 3], 5) in agent.calls


def test_the_row_whose_token_is_dropped_does_not_count(requests, agent):
    a = Request("a", list(range(4)))
    deliver(requests, agent, [a], [0], [4], [4, 5, 6, 7])  # its token is under way
    noted = requests.retract(a, 4)
    assert noted is not None
    assert noted[1] == 3


def test_slots_of_requests_that_are_not_captured_become_unknown(requests, agent):
    a, b = Request("a", list(range(5))), Request("b", list(range(4)), capture=False)
    deliver(requests, agent, [b, a], [0, 0], [4, 5], [4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert agent.calls == [
        ("begin", "a", 0, [2, 3]),
        ("mark_external", [1]),
        ("step", [4, 5, 6, 7, 8], [[101, 0, 5]]),
    ]


def test_ends(requests, agent):
    a = Request("a", [1, 2, 3])
    assert requests.end(a) is None
    deliver(requests, agent, [a], [0], [3], [4, 5, 6])
    live = requests.end(a)
    assert live is not None
    assert requests.end(a) is None
    requests.report_end(live, ([1, 2, 3], [4]), "stop", agent)
    assert agent.calls[-1][:2] == ("finish", 101)
    again = Request("a", [1, 2, 3])
    deliver(requests, agent, [again], [0], [3], [4, 5, 6])
    assert agent.calls[-1] == ("step", [0, 1, 2], [[102, 0, 3]])


def test_after_a_fault_requests_under_way_are_not_captured(requests, agent):
    a = Request("a", [1, 2, 3])
    deliver(requests, agent, [a], [0], [3], [4, 5, 6])
    requests.give_up()
    agent.calls.clear()
    deliver(requests, agent, [a], [3], [1], [7])
    assert agent.calls == [("mark_external", [1]), ("step", [], [])]
    assert NO_HANDLE == -1


def test_rows_and_tokens_must_agree(requests, agent):
    with pytest.raises(RuntimeError, match="3 slots"):
        deliver(requests, agent, [Request("a", [1])], [0], [2], [4, 5, 6])


# ---------------------------------------------------------------------- faults


@pytest.fixture
def scheduler(monkeypatch):
    with capturing(monkeypatch) as scheduler:
        yield scheduler


def test_cached_slots_are_those_of_the_row_of_the_request(scheduler):
    """SGLang 0.5.12 has the rows of its table in its requests, not in its batches."""
    a = req_of("a", 6)
    a.req_pool_idx = 1
    scheduler.launch((a, 4, 2), slots=[12, 13], pool=[[0] * 4, [8, 9, 10, 11]]).finalize()
    scheduler.capture.flush(0)
    (agent,) = scheduler.agents
    assert ("begin", "a", 4, [2, 3]) in agent.calls


@pytest.mark.parametrize("own", [True, False])
def test_a_pass_is_copied_as_sglang_0_5_12_asks_for_it(own):
    """It calls `copy_to_cpu`, where later versions call `map_device_tensors`."""
    arrived = []
    native = SimpleNamespace(topk=torch.tensor([1]), name="experts", finalize=lambda: None)
    output = tap.PassRows(
        torch.tensor([[[1]]]), torch.tensor([4]), [], native if own else None, arrived.append
    )
    output.copy_to_cpu()
    output.finalize()
    assert arrived == [output]
    assert [array.tolist() for array in output.arrays()] == [[[[1]]], [4]]


def test_embeddings_at_some_positions_are_no_text(scheduler):
    """The model does not see the tokens there: their digests prove nothing of its rows."""
    known = []
    for name in ("text", "positional_embed_overrides"):
        a = req_of(name, 4)
        setattr(a, name, "given")
        scheduler.launch((a, 0, 4), slots=[4, 5, 6, 7]).finalize()
        live = scheduler.capture._requests.live(a)
        known.append(live.prompt is not None)
    assert known == [True, False]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("outcome", ["ok", "failed", "raised"])
def test_rows_under_weights_that_nobody_knows_do_not_count(
    scheduler, monkeypatch, caplog, outcome, recorded
):
    """An update may fail when a part of the weights is new, or all are and a flush was refused."""
    monkeypatch.setattr(plugin, "_capture", scheduler.capture)
    a = req_of("a", 4)
    scheduler.launch((a, 0, 4), slots=[4, 5, 6, 7]).finalize()

    def update(updater, request):
        if recorded:
            plugin._recorded(None, updater, request.weight_version)
        if outcome == "raised":
            raise RuntimeError("half of the weights are new")
        return SimpleNamespace(success=outcome == "ok")

    with suppress(RuntimeError):
        plugin._update(update, None, SimpleNamespace(weight_version="7"), whole=True)
    known = recorded or outcome == "ok"
    assert ("a weight update failed: rows are missing" in caplog.text) is not known
    a.output_ids = [1]
    scheduler.launch((a, 4, 1), slots=[8]).finalize()
    request, done = SimpleNamespace(weight_version=None), SimpleNamespace(success=True)
    plugin._update(lambda *_: done, None, request, whole=True)
    scheduler.launch((a, 5, 1), slots=[9]).finalize()
    scheduler.capture.flush(0)
    (agent,) = scheduler.agents
    told = [call for call in agent.calls if call[0] in ("step", "skip", "set_weight_version")]
    assert [call[0] for call in told if call[0] != "set_weight_version"] == [
        "step",
        "step" if known else "skip",
        "step",
    ]
    versions = [call[1] for call in told if call[0] == "set_weight_version"]
    assert versions == [None, 7 if known else None, None]
    assert caplog.text.count("'e' changed, and their version is unknown") == 1


def test_a_request_that_ends_has_the_handle_of_its_trace(scheduler, monkeypatch):
    monkeypatch.setattr(plugin, "_capture", scheduler.capture)
    named, goes_on, left_out = req_of("a", 4), req_of("b", 4), req_of("c", 4)
    named.sampling_params.custom_params = {"routetrace": {"trace_id": "t"}}
    left_out.sampling_params.custom_params = {"routetrace": {"capture": False}}
    reqs = [named, goes_on, left_out, req_of("d", 4)]  # the last was in no pass
    scheduler.launch(*((req, 0, 4) for req in reqs[:3]), slots=range(4, 16)).finalize()
    assert plugin._answered({}, None, reqs) is None
    for req in (named, left_out, reqs[3]):
        req.finished_reason, req.output_ids_through_stop = "stop", [5, 6, 7]
    info = plugin._answered({"other": [0] * 4}, None, reqs)
    assert info is not None
    ((handle,), _, _, (last,)) = info["routetrace"]
    assert (last["trace_id"], last["num_tokens"]) == ("d", 7)
    assert 0 < handle["nonce"] < 1 << 53
    assert handle == {"run": "default", "trace_id": "t", "num_tokens": 7, "nonce": handle["nonce"]}
    assert info == {"other": [0] * 4, "routetrace": [[handle], [], [], [last]]}
    assert plugin._answered({}, None, [named]) == {"routetrace": [[handle]]}
    scheduler.capture.ended(named)
    assert plugin._answered({}, None, [named]) == {"routetrace": [[]]}


def test_the_nonce_of_a_handle_is_that_of_the_begin(scheduler, monkeypatch):
    """Also where a trace id is used again, and where the request is retracted in between."""
    begun, begin = [], Agent.begin

    def noted(self, request_id, **facts):
        begun.append(facts["nonce"])
        return begin(self, request_id, **facts)

    monkeypatch.setattr(Agent, "begin", noted)
    answered = []
    for _ in range(3):
        a = req_of("a", 4)
        scheduler.launch((a, 0, 4), slots=[4, 5, 6, 7]).finalize()
        a.output_ids = [9]
        scheduler.capture.retracted(a)
        scheduler.launch((a, 0, 5), slots=[8, 9, 10, 11, 12]).finalize()
        a.finished_reason = "stop"
        (handle,) = scheduler.capture.handles(a)
        answered.append(handle["nonce"])
        scheduler.capture.answered([a])
    scheduler.capture.flush(0)
    assert begun == answered
    assert len(set(begun)) == 3


def test_events_follow_the_passes_that_were_launched_before_them(scheduler):
    a, b = req_of("a", 4), req_of("b", 4)
    first = scheduler.launch((a, 0, 4), slots=[4, 5, 6, 7])
    second = scheduler.launch((b, 0, 4), slots=[8, 9, 10, 11])
    scheduler.capture.ended(a, "abort")  # while both are under way
    scheduler.capture.flushed()
    first.finalize()
    scheduler.capture.flush(0)
    (agent,) = scheduler.agents
    told = [call[0] for call in agent.calls if call[0] != "set_weight_version"]
    assert told == ["begin", "step", "flush"]
    second.finalize()
    scheduler.capture.flush(0)
    told = [call[0] for call in agent.calls if call[0] != "set_weight_version"]
    assert told[3:] == ["begin", "step", "finish", "reset_prefix_cache", "flush"]


def test_rows_of_accepted_drafts_are_reported_wherever_they_were_in_the_tree(scheduler):
    a, b = req_of("a", 4), req_of("b", 3)
    scheduler.launch((a, 0, 4), (b, 0, 3), slots=[4, 5, 6, 7, 8, 9, 10]).finalize()
    # Trees of three: SGLang moves the KV of those that it accepts to the front of their slots.
    output = scheduler.launch((a, 4, 3), (b, 3, 3), slots=[12, 13, 14, 11, 16, 17], verifies=True)
    accepted = torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32)
    scheduler.capture.judged(accepted, torch.tensor([4, 3]), torch.tensor([2, 1]))
    result = SimpleNamespace(routed_experts_output=None)
    scheduler.capture.carry(result)
    assert result.routed_experts_output is output
    scheduler.capture.carry(SimpleNamespace(routed_experts_output="SGLang's own"))
    copies = []
    output.map_device_tensors(lambda tensor: copies.append(tensor) or tensor.clone())
    assert len(copies) == 3
    output.finalize()
    a.output_ids = [1, 2]
    scheduler.capture.retracted(a)
    scheduler.capture.flush(0)
    (agent,) = scheduler.agents
    assert [call for call in agent.calls[3:] if call[0] not in ("set_weight_version", "flush")] == [
        ("step", [*range(4, 8), 8, 9, 10], [[101, 0, 4], [102, 0, 3]]),
        ("add_blocks", [101], [3]),
        ("step", [12, 14, 11], [[101, 4, 2], [102, 3, 1]]),
        ("preempt", 101, 5),
    ]


def test_without_branches_the_accepted_drafts_are_the_front_of_each_tree(scheduler):
    """SGLang 0.5.16 tells their numbers, and not which they are."""
    a, b = req_of("a", 4), req_of("b", 3)
    scheduler.launch((a, 0, 4), (b, 0, 3), slots=[4, 5, 6, 7, 8, 9, 10]).finalize()
    output = scheduler.launch((a, 4, 3), (b, 3, 3), slots=[12, 13, 14, 11, 16, 17], verifies=True)
    counts = torch.tensor([2, 1])
    scheduler.capture.judged(speculation.front(counts, 3), torch.tensor([4, 3]), counts)
    output.finalize()
    scheduler.capture.flush(0)
    (agent,) = scheduler.agents
    assert ("step", [12, 13, 11], [[101, 4, 2], [102, 3, 1]]) in agent.calls


def test_drafts_that_were_not_judged_are_a_fault(scheduler, caplog):
    a = req_of("a", 4)
    scheduler.launch((a, 0, 4), slots=[4, 5, 6, 7]).finalize()
    scheduler.launch((a, 4, 2), slots=[8, 9], verifies=True).finalize()
    scheduler.capture.flush(0)
    assert scheduler.capture.faults == 1
    assert "2 rows" in caplog.text


def test_after_a_fault_in_a_launch_nothing_of_the_requests_under_way_is_told(scheduler, caplog):
    a, b, c = req_of("a", 4), req_of("b", 4), req_of("c", 4)
    scheduler.launch((a, 0, 4), slots=[4, 5, 6, 7]).finalize()
    lost = scheduler.launch((b, 0, 4), slots=[8, 9, 10, 11])
    broken = SimpleNamespace(rid="broken")  # no request
    assert scheduler.launch((broken, 0, 1), slots=[12]) is None
    lost.finalize()
    scheduler.launch((a, 4, 1), (b, 4, 1), (c, 0, 4), slots=[16, 20, 24, 25, 26, 27]).finalize()
    scheduler.capture.flush(0)
    assert scheduler.capture.faults == 1
    old, new = scheduler.agents
    assert [call[1] for call in old.calls if call[0] == "begin"] == ["a"]
    assert [call for call in new.calls if call[0] not in ("set_weight_version", "flush")] == [
        ("begin", "c", 0, [6]),
        ("mark_external", [4, 5]),
        ("step", [8, 9, 10, 11], [[101, 0, 4]]),
    ]
    assert "internal fault" in caplog.text


def test_a_fault_in_a_report_costs_the_requests_under_way(scheduler):
    a, b = req_of("a", 4), req_of("b", 4)
    scheduler.launch((a, 0, 4), slots=[4, 5, 6, 7]).finalize()
    scheduler.capture.flush(0)
    scheduler.agents[0].step = None  # not even callable
    scheduler.launch((a, 4, 1), slots=[8]).finalize()
    scheduler.launch((a, 5, 1), (b, 0, 4), slots=[9, 12, 13, 14, 15]).finalize()
    scheduler.capture.flush(0)
    assert scheduler.capture.faults == 1
    new = scheduler.agents[1]
    assert [call for call in new.calls if call[0] not in ("set_weight_version", "flush")] == [
        ("begin", "b", 0, [3]),
        ("mark_external", [2]),
        ("step", [12, 13, 14, 15], [[101, 0, 4]]),
    ]


def test_faults_without_end_end_capture_and_not_the_server(scheduler):
    for i in range(5):
        scheduler.launch((SimpleNamespace(rid=f"{i}"), 0, 1), slots=[4])
        scheduler.capture.flush(0)
    assert scheduler.capture.faults == 4
    assert len(scheduler.agents) == 4
    assert scheduler.launch((req_of("a", 4), 0, 4), slots=[4, 5, 6, 7]) is None


def test_a_request_that_is_aborted_in_the_queue_has_an_end(scheduler, monkeypatch):
    """Otherwise its reader waits for an end that is never reported."""
    monkeypatch.setattr(plugin, "_capture", scheduler.capture)
    a, output = req_of("a", 4), type("AbortReq", (), {})()
    plugin._aborted(output, SimpleNamespace(rid="a"))  # what is not a request of the scheduler
    plugin._aborted(output, a)
    plugin._aborted(output, a)  # once alone
    scheduler.launch((b := req_of("b", 4), 0, 4), slots=[4, 5, 6, 7]).finalize()
    scheduler.capture.flush(0)
    told = [call for call in scheduler.agents[0].calls if call[0] in ("begin", "finish")]
    begin, finish, later = told
    assert begin[:4] == ("begin", "a", 0, [])
    assert (finish[2], finish[3], finish[4].tolist()) == (4, "abort", [0, 1, 2, 3])
    assert later[:2] == ("begin", b.rid)


def test_what_is_noted_is_private(scheduler):
    """SGLang goes on with its lists while they are reported."""
    a = req_of("a", 4)
    with scheduler.capture._courier.lock:
        output = scheduler.launch((a, 0, 4), slots=[4, 5, 6, 7])
        output.finalize()
        a.output_ids_through_stop = [9]
        scheduler.capture.ended(a, "abort")
        a.origin_input_ids.append(77)
        a.output_ids_through_stop.append(78)
        scheduler.capture.flush(0)
    (finish,) = [call for call in scheduler.agents[0].calls if call[0] == "finish"]
    assert (finish[2], finish[4].tolist()) == (5, [0, 1, 2, 3, 9])
