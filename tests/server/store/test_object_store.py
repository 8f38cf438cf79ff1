"""The object store: each rule of its log, its lease and its reads, broken on purpose."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import pairwise
from typing import Any

import pytest
from obstore.store import MemoryStore as MemoryBucket

from routetrace.common.errors import (
    Closed,
    Corrupt,
    InvalidArgument,
    NotFound,
    Overloaded,
    RouteTraceError,
    Unavailable,
)
from routetrace.server.settings.config import ConfigError
from routetrace.server.settings.loading import load_config
from routetrace.server.store.interface import Owner, Record
from routetrace.server.store.memory import MemoryStore
from routetrace.server.store.object import format as fmt
from routetrace.server.store.object import lease as lease_module
from routetrace.server.store.object import store as store_module
from routetrace.server.store.object.bucket import Bucket, open_bucket
from routetrace.server.store.object.lease import Lease
from routetrace.server.store.object.probe import check_conditions
from routetrace.server.store.object.store import ObjectStore
from support.servers.fake_s3 import FakeS3
from support.waiting import wait_for

BOUND_S = 60.0


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(100 + 37_000 * (number % 3))


def record(number: int) -> Record:
    return Record(number, b"header %d" % number, payload(number))


def put(store: ObjectStore, *numbers: int) -> None:
    for future in [store.append(record(number)) for number in numbers]:
        future.result(BOUND_S)


def read(store: ObjectStore, number: int) -> bytes:
    return bytes(store.read(number, [(0, len(payload(number)))])[0])


def taken(bucket: Bucket, **settings: Any) -> ObjectStore:
    store = ObjectStore(bucket, **settings)
    store.take_over()
    return store


def numbers_in(store: ObjectStore) -> list[int]:
    return [number for number, header in store.headers() if header is not None]


@pytest.fixture
def bucket() -> Bucket:
    return Bucket(MemoryBucket(), "memory", retry_seconds=5)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    with FakeS3() as fake:
        yield fake


def over_http(s3: FakeS3, timeout: float = 30.0) -> Bucket:
    return open_bucket("s3://bucket/prefix", s3.endpoint, timeout=timeout)


# ---------------------------------------------------------------------------- as a store


@pytest.mark.parametrize("seed", range(6))
def test_it_does_what_the_memory_store_does_also_after_a_take_over(bucket, seed):
    rng = random.Random(seed)
    model, store, old = MemoryStore(), taken(bucket, cache_bytes=rng.choice((0, 1 << 30))), []
    number = covered = 0
    for _ in range(60):
        choice = rng.random()
        if choice < 0.5:
            for _ in range(rng.randint(1, 4)):
                number += rng.randint(1, 3)
                model.append(record(number))
                stored = store.append(record(number))
            stored.result(BOUND_S)
        elif choice < 0.75:
            held = model.numbers()
            drop = rng.sample(held, rng.randint(0, len(held)))
            snapshot = None
            if rng.random() < 0.6 and number:
                covered = rng.randint(covered, number)
                snapshot = covered, [b"%d." % covered * 1000] * rng.randint(0, 3)
            model.compact(snapshot, drop)
            store.compact(snapshot, drop)
        else:
            old.append(store)
            store = taken(bucket, cache_bytes=rng.choice((0, 1 << 30)))
        assert dict(store.headers()) == dict(model.headers())
        assert sorted(store.numbers()) == sorted(model.numbers())
        assert store.last_number() == model.last_number()
        mine, its = store.load_snapshot(), model.load_snapshot()
        assert (mine and (mine[0], [*mine[1]])) == (its and (its[0], [*its[1]]))
        for held in rng.sample(model.numbers(), min(3, len(model.numbers()))):
            assert read(store, held) == payload(held)
        stats, model_stats = store.stats(), model.stats()
        assert (stats.records, stats.payload_bytes) == (
            model_stats.records,
            model_stats.payload_bytes,
        )
    for each in (*old, store):
        each.close()
    with pytest.raises(Closed):
        store.numbers()


def test_records_share_objects_and_are_acknowledged_in_order(bucket):
    with closing(taken(bucket)) as store:
        done: list[int] = []
        futures = [store.append(record(number)) for number in range(1, 301)]
        for number, future in enumerate(futures, 1):
            future.add_done_callback(lambda _, number=number: done.append(number))
        futures[-1].result(BOUND_S)
        wait_for(lambda: len(done) == 300, BOUND_S)
        assert done == sorted(done)
        assert store.puts[0] < 100


def test_a_full_store_and_a_full_queue_refuse(bucket, monkeypatch):
    with closing(taken(bucket, capacity_bytes=100_000)) as store:
        put(store, 1, 3)
        with pytest.raises(Overloaded, match="store_capacity"):
            store.append(Record(5, b"", b"x" * 100_000)).result(BOUND_S)
        monkeypatch.setattr(store_module, "QUEUE_BYTES", 10)
        with pytest.raises(Overloaded, match="wait for the object store"):
            store.append(Record(5, b"", b"x" * 100)).result(BOUND_S)


def test_reads_are_whole_checked_and_cached(s3):
    writer = taken(over_http(s3))
    put(writer, 1, 2, 3)
    with closing(taken(over_http(s3))) as store:
        with pytest.raises(BlockingIOError):
            store.read(1, [(0, 5)], wait=False)
        s3.requests.clear()
        with ThreadPoolExecutor(8) as pool:
            assert {*pool.map(lambda _: read(store, 1), range(8))} == {payload(1)}
        assert [verb for verb, _ in s3.requests] == ["GET"]
        assert store.read(1, [(3, 4), (50, 1)], wait=False) == [payload(1)[3:7], payload(1)[50:51]]
        with pytest.raises(Corrupt, match="expected 5 bytes"):
            store.read(1, [(len(payload(1)), 5)])
        key = s3.keys("prefix/log/")[-2]
        held = bytearray(s3.objects[key])
        held[-1] ^= 1  # of the last payload
        s3.objects[key] = bytes(held)
        with pytest.raises(Corrupt, match="checksum"):
            read(store, 3)
        assert store.stats().damaged_records == 1
        with pytest.raises(NotFound):
            store.read(9, [(0, 1)])
    writer.close()


def test_memory_for_payloads_is_bounded(bucket):
    with closing(taken(bucket, cache_bytes=100_000)) as store:
        put(store, *range(1, 20))
        assert store._cache._bytes <= 100_000
        assert all(read(store, number) == payload(number) for number in range(1, 20))
        assert store._cache._bytes <= 100_000


# ---------------------------------------------------------------------------- the lessons


def test_a_stalled_writer_is_refused_after_the_next_one_has_given_space_back(bucket):
    stalled = taken(bucket)
    put(stalled, 1)
    other = taken(bucket)
    put(other, 2, 3, 4, 5)
    other.compact((5, iter([b"state"])), [1, 2, 3, 4])
    put(other, 6)
    other.compact((6, iter([b"later state"])), [5])
    failure = stalled.append(Record(2, b"zombie", b"z")).exception(BOUND_S)
    assert isinstance(failure, Unavailable)
    assert not stalled.owned
    with closing(taken(bucket)) as last:
        assert b"zombie" not in dict(last.headers()).values()
        assert read(last, 6) == payload(6)
    for store in (stalled, other):
        store.close()


def test_what_was_deleted_is_gone_from_the_bucket(bucket):
    with closing(taken(bucket)) as store:
        for number in range(1, 20):
            put(store, number)
            store.compact((number, iter([b"state"])), [number])
        keys = [found.key for prefix in ("log/", "mark/", "snap/") for found in bucket.list(prefix)]
        assert len(keys) == 4  # the fence, and one compaction with its mark and its snapshot


def test_a_stalled_compaction_deletes_nothing_of_the_next_owner(bucket, monkeypatch):
    old = taken(bucket)
    put(old, 1, 2)
    delete, stalled = old._delete, threading.Event()
    woken = threading.Event()

    def late(dead: list[str]) -> None:
        stalled.set()
        assert woken.wait(BOUND_S)
        delete(dead)

    monkeypatch.setattr(old, "_delete", late)
    work = threading.Thread(target=lambda: old.compact((2, iter([b"old"])), [1]))
    work.start()
    assert stalled.wait(BOUND_S)
    other = taken(bucket)
    put(other, 3, 4)
    other.compact((3, iter([b"new"])), [3])
    woken.set()
    work.join(BOUND_S)
    with closing(taken(bucket)) as last:
        assert numbers_in(last) == [4]
        assert [*last.load_snapshot()[1]] == [b"new"]
        assert [read(last, number) for number in (2, 4)] == [payload(2), payload(4)]
    for store in (old, other):
        store.close()


def test_an_answer_that_was_lost_acknowledges_once(s3):
    with closing(taken(over_http(s3))) as store:
        lost: list[str] = []

        def lose(verb: str, key: str) -> bool:
            if verb != "PUT" or "log/" not in key or key in lost:
                return False
            lost.append(key)
            return True

        s3.lose_answer = lose
        put(store, 1)
        put(store, 2)
        assert len(lost) == 2
        assert store.owned
    with closing(taken(over_http(s3))) as other:
        assert numbers_in(other) == [1, 2]
        assert [read(other, number) for number in (1, 2)] == [payload(1), payload(2)]


def test_a_hole_in_the_log_is_refused(s3):
    with closing(taken(over_http(s3))) as store:
        for number in range(1, 6):
            put(store, number)
    missing = s3.keys("prefix/log/")[2]
    del s3.objects[missing]
    with pytest.raises(Corrupt, match=missing.rpartition("/")[2]):
        taken(over_http(s3))


def test_a_compaction_while_another_server_opens_costs_nothing(s3):
    # The old owner wakes between the other's listing and its fence, compacts, and deletes.
    old = taken(over_http(s3))
    for number in range(1, 5):
        put(old, number)
    begun = threading.Event()

    def before(verb: str, key: str) -> None:
        if verb == "PUT" and "log/" in key and not begun.is_set():
            begun.set()
            put(old, 5)
            old.compact((5, iter([b"state"])), [1, 2, 3, 4])
            put(old, 6)

    s3.before = before
    with closing(taken(over_http(s3))) as other:
        assert numbers_in(other) == [6]
        assert [*other.load_snapshot()[1]] == [b"state"]
        assert sorted(other.numbers()) == [5, 6]
        assert [read(other, number) for number in (5, 6)] == [payload(5), payload(6)]
    old.close()


def test_a_mark_without_its_compaction_does_not_count(bucket):
    with closing(taken(bucket)) as store:
        put(store, 1)
        store.compact((1, iter([b"state"])), [])
        put(store, 2)
        bucket.put(fmt.mark_key(store._log.next), b"-")
        put(store, 3)
    with closing(taken(bucket)) as other:
        assert numbers_in(other) == [2, 3]
        assert other.load_snapshot()[0] == 1


@pytest.mark.parametrize("where", ["start", "head"])
def test_a_damaged_object_costs_its_own_records(s3, where):
    with closing(taken(over_http(s3))) as store:
        for number in range(1, 5):
            put(store, number)
    key = s3.keys("prefix/log/")[-1]  # record 4, the last
    held = bytearray(s3.objects[key])
    held[3 if where == "start" else fmt.FIXED_BYTES + 1] ^= 1
    s3.objects[key] = bytes(held)
    with closing(taken(over_http(s3))) as other:
        assert [*other.headers()] == [(n, b"header %d" % n) for n in (1, 2, 3)] + [(3, None)]
        assert other.stats().damaged_records == 1
        assert other.last_number() > 4  # a number is used once
        with pytest.raises(InvalidArgument):
            other.append(record(4))
        assert read(other, 3) == payload(3)


def test_a_damaged_compaction_or_snapshot_is_named(s3):
    with closing(taken(over_http(s3))) as store:
        put(store, 1)
        store.compact((1, iter([b"state" * 100])), [])
    part = s3.keys("prefix/snap/")[0]
    whole = s3.objects[part]
    s3.objects[part] = whole[:-1] + b"?"
    with closing(taken(over_http(s3))) as other, pytest.raises(Corrupt, match="snap/"):
        assert [*other.load_snapshot()[1]]
    s3.objects[part] = whole
    key = next(k for k, v in s3.objects.items() if "log/" in k and len(v) > 100 and b"snap" in v)
    s3.objects[key] = s3.objects[key][:-1] + b"?"
    with pytest.raises(Corrupt, match=key.rpartition("/")[2]):
        taken(over_http(s3))


def test_of_many_owners_at_once_each_acknowledged_record_is_kept(bucket):
    acknowledged: list[int] = []
    numbers = iter(range(1, 1 << 30))
    lock = threading.Lock()

    def own(_: int) -> None:
        for _ in range(8):
            with suppress(Unavailable), closing(ObjectStore(bucket)) as store:
                store.take_over()
                for _ in range(20):
                    with lock:
                        number = max(next(numbers), store.last_number() + 1)
                    store.append(record(number)).result(BOUND_S)
                    acknowledged.append(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(own, range(4)))
    assert acknowledged
    with closing(taken(bucket)) as last:
        seen = numbers_in(last)
        assert {*acknowledged} <= {*seen}
        assert all(a < b for a, b in pairwise(seen))
        assert all(read(last, number) == payload(number) for number in seen)


def test_a_store_whose_conditions_are_not_atomic_is_refused(s3):
    check_conditions(over_http(s3))
    assert s3.keys() == []
    s3.atomic = False
    with pytest.raises(InvalidArgument, match=r"2 of 2 writers of one key succeeded") as caught:
        check_conditions(over_http(s3))
    assert caught.value.field == "object_url"


def test_writers_that_fail_have_not_won_and_a_race_of_these_alone_decides_nothing(s3):
    carry_out, failing, started = s3.carry_out, set(), threading.Lock()

    def carried_out(verb: str, key: str, body: bytes, headers: Any) -> tuple[int, bytes]:
        with started:
            if verb == "PUT" and not failing:
                failing.add(key)
        if verb == "PUT" and key in failing:
            return 503, b""
        status, answer = carry_out(verb, key, body, headers)
        return (503, b"") if status == 412 and body != b"late" else (status, answer)

    s3.carry_out = carried_out  # type: ignore[method-assign]
    check_conditions(over_http(s3))
    assert failing
    s3.carry_out = lambda verb, *rest: (  # type: ignore[method-assign]
        (503, b"") if verb == "PUT" else carry_out(verb, *rest)
    )
    with pytest.raises(Unavailable):
        check_conditions(over_http(s3))


def test_while_s3_is_stopped_commits_wait_and_nothing_is_lost(s3):
    with closing(taken(over_http(s3, timeout=1.0))) as store:
        put(store, 1)
        with s3.stopped():
            waiting = [store.append(record(number)) for number in (2, 3)]
            time.sleep(2.5)  # longer than a request's time: its outcome is not known
            assert not any(future.done() for future in waiting)
        for future in waiting:
            future.result(BOUND_S)
        assert store.owned
    with closing(taken(over_http(s3))) as other:
        assert numbers_in(other) == [1, 2, 3]


def test_a_commit_without_an_outcome_ends_the_ownership(s3, monkeypatch):
    monkeypatch.setattr(store_module, "PUT_SECONDS", 0.5)
    lost = threading.Event()
    store = taken(over_http(s3, timeout=0.3))
    store.on_lost = lost.set
    with s3.stopped():
        futures = [store.append(record(number)) for number in (1, 2)]
        assert all(isinstance(f.exception(BOUND_S), Unavailable) for f in futures)
        assert lost.wait(BOUND_S)
    with pytest.raises(Unavailable):
        store.append(record(3)).result(BOUND_S)
    with pytest.raises(Unavailable):
        store.read(1, [(0, 1)])
    store.close()


# ---------------------------------------------------------------------------- the lease


class Line:
    """A bucket for one server, which can be cut off."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.cut = False

    def __getattr__(self, name: str) -> Any:
        if self.cut:
            raise Unavailable("cut off", retry_after=1.0)
        return getattr(self._bucket, name)


def ignore(_: Owner) -> None:
    pass


def test_a_lease_goes_to_the_next_server_when_it_is_released(bucket):
    first, second = Lease(bucket, "a", 3600), Lease(bucket, "b", 1)
    first.acquire(ignore)
    assert first.held
    owners: list[Owner] = []
    waiting = threading.Thread(target=second.acquire, args=(owners.append,))
    waiting.start()
    wait_for(lambda: owners, BOUND_S)
    assert owners == [Owner("a")]
    assert not second.held
    first.release()
    first.release()
    waiting.join(BOUND_S)
    wait_for(lambda: second.held, BOUND_S)
    second.release()


def test_an_owner_that_is_cut_off_serves_nothing_before_another_takes_its_lease(bucket):
    line = Line(bucket)
    first, second = Lease(line, "a", 1), Lease(bucket, "b", 1)
    lost = threading.Event()
    first.on_lost = lost.set
    first.acquire(ignore)
    line.cut = True
    second.acquire(ignore)
    assert not first.held
    wait_for(lambda: second.held, BOUND_S)  # the time of a lease may pass between two lines
    line.cut = False
    assert lost.wait(BOUND_S)
    assert first.lost
    assert not first.held
    for lease in (first, second):
        lease.release()


def test_an_owner_that_was_cut_off_goes_on_if_none_took_its_lease(bucket):
    line = Line(bucket)
    lease = Lease(line, "a", 1)
    lease.acquire(ignore)
    line.cut = True
    wait_for(lambda: not lease.held, BOUND_S)
    line.cut = False
    wait_for(lambda: lease.held, BOUND_S)
    assert not lease.lost
    lease.release()


def test_a_sign_of_life_whose_answer_was_lost_is_ones_own(s3):
    lost: set[str] = set()

    def lose(verb: str, key: str) -> bool:
        first = verb == "PUT" and "lease/" in key and key not in lost
        lost.update([key] * first)
        return first

    s3.lose_answer = lose
    lease = Lease(over_http(s3), "a", 1)
    lease.acquire(ignore)
    wait_for(lambda: len(lost) > 5, BOUND_S)
    assert not lease.lost
    wait_for(lambda: lease.held, BOUND_S)
    lease.release()


def test_an_object_in_a_hole_of_the_chain_is_no_ownership(bucket):
    owner = Lease(bucket, "a", 0.4)
    owner.acquire(ignore)
    wait_for(lambda: bucket.list("lease/")[-1].key > lease_module.key(8), BOUND_S)
    late = Lease(bucket, "b", 3600)
    late._take(3)  # the number that it saw before it stalled, whose object is deleted
    assert not late.held
    assert not late._end
    wait_for(lambda: owner.held, BOUND_S)
    owner.release()


def test_the_chain_stays_short(bucket):
    owner = Lease(bucket, "a", 0.2)
    owner.acquire(ignore)
    wait_for(lambda: bucket.list("lease/")[-1].key > lease_module.key(12), BOUND_S)
    assert len(bucket.list("lease/")) <= 7
    owner.release()


def test_a_deletion_that_hangs_delays_no_sign_of_life(s3):
    """Deletions hung for as long as the object store took them, and the lease ran out meanwhile."""
    hangs = threading.Event()

    def before(verb: str, _: str) -> None:
        if verb in ("DELETE", "POST"):
            hangs.wait(BOUND_S)

    owner = Lease(over_http(s3), "a", 1)
    s3.before = before
    owner.acquire(ignore)
    wait_for(lambda: len(s3.keys("prefix/lease/")) > 12 or owner.lost, BOUND_S)
    assert owner.held
    hangs.set()
    wait_for(lambda: len(s3.keys("prefix/lease/")) <= 7, BOUND_S)
    owner.release()


def test_reads_are_refused_while_the_lease_is_over(bucket):
    line = Line(bucket)
    with closing(ObjectStore(bucket, Lease(line, "a", 1))) as store:
        store.take_over()
        put(store, 1)
        wait_for(lambda: store.owned, BOUND_S)
        line.cut = True
        wait_for(lambda: not store.owned, BOUND_S)
        with pytest.raises(Unavailable, match="lease"):
            read(store, 1)
        assert not store.stats().writable
        put(store, 2)  # the log decides, not the lease
        line.cut = False
        wait_for(lambda: store.owned, BOUND_S)
        assert read(store, 1) == payload(1)


def test_closing_ends_the_wait_for_the_lease(bucket):
    with closing(ObjectStore(bucket, Lease(bucket, "a", 3600))) as owner:
        owner.take_over()
        standby, owners = ObjectStore(bucket, Lease(bucket, "b", 3600)), []
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                standby.take_over(owners.append)
            except RouteTraceError as error:
                failures.append(error)

        work = threading.Thread(target=wait)
        work.start()
        wait_for(lambda: owners, BOUND_S)
        with pytest.raises(Unavailable):
            standby.append(record(1)).result(BOUND_S)
        standby.close()
        work.join(BOUND_S)
        assert isinstance(failures[0], Closed)


# ---------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--store", "object"], "expected store object with an object_url"),
        (["--object-url", "s3://b"], "expected store object with an object_url"),
        (["--store", "object", "--object-url", "http://b/c"], "expected s3://bucket"),
        (["--store", "object", "--object-url", "s3:///c"], "expected s3://bucket"),
        (["--store", "object", "--object-url", "s3://b", "--ack-mode", "memory"], "ack_mode"),
    ],
)
def test_settings_that_do_not_fit(flags, text):
    with pytest.raises(ConfigError, match=text):
        load_config(flags)


def test_refused_credentials_are_named(s3):
    s3.carry_out = lambda *_: (403, b"<Error><Code>AccessDenied</Code></Error>")  # type: ignore[method-assign]
    with pytest.raises(InvalidArgument, match="AWS_"):
        check_conditions(over_http(s3))
