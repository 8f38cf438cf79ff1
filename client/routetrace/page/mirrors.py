"""Mirrors: the traces of a run as one token sees them, kept up to date while pages ask for them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from contextlib import aclosing, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routetrace.common.errors import (
    Closed,
    PermissionDenied,
    RouteTraceError,
    Unauthenticated,
)
from routetrace.page.backends import Backends
from routetrace.page.errors import busy
from routetrace.page.minutes import Minutes
from routetrace.page.sessions import Caller
from routetrace.page.trace_table import Filter, TraceTable

#: Seconds after which an unused mirror ends, and maximum number of mirrors.
_UNUSED_S = 60.0
_MAX_MIRRORS = 16
#: Seconds that an answer waits for all traces of a new mirror, if some are there, and if none is.
_PATIENCE_S = 1.5
_EMPTY_PATIENCE_S = 6.0
#: Seconds between two attempts to watch a run.
_AGAIN_S = 2.0

#: Orders of one mirror that stay while somebody scrolls, and seconds.
_MAX_VIEWS = 32
_VIEW_S = 600.0


@dataclass
class View:
    """An order of traces that was frozen when it was asked for."""

    rows: npt.NDArray[np.intp]
    version: int
    generation: int
    asked_at: float


class Mirror:
    """The traces of one run, as one token sees them.

    Args:
        backends: the server.
        caller: whose token is sent.
        run: the run.
    """

    def __init__(self, backends: Backends, caller: Caller, run: str) -> None:
        self.table = TraceTable()
        self.whole = False
        """Whether all traces of the run are in the table."""
        self.stale_since: float | None = None
        """Unix time from which on the server did not answer; None while it does."""
        self.used_at = time.monotonic()
        self.minutes = Minutes()
        """Its last minutes, which pages ask for."""
        self.overview: tuple[float, bytes] = 0.0, b""
        """Time (monotonic) of the last overview, and its JSON."""
        self._views: OrderedDict[str, View] = OrderedDict()
        self._refusal: RouteTraceError | None = None
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._keep(backends, caller, run))

    async def current(self) -> None:
        """Wait until the table holds all traces, for a moment at most.

        Raises:
            RouteTraceError: if the server refuses the token or the run, or never answered.
        """
        asked_at = self.used_at = time.monotonic()
        while not self.whole and self._refusal is None:
            patience = _PATIENCE_S if len(self.table) else _EMPTY_PATIENCE_S
            left = asked_at + patience - time.monotonic()
            if left <= 0:
                break
            self._news.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)
        if self._refusal is not None:
            raise self._refusal

    def view(self, wanted: Filter, order: str, *, descending: bool) -> tuple[str, View]:
        """Freeze an order of traces; return its name and the view."""
        table = self.table
        rows = table.find(wanted, order, descending=descending)
        now = time.monotonic()
        name = secrets.token_urlsafe(9)
        self._views[name] = View(rows, table.version, table.generation, now)
        while len(self._views) > _MAX_VIEWS:
            self._views.popitem(last=False)
        return name, self._views[name]

    def view_of(self, name: str) -> View | None:
        """Return a view by its name; None if it is gone."""
        view = self._views.get(name)
        if view is None or view.generation != self.table.generation:
            return None
        now = time.monotonic()
        if now - view.asked_at > _VIEW_S:
            del self._views[name]
            return None
        view.asked_at = now
        self._views.move_to_end(name)
        return view

    async def aclose(self) -> None:
        """End it."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    @property
    def ended(self) -> bool:
        """Whether it does not follow the run any more."""
        return self._task.done()

    async def _keep(self, backends: Backends, caller: Caller, run: str) -> None:
        while self._refusal is None:
            try:
                await self._follow(backends, caller, run)
            except (Unauthenticated, PermissionDenied) as error:
                self._refusal = error
            except Closed:
                return
            except RouteTraceError as error:
                if self.stale_since is None:
                    self.stale_since = time.time()
                if not self.whole and not len(self.table):
                    self._refusal = error  # nothing is there to be shown meanwhile
            self._news.set()
            if self._refusal is None:
                await asyncio.sleep(_AGAIN_S)

    async def _follow(self, backends: Backends, caller: Caller, run: str) -> None:
        """Watch the run until that fails."""
        left = set(self.table.trace_ids)  # of an earlier watch; those that are not told are gone
        async with aclosing(backends.watch(caller, run)) as watch:
            async for changes in watch:
                self.stale_since = None
                for trace_id in changes.gone:
                    self.table.remove(trace_id)
                for summary in changes.traces:
                    self.table.put(summary)
                    left.discard(summary.trace_id)
                if changes.whole:
                    for trace_id in left:
                        self.table.remove(trace_id)
                    left.clear()
                    self.whole = True
                self._news.set()
                await asyncio.sleep(0)  # answers come between


class Mirrors:
    """The mirrors that pages ask for.

    Args:
        backends: the server.
    """

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._mirrors: dict[tuple[str, str], Mirror] = {}

    async def of(self, caller: Caller, run: str) -> Mirror:
        """Return the mirror of a run for a caller.

        Raises:
            Overloaded: if there are too many.
            RouteTraceError: as `Mirror.current`.
        """
        await self._end_unused()
        key = caller.digest, run
        mirror = self._mirrors.get(key)
        if mirror is None or mirror.ended:
            if len(self._mirrors) >= _MAX_MIRRORS:
                raise busy()
            mirror = self._mirrors[key] = Mirror(self._backends, caller, run)
        try:
            await mirror.current()
        except RouteTraceError:
            if self._mirrors.get(key) is mirror:
                del self._mirrors[key]
            await mirror.aclose()
            raise
        return mirror

    async def drop(self, caller: Caller) -> None:
        """End the mirrors of a token."""
        await self._end([key for key in self._mirrors if key[0] == caller.digest])

    async def aclose(self) -> None:
        """End all."""
        await self._end([*self._mirrors])

    async def _end_unused(self) -> None:
        oldest = time.monotonic() - _UNUSED_S
        await self._end([key for key, mirror in self._mirrors.items() if mirror.used_at < oldest])

    async def _end(self, keys: list[tuple[str, str]]) -> None:
        for mirror in [self._mirrors.pop(key) for key in keys]:
            await mirror.aclose()
