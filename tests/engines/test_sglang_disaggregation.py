"""Prefill and decode engines of SGLang, without SGLang: calls of the agent, and refusals."""

import sys
from types import SimpleNamespace

import pytest
import torch

from routetrace.capture_agent.engines.sglang import disaggregation, plugin, seams
from routetrace.capture_agent.engines.sglang.disaggregation import Role
from routetrace.capture_agent.engines.sglang.settings import refuse_unsupported
from routetrace.common.errors import InvalidArgument
from support.sglang_capture import Agent, args_of, capturing, has_all_names, req_of

Length = type("FINISH_LENGTH", (), {})
Abort = type("FINISH_ABORT", (), {})
Stop = type("FINISH_MATCHED_TOKEN", (), {})


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


@pytest.fixture
def begun(monkeypatch):
    """Request, external tokens and hand-over of each begin."""
    noted, begin = [], Agent.begin

    def note(self, request_id, **facts):
        noted.append((request_id, facts["num_external_tokens"], facts["transfer_id"]))
        return begin(self, request_id, **facts)

    monkeypatch.setattr(Agent, "begin", note)
    return noted


@pytest.fixture
def hooks(monkeypatch):
    """Hooks that a decode engine registers, by the end of their name."""
    found = {}
    registry = SimpleNamespace(
        register=lambda name, hook, _: found.update({name.rpartition(".")[2]: hook}),
        apply_hooks=lambda: None,
    )
    module = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(AFTER="after"))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)
    has_all_names(monkeypatch)
    monkeypatch.setattr(seams, "check_applied", lambda _: None)
    return found


def meet(req, host="10.0.0.7", port=8998, room=5):
    """Have a request go to a pair of engines."""
    req.bootstrap_host, req.bootstrap_port, req.bootstrap_room = host, port, room
    return req


def calls(scheduler):
    scheduler.capture.flush(0)
    (agent,) = scheduler.agents
    return [call for call in agent.calls if call[0] not in ("set_weight_version", "flush")]


def end(reason, *reqs):
    for req in reqs:
        req.output_ids_through_stop = req.output_ids
        req.finished_reason = reason()
    plugin._answers_sent(None, None, list(reqs), False)


def test_a_request_that_a_prefill_engine_aborts_in_its_queue_has_an_end(prefill, begun):
    a = meet(req_of("a", 4))
    end(Abort, a)
    begin, finish = calls(prefill)
    assert (begin, begun) == (("begin", "a", 0, []), [("a", 0, None)])
    assert (finish[2], finish[3], finish[5]) == (4, "abort", None)


@pytest.mark.parametrize(("reason", "told"), [(Length, "handoff"), (Abort, "abort")])
def test_a_prefill_engine_hands_over_what_it_has_not_aborted(prefill, begun, reason, told):
    a = meet(req_of("a", 4))
    prefill.launch((a, 0, 4), slots=[4, 5, 6, 7]).finalize()
    a.output_ids = [9]
    plugin._answers_sent(None, None, [a], False)  # it goes on: its KV is not sent yet
    end(reason, a)
    begin, step, (name, handle, num_tokens, why, tokens, transfer) = calls(prefill)
    assert (begin[0], step[0], name, handle) == ("begin", "step", "finish", 101)
    assert (num_tokens, why, tokens.tolist()) == (5, told, [0, 1, 2, 3, 9])
    assert transfer == ("10.0.0.7:8998/5" if told == "handoff" else None)
    assert begun == [("a", 0, None)]  # its prompt came from nowhere


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
    info = plugin._answered({}, None, [a])
    assert info is not None
    ((handle,),) = info["routetrace"]
    del handle["nonce"]
    assert handle == {"run": "default", "trace_id": "a", "num_tokens": 7}
    end(Length, a)
    end(Length, a)  # once alone
    begin, finish = calls(decode)
    assert begin == ("begin", "a", 6, [0, 0])
    assert decode.agents[0].external == [6]
    assert (finish[0], finish[2], finish[3]) == ("finish", 7, "length")
    decode.launch((b := req_of("b", 4), 4, 1), slots=[12]).finalize()
    assert calls(decode)[2][:2] == ("begin", b.rid)


def test_a_request_whose_kv_did_not_arrive_is_aborted(decode, begun):
    a = meet(req_of("a", 6))
    decode.capture.arrives(a, 0)  # its slots were allocated
    end(Abort, a)
    begin, finish = calls(decode)
    assert begin == ("begin", "a", 0, [])
    assert begun == [("a", 0, None)]
    assert (finish[2], finish[3]) == (6, "abort")


@pytest.mark.parametrize("cached", [0, 2])
def test_the_kv_that_a_decode_engine_got_is_that_of_the_hand_over(decode, begun, hooks, cached):
    """But for the tokens that it had in its own cache: their slots say whose rows they have."""
    disaggregation.hook_transfers(lambda: decode.capture)
    a = meet(req_of("a", 4))
    slots = torch.arange(8 + cached, 12)
    hooks["_pre_alloc"](slots, "queue", a, torch.arange(cached), cached, None)
    a.output_ids = [9]
    decode.launch((a, 4, 1), slots=[12]).finalize()
    assert [call[:2] for call in calls(decode)][:2] == [("mark_external", [2]), ("begin", "a")]
    assert begun == [("a", 4 - cached, "10.0.0.7:8998/5")]


def test_a_request_that_ended_with_its_first_token_was_sampled_from_the_senders_kv(decode, begun):
    a = meet(req_of("a", 6))
    decode.capture.arrives(a, 4)
    a.output_ids = [9]
    end(Length, a)
    calls(decode)
    assert begun == [("a", 6, "10.0.0.7:8998/5")]


def test_kv_that_came_without_an_allocation_has_no_name(decode, begun):
    a = meet(req_of("a", 4))
    a.output_ids = [9]
    decode.launch((a, 4, 1), slots=[12]).finalize()
    calls(decode)
    assert begun == [("a", 0, None)]


def test_a_prompt_that_the_decode_engine_computes_itself_is_no_hand_over(decode, begun):
    a = meet(req_of("a", 4))
    decode.capture.arrives(a, 0)
    decode.launch((a, 0, 4), slots=[12, 13, 14, 15]).finalize()
    calls(decode)
    assert begun == [("a", 0, None)]


def test_kv_that_arrived_twice_before_the_first_pass_has_no_name(decode, begun):
    """After a pause the prefill engine computes it again, in the same room: another pass."""
    a = meet(req_of("a", 4))
    decode.capture.arrives(a, 0)
    decode.capture.arrives(a, 0)
    a.output_ids = [9]
    decode.launch((a, 4, 1), slots=[12]).finalize()
    calls(decode)
    assert begun == [("a", 0, None)]


def test_the_backend_that_moves_no_kv_hands_nothing_over(decode, begun, hooks):
    disaggregation.hook_transfers(lambda: decode.capture, moves=False)
    a = meet(req_of("a", 4))
    hooks["_pre_alloc"](torch.arange(8, 12), "queue", a)
    decode.launch((a, 4, 1), slots=[12]).finalize()
    assert calls(decode)[0] == ("mark_external", [2])
    assert begun == [("a", 0, None)]


def test_an_engine_of_no_pair_names_no_hand_over(monkeypatch):
    with capturing(monkeypatch) as scheduler:
        monkeypatch.setattr(plugin, "_capture", scheduler.capture)
        a = meet(req_of("a", 4))
        a.sampling_params.custom_params = {"routetrace": {"handoff": True}}
        scheduler.launch((a, 0, 4), slots=[4, 5, 6, 7]).finalize()
        end(Stop, a)
        finish = calls(scheduler)[-1]
        assert (finish[3], finish[5]) == ("handoff", None)


@pytest.mark.parametrize(
    ("host", "port", "room", "name"),
    [
        ("10.0.0.7", 8998, 0, "10.0.0.7:8998/0"),
        ("prefill-0.svc", 8998, 1 << 62, f"prefill-0.svc:8998/{1 << 62}"),
        ("fd00::7", 8998, 5, "fd00::7:8998/5"),
        (None, 8998, 5, None),
        ("", 8998, 5, None),
        ("10.0.0.7", None, 5, None),
        ("10.0.0.7", 8998, None, None),
        ("2.2.2.2", 8998, 5, None),
        (["10.0.0.7"], 8998, 5, None),
        ("x" * 5000, 8998, 5, None),
    ],
)
def test_a_hand_over_is_called_by_the_room_in_which_the_engines_meet(host, port, room, name):
    assert disaggregation.transfer_id(meet(req_of("a", 4), host, port, room)) == name
    assert disaggregation.transfer_id(req_of("a", 4)) is None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]", "0.0.0.0"])
def test_a_loopback_address_is_that_of_one_machine(monkeypatch, host):
    """Pairs on two machines may use the same port and count their rooms."""
    a = meet(req_of("a", 4), host)
    names = set()
    for network in ("boot-1", "boot-2"):
        monkeypatch.setattr(disaggregation, "_network", lambda network=network: network)
        names.add(disaggregation.transfer_id(a))
    assert names == {f"boot-1/{host}:8998/5", f"boot-2/{host}:8998/5"}
    monkeypatch.setattr(disaggregation, "_network", lambda: None)
    assert disaggregation.transfer_id(a) is None


def test_a_machine_has_a_name_of_its_network():
    assert disaggregation._network() == disaggregation._network()


def test_prompts_that_no_engine_computes_are_not_captured(decode):
    a = req_of("a", 4)
    a.bootstrap_host = "2.2.2.2"
    decode.launch((a, 4, 1), slots=[12]).finalize()
    b = req_of("b", 4)
    b.bootstrap_host = "2.2.2.2"
    end(Length, b)
    assert calls(decode) == [("mark_external", [3]), ("step", [], [])]


def test_kv_that_is_computed_again_under_new_weights_has_no_rows():
    payload = {"rid": "a", "sampling_params": {"top_p": 1.0, "max_new_tokens": 1}}
    changed = disaggregation._uncaptured(payload, None)
    assert changed["sampling_params"] == {
        "top_p": 1.0,
        "max_new_tokens": 1,
        "custom_params": {"routetrace": {"capture": False}},
    }
    assert payload["sampling_params"] == {"top_p": 1.0, "max_new_tokens": 1}


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_pairs_are_refused_in_a_version_whose_pairs_were_not_compared(monkeypatch, mode):
    names = has_all_names(monkeypatch)
    args = args_of(disaggregation_mode=mode)
    refuse_unsupported(args)
    names.discard(seams.PAIRED.places[0])  # SGLang 0.5.12
    refuse_unsupported(args_of())
    with pytest.raises(
        seams.Refused, match=r"which --disaggregation-mode needs; use SGLang 0\.5\.15"
    ):
        refuse_unsupported(args)


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
def test_untested_modes_are_refused_by_name(monkeypatch, mode, name, value):
    has_all_names(monkeypatch)
    refuse_unsupported(args_of(disaggregation_mode="decode"))
    refuse_unsupported(args_of(disaggregation_mode="prefill", enable_hierarchical_cache=True))
    args = args_of(**{"disaggregation_mode": mode, name: value})
    with pytest.raises(InvalidArgument, match=name):
        refuse_unsupported(args)
