"""Every kind of html page that ppctl writes, from cheap inputs: no run, no browser."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ppctl.cli.subcommands.schedule_show import draw
from ppctl.config import (
    MLP,
    Config,
    Costs,
    Interleaved,
    Mesh,
    Mpmd,
    Regression,
    Schedule as Plain,
    ScheduleConfig,
)
from ppctl.config.schedule_from_config import Planned, pipeline_of
from ppctl.launch.sweep import sweep_page
from ppctl.launch.sweep.sweep_jobs import NUMBERS, Job, Result
from ppctl.planner.cost.request_text import RequestText
from ppctl.planner.make_plan import predicted
from ppctl.planner.rehearsal.rehearse_ranks import Rehearsal, RehearsedRank
from ppctl.planner.show import plan_page
from ppctl.reports import measured_timeline_file as timeline_io
from ppctl.reports.charts.draw_schedule import schedules_page
from ppctl.reports.charts.schedule_drawing import Drawing
from ppctl.reports.run_page.one_run_page import run_page
from ppctl.reports.run_page.read_run import DROPPED, LOAD, Curve, LayerValues, RecordedRun, read_run
from ppctl.reports.write_report import compare_page
from ppctl.training.pipeline.job import assemble

GIB = 2**30


def all_pages(directory: Path) -> dict[str, str]:
    """Return each page by its name; `directory`: an empty one, for the files of runs."""
    timeline = directory / "timeline"
    pipeline = pipeline_of(Plain("zb_h1", 8), Mpmd(), 4, 8)
    step = pipeline.step
    timeline_io.write_timeline(timeline, step.timeline(step.costs))
    return {
        "schedule": schedules_page([drawing("1f1b", 4, 8)]),
        "schedule, 8 ranks, 32 microbatches": schedules_page([drawing("zb_h1", 8, 32)]),
        "schedule, whole backwards": schedules_page([drawing("1f1b", 8, 32, transfer_s=0.25)]),
        "schedule, microseconds": schedules_page(
            [drawing("zb_v", 4, 8, forward_s=1e-6, input_grad_s=2e-6, weight_grad_s=1e-6)]
        ),
        "schedule, many ranks": schedules_page([drawing("1f1b", 64, 128)]),
        "schedules compared": schedules_page(
            [drawing(name, 4, 8) for name in ("gpipe", "zb_h1", "zb_v")]
        ),
        **plans(),
        "rehearsal": rehearsal(),
        "run": run(directory / "run"),
        "runs compared": runs(directory),
        "sweep": sweep(),
        "timeline": (timeline / timeline_io.FILES[1]).read_text(encoding="utf-8"),
    }


def drawing(family: str, num_ranks: int, num_microbatches: int, **costs: float) -> Drawing:
    """Return a schedule as `ppctl schedule show` draws it."""
    return draw(
        ScheduleConfig(Mesh(1, num_ranks), Plain(family, num_microbatches), costs=Costs(**costs))
    )


def plans() -> dict[str, str]:
    """Return plan pages of stages in chunks: limits inside of the bars, above them and far away,
    and none known.
    """
    asked = Config(
        model=MLP(num_layers=16),
        mesh=Mesh(1, 4),
        schedule=Interleaved(num_microbatches=8, num_chunks=2),
        executor=Mpmd(),
        data=Regression(batch_size=16),
    )
    job = assemble(asked)
    found = predicted(job)
    picture = plan_page.picture_of(job, found.unknown)
    large = tuple(
        {part: size * 2**20 + 7 for part, size in held.items()} for held in found.memory_bytes
    )
    found = replace(
        found, memory_bytes=large, total_bytes=tuple(sum(held.values()) for held in large)
    )
    most = max(found.total_bytes)
    limits = {
        "limit inside": most // 2,
        "limit": 2 * most,
        "far limit": 9000 * most,
        "no limit": None,
    }
    stated = {None: None}
    return {
        f"plan, {name}": plan_page.plan_page(
            replace(found, limit_bytes=limit, limit_source=stated.get(limit, "plan.memory_gib")),
            picture,
            ["mesh=1x4", "x" * 60],
        )
        for name, limit in limits.items()
    }


def rehearsal() -> str:
    """Return the page of a rehearsal."""
    schedule = drawing("1f1b", 4, 8)
    memory = {
        "parameters": 3 * GIB,
        "optimizer": 6 * GIB,
        "activations": GIB,
        "temporaries": GIB // 3,
    }
    ranks = tuple(
        RehearsedRank(
            r, min(r, 1), 0.123456, 0.01, (r,), (0.0123,), (0.0246,), memory, sum(memory.values())
        )
        for r in range(4)
    )
    found = Rehearsal(
        request=RequestText(
            "transformer", 8, "2x4", "dp=2 pp=4 fsdp=1", (), 8, "spmd", "float32", 16, 64
        ),
        schedule="1f1b",
        device="NVIDIA H100 80GB HBM3",
        hardware="h100",
        step_time_s=1.2345,
        per_step_overhead_s=0.0123,
        step_cpu_s=None,
        sent_s=0.0,
        unit="tokens_per_s",
        tokens_per_s=123456.0,
        mfu_fraction=0.4321,
        mfu_causal_fraction=0.41,
        bubble_fraction=0.234,
        limit_bytes=80 * GIB,
        ranks=ranks,
        analytic_step_time_s=1.1,
    )
    return plan_page.rehearsal_page(found, schedule.timeline)


def recorded(
    run_dir: Path, num_steps: int, spike: int, pipeline: Planned | str = ""
) -> RecordedRun:
    """Return a run, one of its steps ten times as slow, as a report reads it."""
    run_dir.mkdir()
    lines = [
        {
            "step": step,
            "loss": 1.0 + 9.0 / step,
            "lr": 1e-3,
            "step_time_s": 5.0 if step == spike else 0.5,
        }
        | {
            "tokens_per_s": 1e3 if step == spike else 1e4,
            "memory_bytes": 2000,
            "predicted_memory_bytes": 1000,
        }
        for step in range(1, num_steps + 1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(
        f"a_long_name/{run_dir.name}", run_dir, ["x" * 90], "ppctl train " + "y" * 300, [], pipeline
    )


def run(run_dir: Path) -> str:
    """Return the report of a run with evaluations, memory, experts, and a measured step."""
    pipeline = pipeline_of(Plain("zb_h1", 8), Mpmd(), 4, 8)
    one = recorded(run_dir, 5000, 2500, pipeline)
    step = pipeline.step
    timeline_io.write_timeline(run_dir / "timeline", step.timeline(step.costs))
    held = [
        {"parameters": 3 * GIB, "optimizer": 6 * GIB, "activations": (4 - r) * GIB}
        for r in range(4)
    ]
    evaluations = [(float(step), 2.0 + 9.0 / step) for step in range(500, 5001, 500)]
    predicted_s = {
        "predicted_step_time_s": 0.55,
        "predicted_bubble_fraction": 0.3,
        "ideal_bubble_fraction": 0.25,
    }
    newest = {**one.newest, **predicted_s}
    curves = {**one.curves, "eval_loss": Curve(evaluations, None)}
    steps = range(20, 5001, 20)
    loads = [[1 + 127 * l / step for l in range(94)] for step in steps]
    dropped = [[float(step < 100 and 10_000 * l) for l in range(94)] for step in steps]
    layers = {LOAD: LayerValues(1, steps, loads), DROPPED: LayerValues(1, steps, dropped)}
    one = replace(one, memory=held, curves=curves, newest=newest, layers=layers)
    return run_page(one, run_dir / "report.html")


def runs(directory: Path) -> str:
    """Return the page of several runs with long names."""
    each = [
        recorded(directory / f"{'r' * 40}{number}", 50 * number, spike=3) for number in range(1, 9)
    ]
    return compare_page(each, {}, directory / "report.html")


def sweep() -> str:
    """Return the page of a sweep over two settings with failed jobs."""
    results, speeds = [], (100.0, 300.0, 150.0, 200.0)
    for index, speed in enumerate(speeds):
        name, size = ("gpipe", "zb_h1")[index // 2], (8, 16)[index % 2]
        values = {"schedule": name, "schedule.num_microbatches": size}
        job = Job(index, values, f"schedule={name} {'x' * 60}", Path("runs/s"))
        numbers = dict.fromkeys(NUMBERS) | {
            "tokens_per_s": speed,
            "step_time_s": 1.0,
            "predicted_bubble_fraction": 0.2,
            "ideal_bubble_fraction": 0.1 * (index + 1),
            "final_loss": 2.0,
            "memory_bytes": GIB,
            "steps": 1000,
        }
        error = "y" * 200 if index else None
        results.append(Result(job, "finished", 0, 3.0, error, numbers))
    return sweep_page.sweep_page(Path("runs/s"), results)
