"""Names of hand-overs in vLLM: the same on both sides, and none where it is not certain."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from routetrace.capture_agent.engines.vllm.options import options_of
from routetrace.capture_agent.engines.vllm.plan import Begin, Finish
from routetrace.capture_agent.engines.vllm.schedule import Schedule
from routetrace.capture_agent.engines.vllm.transfers import Transfers
from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import MAX_ID_LENGTH, MAX_NONCE

OURS = {"kv_connector": "RouteTraceConnector", "kv_connector_module_path": "ours"}


def config(connector, *children, engine_id="P", module=None):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector=connector,
            kv_connector_module_path=module,
            kv_connector_extra_config={"connectors": list(children)} if children else {},
            engine_id=engine_id,
        )
    )


def child(name, **more):
    return {"kv_connector": name, **more}


def request_of(params=None, options=None, status="FINISHED_LENGTH_CAPPED", name="r-0123abcd"):
    given = {f"routetrace.{key}": value for key, value in (options or {}).items()}
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=[1, 2, 3, 4],
        all_token_ids=[1, 2, 3, 4],
        num_prompt_tokens=4,
        num_tokens=4,
        num_computed_tokens=4,
        prompt_embeds=None,
        mm_features=[],
        lora_request=None,
        sampling_params=SimpleNamespace(extra_args=given),
        status=SimpleNamespace(name=status),
        kv_transfer_params=params,
    )


def life(transfers, request, external=0):
    """What a request's begin and end are told as, and its handle."""
    schedule = Schedule("run", "engine", 0, drafts=False, transfers=transfers)
    schedule.lookup(request, 3 - external)
    none = SimpleNamespace(
        req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
    )
    data = SimpleNamespace(
        req_id=request.request_id,
        sampling_params=request.sampling_params,
        num_computed_tokens=3,
        block_ids=([1],),
    )
    output = SimpleNamespace(
        scheduled_new_reqs=[data],
        scheduled_cached_reqs=none,
        num_scheduled_tokens={request.request_id: 1},
        preempted_req_ids=set(),
    )
    (begin,) = schedule.step(output).events
    handle = schedule.finish(request)
    (finish,) = schedule.take_finished()
    assert isinstance(begin, Begin)
    assert isinstance(finish, Finish)
    return begin, finish, handle


NIXL = Transfers.of(config("NixlConnector"))
MOONCAKE = Transfers.of(config("MooncakeConnector"))
NONE = Transfers.of(SimpleNamespace(kv_transfer_config=None))

#: As NIXL's prefill engine answers, and a router passes on.
FROM_PREFILL = {
    "do_remote_prefill": False,  # as NIXL changes it when the load begins
    "do_remote_decode": False,
    "remote_engine_id": "P",
    "remote_request_id": "r-0123abcd",
    "remote_block_ids": [[1]],
}


def test_nixls_sender_and_receiver_give_one_name():
    sender, receiver = NIXL, Transfers.of(config("NixlConnector", engine_id="D"))
    begin, sent, _ = life(sender, request_of({"do_remote_decode": True}))
    assert (begin.transfer_id, sent.reason) == (None, "handoff")
    begin, back, _ = life(receiver, request_of(FROM_PREFILL, name="d-0123abcd"), external=2)
    assert begin.transfer_id == sent.transfer_id == "P/r-0123abcd"
    # It may hand its KV back, with any reason.
    assert (back.reason, back.transfer_id) == ("length", "D/d-0123abcd")
    stopped = request_of(FROM_PREFILL, status="FINISHED_STOPPED", name="d-0123abcd")
    assert life(receiver, stopped, external=2)[1].transfer_id == "D/d-0123abcd"
    # And the next turn's prefill takes it.
    params = {
        "do_remote_decode": True,
        "remote_engine_id": "D",
        "remote_request_id": "d-0123abcd",
    }
    begin, sent, _ = life(sender, request_of(params, name="p2-0123abcd"), external=2)
    assert (begin.transfer_id, sent.transfer_id) == ("D/d-0123abcd", "P/p2-0123abcd")
    assert sent.reason == "handoff"


def test_tokens_that_did_not_come_from_elsewhere_came_by_no_hand_over():
    assert life(NIXL, request_of(FROM_PREFILL), external=0)[0].transfer_id is None


@pytest.mark.parametrize("lacks", ["remote_engine_id", "remote_request_id", "all"])
def test_a_receiver_that_does_not_know_the_sender_gives_no_name(lacks):
    params = {key: value for key, value in FROM_PREFILL.items() if key != lacks}
    params = None if lacks == "all" else params
    assert life(NIXL, request_of(params), external=2)[0].transfer_id is None


def test_requests_that_no_router_handles_give_no_names():
    _, finish, _ = life(NIXL, request_of())
    assert (finish.reason, finish.transfer_id) == ("length", None)


@pytest.mark.parametrize("options", [{}, {"transfer_id": "turn-7", "handoff": True}])
def test_an_aborted_request_hands_nothing_over(options):
    """Otherwise its reader waits for an engine that goes on with it."""
    aborted = request_of({"do_remote_decode": True}, options, status="FINISHED_ABORTED")
    _, finish, _ = life(NIXL, aborted)
    assert (finish.reason, finish.transfer_id) == ("abort", None)


@pytest.mark.parametrize("connector", ["MooncakeConnector", "MoRIIOConnector"])
def test_the_routers_name_is_that_of_both_sides(connector):
    transfers = Transfers.of(config(connector))
    _, sent, _ = life(transfers, request_of({"do_remote_decode": True, "transfer_id": "x-1"}))
    params = {"do_remote_prefill": False, "transfer_id": "x-1"}
    begin, finish, _ = life(transfers, request_of(params), external=2)
    assert begin.transfer_id == sent.transfer_id == "x-1"
    assert sent.reason == "handoff"
    assert finish.transfer_id is None  # two that finished with one id would make it none


@pytest.mark.parametrize("status", ["FINISHED_STOPPED", "FINISHED_ABORTED"])
def test_what_ends_early_does_not_go_by_the_routers_name(status):
    params = {"do_remote_decode": True, "transfer_id": "x-1"}
    assert life(MOONCAKE, request_of(params, status=status))[1].transfer_id is None


def test_a_name_that_moriio_made_up_is_only_that_of_a_sender():
    """It takes the place of the router's in `kv_transfer_params`, on either side."""
    transfers = Transfers.of(config("MoRIIOConnector"))
    params = {"do_remote_decode": True, "transfer_id": "sidecar-r-0123abcd"}
    _, sent, _ = life(transfers, request_of(params))
    passed_on = {"transfer_id": "sidecar-r-0123abcd"}
    begin, _, _ = life(transfers, request_of(passed_on, name="d-0123abcd"), external=2)
    assert begin.transfer_id == sent.transfer_id == "sidecar-r-0123abcd"
    assert life(transfers, request_of(passed_on), external=2)[0].transfer_id is None


@pytest.mark.parametrize(
    "connector",
    ["LMCacheConnectorV1", "OffloadingConnector", "ExampleConnector", "NixlPushConnector"],
)
def test_other_connectors_name_nothing(connector):
    transfers = Transfers.of(config(connector))
    params = {**FROM_PREFILL, "transfer_id": "x-1", "do_remote_decode": True}
    begin, finish, _ = life(transfers, request_of(params), external=2)
    assert (begin.transfer_id, finish.transfer_id) == (None, None)
    assert finish.reason == "handoff"


@pytest.mark.parametrize(
    ("children", "named"),
    [
        ((OURS, child("NixlConnector")), True),
        ((child("NixlConnector"), OURS), True),
        ((child("NixlConnector"),), True),
        ((child("NixlConnector"), OURS, child("OffloadingConnector")), False),
        ((child("NixlConnector"), child("MooncakeConnector")), False),
        ((child("NixlConnector", kv_connector_module_path="theirs"), OURS), False),
        ((OURS,), False),
    ],
)
def test_of_several_connectors_the_one_that_loaded_must_be_certain(children, named):
    transfers = Transfers.of(config("MultiConnector", *children))
    begin, _, _ = life(transfers, request_of(FROM_PREFILL), external=2)
    assert begin.transfer_id == ("P/r-0123abcd" if named else None)


def test_a_child_may_have_a_name_of_its_own():
    children = child("NixlConnector", engine_id="mine"), OURS
    transfers = Transfers.of(config("MultiConnector", *children))
    _, finish, _ = life(transfers, request_of({"do_remote_decode": True}))
    assert finish.transfer_id == "mine/r-0123abcd"


def test_a_connector_of_another_module_is_not_taken_for_vllms():
    assert Transfers.of(config("NixlConnector", module="theirs")) == Transfers()


def test_names_that_the_server_refuses_are_none():
    params = {"transfer_id": "x" * (MAX_ID_LENGTH + 1)}
    assert life(MOONCAKE, request_of(params), external=2)[0].transfer_id is None
    assert life(MOONCAKE, request_of({"transfer_id": 7}), external=2)[0].transfer_id == "7"
    assert life(MOONCAKE, request_of({"transfer_id": True}), external=2)[0].transfer_id is None


# ---------------------------------------------------------------------------- the option


def test_users_name_hand_overs_of_connectors_that_name_none():
    sends = {"transfer_id": "turn-7", "handoff": True}
    begin, sent, _ = life(NONE, request_of(options=sends), external=2)
    assert (begin.transfer_id, sent.transfer_id, sent.reason) == (None, "turn-7", "handoff")
    takes = {"transfer_id": "turn-7"}
    begin, finish, _ = life(NONE, request_of(options=takes), external=2)
    assert (begin.transfer_id, finish.transfer_id) == ("turn-7", None)
    begin, finish, _ = life(NONE, request_of(options=takes))  # computed it all itself
    assert (begin.transfer_id, finish.transfer_id) == (None, None)


def test_the_users_name_wins_also_where_several_connectors_load():
    both = Transfers.of(config("MultiConnector", child("NixlConnector"), child("Other")))
    begin, _, _ = life(both, request_of(FROM_PREFILL, {"transfer_id": "mine"}), external=2)
    assert begin.transfer_id == "mine"
    params = {"do_remote_decode": True}
    _, finish, _ = life(NIXL, request_of(params, {"transfer_id": "mine"}))
    assert (finish.transfer_id, finish.reason) == ("mine", "handoff")


@pytest.mark.parametrize("value", ["", 7, ["x"], "x" * (MAX_ID_LENGTH + 1)])
def test_a_bad_name_is_refused(value):
    with pytest.raises(InvalidArgument) as error:
        options_of("r-0123abcd", {"routetrace.transfer_id": value}, "e")
    assert error.value.field == "routetrace.transfer_id"


# ---------------------------------------------------------------------------- nonces


def test_each_request_has_a_nonce_that_its_handle_names():
    seen = set()
    for _ in range(50):
        begin, _, handle = life(NONE, request_of())
        assert handle == {
            "run": "run",
            "trace_id": "r",
            "num_tokens": 4,
            "nonce": begin.nonce,
        }
        assert 1 <= begin.nonce < MAX_NONCE
        seen.add(begin.nonce)
    assert len(seen) == 50
