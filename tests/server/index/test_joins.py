"""Which requests of a trace belong together, against the tokens themselves."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.codec.records import DIGEST_EVERY, FinishReason, tail_of, token_digests
from routetrace.common.layout import ModelLayout
from routetrace.server.index.traces import trace_index
from routetrace.server.index.traces.joins import Join
from routetrace.server.index.traces.lineage import Incarnation
from routetrace.server.index.traces.sources import Source, WriterKey
from routetrace.server.index.traces.spans import FOREVER, Span, SpanList
from routetrace.server.index.traces.trace import dump_trace, load_trace
from routetrace.server.rows.gaps import missing
from routetrace.server.rows.view import Selection, view
from routetrace.stored import format5_pb2 as stored
from routetrace.v1 import routetrace_pb2 as pb

LAYOUT = ModelLayout((0,), 1, 8, 2)


class Told:
    """Reports of one engine request, beside its tokens."""

    def __init__(
        self,
        number,
        tokens,
        prompt_len,
        *,
        end="stop",
        digests=True,
        holes=0,
        ends=(),
        takes="",
        gives="",
    ):
        """Its first `holes` positions have no row: their KV came by the hand-over `takes`."""
        self.number, self.tokens, self.prompt_len, self.end = number, tokens, prompt_len, end
        self.positions: set[int] = set()
        self.source = Source(WriterKey("", f"e{number}", ""), 1, "r", "b/0", LAYOUT, prompt_len)
        self.source.loaded = (0, holes)
        self.source.received_by, self.source.handed_over_by = takes, gives
        if digests:
            self._tell(tokens[:prompt_len], ends)
        if end:
            self.source.ended, self.source.num_tokens = True, len(tokens)
            self.source.finish_reason = FinishReason[end.upper()]
            if digests:
                self._tell(tokens, self.ends)
        # Row p of request number i is i << 16 | p.
        if holes < len(tokens) - 1:
            span = Span(holes, len(tokens) - 1 - holes, number << 16 | holes, 0, 1)
            self.source.compute(span)

    @property
    def ends(self) -> list[int]:
        """Where its agent knows that it ended."""
        tail = tail_of(self.prompt_len, len(self.tokens)) if self.end == "abort" else ()
        return [*tail, len(self.tokens)] if self.end else []

    def _tell(self, tokens, ends=()):
        self.source.add_digests(token_digests(np.array(tokens, np.uint32), ends))
        grid = range(DIGEST_EVERY, len(tokens), DIGEST_EVERY)
        self.positions |= {*grid, len(tokens), *(e for e in ends if 0 < e < len(tokens))} - {0}


def incarnations(requests: list[Told], standing: bool = False) -> list[Incarnation]:
    join = Join([r.source for r in requests])
    numbers = join.standing if standing else range(1, len(requests) + 1)
    return [join.incarnation(n) for n in numbers]


def served(requests: list[Told], incarnation: Incarnation, policy="as_sampled") -> list[int]:
    """Number of the request whose row is served, by position; 0: none."""
    value = pb.ReadPolicy.Value(f"READ_POLICY_{policy.upper()}")
    selection = Selection(0, incarnation.num_rows, (0,), value)
    rows = [0] * incarnation.num_rows
    for _, _, span, _ in view(incarnation, selection):
        for position in range(span.position, span.stop):
            assert not rows[position], "a cell twice"
            rows[position] = (span.ref + position - span.position) >> 16
            assert (span.ref + position - span.position) & 0xFFFF == position
    return rows


def same_before(a: Told, b: Told) -> int:
    n = 0
    for x, y in zip(a.tokens, b.tokens, strict=False):
        if x != y:
            break
        n += 1
    return n


token = st.integers(0, 1)


@st.composite
def traces(draw) -> list[Told]:
    """Requests that branch off each other anywhere, and some that have nothing in common."""
    requests: list[Told] = []
    ends: list[int] = []
    for number in range(1, draw(st.integers(2, 5)) + 1):
        base = draw(st.sampled_from(requests)).tokens if requests and draw(st.booleans()) else []
        keep = draw(st.one_of(st.just(len(base)), st.integers(0, len(base))))
        prompt = base[:keep] + draw(st.lists(token, min_size=0 if keep else 1, max_size=210))
        tokens = prompt + draw(st.lists(token, min_size=1, max_size=90))
        request = Told(
            number,
            tokens,
            len(prompt),
            end=draw(st.sampled_from(["", "stop", "abort", "handoff"])),
            digests=draw(st.integers(0, 5)) > 0,
            holes=draw(st.integers(0, len(prompt))),
            ends=tuple(ends) if draw(st.booleans()) else (),
        )
        ends += request.ends
        requests.append(request)
    return draw(st.permutations(requests))


@given(traces())
def test_a_row_of_another_request_is_of_a_pass_that_sampled_what_was_given(requests):
    by_number = {r.number: r for r in requests}
    for whole in incarnations(requests):
        mine = requests[whole.request.number - 1]
        assert {*served(requests, whole, "latest")} <= {0, mine.number}
        for position, number in enumerate(served(requests, whole)):
            if number not in (0, mine.number):
                other = by_number[number]
                same = same_before(other, mine)
                assert other.end != "handoff", "nobody named a hand-over"
                assert other.prompt_len < same, "none of the tokens that it sampled"
                assert position < min(same, mine.prompt_len - 1), "another token"


@given(traces())
def test_what_was_sampled_and_given_is_joined(requests):
    """The one that sampled most of the prompt owns what it sampled."""
    for incarnation in incarnations(requests):
        mine = requests[incarnation.request.number - 1]
        proofs: dict[int, list[Told]] = {}
        for other in requests:
            # What both told of themselves.
            both = [q for q in other.positions & mine.positions if q <= mine.prompt_len]
            proven = max((q for q in both if q <= same_before(other, mine)), default=0)
            if proven > other.prompt_len and other is not mine and other.end != "handoff":
                proofs.setdefault(proven, []).append(other)
        if not proofs or len(proofs[max(proofs)]) > 1:
            continue
        proven, [other] = max(proofs.items())
        if not all(same_before(third, mine) < proven for third in requests if third is not other):
            continue  # more may follow from third ones
        rows = served(requests, incarnation)
        stop = min(proven, len(other.tokens) - 1 if other.end else FOREVER, mine.prompt_len - 1)
        assert {*rows[other.prompt_len - 1 : stop]} <= {other.number}


@given(traces())
def test_the_order_of_arrival_changes_only_numbers_and_ties(requests):
    there = sorted(requests, key=lambda r: r.number)
    standing = {
        tuple(requests[n - 1].number for n in Join([r.source for r in requests]).standing)
        for requests in (requests, there)
    }
    assert len({frozenset(s) for s in standing}) == 1


def numbers(*requests: Told) -> list[list[int]]:
    return [served(list(requests), i) for i in incarnations(list(requests), standing=True)]


PROMPT = [1] * 100


def prefill(number, *, gives="", **facts):
    return Told(number, [*PROMPT, 7], 100, end="handoff", gives=gives, **facts)


def decode(number, *, takes="", **facts):
    return Told(number, [*PROMPT, 8, 8, 8], 100, takes=takes, **{"holes": 99, **facts})


def test_kv_that_was_handed_over_by_name_has_the_rows_of_the_request_behind_it():
    told = prefill(1, gives="t"), decode(2, takes="t")
    for requests in (told, told[::-1]):
        assert numbers(*requests) == [[1] * 99 + [2] * 3]
    # Which one reported first, and last, says nothing.
    others = prefill(3, gives="u"), prefill(4)
    for requests in ((*others, *told), (*told, *others), (others[0], *told, others[1])):
        assert numbers(*requests) == [[1] * 99 + [2] * 3]


def test_a_hand_over_without_a_name_of_its_own_proves_nothing():
    missing = [[0] * 99 + [2] * 3]
    assert numbers(prefill(1), decode(2)) == missing
    assert numbers(prefill(1, gives="t"), decode(2)) == missing
    assert numbers(prefill(1), decode(2, takes="t")) == missing
    assert numbers(prefill(1, gives="t"), decode(2, takes="t"), prefill(3, gives="t")) == missing
    assert numbers(decode(2, takes="t", gives="t")) == missing
    # A request that ends with the name that it began with is no other one.
    assert numbers(prefill(1, gives="t"), decode(2, takes="t", gives="t")) == [[1] * 99 + [2] * 3]


def test_what_a_decode_engine_computed_itself_is_its_own():
    """Its transfer failed, or the blocks of the prefill had expired."""
    for holes in (0, 50):
        rows = numbers(prefill(1, gives="t"), decode(2, takes="t", holes=holes))
        assert rows == [[1] * holes + [2] * (102 - holes)]
    # Rows that it lost were computed, too, and so was all behind them: passes go up.
    lost = decode(2, takes="t")
    lost.source.lose(40, 60, pb.MISSING_REASON_QUEUE_FULL)
    assert numbers(prefill(1, gives="t"), lost) == [[1] * 40 + [0] * 59 + [2] * 3]
    # It has computed a part of the prompt, or nothing yet, and may compute all of it.
    for computed in (48, 0):
        late = decode(2, takes="t", end="")
        late.source.attempts[0], late.source.first_pass = SpanList(), FOREVER
        if computed:
            late.source.compute(Span(0, computed, 2 << 16, 0, 1))
        late.source.loaded = (0, 99)
        late.source.not_know([(0, 99)])
        (early,) = incarnations([prefill(1, gives="t"), late], standing=True)
        rows = served([prefill(1, gives="t"), late], early)
        assert rows == [2] * computed + [0] * (99 - computed)
    late.source.compute(Span(99, 1, 2 << 16 | 99, 0, 1))
    assert numbers(prefill(1, gives="t"), late) == [[1] * 99 + [2]]


@pytest.mark.parametrize("again", [False, True])
def test_kv_that_another_rank_knew_in_that_attempt_is_not_unknown(again):
    """The second attempt sampled the answer, and was aborted before it came as far as the first."""
    ranks = [decode(1), decode(1)]
    for rank, told in enumerate(ranks):
        source = told.source
        source.writer, source.prompt_len = WriterKey("", "e1", f"cp{rank}"), 50
        source.attempts[0].append(Span(20 * rank, 20, 1 << 16 | 20 * rank, 0, 2))
        source.not_know([(20, 40) if rank == 0 else (0, 20)])
        source.preempt(40)
        source.resume()
        if again:
            source.not_know([(10, 20)])
        source.ended, source.num_tokens = True, 41
        source.finish_reason = FinishReason.ABORT
    whole = Join([r.source for r in ranks]).incarnation(1)
    selection = Selection(0, 40, (0,))
    found = missing([], whole, [], [], selection, pb.MISSING_REASON_UNSPECIFIED)
    reasons = {p: one.reason for one in found for p in range(one.start, one.stop)}
    unknown = range(10, 20) if again else ()
    assert reasons == {
        p: pb.MISSING_REASON_KV_UNKNOWN if p in unknown else pb.MISSING_REASON_ABORTED
        for p in range(40)
    }


def test_a_loss_at_one_rank_comes_before_kv_that_another_does_not_know():
    """Of the positions of other context-parallel ranks, a rank knows that their KV was cached."""
    ranks = [decode(1), decode(1)]
    for rank, told in enumerate(ranks):
        told.source.writer = WriterKey("", "e1", f"cp{rank}")
    ranks[0].source.not_know([(10, 20)])
    ranks[1].source.lose(12, 18, pb.MISSING_REASON_NOT_CAPTURED)
    for sources in ([r.source for r in ranks], [r.source for r in ranks[::-1]]):
        whole = Join(sources).incarnation(1)
        selection = Selection(10, 20, (0,))
        found = missing(sources, whole, [], [], selection, pb.MISSING_REASON_UNSPECIFIED)
        assert [(one.start, one.stop, one.reason) for one in found] == [
            (10, 12, pb.MISSING_REASON_KV_UNKNOWN),
            (12, 18, pb.MISSING_REASON_NOT_CAPTURED),
            (18, 20, pb.MISSING_REASON_KV_UNKNOWN),
        ]


def test_tokens_that_differ_disprove_a_hand_over():
    other = Told(1, [*[1] * 70, *[2] * 30, 7], 100, end="handoff", gives="t")
    assert numbers(other, decode(2, takes="t"))[-1] == [1] * 64 + [0] * 35 + [2] * 3


def test_kv_is_handed_over_several_times():
    first = prefill(1, gives="t")
    second = Told(2, [*PROMPT, 8, 8], 100, holes=99, takes="t", gives="u")
    then = Told(3, [*second.tokens, 5, 5, 9], 104, holes=101, takes="u", ends=(102,), end="handoff")
    then.source.handed_over_by = "v"
    last = Told(4, [*second.tokens, 5, 5, 6, 6], 104, holes=103, takes="v", ends=(102,))
    # The second one sampled two tokens of the last one's prompt, the second of which the third
    # computed first.
    assert numbers(first, second, then, last) == [[1] * 99 + [2] * 2 + [3] * 2 + [4] * 2]
    assert numbers(first, then, last)[-1] == [0] * 101 + [3] * 2 + [4] * 2


def test_the_kv_of_the_last_attempt_is_handed_over():
    again = prefill(1, gives="t")
    again.source.attempts.append(SpanList())
    again.source.attempts[1].append(Span(0, 60, 9 << 16, 0, 1))
    assert numbers(again, decode(2, takes="t")) == [[9] * 60 + [0] * 39 + [2] * 3]


def test_a_request_that_handed_over_is_an_incarnation_until_another_goes_on_from_it():
    def standing(*requests: Told) -> set[int]:
        return {i.request.sources[0].writer.engine_id for i in incarnations([*requests], True)}

    assert standing(prefill(1)) == standing(prefill(1), prefill(1)) == {"e1"}
    assert standing(prefill(1), prefill(2)) == {"e1", "e2"}
    assert standing(prefill(1), prefill(2), decode(3)) == {"e3"}
    # It had sampled more; a retry computes all of it again.
    moved = Told(1, [*PROMPT, 2, 2], 100, end="handoff", gives="t")
    assert standing(moved, decode(2)) == {"e2"}
    # Digests do not prove that the prompts begin alike: the name does.
    longer = Told(2, [*PROMPT[:70], 3, 4], 71, holes=70, takes="t")
    shorter = Told(1, [*PROMPT[:69], 8], 69, end="handoff", gives="t")
    assert standing(shorter, longer) == {"e2"}
    shorter.source.handed_over_by = ""
    assert standing(shorter, longer) == {"e1", "e2"}
    # Two that name each other, and one that names itself.
    one, two = prefill(1, gives="t"), prefill(2, gives="u")
    one.source.received_by, two.source.received_by = "u", "t"
    assert standing(one, two) == {"e1", "e2"}
    one.source.received_by = "t"
    assert standing(one) == {"e1"}


def test_an_owner_that_was_preempted_sampled_from_what_it_had_loaded():
    late = decode(2, takes="t")
    late.source.attempts.append(SpanList())
    late.source.attempts[1].append(Span(0, 102, 9 << 16, 0, 1))
    assert numbers(prefill(1, gives="t"), late) == [[1] * 99 + [2] * 3]
    (whole,) = incarnations([prefill(1, gives="t"), late], standing=True)
    assert served([prefill(1, gives="t"), late], whole, "latest") == [9] * 102


def test_an_attempt_that_sampled_nothing_does_not_count():
    """It was preempted within its prompt; the answer came from the passes of the next one."""
    late = decode(2, takes="t")
    late.source.attempts[0] = SpanList()
    late.source.compute(Span(0, 60, 9 << 16, 0, 1))
    late.source.preempt(60)
    late.source.resume()
    late.source.attempts[1].append(Span(20, 82, 2 << 16 | 20, 0, 1))
    assert numbers(prefill(1, gives="t"), late) == [[0] * 20 + [2] * 82]
    # It sampled the first token, from KV that was handed over.
    late.source.attempts[0], late.source.first_pass = SpanList(), 99
    late.source.attempts[0].append(Span(99, 1, 9 << 16 | 99, 0, 1))
    late.source.stops = [100]
    assert numbers(prefill(1, gives="t"), late) == [[1] * 99 + [9] + [2] * 2]
    # Its row there is lost: that of the next attempt did not sample the token.
    late.source.attempts[0].truncate(0)
    late.source.lost[0] = SpanList()
    late.source.lost[0].append(Span(99, 1, 99, 0, pb.MISSING_REASON_NOT_CAPTURED))
    assert numbers(prefill(1, gives="t"), late) == [[1] * 99 + [0] + [2] * 2]


def test_a_shard_with_drafts_may_report_the_next_attempt_later():
    ranks = [decode(1), decode(1)]
    for rank, told in enumerate(ranks):
        told.source.writer = WriterKey("", "e1", f"cp{rank}")
        told.source.ended, told.source.num_tokens = False, 0
    ranks[0].source.tentative = 1
    ranks[1].source.preempt(102)
    ranks[1].source.resume()
    join = Join([told.source for told in ranks])
    assert join.requests[0].attempts_that_sampled == [0]
    ranks[1].source.compute(Span(0, 103, 2 << 16, 0, 1))
    assert join.requests[0].attempts_that_sampled == [0, 1]


def test_an_attempt_whose_end_is_not_known_proves_nothing():
    """Its agent had no memory to report the preemption; another shard may have reported it."""
    ranks = [decode(1), decode(1)]
    for rank, told in enumerate(ranks):
        told.source.writer = WriterKey("", "e1", f"cp{rank}")
        told.source.attempts[0].truncate(0)
        told.source.compute(Span(rank, 60, 1 << 16, 0, 1))
    ranks[0].source.resume()
    ranks[1].source.preempt(100)
    ranks[1].source.resume()
    for told in ranks:
        told.source.compute(Span(0, 102, 2 << 16, 0, 1))
    join = Join([told.source for told in ranks])
    assert join.requests[0].first_that_sampled == 0
    ranks[1].source.stops = [99]
    assert join.requests[0].first_that_sampled == 1
    ranks[1].source.stops = [FOREVER]
    assert join.requests[0].first_that_sampled == 0
    assert not len(ranks[0].source.attempts[0])


def test_of_equal_candidates_the_one_behind_the_last_slot_is_continued():
    one, two = (Told(n, [*PROMPT, 2, 2, 2], 100) for n in (1, 2))
    then = Told(3, [*one.tokens, 5, 5], 103, holes=103)
    assert numbers(one, two, then)[-1] == [0] * 103 + [3]
    for author in (1, 2):
        spans = then.source.attempts[0] = SpanList()
        spans.append(Span(0, 102, author << 16, 0, 2))
        spans.append(Span(102, 2, 3 << 16 | 102, 0, 1))
        assert numbers(one, two, then)[-1] == [author] * 102 + [3] * 2
    # A slot before what they sampled does not tell them apart.
    spans = then.source.attempts[0] = SpanList()
    spans.append(Span(0, 90, 1 << 16, 0, 2))
    spans.append(Span(90, 14, 3 << 16 | 90, 0, 1))
    assert numbers(one, two, then)[-1] == [0] * 102 + [3] * 2


@pytest.mark.parametrize("turned", [False, True])
def test_tokens_that_a_prefill_sampled_are_of_no_sibling(turned):
    """The prompt of its decode holds the first token, which a sibling sampled as well."""
    prompt = [*range(6)]
    sibling = Told(1, [*prompt, 42], 6)
    prefill = Told(2, sibling.tokens, 6, end="handoff", gives="x")
    decode = Told(3, [*prompt, 42, 43], 7, holes=6, takes="x")
    requests = [decode, prefill, sibling] if turned else [sibling, prefill, decode]
    at = requests.index(decode)
    one = incarnations(requests)[at]
    assert served(requests, one) == [2] * 6 + [3]
    decode.source.received_by = ""
    assert served(requests, incarnations(requests)[at]) == [0] * 6 + [3]


def test_a_turn_goes_on_from_a_decode_beside_its_prefill():
    prompt = [*range(6)]
    prefill = Told(1, [*prompt, 42], 6, end="handoff", gives="x")
    decode = Told(2, prefill.tokens, 6, holes=5, takes="x")
    turn = Told(3, [*decode.tokens, 5, 5, 6], 9, ends=(7,))
    assert numbers(prefill, decode, turn)[-1] == [1] * 5 + [2] + [3] * 3


def test_an_answer_that_was_thrown_away_is_not_gone_on_from():
    """It began with the same token, and another agent knows the tokens of the answer."""
    prompt = [*range(10)]
    thrown = Told(1, [*prompt, 77, 1, 2, 3], 10, end="abort")
    answer = Told(2, [*prompt, 77, *range(200, 210)], 10)
    turn = Told(3, [*answer.tokens, 7, 8, 9, 5], 24, ends=tuple(thrown.ends))
    assert numbers(thrown, answer, turn)[-1] == [0] * 10 + [3] * 14
    # Its agent knows all tokens that one sampled, to the one that ended it.
    whole = Told(1, [*prompt, 77], 10)
    turn = Told(3, [*whole.tokens, 7, 8, 9, 5], 14, ends=(11,))
    assert numbers(whole, answer, turn)[-1] == [1] * 10 + [3] * 4
    # Nor may it have sampled the tokens if digests say so.
    prompt = [*range(60)]
    answer = Told(1, [*prompt, 77, *range(200, 210)], 60, end="abort")
    other = Told(2, [*prompt, 77, 1, 2, 3, 4, 5], 60)
    turn = Told(3, [*answer.tokens, 5], 71)
    assert numbers(answer, other, turn)[-1] == [1] * 70 + [3]


def test_a_request_that_many_may_have_sampled_alike_goes_on_from_none():
    prompt = [*range(10)]
    first = Told(1, [*prompt, 77], 10, end="abort")
    others = [Told(n, [*prompt, 77], 10, digests=False) for n in range(3, 68)]
    turn = Told(2, [*first.tokens, 7], 11)
    requests = [first, turn, *others]
    assert served(requests, incarnations(requests)[1]) == [1] * 10 + [2]
    for one in others:
        one._tell(prompt)
    assert served(requests, incarnations(requests)[1]) == [0] * 10 + [2]


def test_a_continued_rollout_keeps_the_rows_that_sampled_its_tokens():
    first = Told(1, [1] * 100 + [2] * 57, 100, end="abort")
    then = Told(2, [*first.tokens, 3, 3, 3], 157)
    assert numbers(first, then) == [[1] * 156 + [2] * 3]
    third = Told(3, [*then.tokens, 4], 160, ends=(157,))
    assert numbers(first, then, third) == [[1] * 156 + [2] * 3 + [3]]
    (latest,) = incarnations([first, then], standing=True)
    assert served([first, then], latest, "latest") == [2] * 159


def test_a_rollout_goes_on_from_the_tokens_that_its_caller_got():
    """An engine samples on until it is told of an abort."""
    first = Told(1, [1] * 100 + [2] * 60, 100, end="abort")
    for more in (1, 2, 3):
        got = first.tokens[:-more]
        then = Told(2, [*got, 3, 3, 3], len(got))
        assert numbers(first, then)[-1] == [1] * (len(got) - 1) + [2] * 3
        # A turn behind the cut is proven where its agent knows of the request before.
        turn = Told(2, [*got, *[4] * 9, 3], len(got) + 9, ends=tuple(first.ends))
        assert numbers(first, turn)[-1] == [1] * (len(got) - 1) + [2] * 10
        far = Told(2, turn.tokens, turn.prompt_len)
        assert numbers(first, far)[-1] == [1] * 127 + [2] * (len(got) - 118)
    # One that ended by itself is given whole, or sampled again: no more is told of it.
    whole = Told(1, first.tokens, 100)
    assert numbers(whole, Told(2, [*got, 3, 3, 3], len(got)))[-1] == [1] * 127 + [2] * 32


def test_a_retry_that_sampled_other_tokens_is_a_sequence_of_its_own():
    dead = Told(1, [1] * 100 + [2] * 50, 100, end="")
    retry = Told(2, [1] * 100 + [3] * 50, 100)
    assert numbers(dead, retry) == [[1] * 149, [2] * 149]
    # Where it took KV from elsewhere, that has the same tokens, and need not be of the same pass.
    loaded = Told(2, [1] * 100 + [3] * 50, 100, holes=90)
    assert numbers(dead, loaded)[1] == [0] * 90 + [2] * 59


def test_turns_of_a_session_and_forks_of_it():
    first = Told(1, [1] * 70 + [2] * 30, 70)
    second = Told(2, [*first.tokens, *[3] * 40, *[4] * 20], 140, ends=(100,))
    fork = Told(3, [*first.tokens, *[5] * 40, *[4] * 20], 140, ends=(100,))
    assert numbers(first, second) == [[1] * 99 + [2] * 60]
    assert numbers(first, second, fork) == [[1] * 99 + [2] * 60, [1] * 99 + [3] * 60]
    # On an engine that does not know where the first turn ended, proof reaches to position 64.
    far = Told(2, second.tokens, 140)
    assert numbers(first, far) == [[1] * 99, [2] * 159]
    # Of two branches, the one is continued of which more is proven.
    branch = Told(4, [*first.tokens[:80], *[6] * 30], 70)
    for requests in ((first, branch, second), (branch, first, second)):
        assert numbers(*requests)[-1] == [1] * 99 + [2] * 60
    # A fork before the last token is another sequence, and the first one stands.
    other = Told(3, [*first.tokens[:99], *[5] * 20], 99, ends=(99,))
    assert [len(rows) for rows in numbers(first, other)] == [99, 118]


def test_without_digests_nothing_is_joined():
    prompt = [1] * 100
    prefill = Told(1, [*prompt, 7], 100, end="handoff", digests=False)
    decode = Told(2, [*prompt, 8, 8, 8], 100, holes=100, digests=False)
    rows = numbers(prefill, decode)
    assert rows == [[1] * 100, [0] * 100 + [2] * 2]


def test_shards_are_one_request_unless_their_tokens_differ():
    tokens = np.arange(80, dtype=np.uint32)
    sources = [Source(WriterKey("", "e", f"pp{i}"), 1, "r", "boot/0", LAYOUT, 70) for i in range(3)]
    sources[0].add_digests(token_digests(tokens))
    sources[2].add_digests(token_digests(tokens + 1))
    assert [r.sources for r in Join(sources).requests] == [sources[:2], sources[2:]]
    # The same id later, of another boot, and twice of one writer.
    again = Source(WriterKey("", "e", "pp0"), 2, "r", "boot/0", LAYOUT)
    other = Source(WriterKey("", "e", "pp1"), 2, "r", "again/0", LAYOUT)
    assert len(Join([*sources[:2], again, other]).requests) == 3


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=40))
def test_requests_keep_their_numbers_when_the_oldest_are_dropped(reports):
    with patch.object(trace_index, "MAX_SOURCES", 5):
        drop_the_oldest(reports)


def drop_the_oldest(reports):
    index, known, last = trace_index.TraceIndex(), [], 0
    for name, shard in reports:
        writer = WriterKey("r", "e", f"pp{shard}")
        source = Source(writer, 1, f"{name}", f"boot/{name}", LAYOUT)
        trace = index.begin(("r", "t"), source, ttl=1, now=0)
        alike = (r for r in known if r[1] == name and shard not in r[2])
        if (home := next(alike, None)) is None:
            last += 1
            known.append(home := (last, name, {}))
        home[2][shard] = source
        if sum(len(shards) for _, _, shards in known) > 5:
            assert all(source.forgotten for source in known.pop(0)[2].values())
        dump_trace(message := stored.Trace(), trace, {LAYOUT: 0})
        for join in (trace.join, load_trace(message, [LAYOUT]).join):
            assert [r.number for r in join.requests] == [*join.numbers]
            found = [(r.number, {int(s.writer.shard[2]) for s in r.sources}) for r in join.requests]
            assert found == [(number, {*shards}) for number, _, shards in known]


def test_an_unfinished_request_ends_where_its_drafts_begin():
    source = Source(WriterKey("", "e", ""), 1, "r", "b/0", LAYOUT)
    source.attempts[0].append(Span(0, 10, 0, 0, 1))
    source.tentative = 3
    incarnation = Join([source]).incarnation(1)
    assert incarnation.num_rows == 7
    (segment,) = view(incarnation, Selection(0, FOREVER, (0,)))
    assert segment.span.stop == 7
    source.remove(8)
    assert source.tentative == 1
    source.remove(5)
    assert (source.tentative, source.end) == (0, 5)
