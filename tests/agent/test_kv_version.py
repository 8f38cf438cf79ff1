"""Weight version of the KV that an engine could reuse at a begin (docs/rows.md, section 6)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.capture_agent import CaptureAgent
from support.agents.checked import config_for, make_rows
from support.servers.ingest_server import IngestServer

ROW = make_rows(1)


class Told:
    """An agent, and the versions that its begins gave."""

    def __init__(self, server: IngestServer, agent: CaptureAgent) -> None:
        self._server, self.agent = server, agent
        self._names = (f"r{number}" for number in count())

    def begin(self, cached: int = 0, external: int = 0, *, ends: bool = True) -> int:
        agent = self.agent
        handle = agent.begin(
            next(self._names),
            num_computed_tokens=cached + external,
            num_external_tokens=external,
            block_ids=range(8),
        )
        if ends:
            agent.finish(handle, 0, reason="abort")
        return handle

    @property
    def versions(self) -> list[int | None]:
        """Of the begins so far, in order."""
        assert self.agent.flush(20)
        facts = [request.facts for request in self._server.model.requests]
        return [f.kv_weight_version if f.HasField("kv_weight_version") else None for f in facts]


@pytest.fixture
def told(server) -> Iterator[Told]:
    with CaptureAgent(config_for(server, block_size=4, num_blocks=16)) as agent:
        yield Told(server, agent)


def test_a_version_is_known_from_a_reset_on(told):
    agent = told.agent
    agent.set_weight_version(5)
    told.begin(4)  # nobody emptied the cache
    agent.reset_prefix_cache()
    told.begin(4)
    told.begin(4, 4)  # of two stores
    agent.reset_prefix_cache()
    agent.reset_external_kv()
    told.begin(4, 4)
    told.begin()  # reuses none
    agent.set_weight_version(None)
    told.begin(4, 4)
    assert told.versions == [None, 5, None, 5, None, None]


@pytest.mark.parametrize("what", ["step", "step_slots", "skip", "no rows", "no spans", "none"])
def test_passes_of_other_versions_end_it(told, what):
    agent = told.agent
    agent.set_weight_version(1)
    agent.reset_prefix_cache()
    handle = told.begin(ends=False)
    spans = np.array([[handle, 0, 1]])
    if what == "step":
        agent.step(ROW, spans)
    elif what == "step_slots":
        agent.step_slots(ROW, [3])
    elif what == "skip":
        agent.skip(spans)
    elif what == "no rows":  # of requests that are not captured
        agent.step(ROW[:0], spans[:0])
    elif what == "no spans":
        agent.skip(spans[:0])
    told.begin(4)
    agent.set_weight_version(2)
    told.begin(4)
    agent.set_weight_version(1)
    told.begin(4)
    skipped = what in ("skip", "no spans")
    before = None if skipped else 1
    assert told.versions[1:] == [before, 2 if what == "none" else None, before]


def test_a_reset_while_a_request_is_live_does_not_count(told):
    agent = told.agent
    agent.set_weight_version(1)
    agent.reset_prefix_cache()
    live = told.begin(4, ends=False)
    agent.reset_prefix_cache()
    told.begin(4)
    agent.finish(live, 5)
    told.begin(4)
    agent.reset_prefix_cache()
    told.begin(4)
    assert told.versions == [1, None, None, 1]


@pytest.mark.parametrize("how", ["begin", "resume", "mark_external"])
def test_kv_from_elsewhere_is_in_the_cache_from_then_on(told, how):
    agent = told.agent
    agent.set_weight_version(1)
    agent.reset_prefix_cache()
    handle = told.begin(ends=False)
    if how == "begin":
        told.begin(0, 4)
    elif how == "resume":
        agent.preempt(handle, 0)
        agent.resume(handle, 4, block_ids=[3], num_external_tokens=4)
    else:
        agent.mark_external([])
        told.begin(4)
        agent.mark_external([3])
    told.begin(4)
    assert told.versions[1:] == ([None] if how == "resume" else [None, None] if how == "begin"
                                 else [1, None])  # fmt: skip


def test_declared_stores_are_of_the_present_version(server):
    config = config_for(server, block_size=4, num_blocks=16, external_kv_emptied=True)
    with CaptureAgent(config) as agent:
        told = Told(server, agent)
        told.begin(0, 4)
        for version in (1, 2):
            agent.set_weight_version(version)
            told.begin(0, 4)
            agent.reset_prefix_cache()
            told.begin(4, 4)
            told.begin(4)
            # No pass was of version 1, but KV of it came into the cache.
        assert told.versions == [None, 1, 1, 1, 2, 2, 2]
        agent.set_weight_version(3)
        told.begin(4)
        assert told.versions[-1] is None


class Expected:
    """The versions that begins give, by the words of the page: all that happened is remembered."""

    def __init__(self, declared: bool) -> None:
        self.declared, self.version = declared, None
        self.live = 0
        # What happened since the last reset that counts; None: there was none.
        self.blocks: list[object] | None = None
        self.outside: list[object] | None = None

    def add(self, version: object) -> None:
        for since in (self.blocks, self.outside):
            if since is not None:
                since.append(version)

    def load(self) -> None:
        if self.blocks is not None:
            self.blocks.append(self.version if self.of_outside() else "none")

    def of_outside(self) -> bool:
        return self.version is not None and (self.declared or self.all(self.outside))

    def all(self, since: list[object] | None) -> bool:
        return since is not None and all(one == self.version for one in since)

    def begin(self, cached: int, external: int) -> int | None:
        known = self.version is not None and bool(cached or external)
        known = known and (not cached or self.all(self.blocks))
        known = known and (not external or self.of_outside())
        if external:
            self.load()
        return self.version if known else None


CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("version"), st.sampled_from([1, 2, None])),
        st.tuples(st.just("begin"), st.sampled_from([(0, 0), (4, 0), (0, 4), (4, 4)]),
                  st.booleans()),
        st.sampled_from([("step",), ("skip",), ("empty",), ("external",), ("reset",),
                         ("reset external",), ("finish",)]),
    ),
    max_size=30,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(calls=CALLS, declared=st.booleans())
def test_versions_are_those_of_the_page(calls, declared):
    with IngestServer() as server:
        config = config_for(server, block_size=4, num_blocks=16, external_kv_emptied=declared)
        with CaptureAgent(config) as agent:
            told, page, expected = Told(server, agent), Expected(declared), []
            handles: list[int] = []
            for name, *how in calls:
                if name == "version":
                    agent.set_weight_version(how[0])
                    page.version = how[0]
                elif name == "begin":
                    (cached, external), ends = how
                    expected.append(page.begin(cached, external))
                    handle = told.begin(cached, external, ends=ends)
                    handles += [] if ends else [handle]
                elif name == "finish" and handles:
                    agent.finish(handles.pop(), 0)
                elif name == "step":
                    agent.step_slots(ROW, [3])
                    page.add("none" if page.version is None else page.version)
                elif name == "empty":
                    agent.step(ROW[:0], np.empty((0, 3), np.int64))
                    page.add("none" if page.version is None else page.version)
                elif name == "skip":
                    agent.skip(np.empty((0, 3), np.int64))
                    page.add("none")
                elif name == "external":
                    agent.mark_external([5])
                    page.load()
                elif name == "reset":
                    agent.reset_prefix_cache()
                    page.blocks = None if handles else []
                elif name == "reset external":
                    agent.reset_external_kv()
                    page.outside = None if handles else []
            assert told.versions == expected
