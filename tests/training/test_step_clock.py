"""Times of steps whose ends are learned late, on a clock that the test turns."""

import threading
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from ppctl.training.run import step_clock
from ppctl.training.run.step_clock import StepClock


class Numbers:
    """An array that is computed at the test's signal. `seen` is set when the clock waits."""

    def __init__(self):
        self._is_done, self.seen = threading.Event(), threading.Event()

    def is_ready(self):
        return self._is_done.is_set()

    def block_until_ready(self):
        self.seen.set()
        assert self._is_done.wait(60)
        return self

    def finish(self):
        self._is_done.set()


@pytest.fixture
def turn(monkeypatch):
    """Set the clock."""
    now = [0.0]
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return lambda seconds: now.__setitem__(0, seconds)


def begin(clock, numbers):
    clock.begin()
    return clock.watch(numbers)


def test_a_step_ends_when_its_arrays_are_done_not_when_the_host_reads_them(turn):
    first, second = Numbers(), Numbers()
    with StepClock() as clock:
        times = [begin(clock, first), begin(clock, second)]
        turn(0.6)
        first.finish()
        assert times[0].result() == 0.6
        turn(1.1)
        second.finish()
        assert times[1].result() == pytest.approx(0.5)


def test_a_step_begins_at_its_dispatch_if_the_previous_step_has_ended(turn):
    with StepClock() as clock:
        time_s = begin(clock, 1.0)
        assert time_s.result() == 0.0
        turn(2.75)
        clock.begin()
        turn(3.0)
        assert clock.watch({"loss": jnp.ones(2)}).result() == 0.25


def test_steps_that_end_in_a_pause_share_its_time(turn):
    first, second = Numbers(), Numbers()
    with StepClock() as clock:
        times = [begin(clock, first), begin(clock, second)]
        assert first.seen.wait(60)
        turn(10.0)
        second.finish()
        first.finish()
        assert [time_s.result() for time_s in times] == [5.0, 5.0]


def test_a_pause_after_a_dispatch_is_time_of_the_dispatched_step(turn):
    first, second = Numbers(), Numbers()
    with StepClock() as clock:
        turn(1.0)
        time_s = begin(clock, first)
        assert first.seen.wait(60)
        turn(1.5)
        first.is_ready = lambda: True  # done, but the thread of the clock has not woken
        clock.begin()
        turn(11.5)
        first.finish()
        assert time_s.result() == 0.5
        following = clock.watch(second)
        turn(12.0)
        second.finish()
        assert following.result() == 10.5


def test_an_error_on_the_device_is_raised_where_the_step_is_read():
    class Failed:
        def block_until_ready(self):
            raise RuntimeError("the device is lost")

    with StepClock() as clock:
        time_s = begin(clock, [Failed()])
        with pytest.raises(RuntimeError, match="the device is lost"):
            time_s.result()
