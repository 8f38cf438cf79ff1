"""`explain`, of the client and as a command: the rule behind one cell, and what was refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from routetrace.capture_agent import CaptureAgent
from routetrace.client import (
    AsyncRouteClient,
    EngineRequest,
    Explanation,
    Incomplete,
    InvalidArgument,
    MissingReason,
    NotFound,
    RouteClient,
)
from routetrace.common.layout import ModelLayout
from routetrace.server.access.partition import Partition
from routetrace.server.testing import ServerProcess, free_ports, run_server
from routetrace.v1 import routetrace_pb2 as pb
from support.commands import commands

LAYOUT = ModelLayout((1, 3), 4, 16, 2)
PROMPT = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """No agent is lost, and nothing is taken for late."""
    with run_server() as server:
        yield server


@pytest.fixture
def client(server) -> Iterator[RouteClient]:
    with RouteClient(server.target) as client:
        yield client


def rows(count: int, seed: int = 0) -> np.ndarray:
    order = np.random.default_rng(seed).random((count, 2, 16)).argsort(axis=2)
    return order[:, :, :2].astype(np.uint8)


@contextmanager
def engine(server: ServerProcess, engine_id: str) -> Iterator[CaptureAgent]:
    """An agent whose rows are all at the server afterwards."""
    with CaptureAgent(
        target=server.target, engine_id=engine_id, layout=LAYOUT, block_size=2, num_blocks=64
    ) as agent:
        agent.set_weight_version(7)
        yield agent
        assert agent.flush()


def run(
    agent: CaptureAgent, trace_id: str, prompt: list[int], tokens: list[int], start: int = 0, **more
) -> None:
    """A request that computes all positions from `start` on, and ends."""
    end = {name: more.pop(name) for name in ("reason",) if name in more}
    ended_with = more.pop("ended_with", None)
    handle = agent.begin(trace_id, prompt_token_ids=prompt, **more)
    count = len(tokens) - 1 - start
    agent.step(rows(count, seed=start), [[handle, start, count]])
    agent.finish(handle, len(tokens), token_ids=tokens, transfer_id=ended_with, **end)


def reason_of(found: Explanation, number: int, attempt: int | None = None) -> str:
    [reason] = [
        one.reason
        for one in found.refused
        if one.request.number == number and one.attempt == attempt
    ]
    return reason


def test_a_row_of_an_own_pass(server, client):
    with engine(server, "own") as agent:
        run(agent, "own", PROMPT, [*PROMPT, 5, 6])
    found = client.explain("own", 4)
    assert (found.rule, found.missing, found.remedy, found.layer_id) == ("own_pass", None, "", 1)
    request = EngineRequest(1, "own", "own")
    assert found.owner == request
    assert found.row is not None
    assert (found.row.computed_by, found.row.attempt) == (request, 1)
    assert found.row.weight_version == 7
    assert [(one.request, one.start, one.stop) for one in found.chain] == [(request, 0, None)]
    assert (found.owner_reason, found.refused) == ("it continues no other request", ())
    assert found.evidence == ("attempt 1 of request 1 computed the position in a forward pass",)
    said = "row      own pass: attempt 1 of request 1 ('own' at engine 'own'), weight version 7\n"
    assert said in str(found)

    async def same() -> Explanation:
        async with AsyncRouteClient(server.target) as other:
            return await other.explain("own", 4)

    assert asyncio.run(same()) == found


def test_a_chain_and_a_row_of_an_own_slot(server, client):
    with engine(server, "slots") as agent:
        first = [*PROMPT, 5, 6]
        run(agent, "turns", PROMPT, first, block_ids=[0, 1, 2])
        run(agent, "turns", [*first, 7, 8], [*first, 7, 8, 9], start=5, block_ids=[3, 4, 5, 6])
        # Another trace begins with the same tokens, and takes their KV.
        run(
            agent,
            "slots",
            [*PROMPT, 7],
            [*PROMPT, 7, 8],
            start=4,
            block_ids=[0, 1, 7],
            num_computed_tokens=4,
        )
    found = client.explain("turns", 4)
    assert found.rule == "own_pass"
    assert found.owner == EngineRequest(1, "turns", "slots")
    assert [(m.request.number, m.proven, m.start, m.stop) for m in found.chain] == [
        (1, 6, 0, 5),
        (2, 0, 5, None),
    ]
    assert found.owner_reason == (
        "request 2 continues it: digests prove that its first 6 tokens stand in that prompt, and "
        "its own prompt has 4"
    )
    later = client.explain("turns", 6)
    assert later.owner_reason == "it continues request 1, from position 5 on"
    slot = client.explain("slots", 1)
    assert slot.rule == "own_slot"
    assert slot.row is not None
    assert slot.row.computed_by is None
    assert "took the position from a slot" in slot.evidence[0]
    assert "no request of this trace" in slot.evidence[1]


def test_a_slot_names_the_request_that_computed_it(server, client):
    with engine(server, "maker") as agent:
        first = [*PROMPT, 5, 6, 7]
        run(agent, "maker", PROMPT, first, block_ids=[0, 1, 2, 3])
        run(
            agent,
            "maker",
            PROMPT,
            [*PROMPT, 8],
            start=2,
            block_ids=[0, 4, 5],
            num_computed_tokens=2,
        )
    found = client.explain("maker", 1, incarnation=2)
    assert found.rule == "own_slot"
    assert found.row is not None
    assert found.row.computed_by == EngineRequest(1, "maker", "maker")
    assert found.evidence[1] == "a forward pass of request 1 computed the row in that slot"
    assert "computed by request 1" in str(found)


def hand_over(server, trace_id: str, ended_with: str | None, begun_with: str | None) -> None:
    with engine(server, f"{trace_id}-p") as prefill:
        run(prefill, trace_id, PROMPT, [*PROMPT, 5], reason="handoff", ended_with=ended_with)
    with engine(server, f"{trace_id}-d") as decode:
        run(
            decode,
            trace_id,
            PROMPT,
            [*PROMPT, 5, 6],
            start=3,
            block_ids=[0, 1, 2],
            num_computed_tokens=3,
            num_external_tokens=3,
            transfer_id=begun_with,
        )


def test_a_named_hand_over(server, client):
    hand_over(server, "given", "x1", "x1")
    found = client.explain("given", 2, layer_id=3)
    assert found.rule == "handoff"
    assert found.row is not None
    assert found.owner == EngineRequest(2, "given", "given-d")
    assert found.row.reported_by == EngineRequest(1, "given", "given-p")
    assert found.row.transfer_id == "x1"
    said = "it began with the transfer_id 'x1', and request 1 alone ended with the same one"
    assert found.evidence[1] == said
    assert found.refused == ()
    # The engine that took the KV computed this one itself.
    own = client.explain("given", 3)
    assert own.rule == "own_pass"
    assert reason_of(own, 1) == (
        "it handed its KV over, but request 2 has a row of its own, or did not keep the KV"
    )


@pytest.mark.parametrize(
    ("name", "ended_with", "begun_with", "why", "refused"),
    [
        ("unnamed", None, None, "without a transfer_id", "began without a transfer_id"),
        ("mine", "x", None, "without a transfer_id", "began without a transfer_id"),
        (
            "theirs",
            None,
            "y",
            "no other request of this trace ended with",
            "began with another one, 'y'",
        ),
    ],
)
def test_an_unnamed_hand_over(server, client, name, ended_with, begun_with, why, refused):
    hand_over(server, name, ended_with, begun_with)
    found = client.explain(name, 1)
    assert (found.rule, found.row) == (None, None)
    assert found.missing is MissingReason.KV_UNKNOWN
    assert why in found.evidence[0]
    assert "transfer_id" in found.remedy
    assert "external_kv_emptied" in found.remedy
    reason = reason_of(found, 1)
    assert reason.startswith(
        "it ended with handoff, so its rows count only behind a hand-over with an id"
    )
    assert refused in reason


def test_a_transfer_id_of_several_requests(server, client):
    with engine(server, "twice-p") as prefill:
        for _ in range(2):
            run(prefill, "twice", PROMPT, [*PROMPT, 5], reason="handoff", ended_with="x")
    with engine(server, "twice-d") as decode:
        run(
            decode,
            "twice",
            PROMPT,
            [*PROMPT, 5, 6],
            start=3,
            block_ids=[0, 1, 2],
            num_computed_tokens=3,
            num_external_tokens=3,
            transfer_id="x",
        )
    found = client.explain("twice", 0)
    assert "2 requests ended with its transfer_id 'x': requests 1 and 2" in found.evidence[0]
    assert found.remedy.startswith("give each hand-over a transfer_id of its own")
    said = "it is one of 2 requests that ended with the transfer_id 'x'"
    assert {reason_of(found, 1), reason_of(found, 2)} == {said}


@pytest.fixture(scope="module")
def ambiguous(server) -> str:
    """Two requests sampled the same tokens, and a third one was given them."""
    first = [*PROMPT, 5, 6]
    with engine(server, "equal") as agent:
        for _ in range(2):
            run(agent, "equal", PROMPT, first, block_ids=[0, 1, 2])
        run(agent, "equal", [*first, 7], [*first, 7, 8], block_ids=[3, 4, 5, 6])
    return "equal"


def test_equal_requests_without_a_slot_that_decides(client, ambiguous):
    found = client.explain(ambiguous, 3)
    assert (found.missing, found.owner) == (MissingReason.AMBIGUOUS, None)
    assert found.owner_reason == (
        "request 3 may continue any of requests 1 and 2: each shares 6 tokens with its prompt, and "
        "in its first attempt it took none of them from a slot"
    )
    assert "prefix cache" in found.remedy
    assert "trace id of its own" in found.remedy
    assert reason_of(found, 1) == (
        "it shares 6 tokens with the prompt of request 3, request 2 shares as many, and no slot "
        "decides between them"
    )
    assert reason_of(found, 3) == "it has a row here, too, but may not be the owner"
    assert [(m.request.number, m.start, m.stop) for m in found.chain] == [(3, 5, None)]
    assert client.explain(ambiguous, 0).missing == MissingReason.AMBIGUOUS
    behind = client.explain(ambiguous, 5)
    assert behind.rule == "own_pass"
    assert behind.owner_reason == (
        "it may continue requests 1 and 2, but owns the positions behind their tokens"
    )
    assert client.explain(ambiguous, 3, policy="latest").rule == "own_pass"


def test_a_slot_decides_between_equal_requests(server, client):
    first = [*PROMPT, 5, 6]
    with engine(server, "decided") as agent:
        run(agent, "decided", PROMPT, first, block_ids=[0, 1, 2])
        run(agent, "decided", PROMPT, first, block_ids=[7, 8, 9])
        run(
            agent,
            "decided",
            [*first, 7],
            [*first, 7, 8],
            start=5,
            block_ids=[7, 8, 9, 10],
            num_computed_tokens=5,
        )
    found = client.explain("decided", 3)
    assert found.owner == EngineRequest(2, "decided", "decided")
    assert found.owner_reason.endswith(
        ", and this one computed the row that request 3 took from a slot at position 4"
    )
    assert reason_of(found, 1).endswith(
        "computed the row that request 3 took from a slot at position 4"
    )
    assert reason_of(found, 3) == "it has a row here, too, but is not the owner"


def test_a_retry_and_a_sibling_are_refused(server, client):
    with engine(server, "tries") as agent:
        run(agent, "tries", PROMPT, [*PROMPT, 9, 9], reason="abort")
        handle = agent.begin("tries", prompt_token_ids=PROMPT)
        agent.step(rows(2), [[handle, 0, 2]])
        agent.finish(handle, 4, token_ids=PROMPT, reason="abort")
        run(agent, "tries", PROMPT, [*PROMPT, 5, 6])
        run(agent, "tries", [*PROMPT, 5, 6, 7, 8], [*PROMPT, 5, 6, 7, 8, 9])
    found = client.explain("tries", 4)
    assert [m.request.number for m in found.chain] == [3, 4]
    assert reason_of(found, 1) == (
        "its tokens differ from those of request 4 at or behind position 4, up to which digests "
        "agree"
    )
    assert reason_of(found, 2) == "it sampled nothing"
    # Where the retry is the last request, the first try has nothing in its prompt.
    retry = client.explain("tries", 4, incarnation=3)
    assert reason_of(retry, 1) == (
        "it sampled nothing that stands in the prompt of request 3: they share 4 tokens, and its "
        "own prompt has 4"
    )


def test_attempts_that_were_refused(server, client):
    with engine(server, "again") as agent:
        handle = agent.begin("again", prompt_token_ids=PROMPT)
        agent.step(rows(2), [[handle, 0, 2]])
        agent.preempt(handle, 2)
        agent.resume(handle, 0)
        agent.step(rows(4, 1), [[handle, 0, 4]])
        agent.preempt(handle, 4)
        agent.resume(handle, 0)
        agent.step(rows(5, 2), [[handle, 0, 5]])
        agent.finish(handle, 6, token_ids=[*PROMPT, 5, 6])
    found = client.explain("again", 0)
    assert found.rule == "own_pass"
    assert found.row is not None
    assert found.row.attempt == 2
    assert found.evidence[0].startswith("attempt 2 sampled the answer: it is the first one that")
    assert reason_of(found, 1, attempt=1).startswith("attempt 2 counts")
    assert reason_of(found, 1, attempt=3) == "it came after attempt 2, which sampled the answer"
    later = client.explain("again", 4)
    assert later.rule == "later_attempt"
    assert later.evidence[0] == "attempt 2, which sampled the answer, has no row here"
    latest = client.explain("again", 0, policy="latest")
    assert latest.row is not None
    assert latest.row.attempt == 3
    assert reason_of(latest, 1, attempt=2) == "a later attempt computed the position, too"


def test_a_row_that_the_attempt_that_sampled_lost(server, client):
    with engine(server, "lost") as agent:
        handle = agent.begin("lost", prompt_token_ids=PROMPT)
        agent.step(rows(3), [[handle, 0, 3]])
        agent.skip([[handle, 3, 1]])
        agent.step(rows(1), [[handle, 4, 1]])
        agent.preempt(handle, 5)
        agent.resume(handle, 0)
        agent.step(rows(6, 1), [[handle, 0, 6]])
        agent.finish(handle, 7, token_ids=[*PROMPT, 5, 6, 7])
    found = client.explain("lost", 3)
    assert (found.row, found.missing) == (None, "not_captured")
    assert found.evidence[-1] == "the row was of attempt 1, and no other attempt supplies it"
    assert reason_of(found, 1, attempt=2) == "it came after attempt 1, which sampled the answer"
    later = client.explain("lost", 3, policy="latest")
    assert later.row is not None
    assert later.row.attempt == 2


def test_rows_of_another_version_and_rows_that_may_come(server, client):
    with engine(server, "versions") as agent:
        run(agent, "versions", PROMPT, [*PROMPT, 5])
        handle = agent.begin("runs", prompt_token_ids=PROMPT)
        agent.step(rows(4), [[handle, 0, 4]])
        assert agent.flush()
        found = client.explain("versions", 0, weight_version=8)
        assert found.missing is MissingReason.OTHER_VERSION
        assert found.evidence == ("the row was computed by weight version 7",)
        assert found.remedy == "read without weight_version, or with 7"
        assert found.refused == ()
        soon = client.explain("runs", 9)
        assert soon.missing is MissingReason.NOT_YET
        assert "wait_for" in soon.remedy
        assert client.explain("runs", 2**31 - 1).missing is MissingReason.NOT_YET
        with pytest.raises(InvalidArgument, match=r"position is .*; expected at most 2147483647"):
            client.explain("runs", 2**32 - 1)
        agent.finish(handle, 5)


@pytest.mark.parametrize(
    ("error", "field", "said", "arguments"),
    [
        (InvalidArgument, "position", "expected below 5, the number of rows", ("wrong", 5)),
        (InvalidArgument, "position", "expected", ("wrong", -1)),
        (InvalidArgument, "layer_id", "expected one of the 2 MoE layers 1..3", ("wrong", 0, 2)),
        (NotFound, "incarnation", "it has 1", ("wrong", 0, None, 2)),
        (NotFound, "trace_id", "is not in run", ("nobody", 0)),
        (InvalidArgument, "policy", "expected", ("wrong", 0, None, None, "first")),
    ],
)
def test_a_wrong_cell_is_a_typed_error(server, client, error, field, said, arguments):
    if not [*client.find(labels={"is": "wrong"})]:
        with engine(server, "wrong") as agent:
            run(agent, "wrong", PROMPT, [*PROMPT, 5, 6], labels={"is": "wrong"})
    names = ("layer_id", "incarnation", "policy")
    given = dict(zip(names, arguments[2:], strict=False))
    with pytest.raises(error, match=said) as caught:
        client.explain(*arguments[:2], **{"policy": "as_sampled"} | given)
    assert caught.value.field == field


@pytest.mark.parametrize("policy", ["as_sampled", "latest"])
def test_each_cell_is_explained_as_it_is_read(server, client, ambiguous, policy):
    hand_over(server, f"read-{policy}", "r", "r")
    with engine(server, "unknown") as agent:  # nothing is known of its tokens
        handle = agent.begin(f"unknown-{policy}")
        agent.step(rows(3), [[handle, 0, 3]])
        agent.preempt(handle, 2)
        agent.resume(handle, 1, block_ids=[0])
        agent.step(rows(3), [[handle, 1, 3]])
        agent.finish(handle, 6)
    rules = set()
    for trace_id in [stat.trace_id for stat in client.find(states=["complete", "incomplete"])]:
        for number in {one.number for one in client.describe(trace_id, origins=False).incarnations}:
            read = client.get(trace_id, incarnation=number, policy=policy, missing="mask")
            reasons = {
                (position, layer): one.reason
                for one in read.missing
                for position in range(one.start, one.stop)
                for layer in one.layer_ids
            }
            for position in range(read.num_rows):
                for column, layer in enumerate(LAYOUT.layer_ids):
                    found = client.explain(
                        trace_id, position, layer_id=layer, incarnation=number, policy=policy
                    )
                    assert (found.row is not None) == read.valid[position, column]
                    assert found.missing == reasons.get((position, layer))
                    assert found.incarnation == number
                    given = any(
                        s.source == "handoff" and s.start <= position < s.stop
                        for s in read.provenance
                    )
                    assert (found.rule == "handoff") == given
                    assert bool(found.remedy) == (found.row is None)
                    rules.add(found.rule)
    assert {None, "own_pass", "handoff"} <= rules


def test_requests_in_several_workers():
    workers = Partition(0, 2, spread=("*",))
    name = next(
        name
        for name in map("spread{}".format, range(99))
        if workers.of("default", f"{name}-p") != workers.of("default", f"{name}-d")
    )
    with (
        run_server(port=free_ports(2), workers=2, spread_runs='["*"]') as spread,
        RouteClient(spread.target) as other,
    ):
        hand_over(spread, name, "x", "x")
        found = other.explain(name, 0)
    assert found.rule == "handoff"
    assert found.row is not None
    assert found.row.computed_by == EngineRequest(1, name, f"{name}-p")


@pytest.mark.parametrize(
    "bad",
    [
        pb.ExplainCellResponse(),
        pb.ExplainCellResponse(row=pb.CellRow()),
        pb.ExplainCellResponse(rule="own_pass", missing=pb.MISSING_REASON_NOT_YET),
        pb.ExplainCellResponse(
            rule="own_pass", row=pb.CellRow(), missing=pb.MISSING_REASON_NOT_YET
        ),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(bad):
    with pytest.raises(ValueError, match="with reason"):
        Explanation.from_proto("t", 0, bad)


def test_the_words_of_the_command(server, monkeypatch, ambiguous):
    hand_over(server, "words", None, None)
    cli = commands(monkeypatch, server.target, "default")
    said = cli("explain", "words", "--position", "1").output
    lines = [line.rstrip().split(maxsplit=1) for line in said.splitlines()]
    assert lines[:3] == [
        ["cell", "position 1 of layer 1"],
        ["trace", "words, incarnation 2"],
        ["row", "none: kv_unknown"],
    ]
    for text in (
        "because  request 2 began with KV from elsewhere, and without a transfer_id",
        "remedy   name the hand-over: give one transfer_id to finish of the request that hands",
        "owner    request 2 ('words' at engine 'words-d')",
        "chain    request 2 ('words' at engine 'words-d') owns the positions from 0 on",
        "refused  request 1 ('words' at engine 'words-p'): it ended with handoff, so its",
    ):
        assert text in said
    said = cli("explain", ambiguous, "--position", "4", "--layer", "3").output
    assert "owner    ambiguous" in said
    assert "row      none: ambiguous" in said
    found: dict[str, Any] = json.loads(
        cli("explain", ambiguous, "--position", "4", "--json").output
    )
    assert found["missing"] == "ambiguous"
    assert [one["request"]["number"] for one in found["refused"]] == [3, 2, 1]
    assert cli("explain", ambiguous, "--position", "99", code=2).stderr.startswith(
        "routetrace: position is 99; expected below"
    )


def test_an_incomplete_read_names_the_command(client, server, ambiguous):
    with pytest.raises(Incomplete) as caught:
        client.get(ambiguous)
    said = "; `routetrace explain equal --position 0` says why"
    assert str(caught.value).endswith(said)
