"""What wakes a poller: other threads, and signals, wherever these find the main thread."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from common.waker import Waker

LONG_MS = 20_000


@pytest.fixture
def waker() -> Iterator[Waker]:
    made = Waker()
    yield made
    made.close()


def wait(waker: Waker, milliseconds: int = LONG_MS) -> bool:
    """Whether it was woken."""
    poller = zmq.Poller()
    poller.register(waker, zmq.POLLIN)
    return bool(poller.poll(milliseconds))


def test_another_thread_wakes_and_what_was_cleared_does_not(waker: Waker) -> None:
    thread = threading.Thread(target=waker.wake)
    thread.start()
    assert wait(waker)
    thread.join()
    waker.wake()
    waker.clear()
    assert not wait(waker, 0)


def test_a_signal_that_does_not_interrupt_the_poll_ends_it(waker: Waker) -> None:
    """As one that comes just before it; here, one that another thread is given."""
    caught: list[int] = []

    def interrupt() -> None:
        time.sleep(0.05)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))
    try:
        waker.wake_at_signals()
        thread = threading.Thread(target=interrupt)
        thread.start()
        assert wait(waker)
        assert caught == [signal.SIGUSR1]
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_after_its_end_it_is_told_nothing() -> None:
    waker = Waker()
    waker.wake_at_signals()
    waker.close()
    assert signal.set_wakeup_fd(-1) == -1
    waker.wake()
    waker.clear()
