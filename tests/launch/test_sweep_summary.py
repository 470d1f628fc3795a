"""The results of a sweep: records, their table, the best job, the page with its figures."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from ppctl.config import Config, Interleaved, Mesh, Run, Schedule
from ppctl.launch.sweep.run_sweep import write_summary
from ppctl.launch.sweep.sweep_jobs import LOG, NUMBERS, Job, Result
from ppctl.launch.sweep.sweep_page import sweep_page
from ppctl.launch.sweep.sweep_records import (
    best_of,
    equal_errors,
    numbers_of,
    show_results,
    write_records,
)
from ppctl.reports.charts.page_figures import MOST_LINES


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job_of(index, family="gpipe", size=8, *, mesh=(1, 4), run_dir=None, **values):
    asked = schedules_of(family, size)
    where = Path(run_dir or f"runs/s/{index}")
    config = Config(mesh=Mesh(*mesh), schedule=asked, run=Run(dir=str(where)))
    found = {"schedule": family, "schedule.num_microbatches": size, **values}
    swept = tuple(f"{key}={value}" for key, value in found.items())
    words = ("train", "recipes=tiny", *swept)
    return Job(index, found, " ".join(swept), where, words, config)


def schedules_of(family, size):
    return Interleaved(num_microbatches=size) if family == "interleaved" else Schedule(family, size)


def left(job, *steps, eval_loss=None):
    """Write the files of a run; each step is (loss, seconds)."""
    job.run_dir.mkdir(parents=True)
    records = [
        {
            "step": number,
            "loss": loss,
            "step_time_s": seconds,
            "tokens_per_s": 100 / seconds,
            "ideal_bubble_fraction": 0.25,
            "predicted_bubble_fraction": 0.3,
            "predicted_step_time_s": 0.5,
            "memory_bytes": 2048,
        }
        for number, (loss, seconds) in enumerate(steps, start=1)
    ]
    (job.run_dir / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    if eval_loss is not None:
        (job.run_dir / "eval.jsonl").write_text(
            json.dumps({"step": len(steps), "eval_loss": eval_loss}) + "\n"
        )
    return job


def append(path, text):
    path.write_text(path.read_text() + text)


def ended(job, status="finished", code=0, seconds=12.5, error=None):
    return Result(job, status, code, seconds, error, numbers_of(job.run_dir))


def records(found):
    """What `sweep.json` holds of these results."""
    TOP.mkdir(parents=True, exist_ok=True)
    write_records(TOP, found)
    return json.loads((TOP / "sweep.json").read_text(), parse_constant=pytest.fail)


def test_a_record_holds_values_end_and_medians():
    job = left(job_of(3), (4.0, 9.0), (3.0, 1.0), (2.0, 2.0), eval_loss=2.5)
    append(job.run_dir / "metrics.jsonl", '{"step": 4, "lo')  # a kill
    timeline = job.run_dir / "timeline" / "timeline.csv"
    timeline.parent.mkdir()
    timeline.write_text(
        "rank,task,start_s,end_s\n0,0F0,0.0,1.0\n0,0B0,3.0,4.0\n1,1F0,1.0,2.0\n1,1B0,2.0,3.0\n"
    )
    assert records([ended(job)]) == [
        {
            "job": 3,
            "schedule": "gpipe",
            "schedule.num_microbatches": 8,
            "status": "finished",
            "exit_code": 0,
            "seconds": 12.5,
            "error": None,
            "run_dir": "runs/s/3",
            "steps": 3,
            "final_loss": 2.0,
            "eval_loss": 2.5,
            "step_time_s": 2.0,
            "predicted_step_time_s": 0.5,
            "tokens_per_s": 50.0,
            "rows_per_s": None,
            "ideal_bubble_fraction": 0.25,
            "predicted_bubble_fraction": 0.3,
            "measured_bubble_fraction": 0.5,
            "memory_bytes": 2048,
            "predicted_memory_bytes": None,
        }
    ]


def test_a_failed_job_does_not_show_numbers_of_an_earlier_start():
    job = left(job_of(0), (4.0, 1.0))
    written_s = (job.run_dir / "metrics.jsonl").stat().st_mtime
    found = [numbers_of(job.run_dir, written_s + since) for since in (-1, 1)]
    assert [each["final_loss"] for each in found] == [4.0, None]
    assert set(numbers_of(Path("nowhere")).values()) == {None}


TOP = Path("runs/s")


def test_json_has_null_for_numbers_that_are_not_finite():
    job = left(job_of(0, **{"optim.clip_norm": float("inf")}), (4.0, 1.0))
    [read] = records([ended(job)])
    assert read["optim.clip_norm"] is None
    assert set(NUMBERS) <= set(read)


def results(jobs):
    return [ended(job) for job in jobs]


def test_the_best_of_layouts_is_the_fastest():
    jobs = [
        left(job_of(0), (4.0, 1.0)),
        left(job_of(1, "1f1b"), (4.0, 0.5)),
        left(job_of(2, "zb_h1"), (1.0, 0.1)),
    ]
    [best] = best_of([*results(jobs[:2]), ended(jobs[2], "failed", 1, 1.0, "Oh")])
    assert best.text == "fastest, in tok/s: 200, job 1 (schedule=1f1b schedule.num_microbatches=8)"
    assert best.value == 200


def test_where_more_than_the_layout_varies_the_lowest_loss_comes_first():
    jobs = [
        left(job_of(i, run_dir=f"r/{i}", **{"optim.lr": i}), (loss, s))
        for i, (loss, s) in enumerate([(3, 1), (2, 2)])
    ]
    assert [(best.what, best.job) for best in best_of(results(jobs))] == [
        *(("lowest final_loss", 1), ("fastest, in tok/s", 0))
    ]
    append(jobs[0].run_dir / "metrics.jsonl", '{"step": 2, "loss": 1.0}\n')  # trained longer
    assert [best.what for best in best_of(results(jobs))] == ["fastest, in tok/s"]


def test_the_best_is_a_path_first_and_digits_distinguish_jobs():
    jobs = [left(job_of(i, **{"optim.lr": 10.0**-i}), (2.0 + i * 1e-6, 1.0)) for i in range(2)]
    (jobs[0].run_dir / "checkpoints" / "7").mkdir(parents=True)
    what, where, *_ = write_summary(TOP, results(jobs))
    assert (
        what == "lowest final_loss: 2.000000, job 0 (schedule=gpipe schedule.num_microbatches=8 "
        "optim.lr=1.0)"
    )
    assert where == "  in runs/s/0/checkpoints/7"
    text = page_of(*jobs)
    assert "runs/s/0/checkpoints/7" in text
    assert ">2.000001<" in text
    shutil.rmtree(jobs[0].run_dir / "checkpoints")
    assert best_of(results(jobs))[0].place == str(jobs[0].run_dir)


def test_rounding_does_not_choose_the_best():
    """Two layouts compute the same function: the table and the line name both."""
    jobs = [
        left(job_of(i, **{"optim.lr": 0.1}), (4.0, 1.0), eval_loss=4.0865130 - i * 1e-7)
        for i in range(2)
    ]
    assert best_of(results(jobs))[0].text.endswith("; the same in job 0")
    out = io.StringIO()
    show_results(Console(file=out, width=200), results(jobs))
    assert out.getvalue().count(" 4.0865 ") == 2


def test_an_evaluation_before_the_first_step_is_no_result():
    job = left(job_of(0), (4.0, 1.0))
    (job.run_dir / "eval.jsonl").write_text('{"step": 0, "eval_loss": 5.5}\n')
    assert numbers_of(job.run_dir)["eval_loss"] is None


def test_the_last_table_has_the_numbers_that_decided():
    jobs = [left(job_of(i), (4.0, 1.0), eval_loss=1.0 + i * 1e-5) for i in range(2)]
    out = io.StringIO()
    show_results(Console(file=out, width=200), results(jobs))
    columns = r"job +status +steps +loss +eval loss +step time +tok/s +seconds"
    assert re.search(columns, out.getvalue())
    assert "1.00001" in out.getvalue()


def test_learning_rates_are_drawn_on_a_log_axis_and_seeds_are_repeats():
    rates = [1e-3, 2e-3, 3e-3]
    jobs = [
        left(job_of(3 * seed + i, **{"optim.lr": rate, "run.seed": seed}), (3.0 + i + seed, 1.0))
        for seed in range(2)
        for i, rate in enumerate(rates)
    ]
    text = page_of(*jobs)
    svgs = re.findall(r'<svg class="lines".*?</svg>', text)
    [svg] = [svg for svg in svgs if "loss, by optim.lr" in svg]
    assert " 0.001: 3.5, 0.002: 4.5, 0.003: 5.5" in svg
    assert svg.count("<use ") == 3
    assert "Over run.seed" not in text
    assert "Over optim.lr" not in page_of(left(job_of(9, **{"optim.lr": 1e-3}), (3.0, 1.0)))


def page_of(*jobs, found=None):
    return sweep_page(TOP, found or results(jobs))


def test_the_page_has_a_line_a_schedule_and_every_job(directory):
    jobs = [
        left(job_of(i, family, size), (4.0, 1 / size))
        for i, (family, size) in enumerate(
            (f, m) for f in ("gpipe", "interleaved") for m in (4, 8, 16)
        )
    ]
    text = page_of(*jobs)
    svgs = [ET.fromstring(svg) for svg in re.findall(r'<svg class="lines".*?</svg>', text)]
    assert [(svg.get("aria-label") or "").partition(";")[0] for svg in svgs] == [
        "loss, by schedule.num_microbatches",
        "tok/s, by schedule.num_microbatches",
    ]
    assert "schedule=gpipe: 4: 400, 8: 800, 16: 1600; " in (svgs[1].get("aria-label") or "")
    for svg in svgs:
        lines = [group for group in svg.iter("g") if group.get("class") == "data"]
        assert [group.get("class") for group in lines] == ["data", "data"] * 2
        assert len(list(svg.iter("use"))) == 6  # marks
        colours = [re.search(r"stroke: (#\w+)", ET.tostring(group).decode()) for group in lines]
        assert [colour and colour[1] for colour in colours] == ["#0072b2"] * 2 + ["#d55e00"] * 2
    assert text.count('<tr><th scope="row">') == 6
    assert "script" not in re.sub("script-src", "", text)
    assert not re.search(r'(src|href)="[^#]|url\(|@import', text)


def test_one_number_of_microbatches_has_no_figure_and_a_failure_is_explained():
    jobs = [left(job_of(0), (4.0, 1.0)), job_of(1, "<b>")]
    text = page_of(found=[ended(jobs[0]), ended(jobs[1], "failed", 1, 2.0, "x < y & z")])
    assert '<svg class="lines"' not in text
    assert "What failed" in text
    assert "x &lt; y &amp; z" in text
    assert "&lt;b&gt;" in text
    assert "2 jobs: 1 finished, 1 failed" in text


def test_curves_beyond_the_distinct_colours_are_only_in_the_table():
    jobs = [
        left(job_of(2 * i + j, size=size, **{"run.dtype": f"t{i}"}), (4.0, 1.0))
        for i in range(MOST_LINES + 2)
        for j, size in enumerate((4, 8))
    ]
    text = page_of(*jobs)
    assert text.count('class="key"') == MOST_LINES
    assert "2 more are in the table" in text


def test_a_note_names_jobs_that_shared_the_machine():
    job = left(job_of(0), (4.0, 1.0))
    TOP.mkdir(parents=True, exist_ok=True)
    assert not any("side by side" in line for line in write_summary(TOP, results([job])))
    (job.run_dir / LOG).write_text("")
    said = write_summary(TOP, [ended(job, "finished earlier")])
    note = "note: Jobs ran side by side, which slows each of them: the fastest is not named"
    assert said[0] == note  # before the best job and the summary
    assert "Jobs ran side by side" in Path("runs/s/sweep.html").read_text()


def test_the_fastest_is_not_named_among_jobs_that_shared_the_machine():
    jobs = [left(job_of(0), (4.0, 1.0)), left(job_of(1, "1f1b", **{"optim.lr": 1}), (3.0, 0.5))]
    assert [best.what for best in best_of(results(jobs))] == [
        "lowest final_loss",
        "fastest, in tok/s",
    ]
    (jobs[0].run_dir / LOG).write_text("")
    assert [best.what for best in best_of(results(jobs))] == ["lowest final_loss"]


def test_errors_that_differ_only_in_the_jobs_directory_are_counted_as_equal():
    jobs = [job_of(index) for index in range(4)]
    texts = [f"{job.run_dir}/checkpoints cannot be written: full." for job in jobs[:2]]
    texts += [f"{jobs[2].run_dir.absolute()}/checkpoints cannot be written: full.", "odd."]
    found = [ended(job, "failed", 1, 1.0, text) for job, text in zip(jobs, texts, strict=True)]
    alike = "RUN_DIR/checkpoints cannot be written: full."
    assert equal_errors(found) == {alike: jobs[:3], "odd.": jobs[3:]}
    assert equal_errors(found[:1]) == {texts[0]: jobs[:1]}
    out = io.StringIO()
    show_results(Console(file=out, width=200), found)
    assert out.getvalue().count("cannot be written") == 1
    assert sweep_page(TOP, found).count("cannot be written") == 1


WORDS = (
    "mesh=1x2 model=mlp model.num_layers=2 model.d_model=16 data=regression data.batch_size=8 "
    "data.num_rows=1024 run.name=tiny run.platform=cpu run.num_steps=2 run.eval_every=2 "
    "executor=mpmd run.timeline=true"
)


def run(*words):
    """Run a sweep as a separate process; each job is one more."""
    argv = ["train", "-m", *WORDS.split(), *words]
    code = f"import sys; from ppctl.cli import main; print(main({argv!r}), 'jax' in sys.modules)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.full
@pytest.mark.slow
def test_a_real_sweep_is_summed_up(directory):
    grid = ("schedule=gpipe", "schedule.num_microbatches=2,4", "hydra.launcher.jobs=2")
    done = run(*grid)
    assert done.stdout == "0 False\n", done.stderr
    found = json.loads(Path("runs/tiny/sweep.json").read_text())
    assert [
        (each["status"], each["steps"], each["schedule.num_microbatches"]) for each in found
    ] == [*(("finished", 2, 2), ("finished", 2, 4))]
    for each, bubble in zip(found, (1 / 3, 1 / 5), strict=True):
        assert each["ideal_bubble_fraction"] == pytest.approx(bubble)
        assert 0 < each["predicted_bubble_fraction"] < 1
        assert 0 < each["measured_bubble_fraction"] < 1
        assert (
            min(
                each[key]
                for key in ("eval_loss", "rows_per_s", "memory_bytes", "predicted_step_time_s")
            )
            > 0
        )
        assert "finished at step 2" in (Path(each["run_dir"]) / LOG).read_text()
    labels = re.findall(r'aria-label="([^"]*)"', Path("runs/tiny/sweep.html").read_text())
    assert any("rows/s, by schedule.num_microbatches" in label for label in labels)


@pytest.mark.full
@pytest.mark.slow
def test_a_real_sweep_is_skipped_and_resumed(directory):
    grid = ("schedule=gpipe", "schedule.num_microbatches=2,4", "hydra.launcher.jobs=2")
    assert run(*grid).stdout == "0 False\n"
    again = run(*grid)
    assert again.stdout == "0 False\n"
    assert again.stderr.count("finished earlier (") == 2
    more = run("schedule=gpipe", "schedule.num_microbatches=2,3", "run.num_steps=3")
    assert more.stdout.endswith("1 False\n")
    assert "job 0: schedule.num_microbatches=2: running on after step 2" in more.stderr
    assert "data.batch_size=8 is not a multiple" in more.stderr
    assert "resuming after step 2" in more.stdout
    assert [each["steps"] for each in json.loads(Path("runs/tiny/sweep.json").read_text())] == [
        3,
        None,
    ]
    page_text = Path("runs/tiny/sweep.html").read_text()
    assert (
        len(re.findall(r'<a href="schedule.num_microbatches%3D2[^"]*/report.html"', page_text)) == 1
    )
    assert "Memory of each rank" in next(Path("runs/tiny").glob("*=2*/report.html")).read_text()


def test_the_page_links_to_existing_reports():
    jobs = [left(job_of(index, run_dir=f"runs/s/a b,{index}"), (4.0, 1.0)) for index in range(2)]
    (jobs[1].run_dir / "report.html").write_text("")
    assert re.findall(r'<a href="([^"]*)"', page_of(*jobs)) == ["a%20b%2C1/report.html"]
