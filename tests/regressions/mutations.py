"""Brings faults of docs/bugs-found.md back, one at a time; a test that the page names must fail.

python -m regressions.mutations           in tests/
python -m regressions.mutations --none    the same tests in a copy that is not broken: all must pass

These are faults that the models do not drive: of shortages of memory, restarts, images, streams.
"""

from __future__ import annotations

import sys

from oracle.mutations import AGENT, SERVER
from regressions.judging import fault, run

CLIENT = "client/routetrace/client/_core"

FAULTS = (
    fault(
        "slots of a shortage are not reported at its end",
        f"{AGENT}/pipeline/framer.py",
        "        if not self._short:\n            self.clear_unknown()\n\n    @property\n",
        "\n    @property\n",
        "agent/test_framer.py::"
        "test_changes_of_slots_in_a_shortage_are_reported_at_its_end_and_at_a_flush",
    ),
    fault(
        "slots of a shortage are not reported at a flush",
        f"{AGENT}/pipeline/intake.py",
        "        self.flush()\n        self._framer.clear_unknown()\n",
        "        self.flush()\n",
        "system/test_shortage.py::test_slots_written_in_a_shortage_have_no_former_rows",
    ),
    fault(
        "a request of a shortage costs the whole map later",
        f"{AGENT}/pipeline/framer.py",
        "        self._slots_unknown |= self._short\n",
        "        self._slots_unknown = True\n",
        "agent/test_framer.py::test_a_request_of_a_shortage_costs_its_own_blocks_alone_later",
    ),
    fault(
        "an unseen request is not in a snapshot",
        f"{SERVER}/index/writer.py",
        "        if source.forgotten:  # a request without a trace still holds blocks\n",
        "        if False:\n",
        "server/index/test_state.py::test_an_unseen_request_that_rewinds_leaves_no_row_behind",
    ),
    fault(
        "retirements take what changed since it was chosen",
        f"{SERVER}/index/control.py",
        "        if trace and 0 < change.judged < trace.last_record:\n",
        "        if False:\n",
        "server/retention/test_judged.py::test_what_changed_since_it_was_chosen_stays",
    ),
    fault(
        "an expired trace goes on in the one that begins again",
        f"{SERVER}/index/state.py",
        "        self.trace(key, now)  # an expired one must not become part of the new one\n",
        "",
        "server/index/test_deletion.py",
    ),
    fault(
        "a writer whose stream opens counts as silent",
        f"{SERVER}/index/agents.py",
        "        if key in self._opening:\n            return 0.0\n",
        "",
        "server/retention/test_retention.py::test_an_agent_that_connects_during_a_sweep_is_there",
    ),
    fault(
        "an agent whose engine is forgotten as it connects is refused for good",
        f"{SERVER}/ingest/fencing.py",
        "        if current is None and not session.closed:\n",
        "        if False:\n",
        "server/retention/test_retention.py::test_an_agent_whose_engine_is_forgotten_as_it_connects_comes_back",
    ),
    fault(
        "a bind waits for the epoch that it found first",
        f"{SERVER}/ingest/service.py",
        "        while True:\n            writers = self._state.engine_writers(run, engine_id)\n",
        "        writers = self._state.engine_writers(run, engine_id)\n        while True:\n",
        "server/ingest/test_server.py::test_a_bind_waits_for_the_newest_epoch_of_its_engine",
    ),
    fault(
        "a callback that raises leaves its waiters asleep",
        f"{SERVER}/index/journal.py",
        "            try:\n                before(result, error)\n            finally:\n"
        "                if not settled.done():\n                    settled.set_result(None)\n",
        "            before(result, error)\n"
        "            if not settled.done():\n                settled.set_result(None)\n",
        "server/index/test_state.py::test_a_callback_that_raises_keeps_nobody_waiting",
    ),
    fault(
        "a chunk that is refused twice keeps its epoch",
        f"{AGENT}/transport/stream.py",
        "            self._outbox.forget_requests(entry)\n"
        "            self._epoch = 0\n            self.close()\n",
        "            pass\n",
        "system/test_refused_chunks.py",
    ),
    fault(
        "an agent waits without limit for the answer to its first message",
        f"{AGENT}/transport/stream.py",
        "self._clock() >= self._welcome_by",
        "False",
        "agent/test_trouble.py::test_a_server_that_does_not_answer_the_hello_is_called_again",
    ),
    fault(
        "an error detail that does not parse ends the sender",
        f"{AGENT}/transport/connection.py",
        "with suppress(DecodeError):",
        "with suppress(KeyError):",
        "agent/test_ends.py::test_an_error_detail_that_does_not_parse_is_an_error_like_others",
    ),
    fault(
        "a call that gRPC cancelled is named by its status alone",
        "proto/routetrace/common/target.py",
        're.compile("(?i)^cancelled: cancelled$")',
        're.compile("(?i)^canceled: canceled$")',
        "agent/test_ends.py::test_a_stream_that_the_server_cancelled_is_named_in_words",
    ),
    fault(
        "a client does not leave a server that stops for the next one",
        f"{CLIENT}/route.py",
        "code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)",
        "code is grpc.StatusCode.DEADLINE_EXCEEDED",
        "client/test_route.py::test_failures_that_lead_to_the_next_target",
    ),
    fault(
        "a flush waits for a background that was given up",
        f"{AGENT}/agent.py",
        "self._closed or self._abandoned or self._link.leftover",
        "self._closed or self._link.leftover",
        "agent/test_ends.py::test_a_flush_does_not_wait_for_a_background_that_was_given_up",
    ),
    fault(
        "a background that died is the last one",
        f"{AGENT}/supervisor.py",
        "self.gave_up = last or (",
        "self.gave_up = True or (",
        "agent/test_restart.py::"
        "test_a_killed_background_is_reported_once_and_later_requests_are_sent",
    ),
    fault(
        "the next background begins at the front of the ring",
        f"{AGENT}/step_path/ring.py",
        "self._place = (self._read - self._cursors[_FRONT]) % size",
        "self._place = 0",
        "agent/test_ring.py::test_another_consumer_goes_on_wherever_one_is_killed",
    ),
    fault(
        "rows that a dead background held count as in flight",
        f"{AGENT}/counters.py",
        "    words[Word.AGENT_LOST] += lost\n",
        "",
        "system/test_restarts.py::test_a_request_whose_begin_was_lost_gets_no_row",
    ),
    fault(
        "drops of a record count before it is consumed",
        f"{AGENT}/worker.py",
        "        if self._taking:\n            self._drops.append((word, rows))\n        else:\n"
        "            self._words[word] += rows\n",
        "        self._words[word] += rows\n",
        "agent/test_worker.py::test_a_record_counts_whole_or_not_at_all",
    ),
    fault(
        "late rows of requests of before leave the slots that they may have written",
        f"{AGENT}/pipeline/framer.py",
        "(handle in self._unseen and not self._shares)",
        "handle in self._unseen",
        "agent/test_framer.py::test_a_late_row_of_a_request_of_before_makes_shared_slots_unknown",
    ),
    fault(
        "a block that is shared in part counts as new",
        f"{AGENT}/pipeline/framer.py",
        "            self._owners.allocate(blocks[cached:])\n",
        "            self._owners.allocate(blocks)\n",
        "agent/test_framer.py::"
        "test_a_resume_without_memory_into_a_block_shared_in_part_makes_it_not_new",
    ),
    fault(
        "rows of an epoch whose background died are called corrupt",
        f"{SERVER}/index/control.py",
        "agent_lost if change.restarted else corrupt",
        "corrupt",
        "system/test_restarts.py::test_rows_that_a_lost_call_took_back_are_not_served",
    ),
    fault(
        "close reports no lost rows",
        f"{AGENT}/link.py",
        "        if rows or self.words[Word.QUEUED_BYTES] or self.ring.read < self.ring.written:\n",
        "        if False:\n",
        "agent/test_restart.py::test_close_reports_rows_of_a_background_that_is_stopped",
    ),
    fault(
        "close gives a background that starts no time",
        f"{AGENT}/agent.py",
        "            self._link.wait_until_up(time.monotonic() + _START_S)\n",
        "            pass\n",
        "agent/test_restart.py::test_a_short_script_on_a_busy_machine_loses_nothing",
    ),
    fault(
        "close writes the backlog without the lock",
        f"{AGENT}/agent.py",
        "            with self._lock:  # a flush() under way in another thread drains as well\n",
        "            if True:\n",
        "agent/test_ends.py::test_close_writes_the_backlog_under_the_lock",
    ),
    fault(
        "closing a client leaves a pause between attempts asleep",
        "client/routetrace/client/_shells/aio_drive.py",
        "            pause.get_loop().call_soon_threadsafe(_resolve, pause)\n",
        "            pass\n",
        "client/calls/test_life.py::test_closing_ends_a_pause_between_attempts_of_a_task",
    ),
    fault(
        "a follower finds its request by its place",
        f"{SERVER}/read/following.py",
        "            last = trace.join.request_of(source)\n",
        "            last = trace.join.requests[incarnation.request.index]\n",
        "server/read/test_followers.py",
    ),
    fault(
        "numbers of requests shift when the oldest are dropped",
        f"{SERVER}/index/traces/trace.py",
        "        self.num_dropped += 1\n",
        "",
        "server/index/test_joins.py::test_requests_keep_their_numbers_when_the_oldest_are_dropped",
    ),
    fault(
        "a request is dropped at one shard alone",
        f"{SERVER}/index/traces/trace.py",
        "        dropped = [source for request in requests for source in request.sources]\n",
        "        dropped = [source for request in requests for source in request.sources[:1]]\n",
        "server/index/test_joins.py::test_requests_keep_their_numbers_when_the_oldest_are_dropped",
    ),
    fault(
        "a hand-over whose id several requests ended with counts",
        f"{SERVER}/index/traces/joins.py",
        "            if len(ended) <= 2 and len(others := self.named(request)) == 1:\n"
        "                [giver] = others\n",
        "            if others := self.named(request):\n                giver = others[0]\n",
        "server/index/test_joins.py::test_a_hand_over_without_a_name_of_its_own_proves_nothing",
    ),
    fault(
        "two requests that handed over go on from each other",
        f"{SERVER}/index/traces/joins.py",
        "                if giver.handed_over and request.order > giver.order:\n",
        "                if giver.handed_over:\n",
        "server/index/test_joins.py::test_a_request_that_handed_over_is_an_incarnation_until_another_goes_on_from_it",
    ),
    fault(
        "a request whose KV was taken over by name stays an incarnation",
        f"{SERVER}/index/traces/joins.py",
        "            giver.successor = giver.successor or taker\n",
        "            pass\n",
        "server/index/test_joins.py::test_a_request_that_handed_over_is_an_incarnation_until_another_goes_on_from_it",
    ),
    fault(
        "rows behind a hand-over come before what the owner computed or lost",
        f"{SERVER}/index/traces/lineage.py",
        "        return [(a, min(b, first)) for a, b in begun if a < first]\n",
        "        return begun\n",
        "server/index/test_joins.py::test_what_a_decode_engine_computed_itself_is_its_own",
    ),
    fault(
        "rows of passes whose samples vLLM drops count",
        f"{AGENT}/engines/vllm/schedule.py",
        "            if self._drafts or not delivered:\n",
        "            if self._drafts:\n",
        "engines/test_vllm_halves.py::test_a_sample_that_vllm_drops_does_not_count",
    ),
    fault(
        "unknown KV of one rank before a loss of another",
        f"{SERVER}/rows/gaps.py",
        "        notes += _unknown_kv(sources)",
        "        notes[:0] = _unknown_kv(sources)",
        "server/index/test_joins.py::"
        "test_a_loss_at_one_rank_comes_before_kv_that_another_does_not_know",
    ),
    fault(
        "KV that was handed over counts before a pass shows where the owner's own begin",
        f"{SERVER}/index/traces/lineage.py",
        "        return first if over or first != FOREVER else 0\n",
        "        return first\n",
        "server/index/test_joins.py::test_what_a_decode_engine_computed_itself_is_its_own",
    ),
    fault(
        "tokens that differ do not disprove a hand-over",
        f"{SERVER}/index/traces/lineage.py",
        "            if mine[position] != theirs[position]:\n",
        "            if False:\n",
        "server/index/test_joins.py::test_tokens_that_differ_disprove_a_hand_over",
    ),
    fault(
        "the first attempt of who handed over counts",
        f"{SERVER}/index/traces/lineage.py",
        "        last = max(len(s.attempts) for s in giver.sources) - 1\n",
        "        last = 0\n",
        "server/index/test_joins.py::test_the_kv_of_the_last_attempt_is_handed_over",
    ),
    fault(
        "a later attempt comes before the KV that the first one loaded",
        f"{SERVER}/index/traces/lineage.py",
        "    yield Part(owner, start, stop, (first,))\n",
        "    yield Part(owner, start, stop, (first, *later))\n",
        "server/index/test_joins.py::test_an_owner_that_was_preempted_sampled_from_what_it_had_loaded",
    ),
    fault(
        "an attempt that sampled nothing counts",
        f"{SERVER}/index/traces/lineage.py",
        "    first, *later = owner.attempts_that_sampled\n",
        "    first, *later = range(max(len(s.attempts) for s in owner.sources))\n",
        "server/index/test_joins.py::test_an_attempt_that_sampled_nothing_does_not_count",
    ),
    fault(
        "an attempt that ended before a token was sampled from it gives rows",
        f"{SERVER}/index/traces/lineage.py",
        "(self._had(attempt) or most + 1 if found else self.prompt_len)",
        "(0 if found else self.prompt_len)",
        "server/index/test_lost.py::test_an_attempt_that_no_token_was_sampled_from_gives_no_row",
    ),
    fault(
        "the last attempt gives rows before a token was sampled from it",
        f"{SERVER}/index/traces/lineage.py",
        "        if not found or computed >= (self._had(last) or most + 1):\n",
        "        if True:\n",
        "server/index/test_lost.py::test_an_attempt_that_no_token_was_sampled_from_gives_no_row",
    ),
    fault(
        "an attempt that computed more than was counted before has sampled",
        f"{SERVER}/index/traces/lineage.py",
        "computed >= (self._had(last) or most + 1)",
        "computed > most",
        "server/index/test_lost.py::test_drafts_that_were_accepted_after_a_preemption_count_as_sampled",
    ),
    fault(
        "how many tokens a resumed request has is not repeated",
        f"{AGENT}/transport/ledger.py",
        "builder.op(OpKind.RESUME, request_id, blocks=blocks, value=had)",
        "builder.op(OpKind.RESUME, request_id, blocks=blocks)",
        "agent/test_pressure.py::test_a_server_without_memory_is_told_how_far_earlier_attempts_came",
    ),
    fault(
        "a row that comes after its preemption is not lost",
        f"{SERVER}/index/traces/sources.py",
        "        if (start := max(ends, default=0)) < stop:\n",
        "        if (start := max(ends, default=0)) < 0:\n",
        "server/index/test_lost.py::test_a_row_that_comes_after_its_preemption_is_of_no_later_pass",
    ),
    fault(
        "a prefill is no rival of a sibling that sampled the same token",
        f"{SERVER}/index/traces/prefix_tree.py",
        "        if min(self._shortest[node][1], self._handed_over[node]) >= position:\n",
        "        if self._shortest[node][1] >= position:\n",
        "server/index/test_joins.py::test_tokens_that_a_prefill_sampled_are_of_no_sibling",
    ),
    fault(
        "a hand-over with a name does not say whose tokens they are",
        f"{SERVER}/index/traces/joins.py",
        "        if self._givers.get(request.index) in [",
        "        if None in [",
        "server/index/test_joins.py::test_tokens_that_a_prefill_sampled_are_of_no_sibling",
    ),
    fault(
        "an answer with the same prompt is no rival",
        f"{SERVER}/index/traces/joins.py",
        "        rivals = self._alike(only, request, proven)\n",
        "        rivals = []\n",
        "server/index/test_joins.py::test_an_answer_that_was_thrown_away_is_not_gone_on_from",
    ),
    fault(
        "a draft is confirmed in a block that was given away",
        f"{SERVER}/index/apply.py",
        "            self.slots.erase(source.blocks[new:])\n",
        "            self.slots.forget_blocks(source.blocks[new:])\n",
        "server/index/test_slots.py::test_a_draft_is_not_confirmed_in_a_block_that_was_given_away",
    ),
    fault(
        "rows are bound that were copied after the last step",
        f"{SERVER}/index/slot_map.py",
        "self._run_again(self._run[held], step + 1), self._nth[held]",
        "self._run[held], self._nth[held]",
        "server/index/test_slots.py::"
        "test_a_bound_request_has_no_rows_that_were_copied_in_after_its_last_step",
    ),
    fault(
        "a lost chunk leaves rows that it may have taken back",
        f"{SERVER}/index/traces/sources.py",
        "            self.remove(0)\n            self.lose(0, FOREVER, reason)\n",
        "            self.remove(self.attempts[-1].end - self.tentative)\n",
        "server/index/test_lost.py::test_no_row_of_a_pass_that_a_lost_chunk_may_have_taken_back",
    ),
    fault(
        "rows of a request whose begin was lost are served",
        f"{SERVER}/index/apply.py",
        "                if not source.placed:\n"
        "                    self._forget(source, position, FOREVER)\n"
        "                    continue\n",
        "",
        "server/index/test_lost.py::test_a_request_whose_begin_was_lost_has_no_rows_but_an_end",
    ),
    fault(
        "a request without track leaves the slots that it writes",
        f"{SERVER}/index/apply.py",
        "                    self._forget(source, position, FOREVER)\n"
        "                    continue\n",
        "                    continue\n",
        "server/index/test_lost.py::test_a_request_without_track_clears_the_slots_that_it_writes",
    ),
    fault(
        "a new epoch of a boot leaves the rows of live requests",
        f"{SERVER}/index/control.py",
        "    if old and old.boot_id == change.boot_id:",
        "    if False:",
        "server/index/test_lost.py::test_no_row_of_an_epoch_that_a_later_one_of_the_boot_replaces",
    ),
    fault(
        "the largest number of several preemptions counts",
        f"{SERVER}/index/traces/lineage.py",
        "            computed = min(stops, default=FOREVER)",
        "            computed = max(stops, default=FOREVER)",
        "server/index/test_lost.py::"
        "test_of_several_preemptions_of_an_attempt_the_smallest_number_counts",
    ),
    fault(
        "a follower does not get rows that come back",
        f"{SERVER}/read/following.py",
        "    sent.clear()",
        "    pass",
        "server/read/test_unsent.py::test_who_follows_ends_with_the_rows_that_are_served",
    ),
    fault(
        "a join outlives a preemption",
        f"{SERVER}/index/apply.py",
        "                    self._rejoin(key)\n                elif kind == RESUME:",
        "                elif kind == RESUME:",
        "server/index/test_lost.py::test_an_answer_is_that_of_a_snapshot_after_a_change_of_slots",
    ),
    fault(
        "a row that who handed over has lost has the reason of its loss",
        f"{SERVER}/rows/gaps.py",
        "                _KV_UNKNOWN if part.given else span.provenance,",
        "                span.provenance,",
        "server/index/test_lost.py::test_a_row_that_who_handed_over_has_lost_is_of_unknown_kv",
    ),
    fault(
        "a resume without memory leaves slots of shared blocks that it writes",
        f"{AGENT}/pipeline/framer.py",
        'array("I", block_ids[:shared].tobytes()), False',
        'array("I"), True',
        "agent/test_framer.py::"
        "test_what_a_resume_without_memory_writes_into_shared_blocks_is_not_known",
    ),
    fault(
        "the ledger replays an unreported preemption as one at token 0",
        f"{AGENT}/transport/ledger.py",
        "request.stops.append(request.preempted)",
        "request.stops.append(request.preempted or 0)",
        "agent/test_pressure.py::"
        "test_a_server_without_memory_is_told_how_far_earlier_attempts_came",
    ),
    fault(
        "rows before a resume that was not reported stay",
        f"{AGENT}/pipeline/framer.py",
        "                self._emitter.lose(request, 0, 0, pb.MISSING_REASON_QUEUE_FULL)\n"
        "                request.record(",
        "                request.record(",
        "agent/test_framer.py::test_rows_before_a_resume_that_cannot_be_reported_are_taken_back",
    ),
    fault(
        "where cached tokens end is not in a snapshot",
        f"{SERVER}/index/traces/sources.py",
        "    if source.loaded[1]:\n",
        "    if source.external:\n",
        "server/index/test_lost.py::test_where_cached_tokens_end_comes_back",
    ),
    fault(
        "of equal candidates the first is continued",
        f"{SERVER}/index/traces/joins.py",
        "            before, proven, _, _ = self.continued(owner)\n",
        "            before, proven, equals, _ = self.continued(owner)\n"
        "            before = before or (equals[0] if equals else None)\n",
        "server/index/test_joins.py::test_of_equal_candidates_the_one_behind_the_last_slot_is_continued",
    ),
    fault(
        "the next turn owns the tokens of answers that may have sampled them",
        f"{SERVER}/index/traces/joins.py",
        "Owned(owner, max(0, proven - 1), stop,",
        "Owned(owner, 0, stop,",
        "system/test_reads_by_tokens.py::test_equal_answers_that_stand_in_a_prompt_have_no_rows_of_it",
    ),
    fault(
        "token ids prove a request that has them and more in its prompt",
        "client/routetrace/client/alignment.py",
        "count <= (facts.prompt_len or 0)",
        "count == facts.prompt_len",
        "system/test_reads_by_tokens.py::test_a_cut_answer_is_of_no_chain_that_was_given_its_tokens",
    ),
    fault(
        "slots of the prompt tell equal candidates apart",
        f"{SERVER}/index/traces/joins.py",
        " if position >= candidate.prompt_len else ()",
        "",
        "server/index/test_joins.py::test_of_equal_candidates_the_one_behind_the_last_slot_is_continued",
    ),
    fault(
        "a request that handed over is continued",
        f"{SERVER}/index/traces/prefix_tree.py",
        "            if request.prompt_len and request.handed_over:\n",
        "            if not request.prompt_len:\n",
        "server/index/test_joins.py::test_a_row_of_another_request_is_of_a_pass_that_sampled_what_was_given",
    ),
    fault(
        "a shorter proof is taken for the longest",
        f"{SERVER}/index/traces/prefix_tree.py",
        "            sampled[node] = node if mine else sampled[self._parent[node]]\n",
        "            up = sampled[self._parent[node]]\n"
        "            sampled[node] = up or (node if mine else _ROOT)\n",
        "server/index/test_joins.py::test_a_rollout_goes_on_from_the_tokens_that_its_caller_got",
    ),
    fault(
        "the row at the last token that was kept is that of the request before",
        f"{SERVER}/index/traces/joins.py",
        "min(proven - 1, before.num_rows)",
        "min(proven, before.num_rows)",
        "server/index/test_joins.py::test_a_rollout_goes_on_from_the_tokens_that_its_caller_got",
    ),
    fault(
        "version 0 of an agent of 0.8 is one that a trainer gave",
        f"{SERVER}/index/apply.py",
        "                if not version and not self.writer.says_unknown_versions:\n",
        "                if False:\n",
        "server/index/test_told.py::test_version_0_is_unknown_in_chunks_of_agents_that_cannot_say_so",
    ),
    fault(
        "rows stand in for KV that may be of other weights",
        f"{AGENT}/step_path/kv_version.py",
        "            and (not external or self._is_outside(version))\n",
        "",
        "server/read/test_prefixes.py::test_kv_whose_version_is_not_known_gets_none",
    ),
    fault(
        "rows of another model, or of one that nobody named, stand in",
        f"{SERVER}/rows/prefixes.py",
        "if attempt >= len(source.attempts) or not source.model or source.model != own.model:\n",
        "if attempt >= len(source.attempts):\n",
        "server/read/test_prefixes.py::test_never_of_another_run_or_another_model",
    ),
    fault(
        "a read with a handle takes the former request of its id",
        f"{SERVER}/rows/reader.py",
        "            if not number:\n                raise no_request(trace, nonce)\n",
        "",
        "system/test_handles.py::test_a_read_with_the_handle_of_a_request_waits_for_it",
    ),
    fault(
        "the oldest of too many running requests keeps its slots",
        f"{SERVER}/index/apply.py",
        "            self.slots.forget_run(oldest.blocks, 0, FOREVER)\n",
        "",
        "server/index/test_state.py::test_the_oldest_of_too_many_running_requests_is_lost",
    ),
    fault(
        "an update of weights that failed keeps the version",
        f"{AGENT}/engines/sglang/weights.py",
        "            self._torn = True\n        else:\n            self._session.failed = True\n",
        "            pass\n        else:\n            self._session.failed = True\n",
        "engines/test_sglang.py::test_rows_under_weights_that_nobody_knows_do_not_count",
    ),
    fault(
        "a part of a session makes weights known after one that failed",
        f"{AGENT}/engines/sglang/weights.py",
        "            self._session.failed = True\n        _warn",
        "            pass\n        _warn",
        "engines/test_sglang_weights.py::test_weights_that_are_not_torn_are_whole_and_their_version_is_told",
    ),
    fault(
        "digests leave adapters out",
        "proto/routetrace/codec/records.py",
        "for name in (ADAPTER_LABEL, KV_CACHE_DTYPE_LABEL))",
        "for name in (KV_CACHE_DTYPE_LABEL,))",
        "engines/test_vllm_halves.py::test_rows_of_another_adapter_do_not_stand_in",
    ),
    fault(
        "digests leave the dtype of the KV cache out",
        "proto/routetrace/codec/records.py",
        "for name in (ADAPTER_LABEL, KV_CACHE_DTYPE_LABEL))",
        "for name in (ADAPTER_LABEL,))",
        "engines/test_vllm_halves.py::test_rows_of_another_kv_dtype_do_not_stand_in",
    ),
    fault(
        "an aborted request has a digest at its end alone",
        f"{AGENT}/pipeline/framer.py",
        "        if reason == FinishReason.ABORT:\n",
        "        if False:\n",
        "system/test_cut_rollouts.py::"
        "test_rows_of_all_tokens_that_the_caller_got_are_of_the_passes_that_sampled_them",
    ),
    fault(
        "tokens prove each incarnation that they do not disprove",
        f"{CLIENT}/proof.py",
        "            if proof is Proof.WHOLE or",
        "            if proof is not Proof.DIFFERS or",
        "system/test_reads_by_tokens.py::test_each_answer_is_read_by_its_tokens",
    ),
    fault(
        "a plan takes each incarnation that its tokens do not disprove",
        f"{CLIENT}/fetch.py",
        "search.see(facts) is Proof.WHOLE:",
        "search.see(facts) is not Proof.DIFFERS:",
        "system/test_reads_by_tokens.py::test_each_answer_is_read_by_its_tokens",
    ),
    fault(
        "digests leave images out",
        f"{AGENT}/engines/vllm/inputs.py",
        "            placeholders[:] = _mark(feature.identifier, len(placeholders))\n",
        "            del placeholders\n",
        "engines/test_vllm_halves.py::test_images_that_differ_do_not_prove_the_same_tokens",
    ),
    fault(
        "digests distinguish images by 32 bits",
        f"{AGENT}/engines/vllm/inputs.py",
        'np.frombuffer(blake2b(identifier.encode()).digest(), "<u4")',
        "np.uint32(__import__('zlib').crc32(identifier.encode()))",
        "engines/test_vllm_halves.py::test_images_that_differ_do_not_prove_the_same_tokens",
    ),
    fault(
        "images that are only counted count as named",
        f"{AGENT}/engines/vllm/inputs.py",
        "        if features and not self.named:\n            return None\n",
        "",
        "engines/test_vllm_halves.py::test_images_that_vllm_only_counts_prove_nothing",
    ),
    fault(
        "an agent that is closed does not say so",
        f"{AGENT}/agent.py",
        "                    self._words[Word.CLOSED] = not (self._abandoned or self._replaced)\n",
        "",
        "system/test_closed_agents.py::test_an_agent_is_closed_until_another_one_connects",
    ),
    fault(
        "an agent that another one replaces says that it was closed",
        f"{AGENT}/agent.py",
        "            predecessor._replaced = True\n",
        "",
        "agent/test_trouble.py::test_an_agent_sends_after_the_end_of_the_one_that_it_replaces",
    ),
    fault(
        "an agent whose calls are lost says that it was closed",
        f"{AGENT}/agent.py",
        "not (self._abandoned or self._replaced)",
        "not self._replaced",
        "agent/test_ends.py::test_an_agent_whose_calls_are_lost_does_not_say_that_it_was_closed",
    ),
    fault(
        "a background whose engine died says that the agent was closed",
        f"{AGENT}/worker.py",
        "        told = self._words[Word.CLOSED] and not more and",
        "        told = not more and",
        "agent/test_ends.py::test_the_engine_just_ends",
    ),
    fault(
        "a server that is away is waited for to say that the agent was closed",
        f"{AGENT}/worker.py",
        " and (waits or self._words[Word.CONNECTED])",
        "",
        "agent/test_ends.py::test_nobody_waits_to_tell_a_server_that_is_away_of_a_close_alone",
    ),
    fault(
        "the replacement of a refused chunk does not say that the agent was closed",
        f"{AGENT}/pipeline/chunks.py",
        "new = pb.ChunkHeader(layout=self._layout_proto, closed=old.closed)",
        "new = pb.ChunkHeader(layout=self._layout_proto)",
        "agent/test_ends.py::test_a_close_is_told_again_where_its_chunk_was_refused",
    ),
    fault(
        "requests of an agent that was closed run on",
        f"{SERVER}/index/apply.py",
        "    if chunk.closed:\n",
        "    if False:\n",
        "system/test_closed_agents.py"
        "::test_who_waits_for_a_request_of_a_closed_agent_learns_at_once_that_it_has_no_end",
    ),
    fault(
        "a request whose agent was closed is lost after a restart",
        f"{SERVER}/index/traces/sources.py",
        "        closed=message.closed,\n",
        "",
        "system/test_closed_agents.py"
        "::test_a_closed_agent_stays_closed_over_a_restart_of_the_server",
    ),
    fault(
        "an agent that was closed is gone after a restart",
        f"{SERVER}/index/writer.py",
        "    message.closed = writer.closed\n",
        "",
        "system/test_closed_agents.py"
        "::test_a_closed_agent_stays_closed_over_a_restart_of_the_server",
    ),
    fault(
        "cells behind the close are those of a lost agent",
        f"{SERVER}/index/control.py",
        "            source.lose(last.position, FOREVER, pb.MISSING_REASON_AGENT_CLOSED)\n",
        "            pass\n",
        "system/test_closed_agents.py::test_rows_that_were_lost_before_keep_their_reason",
    ),
    fault(
        "a shard that was closed ends a request that others go on with",
        f"{SERVER}/rows/reader.py",
        "    closed = not reason and all(source.closed for source in sources)\n",
        "    closed = not reason and any(source.closed for source in sources)\n",
        "system/test_closed_agents.py"
        "::test_a_shard_that_is_closed_ends_no_request_that_others_go_on_with",
    ),
    fault(
        "the KV of a request without an end is waited for",
        f"{SERVER}/rows/reader.py",
        "loaded and known.num_tokens and self.is_recent(known.trace)",
        "loaded and self.is_recent(known.trace)",
        "system/test_closed_agents.py::test_nobody_waits_for_the_kv_of_a_request_without_an_end",
    ),
    fault(
        "rows that can no longer come are waited for",
        f"{SERVER}/read/finding.py",
        "        if self._reader.settled(known) or request.wait_for == pb.WAIT_FOR_END:\n",
        "        if request.wait_for == pb.WAIT_FOR_END:\n",
        "system/test_lifecycle.py::test_rows_that_can_no_longer_come_are_not_waited_for",
    ),
    fault(
        "sequences that were in the queue have no end",
        f"{AGENT}/engines/transformers/batching.py",
        "            if request_id not in self._begun:\n",
        "            if False:\n",
        "engines/test_transformers_batching.py::test_a_pass_that_raises_ends_continuous_batching",
    ),
    # ------------------------------------------------------------------ summaries that are kept
    fault(
        "a summary outlives a change of its trace",
        f"{SERVER}/rows/summaries.py",
        "        return kept.changes == trace.changes and (\n",
        "        return (\n",
        "server/read/test_lists.py::test_a_list_says_what_stat_says",
    ),
    fault(
        "a summary outlives the loss of an agent, and its return",
        f"{SERVER}/rows/summaries.py",
        "            kept.growing == FINAL or kept.growing == self._growing(trace)\n",
        "            True\n",
        "server/read/test_summaries.py::test_an_agent_that_is_lost_and_comes_back",
    ),
    fault(
        "a lease that was changed is not in lists",
        f"{SERVER}/rows/summaries.py",
        "own = pb.TraceInfo(trace_id=trace.key[1], expires_ms=int(trace.expires * 1000))",
        "own = pb.TraceInfo(trace_id=trace.key[1])",
        "server/read/test_lists.py::test_a_list_says_what_stat_says",
    ),
    fault(
        "each look at a list views its traces",
        f"{SERVER}/rows/summaries.py",
        "        if kept is None or not self._holds(kept, trace):\n",
        "        if True:\n",
        "server/read/test_lists.py::test_a_second_look_views_no_trace",
    ),
    fault(
        "a page ends where it is full alone",
        f"{SERVER}/read/paging.py",
        "        if self._looked_at == MOST_LOOKED_AT:\n            return False\n"
        "        if self._is_asked_for(trace):\n",
        "        if self._is_asked_for(trace):\n",
        "server/read/test_lists.py::test_a_page_ends_where_few_traces_are_asked_for",
    ),
    # ------------------------------------------------------------------ slots of few blocks
    fault(
        "a block beyond the tables has the slots of the last one in them",
        f"{SERVER}/index/slot_map.py",
        "self._run, self._nth = _longer(self._run, length + 1), _longer(self._nth, length + 1)",
        "self._run, self._nth = _longer(self._run, length), _longer(self._nth, length)",
        "server/index/test_state.py::test_the_slot_map_of_an_engine_that_runs_for_long",
    ),
    fault(
        "a remembered engine has tables of all its blocks",
        f"{SERVER}/index/slot_map.py",
        "        length = max(_LEAST_BLOCKS, 2 * length, highest + 1)\n",
        "        length = _LONG + 1\n",
        "server/index/test_remembered.py::test_an_engine_that_is_gone_takes_little_memory",
    ),
    # ------------------------------------------------------------------ lost power
    fault(
        "what a server left that was killed is not synced",
        f"{SERVER}/store/disk/directory.py",
        "            os.fsync(file)\n",
        "            pass\n",
        "server/store/test_lost_power.py"
        "::test_what_a_killed_process_left_is_durable_before_it_is_served",
    ),
    fault(
        "a snapshot that a killed server left is not synced",
        f"{SERVER}/store/disk/directory.py",
        "    sync_directory(contents.path)\n",
        "",
        "server/store/test_lost_power.py"
        "::test_blocks_are_used_again_once_the_snapshot_that_frees_them_is_durable",
    ),
    fault(
        "the number of partitions is not synced",
        f"{SERVER}/process/partitions.py",
        "os.fsync(file.fileno())",
        "pass",
        "server/store/test_lost_power.py::test_new_directories_are_durable",
    ),
    fault(
        "directories above the partitions are not synced",
        f"{SERVER}/process/partitions.py",
        "            make_directory(partition_dir(data_dir, number))\n",
        "            partition_dir(data_dir, number).mkdir(parents=True, exist_ok=True)\n",
        "server/store/test_lost_power.py::test_new_directories_are_durable",
    ),
    fault(
        "what is left of a commit that failed names blocks that are written",
        f"{SERVER}/store/disk/store.py",
        "        self._log.mend()  # first: what a failed commit left may name free blocks\n",
        "",
        "server/store/test_lost_power.py"
        "::test_what_a_failed_commit_left_names_no_block_that_is_used_again",
    ),
    fault(
        "what is left of a commit that failed names holes",
        f"{SERVER}/store/disk/store.py",
        "            self._log.mend()\n            self._blocks",
        "            self._blocks",
        "server/store/test_lost_power.py"
        "::test_what_a_failed_commit_left_names_no_block_that_is_used_again",
    ),
)

MUTATIONS = tuple(each.mutation for each in FAULTS)


if __name__ == "__main__":
    sys.exit(run(FAULTS, "regressions.mutations", __doc__))
