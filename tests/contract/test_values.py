"""Facts as values of JSON: every public dataclass, with any content."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import routetrace.capture_agent
import routetrace.client
from routetrace.capture_agent import AgentConfig, AgentStats, CloseReport
from routetrace.client import (
    AgentHistory,
    AgentStat,
    Agreement,
    AgreementChange,
    AgreementHistory,
    CellRow,
    ChainMember,
    ClientConfig,
    EngineRequest,
    ExpertLoad,
    Explanation,
    FetchStats,
    FinishReason,
    Incarnation,
    Limit,
    Located,
    MissingRange,
    MissingReason,
    ModelLayout,
    PrefixSpan,
    Progress,
    ProvenanceSpan,
    Rank,
    ReadFacts,
    ReadOptions,
    RefusedCandidate,
    Retired,
    RowOrigin,
    RunHistory,
    Sample,
    Security,
    Segment,
    ServerInfo,
    StepAgreement,
    Trace,
    TraceChanges,
    TraceDescription,
    TraceStat,
    TraceState,
    TraceSummary,
    VersionSpan,
)
from routetrace.client.agreement import Choices, LogprobSums
from routetrace.codec.records import DIGEST

LAYOUT = ModelLayout((1, 3), 4, 8, 2)
#: Dataclasses with a result of JSON; the others hold arrays of rows, or say how to read them.
DATA = {
    AgentConfig, AgentHistory, AgentStat, AgentStats, Agreement, AgreementChange, AgreementHistory,
    CellRow, ChainMember, ClientConfig, CloseReport, EngineRequest, ExpertLoad, Explanation,
    FetchStats, Incarnation, Limit, Located,
    MissingRange, ModelLayout, PrefixSpan, Progress, ProvenanceSpan, Rank, ReadFacts, ReadOptions,
    RefusedCandidate, Retired, RowOrigin, RunHistory, Sample,
    Security, Segment, ServerInfo, StepAgreement, Trace, TraceChanges, TraceDescription,
    TraceStat, TraceSummary,
    VersionSpan,
}  # fmt: skip
ROWS = {"FetchPlan", "MicroBatch", "Rows", "SampleRows"}

_text = st.text(max_size=8)
_number = st.integers(0, 2**63 - 1)
_time = st.datetimes(timezones=st.just(timezone.utc))
_missing = st.builds(
    MissingRange, _number, _number, st.just((1,)), st.sampled_from([*MissingReason])
)
_facts = {
    "trace_id": _text,
    "run": _text,
    "state": st.sampled_from([*TraceState]),
    "num_tokens": st.none() | _number,
    "num_rows": _number,
    "prompt_len": st.none() | _number,
    "layout": st.just(LAYOUT),
    "labels": st.dictionaries(_text, _text, max_size=3),
    "incarnation": _number,
    "num_incarnations": _number,
    "finish_reason": st.none() | st.sampled_from([*FinishReason]),
    "engine_ids": st.tuples(_text, _text),
    "num_attempts": _number,
    "min_weight_version": st.none() | _number,
    "max_weight_version": st.none() | _number,
    "created_at": _time,
    "updated_at": _time,
    "expires_at": _time,
    "stored_bytes": _number,
    "token_digests": st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)), max_size=3
    ).map(lambda rows: np.array(rows, DIGEST)),
    "prefix_trace_ids": st.just(()) | st.tuples(_text),
}
_read = _facts | {
    "missing": st.lists(_missing, max_size=2).map(tuple),
    "weight_versions": st.tuples(st.builds(VersionSpan, _number, _number, _number)),
    "provenance": st.tuples(st.builds(ProvenanceSpan, _number, _number, _text)),
    "prefix_sources": st.tuples(st.builds(PrefixSpan, _number, _number, _text)),
}
_rows = {
    "layer_ids": st.just((1, 3)),
    "token_start": st.just(0),
    "token_stop": st.just(2),
    "_ids": st.just(np.zeros((2, 2, 2), np.uint8)),
    "_valid": st.just(np.ones((2, 2), bool)),
}
_summaries = st.builds(
    TraceSummary,
    **{name: _facts[name] for name in (
        "trace_id", "state", "num_tokens", "num_rows", "engine_ids", "labels", "min_weight_version",
        "max_weight_version", "finish_reason", "num_incarnations", "created_at", "updated_at",
        "expires_at", "stored_bytes",
    )},
    num_cells=_number,
    missing_cells=st.dictionaries(st.sampled_from([*MissingReason]), _number, max_size=2),
)  # fmt: skip
_numbers = st.lists(_number, max_size=3).map(tuple)
_agent_history = st.builds(AgentHistory, _text, _text, _numbers, _numbers)
_share = st.floats(0, 1)
_choices = st.builds(Choices, *[_number] * 4)
_agreement = st.builds(
    Agreement,
    by_layer=st.dictionaries(_number, _choices, max_size=2),
    by_version=st.dictionaries(_number, _choices, max_size=2),
    tokens=_number,
    logprobs=st.builds(LogprobSums, _number, _share, _share, _share, _share, _number, _number),
)
_step = st.builds(
    StepAgreement,
    step=_number,
    reported_at=_time,
    reporters=st.tuples(_text),
    reported=st.tuples(_time),
    weight_version=st.none() | _number,
    agreement=_agreement,
    diagnosis=_text,
    trace_ids=st.tuples(_text),
)
_counts = st.lists(_number, min_size=2, max_size=2).map(lambda n: np.array(n, np.int64))
_stats = st.builds(
    TraceStat,
    **_facts,
    missing=st.none() | st.lists(_missing, max_size=2).map(tuple),
    missing_cells=st.dictionaries(st.sampled_from([*MissingReason]), _number, max_size=2),
)
_incarnations = st.builds(
    Incarnation,
    _number,
    st.sampled_from([*TraceState]),
    st.none() | st.sampled_from([*FinishReason]),
    st.none() | _number,
    _number,
    st.none() | _time,
)
_row_origins = st.builds(
    RowOrigin,
    _number,
    _number,
    st.just((1, 3)),
    _text,
    _text,
    _number,
    _number,
    _text,
)
_requests = st.builds(EngineRequest, _number, _text, _text)
_cell_rows = st.builds(
    CellRow,
    _requests,
    _text,
    _number,
    st.none() | _requests,
    st.none() | _number,
    st.none() | _text,
)
_chain = st.builds(ChainMember, _requests, _number, _number, st.none() | _number)
_refused = st.builds(RefusedCandidate, _requests, st.none() | _number, _text)
VALUES = {
    EngineRequest: _requests,
    CellRow: _cell_rows,
    ChainMember: _chain,
    RefusedCandidate: _refused,
    Explanation: st.builds(
        Explanation,
        trace_id=_text,
        incarnation=_number,
        position=_number,
        layer_id=_number,
        rule=st.none() | _text,
        row=st.none() | _cell_rows,
        missing=st.none() | st.sampled_from([*MissingReason]),
        remedy=_text,
        owner=st.none() | _requests,
        owner_reason=_text,
        chain=st.lists(_chain, max_size=2).map(tuple),
        num_members=_number,
        evidence=st.tuples(_text),
        refused=st.lists(_refused, max_size=2).map(tuple),
        num_refused=_number,
    ),
    Agreement: _agreement,
    ExpertLoad: st.builds(
        ExpertLoad,
        layer_ids=st.just((1, 3)),
        num_experts=st.just(2),
        top_k=st.just(1),
        traces=_number,
        tokens=_number,
        cells=_counts,
        load=st.lists(_counts, min_size=2, max_size=2).map(np.stack),
    ),
    StepAgreement: _step,
    AgreementHistory: st.builds(AgreementHistory, st.tuples(_step)),
    AgreementChange: st.builds(
        AgreementChange, _number, st.none() | _number, _share, _share, st.just((1, 3)), _text
    ),
    AgentHistory: _agent_history,
    RunHistory: st.builds(
        RunHistory,
        _number,
        st.floats(0, 9),
        _time,
        _numbers,
        _numbers,
        _numbers,
        st.tuples(_agent_history),
        _numbers,
    ),
    TraceSummary: _summaries,
    TraceChanges: st.builds(
        TraceChanges, st.tuples(_summaries), st.tuples(_text), whole=st.booleans()
    ),
    TraceStat: _stats,
    Incarnation: _incarnations,
    TraceDescription: st.builds(
        TraceDescription,
        stat=_stats,
        incarnations=st.tuples(_incarnations),
        origins=st.tuples(_row_origins),
        more_origins=st.booleans(),
        begun_at=st.none() | _time,
        sampled_at=st.none() | _time,
        acknowledged_at=st.none() | _time,
        readable_at=st.none() | _time,
        first_read_at=st.none() | _time,
        last_read_at=st.none() | _time,
        num_reads=_number,
    ),
    ReadFacts: st.builds(ReadFacts, **_read),
    Trace: st.builds(Trace, **_read, **_rows),
    Located: st.builds(Located, _text, *[_number] * 4),
    Limit: st.builds(Limit, _text, *[_number] * 4),
    ServerInfo: st.builds(
        ServerInfo,
        **{
            field.name: {"str": _text, "int": _number, "datetime": _time}[field.type]
            for field in dataclasses.fields(ServerInfo)
            if field.default is dataclasses.MISSING
        },
    ),
    Sample: st.just(Sample.of("a", token_ids=np.arange(3))),
    ModelLayout: st.just(LAYOUT),
    Rank: st.just(Rank((1, 3), cp_size=2)),
    Security: st.just(Security(tls=True, token="rt_secret", ca_file=Path("ca.pem"))),
    ClientConfig: st.just(
        ClientConfig(target="h", security={"token": "rt_secret"}, grpc_options={"grpc.x": 1})
    ),
    AgentConfig: st.builds(
        AgentConfig,
        target=st.just("h"),
        engine_id=st.just("e"),
        layout=st.just(LAYOUT),
        security=st.just({"token": "rt_secret"}),
    ),
    AgentStats: st.builds(AgentStats, _number, _number, st.dictionaries(_text, _number)),
    ReadOptions: st.just(ReadOptions(wait_for="end", timeout=3)),
}


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_values_survive_json_with_the_names_of_the_fields(kind, data):
    value = data.draw(VALUES[kind])
    found = value.to_dict()
    assert json.loads(json.dumps(found)) == found
    hidden = {"token"} if kind is Security else {"_ids", "_valid"} if kind is Trace else set()
    names = [field.name for field in dataclasses.fields(kind)]
    assert list(found) == [name for name in names if name not in hidden]
    assert "rt_secret" not in json.dumps(found)


def test_every_public_dataclass_has_them():
    public = {
        member
        for package in (routetrace.client, routetrace.capture_agent)
        for name in package.__all__
        if inspect.isclass(member := getattr(package, name))
    }
    data = {m for m in public if dataclasses.is_dataclass(m) or hasattr(m, "_asdict")}
    assert {m for m in data if m.__name__ not in ROWS} == DATA
    assert all(callable(member.to_dict) for member in DATA)


def test_what_the_values_are():
    at = datetime(2026, 1, 2, 3, 4, 5, 600_000, timezone(timedelta(hours=1)))
    limit = Progress(done=1, total=None, failed=0, bytes=3, seconds=0.5)
    assert limit.to_dict() == {"done": 1, "total": None, "failed": 0, "bytes": 3, "seconds": 0.5}
    missing = MissingRange(1, 3, (2, 5), MissingReason.KV_UNKNOWN)
    expected = {"start": 1, "stop": 3, "layer_ids": [2, 5], "reason": "kv_unknown"}
    assert missing.to_dict() == expected
    assert type(missing.to_dict()["reason"]) is str
    start, stop, version = span = VersionSpan(1, 2, 40)
    assert span.to_dict() == {"start": start, "stop": stop, "weight_version": version}
    agent = dict.fromkeys((f.name for f in dataclasses.fields(AgentStat)), 0)
    assert AgentStat(**agent | {"seen_at": at}).to_dict()["seen_at"] == (
        "2026-01-02T03:04:05.600+01:00"
    )
    assert Security(ca_file=Path("ca.pem"), token="x").to_dict()["ca_file"] == "ca.pem"
    assert Segment("a", 0, 3).to_dict()["at"] == 0


@pytest.mark.parametrize("kind", [TraceState, FinishReason, MissingReason])
def test_members_of_enums_are_text(kind):
    for member in kind:
        text = member.value
        assert (str(member), f"{member}", f"{member:>20}") == (text, text, f"{text:>20}")
        assert member == text
        assert hash(member) == hash(text)
        assert pickle.loads(pickle.dumps(member)) is member
        assert json.dumps({member: member}) == json.dumps({text: text})
