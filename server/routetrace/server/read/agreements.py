"""Agreement that trainers report: checks of a report, and pages of the reports of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf

from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import MAX_LAYERS, MAX_STEP, check_id, is_text
from routetrace.server.index.agreements import Agreements
from routetrace.server.index.journal import Journal
from routetrace.server.index.records.record import encode_agreement
from routetrace.server.read.checks import at_most
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum bytes of a report, versions and traces in it, and characters of its diagnosis.
_MAX_REPORT_BYTES = 64 << 10
_MAX_VERSIONS = 256
_MAX_TRACES = 10
_MAX_DIAGNOSIS = 1000

#: Bytes of a page after which no further step is added: serializing it holds the event loop.
_PAGE_BYTES = 256 << 10
_LONGEST_PAGE_TOKEN = 20


def check_report(report: pb.AgreementReport) -> None:
    """Raise InvalidArgument if a field of a report has an invalid value."""
    at_most("report", report.ByteSize(), _MAX_REPORT_BYTES)
    at_most("step", report.step, MAX_STEP)
    check_id("reporter", report.reporter)
    at_most("by_layer", len(report.by_layer), MAX_LAYERS)
    at_most("by_version", len(report.by_version), _MAX_VERSIONS)
    _check_keys("by_layer", [layer.layer_id for layer in report.by_layer], MAX_LAYERS)
    _check_keys("by_version", [version.weight_version for version in report.by_version], inf)
    for layer in report.by_layer:
        _check_choices(layer.choices)
    for version in report.by_version:
        _check_choices(version.choices)
    for part, of in (
        ("differing_tokens", "tokens"),
        ("present_cells", "planned_cells"),
        ("fallback_tokens", "placed_tokens"),
    ):
        at_most(part, getattr(report, part), getattr(report, of))
    at_most("trace_ids", len(report.trace_ids), _MAX_TRACES)
    for trace_id in report.trace_ids:
        check_id("trace_ids", trace_id)
    if len(report.diagnosis) > _MAX_DIAGNOSIS or not is_text(report.diagnosis):
        raise InvalidArgument(
            field="diagnosis",
            value=f"{len(report.diagnosis)} characters",
            expected=f"at most {_MAX_DIAGNOSIS}",
        )


def _check_keys(field: str, keys: Sequence[int], limit: float) -> None:
    if any(a >= b for a, b in pairwise(keys)):
        raise InvalidArgument(field=field, value=keys[:8], expected="strictly ascending")
    if keys and keys[-1] >= limit:
        raise InvalidArgument(field=field, value=keys[-1], expected=f"layer ids below {limit}")


def _check_choices(choices: pb.Choices) -> None:
    at_most("choices.differing", choices.differing, choices.cells)
    at_most("choices.matched", choices.matched, choices.chosen)


async def report_agreement(journal: Journal, run: str, report: pb.AgreementReport) -> None:
    """Store a report.

    Raises:
        InvalidArgument: if a field has an invalid value, or the step has no room for it.
    """
    check_report(report)
    now = journal.clock.now()
    report.reported_ms = int(now * 1000)
    room = journal.state.agreements.room(run, report.step, report.reporter)
    if report.ByteSize() > room:
        raise InvalidArgument(
            field="report",
            value=f"{report.ByteSize()} bytes",
            expected=f"at most {max(0, room)} beside those of the other reporters of this step",
            remedy="add the agreements of ranks, and report their sum",
        )
    await journal.append(encode_agreement(now, run, report))


def first_step(request: pb.ListAgreementRequest) -> int:
    """Return the first step of a page."""
    token = request.page_token or str(request.start)
    if not (len(token) <= _LONGEST_PAGE_TOKEN and token.isascii() and token.isdigit()):
        raise InvalidArgument(
            field="page_token", value=token, expected="next_page_token of an earlier response"
        )
    return int(token)


def page(agreements: Agreements, request: pb.ListAgreementRequest) -> pb.ListAgreementResponse:
    """Return a page of the reports of a run, of whole steps."""
    response = pb.ListAgreementResponse()
    size = 0
    for step in agreements.steps(request.run, first_step(request), request.stop or MAX_STEP + 1):
        if size > _PAGE_BYTES:
            response.next_page_token = str(step)
            break
        for report in agreements.of(request.run, step):
            response.reports.append(pb.AgreementReport.FromString(report.message))
            size += len(report.message)
    return response


def merged(pages: Iterable[pb.ListAgreementResponse]) -> pb.ListAgreementResponse:
    """Return one page of those of the workers of a server, which begin at the same step.

    Of two reports of the same reporter for the same step, the newer one counts.
    """
    pages = [*pages]
    tokens = [int(page.next_page_token) for page in pages if page.next_page_token]
    stop = min(tokens, default=MAX_STEP + 1)
    newest: dict[tuple[int, str], pb.AgreementReport] = {}
    for report in (report for page in pages for report in page.reports):
        key = report.step, report.reporter
        if report.step < stop and (
            key not in newest or newest[key].reported_ms < report.reported_ms
        ):
            newest[key] = report
    response = pb.ListAgreementResponse()
    size, last = 0, -1
    for key, report in sorted(newest.items()):
        if key[0] != last and size > _PAGE_BYTES:
            stop = key[0]
            break
        response.reports.append(report)
        size += report.ByteSize()
        last = key[0]
    if stop <= MAX_STEP:
        response.next_page_token = str(stop)
    return response
