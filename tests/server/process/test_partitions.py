"""Partitions: which worker serves a run, its settings, and directories of another number."""

from __future__ import annotations

import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from routetrace.common.errors import InvalidArgument, Moved, from_detail
from routetrace.server import daemon
from routetrace.server.access.partition import WHOLE, Partition, place
from routetrace.server.process.partitions import (
    check_partitions,
    make_partitions,
    partition_dir,
    partitions_of,
    worker_config,
)
from routetrace.server.process.workers import TRANSITIONS, Worker, WorkerState, supervise
from routetrace.server.settings.config import ConfigError, ServerConfig
from routetrace.server.settings.loading import load_config
from routetrace.server.store.disk.directory import NAME

RUNS = [f"run-{i}" for i in range(2000)]


def test_places_never_change():
    # Rows lie where the run was placed when they came: another hash would lose them.
    assert [place(f"run-{i}", 4) for i in range(12)] == [2, 2, 2, 3, 1, 3, 2, 2, 2, 2, 3, 2]
    assert [place(run, 3) for run in ("default", "grpo", "Läufe", "nightly")] == [1, 0, 1, 0]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_runs_are_spread_and_a_further_partition_takes_only_its_own(count):
    places = {run: place(run, count) for run in RUNS}
    assert max(Counter(places.values()).values()) < 1.3 * len(RUNS) / count
    more = {run: place(run, count + 1) for run in RUNS}
    assert {more[run] for run in RUNS if more[run] != places[run]} == {count}


def test_a_run_is_served_in_one_partition_and_the_others_name_it():
    pinned = {"run-1": 0, "run-2": 2}
    parts = [Partition(number, 3, 7411, pinned) for number in range(3)]
    for run in RUNS[:200]:
        [own] = [part for part in parts if part.of(run) == part.number]
        assert own.number == pinned.get(run, place(run, 3))
        own.check(run)
        own.check_stored(run)
        for other in parts:
            if other is own:
                continue
            with pytest.raises(Moved, match=f"port {7411 + own.number}") as caught:
                other.check(run)
            again = from_detail(caught.value.to_detail())
            assert isinstance(again, Moved)
            assert again.target == f":{7411 + own.number}"
            with pytest.raises(InvalidArgument, match=f"{run}={other.number}"):
                other.check_stored(run)


def test_one_worker_serves_all():
    for run in RUNS[:100]:
        WHOLE.check(run)
        WHOLE.check_stored(run)


# ---------------------------------------------------------------------------- settings


def test_each_worker_has_its_ports_directory_and_share():
    config = ServerConfig(
        workers=3, listen="127.0.0.1:7411", metrics_listen="127.0.0.1:9411", data_dir=Path("d"),
        store_capacity=10 << 20, memory_limit=7, run_quota=5, ready_file=Path("r"),
    )  # fmt: skip
    found = [worker_config(config, number) for number in range(3)]
    assert [c.listen for c in found] == [f"127.0.0.1:{p}" for p in (7411, 7412, 7413)]
    assert [c.metrics_listen for c in found] == [f"127.0.0.1:{p}" for p in (9411, 9412, 9413)]
    assert [c.data_dir for c in found] == [Path("d") / f"partition-{i}" for i in range(3)]
    assert sum(c.store_capacity for c in found) >= 10 << 20
    assert {(c.memory_limit, c.run_quota, c.ready_file) for c in found} == {(3, 5, None)}
    off = worker_config(ServerConfig(workers=2, listen="[::1]:7411"), 1)
    assert (off.listen, off.metrics_listen, off.memory_limit) == ("[::1]:7412", "", 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers=0"], "greater than or equal to 1"),
        (["--workers=2", "--listen=127.0.0.1:0"], "expected a port with 1 ports after it"),
        (["--workers=3", "--listen=127.0.0.1:65534"], "listen is '127.0.0.1:65534'"),
        (["--workers=2", "--metrics-listen=127.0.0.1:7412"], "metrics_listen is"),
        (["--workers=2", "--metrics-listen=127.0.0.1:7410"], "none used twice"),
        (["--workers=2", "--metrics-listen=127.0.0.1:0"], "metrics_listen is"),
        (["--workers=2", '--run-workers={"a": 2}'], "worker 2 for run 'a': expected 0 to 1"),
        (['--run-workers={"a": 1}'], "as workers is 1"),
        (["--workers=2", '--run-workers={"a": -1}'], "worker -1"),
    ],
)
def test_settings_that_cannot_be(flags, words):
    with pytest.raises(ConfigError, match=words):
        load_config(flags)


# ---------------------------------------------------------------------------- directories


def test_a_directory_is_for_the_number_of_workers_that_made_it(tmp_path):
    new, one, two = (tmp_path / name for name in ("new", "one", "two"))
    (one / NAME).mkdir(parents=True)
    make_partitions(two, 2)
    make_partitions(two, 2)  # does nothing
    assert partitions_of(two) == [partition_dir(two, 0), partition_dir(two, 1)]
    assert partitions_of(one) == [one]
    for path, workers in product((new, one, two), (1, 2, 3)):
        if path is new or (path, workers) in ((one, 1), (two, 2)):
            check_partitions(path, workers)
        else:
            with pytest.raises(ConfigError, match=f"workers is {workers}: expected"):
                check_partitions(path, workers)
    assert not new.exists()


def test_a_directory_that_is_not_whole_is_refused(tmp_path):
    make_partitions(tmp_path, 2)
    partition_dir(tmp_path, 1).rmdir()
    with pytest.raises(ConfigError, match="partition-1 is missing"):
        check_partitions(tmp_path, 2)
    (tmp_path / "partitions").unlink()
    check_partitions(tmp_path, 2)  # a first start that was cut off
    (partition_dir(tmp_path, 0) / NAME).mkdir()
    for workers in (1, 2):
        with pytest.raises(ConfigError, match="a copy that is complete"):
            check_partitions(tmp_path, workers)
    for text in ("", "x", "1", "-2"):
        (tmp_path / "partitions").write_text(text)
        with pytest.raises(ConfigError, match="partitions"):
            check_partitions(tmp_path, 2)


@pytest.mark.parametrize(("made", "started"), [(2, 1), (2, 3)])
def test_the_command_refuses_another_number(tmp_path, capsys, monkeypatch, made, started):
    # A log handler of this process would outlive the stderr of this test.
    monkeypatch.setattr(daemon.logs, "set_up", lambda *_: None)
    make_partitions(tmp_path, made)
    assert daemon.main([f"--data-dir={tmp_path}", f"--workers={started}"]) == 2
    assert f"workers is {started}: expected {made}" in capsys.readouterr().err


# ---------------------------------------------------------------------------- states


#: From docs/operations.md: a worker starts, serves, ends and is started again.
ALLOWED = {
    ("ended", "starting"),
    ("starting", "ready"),
    ("starting", "ended"),
    ("ready", "ended"),
}


@pytest.mark.parametrize(("old", "new"), [*product(WorkerState, WorkerState)])
def test_every_transition_of_a_worker(old, new):
    worker = Worker(0, state=old)
    entered = worker.enter(new)
    assert entered == ((old.value, new.value) in ALLOWED)
    assert worker.state is (new if entered else old)


def test_a_directory_too_deep_for_the_sockets_is_refused(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    config = ServerConfig(store="memory", workers=2)
    with pytest.raises(ConfigError, match=r"bytes shorter, for the workers' sockets; TMPDIR"):
        supervise(config, lambda *_: 0)
    assert not list(deep.iterdir())


def test_the_table_names_every_state():
    assert set(TRANSITIONS) == set(WorkerState)
