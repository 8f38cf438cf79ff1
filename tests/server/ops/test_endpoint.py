"""The metrics port takes a bounded part of the interpreter, however often it is asked."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import prometheus_client
import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from routetrace.server.ops import endpoint
from routetrace.server.ops.endpoint import Endpoint, _Format, _Rate, _Response, _Scrapes
from support.waiting import wait_for

TEXT = _Format(open_metrics=False, gzip=False)
GZIP = _Format(open_metrics=False, gzip=True)
OPEN = _Format(open_metrics=True, gzip=False)
SCRAPE_SECONDS = 0.2


class Clock:
    """A clock that goes on by waiting and by work alone."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.spent = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.spent += seconds


class Counting(Collector):
    """A gauge with the number of its scrapes, each of which is work."""

    def __init__(self, clock: Clock, seconds: float = SCRAPE_SECONDS) -> None:
        self.scrapes = 0
        self.seconds = seconds
        self.error: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self._clock = clock

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.scrapes += 1
        self._clock.work(self.seconds)
        assert self.go_on.wait(60)
        if self.error is not None:
            raise self.error
        yield GaugeMetricFamily("scrapes", "Scrapes so far.", self.scrapes)


class CountingLock:
    """A lock, with the number of threads that have come to it."""

    def __init__(self) -> None:
        self.came = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.came += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def registry_of(collector: Collector) -> prometheus_client.CollectorRegistry:
    registry = prometheus_client.CollectorRegistry()
    registry.register(collector)
    return registry


def made(counting: Counting, clock: Clock) -> _Scrapes:
    return _Scrapes(registry_of(counting), lambda: clock.now, clock.sleep, lambda: clock.spent)


def text_of(response: _Response, form: _Format) -> str:
    body = b"".join(response.body)
    return (gzip.decompress(body) if form.gzip else body).decode()


@contextlib.contextmanager
def serving(counting: Counting) -> Iterator[tuple[str, int]]:
    served = Endpoint(registry_of(counting), "127.0.0.1:0", {})
    try:
        host, _, port = served.address.rpartition(":")
        yield host, int(port)
    finally:
        served.close()


def test_scrapes_take_a_bounded_part_of_a_processor() -> None:
    clock = Clock()
    scrapes, begun = made(Counting(clock), clock), clock.now
    for number in range(1, 21):
        assert f"scrapes {number}.0" in scrapes.response(TEXT).body[0].decode()
    spent, took = clock.spent - SCRAPE_SECONDS, clock.now - begun - SCRAPE_SECONDS
    assert spent / took == pytest.approx(0.1)  # without the last one, whose pause comes after it
    clock.sleep(100)
    before = clock.now
    scrapes.response(TEXT)
    assert clock.now == before + SCRAPE_SECONDS  # one that is asked for seldom is made at once


def test_a_long_scrape_does_not_keep_the_next_one_for_long() -> None:
    clock = Clock()
    scrapes = made(Counting(clock, seconds=1.0), clock)
    scrapes.response(TEXT)
    before = clock.now
    scrapes.response(TEXT)
    assert clock.now - before == pytest.approx(2.0 + 1.0)


def test_one_scrape_that_began_after_them_serves_all_requests_that_wait() -> None:
    clock = Clock()
    counting = Counting(clock)
    scrapes = made(counting, clock)
    lock = scrapes._lock = CountingLock()  # type: ignore[assignment]
    counting.go_on.clear()
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(scrapes.response, TEXT)
        wait_for(lambda: counting.scrapes == 1, 60)
        others = [
            (form, pool.submit(scrapes.response, form)) for form in [TEXT, GZIP, OPEN, TEXT] * 2
        ]
        wait_for(lambda: lock.came == 9, 60)
        counting.go_on.set()
        assert "scrapes 1.0" in text_of(first.result(60), TEXT)
        for form, future in others:
            response = future.result(60)
            assert "scrapes 2.0" in text_of(response, form)
            kind = "application/openmetrics-text" if form.open_metrics else "text/plain"
            assert dict(response.headers)["Content-Type"].startswith(kind)
    assert counting.scrapes == 2


def test_a_scrape_that_fails_is_followed_by_the_next_one_after_a_pause() -> None:
    clock = Clock()
    counting = Counting(clock)
    scrapes = made(counting, clock)
    counting.error = ValueError("no metrics")
    for _ in range(2):
        with pytest.raises(ValueError, match="no metrics"):
            scrapes.response(TEXT)
    counting.error = None
    begun = clock.now
    assert "scrapes 3.0" in text_of(scrapes.response(TEXT), TEXT)
    assert clock.now - begun == pytest.approx(10 * SCRAPE_SECONDS)


def test_requests_other_than_get_are_refused_without_a_scrape() -> None:
    counting = Counting(Clock())
    with serving(counting) as (host, port):
        for method in ("HEAD", "POST"):
            request = urllib.request.Request(f"http://{host}:{port}/metrics", method=method)
            with pytest.raises(urllib.error.HTTPError) as failed:
                urllib.request.urlopen(request, timeout=60)
            assert failed.value.code == 405
            assert failed.value.headers["Allow"] == "GET"
    assert counting.scrapes == 0


def test_each_format_is_served_as_it_was_asked_for() -> None:
    with serving(Counting(Clock())) as (host, port):
        accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        for number, (headers, zipped, kind) in enumerate(
            [
                ({}, False, "text/plain"),
                ({"Accept-Encoding": "gzip"}, True, "text/plain"),
                ({"Accept": accept}, False, "application/openmetrics-text"),
            ],
            1,
        ):
            request = urllib.request.Request(f"http://{host}:{port}/metrics", headers=headers)
            with urllib.request.urlopen(request, timeout=60) as response:
                body = response.read()
                assert response.headers["Content-Type"].startswith(kind)
                assert (response.headers["Content-Encoding"] == "gzip") == zipped
            text = (gzip.decompress(body) if zipped else body).decode()
            assert f"scrapes {number}.0" in text


def test_connections_are_accepted_at_a_bounded_rate() -> None:
    clock = Clock()
    rate = _Rate(200.0, 32, lambda: clock.now, clock.sleep)

    def wait(times: int) -> float:
        before = clock.now
        for _ in range(times):
            rate.wait()
        return clock.now - before

    assert wait(32) == pytest.approx(0.0, abs=1e-9)
    assert wait(200) == pytest.approx(1.0)
    clock.sleep(0.05)
    assert wait(10) == pytest.approx(0.0, abs=1e-9)
    assert wait(190) == pytest.approx(0.95)
    clock.sleep(1000)
    assert wait(32) == pytest.approx(0.0, abs=1e-9)
    assert wait(1) == pytest.approx(0.005, abs=1e-9)


def test_each_connection_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[_Rate] = []

    def wait(rate: _Rate) -> None:
        turns.append(rate)

    monkeypatch.setattr(_Rate, "wait", wait)
    with serving(Counting(Clock())) as (host, port):
        for number in range(1, 4):
            with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60):
                assert len(turns) == number


def test_a_half_request_that_is_ended_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_TURN_SECONDS", 60.0)
    counting = Counting(Clock())
    with serving(counting) as address, contextlib.ExitStack() as stack:

        def half() -> socket.socket:
            made = stack.enter_context(socket.create_connection(address, timeout=60))
            made.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
            return made

        halves = [half() for _ in range(endpoint._MAX_CONNECTIONS + 1)]
        assert halves[0].recv(1) == b""
        url = f"http://{address[0]}:{address[1]}/metrics"
        with urllib.request.urlopen(url, timeout=60) as response:
            assert b"scrapes 1.0" in response.read()
        assert counting.scrapes == 1
