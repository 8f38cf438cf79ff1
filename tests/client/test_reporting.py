"""Reports of a trainer's own choices: what is read back is what was reported, and nothing else."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.client import (
    AsyncRouteClient,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    RouteClient,
    Security,
    Trace,
)
from routetrace.client._core import reporting
from routetrace.client._core.reporting import WriterNames
from routetrace.common.layout import ModelLayout
from routetrace.common.report_runs import is_report_run, report_run, reported_run
from routetrace.server.testing import ServerProcess, run_server
from support.agents.feeder import Feeder
from support.servers.guarded import entry, feed
from support.servers.scripted import Blocking

LAYOUT = ModelLayout((1, 2, 5), 7, 40, 3)
WIDE = ModelLayout((0, 4), 6, 300, 2)
NUM_ROWS = 1300
#: By trace: its layout and rows.
TRACES = {"narrow": (LAYOUT, NUM_ROWS), "wide": (WIDE, 40)}
LABELS = {"adapter": "lora-1", "task": "math"}


def choices(layout: ModelLayout, count: int, seed: int) -> np.ndarray:
    """Ids [count, layers, top_k] of int64, as a trainer's topk gives them."""
    rng = np.random.default_rng(seed)
    order = rng.random((count, len(layout.layer_ids), layout.num_experts)).argsort(axis=2)
    return order[..., : layout.top_k]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server(agent_timeout_seconds=3600) as server:
        for engine, (name, (layout, count)) in enumerate(TRACES.items()):
            feeder = Feeder(server.target, layout, run="r", engine_id=f"e{engine}")
            tokens = list(range(count + 1))
            handle = feeder.begin(name, prompt_len=9, labels=LABELS, prompt_token_ids=tokens[:9])
            feeder.step(choices(layout, count, 0).astype(layout.dtype), [[handle, 0, count]])
            feeder.finish(handle, count + 1, token_ids=tokens)
            if name == "wide":
                feeder.begin("runs", prompt_len=3)
            feeder.flush()
            feeder.close()
        yield server


@pytest.fixture(scope="module", params=["sync", "async"])
def client(request, server) -> Iterator[Any]:
    if request.param == "sync":
        with RouteClient(server.target, run="r") as client:
            yield client
    else:
        client = Blocking(AsyncRouteClient(server.target, run="r"))
        yield client
        client.close()


def reported(server: ServerProcess, trace_id: str, reporter: str, **options: Any) -> Trace:
    with RouteClient(server.target, run="r") as client, client.reports(reporter) as reports:
        return reports.get(trace_id, missing="mask", **options)


def check(found: Trace, ids: np.ndarray, counts: np.ndarray, layers: tuple[int, ...]) -> None:
    """`ids` [n, layers, top_k] and `counts` [n] are of positions 0 .. n - 1."""
    assert found.token_start == 0
    columns = [found.layer_ids.index(layer) for layer in layers]
    valid = found.valid[:, columns]
    assert np.array_equal(valid, np.repeat(counts[:, None], len(layers), axis=1))
    assert np.array_equal(found.topk_ids[:, columns][counts], ids[counts])
    others = [i for i, layer in enumerate(found.layer_ids) if layer not in layers]
    assert not found.valid[:, others].any()


numbers = iter(range(10**6))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_what_was_reported_is_read(client: Any, server: ServerProcess, data: Any):
    name = data.draw(st.sampled_from([*TRACES]))
    layout, count = TRACES[name]
    layers = data.draw(
        st.none() | st.sets(st.sampled_from(layout.layer_ids), min_size=1).map(sorted)
    )
    part = layout.select(tuple(layers or layout.layer_ids))
    start = data.draw(st.integers(0, count - 1))
    tokens = data.draw(st.integers(1, count + 1 - start))
    seed = data.draw(st.integers(0, 99))
    ids = choices(part, tokens, seed)
    share = data.draw(st.sampled_from([None, 0.02, 0.7]))
    valid = None
    if share is not None:
        valid = np.random.default_rng(seed).random(ids.shape[:2]) >= share
        valid[0] = True
    reporter = f"rank {next(numbers)}"
    version = data.draw(st.none() | st.integers(1 - 2**63, 2**63 - 1))
    step = data.draw(st.none() | st.integers(0, 2**62))
    client.report_routing(
        name, ids, valid=valid, layer_ids=layers, token_start=start, reporter=reporter,
        step=step, weight_version=version,
    )  # fmt: skip
    whole = np.zeros((count, *ids.shape[1:]), np.int64)
    counts = np.zeros(count, np.bool_)
    rows = min(tokens, count - start)
    whole[start : start + rows] = ids[:rows]
    counts[start : start + rows] = True if valid is None else valid[:rows].all(axis=1)
    found = reported(server, name, reporter)
    check(found, whole, counts, part.layer_ids)
    assert found.num_tokens == count + 1
    assert found.labels == {"adapter": "lora-1"} | ({} if step is None else {"step": str(step)})
    assert {span.weight_version for span in found.weight_versions} == {version}
    assert np.array_equal(found.token_digests, client.stat(name).token_digests)
    assert found.incarnation == 1


def test_a_later_report_counts_unless_it_has_less(client: Any, server: ServerProcess):
    reporter = f"twice {next(numbers)}"
    first, second, third = (choices(WIDE, 40, seed) for seed in (1, 2, 3))
    every = np.ones(40, np.bool_)
    client.report_routing("wide", first, reporter=reporter)
    client.report_routing("wide", second, reporter=reporter)
    check(reported(server, "wide", reporter), second, every, WIDE.layer_ids)
    client.report_routing("wide", third[:30], reporter=reporter)
    check(reported(server, "wide", reporter), second, every, WIDE.layer_ids)
    other = f"less {next(numbers)}"
    client.report_routing("wide", first[:20], reporter=other)
    client.report_routing("wide", third[:10], reporter=other)
    padded = np.concatenate([third[:10], np.zeros_like(third[:30])])
    check(reported(server, "wide", other), padded, np.arange(40) < 10, WIDE.layer_ids)


def test_the_run_does_not_see_reports(client: Any, server: ServerProcess):
    before = client.server_info()
    client.report_routing("wide", choices(WIDE, 40, 5), reporter="unseen")
    assert {one.trace_id for one in client.find()} == {*TRACES, "runs"}
    assert {one.engine_id for one in client.agents()} == {"e0", "e1"}
    assert next(client.watch()).traces
    after = client.server_info()
    assert {*after.runs} - {*before.runs} <= {"r@report:unseen"}
    stat = client.stat("wide")
    assert (stat.num_incarnations, stat.engine_ids) == (1, ("e1",))
    with RouteClient(server.target, run="r") as own, own.reports("unseen") as reports:
        left = reports.stat("wide").expires_at - stat.expires_at
        assert abs(left.total_seconds()) < 60


def test_tensors_and_ids_of_any_width(client: Any, server: ServerProcess):
    torch = pytest.importorskip("torch")
    ids = choices(WIDE, 40, 6)
    reporter = f"tensor {next(numbers)}"
    client.report_routing(
        "wide", torch.tensor(ids), valid=torch.ones(40, 2, dtype=torch.bool), reporter=reporter
    )
    check(reported(server, "wide", reporter), ids, np.ones(40, np.bool_), WIDE.layer_ids)
    client.report_routing("wide", ids.astype(np.int16), reporter=reporter)
    check(reported(server, "wide", reporter), ids, np.ones(40, np.bool_), WIDE.layer_ids)


GOOD = choices(WIDE, 40, 7)


def changed(at: tuple[int, ...], value: int) -> np.ndarray:
    ids = GOOD.copy()
    ids[at] = value
    return ids


@pytest.mark.parametrize(
    ("ids", "options", "field", "words"),
    [
        (GOOD[0], {}, "topk_ids", r"integers \[tokens, 2, 2\]"),
        (GOOD[:, :1], {}, "topk_ids", r"integers \[tokens, 2, 2\]"),
        (GOOD.astype(np.float32), {}, "topk_ids", "float32"),
        (GOOD[:0], {}, "topk_ids", "no token that counts"),
        (changed((3, 1, 0), 300), {}, "topk_ids", r"at index 3, layer 4"),
        (changed((4, 0, 1), -1), {}, "topk_ids", r"-1.* at index 4, layer 0"),
        (changed((5, 0, 1), int(GOOD[5, 0, 0])), {}, "topk_ids", "2 different ids"),
        (changed((6, 0, 0), 2**40), {}, "topk_ids", "index 6"),
        (np.concatenate([GOOD, GOOD]), {}, "topk_ids", "leave the padding out"),
        (GOOD, {"token_start": 2}, "topk_ids", "40 tokens from 2"),
        (GOOD[:1], {"token_start": 40}, "topk_ids", "before the last token"),
        (GOOD, {"token_start": -1}, "token_start", "0"),
        (GOOD, {"valid": np.ones(40)}, "valid", r"bool \[40, 2\]"),
        (GOOD, {"valid": np.ones((40, 3), np.bool_)}, "valid", r"bool \[40, 2\]"),
        (GOOD, {"valid": np.zeros((40, 2), np.bool_)}, "topk_ids", "no token that counts"),
        (GOOD, {"layer_ids": [0, 3]}, "layer_ids", r"\[0, 4\]"),
        (GOOD, {"layer_ids": [4, 0]}, "layer_ids", "ascending"),
        (GOOD, {"layer_ids": [4]}, "topk_ids", r"integers \[tokens, 1, 2\]"),
        (GOOD, {"step": -1}, "step", "-1"),
        (GOOD, {"weight_version": 2**63}, "weight_version", "9223372036854775808"),
        # Stands for an unknown version on the wire.
        (GOOD, {"weight_version": -(2**63)}, "weight_version", "-9223372036854775808"),
        (GOOD, {"reporter": ""}, "reporter", "1 to 512"),
        (GOOD, {"reporter": "x" * 512}, "run and reporter", "512"),
        (GOOD, {"timeout": -1}, "timeout", "-1"),
    ],
)
def test_wrong_arguments_are_named(client: Any, ids: Any, options: Any, field: str, words: str):
    with pytest.raises(InvalidArgument, match=words) as error:
        client.report_routing("wide", ids, **{"reporter": "wrong", **options})
    assert error.value.field == field


def test_ids_that_do_not_count_may_be_anything(client: Any, server: ServerProcess):
    ids = changed((3, 1, 0), -7)
    valid = np.ones((40, 2), np.bool_)
    valid[3, 0] = False
    reporter = f"odd {next(numbers)}"
    client.report_routing("wide", ids, valid=valid, reporter=reporter)
    check(reported(server, "wide", reporter), ids, valid.all(axis=1), WIDE.layer_ids)


def test_traces_that_cannot_be_reported(client: Any):
    with pytest.raises(InvalidArgument, match="has ended"):
        client.report_routing("runs", GOOD)
    with pytest.raises(NotFound):
        client.report_routing("unknown", GOOD)
    with pytest.raises(NotFound):
        client.report_routing("wide", GOOD, incarnation=2)


def test_nothing_of_a_refused_report_is_kept(server: ServerProcess):
    with RouteClient(server.target, run="r") as client, client.reports("wrong") as reports:
        with pytest.raises(InvalidArgument):
            client.report_routing("wide", changed((3, 1, 0), 300), reporter="wrong")
        with pytest.raises(NotFound):
            reports.get("wide")


# ------------------------------------------------------------------ many at once, and later


def test_reports_at_once_do_not_disturb_each_other(server: ServerProcess):
    with RouteClient(server.target, run="r") as client:
        ids = {f"many {i}": choices(WIDE, 40, i) for i in range(12)}
        with ThreadPoolExecutor(6) as pool:
            work = [
                pool.submit(client.report_routing, "wide", one, reporter=name)
                for name, one in ids.items()
            ]
            same = [
                pool.submit(client.report_routing, "wide", GOOD, reporter="same") for _ in range(12)
            ]
            for one in work + same:
                one.result()
        for name, one in ids.items():
            check(reported(server, "wide", name), one, np.ones(40, np.bool_), WIDE.layer_ids)
        with client.reports("same") as reports:
            assert len([*reports.agents()]) <= 6

    async def at_once() -> None:
        async with AsyncRouteClient(server.target, run="r") as client:
            await asyncio.gather(
                *(client.report_routing("wide", GOOD, reporter="tasks") for _ in range(8))
            )

    asyncio.run(at_once())
    check(reported(server, "wide", "tasks"), GOOD, np.ones(40, np.bool_), WIDE.layer_ids)


def test_a_report_of_many_chunks_is_whole(server: ServerProcess, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reporting, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(reporting, "_FRAME_ROWS", 7)
    ids = choices(LAYOUT, NUM_ROWS, 9)
    with RouteClient(server.target, run="r") as client:
        client.report_routing("narrow", ids, reporter="chunks")
    check(reported(server, "narrow", "chunks"), ids, np.ones(NUM_ROWS, np.bool_), LAYOUT.layer_ids)


def test_reports_of_two_clients_are_not_mixed(server: ServerProcess):
    """Each is whole; none is a part of the other."""
    halves = np.ones((40, 2), np.bool_)
    halves[20:] = False
    with RouteClient(server.target, run="r") as one, RouteClient(server.target, run="r") as two:
        one.report_routing("wide", choices(WIDE, 40, 1), valid=halves, reporter="clients")
        two.report_routing("wide", choices(WIDE, 40, 2), valid=~halves, reporter="clients")
    check(
        reported(server, "wide", "clients"), choices(WIDE, 40, 2), np.arange(40) >= 20,
        WIDE.layer_ids,
    )  # fmt: skip


def test_names_of_writers_are_used_again():
    names = WriterNames()
    with names.lend() as one, names.lend() as two:
        assert one != two
    with names.lend() as again, names.lend() as more:
        assert {again, more} == {one, two}
    with WriterNames().lend() as foreign:
        assert foreign not in (one, two)


def test_a_pickled_client_has_names_of_its_own(server: ServerProcess):
    with RouteClient(server.target, run="r") as client:
        client.report_routing("wide", GOOD, reporter="copies")
        with pickle.loads(pickle.dumps(client)) as copy:
            copy.report_routing("wide", GOOD, reporter="copies")
        with client.reports("copies") as reports:
            assert len({one.shard for one in reports.agents()}) == 2


def test_a_report_outlives_the_server(tmp_path):
    with run_server(data_dir=tmp_path) as server:
        feeder = Feeder(server.target, WIDE, run="r")
        handle = feeder.begin("t", prompt_len=3)
        feeder.step(GOOD.astype(WIDE.dtype), [[handle, 0, 40]])
        feeder.finish(handle, 41)
        feeder.close()
        with RouteClient(server.target, run="r") as client:
            client.report_routing("t", choices(WIDE, 40, 8))
        server.kill()
    with run_server(data_dir=tmp_path) as server:
        found = reported(server, "t", "trainer")
        check(found, choices(WIDE, 40, 8), np.ones(40, np.bool_), WIDE.layer_ids)


def test_tokens_cover_the_reports_of_their_runs(tmp_path):
    tokens = tmp_path / "tokens.toml"
    entries = [
        entry("rt_all", "all"),
        entry("rt_reads", "reads", ("read",), ("a",)),
        entry("rt_trains", "trains", ("read", "ingest"), ("a",)),
        entry("rt_other", "other", ("read", "ingest"), ("b",)),
    ]
    tokens.write_text("\n".join(entries))
    tokens.chmod(0o600)
    with run_server(tokens_file=tokens) as server:
        feed(server.target, Security(token="rt_all"), "a", "one")

        def client(token: str, run: str = "a") -> RouteClient:
            return RouteClient(server.target, run=run, security={"token": token})

        with client("rt_trains") as trains:
            rows = trains.get("one")
            trains.report_routing("one", rows.topk_ids)
        with client("rt_reads") as reads, reads.reports() as reports:
            assert reports.get("one").equals(rows)
            with pytest.raises(PermissionDenied, match="ingest"):
                reads.report_routing("one", rows.topk_ids)
        for run in ("a@report:trainer", "a"):
            with client("rt_other", run) as other, pytest.raises(PermissionDenied, match="run"):
                other.get("one")


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
def test_names_of_runs(run: str, reporter: str):
    try:
        name = report_run(run, reporter)
    except InvalidArgument:
        return
    assert is_report_run(name)
    assert reported_run(name) == reported_run(run)
    if not is_report_run(run):
        assert reported_run(name) == run
