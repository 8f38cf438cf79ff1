"""Background fetches of plans within a budget of bytes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from routetrace.client._core.fetch import Admitted, Budget, Fetch
from routetrace.client._core.steps import Plan
from routetrace.client._shells.aio_drive import AsyncDriver, settled
from routetrace.client._shells.drive import Driver, Scope
from routetrace.client.plan import FetchPlan
from routetrace.client.progress import Meter
from routetrace.client.rows import FetchStats, Rows
from routetrace.client.stat import ReadFacts
from routetrace.common.errors import Closed, RouteTraceError

_CLOSED = "the prefetch, or its client, was closed before its last plan"


class Prefetch:
    """Iterates over the rows of plans, in their order; made by `RouteClient.prefetch`.

    Reading starts at once. Results that are being read, are ready, or were returned last count
    against the budget; asking for the next releases the last. The error of a plan is raised at its
    turn, and plans behind it are read from then on; the iteration may continue after it. That of
    the first plan may be raised by `prefetch`, an error of the iterator of plans at any time.
    """

    def __init__(
        self,
        driver: Driver,
        plans: Iterable[FetchPlan],
        make: Callable[[FetchPlan], Fetch],
        max_bytes: int,
        concurrency: int,
        meter: Meter,
    ) -> None:
        self.stats = FetchStats()
        """Sum over all results returned."""
        self._driver = driver
        self._budget = Budget(plans, make, max_bytes, concurrency)
        self._meter = meter
        self._pool = ThreadPoolExecutor(concurrency, "routetrace-fetch")
        self._scope = driver.scope()
        self._pending: deque[tuple[Admitted, Scope, list[Future[list[ReadFacts]]]]] = deque()
        self._last: Fetch | None = None
        self._ended = False
        self._start()
        if self._pending and (error := self._pending[0][0].error):
            self._end()
            raise error

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Rows:
        if self._last:
            self._budget.release(self._last)
            self._last = None
        if self._ended:
            raise StopIteration
        if self._scope.cancelled:
            raise Closed(_CLOSED)
        self._start()
        if not self._pending:
            self._end()
            raise StopIteration
        try:
            rows = self._rows(*self._pending.popleft())
        except Exception as error:
            self._report(error)
            raise
        self.stats += rows.stats
        self._report(rows)
        return rows

    def _rows(
        self, admitted: Admitted, scope: Scope, futures: list[Future[list[ReadFacts]]]
    ) -> Rows:
        if admitted.error:
            raise admitted.error
        assert admitted.fetch
        self._last = admitted.fetch
        began = time.monotonic()
        try:
            reads = [facts for future in futures for facts in future.result()]
        finally:  # after an error, cancel the other reads
            scope.cancel()
            self._scope.discard(scope)
        return self._last.rows(reads, time.monotonic() - began)

    def _report(self, item: Rows | Exception) -> None:
        try:
            self._meter.counted(item)
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self._ended = True
        self.close()

    def close(self) -> None:
        """Cancel all fetches; may be called more than once."""
        self._scope.cancel()
        self._driver.end(self._scope)
        self._pool.shutdown(cancel_futures=True)
        self._pending.clear()

    def _start(self) -> None:
        if self._pending and self._pending[-1][0].error:
            return
        try:
            for admitted in self._budget.admit():
                scope = Scope()
                self._scope.add(scope)
                futures = [
                    self._pool.submit(self._driver.every, steps, scope) for steps in admitted.reads
                ]
                self._pending.append((admitted, scope, futures))
        except BaseException:  # of the plans: no other one follows
            self._end()
            raise


class AsyncPrefetch:
    """Iterates over the rows of plans, in their order; made by `AsyncRouteClient.prefetch`.

    As `Prefetch`. Rows are decoded beside the event loop, by its default executor.
    """

    def __init__(
        self,
        driver: AsyncDriver,
        plans: Iterable[FetchPlan],
        make: Callable[[FetchPlan], Fetch],
        max_bytes: int,
        concurrency: int,
        meter: Meter,
    ) -> None:
        self.stats = FetchStats()
        """Sum over all results returned."""
        self._driver = driver
        self._budget = Budget(plans, make, max_bytes, concurrency)
        self._meter = meter
        self._slots = asyncio.Semaphore(concurrency)
        self._closed = self._ended = False
        self._pending: deque[tuple[Admitted, asyncio.Future[list[ReadFacts]] | None]] = deque()
        self._last: Fetch | None = None
        self._start()
        if self._pending and (error := self._pending[0][0].error):
            self._cancel()
            raise error

    async def __aenter__(self) -> AsyncPrefetch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncPrefetch:
        return self

    async def __anext__(self) -> Rows:
        if self._last:
            self._budget.release(self._last)
            self._last = None
        if self._ended:
            raise StopAsyncIteration
        if self._closed:
            raise Closed(_CLOSED)
        self._start()
        if not self._pending:
            self._ended = True
            raise StopAsyncIteration
        try:
            rows = await self._rows(*self._pending.popleft())
        except Exception as error:
            await self._report(error)
            raise
        self.stats += rows.stats
        await self._report(rows)
        return rows

    async def _rows(self, admitted: Admitted, task: asyncio.Future[list[ReadFacts]] | None) -> Rows:
        if admitted.error:
            raise admitted.error
        assert admitted.fetch
        assert task
        self._last = admitted.fetch
        began = time.monotonic()
        try:
            reads = await task
        finally:
            task.cancel()
        return self._last.rows(reads, time.monotonic() - began)

    async def _report(self, item: Rows | Exception) -> None:
        try:
            self._meter.counted(item)
        except BaseException:
            self._ended = True
            await self.close()
            raise

    async def close(self) -> None:
        """Cancel all fetches; may be called more than once."""
        self._closed = True
        await settled(self._cancel())

    def _cancel(self) -> list[asyncio.Future[list[ReadFacts]]]:
        tasks = [task for _, task in self._pending if task]
        self._pending.clear()
        for task in tasks:
            task.cancel()
        return tasks

    def _start(self) -> None:
        if self._pending and self._pending[-1][0].error:
            return
        try:
            for admitted in self._budget.admit():
                task = None if admitted.error else asyncio.create_task(self._all(admitted.reads))
                self._pending.append((admitted, task))
        except BaseException:  # of the plans: no other one follows
            self._ended = True
            self._cancel()
            raise

    async def _all(self, reads: list[Plan[ReadFacts | RouteTraceError]]) -> list[ReadFacts]:
        async def every(steps: Plan[ReadFacts | RouteTraceError]) -> list[ReadFacts]:
            async with self._slots:
                return await self._driver.every(steps)

        tasks = [asyncio.create_task(every(steps)) for steps in reads]
        try:
            return [facts for batch in await asyncio.gather(*tasks) for facts in batch]
        finally:
            for task in tasks:
                task.cancel()
            await settled(tasks)


def fetch_blocking(driver: Driver, fetch: Fetch, concurrency: int) -> Rows:
    """Return the rows of one fetch."""
    if concurrency == 1:  # needs no thread
        began = time.monotonic()
        reads = driver.one_by_one(fetch.reads(concurrency))
        return fetch.rows(reads, time.monotonic() - began)
    with Prefetch(
        driver, [fetch.plan], lambda _: fetch, 0, concurrency, Meter(None, ())
    ) as fetched:
        return next(fetched)


async def fetch_async(driver: AsyncDriver, fetch: Fetch, concurrency: int) -> Rows:
    """Return the rows of one fetch."""
    meter = Meter(None, ())
    async with AsyncPrefetch(
        driver, [fetch.plan], lambda _: fetch, 0, concurrency, meter
    ) as fetched:
        return await anext(fetched)
