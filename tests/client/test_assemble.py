"""Read streams, cut at random, follow the truth exactly or end in an error."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.client import TraceState
from routetrace.client._core import assemble as assemble_module
from routetrace.client._core.assemble import Assembler, Want
from routetrace.client._core.messages import parser_of
from routetrace.codec.frame import encode_frame
from routetrace.codec.records import SPAN, U32, Provenance
from routetrace.common.errors import Corrupt, Incomplete, Unavailable
from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import LAYOUT, WIDE, Truth, sealed, truth

RUNNING, COMPLETE, INCOMPLETE = (
    pb.TRACE_STATE_RUNNING,
    pb.TRACE_STATE_COMPLETE,
    pb.TRACE_STATE_INCOMPLETE,
)
randoms = st.integers(0, 2**63).map(random.Random)


def feed(want, messages):
    assembler = Assembler(want)
    for message in messages:
        assembler.feed(message)
    return assembler.finish()


def ask(rng: random.Random, source: Truth) -> tuple[pb.GetTraceRequest, Want]:
    n, layers = len(source.ids), source.layout.layer_ids
    request = pb.GetTraceRequest(trace_id="req")
    if rng.randrange(2):
        request.token_start = rng.randrange(n)
        request.token_stop = rng.randint(request.token_start + 1, n)
    if rng.randrange(2):
        request.layer_ids.extend(sorted(rng.sample(layers, rng.randint(1, len(layers)))))
    if rng.randrange(2):
        request.weight_version = rng.randrange(3)
    return request, Want(
        "req",
        tuple(request.layer_ids) or None,
        request.token_start,
        request.token_stop or None,
        mask=True,
        weight_version=request.weight_version if request.HasField("weight_version") else None,
    )


def assert_true(trace, source: Truth, request: pb.GetTraceRequest) -> None:
    """Check that the trace matches the request and the truth."""
    rows = slice(request.token_start, request.token_stop or len(source.ids))
    layer_ids = tuple(request.layer_ids) or source.layout.layer_ids
    columns = source.layout.columns(layer_ids)
    ids, valid = source.ids[rows][:, columns], source.valid_for(request)[rows][:, columns]
    assert trace.layer_ids == layer_ids
    assert (trace.token_start, trace.token_stop) == (rows.start, rows.stop)
    assert trace.topk_ids.dtype == source.layout.dtype
    assert np.array_equal(trace.valid, valid)
    assert np.array_equal(trace.topk_ids[valid], ids[valid])
    assert not trace.topk_ids[~valid].any()
    told = np.ones_like(valid)
    for m in trace.missing:
        told[
            m.start - rows.start : m.stop - rows.start, [layer_ids.index(i) for i in m.layer_ids]
        ] = 0
    assert np.array_equal(told, valid)
    versions = [
        {v for a, b, v in trace.weight_versions if a <= p < b}
        for p in range(*rows.indices(len(source.ids)))
    ]
    for position, got in enumerate(versions, rows.start):
        assert got == {
            p.version
            for p in source.pieces
            if p.counts(request)
            and p.start <= position < p.stop
            and set(p.layer_ids) & set(layer_ids)
        }


@settings(max_examples=150)
@given(randoms)
def test_any_cut_is_put_together(rng):
    source = truth(rng.randint(1, 40), layout=rng.choice((LAYOUT, WIDE)), rng=rng)
    request, want = ask(rng, source)
    assert_true(feed(want, source.responses(request, rng)), source, request)


@settings(max_examples=150)
@given(randoms)
def test_messages_are_parsed_without_their_payload(rng):
    source = truth(rng.randint(1, 40), rng=rng)
    for message in source.responses(ask(rng, source)[0], rng):
        data = sealed(message, later=b"\xa2\x06\x03abc" if rng.randrange(2) else b"")
        head, payload = parser_of(pb.GetTraceResponse)(data)
        assert payload == message.payload
        message.payload = b""
        head.DiscardUnknownFields()
        assert head == message
        assert isinstance(payload, memoryview)


@pytest.mark.parametrize(
    "data", [b"\x0a\x05ab", b"\x7a\x80", b"\x7b", b"\x80" * 11, b"\x0a\x01\xff"]
)
def test_what_does_not_parse_is_no_message(data):
    assert parser_of(pb.GetTraceResponse)(data).head is None


@settings(max_examples=150)
@given(randoms)
def test_an_answer_is_whole_if_it_has_the_rows_that_a_reader_would_wait_for(rng):
    count = rng.randint(1, 9)
    ends = {"state": rng.choice((RUNNING, INCOMPLETE)), "num_tokens": rng.choice((0, count + 1))}
    source = truth(count, rng=rng, **rng.choice((ends, {"state": COMPLETE})))
    for piece in source.pieces:
        piece.there |= rng.randrange(3) > 0
    request, want = ask(rng, source)
    request.wait_for = pb.WAIT_FOR_ROWS
    messages = source.responses(request, rng)
    if source.is_there(request):
        assert_true(feed(replace(want, mask=False), messages), source, request)
    else:
        with pytest.raises(Incomplete) as error:
            feed(replace(want, mask=False), messages)
        assert error.value.missing or error.value.unknown_from is not None
    trace = feed(want, messages)
    assert trace.complete == (
        source.info.state != RUNNING and source.info.num_tokens > 0 and bool(trace.valid.all())
    )


@settings(max_examples=50)
@given(randoms)
def test_room_grows_with_the_rows(rng):
    source = truth(rng.randint(1, 40), rng=rng)
    request, want = ask(rng, source)
    first_bytes, assemble_module._FIRST_BYTES = assemble_module._FIRST_BYTES, rng.randrange(90)
    try:
        assert_true(feed(want, source.responses(request, rng)), source, request)
    finally:
        assemble_module._FIRST_BYTES = first_bytes


def _drop_message(messages, rng):
    messages.pop(rng.randrange(len(messages)))


def _repeat_message(messages, rng):
    i = rng.randrange(len(messages))
    messages.insert(rng.randint(0, len(messages)), messages[i])


def _swap_messages(messages, rng):
    rng.shuffle(messages)


def _cut_off(messages, rng):
    del messages[rng.randrange(len(messages)) :]


def _flip_bit(messages, rng):
    message = rng.choice([m for m in messages if m.payload] or messages)
    payload = bytearray(message.payload)
    if payload:
        payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
    message.payload = bytes(payload)


def _cut_payload(messages, rng):
    message = rng.choice(messages)
    message.payload = message.payload[: rng.randint(0, len(message.payload))]


def _cut_column(messages, rng):
    message = rng.choice(messages)
    name = rng.choice(("spans", "frame_lengths"))
    setattr(message, name, getattr(message, name)[: rng.randint(0, len(getattr(message, name)))])


def _drop_missing(messages, rng):
    for message in messages:
        if message.HasField("end") and message.end.missing:
            message.end.missing.pop(rng.randrange(len(message.end.missing)))


def _shrink_end(messages, rng):
    for message in messages:
        if message.HasField("end"):
            message.end.token_stop -= 1


def _other_trace(messages, rng):
    message = rng.choice([m for m in messages if m.HasField("info") or m.HasField("end")])
    info = message.info if message.HasField("info") else message.end.info
    rng.choice(
        (lambda: setattr(info, "trace_id", "other"), lambda: setattr(info, "incarnation", 2))
    )()


def _other_frame(messages, rng):
    message = rng.choice(messages)
    spans = np.frombuffer(message.spans, SPAN).copy()
    # Beyond its message: that it means another frame of it is a lie that nobody can tell.
    spans["frame"][: rng.randint(0, len(spans))] += len(message.frame_lengths) // U32.itemsize
    message.spans = spans.tobytes()


TAMPERINGS = (
    _drop_message,
    _repeat_message,
    _swap_messages,
    _cut_off,
    _flip_bit,
    _cut_payload,
    _cut_column,
    _drop_missing,
    _shrink_end,
    _other_trace,
    _other_frame,
)


@settings(max_examples=300)
@given(randoms, st.sampled_from(TAMPERINGS))
def test_tampering_is_an_error_or_does_no_harm(rng, tamper):
    source = truth(rng.randint(2, 30), rng=rng)
    request, want = ask(rng, source)
    messages = source.responses(request, rng)
    tamper(messages, rng)
    try:
        trace = feed(want, messages)
    except (Corrupt, Unavailable):
        return
    assert_true(trace, source, request)


# ------------------------------------------------------------------ streams made by hand


def message(source, spans=(), frames=(), *, info=None, end=None) -> pb.GetTraceResponse:
    return pb.GetTraceResponse(
        info=info,
        spans=np.array([(*s, 0, 1, 0, 7) for s in spans], SPAN).tobytes(),
        frame_lengths=np.array([len(f) for f in frames], U32).tobytes(),
        payload=b"".join(frames),
        end=end,
    )


def whole_frame(source, start=0, stop=None):
    return encode_frame(source.ids[start:stop], source.layout)


def test_rows_that_stand_in_name_a_trace_that_is_told():
    source = truth(12)
    end = pb.ReadEnd(info=source.info, token_stop=12, num_spans=1)
    response = message(source, [(0, 12, 0, 0)], [whole_frame(source)], info=source.info, end=end)
    spans = np.frombuffer(response.spans, SPAN).copy()
    spans["provenance"] = Provenance.PREFIX
    response.spans = spans.tobytes()
    trace = feed(Want("req", None), [response])
    assert trace.provenance == ((0, 12, "prefix"),)
    assert trace.prefix_sources == ((0, 12, "other"),)
    spans["attempt"] = 1
    response.spans = spans.tobytes()
    with pytest.raises(Corrupt, match="rows of trace 1 of 1 that stand in"):
        feed(Want("req", None), [response])


def test_a_stream_that_breaks_off():
    source = truth(12)
    assembler = Assembler(Want("req", None))
    with pytest.raises(Unavailable, match="broke off"):
        assembler.finish()
    for response in source.responses():
        if not response.HasField("end"):
            assembler.feed(response)
    with pytest.raises(Unavailable, match="broke off"):
        assembler.finish()


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([(0, 6, 0, 0), (5, 6, 0, 6)], "twice"),
        ([(0, 12, 0, 1)], "a span of 12 rows at 1 of 12"),
        ([(0, 0, 0, 3)], "a span of 0 rows"),
        ([(0, 12, 1, 0)], "frame 1, which is not in its message"),
        ([(2**31, 2**31, 0, 0)], "a span"),
        ([(2**32 - 12, 12, 0, 0)], "not asked for"),
        ([(0, 12, 0, 0), (12, 1, 0, 0)], "rows up to 13 of 12"),
    ],
)
def test_spans_that_cannot_be(spans, reason):
    source = truth(12)
    end = pb.ReadEnd(info=source.info, token_stop=12, num_spans=len(spans))
    with pytest.raises(Corrupt, match=reason):
        feed(
            Want("req", None),
            [message(source, spans, [whole_frame(source)], info=source.info, end=end)],
        )


@pytest.mark.parametrize(
    "layout",
    [
        ModelLayout(LAYOUT.layer_ids, 9, 41, 3),
        ModelLayout(LAYOUT.layer_ids, 9, 40, 2),
        ModelLayout((0, 3), 9, 40, 3),
    ],
)
def test_frames_of_another_model(layout):
    source, other = truth(12), truth(12, layout=layout)
    end = pb.ReadEnd(info=source.info, token_stop=12, num_spans=1)
    with pytest.raises(Corrupt):
        feed(
            Want("req", None),
            [message(source, [(0, 12, 0, 0)], [whole_frame(other)], info=source.info, end=end)],
        )


@pytest.mark.parametrize(
    "change",
    [
        {"token_start": 1},
        {"token_stop": 11},
        {"token_stop": 13},
        {"num_spans": 2},
        {"missing": [pb.MissingRange(start=3, stop=4)]},
        {"missing": [pb.MissingRange(start=12, stop=13)]},
        {"missing": [pb.MissingRange(start=4, stop=4)]},
        {"missing": [pb.MissingRange(start=3, stop=4, layer_ids=[3])]},
        {"info": pb.TraceInfo(trace_id="req")},
        {"info": truth(12, num_tokens=12).info},
        {"info": truth(12, num_tokens=0, state=COMPLETE).info},
    ],
)
def test_ends_that_cannot_be(change):
    source = truth(12)
    end = {"info": source.info, "token_stop": 12, "num_spans": 1, **change}
    with pytest.raises(Corrupt):
        feed(
            Want("req", None, mask=True),
            [
                message(source, info=source.info),
                message(source, [(0, 12, 0, 0)], [whole_frame(source)], end=pb.ReadEnd(**end)),
            ],
        )


@pytest.mark.parametrize(
    "change",
    [
        {"run": "other"},
        {"incarnation": 2},
        {"layout": ModelLayout(LAYOUT.layer_ids, 10, 40, 3).to_proto()},
    ],
)
def test_a_trace_that_becomes_another(change):
    source = truth(12)
    other = pb.TraceInfo()
    other.CopyFrom(source.info)
    other.MergeFrom(pb.TraceInfo(**change))
    end = pb.ReadEnd(info=other, token_stop=12, num_spans=1)
    with pytest.raises(Corrupt, match=f"two values of {next(iter(change))}"):
        feed(
            Want("req", None),
            [message(source, [(0, 12, 0, 0)], [whole_frame(source)], info=source.info, end=end)],
        )


def test_another_trace_than_the_one_asked_for():
    with pytest.raises(Corrupt, match="'req'"):
        feed(Want("mine", None), truth(12).responses())


def test_another_incarnation_than_the_one_asked_for():
    messages = truth(12, incarnation=3).responses()
    for asked in (0, 3):
        assert feed(Want("req", None, incarnation=asked), messages).incarnation == 3
    with pytest.raises(Corrupt, match="incarnation 3, asked for 2"):
        feed(Want("req", None, incarnation=2), messages)


def test_rows_of_another_version_than_the_one_asked_for():
    messages = truth(12).responses()
    with pytest.raises(Corrupt, match="rows of weight version 7, asked for 0"):
        feed(Want("req", None, weight_version=0), messages)


@pytest.mark.parametrize("token_stop", [None, 12])
def test_an_answer_that_is_shorter_than_the_trace(token_stop):
    source = truth(12)
    end = pb.ReadEnd(info=source.info, token_stop=11, num_spans=1)
    frame = whole_frame(source, 0, 11)
    with pytest.raises(Corrupt, match="rows up to 11 of 12"):
        feed(
            Want("req", None, 0, token_stop, mask=True),
            [message(source, [(0, 11, 0, 0)], [frame], info=source.info, end=end)],
        )


def test_nothing_comes_after_the_end():
    messages = truth(12).responses()
    with pytest.raises(Corrupt, match="after the end"):
        feed(Want("req", None), [*messages, pb.GetTraceResponse()])


def test_bytes_that_belong_to_no_frame():
    messages = truth(12).responses()
    for response in messages:
        response.payload += b"x"
    with pytest.raises(Corrupt, match=r"frames of \d+ bytes in"):
        feed(Want("req", None), messages)


def test_a_trace_larger_than_the_limit_is_refused_before_it_is_allocated():
    source = truth(2, num_rows=2**32 - 2, num_tokens=2**32 - 1)
    with pytest.raises(Corrupt, match="more than"):
        feed(Want("req", None), [message(source, info=source.info)])


def test_a_message_that_does_not_parse():
    with pytest.raises(Corrupt, match="does not parse"):
        Assembler(Want("req", None)).feed(None)


class TestWhole:
    """Return whether an answer is whole."""

    @pytest.mark.parametrize(
        ("facts", "token_stop", "is_whole"),
        [
            ({"state": COMPLETE}, None, True),
            ({"state": COMPLETE}, 12, True),
            ({"state": RUNNING}, None, False),
            ({"state": RUNNING}, 12, True),
            # It has ended, and something may still come in layers that were not asked for.
            ({"state": RUNNING, "num_tokens": 13}, None, True),
            # Cells are missing in layers or positions that were not asked for.
            ({"state": INCOMPLETE}, None, True),
            # The agent went away, or nobody went on from a prefill: nobody knows how many rows
            # there are, though none of those that are known is missing.
            ({"state": INCOMPLETE, "num_tokens": 0}, None, False),
            ({"state": INCOMPLETE, "num_tokens": 0}, 12, True),
            ({"state": INCOMPLETE, "num_tokens": 0, "finish_reason": "handoff"}, None, False),
        ],
    )
    def test_rows_that_are_all_there(self, facts, token_stop, is_whole):
        source = truth(12, **facts)
        messages = source.responses(pb.GetTraceRequest(token_stop=token_stop or 0))
        if is_whole:
            feed(Want("req", None, 0, token_stop), messages)
        else:
            with pytest.raises(Incomplete, match="rows from 12 on are unknown"):
                feed(Want("req", None, 0, token_stop), messages)
        trace = feed(Want("req", None, 0, token_stop, mask=True), messages)
        assert trace.complete == (trace.state is not TraceState.RUNNING and trace.num_tokens == 13)

    def test_rows_that_are_not(self):
        source = truth(12, holes=[(3, 5)])
        messages = source.responses()
        with pytest.raises(
            Incomplete, match=r"'req' is incomplete; missing positions \[3, 5\)"
        ) as e:
            feed(Want("req", None), messages)
        assert [(m.start, m.stop) for m in e.value.missing] == [(3, 5)]
        assert feed(Want("req", None, mask=True), messages).state is TraceState.INCOMPLETE

    def test_many_ranges_are_cut_short(self):
        source = truth(12, holes=[(i, i + 1) for i in range(0, 12, 2)])
        with pytest.raises(Incomplete, match="2 more ranges") as e:
            feed(Want("req", None), source.responses())
        assert len(e.value.missing) == 6

    @pytest.mark.parametrize("start", [12, 40])
    def test_beyond_the_last_row_of_a_running_trace(self, start):
        source = truth(12, state=RUNNING)
        for token_start in (start, 12):  # servers may clamp
            end = pb.ReadEnd(info=source.info, token_start=token_start, token_stop=token_start)
            trace = feed(
                Want("req", None, start, mask=True), [message(source, info=source.info, end=end)]
            )
            assert len(trace) == 0
            assert trace.coverage == 1.0
            assert not trace.complete


class TestParts:
    """Following a trace."""

    def start(self, num_rows=0, **want):
        self.source = truth(12, state=RUNNING, num_rows=num_rows)
        self.frames = 0
        self.spans = 0
        self.assembler = Assembler(Want("req", None, follow=True, **want))
        self.assembler.feed(message(self.source, info=self.source.info))

    def rows(self, start, stop, layer_ids=LAYOUT.layer_ids, seed=None, **facts):
        ids = self.source.ids if seed is None else truth(12, rng=random.Random(seed)).ids
        ids = np.ascontiguousarray(ids[start:stop, LAYOUT.columns(layer_ids)])
        info = None
        if facts:
            info = pb.TraceInfo()
            info.CopyFrom(self.source.info)
            info.MergeFrom(pb.TraceInfo(**facts))
        self.assembler.feed(
            message(
                self.source,
                [(start, stop - start, self.frames, 0)],
                [encode_frame(ids, LAYOUT.select(layer_ids))],
                info=info,
            )
        )
        self.frames += 1
        self.spans += 1
        part = self.assembler.take()
        assert self.assembler.take() is None
        return part and (part.token_start, part.token_stop, part.topk_ids)

    def end(self, *missing, stop=12, **facts):
        info = pb.TraceInfo()
        info.CopyFrom(self.source.info)
        state = INCOMPLETE if missing else COMPLETE
        info.MergeFrom(pb.TraceInfo(state=state, num_tokens=stop + 1, num_rows=stop))
        info.MergeFrom(pb.TraceInfo(**facts))
        self.assembler.feed(
            message(
                self.source,
                end=pb.ReadEnd(
                    info=info,
                    token_start=0,
                    token_stop=stop,
                    num_spans=self.spans,
                    missing=[pb.MissingRange(start=a, stop=b) for a, b in missing],
                ),
            )
        )
        assert self.assembler.take() is None
        return self.assembler.finish()

    def test_rows_come_once_and_in_order(self):
        self.start()
        a, b, ids = self.rows(0, 3)
        assert (a, b) == (0, 3)
        assert np.array_equal(ids, self.source.ids[:3])
        assert self.rows(5, 8) is None
        a, b, ids = self.rows(3, 5)
        assert (a, b) == (3, 8)
        assert np.array_equal(ids, self.source.ids[3:8])
        assert self.rows(8, 12)[:2] == (8, 12)
        last = self.end()
        assert (last.token_start, len(last), last.state) == (12, 0, TraceState.COMPLETE)

    def test_stages_meet(self):
        self.start()
        assert self.rows(0, 6, (1, 2)) is None
        a, b, ids = self.rows(0, 4, (4, 5, 7))
        assert (a, b) == (0, 4)
        assert np.array_equal(ids, self.source.ids[:4])

    @pytest.mark.parametrize("mask", [False, True])
    def test_rows_behind_a_hole_come_last(self, mask):
        self.start(mask=mask)
        assert self.rows(0, 3)[:2] == (0, 3)
        assert self.rows(5, 12) is None
        if not mask:
            with pytest.raises(Incomplete, match=r"\[3, 5\)"):
                self.end((3, 5))
            return
        last = self.end((3, 5))
        assert (last.token_start, last.token_stop) == (3, 12)
        assert last.valid[:, 0].tolist() == [False] * 2 + [True] * 7
        assert np.array_equal(last.topk_ids[2:], self.source.ids[5:])

    @pytest.mark.parametrize("num_rows", [0, 12])
    def test_rows_that_the_engine_takes_back(self, num_rows):
        self.start(num_rows)
        part = self.rows(0, 6)
        kept = part[2].copy()
        a, b, ids = self.rows(4, 8, seed=5)
        assert (a, b) == (4, 8)
        assert np.array_equal(part[2], kept)  # what was handed out does not change
        assert np.array_equal(ids, truth(12, rng=random.Random(5)).ids[4:8])
        # Rows 3 to 7 are dropped, and only 3 comes again.
        assert self.rows(3, 4, num_rows=4)[:2] == (3, 4)
        last = self.end(stop=4)
        assert (last.token_start, last.token_stop) == (4, 4)

    def test_rows_taken_back_at_the_end(self):
        self.start()
        assert self.rows(0, 8)[:2] == (0, 8)
        last = self.end(stop=5)
        assert (last.token_start, last.token_stop, last.num_rows) == (5, 5, 5)

    def test_rows_taken_back_and_lost(self):
        self.start(mask=True)
        assert self.rows(0, 8)[:2] == (0, 8)
        last = self.end((5, 6), stop=8)
        assert (last.token_start, last.token_stop) == (5, 8)
        assert last.valid[:, 0].tolist() == [False, True, True]

    def test_another_request_goes_on(self):
        self.start()
        assert self.rows(0, 6)[:2] == (0, 6)
        # What it was given is what was handed out; numbers are those of arrival.
        assert self.rows(6, 9, incarnation=4, num_rows=9)[:2] == (6, 9)
        assert self.rows(9, 12, incarnation=3, num_rows=12)[:2] == (9, 12)
        assert self.end(incarnation=3).incarnation == 3

    def test_the_requested_incarnation_is_not_continued(self):
        self.start(incarnation=1)
        assert self.rows(0, 6, incarnation=1)[:2] == (0, 6)
        with pytest.raises(Corrupt, match="incarnation 4, asked for 1"):
            self.rows(6, 9, incarnation=4)

    def test_all_rows_are_accounted_for(self):
        self.start()
        self.rows(0, 8)
        with pytest.raises(Corrupt, match="position 8 of layer 1 as neither there nor missing"):
            self.end()
