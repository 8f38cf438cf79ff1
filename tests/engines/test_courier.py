"""A courier makes the posted calls in their order, in any thread."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest

from routetrace.capture_agent.engines import courier as couriers
from routetrace.capture_agent.engines.courier import Courier

WAIT_S = 60.0


@pytest.fixture
def courier():
    one = Courier("test")
    yield one
    one.close()


def test_calls_are_made_in_order_on_another_thread(courier):
    made, done = [], threading.Event()
    for i in range(500):
        courier.post(lambda i: made.append((i, threading.current_thread().name)), i)
    courier.post(done.set)
    assert done.wait(WAIT_S)
    assert [i for i, _ in made] == list(range(500))


def test_the_poster_does_not_wait_for_a_call_under_way(courier):
    began, may_end, made = threading.Event(), threading.Event(), []

    def long():
        began.set()
        assert may_end.wait(WAIT_S)
        made.append("long")

    courier.post(long)
    assert began.wait(WAIT_S)
    courier.post(made.append, "next")
    assert made == []
    may_end.set()
    courier.catch_up()
    assert made == ["long", "next"]


def test_catching_up_makes_all_calls_in_this_thread(courier):
    made = []
    with courier.lock:  # the thread has to wait
        for i in range(5):
            courier.post(made.append, i)
        courier.catch_up()
        assert made == [0, 1, 2, 3, 4]


def test_a_backlog_is_bounded(courier):
    made, by = [], set()
    with courier.lock:
        for i in range(couriers._MOST + 1):
            assert not made
            courier.post(lambda i: (made.append(i), by.add(threading.get_ident())), i)
        assert made == list(range(couriers._MOST + 1))
    assert by == {threading.get_ident()}


def test_an_exception_is_logged_and_ends_nothing(courier, caplog):
    made = []
    courier.post(lambda: 1 // 0)
    courier.post(made.append, 1)
    courier.catch_up()
    assert made == [1]
    assert "ZeroDivisionError" in caplog.text


def test_rest_comes_again_and_again_without_posts():
    made, rested = [], threading.Semaphore(0)
    courier = Courier("test", rested.release, 0.01)
    for _ in range(3):
        assert rested.acquire(timeout=WAIT_S)
    courier.post(made.append, 1)
    courier.catch_up()
    assert made == [1]
    courier.close()


def test_after_close_calls_are_made_at_once(courier):
    made = []
    courier.post(made.append, 1)
    courier.close()
    assert made == [1]
    courier.post(made.append, 2)
    assert made == [1, 2]


def _exits(path):
    courier, began = Courier("test"), threading.Event()
    courier.lock.acquire()  # the thread makes none of them
    courier.post(began.set)
    courier.post(lambda: open(path, "w").close())
    courier.lock.release()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_posted_calls_are_made_before_a_child_ends(tmp_path, method):
    process = multiprocessing.get_context(method).Process(target=_exits, args=(tmp_path / "made",))
    process.start()
    process.join(WAIT_S)
    assert process.exitcode == 0
    assert (tmp_path / "made").exists()


def test_an_inherited_courier_does_nothing(courier):
    made = []
    courier.lock.acquire()
    courier.post(made.append, "of the parent")
    child = os.fork()
    if not child:
        courier.post(made.append, "of the child")
        courier.catch_up()
        os._exit(len(made))
    courier.lock.release()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    courier.catch_up()
    assert made == ["of the parent"]
