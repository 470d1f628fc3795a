"""run.timeline: every task of one step, with its time on its device, next to the simulation from their
means.
"""

import csv
import os
import re
from collections import defaultdict

import pytest

from ppctl import cli
from ppctl.reports.measured_timeline_file import mean_costs, measured_timeline
from ppctl.schedule.families.registry import build
from ppctl.schedule.ir import Task
from ppctl.schedule.simulator import simulate
from ppctl.training.run import profiler

TINY = (
    "mesh=1x2 data=regression data.batch_size=8 data.num_rows=4096 model=mlp model.num_layers=2 "
    "model.d_model=16 schedule.num_microbatches=4 run.platform=cpu run.dtype=float32 "
    "run.trackers=[] run.checkpoint.every=null run.num_steps=3 run.eval_every=null "
    "run.timeline=true"
)


def train(run_dir, *words):
    return cli.main(["train", *TINY.split(), f"run.dir={run_dir}", *words])


def rows_by_rank(run_dir):
    found = defaultdict(list)
    with (run_dir / "timeline" / "timeline.csv").open() as file:
        for row in csv.DictReader(file):
            found[int(row["rank"])].append(row)
    return found


def test_each_task_is_measured_in_program_order_next_to_its_simulation(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert train(tmp_path, "executor=mpmd", "schedule=zb_h1", "executor.post_validation=true") == 0
    schedule = build("zb_h1", 2, 4)
    found = rows_by_rank(tmp_path)
    starts, ends = {}, {}
    for rank, tasks in enumerate(schedule.ranks):
        assert [row["task"] for row in found[rank]] == list(map(str, tasks))
        for task, row in zip(tasks, found[rank], strict=True):
            starts[task], ends[task] = float(row["start_s"]), float(row["end_s"])
            assert 0 <= starts[task] < ends[task]
        assert [starts[task] for task in tasks] == sorted(starts[task] for task in tasks)
    costs = mean_costs(schedule, {task: ends[task] - starts[task] for task in starts})
    simulated = simulate(schedule, costs)
    for rank, tasks in enumerate(schedule.ranks):
        for task, row in zip(tasks, found[rank], strict=True):
            assert float(row["simulated_start_s"]) == pytest.approx(
                simulated.start_s[task], abs=1e-7
            )
    assert "zb_h1, measured" in (tmp_path / "timeline" / "timeline.html").read_text()
    out = capsys.readouterr().out
    assert f"timeline  {tmp_path}/timeline: step" in out
    bubbles = (
        r"bubble    [\d.]+% ideal, [\d.]+% predicted, [\d.]+% measured \(ranks [\d.]+% [\d.]+%\)\n"
    )
    assert re.search(bubbles, out)
    assert "note      2 simulated devices share 1 core: ranks also wait for a core" in out
    assert (
        len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    )  # the measured step is one of the run


@pytest.mark.full
@pytest.mark.slow
def test_tasks_are_timed_one_by_one_if_the_trace_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(profiler, "traced_spans", lambda *_: None)
    assert train(tmp_path, "executor=mpmd", "schedule=1f1b", "executor.remat=full") == 0
    for rows in rows_by_rank(tmp_path).values():
        for row in rows:
            assert float(row["start_s"]) == pytest.approx(float(row["simulated_start_s"]), abs=1e-7)
            is_left_to_the_backward = row["task"].startswith("1F")
            assert (float(row["end_s"]) > float(row["start_s"])) is not is_left_to_the_backward


def test_a_task_without_a_program_takes_no_time_and_means_are_by_stage():
    schedule = build("gpipe", 1, 2)
    f0, f1, b0, b1 = (Task(0, kind, m) for kind, m in (("F", 0), ("F", 1), ("B", 0), ("B", 1)))
    line = measured_timeline(schedule, {f0: (5.0, 6.0), b1: (8.0, 12.0), b0: (12.0, 14.0)})
    assert (line.start_s[f1], line.end_s[f1]) == (1.0, 1.0)
    assert (line.makespan_s, line.bubble_fractions) == (9.0, (pytest.approx(2 / 9),))
    assert line.costs.seconds("B", 0, 1) == 3.0
    assert line.costs.seconds("F", 0, 1) == 0.5
    assert line.waits_for(b0) == b1  # gpipe ends as it began


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("executor=spmd",),
            "run.timeline=true measures tasks that are separate programs, but executor=spmd is",
        ),
        (
            ("executor=mpmd", "executor.fuse=fb"),
            "run.timeline=true measures single tasks, but executor.fuse=fb runs two as one program",
        ),
        (("executor=mpmd", "run.profile=0"), "run.timeline=true and run.profile=0 both trace"),
    ],
)
def test_timelines_that_cannot_be_measured_are_refused(tmp_path, words, message, capsys):
    assert train(tmp_path, *words) == 2
    assert message in capsys.readouterr().err
