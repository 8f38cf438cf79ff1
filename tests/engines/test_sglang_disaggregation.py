"""Prefill and decode engines of SGLang, without SGLang: calls of the agent, and refusals."""

from types import SimpleNamespace

import pytest
import torch

from routetrace.capture_agent.engines.sglang import disaggregation, plugin
from routetrace.capture_agent.engines.sglang.disaggregation import Role
from routetrace.capture_agent.engines.sglang.settings import refuse_unsupported
from routetrace.common.errors import InvalidArgument
from support.sglang_capture import capturing, req_of

Length = type("FINISH_LENGTH", (), {})
Abort = type("FINISH_ABORT", (), {})


@pytest.fixture
def prefill(monkeypatch):
    with capturing(monkeypatch, Role.PREFILL) as scheduler:
        monkeypatch.setattr(plugin, "_capture", scheduler.capture)
        yield scheduler


@pytest.fixture
def decode(monkeypatch):
    with capturing(monkeypatch, Role.DECODE) as scheduler:
        monkeypatch.setattr(plugin, "_capture", scheduler.capture)
        yield scheduler


def calls(scheduler):
    scheduler.capture.flush(0)
    (agent,) = scheduler.agents
    return [call for call in agent.calls if call[0] not in ("set_weight_version", "flush")]


def end(reason, *reqs):
    for req in reqs:
        req.output_ids_through_stop = req.output_ids
        req.finished_reason = reason()
    plugin._answers_sent(None, None, list(reqs), False)


@pytest.mark.parametrize(("reason", "told"), [(Length, "handoff"), (Abort, "abort")])
def test_a_prefill_engine_hands_over_what_it_has_not_aborted(prefill, reason, told):
    a = req_of("a", 4)
    prefill.launch((a, 0, 4), slots=[4, 5, 6, 7]).finalize()
    a.output_ids = [9]
    plugin._answers_sent(None, None, [a], False)  # it goes on: its KV is not sent yet
    end(reason, a)
    begin, step, (name, handle, num_tokens, why, tokens) = calls(prefill)
    assert (begin[0], step[0], name, handle) == ("begin", "step", "finish", 101)
    assert (num_tokens, why, tokens.tolist()) == (5, told, [0, 1, 2, 3, 9])


def test_a_prompt_that_is_computed_again_keeps_no_row_that_sampled_a_dropped_token(prefill):
    a = req_of("a", 4)
    prefill.launch((a, 0, 4), slots=[4, 5, 6, 7]).finalize()
    a.output_ids = [9]
    plugin._retracted(None, a)
    a.output_ids = []
    prefill.launch((a, 3, 1), slots=[8]).finalize()
    a.output_ids = [9]
    end(Length, a)
    assert [call[:3] for call in calls(prefill)[2:]] == [
        ("preempt", 101, 3),
        ("resume", 101, 3),
        ("step", [8], [[101, 3, 1]]),
        ("finish", 101, 5),
    ]


def test_slots_of_kv_that_a_decode_engine_gets_are_unknown(decode):
    old, a = req_of("old", 4), req_of("a", 4)
    decode.launch((old, 0, 4), slots=[8, 9, 10, 11]).finalize()
    end(Length, old)
    decode.capture.loaded(torch.tensor([8, 9, 10, 11]))
    a.output_ids = [9]
    decode.launch((a, 4, 1), slots=[12]).finalize()
    assert [call[:3] for call in calls(decode)[3:]] == [
        ("mark_external", [2]),
        ("begin", "a", 4),
        ("step", [12], [[101 + 1, 4, 1]]),
    ]
    assert decode.agents[0].external == [0, 0]  # its slots say more: the radix cache may have rows


def test_a_request_that_ends_with_its_first_token_is_told_by_the_decode_engine(decode):
    a = req_of("a", 6)
    a.output_ids = [9]
    a.output_ids_through_stop, a.finished_reason = [9], Length()
    handle = {"run": "default", "trace_id": "a", "num_tokens": 7}
    assert plugin._answered({}, None, [a]) == {"routetrace": [[handle]]}
    end(Length, a)
    end(Length, a)  # once alone
    begin, finish = calls(decode)
    assert begin == ("begin", "a", 6, [0, 0])
    assert decode.agents[0].external == [6]
    assert (finish[0], finish[2], finish[3]) == ("finish", 7, "length")
    decode.launch((b := req_of("b", 4), 4, 1), slots=[12]).finalize()
    assert calls(decode)[2][:2] == ("begin", b.rid)


def test_a_request_whose_kv_did_not_arrive_is_aborted(decode):
    a = req_of("a", 6)
    end(Abort, a)
    begin, finish = calls(decode)
    assert begin == ("begin", "a", 5, [0, 0])
    assert (finish[2], finish[3]) == (6, "abort")


def test_elsewhere_a_request_without_a_pass_has_no_trace(prefill):
    end(Abort, req_of("a", 6))
    assert calls(prefill) == []


def test_prompts_that_no_engine_computes_are_not_captured(decode):
    a = req_of("a", 4)
    a.bootstrap_host = "2.2.2.2"
    decode.launch((a, 4, 1), slots=[12]).finalize()
    b = req_of("b", 4)
    b.bootstrap_host = "2.2.2.2"
    end(Length, b)
    assert calls(decode) == [("mark_external", [3])]


def test_kv_that_is_computed_again_under_new_weights_has_no_rows():
    payload = {"rid": "a", "sampling_params": {"top_p": 1.0, "max_new_tokens": 1}}
    changed = disaggregation._uncaptured(payload, None)
    assert changed["sampling_params"] == {
        "top_p": 1.0,
        "max_new_tokens": 1,
        "custom_params": {"routetrace": {"capture": False}},
    }
    assert payload["sampling_params"] == {"top_p": 1.0, "max_new_tokens": 1}


@pytest.mark.parametrize(
    ("mode", "name", "value"),
    [
        ("other", "disaggregation_mode", "other"),
        ("prefill", "speculative_algorithm", "NGRAM"),
        ("decode", "speculative_algorithm", "NGRAM"),
        ("decode", "enable_hierarchical_cache", True),
        ("decode", "enable_pd_role_switch", True),
    ],
)
def test_untested_modes_are_refused_by_name(mode, name, value):
    refuse_unsupported(SimpleNamespace(disaggregation_mode="decode"))
    refuse_unsupported(
        SimpleNamespace(disaggregation_mode="prefill", enable_hierarchical_cache=True)
    )
    args = SimpleNamespace(**{"disaggregation_mode": mode, name: value})
    with pytest.raises(InvalidArgument, match=name):
        refuse_unsupported(args)
