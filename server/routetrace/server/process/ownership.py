"""Ownership of a store that several servers name: one waits for it, and may lose it."""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial

from routetrace.common.errors import InvalidArgument
from routetrace.server.access.lifecycle import Lifecycle, ServerState
from routetrace.server.access.partition import Partition
from routetrace.server.process.partitions import worker_address
from routetrace.server.settings.config import ServerConfig
from routetrace.server.store.interface import Owner, Store
from routetrace.server.store.object.bucket import Bucket, open_bucket
from routetrace.server.store.object.files import PayloadFiles
from routetrace.server.store.object.layout import check_layout, partition_path, partition_url
from routetrace.server.store.object.lease import Lease, end_of_chain
from routetrace.server.store.object.probe import check_conditions
from routetrace.server.store.object.seats import Seats
from routetrace.server.store.object.store import ObjectStore

_log = logging.getLogger("routetrace.server.daemon")


def open_object_store(config: ServerConfig, partition: Partition, *, first: bool) -> ObjectStore:
    """Return the store of a partition of `object_url`, which `take_over` fills.

    Args:
        config: of the server, or of its worker for the partition.
        partition: of the bucket's prefix.
        first: whether to check the object store and the division into partitions.

    Raises:
        InvalidArgument: if the settings, the credentials or the object store cannot be used.
        Unavailable: if it does not answer.
    """
    if first:
        whole = open_bucket(config.object_url, config.object_endpoint)
        check_conditions(whole)
        check_layout(whole, partition.count, config.run_workers, config.spread_runs)
    url = partition_url(config.object_url, partition.number)
    seconds = config.object_lease_seconds
    leases_timeout = max(1.0, seconds / 2)
    leases = open_bucket(url, config.object_endpoint, timeout=leases_timeout, retry_seconds=0.0)
    address, seats = "", None
    if partition.count > 1:
        # As `owners_of` returns it: of a port, addresses in leases keep the number alone.
        server = worker_address(config.advertised, 0)
        address = worker_address(server, partition.number)
        all_leases = open_bucket(
            config.object_url, config.object_endpoint, timeout=leases_timeout, retry_seconds=0.0
        )
        owners = partial(owners_of, all_leases, partition.count)
        seats = Seats(leases, partition.number, server, seconds, owners)
    name = f"{socket.gethostname()} ({config.listen})"
    return ObjectStore(
        open_bucket(url, config.object_endpoint),
        Lease(leases, name, seconds, address=address, seats=seats),
        capacity_bytes=config.store_capacity,
        cache_bytes=config.object_cache,
        files=_files(config),
    )


def _files(config: ServerConfig) -> PayloadFiles | None:
    if config.object_cache_dir is None:
        return None
    try:
        return PayloadFiles(config.object_cache_dir, config.object_cache_disk)
    except OSError as error:
        raise InvalidArgument(
            field="object_cache_dir",
            value=str(config.object_cache_dir),
            expected=f"a directory that can be written ({error.strerror})",
        ) from error


def owners_of(bucket: Bucket, partitions: int) -> list[str]:
    """Return the address of the owner of each partition; "" if it is free or unknown.

    Args:
        bucket: of all partitions.
        partitions: number of them.

    Raises:
        Unavailable: if the object store does not answer.
    """
    found = []
    for number in range(partitions):
        _, sign = end_of_chain(bucket, f"{partition_path(number)}/")
        found.append("" if sign is None or sign.free else _server_of(sign.address, number))
    return found


def _server_of(address: str, number: int) -> str:
    """Return the address of the server whose worker has an address; "" if it is none."""
    try:
        return worker_address(address, -number)
    except (AttributeError, ValueError):
        return ""


def watch(store: Store, lifecycle: Lifecycle, lost: asyncio.Event) -> None:
    """Serve only while the store is owned; set `lost` once this server should leave it."""
    if ownership := store.ownership:
        loop = asyncio.get_running_loop()
        lifecycle.owns = lambda: ownership.owned
        ownership.on_lost = lambda: loop.call_soon_threadsafe(lost.set)


async def take_over(store: Store, lifecycle: Lifecycle) -> None:
    """Wait until this server owns the store; a store that is always its own returns at once.

    Raises:
        RouteTraceError: as `Ownership.take_over`.
    """
    if store.ownership is None:
        return
    loop = asyncio.get_running_loop()

    def waiting(owner: Owner) -> None:
        if owner.name:
            _log.info(
                "standby: %s owns the store; waiting until it leaves or its lease is over",
                owner.name,
            )
        loop.call_soon_threadsafe(lifecycle.stand_by, owner)

    await asyncio.to_thread(store.ownership.take_over, waiting)
    lifecycle.enter(ServerState.STARTING)
