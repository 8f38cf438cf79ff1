"""A trace id that is used again: token ids prove which incarnation a read takes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from routetrace.capture_agent import CaptureAgent
from routetrace.client import (
    AsyncRouteClient,
    DeadlineExceeded,
    FetchPlan,
    Incomplete,
    InvalidArgument,
    MicroBatch,
    Rank,
    RouteClient,
    Rows,
    Sample,
    Trace,
)
from routetrace.common.layout import ModelLayout
from routetrace.server.testing import run_server

LAYOUT = ModelLayout((0, 1), 2, 64, 2)
PROMPT = 40
LONG = 60
"""Seconds that no read waits where all goes well."""

ids = count(1)


class Place:
    """A server with one agent and one client; a trace id for the test."""

    def __init__(self, target: str, agent: CaptureAgent, client: RouteClient) -> None:
        self.target, self.agent, self.client = target, agent, client
        self.name = f"again-{next(ids)}"

    def begin(self, tokens: np.ndarray, prompt: int = PROMPT, **how: Any) -> Any:
        """Begin a request and compute its prompt; return its handle and all of its rows."""
        told = tokens[:prompt] if how.pop("tell", True) else None
        handle = self.agent.begin(
            how.pop("request_id", self.name), trace_id=self.name, prompt_len=prompt,
            prompt_token_ids=told, labels=how.pop("labels", None),
        )  # fmt: skip
        order = np.random.default_rng(next(ids)).random((len(tokens) - 1, 2, 64)).argsort(axis=2)
        rows = order[:, :, :2].astype(np.uint8)
        self.agent.step(rows[:prompt], [(handle, 0, prompt)])
        return handle, rows

    def end(
        self, begun: Any, tokens: np.ndarray, prompt: int = PROMPT, *, tell=True, reason="stop"
    ) -> np.ndarray:
        """Compute what follows the prompt, and end the request; return its rows."""
        handle, rows = begun
        for position in range(prompt, len(rows)):
            self.agent.step(rows[position : position + 1], [(handle, position, 1)])
        told = tokens if tell else None
        self.agent.finish(handle, len(tokens), reason=reason, token_ids=told)
        assert self.agent.flush(LONG)
        return rows

    def run(self, tokens: np.ndarray, *, tell=True, reason="stop", labels=None) -> np.ndarray:
        """Run a request from its begin to its end; return its rows."""
        return self.end(
            self.begin(tokens, tell=tell, labels=labels), tokens, tell=tell, reason=reason
        )

    def get(self, tokens: Any, **how: Any) -> Trace:
        return self.client.get(self.name, token_ids=tokens, **how)

    def fetch(self, tokens: Any, num_tokens: int | None = None, **how: Any) -> Rows:
        named = {key: how.pop(key) for key in ("incarnation", "nonce") if key in how}
        sample = Sample.of(self.name, num_tokens, token_ids=tokens, **named)
        return self.client.fetch(self.plan(sample), **how)

    @staticmethod
    def plan(*samples: Sample) -> FetchPlan:
        return FetchPlan.make(LAYOUT, MicroBatch.packed(samples), Rank(LAYOUT.layer_ids))

    def check(self, tokens: np.ndarray, rows: np.ndarray) -> None:
        """Read by tokens with both calls."""
        np.testing.assert_array_equal(self.get(tokens).topk_ids, rows)
        fetched = self.fetch(tokens)
        there = fetched.topk_ids.transpose(1, 0, 2)[: len(tokens) - 1]
        np.testing.assert_array_equal(there, rows[: len(tokens) - 1])
        assert fetched.verified[0] > 0


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with (
        run_server() as server,
        CaptureAgent(target=server.target, engine_id="e", layout=LAYOUT) as agent,
        RouteClient(server.target) as client,
    ):
        yield server.target, agent, client


@pytest.fixture
def place(server: Any) -> Place:
    return Place(*server)


def answers(number: int, length: int = 60, seed: int = 1) -> list[np.ndarray]:
    """Several answers to one prompt."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 1000, PROMPT)
    return [
        np.concatenate([prompt, 2000 * (i + 1) + rng.integers(0, 1000, length - PROMPT)])
        for i in range(number)
    ]


def refused(read: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        read()
    return str(caught.value)


@pytest.mark.parametrize("lengths", [(60, 60), (60, 90), (90, 60), (200, 60), (60, 200)])
def test_each_answer_is_read_by_its_tokens(place: Place, lengths: tuple[int, int]) -> None:
    pairs = [(t := answers(3, n)[i], place.run(t)) for i, n in enumerate(lengths)]
    for tokens, rows in pairs:
        place.check(tokens, rows)


def test_a_retry_and_the_request_that_was_aborted(place: Place) -> None:
    aborted, retried = answers(2)
    first = place.run(aborted, reason="abort")
    second = place.run(retried)
    place.check(retried, second)
    for cut in (0, 1, 3, 15):
        tokens = aborted[: len(aborted) - cut]
        trace = place.get(tokens, wait_for="end", timeout=LONG)
        np.testing.assert_array_equal(trace.topk_ids, first)
        fetched = place.fetch(tokens).topk_ids.transpose(1, 0, 2)[: len(tokens) - 1]
        np.testing.assert_array_equal(fetched, first[: len(tokens) - 1])
        assert place.client.get(place.name).incarnation == 2


def test_an_aborted_request_longer_than_the_answer_before_it(place: Place) -> None:
    """The end at fewer tokens, which the read waits beyond, is that of another answer."""
    place.run(answers(1, 50)[0])
    aborted = answers(2, 90)[1]
    rows = place.run(aborted, reason="abort")
    begun = time.monotonic()
    trace = place.get(aborted[:-2], wait_for="end", timeout=LONG)
    assert time.monotonic() - begun < LONG / 2
    np.testing.assert_array_equal(trace.topk_ids, rows)


@pytest.mark.parametrize("label", ["adapter", "kv_cache_dtype"])
def test_answers_of_different_weights_have_digests_of_their_own(place: Place, label: str) -> None:
    [tokens] = answers(1)
    plain = place.run(tokens)
    other = answers(2)[1]
    labelled = place.run(other, labels={label: "lora-7"})
    place.check(other, labelled)
    place.check(tokens, plain)


@pytest.mark.parametrize("length", [50, 60, 90])
def test_a_read_waits_for_the_answer_that_begins_later(place: Place, length: int) -> None:
    place.run(answers(1)[0])
    tokens = answers(2, length)[1]
    second: list[np.ndarray] = []
    later = threading.Thread(target=lambda: second.append(place.run(tokens)))
    later.start()
    trace = place.get(tokens, wait_for="end", timeout=LONG)
    later.join()
    np.testing.assert_array_equal(trace.topk_ids, second[0])


def test_a_read_waits_for_the_answer_that_has_begun(place: Place) -> None:
    first, second = answers(2)
    place.run(first)
    begun = place.begin(second)
    assert place.agent.flush(LONG)
    # Without a wait, the first one's rows are no answer.
    words = refused(lambda: place.get(second))
    assert "which has 2 incarnations: incarnation 2 agrees before position 40, and has not" in words
    assert "incarnation 1 agrees before position 40 and differs before 60" in words
    assert 'wait_for="end"' in words
    rows: list[np.ndarray] = []
    later = threading.Thread(target=lambda: rows.append(place.end(begun, second)))
    later.start()
    trace = place.get(second, wait_for="end", timeout=LONG)
    later.join()
    np.testing.assert_array_equal(trace.topk_ids, rows[0])


def test_the_end_of_the_only_request_is_waited_for(place: Place) -> None:
    [tokens] = answers(1)
    with pytest.raises(DeadlineExceeded, match="did not end within"):
        place.get(tokens, wait_for="end", timeout=0.2)
    begun = place.begin(tokens)
    assert place.agent.flush(LONG)
    with pytest.raises(Incomplete, match="has not ended"):
        place.get(tokens)
    with pytest.raises(DeadlineExceeded, match="did not end within"):
        place.get(tokens, wait_for="end", timeout=0.2)
    later = threading.Thread(target=place.end, args=(begun, tokens))
    later.start()
    trace = place.get(tokens, wait_for="end", timeout=LONG)
    later.join()
    np.testing.assert_array_equal(trace.topk_ids, begun[1])


def test_a_turn_of_a_session_is_waited_for(place: Place) -> None:
    rng = np.random.default_rng(5)
    session = rng.integers(0, 1000, 120)
    place.run(session[:60])
    words = refused(lambda: place.get(session))
    assert "incarnation 1 has 60 tokens" in words
    later = threading.Thread(target=lambda: place.end(place.begin(session, 80), session, 80))
    later.start()
    trace = place.get(session, wait_for="end", timeout=LONG)
    later.join()
    assert (trace.num_tokens, trace.incarnation) == (120, 2)
    # The rows of the first turn did not travel for the whole.
    assert place.client.describe(place.name).num_reads == 2
    # The tokens of the first turn are proven to be the beginning of the whole.
    assert place.get(session[:60]).num_tokens == 120


def test_tokens_of_no_incarnation_are_refused(place: Place) -> None:
    *known, unknown = answers(7)
    for tokens in known[:-1]:
        place.run(tokens)
    words = refused(lambda: place.get(unknown, wait_for="end", timeout=0.3))
    assert words.startswith("token_ids is 60 tokens; expected all tokens, prompt and output, of")
    assert "which has 5 incarnations: incarnation 5 agrees before position 40 and differs" in words
    assert "incarnation 2 agrees" in words
    assert "; 1 more; use the nonce" in words
    assert "incarnation 1" not in words
    words = refused(lambda: place.fetch(unknown))
    assert "they agree before position 40 and differ before 60, behind the prompt" in words
    assert "the trace has 4 other incarnations, and none is proven to have them" in words
    words = refused(lambda: place.fetch(known[0], incarnation=2))
    assert "the trace has 4 other incarnations: without incarnation= and nonce=" in words
    # Another number of tokens, too.
    words = refused(lambda: place.fetch(np.append(known[4], 7)))
    assert "samples[0].num_tokens is 61; expected 60" in words
    assert "the trace has 4 other incarnations, and none" in words


def test_what_no_digest_tells_apart_is_refused(place: Place) -> None:
    """Answers that were cut before their first digest, or without digests at all."""
    first, second = answers(2)
    rows = place.run(first)
    assert "incarnation 1 agrees before position 40, and has no digest behind it" in refused(
        lambda: place.get(first[:50])
    )
    fetched = place.fetch(first[:50])  # the only one, as before
    assert fetched.verified == (0,)
    np.testing.assert_array_equal(fetched.topk_ids.transpose(1, 0, 2)[:49], rows[:49])
    place.run(second)
    for read in (place.get, place.fetch):
        words = refused(lambda read=read: read(first[:50]))
        assert "has 2 incarnations" in words
        assert words.count("agrees before position 40, and has no digest behind it") == 2
    named = place.fetch(first[:50], incarnation=1)
    np.testing.assert_array_equal(named.topk_ids.transpose(1, 0, 2)[:49], rows[:49])


def test_without_digests_nothing_is_proven(place: Place) -> None:
    first, second = answers(2)
    rows = place.run(first, tell=False)
    begun = time.monotonic()
    assert "incarnation 1 has no token digests" in refused(
        lambda: place.get(first, wait_for="end", timeout=LONG)
    )
    assert time.monotonic() - begun < LONG / 2  # no wait brings digests
    assert place.fetch(first).verified == (0,)
    place.run(second, tell=False)
    assert "has no token digests" in refused(lambda: place.fetch(first))
    fetched = place.fetch(None, 60)  # nothing was to be proven
    assert fetched.reads[0].incarnation == 2
    named = place.fetch(first, incarnation=1)
    np.testing.assert_array_equal(named.topk_ids.transpose(1, 0, 2)[:59], rows)


def test_an_answer_that_was_cut_is_proven_up_to_its_last_digest(place: Place) -> None:
    first, second = answers(2, 150)
    pairs = [(first, place.run(first)), (second, place.run(second))]
    for tokens, rows in pairs:
        np.testing.assert_array_equal(place.get(tokens[:128]).topk_ids, rows)
        np.testing.assert_array_equal(place.get(tokens[:140]).topk_ids, rows)
    # A third one begins as the first one does, up to a digest.
    third = first.copy()
    third[130:] += 7
    place.run(third)
    words = refused(lambda: place.get(first[:140]))
    assert words.count("agrees before position 128, and has no digest behind it") == 2
    place.check(first, pairs[0][1])


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_cut_answer_is_of_the_request_that_sampled_it_and_not_of_one_whose_prompt_it_is(
    place: Place, reason: str
) -> None:
    """Its caller goes on elsewhere from a part of the answer."""
    [first] = answers(1, 90)
    sampled = place.run(first, reason=reason)
    cut = 80
    second = np.append(first[:cut], [7, 8])
    place.end(place.begin(second, cut), second, cut)
    assert place.client.get(place.name).incarnation == 2
    trace = place.get(first[:cut], wait_for="end", timeout=LONG)
    assert trace.incarnation == 1
    np.testing.assert_array_equal(trace.topk_ids, sampled)
    fetched = place.fetch(first[:cut])
    assert fetched.reads[0].incarnation == 1
    assert fetched.verified[0] > 0
    there = fetched.topk_ids.transpose(1, 0, 2)[: cut - 1]
    np.testing.assert_array_equal(there, sampled[: cut - 1])

    async def read() -> Trace:
        async with AsyncRouteClient(place.target) as client:
            return await client.get(place.name, token_ids=first[:cut])

    np.testing.assert_array_equal(asyncio.run(read()).topk_ids, sampled)
    place.check(second, place.client.get(place.name, incarnation=2).topk_ids)


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_cut_answer_is_of_no_chain_that_was_given_its_tokens(place: Place, reason: str) -> None:
    """A request goes on from the cut, and another one from that: its digests prove the cut, too."""
    [first] = answers(1, 60)
    sampled = place.run(first, reason=reason)
    cut = 50
    second = np.append(first[:cut], [7, 8])
    place.end(place.begin(second, cut), second, cut)
    third = np.append(second, [9, 10])
    rows = place.end(place.begin(third, len(second) + 1), third, len(second) + 1)
    assert place.client.get(place.name).incarnation == 3
    if reason == "abort":  # each of the last digests is known
        trace = place.get(first[:cut])
        assert trace.incarnation == 1
        np.testing.assert_array_equal(trace.topk_ids, sampled)
    else:
        assert "incarnation 3 has them in its prompt" in refused(lambda: place.get(first[:cut]))
    assert place.get(third).incarnation == 3
    np.testing.assert_array_equal(place.get(third).topk_ids[-1], rows[-1])


def test_equal_answers_that_stand_in_a_prompt_have_no_rows_of_it(place: Place) -> None:
    """The request with the prompt computed them all again, from the first position on."""
    [first] = answers(1, 60)
    for _ in range(2):
        place.run(first)
    second = np.append(first, [7, 8])
    rows = place.end(place.begin(second, 61), second, 61)
    trace = place.get(first, missing="mask")
    assert trace.incarnation == 3
    assert not trace.valid[:59].any()
    np.testing.assert_array_equal(trace.topk_ids[59:], rows[59:])
    assert not place.fetch(first, missing="mask").valid[:, :59].any()


def test_a_prompt_that_no_other_request_may_have_sampled_is_proven(place: Place) -> None:
    first, second = answers(2, 90)
    rows = place.end(place.begin(second, 80), second, 80)
    np.testing.assert_array_equal(place.get(second[:80]).topk_ids, rows)
    place.run(first)  # which differs
    place.run(second[:60])  # which has fewer tokens
    assert place.client.get(place.name).num_tokens == 60
    np.testing.assert_array_equal(place.get(second[:80]).topk_ids, rows)
    fetched = place.fetch(second[:80])
    assert fetched.verified[0] > 0
    np.testing.assert_array_equal(fetched.topk_ids.transpose(1, 0, 2)[:79], rows[:79])


def test_of_requests_with_one_prompt_the_one_that_a_read_takes_of_all(place: Place) -> None:
    """No request has sampled these tokens."""
    first, second = answers(2)
    for tokens, reason in ((first, "stop"), (second, "stop"), (first, "abort")):
        place.run(tokens, reason=reason)
    assert place.get(first[:PROMPT]).incarnation == 2


def test_a_prompt_that_another_request_may_have_sampled_is_refused(place: Place) -> None:
    """The other one was cut before its first digest, so that neither is proven."""
    [first] = answers(1, 60)
    rows = place.run(first, reason="length")
    second = np.append(first[:50], [7, 8, 9])
    place.end(place.begin(second, 50), second, 50)
    for read in (place.get, place.fetch):
        words = refused(lambda read=read: read(first[:50]))
        assert "incarnation 2 has them in its prompt, and another one may have sampled" in words
        assert "incarnation 1 agrees before position 40, and has no digest behind it" in words
    np.testing.assert_array_equal(place.get(first[:50], incarnation=1).topk_ids, rows)
    assert place.get(first[:50], incarnation=2).num_tokens == 53


def test_who_may_still_sample_a_prompt_is_waited_for(place: Place) -> None:
    [first] = answers(1, 90)
    begun = place.begin(first)
    second = np.append(first[:80], [7, 8])
    place.end(place.begin(second, 80, request_id=f"{place.name} elsewhere"), second, 80)
    assert "incarnation 1 agrees before position 40, and has not ended" in refused(
        lambda: place.get(first[:80])
    )
    later = threading.Thread(target=lambda: place.end(begun, first))
    later.start()
    trace = place.get(first[:80], wait_for="end", timeout=LONG)
    later.join()
    assert trace.incarnation == 1
    np.testing.assert_array_equal(trace.topk_ids, begun[1])


def test_of_equal_answers_the_one_that_a_read_takes_of_all(place: Place) -> None:
    [tokens] = answers(1)
    for reason in ("stop", "stop", "abort"):
        place.run(tokens, reason=reason)
    place.run(answers(2)[1])
    assert place.get(tokens).incarnation == 2
    assert place.fetch(tokens).reads[0].incarnation == 2


def test_tokens_beside_a_number_are_compared_alone(place: Place) -> None:
    first, second = answers(2)
    rows = place.run(first)
    place.run(second)
    np.testing.assert_array_equal(place.get(first, incarnation=1).topk_ids, rows)
    words = refused(lambda: place.get(second, incarnation=1))
    assert "which has 2 incarnations: incarnation 1 agrees before position 40" in words


def test_many_requests_of_a_plan_are_proven_together(place: Place) -> None:
    """Some are read again while the stream of the others goes on; a budget holds."""
    pairs = [(t, place.run(t)) for t in answers(40)]
    samples = [Sample.of(place.name, token_ids=tokens) for tokens, _ in pairs]
    rows = place.client.fetch(place.plan(*samples), wait_for="end", timeout=LONG)
    for (_, expected), got in zip(pairs, rows.per_sample(), strict=True):
        np.testing.assert_array_equal(got.topk_ids.transpose(1, 0, 2), expected)
    assert [facts.incarnation for facts in rows.reads] == [*range(1, 41)]
    plans = [place.plan(sample) for sample in samples[:4]]
    with place.client.prefetch(plans) as fetched:
        for (_, expected), rows in zip(pairs, fetched, strict=False):
            np.testing.assert_array_equal(rows.topk_ids.transpose(1, 0, 2)[:59], expected)


def test_an_incomplete_incarnation_does_not_hide_the_one_that_is_proven(place: Place) -> None:
    first, second = answers(2)
    rows = place.run(first, reason="abort")
    place.begin(second)  # it runs on
    assert place.agent.flush(LONG)
    place.check(first, rows)


def test_asyncio(place: Place) -> None:
    first, second = answers(2)

    async def reads() -> tuple[Trace, Rows, Trace]:
        async with AsyncRouteClient(place.target) as client:
            sample = Sample.of(place.name, token_ids=first)
            waiting = asyncio.create_task(
                client.get(place.name, token_ids=second, wait_for="end", timeout=LONG)
            )
            early = await client.get(place.name, token_ids=first)
            later = await asyncio.to_thread(place.run, second)
            trace = await waiting
            np.testing.assert_array_equal(trace.topk_ids, later)
            return early, await client.fetch(place.plan(sample)), trace

    rows = place.run(first)
    early, fetched, late = asyncio.run(reads())
    np.testing.assert_array_equal(early.topk_ids, rows)
    np.testing.assert_array_equal(fetched.topk_ids.transpose(1, 0, 2)[:59], rows)
    assert (early.incarnation, late.incarnation) == (1, 2)
