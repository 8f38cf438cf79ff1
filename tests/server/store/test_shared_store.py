"""Partitions of one bucket that several servers share: leases, heirs, layout and settings."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product

import pytest
from obstore.store import MemoryStore as MemoryBucket

from routetrace.common.errors import Closed, InvalidArgument
from routetrace.server.process.partitions import worker_address, worker_config
from routetrace.server.settings.config import ConfigError
from routetrace.server.settings.loading import load_config
from routetrace.server.store.interface import NO_OWNER, Owner
from routetrace.server.store.object.bucket import Bucket
from routetrace.server.store.object.clock import clock
from routetrace.server.store.object.layout import check_layout
from routetrace.server.store.object.lease import Lease
from routetrace.server.store.object.seats import Seats
from support.waiting import wait_for

BOUND_S = 60.0
SECONDS = 5.0
A, B, C = "a:7411", "b:7411", "c:7411"


@pytest.fixture
def bucket() -> Bucket:
    return Bucket(MemoryBucket(), "memory")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Table:
    """Servers of the last partition on one clock, one step of which is the time of a lease."""

    def __init__(self, bucket: Bucket, owners: list[str], *servers: str) -> None:
        self.clock = Clock()
        self.owners = owners
        last = len(owners) - 1
        self.seats = {
            server: Seats(bucket, last, server, SECONDS, lambda: self.owners, self.clock)
            for server in servers
        }

    def step(self, owner: str, *standbys: str) -> str:
        self.clock.now += SECONDS
        for server in standbys:
            self.seats[server].announce()
        return self.seats[owner].heir()


@pytest.mark.parametrize(
    ("owners", "heir"), [([A, A], B), ([A, A, A], B), ([B, A], ""), ([B, A, A], ""), ([C, A], "")]
)
def test_a_partition_goes_to_a_server_with_two_fewer_once_that_one_is_steady(bucket, owners, heir):
    table = Table(bucket, owners, A, B)
    found = [table.step(A, B) for _ in range(12)]
    assert found[:7] == [""] * 7
    assert found[-1] == heir


def test_while_a_partition_is_free_none_is_handed_over(bucket):
    table = Table(bucket, ["", A, A, A], A, B)
    assert [table.step(A, B) for _ in range(12)] == [""] * 12
    table.owners = [A, A, A, A]
    assert [table.step(A, B) for _ in range(2)] == ["", B]


def test_what_was_read_slowly_decides_nothing(bucket):
    table = Table(bucket, [A, A], A, B)

    def slowly() -> list[str]:
        table.clock.now += 2 * SECONDS
        return [A, A]

    table.seats[A]._owners = slowly
    assert [table.step(A, B) for _ in range(20)] == [""] * 20


def test_an_heir_has_to_live_after_owners_were_read(bucket):
    """Its partitions are others' after a lease, and it looks steady for three."""
    table = Table(bucket, [B, A], A, B)
    assert [table.step(A, B) for _ in range(12)] == [""] * 12
    table.owners = [A, A]
    assert [table.step(A) for _ in range(12)] == [""] * 12


def test_a_server_that_comes_and_goes_takes_nothing(bucket):
    table = Table(bucket, [A, A], A, B)
    for _ in range(10):
        assert [table.step(A, B) for _ in range(5)] == [""] * 5
        assert [table.step(A) for _ in range(5)] == [""] * 5


def test_a_seat_of_a_server_that_is_gone_counts_for_nothing_and_is_deleted(bucket):
    table = Table(bucket, [A, A], A, B)
    table.step(A, B)
    assert [table.step(A) for _ in range(59)] == [""] * 59
    assert len(bucket.list("seat/")) == 1
    assert [table.step(A) for _ in range(3)] == [""] * 3
    assert not bucket.list("seat/")


def test_one_that_died_after_it_was_steady_is_no_heir(bucket):
    table = Table(bucket, [A, B, A], A, B, C)
    assert next(filter(None, (table.step(A, B, C) for _ in range(12))), "") == C
    for _ in range(4):
        last = table.step(A, B)
    assert last == ""


def test_keys_that_are_no_seats_count_for_nothing(bucket):
    table = Table(bucket, [A, A], A)
    for number in range(12):
        bucket.put("seat/xyz", b"%d" % number)
        bucket.put("seat/ff", b"%d" % number)
        assert table.step(A) == ""


# ---------------------------------------------------------------------------- the lease


def slowly() -> float:
    """A clock on which no lease of a test is over, however late a thread of its owner runs."""
    return time.monotonic() / 1000


def lease(
    bucket: Bucket, server: str, seconds: float = 3600, now: Callable[[], float] = clock
) -> Lease:
    seats = Seats(bucket, 1, server, seconds, lambda: [A, A])
    return Lease(bucket, server, seconds, now, address=server, seats=seats)


def started(waiting: Lease) -> tuple[threading.Thread, list[Owner]]:
    owners: list[Owner] = []

    def wait() -> None:
        with suppress(Closed):
            waiting.acquire(owners.append)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    wait_for(lambda: owners, BOUND_S)
    return thread, owners


def test_a_lease_that_was_freed_for_an_heir_is_the_heirs(bucket):
    """The other one has waited for longer, and sees that it is free; it waits on, for an hour."""
    leases = {A: lease(bucket, A), B: lease(bucket, B, 5), C: lease(bucket, C, 5)}
    leases[A].acquire(lambda _: None)
    waiting, owners = started(leases[C])
    assert owners == [Owner(A, A)]
    leases[A]._heir = B  # as `Seats.heir` finds it
    leases[A].release()
    wait_for(lambda: owners[-1] == NO_OWNER, BOUND_S)
    heir, _ = started(leases[B])
    heir.join(BOUND_S)
    assert leases[B].held
    wait_for(lambda: owners[-1] == Owner(B, B), BOUND_S)
    assert not leases[C].held
    leases[C].release()
    waiting.join(BOUND_S)
    leases[B].release()


def test_a_server_that_may_become_the_owner_names_none(bucket):
    """Else two would name each other while the new owner reads the log."""
    owner, standby = lease(bucket, A), lease(bucket, B, 1)
    owner.acquire(lambda _: None)
    waiting, owners = started(standby)
    owner.release()
    waiting.join(BOUND_S)
    assert owners == [Owner(A, A), NO_OWNER]
    standby.release()


def test_an_owner_looks_for_an_heir_and_says_so(bucket):
    owner, standby = lease(bucket, A, 0.2, slowly), lease(bucket, B, 0.2, slowly)
    heir = threading.Event()
    owner.on_heir = heir.set
    owner.acquire(lambda _: None)
    thread, _ = started(standby)
    assert heir.wait(BOUND_S)
    assert not owner.lost
    owner.release()
    thread.join(BOUND_S)
    assert standby.held
    standby.release()


def test_the_lease_of_an_heir_that_is_gone_goes_to_others(bucket):
    owner, standby = lease(bucket, A), lease(bucket, B, 0.5)
    owner.acquire(lambda _: None)
    owner._heir = C
    owner._sign = owner._sign.__class__(A, "nonce", 0.5, A)  # others wait for so long
    owner.release()
    reports: list[Owner] = []
    standby.acquire(reports.append)
    assert standby.held
    assert set(reports) <= {NO_OWNER}
    standby.release()


def test_no_caller_is_sent_to_an_earlier_life_of_the_same_server(bucket):
    earlier, now = lease(bucket, A), lease(bucket, A, 0.5)
    earlier.acquire(lambda _: None)
    thread, owners = started(now)
    assert owners == [Owner(A, "")]
    now.release()
    thread.join(BOUND_S)
    earlier.release()


# ---------------------------------------------------------------------------- layout, settings


def test_a_prefix_is_for_the_settings_of_its_first_server(bucket):
    settings = [(workers, pins) for workers, pins in product((1, 2), ({}, {"a": 0}))]
    check_layout(bucket, 2, {"a": 0, "b": 1})
    check_layout(bucket, 2, {"b": 1, "a": 0})
    for workers, pins in settings:
        with pytest.raises(InvalidArgument, match="with which its first server") as caught:
            check_layout(bucket, workers, pins)
        assert caught.value.field == ("workers" if workers == 1 else "run_workers")


@pytest.mark.parametrize("content", [b"", b"x", b"[]", b"{}", b"\xff", b"null"])
def test_a_layout_that_cannot_be_read_is_refused(bucket, content):
    bucket.put("layout", content)
    with pytest.raises(InvalidArgument, match="expected a prefix of this store"):
        check_layout(bucket, 1, {})


def flags(*more: str) -> list[str]:
    return ["--store=object", "--object-url=s3://b/p", "--workers=3", *more]


def test_each_worker_has_its_address_and_its_share_of_the_cache():
    config = load_config(flags("--listen=127.0.0.1:7411", "--advertise=[fd00::1]:80"))
    assert config.advertised == "[fd00::1]:80"
    assert worker_address(config.advertised, 2) == "[fd00::1]:82"
    found = worker_config(config, 2)
    assert found.listen == "127.0.0.1:7413"
    assert found.advertised == config.advertised  # the server's, for its seats
    assert 3 * found.object_cache >= config.object_cache


def test_without_a_name_of_its_own_a_worker_advertises_the_servers_address():
    config = load_config(flags("--listen=127.0.0.1:7411"))
    assert worker_config(config, 2).advertised == "127.0.0.1:7411"


@pytest.mark.parametrize(
    "wrong",
    [
        ["--listen=0.0.0.0:7411", "--insecure"],
        ["--listen=[::]:7411", "--insecure"],
        ["--advertise=0.0.0.0:7411"],
        ["--advertise=host:0"],
        ["--advertise=host:65534"],
    ],
)
def test_addresses_that_no_caller_can_use(wrong):
    with pytest.raises(ConfigError, match="expected advertise to be the host:port"):
        load_config(flags(*wrong))


def test_an_address_without_a_port_is_refused():
    with pytest.raises(ConfigError, match="expected host:port"):
        load_config(flags("--advertise=host"))
