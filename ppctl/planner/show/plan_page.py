"""The page of `ppctl plan`, one html file: numbers, memory, stages, chart of the step."""

from __future__ import annotations

import json
from dataclasses import asdict

from ppctl.config import Config
from ppctl.planner.cost.network_layers import COLUMNS as LAYERS_COLUMNS
from ppctl.planner.cost.network_layers import TITLE as LAYERS_TITLE
from ppctl.planner.cost.network_layers import layer_rows
from ppctl.planner.cost.step_prediction import Prediction
from ppctl.planner.cost.step_time import op_times_of, timeline_of
from ppctl.planner.search.token_budget import NOT_COUNTED
from ppctl.planner.show.plan_terminal import (
    ABOUT,
    LEFT_TO_BACKWARD,
    PARTS,
    PREDICTED,
    better,
    costs_text,
    fit_text,
    forward_text,
    seconds_text,
    shown_ranks,
    total_name,
)
from ppctl.reports import page_kit as kit
from ppctl.reports.charts.html_charts import charts_html, too_many_tasks
from ppctl.reports.charts.memory_bars import memory_bars
from ppctl.reports.charts.schedule_drawing import Drawing, drawing_of_timeline
from ppctl.reports.terminal_output import size_text
from ppctl.schedule.simulator import Timeline
from ppctl.training.pipeline.job import TrainingJob

MOST_BARS = 64
SETTINGS = ("model", "schedule", "partition", "executor", "data", "hardware", "costs")  # used
FITS = {True: kit.YES, False: kit.NO, None: kit.UNKNOWN}
IN_TICKS = "Ticks in lockstep (executor=spmd): each lasts as its slowest rank, and a transfer."
FREELY = "Ranks run freely: a task starts when its rank is free and its values have arrived."
SHARED = "Simulated devices share this machine's cores: tasks take longer while others run."


def plan_page(found: Prediction, config: Config, picture: Drawing | str) -> str:
    """Return the text of the page; `picture`: of the step, or why there is none."""
    pipeline = found.schedule if config.executor.IS_PIPELINED else "un-pipelined"
    return kit.page(
        f"Plan: {request_title(config)}, {pipeline}",
        kit.verdict(FITS[found.fits], fit_text(found)),
        _numbers(found, config),
        kit.section("Memory of one device", _memory(found)),
        kit.section("Stages", _stages(found, config)),
        kit.section("The step, as predicted", _picture(picture, found, config)),
        kit.section("A better partition", _proposal(found, config)),
        kit.section("What this assumes", kit.bullets(found.assumes)),
        kit.section("The request", _settings(config)),
    )


def request_title(config: Config) -> str:
    """Return the model and the mesh of a request in words."""
    return f"{config.model.name} of {config.model.num_layers} layers, mesh {config.mesh.text}"


def _number(value: float, form: str = "", unit: str = "") -> str:
    """Return a number formatted for people, with its exact value."""
    return kit.exact(value, f"{value:{form}}{unit}")


def picture_of(job: TrainingJob, unknown: str | None) -> Drawing | str:
    """Return the chart of the predicted step, or why none; `unknown`: why its time is unknown."""
    schedule = job.pipe.schedule
    if not job.pipe.execution.is_pipelined:
        return "executor=reference has no pipeline to draw."
    if unknown is not None:
        return f"Not drawn, because the step time is not known: {unknown}"
    reason = too_many_tasks(sum(map(len, schedule.ranks)))
    if reason is not None:
        return reason
    timeline = timeline_of(job.pipe, op_times_of(job))
    return drawing_of_timeline(schedule.name, timeline)


def _proposal(found: Prediction, config: Config) -> str:
    """Return the partition that the planner proposes; nothing where it has none."""
    proposal = better(found, config)
    if found.proposal is None or proposal is None:
        return ""
    layers = " ".join(map(_number, found.proposal.partition))
    ratio = _number(found.proposal.time_ratio, ".3f")
    note = kit.soft(f"Layers of each stage: {layers}; {ratio} times the time.")
    return f"<p><code>{kit.text(proposal)}</code></p>{note}"


def _numbers(found: Prediction, config: Config) -> str:
    """Return the numbers that people look for first."""
    # 1. time and speed, where they are known
    step = speed = ("not known", kit.text(found.unknown or ""))
    step_s, speed_s, overhead_s = found.step_time_s, found.tokens_per_s, found.per_step_overhead_s
    if step_s is not None and speed_s is not None and overhead_s is not None:
        overhead = kit.exact(overhead_s, f"{overhead_s / step_s:.1%}")
        about = f"{overhead} of it per-step overhead (parameters, gradients, optimizer)"
        step = _number(step_s, ".4g", " s"), about
        speed = _number(speed_s, ",.0f", f" {kit.SPEEDS[found.unit]}"), ""
    mfu = ("not known", "no peak is stated")
    if found.mfu_fraction is not None and found.mfu_causal_fraction is not None:
        causal = _number(found.mfu_causal_fraction, ".1%")
        mfu = _number(found.mfu_fraction, ".1%"), f"of the peak; {causal} causal"

    # 2. cards
    flops = kit.exact(found.step_flops, f"{found.step_flops / 1e12:,.3g} TFLOP")
    mesh = f"{config.mesh.axes_text}, {config.schedule.num_microbatches} microbatches"
    hardware = f"hardware={kit.text(found.hardware or 'not known')}"
    cards = [
        ("Step time", *step),
        ("Speed", *speed),
        ("MFU", *mfu),
        ("Bubble", *_bubble(found)),
        ("Parameters", _number(found.num_parameters, ","), ""),
        ("Work of a step", flops, "nothing recomputed"),
        ("Devices", kit.text(found.devices), mesh),
        ("Op times", f"costs={kit.text(found.costs)}", hardware),
    ]
    if (budget := found.token_budget) is not None:
        effort = kit.text(f"{budget.effort_text} ({NOT_COUNTED})")
        days = kit.exact(budget.days, budget.time_text)
        cards.append((f"{budget.tokens_text} tokens", days, effort))
    return kit.cards(cards)


def _bubble(found: Prediction) -> tuple[str, str]:
    """Return (predicted bubble, note with the ideal one), or (ideal bubble, note)."""
    ideal, predicted = found.ideal_bubble_fraction, found.predicted_bubble_fraction
    if ideal is None:
        return "none", "no pipeline"
    ideal_text = _number(ideal, ".1%")
    if predicted is None:
        return ideal_text, "ideal: of the schedule, equal stages"
    note = f"predicted; {ideal_text} ideal, of the schedule with equal stages"
    return _number(predicted, ".1%"), note


def _memory(found: Prediction) -> str:
    """Return bars of ranks by part, their legend, the numbers."""
    # 1. bars
    drawn, memory = shown_ranks(found, MOST_BARS), found.memory_bytes
    are_alike = len(set(map(str, memory))) == 1
    name = lambda rank: "every rank" if are_alike else f"rank {rank}"  # noqa: E731
    few = are_alike or len(drawn) == len(memory)
    content = "" if few else "<p>The first rank, the fullest and the last.</p>"
    bars = [(name(r), memory[r]) for r in drawn]
    content += memory_bars(bars, PARTS, found.limit_bytes, ABOUT)

    # 2. their numbers
    size = lambda num_bytes: kit.exact(num_bytes, size_text(num_bytes))  # noqa: E731
    present, rows = [part for part in PARTS if any(held.get(part) for held in memory)], []
    for rank in [0] if are_alike else range(len(memory)):
        sizes = [memory[rank].get(part, 0) for part in present]
        totals = found.total_bytes[rank], *[found.predicted_bytes[rank]] * found.is_compiled
        rows.append([name(rank), *map(size, [*sizes, *totals])])
    columns = ["", *present, total_name(found), *[PREDICTED] * found.is_compiled]
    content += kit.table("numbers of the bars", columns, rows)

    # 3. the limit
    limit = "not known" if found.limit_bytes is None else size(found.limit_bytes)
    source = "" if found.limit_source is None else f" ({kit.text(found.limit_source)})"
    compiled = f" Compiled in {_number(found.compile_s, '.1f')} s." if found.compile_s else ""
    return content + kit.soft(f"Memory of a device: {limit}{source}.{compiled}")


def _stages(found: Prediction, config: Config) -> str:
    """Return a table of each stage's layers, submesh and seconds; for a network, of layers too."""
    # 1. stages
    if not config.executor.IS_PIPELINED:
        layers = f"{config.model.num_layers} layers"
        return f"<p>executor=reference has no stages: one device holds all {layers}.</p>"
    have_devices = any(stage.devices for stage in found.stages)
    rows, last = [], len(found.stages) - 1
    for s, stage in enumerate(found.stages):
        ends = [name for name, at in (("embedding", 0), ("head", last)) if s == at]
        devices = [" ".join(map(_number, stage.devices))] * have_devices
        numbers = map(_number, (stage.first_layer, stage.num_layers, stage.rank))
        of_kinds = [stage.forward_s, stage.backward_s, stage.input_grad_s, stage.weight_grad_s]
        texts = zip(of_kinds, [forward_text(stage), *map(seconds_text, of_kinds[1:])], strict=True)
        spent = (text if each is None else kit.exact(each, text) for each, text in texts)
        rows.append([f"stage {s}", " and ".join(ends), *numbers, *devices, *spent])
    columns = ["", "with", "first layer", "layers", "rank", *["devices"] * have_devices]
    columns += ["forward s", "backward s", "I s", "W s"]
    content = kit.table("seconds of a microbatch", columns, rows, "stages")

    # 2. notes, and the layers of a network
    is_left = bool(found.stages) and found.stages[-1].forward_s == 0
    content += kit.soft(f"{LEFT_TO_BACKWARD}." if is_left else "")
    costs, transfer_s = costs_text(found), found.transfer_s
    if costs is not None and transfer_s is not None:
        transfer = _number(transfer_s, ".3g", " s")
        content += kit.soft(f"A transfer: {transfer}. Costs {kit.text(costs)}.")
    if found.layers:
        cells = [list(map(kit.text, row)) for row in layer_rows(found.layers)]
        content += kit.table(LAYERS_TITLE, LAYERS_COLUMNS, cells, "stages")
    return content


def _picture(picture: Drawing | str, found: Prediction, config: Config) -> str:
    if isinstance(picture, str):
        return f"<p>{kit.text(picture)}</p>"
    notes = [IN_TICKS if config.executor.IN_TICKS else FREELY]
    notes += [SHARED] if _is_shared(picture.timeline) else []
    if (overhead_s := found.per_step_overhead_s) is not None:
        what = "per-step overhead for parameters, gradients and optimizer"
        notes.append(f"Not drawn: {overhead_s:.3g} s {what}.")
    return charts_html([picture], [" ".join(notes)])


def _is_shared(timeline: Timeline) -> bool:
    """Return whether a task takes longer than on a device working alone."""
    chunks, seconds = timeline.schedule.num_chunks, timeline.costs.seconds
    for task, start_s in timeline.start_s.items():
        alone_s = seconds(task.kind, task.stage, chunks)
        if alone_s and timeline.end_s[task] - start_s > alone_s * 1.000001:
            return True
    return False


def _settings(config: Config) -> str:
    """Return the settings that a plan depends on, as overrides."""
    rows = [[f"mesh={kit.text(config.mesh.text)}", ""]]
    for part in SETTINGS:
        values = asdict(getattr(config, part))
        name = f"{part}={values.pop('name')}"
        words = [f"{part}.{key}={_typed(value)}" for key, value in values.items()]
        rows.append([kit.text(name), " ".join(f"<code>{kit.text(word)}</code>" for word in words)])
    rows.append([f"run.dtype={kit.text(_typed(config.run.dtype))}", ""])
    return kit.table("settings", [], rows, "request")


def _typed(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
