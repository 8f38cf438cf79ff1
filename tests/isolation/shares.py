"""Faults of limits that owners share, and of limits of callers without a token."""

from __future__ import annotations

from oracle.mutations import SERVER
from regressions.judging import fault

_ACCESS = f"{SERVER}/access"
_PACE = "server/access/test_pace.py"
_ENDPOINT = "server/ops/test_endpoint.py"

#: The two parts of the beginning of a slice.
_STEP = "        if self._step is not None:\n            await self._step()\n"
_RESERVE = (
    "        now, limit = time.monotonic(), self._limited(share)\n"
    "        self._free_at = max(now, self._free_at) + TURN_SECONDS / limit\n"
)

SHARES = (
    # ------------------------------------------------------------------ budgets
    fault(
        "one owner takes all of any budget",
        f"{_ACCESS}/budget.py",
        "return amount <= free and self.held[owner] <= free",
        "return amount <= free",
        "server/access/test_admission.py::test_an_owner_holds_no_more_than_is_free",
    ),
    fault(
        "one owner takes all reads",
        f"{_ACCESS}/admission.py",
        "        return self._reads.hold(owner)\n",
        '        return self._reads.hold(f"{owner} {self._reads.used}")\n',
        "system/test_budgets.py::test_reads_that_wait_have_shares",
    ),
    fault(
        "one owner takes all writers",
        f"{SERVER}/retention/room.py",
        "Counter(owner_of(w.token, w.key.run) for w in self._state.writers.values())",
        "Counter(str(w.key) for w in self._state.writers.values())",
        "system/test_budgets.py::test_writers_and_slots_have_shares",
    ),
    fault(
        "one owner takes all slots",
        f"{SERVER}/retention/room.py",
        "            held[owner_of(writer.token, writer.key.run)] += writer.slots.num_slots\n",
        "            held[str(writer.key)] += writer.slots.num_slots\n",
        "system/test_budgets.py::test_writers_and_slots_have_shares",
    ),
    fault(
        "one owner takes all bytes of binds",
        f"{SERVER}/ingest/service.py",
        "self._admission.bind(owner, max(size, _LEAST_BIND_BYTES))",
        "self._admission.bind(trace_id, max(size, _LEAST_BIND_BYTES))",
        "system/test_budgets.py::test_binds_are_bounded_and_their_waits_end",
    ),
    fault(
        "one owner takes all streams of agents",
        f"{SERVER}/ingest/service.py",
        "self._admission.agents.hold(owner)",
        "self._admission.agents.hold(first.engine_id)",
        "system/test_budgets.py::test_streams_of_agents_have_shares",
    ),
    fault(
        "a cancelled call keeps its part of a budget",
        f"{_ACCESS}/budget.py",
        "        try:\n            yield\n"
        "        finally:\n            self.release(owner, amount)\n",
        "        yield\n        self.release(owner, amount)\n",
        "server/access/test_admission.py::test_a_cancelled_call_releases_its_part",
    ),
    fault(
        "a read that is cancelled as it gets its turn keeps it",
        f"{_ACCESS}/admission.py",
        "                    self._end_turn(owner)  # cancelled just after it got a turn\n",
        "                    pass\n",
        "server/access/test_admission.py::test_turns_are_bounded_and_none_is_lost",
    ),
    fault(
        "one owner takes all turns to send",
        f"{_ACCESS}/admission.py",
        "        queue = self._readers.pop(owner)\n",
        "        owner = next(iter(self._readers))\n        queue = self._readers[owner]\n",
        "server/access/test_admission.py::test_owners_take_turns",
    ),
    fault(
        "a stalled read is never ended",
        f"{_ACCESS}/admission.py",
        "            loop.call_later(self._stalled_seconds, self._on_stalled),\n",
        "",
        "server/access/test_admission.py::test_a_read_whose_message_is_not_taken_ends",
    ),
    fault(
        "slow reads of one owner take all turns",
        f"{_ACCESS}/admission.py",
        "        if not self._slow.fits(owner):\n            return False\n",
        "",
        "server/access/test_admission.py::test_slow_readers_pass_on_their_turns_up_to_a_bound",
    ),
    # ------------------------------------------------------------------ stored bytes
    fault(
        "the quota of a token is one for each of its runs",
        f"{SERVER}/retention/room.py",
        "        held = self._state.owner_bytes[owner]\n",
        "        held = self._state.run_bytes[run]\n",
        "system/test_quotas.py::test_a_token_has_one_quota_for_all_its_runs",
    ),
    fault(
        "the quota of a token evicts traces of others",
        f"{SERVER}/retention/retention.py",
        'partial(_of_owner, owner), held - int(LOW * quota), "quota")',
        'lambda _: True, held - int(LOW * quota), "quota")',
        "system/test_quotas.py::test_where_room_is_short_the_largest_owner_loses_its_oldest_traces",
    ),
    fault(
        "a full store evicts the oldest traces of all owners",
        f"{SERVER}/retention/retention.py",
        'self._make_room(partial(_of_owner, owner), part, "capacity")',
        'self._make_room(lambda _: True, part, "capacity")',
        "system/test_quotas.py::test_where_room_is_short_the_largest_owner_loses_its_oldest_traces",
    ),
    fault(
        "a full store accepts chunks of an owner over its share",
        f"{SERVER}/retention/room.py",
        "len(self._state.owner_bytes) > 1 and held > share",
        "False",
        "server/access/test_admission.py::test_a_store_takes_chunks_up_to_the_share_of_their_owner",
    ),
    # ------------------------------------------------------------------ time of the event loop
    fault(
        "a step of an owner without credit goes on at once",
        f"{_ACCESS}/pace.py",
        "            if account.waiting or account.stepping or account.credit < 0:\n",
        "            if False:\n",
        f"{_PACE}::test_a_backlog_of_one_owner_does_not_delay_the_steps_of_another",
    ),
    fault(
        "a call that never waits goes on for ever in one step",
        f"{_ACCESS}/pace.py",
        "task in account.stepping and now - self._began_at < LONG_STEP_SECONDS",
        "task in account.stepping",
        f"{_PACE}::test_a_call_that_has_not_waited_goes_on_in_the_same_step",
    ),
    fault(
        "all calls of an owner go on in the step of the first",
        f"{_ACCESS}/pace.py",
        "task in account.stepping and now",
        "account.stepping and now",
        f"{_PACE}::test_one_of_a_backlog_of_short_steps_goes_on_in_a_round",
    ),
    fault(
        "calls are not charged",
        f"{_ACCESS}/control.py",
        "            self._pace.charge(owner, CALL_SECONDS)\n",
        "",
        f"{_PACE}::test_calls_with_a_token_begin_in_its_time",
    ),
    fault(
        "messages of reads are not charged",
        f"{_ACCESS}/admission.py",
        "        self._admission.pace.charge(self._owner, len(message) * SECONDS_PER_BYTE)\n",
        "",
        f"{_PACE}::test_sent_messages_are_charged",
    ),
    fault(
        "long messages are not charged",
        f"{_ACCESS}/admission.py",
        "        self.pace.charge(owner, len(request.data) * SECONDS_PER_BYTE)\n",
        "",
        f"{_PACE}::test_unusable_long_messages_are_refused_and_charged",
    ),
    fault(
        "long messages are parsed in one step",
        f"{_ACCESS}/admission.py",
        "pieces(request.data, request.kind)",
        "iter([request.data])",
        f"{_PACE}::test_long_messages_are_parsed_in_steps_of_their_owner",
    ),
    fault(
        "long messages are parsed on arrival",
        f"{SERVER}/common/rpc.py",
        "        if len(data) > _AT_ONCE_BYTES:\n            return Unparsed(data, kind, most)\n",
        "",
        f"{_PACE}::test_long_messages_are_parsed_in_steps_of_their_owner",
    ),
    fault(
        "slices of long work are not steps of their owner",
        f"{SERVER}/common/slices.py",
        _STEP,
        "",
        f"{_PACE}::test_slices_of_long_work_are_steps_of_their_owner",
    ),
    fault(
        "a cancelled call keeps the slice that it waits for",
        f"{SERVER}/common/slices.py",
        f"{_STEP}{_RESERVE}",
        f"{_RESERVE}{_STEP}",
        f"{_PACE}::test_a_call_that_is_cancelled_before_its_slice_reserves_nothing",
    ),
    fault(
        "more of a slice is given back than it took",
        f"{SERVER}/common/slices.py",
        "            self._free_at -= max(0.0, left) / limit\n",
        "            self._free_at -= max(0.0, left) / self._limited(share)\n",
        f"{_PACE}::test_the_rest_of_a_slice_is_given_back_at_the_share_that_it_took",
    ),
    fault(
        "reads of one owner bring the server near its memory limit",
        f"{_ACCESS}/admission.py",
        "    return min(config.max_reads, most)\n",
        "    return config.max_reads\n",
        "server/access/test_admission.py::test_reads_take_at_most_a_quarter_of_the_memory_limit",
    ),
    fault(
        "traces are evicted for memory that is not theirs",
        f"{SERVER}/retention/retention.py",
        "        if total > HIGH * limit:\n",
        "        if (total := max(total, self.memory.process_bytes())) > HIGH * limit:\n",
        "server/retention/test_memory.py::"
        "test_memory_that_is_not_of_the_index_evicts_nothing_and_refuses_chunks",
    ),
    fault(
        "near half of the memory limit each owner loses its oldest traces",
        f"{SERVER}/retention/retention.py",
        'self._make_room(partial(_of_owner, owner), part, "memory", freed)',
        'self._make_room(lambda _: True, part, "memory", freed)',
        "server/retention/test_memory.py::"
        "test_near_the_half_of_the_limit_the_oldest_traces_of_the_largest_owner_go",
    ),
    fault(
        "long work has the same share beside other owners",
        f"{SERVER}/common/slices.py",
        "return share if self._alone() else min(share, SHARE_BESIDE_OTHERS)",
        "return share",
        f"{_PACE}::test_long_work_leaves_more_of_the_loop_while_others_are_active",
    ),
    fault(
        "an owner gets no more than an equal part of the loop",
        f"{_ACCESS}/pace.py",
        "        return max(equal, _STEPS_SHARE - _RESERVED * others / _USE_SECONDS)\n",
        "        return equal + 0.0 * others\n",
        f"{_PACE}::test_an_owner_may_use_what_others_leave_however_many_they_are",
    ),
    fault(
        "what an owner used counts for as long as it is active",
        f"{_ACCESS}/pace.py",
        "        self._used *= math.exp(-(now - self._used_at) / _USE_SECONDS)\n",
        "",
        f"{_PACE}::test_the_use_of_an_owner_that_stopped_does_not_reduce_that_of_others",
    ),
    fault(
        "the wait of an owner is not reckoned again",
        f"{_ACCESS}/pace.py",
        "        if seconds > _LOOK_AGAIN_SECONDS:\n",
        "        if False:\n",
        f"{_PACE}::test_an_owner_waits_no_longer_than_others_use_the_loop",
    ),
    fault(
        "an owner that waits keeps the accounts of idle ones",
        f"{_ACCESS}/pace.py",
        "            if now - first.seen < ACTIVE_SECONDS:\n",
        "            if now - first.seen < ACTIVE_SECONDS or first.waiting:\n",
        f"{_PACE}::test_an_owner_that_waits_keeps_no_idle_ones",
    ),
    fault(
        "messages of a lone run make it wait for itself",
        f"{_ACCESS}/pace.py",
        "        return len(self._accounts) - (UNKNOWN_OWNER in self._accounts) < 2\n",
        "        return len(self._accounts) < 2\n",
        f"{_PACE}::test_messages_of_a_lone_run_leave_it_alone",
    ),
    # ------------------------------------------------------------------ lengths from outside
    fault(
        "numbers that are not packed are not bounded",
        f"{SERVER}/wire/pieces.py",
        "        if fields == MAX_FIELDS:\n",
        "        if False:\n",
        "server/ingest/test_pieces.py::test_numbers_that_are_not_packed_are_bounded",
    ),
    fault(
        "messages over the limit of their method are parsed",
        f"{SERVER}/common/rpc.py",
        "        return len(self.data) > self.most\n",
        "        return False\n",
        "system/test_budgets.py::test_binds_are_bounded_and_their_waits_end",
    ),
    fault(
        "block ids of a request are not bounded",
        f"{SERVER}/index/chunk.py",
        "    if needed > most:\n",
        "    if False:\n",
        "server/ingest/test_limits.py::test_blocks_that_an_engine_does_not_have_are_named",
    ),
    fault(
        "drop reasons of an agent are not bounded",
        f"{SERVER}/index/agents.py",
        "        dropped.clear()\n"
        "        dropped.update({**kept, OTHER_REASON: min(unknown, _MAX_ROWS)}"
        " if unknown else kept)\n",
        "        del unknown, kept\n",
        "server/index/test_agents_listed.py::test_drop_reasons_are_bounded",
    ),
    fault(
        "begins of a chunk are not bounded",
        f"{SERVER}/index/chunk.py",
        '                ("begins", header.begins),\n',
        "",
        "server/ingest/test_limits.py::test_a_chunk_has_a_bounded_number_of_requests",
    ),
    # ------------------------------------------------------------------ steps of the event loop
    fault(
        "a long message is read to its end in search of a number's",
        f"{SERVER}/wire/pieces.py",
        "                if end - at == _VARINT_BYTES:\n",
        "                if False:\n",
        "server/ingest/test_pieces.py::"
        "test_a_number_without_an_end_is_not_read_to_the_end_of_the_message",
    ),
    fault(
        "messages of agents other than chunks are not bounded",
        f"{SERVER}/wire/messages.py",
        "    if len(data) > MAX_OTHER_BYTES and not _is_chunk(data):\n",
        "    if False:\n",
        "server/ingest/test_wire.py::test_long_messages_are_chunks",
    ),
    fault(
        "the header of a chunk is parsed at once",
        f"{SERVER}/index/chunk.py",
        "pieces(data, pb.ChunkHeader) if len(data) > PIECE_BYTES else (data,)",
        "(data,)",
        "server/ingest/test_limits.py::test_a_long_header_is_parsed_in_many_steps",
    ),
    fault(
        "reads join a trace of many requests at once",
        f"{SERVER}/read/finding.py",
        "        if trace is not None and trace.has_many_sources:\n",
        "        if False:\n",
        "server/read/test_preparing.py::test_no_call_joins_a_long_trace_at_once",
    ),
    fault(
        "lists join a trace of many requests at once",
        f"{SERVER}/read/catalog.py",
        "turns.over(prepared(newest_first, page.prepare))",
        "turns.over(newest_first)",
        "server/read/test_preparing.py::test_no_call_joins_a_long_trace_at_once",
    ),
    fault(
        "the census joins a trace that changes all the time at once",
        f"{SERVER}/ops/census.py",
        "self._summaries.at_hand(trace) or trace.summary",
        "self._summaries.of(trace)",
        "server/read/test_preparing.py::test_the_census_counts_what_changes_all_the_time_as_it_was",
    ),
    fault(
        "watches join a trace that changes all the time at once",
        f"{SERVER}/read/catalog.py",
        "if trace.sources and not self._summaries.at_hand(trace):",
        "if False:",
        "server/read/test_preparing.py::"
        "test_a_watcher_hears_of_what_changes_all_the_time_once_it_is_calm",
    ),
    fault(
        "a join that a change has made void is kept",
        f"{SERVER}/index/traces/trace.py",
        "        if self._rejoins == rejoins:\n            self._join = join\n",
        "        self._join = join\n",
        "server/read/test_preparing.py::test_a_trace_may_change_between_any_two_steps",
    ),
    # ------------------------------------------------------------------ callers without a token
    fault(
        "pending calls are not bounded",
        f"{SERVER}/daemon.py",
        '        ("grpc.server.max_pending_requests_hard_limit", 8000),\n',
        '        ("grpc.server.max_pending_requests_hard_limit", 1 << 30),\n',
        "server/access/test_isolation.py::test_pending_calls_are_bounded_as_the_page_says",
    ),
    fault(
        "health watches are not bounded",
        f"{SERVER}/ops/health.py",
        "self._watches[address] >= MAX_WATCHES - under_way",
        "False",
        "server/ops/test_health_bounds.py::test_open_watches_are_bounded_and_closed_ones_make_room",
    ),
    fault(
        "health calls without their message are not bounded",
        f"{SERVER}/ops/health.py",
        "        if len(self._unread) >= MAX_UNREAD:\n",
        "        if False:\n",
        "server/ops/test_health_bounds.py::"
        "test_calls_without_their_message_make_room_for_those_with_it",
    ),
    # ------------------------------------------------------------------ the metrics port
    fault(
        "scrapes have no pause between them",
        f"{SERVER}/ops/endpoint.py",
        "                self._sleep(max(0.0, self._next - self._now()))\n",
        "",
        f"{_ENDPOINT}::test_scrapes_take_a_bounded_part_of_a_processor",
    ),
    fault(
        "a scrape of before a request serves it",
        f"{SERVER}/ops/endpoint.py",
        "self._last is None or self._last.number < wanted",
        "self._last is None",
        f"{_ENDPOINT}::test_one_scrape_that_began_after_them_serves_all_requests_that_wait",
    ),
    fault(
        "connections of the metrics port have no rate",
        f"{SERVER}/ops/endpoint.py",
        "        self._rate.wait()  # further connections stay in the queue of the socket\n",
        "",
        f"{_ENDPOINT}::test_each_connection_waits_for_its_turn",
    ),
    fault(
        "a half request that is ended is served",
        f"{SERVER}/ops/endpoint.py",
        "super().parse_request() and self.server.arrived(self.connection)",
        "super().parse_request()",
        f"{_ENDPOINT}::test_a_half_request_that_is_ended_is_not_served",
    ),
)
