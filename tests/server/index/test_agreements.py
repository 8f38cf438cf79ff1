"""Agreement of trainers: a plain list of reports in their order is the truth."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.client import Agreement, InvalidArgument, RouteClient
from routetrace.client.agreement import Choices, LogprobSums
from routetrace.server.index import agreements as module
from routetrace.server.index.agreements import Agreements, Report
from routetrace.server.index.apply import apply_record
from routetrace.server.index.records.record import encode_agreement
from routetrace.server.index.state import State
from routetrace.server.read.agreements import check_report, merged, page
from routetrace.server.testing import free_ports, run_server
from routetrace.stored import format5_pb2 as stored
from routetrace.v1 import routetrace_pb2 as pb

RUNS, REPORTERS = ("a", "b", "c"), ("trainer", "rank0", "rank1")


def message(step: int, reporter: str, size: int, stamp: int) -> bytes:
    report = pb.AgreementReport(step=step, reporter=reporter, reported_ms=stamp)
    report.diagnosis = "x" * size
    return report.SerializeToString()


REPORTED = st.lists(
    st.tuples(
        st.sampled_from(RUNS), st.integers(0, 9), st.sampled_from(REPORTERS), st.integers(0, 2000)
    ),
    max_size=60,
)

#: Maxima that a few reports reach: steps of a run, bytes of a run, bytes of all.
LIMITS = st.sampled_from([(3, 1 << 30, 1 << 30), (99, 4000, 1 << 30), (99, 1 << 30, 6000)])


class Expected:
    """All reports in their order, from which is worked out what is kept."""

    def __init__(self, limits: tuple[int, int, int]) -> None:
        self.steps, self.run_bytes, self.all_bytes = limits
        self.kept: list[tuple[str, Report]] = []

    def add(self, run: str, report: Report) -> None:
        same = [
            (name, kept)
            for name, kept in self.kept
            if (name, kept.step) == (run, report.step) and kept.reporter != report.reporter
        ]
        rest = [e for e in self.kept if (e[0], e[1].step) != (run, report.step)]
        self.kept = [*rest, *same, (run, report)]
        while len(self.of(run)) > self.steps or (
            self.nbytes([run]) > self.run_bytes and len(self.of(run)) > 1
        ):
            self.forget_first([run])
        while self.nbytes(RUNS) > self.all_bytes and len({name for name, _ in self.kept}) > 1:
            order = [name for name, _ in self.kept]
            self.forget_first(
                [
                    min(
                        set(order),
                        key=lambda name: max(at for at, other in enumerate(order) if other == name),
                    )
                ]
            )

    def of(self, run: str) -> dict[int, list[Report]]:
        found: dict[int, list[Report]] = {}
        for name, report in self.kept:
            if name == run:
                found.setdefault(report.step, []).append(report)
        return found

    def nbytes(self, runs: Iterable[str]) -> int:
        return sum(len(r.message) + 300 for name, r in self.kept if name in runs)

    def forget_first(self, runs: Iterable[str]) -> None:
        first = next(entry for entry in self.kept if entry[0] in runs)
        self.kept = [e for e in self.kept if (e[0], e[1].step) != (first[0], first[1].step)]


def contents(found: Agreements) -> dict[str, list[Report]]:
    return {
        run: [report for step in found.steps(run, 0, 1 << 62) for report in found.of(run, step)]
        for run in RUNS
    }


@given(reported=REPORTED, limits=LIMITS, cut=st.integers(0, 60))
def test_newest_reports_are_kept_also_over_a_snapshot(reported, limits, cut):
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in zip(("MAX_STEPS", "MAX_RUN_BYTES", "MAX_BYTES"), limits, strict=True):
            patch.setattr(module, name, limit)
        found, expected = Agreements(), Expected(limits)
        for stamp, (run, step, reporter, size) in enumerate(reported):
            report = Report(step, reporter, message(step, reporter, size, stamp))
            found.add(run, report)
            expected.add(run, report)
            if stamp == cut:  # a restart
                pieces = [piece.SerializeToString() for piece in found.dump()]
                found = Agreements()
                for piece in pieces:
                    found.load(stored.Piece.FromString(piece))
            assert found.nbytes == expected.nbytes(RUNS)
        for run, reports in contents(found).items():
            wanted = [r for _, of in sorted(expected.of(run).items()) for r in sorted(of)]
            assert reports == wanted
        newest = {run: report.step for run, report in expected.kept}
        assert {run: reports[0].step for run, reports in found.newest().items()} == newest


@given(reported=REPORTED, start=st.integers(0, 9), stop=st.integers(0, 10))
def test_pages_of_workers_are_those_of_one(reported, start, stop):
    """A report that was repeated at another worker counts once: the newer one."""
    workers = [Agreements(), Agreements(), Agreements()]
    newest: dict[tuple[int, str], bytes] = {}
    for stamp, (_, step, reporter, size) in enumerate(reported):
        text = message(step, reporter, size, stamp)
        workers[size % 3].add("a", Report(step, reporter, text))
        if start <= step < (stop or 10):
            newest[step, reporter] = text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("routetrace.server.read.agreements._PAGE_BYTES", 300)
        request = pb.ListAgreementRequest(run="a", start=start, stop=stop)
        found: list[pb.AgreementReport] = []
        for _ in range(40):
            answer = merged(page(worker, request) for worker in workers)
            found += answer.reports
            request.page_token = answer.next_page_token
            if not answer.next_page_token:
                break
    assert [r.SerializeToString() for r in found] == [text for _, text in sorted(newest.items())]


def test_a_snapshot_of_the_state_has_them():
    state, restored = State(60), State(60)
    for number, step in enumerate((5, 3, 5, 9), 1):
        report = pb.AgreementReport(step=step, reporter="trainer", tokens=number)
        apply_record(state, number, encode_agreement(1e9, "a", report))
    restored.load([*state.dump()])
    assert contents(restored.agreements) == contents(state.agreements)
    assert [r.step for r in contents(restored.agreements)["a"]] == [3, 5, 9]
    replaced = pb.AgreementReport.FromString(restored.agreements.of("a", 5)[0].message)
    assert replaced.tokens == 3


AGREEMENT = Agreement(
    by_layer={0: Choices(10, 3, 75, 80), 4: Choices(9, 0, 72, 72)},
    by_version={-1: Choices(4, 3, 29, 32), 2**63 - 1: Choices(15, 0, 118, 120)},
    tokens=10,
    differing_tokens=3,
    planned_cells=20,
    present_cells=19,
    placed_tokens=11,
    fallback_tokens=2,
    logprobs=LogprobSums(10, -0.25, 0.5, 1.5, 11.0, 1, 0),
)


def report_some(client: RouteClient) -> None:
    client.report_agreement(7, AGREEMENT, weight_version=3, reporter="rank1")
    client.report_agreement(7, AGREEMENT, weight_version=2, reporter="rank0")
    client.report_agreement(9, AGREEMENT, diagnosis="rows are shifted", trace_ids=["t1", "t0"])
    client.report_agreement(7, AGREEMENT + AGREEMENT, weight_version=4, reporter="rank1")


def check(client: RouteClient) -> None:
    seven, nine = client.agreement_history().steps
    assert (seven.step, seven.reporters, seven.weight_version) == (7, ("rank0", "rank1"), 4)
    assert seven.agreement == AGREEMENT + AGREEMENT + AGREEMENT
    assert (nine.step, nine.reporters, nine.weight_version) == (9, ("trainer",), None)
    assert (nine.agreement, nine.diagnosis) == (AGREEMENT, "rows are shifted")
    assert nine.trace_ids == ("t1", "t0")
    assert client.agreement_history(start=8).steps == (nine,)
    assert client.agreement_history(start=7, stop=9).steps == (seven,)


def test_reports_outlive_a_kill(tmp_path):
    with run_server(data_dir=tmp_path) as server:
        with RouteClient(server.target, run="r") as client:
            report_some(client)
            check(client)
        server.kill()
    with run_server(data_dir=tmp_path) as server:
        with RouteClient(server.target, run="r") as client:
            check(client)
            assert client.server_info().runs == ("r",)
        with RouteClient(server.target, run="other") as client:
            assert client.agreement_history().steps == ()


def test_workers_of_a_spread_run_answer_alike():
    port = free_ports(3)
    with run_server(port=port, workers=3, spread_runs="r"):
        targets = [f"127.0.0.1:{port + i}" for i in range(3)]
        with RouteClient(targets[0], run="r") as client:
            report_some(client)
        for target in targets:
            with RouteClient(target, run="r") as client:
                check(client)


WRONG = [
    ({"step": 1 << 63}, "step"),
    ({"reporter": ""}, "reporter"),
    ({"by_layer": [(5, Choices()), (5, Choices())]}, "by_layer"),
    ({"by_layer": [(4096, Choices())]}, "by_layer"),
    ({"by_layer": [(5, Choices(1, 2, 0, 8))]}, "choices.differing"),
    ({"by_version": [(5, Choices(1, 1, 9, 8))]}, "choices.matched"),
    ({"by_version": [(i, Choices()) for i in range(257)]}, "by_version"),
    ({"by_version": [(5, Choices()), (4, Choices())]}, "by_version"),
    ({"tokens": 1, "differing_tokens": 2}, "differing_tokens"),
    ({"present_cells": 2}, "present_cells"),
    ({"fallback_tokens": 2}, "fallback_tokens"),
    ({"trace_ids": ["t"] * 11}, "trace_ids"),
    ({"trace_ids": [""]}, "trace_ids"),
    ({"diagnosis": "x" * 1001}, "diagnosis"),
]


@pytest.mark.parametrize(("wrong", "field"), WRONG)
def test_a_wrong_report_names_its_field(wrong, field):
    report = pb.AgreementReport(step=1, reporter="trainer")
    for name, value in wrong.items():
        if name == "by_layer":
            report.by_layer.extend(
                pb.LayerAgreement(layer_id=i, choices=pb.Choices(**c._asdict())) for i, c in value
            )
        elif name == "by_version":
            report.by_version.extend(
                pb.VersionAgreement(weight_version=i, choices=pb.Choices(**c._asdict()))
                for i, c in value
            )
        elif isinstance(value, list):
            getattr(report, name).extend(value)
        else:
            setattr(report, name, value)
    with pytest.raises(InvalidArgument) as caught:
        check_report(report)
    assert caught.value.field == field


def test_a_step_without_room_for_a_report_keeps_those_that_it_has():
    """512 KiB, of which a report takes 300 bytes beside its own."""
    layers = {layer: Choices(10**9, 1, 8 * 10**9, 8 * 10**9) for layer in range(2000)}
    with run_server() as server, RouteClient(server.target) as client:

        def report(rank: int) -> None:
            client.report_agreement(5, Agreement(by_layer=layers), reporter=f"rank{rank:02}")

        ranks = (512 << 10) // (Agreement(by_layer=layers).to_proto().ByteSize() + 340)
        for rank in range(ranks):
            report(rank)
        with pytest.raises(InvalidArgument) as caught:
            report(ranks)
        assert caught.value.field == "report"
        assert "rank" in caught.value.remedy
        report(0)  # in place of its own
        (step,) = client.agreement_history().steps
        assert step.reporters == tuple(f"rank{i:02}" for i in range(ranks))
        assert step.agreement.choices.cells == ranks * 2000 * 10**9
        client.report_agreement(6, Agreement(by_layer=layers))
