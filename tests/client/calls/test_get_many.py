"""get_many: a stream of many requests."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from routetrace.client import Trace
from routetrace.common.errors import (
    Incomplete,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from support.servers.client_server import fail, truth
from support.servers.scripted import GONE


class TestGetMany:
    def sources(self, count):
        return [truth(i % 7 + 1, rng=random.Random(i), trace_id=f"r{i}") for i in range(count)]

    @pytest.mark.parametrize("prefetch", [1, 3, 100])
    def test_in_the_order_of_the_ids(self, client, server, prefetch):
        sources = self.sources(20)
        server.serve(*sources)
        random.Random(0).shuffle(sources)
        ids = (s.info.trace_id for s in sources)
        traces = list(client.get_many(ids, concurrency=prefetch, missing="mask", token_stop=1))
        assert [t.trace_id for t in traces] == [s.info.trace_id for s in sources]
        for trace, source in zip(traces, sources, strict=True):
            assert np.array_equal(trace.valid[0], source.valid[0])

    def test_so_many_at_once(self, client, server):
        source = truth(3)
        together = threading.Barrier(4)
        active, most = set(), []

        def handler(request, context):
            active.add(request.trace_id)
            most.append(len(active))
            together.wait(GONE)
            messages = source.responses()
            for m in messages:
                if m.HasField("info"):
                    m.info.trace_id = request.trace_id
                if m.HasField("end"):
                    m.end.info.trace_id = request.trace_id
            active.discard(request.trace_id)
            return iter(messages)

        server.script["GetTrace"] = handler
        assert len(list(client.get_many([f"r{i}" for i in range(12)], concurrency=4))) == 12
        assert max(most) == 4

    def test_ids_are_taken_as_it_gets_on(self, client, server):
        sources = self.sources(20)
        server.serve(*sources)
        taken = []

        def ids():
            for s in sources:
                taken.append(s.info.trace_id)
                yield s.info.trace_id

        traces = client.get_many(ids(), concurrency=3, missing="mask")
        assert not taken
        next(traces)
        assert len(taken) == 3
        next(traces)
        assert len(taken) == 4
        traces.close()

    def test_errors_at_their_turn(self, client, server):
        sources = self.sources(4)
        server.serve(*sources)
        ids = ["r0", "r1", "unknown", "", "r2"]
        traces = client.get_many(ids, missing="mask")
        assert [next(traces).trace_id for _ in range(2)] == ["r0", "r1"]
        with pytest.raises(NotFound):
            next(traces)
        got = list(client.get_many(ids, missing="mask", errors="return"))
        assert [type(g) for g in got] == [
            Trace,
            Trace,
            NotFound,
            InvalidArgument,
            Trace,
        ]

    def test_an_error_that_ends_the_iteration_says_how_to_go_on(self, client, server):
        sources = self.sources(9)
        server.serve(*sources)
        holed = next(s.info.trace_id for s in sources if not s.valid.all())
        remedy = 'pass errors="return" to go on with the other traces'
        with pytest.raises(NotFound) as unknown:
            list(client.get_many(["r0", "unknown", "r1"], missing="mask"))
        assert str(unknown.value).endswith(f"; {remedy}")
        assert unknown.value.remedy.endswith(remedy)
        with pytest.raises(Incomplete) as incomplete:
            list(client.get_many([holed]))
        assert str(incomplete.value).endswith(f"; {remedy}")
        [returned, _] = client.get_many(["unknown", "r1"], errors="return", missing="mask")
        with pytest.raises(NotFound) as alone:
            client.get("unknown")
        assert str(returned) == str(alone.value)
        assert remedy not in str(returned)

    @pytest.mark.parametrize(
        "error", [Unavailable("away", retry_after=0), Unauthenticated("?"), PermissionDenied("no")]
    )
    def test_errors_that_are_not_of_one_trace_end_the_iteration(self, client, server, error):
        server.serve(*self.sources(9))
        answer = server.script["GetTrace"]

        def handler(request, context):
            return fail(context, error) if request.trace_id == "r3" else answer(request, context)

        server.script["GetTrace"] = handler
        ids = ["r0", "unknown", "r3", "r4"]
        values = client.get_many(ids, missing="mask", errors="return", concurrency=1)
        assert [type(next(values)) for _ in range(2)] == [Trace, NotFound]
        with pytest.raises(type(error)):
            next(values)
        assert list(values) == []

    def test_progress_is_reported_before_each_value(self, client, server):
        sources = self.sources(4)
        server.serve(*sources)
        ids = ["r0", "unknown", "r1", "r3"]
        reported, bytes_read = [], 0
        values = client.get_many(ids, missing="mask", errors="return", progress=reported.append)
        assert not reported
        for number, value in enumerate(values, 1):
            bytes_read += 0 if isinstance(value, NotFound) else value.topk_ids.nbytes
            state = reported[-1]
            assert len(reported) == number == state.done
            assert (state.total, state.failed, state.bytes) == (4, int(number > 1), bytes_read)
        assert bytes_read
        seconds = [state.seconds for state in reported]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0

    def test_progress_up_to_an_error_that_is_raised(self, client, server):
        server.serve(*self.sources(2))
        reported = []
        with pytest.raises(NotFound):
            list(client.get_many(iter(["r0", "lost", "r1"]), missing="mask",
                                 progress=reported.append))  # fmt: skip
        assert [(p.done, p.failed, p.total) for p in reported] == [(1, 0, None), (2, 1, None)]

    def test_an_error_of_the_progress_function_ends_the_iteration(self, client, server):
        server.serve(*self.sources(3))

        def fails(progress):
            raise ZeroDivisionError(progress.done)

        traces = client.get_many(["r0", "r1"], missing="mask", progress=fails)
        with pytest.raises(ZeroDivisionError, match="1"):
            next(traces)
        assert list(traces) == []
        with pytest.raises(InvalidArgument, match=r"progress is 5 \(int\); expected a function"):
            client.get_many(["r0"], progress=5)

    def test_closing_ends_what_is_under_way(self, client, server):
        server.serve(*self.sources(1))
        answer = server.script["GetTrace"]
        started, gone = threading.Semaphore(0), threading.Semaphore(0)

        def handler(request, context):
            if request.trace_id != "r0":
                over = threading.Event()
                context.add_callback(over.set)
                started.release()
                assert over.wait(GONE)
                gone.release()
            return answer(request, context)

        server.script["GetTrace"] = handler
        traces = client.get_many(["r0", "r1", "r2"], missing="mask", wait_for="end", timeout=600)
        assert next(traces).trace_id == "r0"
        assert started.acquire(timeout=GONE)
        assert started.acquire(timeout=GONE)
        traces.close()
        assert gone.acquire(timeout=GONE)
        assert gone.acquire(timeout=GONE)
