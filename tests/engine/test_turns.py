"""Threads that share an engine, and Ctrl-C in the middle of its steps."""

import signal
import threading
import time

import pytest

from kvant.engine.turns import Turns, unbroken


def test_no_two_threads_compute_at_once_and_all_get_their_answer():
    turns, left, inside, taken = Turns(), [40], [], []

    def compute():
        inside.append(1)
        assert len(inside) == 1, "two steps at once"
        time.sleep(0.001)
        left[0] -= 1
        taken.append(threading.get_ident())
        inside.pop()

    def answer(goal):
        while left[0] > goal:
            turns.step(compute, lambda: left[0] <= goal)

    threads = [threading.Thread(target=answer, args=(goal,)) for goal in (30, 20, 10, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert left == [0] and len(taken) == 40  # nobody computed when all were satisfied


def test_who_waits_is_woken_by_a_step_that_fails():
    turns, entered = Turns(), threading.Event()

    def failing():
        entered.set()
        time.sleep(0.05)
        raise MemoryError

    def fails():
        with pytest.raises(MemoryError):
            turns.step(failing, lambda: False)

    thread = threading.Thread(target=fails)
    thread.start()
    entered.wait()
    done = []
    turns.step(lambda: done.append(1), lambda: False)  # waits for the other's
    turns.step(lambda: done.append(2), lambda: False)
    assert done == [2]
    thread.join()


def test_control_c_takes_effect_when_the_block_is_over():
    finished = []
    with pytest.raises(KeyboardInterrupt), unbroken():
        signal.raise_signal(signal.SIGINT)
        finished.append(True)
    assert finished
    with pytest.raises(KeyboardInterrupt):  # and as before afterwards
        signal.raise_signal(signal.SIGINT)


def test_a_handler_of_the_users_own_is_called_and_kept():
    calls = []

    def mine(number, frame):
        calls.append(number)

    before = signal.signal(signal.SIGINT, mine)
    try:
        with unbroken():
            signal.raise_signal(signal.SIGINT)
            assert not calls
        assert calls == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is mine
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with unbroken():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_no_signals_to_hold_back():
    errors = []

    def run():
        try:
            with unbroken():
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors
