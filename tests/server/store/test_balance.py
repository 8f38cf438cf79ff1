"""Hand-overs between servers that share partitions, over a bucket and clocks of this process.

Leases and seats are those of the server; the test takes each of their steps, in any order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.server.process import ownership
from routetrace.server.process.partitions import worker_address
from routetrace.server.store.object.bucket import Listed
from routetrace.server.store.object.lease import Lease
from routetrace.server.store.object.seats import STEADY_LEASES, Seats, next_move

SECONDS = 4.0
#: Rounds in the time of a lease: in each, a worker that runs takes all its steps.
ROUNDS = 4


def ports(count: int) -> list[str]:
    """Addresses of servers, with room for their workers."""
    return [f"host:{7000 + 100 * number}" for number in range(count)]


def excess(shares: Sequence[int]) -> int:
    """Least number of moves after which shares differ by one at most."""
    low, more = divmod(sum(shares), len(shares))
    ordered = sorted(shares, reverse=True)
    return sum(max(0, share - low - (n < more)) for n, share in enumerate(ordered))


# ---------------------------------------------------------------------------- the rule


@pytest.mark.parametrize(("servers", "partitions"), [(1, 3), (2, 6), (3, 5), (4, 5), (5, 4)])
def test_as_few_moves_as_can_be_lead_from_any_owners_to_even_shares(servers, partitions):
    names = ports(servers)
    for start in product(names, repeat=partitions):
        owners = list(start)
        least = excess([owners.count(name) for name in names])
        for _ in range(least):
            move = next_move(owners, names)
            assert move
            owners[move.partition] = move.heir
        assert next_move(owners, names) is None
        assert excess([owners.count(name) for name in names]) == 0


def test_servers_that_are_not_steady_get_nothing_and_count_as_owners():
    a, b, c = ports(3)
    assert next_move([a, a, a], []) is None
    assert next_move([a, a, a], [b]) == (2, b)
    assert next_move([b, a, b, a, b], [c]) == (4, c)
    assert next_move([b, b, a, a], [c]) == (3, c)  # of equal ones, the first address gives


# ---------------------------------------------------------------------------- the world


class Shelf:
    """A prefix of a bucket."""

    def __init__(
        self, objects: dict[str, bytes], prefix: str = "", before: Callable[[], object] = int
    ) -> None:
        self._objects, self._prefix, self._before = objects, prefix, before

    def create(self, key: str, body: bytes) -> bool:
        return self._objects.setdefault(self._prefix + key, body) is body

    def put(self, key: str, body: bytes) -> None:
        self._objects[self._prefix + key] = body

    def get(self, key: str) -> bytes | None:
        self._before()
        return self._objects.get(self._prefix + key)

    def list(self, prefix: str) -> list[Listed]:
        self._before()
        whole, cut = self._prefix + prefix, len(self._prefix)
        return [Listed(key[cut:], 0) for key in self._objects if key.startswith(whole)]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._objects.pop(self._prefix + key, None)


class Worker:
    """One partition at one server, over all the times that it stands by or owns."""

    def __init__(self, world: World, server: str, number: int) -> None:
        self._world, self._server, self.number = world, server, number
        self.begin()

    def begin(self) -> None:
        """Stand by, without any memory."""
        world, number, server = self._world, self.number, self._server
        bucket = Shelf(world.objects, f"part/{number}/")
        now = partial(world.now, server)
        seats = Seats(bucket, number, server, SECONDS, world.owners, now)  # type: ignore[arg-type]
        self.lease = Lease(
            bucket,  # type: ignore[arg-type]
            server,
            SECONDS,
            now,
            address=worker_address(server, number),
            seats=seats,
        )
        self.leaves = False
        self.lease.on_heir = self._leave

    def _leave(self) -> None:
        self.leaves = True
        self._world.handed_over(self._server, self.number, self.lease._heir)

    @property
    def owns(self) -> bool:
        return self.lease._end > 0

    def step(self) -> None:
        """Take the next steps of one that stands by, or of an owner."""
        if not self.owns:
            self.lease.stand_by(lambda _: None)
            return
        self.lease.beat()
        if self.lease.lost:
            self.begin()
        elif not self.leaves:
            self.lease.tend()

    def leave(self) -> None:
        """Free the lease and stand by."""
        self.lease.release()
        self.begin()


class World:
    """Servers that live, die and return; `handed_over` checks each hand-over that begins."""

    def __init__(self, rng: Random, servers: int, partitions: int) -> None:
        self.rng, self.names, self.partitions = rng, ports(servers), partitions
        self.objects: dict[str, bytes] = {}
        self.time = 0.0
        self.offsets = {name: 1000 * rng.random() for name in self.names}
        self.workers: dict[str, list[Worker]] = {}
        self.moves: list[tuple[str, int, str]] = []
        #: Whether owners are read; if not, one partition is free.
        self.reads = True
        self.nested = 0

    def now(self, server: str) -> float:
        return self.time + self.offsets[server]

    def start(self, server: str) -> None:
        self.workers[server] = [Worker(self, server, n) for n in range(self.partitions)]

    def owners(self) -> list[str]:
        """As a server reads them; others take up to `nested` steps meanwhile."""
        left = self.nested

        def before() -> None:
            nonlocal left
            if left and self.rng.random() < 0.5:
                left -= 1
                nested, self.nested = self.nested, 0
                self.any_step()
                self.nested = nested

        bucket = Shelf(self.objects, before=before)
        found = ownership.owners_of(bucket, self.partitions)  # type: ignore[arg-type]
        return found if self.reads else ["", *found[1:]]

    def truth(self) -> list[str]:
        """Return the owners as the bucket has them."""
        found = []
        for number in range(self.partitions):
            chain = [key for key in self.objects if key.startswith(f"part/{number}/lease/")]
            sign = json.loads(self.objects[max(chain)]) if chain else {"free": True}
            found.append("" if sign["free"] else sign["name"])
        return found

    def handed_over(self, server: str, number: int, heir: str) -> None:
        owners = self.truth()
        assert owners[number] == server
        assert owners.count(server) >= owners.count(heir) + 2, (owners, server, heir)
        assert "" not in owners
        assert not any(w.leaves for w in self.all_workers() if w.number != number)
        self.moves.append((server, number, heir))

    def all_workers(self) -> list[Worker]:
        return [worker for workers in self.workers.values() for worker in workers]

    def any_step(self) -> None:
        worker = self.rng.choice(self.all_workers())
        if worker.leaves:
            worker.leave()
        else:
            worker.step()
        self.check()

    def check(self) -> None:
        """No partition has two owners."""
        held = Counter(worker.number for worker in self.all_workers() if worker.lease.held)
        assert not held or max(held.values()) == 1

    def rounds(self, leases: float) -> None:
        """Let all workers run; one that leaves takes its time."""
        for _ in range(int(ROUNDS * leases)):
            self.time += SECONDS / ROUNDS
            for worker in self.rng.sample(self.all_workers(), len(self.all_workers())):
                if worker.leaves and self.rng.random() < 0.5:
                    worker.leave()
                else:
                    worker.step()
                self.check()

    def settle(self) -> None:
        """Let all workers run until nothing moves any more."""
        for _ in range(4 * self.partitions):
            before = (self.truth(), len(self.moves))
            self.rounds(2 * STEADY_LEASES)
            if (self.truth(), len(self.moves)) == before:
                return
        raise AssertionError("partitions move for ever")

    def shares(self) -> list[int]:
        owners = self.truth()
        assert set(owners) <= set(self.workers), owners
        return [owners.count(server) for server in self.workers]

    def place(self, owners: Sequence[str]) -> None:
        """Make servers the owners, with all others steady."""
        self.reads = False
        for number, owner in enumerate(owners):
            if owner not in self.workers:
                self.start(owner)
            self.workers[owner][number].step()
        for name in {*self.names} - {*owners}:
            self.start(name)
        self.rounds(STEADY_LEASES + 3)
        assert self.truth() == [*owners]
        self.reads = True


sizes = {"servers": st.integers(2, 4), "partitions": st.integers(2, 5)}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32), **sizes)
def test_owners_that_look_at_any_time_make_no_move_too_many(seed, servers, partitions):
    world = World(rng := Random(seed), servers, partitions)
    # Two hand-overs take five steps at least: free, take, look, free, take.
    world.nested = 4
    start = [rng.choice(world.names) for _ in range(partitions)]
    world.place(start)
    world.settle()
    assert len(world.moves) == excess([start.count(name) for name in world.names])
    assert excess(world.shares()) == 0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32), **sizes)
def test_after_any_deaths_and_returns_in_any_order_shares_are_even(seed, servers, partitions):
    world = World(rng := Random(seed), servers, partitions)
    for _ in range(300):
        chance = rng.random()
        if chance < 0.03 or not world.workers:
            world.start(rng.choice(world.names))  # again: kill -9, and a new life
        elif chance < 0.05:
            del world.workers[rng.choice([*world.workers])]
        elif chance < 0.1:
            world.time += rng.choice((0.1, 1.0)) * SECONDS
        elif chance < 0.3:
            world.rounds(rng.choice((1, 4)) / ROUNDS)
        else:
            world.any_step()
        world.check()
    if not world.workers:
        world.start(world.names[0])
    world.settle()
    assert excess(world.shares()) == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_death_moves_what_it_must_and_a_return_one_partition(seed):
    world = World(Random(seed), 3, 3)
    a, b, c = world.names
    world.place([a, b, c])
    del world.workers[a]
    world.rounds(20)
    assert world.truth()[1:] == [b, c]
    assert not world.moves
    world.start(a)
    world.rounds(20)
    assert sorted(world.shares()) == [1, 1, 1]
    assert [heir for _, _, heir in world.moves] == [a]


@pytest.mark.parametrize("seed", range(5))
def test_of_two_servers_with_most_one_gives(seed):
    world = World(Random(seed), 3, 4)
    a, b, c = world.names
    world.place([b, a, b, a])
    world.settle()
    assert world.moves == [(a, 3, c)]


@pytest.mark.parametrize("seed", range(10))
def test_servers_that_start_one_after_the_other_move_one_partition_for_each(seed):
    world = World(Random(seed), 3, 3)
    for name in world.names:
        world.start(name)
        world.rounds(0.5)
    world.rounds(40)
    assert sorted(world.shares()) == [1, 1, 1]
    assert len(world.moves) == 2


@pytest.mark.parametrize("seed", range(5))
def test_the_partition_of_an_heir_that_dies_on_the_way_is_served_and_moves_no_more(seed):
    world = World(Random(seed), 3, 3)
    a, b, c = world.names
    world.place([a, a, c])
    for _ in range(20 * ROUNDS):
        if not world.moves:
            world.rounds(1 / ROUNDS)
    assert world.moves == [(a, 1, b)]
    del world.workers[b]
    world.rounds(20)
    assert sorted(world.shares()) == [1, 2]
    assert len(world.moves) == 1


def test_even_shares_are_read_rarely():
    world = World(Random(0), 3, 4)
    a, b, c = world.names
    world.place([a, a, b, c])
    reads = 0
    owners = world.owners

    def counted() -> list[str]:
        nonlocal reads
        reads += 1
        return owners()

    for worker in world.all_workers():
        assert worker.lease._seats
        worker.lease._seats._owners = counted
    world.rounds(60)
    assert not world.moves
    assert reads == 4 * 60 / (STEADY_LEASES + 4)


def test_a_chain_whose_end_names_no_address_is_that_of_no_server():
    objects: dict[str, bytes] = {}
    addresses: Collection[object] = ("host:7001", "host", "", 7, None, "host:x")
    for number, address in enumerate(addresses):
        sign = {"name": "a", "nonce": "n", "seconds": 1, "address": address}
        objects[f"part/{number}/lease/{1:016d}"] = json.dumps(sign).encode()
    objects["part/6/lease/0000000000000001"] = b"damaged"
    found = ownership.owners_of(Shelf(objects), 8)  # type: ignore[arg-type]
    assert found == ["host:7001", "", "", "", "", "", "", ""]
