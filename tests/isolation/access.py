"""Faults of tokens: their scopes, runs and engines, and their revocation."""

from __future__ import annotations

from oracle.mutations import SERVER
from regressions.judging import fault

_ACCESS = f"{SERVER}/access"
_READ_ENDS = (
    "server/access/test_isolation.py::test_a_read_that_waits_ends_when_its_token_is_revoked"
)
_STREAM_ENDS = "server/access/test_tokens.py::test_a_stream_ends_when_its_token_is_revoked"
_FOREIGN = "server/access/test_tokens.py::test_a_token_of_one_run_does_nothing_to_another"
_FEEDS = "server/access/test_isolation.py::test_a_token_feeds_its_engines_and_runs_alone"
_SCOPES = "server/access/test_isolation.py::test_the_scope_of_each_method_is_that_of_the_page"
_LEASES = "server/access/test_isolation.py::test_a_token_with_scope_read_shortens_no_lease"
_PATTERNS = "server/access/test_isolation.py::test_names_and_patterns_of_runs"

#: The line of a call about a run, or of a waiting read that is checked again.
_READ_CHECK = '        self._checks.call(context, "read", request.run)\n'
_AGAIN = (
    "            await self._admission.pace.step(owner)\n"
    '            self._checks.call(context, "read", request.run)'
    "  # a token may be revoked meanwhile\n"
)

ACCESS = (
    # ------------------------------------------------------------------ revoked tokens
    fault(
        "a waiting read is not checked again",
        f"{SERVER}/read/finding.py",
        f"{_AGAIN}\n    async def find_to_follow(",
        "            await self._admission.pace.step(owner)\n\n    async def find_to_follow(",
        f"{_READ_ENDS}[get]",
    ),
    fault(
        "a follower that waits for its trace is not checked again",
        f"{SERVER}/read/finding.py",
        f"{_AGAIN}\n    async def changed(",
        "            await self._admission.pace.step(owner)\n\n    async def changed(",
        f"{_READ_ENDS}[follow]",
    ),
    fault(
        "a follower of a trace is not checked again",
        f"{SERVER}/read/following.py",
        '            self._checks.call(context, "read", request.run)'
        "  # a token may be revoked meanwhile\n",
        "",
        _STREAM_ENDS,
    ),
    fault(
        "a watch is not checked again",
        f"{SERVER}/read/watching.py",
        "            self._check()\n",
        "",
        "system/test_watch.py::test_it_ends_when_its_token_is_revoked",
    ),
    fault(
        "a waiting bind is not checked again",
        f"{SERVER}/ingest/service.py",
        '            self._access.check(context, "ingest", run, engine_id)\n',
        "",
        "system/test_budgets.py::test_a_waiting_bind_ends_when_its_token_is_revoked",
    ),
    fault(
        "an agent's stream is not checked again",
        f"{SERVER}/ingest/service.py",
        '                self._access.check(context, "ingest", key.run, key.engine_id)\n',
        "",
        _STREAM_ENDS,
    ),
    fault(
        "revoked tokens stay valid",
        f"{_ACCESS}/tokens.py",
        "        if time.monotonic() >= self._look_at:\n            self._refresh()\n",
        "",
        f"{_READ_ENDS}[get]",
    ),
    fault(
        "an expired token is accepted",
        f"{_ACCESS}/tokens.py",
        "token.expires <= time.time()",
        "token.expires <= 0",
        "server/access/test_tokens.py::test_without_a_token_no_message_is_parsed",
    ),
    # ------------------------------------------------------------------ scopes
    fault(
        "a token with scope read may also delete",
        f"{_ACCESS}/tokens.py",
        "frozenset(scopes), tuple(runs)",
        'frozenset([*scopes, "admin"] if "read" in scopes else scopes), tuple(runs)',
        "server/access/test_tokens.py::test_without_its_scope_no_message_is_parsed",
    ),
    fault(
        "the scope of a deletion is read",
        f"{_ACCESS}/control.py",
        '"/routetrace.v1.TraceService/DeleteTrace": "admin"',
        '"/routetrace.v1.TraceService/DeleteTrace": "read"',
        _SCOPES,
    ),
    fault(
        "the scope to forget an engine is read",
        f"{_ACCESS}/control.py",
        '"/routetrace.v1.TraceService/ForgetEngine": "admin"',
        '"/routetrace.v1.TraceService/ForgetEngine": "read"',
        _SCOPES,
    ),
    fault(
        "messages are parsed before the scope is checked",
        f"{_ACCESS}/control.py",
        "        if scope not in token.scopes and not method.startswith(_OPEN_TO_ANY_TOKEN):\n"
        '            raise self._denied(token, "scopes", scope)\n',
        "",
        "server/access/test_tokens.py::test_without_its_scope_no_message_is_parsed",
    ),
    fault(
        "a token with scope read shortens a lease",
        f"{SERVER}/read/service.py",
        'refuse = None if self._access.may(context, "admin", request.run) else check',
        "refuse = None",
        _LEASES,
    ),
    fault(
        "a token with scope read shortens a lease of a spread run",
        f"{SERVER}/read/spread_catalog.py",
        "                    if any(ttl < part.left for part in answer.glances):\n"
        "                        refuse()\n",
        "                    pass\n",
        _LEASES,
    ),
    fault(
        "a lease that is lengthened after the check is shortened",
        f"{SERVER}/read/catalog.py",
        "encode_renew(now, run, part, ttl, keep_longer=renewal.keep_longer)",
        "encode_renew(now, run, part, ttl)",
        "server/retention/test_judged.py::test_a_lease_that_is_lengthened_after_the_check_stays",
    ),
    # ------------------------------------------------------------------ runs and engines
    fault(
        "any token covers any run",
        f"{_ACCESS}/control.py",
        '        if not token.covers(run):\n            raise self._denied(token, "runs", run)\n',
        "",
        _FOREIGN,
    ),
    fault(
        "a pattern covers all runs with the same prefix",
        f"{_ACCESS}/tokens.py",
        "any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)",
        'any(name.startswith(pattern.rstrip("*")) for pattern in patterns)',
        _PATTERNS,
    ),
    fault(
        "patterns of runs ignore case",
        f"{_ACCESS}/tokens.py",
        "fnmatch.fnmatchcase(name, pattern)",
        "fnmatch.fnmatchcase(name.lower(), pattern.lower())",
        _PATTERNS,
    ),
    fault(
        "any token opens a stream in any run",
        f"{SERVER}/ingest/service.py",
        'self._access.check(context, "ingest", first.run, first.engine_id)',
        "self._access.owner_of(context)",
        _FEEDS,
    ),
    fault(
        "a token that names engines opens another one",
        f"{SERVER}/ingest/service.py",
        'self._access.check(context, "ingest", first.run, first.engine_id)',
        'self._access.check(context, "ingest", first.run)',
        _FEEDS,
    ),
    fault(
        "a token that names engines binds blocks of another one",
        f"{SERVER}/ingest/service.py",
        'self._access.check(context, "ingest", request.run, request.engine_id)',
        'self._access.check(context, "ingest", request.run)',
        _FEEDS,
    ),
    fault(
        "a token that names engines forgets another one",
        f"{SERVER}/read/run_calls.py",
        '        self._access.check(context, "admin", request.run, request.engine_id)\n',
        "",
        _FEEDS,
    ),
    fault(
        "the history of a run is open to any token",
        f"{SERVER}/read/run_calls.py",
        f"{_READ_CHECK}        return await self._catalog(request.run).history(request)\n",
        "        return await self._catalog(request.run).history(request)\n",
        _FOREIGN,
    ),
    fault(
        "a token reports agreement in a run that it does not cover",
        f"{SERVER}/read/run_calls.py",
        f"{_READ_CHECK}        await report_agreement(",
        "        await report_agreement(",
        _FOREIGN,
    ),
    fault(
        "errors name the runs of other tokens",
        f"{_ACCESS}/control.py",
        "        return sorted(filter(token.covers, runs))\n",
        "        return sorted(runs)\n",
        "server/access/test_isolation.py::test_names_of_runs_are_those_of_the_token",
    ),
)
