"""The step in the page of a run: measured above its simulation if it was, else only the ideal one; no JAX."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from support.environment import BY_USER
from support.report_of_a import charts_of, report, run_of_two_steps

from ppctl.config import Interleaved, Mpmd, Spmd
from ppctl.config.schedule_from_config import pipeline_of
from ppctl.reports import measured_timeline_file as timeline_io
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import build
from ppctl.schedule.simulator import Timeline, simulate

BY_PATH = BY_USER | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(autouse=True)
def run_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return run_of_two_steps()


def settings(run_dir, schedule, executor, pp=2, layers=4):
    config = {
        "model": {"name": "transformer", "num_layers": layers},
        "mesh": {"dp": 1, "pp": pp, "fsdp": 1},
    }
    config |= {
        "schedule": schedule,
        "executor": executor,
        "run": {"name": "a", "dir": "runs/a", "num_steps": 2},
    }
    (run_dir / "config.yaml").write_text(json.dumps(config))


def starts(chart):
    """The starts that a chart has, in the order of its ranks' programs."""
    return [start_s for of_rank in chart["start_s"] for start_s in of_rank]


def shaken(schedule, seed=0):
    """A measured timeline of a schedule: every task lasts as long as chance has it."""
    chance = random.Random(seed)
    timeline = simulate(schedule, build_costs(schedule))
    end_s, start_s, free_s = {}, {}, dict.fromkeys(range(schedule.num_ranks), 0.0)
    for task in sorted(
        timeline.start_s, key=lambda task: (timeline.start_s[task], timeline.end_s[task])
    ):
        rank = schedule.rank_of[task.stage]
        start_s[task] = max(free_s[rank], 2 * timeline.start_s[task])
        free_s[rank] = end_s[task] = (
            start_s[task] + (timeline.end_s[task] - timeline.start_s[task]) * chance.random()
        )
    first = min(start_s.values())
    assert first == 0
    return Timeline(schedule, timeline.costs, start_s, end_s, is_uneven=True)


def build_costs(schedule):
    return timeline_io.mean_costs(
        schedule, {task: 0.25 for tasks in schedule.ranks for task in tasks}
    )


def events(timeline, copies=(("", 0.0),), at_s=0.0, scale=1.0, leave_out=()):
    """Return a profile of a step: a range of each task, on each copy of its rank's device."""
    found, num_ranks = [], timeline.schedule.num_ranks
    for copy, (name, later_s) in enumerate(copies):
        for rank, tasks in enumerate(timeline.schedule.ranks):
            device = copy * num_ranks + rank
            track = {
                "ph": "M",
                "name": "thread_name",
                "pid": 0,
                "tid": device,
                "args": {"name": f"rank {rank}{name}"},
            }
            found.append(track)
            for task in tasks:
                if task[:2] in leave_out:
                    continue
                start, end = (
                    scale * each[task] + at_s + later_s
                    for each in (timeline.start_s, timeline.end_s)
                )
                range_ = {"ts": start * 1e6, "dur": (end - start) * 1e6}
                found.append({"ph": "X", "pid": 0, "name": str(task), "tid": device, **range_})
    return found


def test_a_measured_timeline_stands_above_the_simulation_of_its_means(run_dir, capsys):
    schedule = build("zb_h1", 2, 4)
    taken = shaken(schedule)
    taken = replace(
        taken,
        costs=timeline_io.mean_costs(
            schedule, {t: taken.end_s[t] - taken.start_s[t] for t in taken.end_s}
        ),
    )
    timeline_io.write_timeline(run_dir / "timeline", taken)
    settings(run_dir, {"name": "zb_h1", "num_microbatches": 4}, {"name": "mpmd"})
    (measured, simulated), seen = report(capsys)
    assert (measured["label"], simulated["label"]) == (
        "zb_h1, measured",
        "zb_h1, simulated from its means",
    )
    in_order = [task for tasks in schedule.ranks for task in tasks]
    assert starts(measured) == pytest.approx([taken.start_s[task] for task in in_order], abs=1e-6)
    assert measured["makespan_s"] == pytest.approx(taken.makespan_s, rel=1e-6)
    assert measured["bubble_fraction"] == pytest.approx(taken.bubble_fractions, abs=1e-6)
    assert simulated["makespan_s"] == pytest.approx(
        simulate(schedule, taken.costs).makespan_s, rel=1e-6
    )
    assert "Measured: one step (run.timeline=true)." in seen
    assert "Not measured" not in seen
    (run_dir / "config.yaml").unlink()  # the timeline suffices
    assert len(report(capsys)[0]) == 2


@pytest.mark.parametrize("copies", [(("", 0.0),), ((" dp=0", 0.0), (" dp=1", 5.0))])
def test_the_median_traced_step_is_drawn_in_its_order(run_dir, capsys, copies):
    executor = {"name": "spmd", "remat": "full"}
    found = pipeline_of(Interleaved(num_microbatches=4), Spmd(remat="full"), 2, 4).step
    timeline = found.timeline(found.costs)
    cell = next(cell for row in found.ticks.cells for cell in row if None not in cell)
    swapped = {}  # within a tick the backward may come first
    middle_s = (
        timeline.start_s[cell.forward]
        + timeline.end_s[cell.backward]
        - timeline.start_s[cell.backward]
    )
    swapped[cell.backward] = timeline.start_s[cell.forward], middle_s
    swapped[cell.forward] = middle_s, timeline.end_s[cell.backward]
    timeline = replace(
        timeline,
        start_s=timeline.start_s | {task: span[0] for task, span in swapped.items()},
        end_s=timeline.end_s | {task: span[1] for task, span in swapped.items()},
    )
    left = ((found.schedule.num_stages - 1, "F"),)  # with remat=full its backward runs it
    traced = [
        event
        for at_s, scale in ((0.0, 3.0), (200.0, 1.0), (400.0, 2.0))
        for event in events(timeline, copies, at_s, scale, left)
    ]
    random.Random(1).shuffle(traced)
    (run_dir / "profile").mkdir()
    (run_dir / "profile" / timeline_io.TASKS_FILE).write_text(json.dumps({"traceEvents": traced}))
    settings(run_dir, {"name": "interleaved", "num_microbatches": 4, "num_chunks": 2}, executor)
    (measured, simulated), seen = report(capsys)
    assert "the median one of 3 traced steps" in seen
    assert measured["makespan_s"] == pytest.approx(2 * timeline.makespan_s, abs=1e-6)
    assert measured["start_s"] == [sorted(of_rank) for of_rank in measured["start_s"]]
    whole = {task: timeline.end_s[task] - timeline.start_s[task] for task in timeline.start_s}
    whole |= {task: 0.0 for task in whole if task[:2] in left}
    costs = timeline_io.mean_costs(
        found.schedule, {task: 2 * seconds for task, seconds in whole.items()}
    )
    assert simulated["makespan_s"] == pytest.approx(found.ticks.makespan_s(costs), rel=1e-6)


@pytest.mark.parametrize(
    ("executor", "makespan_s"),
    [({"name": "mpmd", "remat": "none"}, 5 * 3.0), ({"name": "spmd", "remat": "full"}, 5 * 4.0)],
)
def test_a_run_that_was_not_measured_has_the_prediction_and_how_to_measure(
    run_dir, capsys, executor, makespan_s
):
    settings(run_dir, {"name": "gpipe", "num_microbatches": 4}, executor)
    (chart,), seen = report(capsys)
    assert chart["makespan_s"] == makespan_s  # (m + p - 1)(F + B)
    assert chart["label"] == "gpipe, ideal"
    for word in ("Not measured.", "run.timeline=true", "run.profile=N", "Ideal: equal stages."):
        assert word in seen


@pytest.mark.parametrize(
    ("schedule", "costs", "words"),
    [
        ({"name": "zb_h1"}, {"weight_grad_s": 0.25}, "takes F 1 s, I 1 s, W 0.25 s."),  # LoRA
        ({"name": "gpipe"}, {"input_grad_s": 2.0}, "takes F 1 s, I 2 s, W 1 s."),  # remat
        (
            {"name": "1f1b", "vocab": "parallel"},
            {"logits_s": 0.5, "logits_grad_s": 1.5, "embedding_s": 0.125},
            "takes F 1 s, I 1 s, W 1 s, E 0.125 s, S 0.5 s, T 1.5 s, G 0 s.",
        ),
    ],
)
def test_a_page_draws_the_costs_of_its_run(run_dir, capsys, schedule, costs, words):
    settings(run_dir, {**schedule, "num_microbatches": 4}, {"name": "mpmd"})
    recorded = asdict(Costs(**costs))
    start = {"status": "started", "step": 0, "at": 1.0, "task_costs": recorded}
    (run_dir / "status.jsonl").write_text(json.dumps(start) + "\n")
    (chart,), seen = report(capsys)
    assert chart["costs"] == recorded
    assert words in seen
    assert "W, the gradient of weights, takes 1 s times the trained share" in seen


@pytest.mark.parametrize(
    "costs", [{"forward_s": "x"}, {"forward_s": -1}, {"y": 1}, {"forward_s": None}]
)
def test_costs_that_no_run_records_are_no_fault(run_dir, capsys, costs):
    settings(run_dir, {"name": "gpipe", "num_microbatches": 4}, {"name": "mpmd"})
    start = {"status": "started", "step": 0, "at": 1.0, "task_costs": costs}
    (run_dir / "status.jsonl").write_text(json.dumps(start) + "\n")
    charts, seen = report(capsys)
    assert charts == []
    assert "The schedule cannot be drawn: " in seen


CSV = "rank,task,start_s,end_s\n"
GOOD = "0,0F0,0,1\n0,0B0,4,5\n1,1F0,1,2\n1,1B0,2,4\n"
DAMAGED = {
    "": "the text has no tasks",
    "x\n1\n": "a line lacks rank",
    CSV + GOOD.replace("4,5", "4,nan"): "is no range",
    CSV + GOOD.replace("4,5", "4,-5"): "is no range",
    CSV + GOOD.replace("0,1", "0,4.5"): "0B0 begins before the task before it",
    CSV + GOOD.replace("\n1,", "\n2,"): "its ranks are not 0, 1",
    CSV + GOOD.replace("1,1F0,1,2\n", ""): "1F0",
    CSV + GOOD.replace("1F0", "1F999999999"): "tasks are missing",
    CSV + GOOD + "9" * 5000 + ",0F0,0,1\n": "",
    CSV + GOOD + "0,<b>,0,1\n": "cell '<b>' is not <stage>",
    CSV + "0,0F0,1,1\n0,0B0,1,1\n": "its ranges are empty",
    CSV + "0,0F0\0,1,1\n": "",
}


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_timeline_is_named_and_the_prediction_drawn(run_dir, capsys, text):
    settings(run_dir, {"name": "gpipe", "num_microbatches": 4}, {"name": "mpmd"})
    (run_dir / "timeline").mkdir()
    (run_dir / "timeline/timeline.csv").write_text(text)
    (chart,), seen = report(capsys)
    assert chart["label"] == "gpipe, ideal"
    assert "timeline.csv cannot be drawn: " in seen
    assert DAMAGED[text] in seen


@pytest.mark.parametrize(
    "content",
    [
        *(
            "",
            "[]",
            "{",
            '{"traceEvents": 1}',
            '{"traceEvents": [1]}',
            '{"traceEvents": [{"name": "thread_name"}]}',
        ),
        '{"traceEvents": []}',
        json.dumps(
            {
                "traceEvents": events(
                    simulate(build("gpipe", 2, 3), build_costs(build("gpipe", 2, 3)))
                )
            }
        ),
        json.dumps({"traceEvents": [{"ph": "X", "name": "x", "tid": 0, "ts": 0, "dur": 1}]}),
    ],
)
def test_a_profile_of_other_programs_is_named_and_the_prediction_drawn(run_dir, capsys, content):
    settings(run_dir, {"name": "gpipe", "num_microbatches": 4}, {"name": "spmd"})
    (run_dir / "profile").mkdir()
    (run_dir / "profile" / timeline_io.TASKS_FILE).write_text(content)
    (chart,), seen = report(capsys)
    assert chart["label"] == "gpipe, ideal"
    assert f"{timeline_io.TASKS_FILE} cannot be drawn: " in seen


@pytest.mark.parametrize(
    ("schedule", "executor", "told"),
    [
        ({"name": "gpipe", "num_microbatches": 10**6}, {"name": "mpmd"}, "tasks are too many"),
        (
            {"name": "gpipe", "num_microbatches": "<b>"},
            {"name": "mpmd"},
            "The schedule cannot be drawn",
        ),
        (
            {"name": "gpipe", "num_microbatches": 4, "x": 1},
            {"name": "mpmd"},
            "ppctl cannot read the settings of the run",
        ),
        (
            {"name": "mine", "num_microbatches": 4},
            {"name": "mpmd"},
            "ppctl cannot read the settings of the run",
        ),
        (
            {"name": "interleaved", "num_microbatches": 3},
            {"name": "mpmd"},
            "num_microbatches=3 is not a multiple of",
        ),
        ({"name": "csv", "path": "gone.csv"}, {"name": "mpmd"}, "gone.csv cannot be read"),
        (
            {"name": "gpipe", "num_microbatches": 4},
            {"name": "reference"},
            "executor=reference has no pipeline",
        ),
        (
            {"name": "gpipe", "num_microbatches": 4},
            None,
            "ppctl cannot read the settings of the run",
        ),
    ],
)
def test_a_schedule_that_cannot_be_drawn_is_named(run_dir, capsys, schedule, executor, told):
    settings(run_dir, schedule, executor)
    drawn, seen = report(capsys)
    assert drawn == []
    assert told in seen


def test_no_jax_is_started_for_a_measured_step(run_dir):
    timeline_io.write_timeline(run_dir / "timeline", shaken(build("1f1b", 2, 4)))
    settings(run_dir, {"name": "1f1b", "num_microbatches": 4}, {"name": "mpmd"})
    code = (
        "import sys; from ppctl import cli; code = cli.main(sys.argv[1:]); print(code, 'jax' in "
        "sys.modules)"
    )
    words = [sys.executable, "-c", code, "report", "a"]
    assert (
        subprocess.run(words, env=BY_PATH, capture_output=True, text=True, check=True).stdout
        == "0 False\n"
    )
    assert charts_of((run_dir / "report.html").read_text())[0]["label"] == "1f1b, measured"


@pytest.mark.full
@pytest.mark.slow
def test_64_ranks_of_512_microbatches_measured_stay_under_five_megabytes(run_dir, capsys):
    found = pipeline_of(Interleaved(num_microbatches=512), Mpmd(), 64, 128)
    timeline_io.write_timeline(run_dir / "timeline", shaken(found.step.schedule))
    settings(
        run_dir,
        {"name": "interleaved", "num_microbatches": 512, "num_chunks": 2},
        {"name": "mpmd"},
        64,
        128,
    )
    drawn, _ = report(capsys)
    assert len(drawn) == 2
    assert (run_dir / "report.html").stat().st_size < 5_000_000
