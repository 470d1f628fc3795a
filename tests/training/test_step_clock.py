"""Times of steps where the host is late, on a clock that the test turns."""

import threading
from types import SimpleNamespace

import pytest

from ppctl.training.run import step_clock
from ppctl.training.run.step_clock import StepClock


class Numbers:
    """An array that is computed when the test says so."""

    def __init__(self):
        self._is_done = threading.Event()

    def block_until_ready(self):
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


def test_a_step_is_done_when_it_is_and_not_when_the_host_looks(turn):
    first, second = Numbers(), Numbers()
    with StepClock() as clock:
        dones = [clock.watch(first), clock.watch(second)]
        turn(0.6)
        first.finish()
        dones[0].result()
        turn(1.1)  # the dispatch of the second step, begun at 0.1, came back late
        second.finish()
        dones[1].result()
        turn(5.0)
        assert clock.step_time_s(0.0, dones[0]) == 0.6
        assert clock.step_time_s(0.1, dones[1]) == pytest.approx(0.5)


def test_a_step_that_was_dispatched_after_the_one_before_was_done_began_then(turn):
    with StepClock() as clock:
        turn(1.0)
        assert clock.step_time_s(0.0, clock.watch(1.0)) == 1.0
        turn(3.0)
        assert clock.step_time_s(2.75, clock.watch({"loss": 2.0})) == 0.25


def test_what_goes_wrong_on_the_device_is_raised_where_the_step_is_read():
    class Failed:
        def block_until_ready(self):
            raise RuntimeError("the device is lost")

    with StepClock() as clock:
        done = clock.watch([Failed()])
        with pytest.raises(RuntimeError, match="the device is lost"):
            clock.step_time_s(0.0, done)
