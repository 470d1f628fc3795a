"""Large schedules: simulated in seconds, larger ones extrapolated and equal to the simulation, or
refused.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.all_families import GROUPED, REAL, UNIT
from support.selection import full, full_except

from ppctl.errors import ScheduleError
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.search import extrapolated_cost as extrapolate
from ppctl.schedule.simulator import simulate

ODD = Costs(1, 1.3, 0.4, 0.25)
REFUSED = [("gis", 7, ODD)]  # no cycle as short as p at these costs


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc"
)
def test_64_ranks_512_microbatches_and_two_chunks_take_less_than_a_gigabyte():
    code = (
        "import re; from pathlib import Path; "
        "from ppctl.schedule.costs import Costs; from ppctl.schedule.families.registry import build; "
        "from ppctl.schedule.simulator import simulate; "
        "schedule = build('interleaved', 64, 512, num_chunks=2); timeline = simulate(schedule, Costs()); "
        "print(sum(map(len, schedule.ranks)), timeline.makespan_s, "
        # not ru_maxrss, which a process inherits from the one that started it
        "int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) * 1024)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    num_tasks, makespan_s, rss_bytes = map(float, found.stdout.split())
    assert num_tasks == 131072
    assert makespan_s == 3 * 512 + 3 * 63 / 2
    assert rss_bytes < 1e9


@pytest.mark.parametrize("family", FAMILIES)
def test_1024_ranks_and_4096_microbatches_are_extrapolated(family):
    found = extrapolate.extrapolate(partial(build, family), 1024, 4096, UNIT)
    closed_form = {
        "gpipe": 3 * (4096 + 1023),
        "interleaved": 3 * 4096 + 3 * 1023 / 2,
        "zb_h1": 3 * 4096 + 1023,
        "zb_v": 3 * 4096 + 1023 / 2,
        "v_half": 3 * 4096 + (3 * 1024 - 7) / 2,
        "v_min": 3 * 4096 + 2 * 1024 - 5 / 2,
        "gis": 3 * 4096 + 1.25 * 1024 - 1,
    }
    if family in closed_form:
        assert found.makespan_s == pytest.approx(closed_form[family], rel=1e-12)
    peaks = {"gpipe": 4096, "1f1b": 1024, "zb_h2": 2047, "v_half": 513, "v_min": 342, "gis": 768}
    if family in peaks:
        assert found.peak_activations == pytest.approx(peaks[family])


def agrees(found, timeline):
    assert found.makespan_s == pytest.approx(timeline.makespan_s, rel=1e-9)
    assert found.period_s == pytest.approx(timeline.period_s, rel=1e-9)
    assert found.bubble_fraction == pytest.approx(timeline.bubble_fraction, abs=1e-9)
    assert found.peak_activations == pytest.approx(max(timeline.peak_activations))


@pytest.mark.parametrize("costs", [UNIT, REAL, ODD], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_more_microbatches_cost_what_the_simulation_says(family, costs, monkeypatch):
    monkeypatch.setattr(extrapolate, "MOST_TASKS", 1000)
    for p, m in ((4, 100), (7, 161), (6, 121)):
        if family in GROUPED and m % p:
            continue
        if (family, p, costs) in REFUSED:
            with pytest.raises(ScheduleError, match="no steady state"):
                extrapolate.extrapolate(partial(build, family), p, m, costs)
            continue
        found = extrapolate.extrapolate(partial(build, family), p, m, costs)
        assert len(found.simulated) == 3
        assert all(size[1] < m for size in found.simulated)
        agrees(found, simulate(build(family, p, m), costs))


@pytest.mark.parametrize(("p", "m", "costs"), [(76, 152, REAL), full((70, 210, UNIT))])
@pytest.mark.parametrize(
    "family", full_except([*FAMILIES], "1f1b", "interleaved", "zb_h1", "zb_v", "gis")
)
def test_more_ranks_cost_what_the_simulation_says(family, p, m, costs, monkeypatch):
    monkeypatch.setattr(extrapolate, "MOST_TASKS", 1000)
    found = extrapolate.extrapolate(partial(build, family), p, m, costs)
    assert len(found.simulated) == 4
    agrees(found, simulate(build(family, p, m), costs))


def test_what_is_small_is_simulated():
    found = extrapolate.extrapolate(partial(build, "v_min"), 8, 32, REAL)
    assert found.simulated == ((8, 32),)
    agrees(found, simulate(build("v_min", 8, 32), REAL))


def test_a_schedule_without_steady_state_is_refused(monkeypatch):
    monkeypatch.setattr(extrapolate, "MOST_TASKS", 1000)

    def erratic(num_ranks, num_microbatches):
        """GPipe or 1F1B, by whether some other number is odd."""
        return build(
            "gpipe" if num_microbatches // num_ranks % 2 else "eager_1f1b",
            num_ranks,
            num_microbatches,
        )

    with pytest.raises(
        ScheduleError, match=r"^no steady state: schedules of \(ranks, microbatches\) \(4, 12\), "
    ):
        extrapolate.extrapolate(erratic, 4, 400, UNIT)


def test_ranks_of_unequal_cost_and_odd_ratios_are_refused():
    with pytest.raises(
        ScheduleError,
        match=r"^num_ranks=1024 is above 64, where ranks are extrapolated, but the costs",
    ):
        extrapolate.extrapolate(partial(build, "1f1b"), 1024, 4096, Costs((1.0,) * 1024))
    with pytest.raises(
        ScheduleError,
        match=r"^num_microbatches/num_ranks = 4099/1024 is the ratio of no four small",
    ):
        extrapolate.extrapolate(partial(build, "1f1b"), 1024, 4099, UNIT)
