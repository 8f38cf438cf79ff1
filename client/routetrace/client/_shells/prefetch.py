"""Background fetches of plans within a budget of bytes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from routetrace.client._core.fetch import Budget, Fetch
from routetrace.client._core.steps import Plan
from routetrace.client._shells.aio_drive import AsyncDriver, settled
from routetrace.client._shells.drive import Driver, Scope
from routetrace.client.progress import Meter
from routetrace.client.rows import FetchStats, Rows
from routetrace.client.stat import ReadFacts
from routetrace.common.errors import RouteTraceError


class Prefetch:
    """Iterates over the rows of plans, in their order; made by `RouteClient.prefetch`.

    Reading starts at once. Results that are being read, are ready, or were returned last count
    against the budget; asking for the next releases the last. The error of a plan is raised at its
    turn; the iteration may continue after it.
    """

    def __init__(
        self,
        driver: Driver,
        fetches: Iterable[Fetch],
        max_bytes: int,
        concurrency: int,
        meter: Meter,
    ) -> None:
        self.stats = FetchStats()
        """Sum over all results returned."""
        self._driver = driver
        self._budget = Budget(fetches, max_bytes, concurrency)
        self._meter = meter
        self._pool = ThreadPoolExecutor(concurrency, "routetrace-fetch")
        self._scope = driver.scope()
        self._pending: deque[tuple[Fetch, Scope, list[Future[list[ReadFacts]]]]] = deque()
        self._last: Fetch | None = None
        try:
            self._start()
        except BaseException:  # the caller has no object to close
            self.close()
            raise

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Rows:
        try:
            rows = self._next()
        except Exception as error:
            if not isinstance(error, StopIteration):
                self._meter.counted(error)
            raise
        self.stats += rows.stats
        return self._meter.counted(rows)

    def _next(self) -> Rows:
        if self._last:
            self._budget.release(self._last)
            self._last = None
        if not self._scope.cancelled:
            self._start()
        if not self._pending:
            self.close()
            raise StopIteration
        self._last, scope, futures = self._pending.popleft()
        began = time.monotonic()
        try:
            reads = [facts for future in futures for facts in future.result()]
        finally:  # after an error, cancel the other reads
            scope.cancel()
            self._scope.discard(scope)
        return self._last.rows(reads, time.monotonic() - began)

    def close(self) -> None:
        """Cancel all fetches; may be called more than once."""
        self._scope.cancel()
        self._driver.end(self._scope)
        self._pool.shutdown(cancel_futures=True)
        self._pending.clear()

    def _start(self) -> None:
        for fetch, reads in self._budget.admit():
            scope = Scope()
            self._scope.add(scope)
            futures = [self._pool.submit(self._driver.every, steps, scope) for steps in reads]
            self._pending.append((fetch, scope, futures))


class AsyncPrefetch:
    """Iterates over the rows of plans, in their order; made by `AsyncRouteClient.prefetch`.

    As `Prefetch`. Rows are decoded beside the event loop, by its default executor.
    """

    def __init__(
        self,
        driver: AsyncDriver,
        fetches: Iterable[Fetch],
        max_bytes: int,
        concurrency: int,
        meter: Meter,
    ) -> None:
        self.stats = FetchStats()
        """Sum over all results returned."""
        self._driver = driver
        self._budget = Budget(fetches, max_bytes, concurrency)
        self._meter = meter
        self._slots = asyncio.Semaphore(concurrency)
        self._closed = False
        self._pending: deque[tuple[Fetch, asyncio.Future[list[ReadFacts]]]] = deque()
        self._last: Fetch | None = None
        try:
            self._start()
        except BaseException:  # the caller has no object to close
            for _, task in self._pending:
                task.cancel()
            raise

    async def __aenter__(self) -> AsyncPrefetch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncPrefetch:
        return self

    async def __anext__(self) -> Rows:
        try:
            rows = await self._next()
        except Exception as error:
            if not isinstance(error, StopAsyncIteration):
                self._meter.counted(error)
            raise
        self.stats += rows.stats
        return self._meter.counted(rows)

    async def _next(self) -> Rows:
        if self._last:
            self._budget.release(self._last)
            self._last = None
        if not self._closed:
            self._start()
        if not self._pending:
            self._closed = True
            raise StopAsyncIteration
        self._last, task = self._pending.popleft()
        began = time.monotonic()
        try:
            reads = await task
        finally:
            task.cancel()
        return self._last.rows(reads, time.monotonic() - began)

    async def close(self) -> None:
        """Cancel all fetches; may be called more than once."""
        self._closed = True
        tasks = [task for _, task in self._pending]
        self._pending.clear()
        for task in tasks:
            task.cancel()
        await settled(tasks)

    def _start(self) -> None:
        for fetch, reads in self._budget.admit():
            self._pending.append((fetch, asyncio.create_task(self._all(reads))))

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
    with Prefetch(driver, [fetch], 0, concurrency, Meter(None, ())) as fetched:
        return next(fetched)


async def fetch_async(driver: AsyncDriver, fetch: Fetch, concurrency: int) -> Rows:
    """Return the rows of one fetch."""
    async with AsyncPrefetch(driver, [fetch], 0, concurrency, Meter(None, ())) as fetched:
        return await anext(fetched)
