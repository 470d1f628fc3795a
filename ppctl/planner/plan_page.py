"""The page of `ppctl plan`, one html file that loads nothing: numbers, memory, stages, and the step as a chart."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from ppctl.config import Config, Spmd
from ppctl.planner.network_layers import COLUMNS as LAYERS_COLUMNS
from ppctl.planner.network_layers import TITLE as LAYERS_TITLE
from ppctl.planner.network_layers import layer_rows
from ppctl.planner.plan_terminal import (
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
from ppctl.planner.prediction import Prediction
from ppctl.planner.step_runs import timeline_of
from ppctl.planner.step_time import op_times_of
from ppctl.planner.token_budget import NOT_COUNTED
from ppctl.reports.charts.drawing import Drawing, drawing_of_timeline
from ppctl.reports.charts.elements import exact, section, table
from ppctl.reports.charts.html import charts_html, html_page
from ppctl.reports.charts.palette import part_sample
from ppctl.reports.charts.plots import stacked_bars
from ppctl.reports.terminal import size_text
from ppctl.schedule.search.extrapolate import MOST_TASKS
from ppctl.schedule.simulate import Timeline, duration_s
from ppctl.training.job import TrainingJob

MOST_BARS = 64
SETTINGS = ("model", "schedule", "partition", "executor", "data", "hardware", "costs")  # that a plan depends on
FITS = {True: ("yes", "&#10003;"), False: ("no", "&#10007;"), None: ("maybe", "?")}


def plan_page(found: Prediction, config: Config, picture: Drawing | str) -> str:
    """Return the text of the page; `picture`: of the step, or why there is none."""
    pipeline = found.schedule if config.executor.IS_PIPELINED else "un-pipelined"
    title = f"{config.model.name} of {config.model.num_layers} layers, mesh {config.mesh.text}, {pipeline}"
    colour, mark = FITS[found.fits]
    sections = [
        f'<p class="fit {colour}"><b aria-hidden="true">{mark}</b> {escape(fit_text(found))}</p>',
        _numbers(found, config),
        section("Memory of one device", _memory(found)),
        section("Stages", _stages(found, config)),
        section("The step, as predicted", _picture(picture, found, config)),
    ]
    proposal = better(found, config)
    if found.proposal is not None and proposal is not None:
        layers = [exact(n, str(n)) for n in found.proposal.partition]
        sections.append(
            section(
                "A better partition",
                f"<p><code>{escape(proposal)}</code></p><p class='soft'>Layers of each stage: {' '.join(layers)}; "
                f"{exact(found.proposal.time_ratio, f'{found.proposal.time_ratio:.3f}')} times the time.</p>",
            )
        )
    assumed = "".join(f"<li>{escape(text)}</li>" for text in found.assumes)
    sections.append(section("What this assumes", f'<ul class="assumes">{assumed}</ul>'))
    sections.append(section("The request", _settings(config)))
    return html_page(f"Plan: {title}", f"<main>\n{''.join(sections)}</main>\n", "plots.css", "plan.css")


def picture_of(job: TrainingJob, unknown: str | None) -> Drawing | str:
    """Return the chart of the predicted step, or why it cannot be drawn; `unknown`: why its time is not known."""
    schedule = job.pipe.schedule
    if not job.pipe.execution.is_pipelined:
        return "executor=reference has no pipeline to draw."
    if unknown is not None:
        return f"Not drawn, because the step time is not known: {unknown}"
    num_tasks = sum(map(len, schedule.ranks))
    if num_tasks > MOST_TASKS:
        return f"Not drawn: {num_tasks:,} tasks are too many for a chart ({MOST_TASKS:,} at most)."
    return drawing_of_timeline(schedule.name, timeline_of(job.pipe, op_times_of(job, job.config.costs)))


def _numbers(found: Prediction, config: Config) -> str:
    """Return the numbers that people look for first."""
    step = speed = ("not known", found.unknown or "")
    if found.step_time_s is not None and found.tokens_per_s is not None and found.per_step_overhead_s is not None:
        overhead = exact(found.per_step_overhead_s, f"{found.per_step_overhead_s / found.step_time_s:.1%}")
        step = (
            exact(found.step_time_s, f"{found.step_time_s:.4g} s"),
            f"{overhead} of it per-step overhead (parameters, gradients, optimizer)",
        )
        unit = "tok/s" if found.unit == "tokens_per_s" else "rows/s"
        speed = (exact(found.tokens_per_s, f"{found.tokens_per_s:,.0f} {unit}"), "")
    else:
        step = speed = ("not known", escape(found.unknown or ""))
    mfu, causal = found.mfu_fraction, found.mfu_causal_fraction
    microbatches = f"{config.schedule.num_microbatches} microbatches"
    devices, hardware = escape(found.devices), escape(found.hardware or "not known")
    cards = [
        ("Step time", *step),
        ("Speed", *speed),
        (
            "MFU",
            "not known" if mfu is None else exact(mfu, f"{mfu:.1%}"),
            "no peak is stated"
            if mfu is None or causal is None
            else f"of the peak; {exact(causal, f'{causal:.1%}')} causal",
        ),
        ("Bubble", *_bubble(found)),
        ("Parameters", exact(found.num_parameters, f"{found.num_parameters:,}"), ""),
        ("Work of a step", exact(found.step_flops, f"{found.step_flops / 1e12:,.3g} TFLOP"), "nothing recomputed"),
        ("Devices", devices, f"{config.mesh.axes_text}, {microbatches}"),
        ("Op times", f"costs={escape(found.costs)}", f"hardware={hardware}"),
    ]
    if (budget := found.token_budget) is not None:
        effort = f"{budget.effort_text} ({NOT_COUNTED})"
        cards.append((f"{budget.tokens_text} tokens", exact(budget.days, budget.time_text), escape(effort)))
    items = (f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>" for name, value, note in cards)
    return f'<dl class="numbers">{"".join(items)}</dl>'


def _bubble(found: Prediction) -> tuple[str, str]:
    """Return (the predicted bubble, a note with the ideal one), which stands alone where nothing is predicted."""
    ideal, predicted = found.ideal_bubble_fraction, found.predicted_bubble_fraction
    if ideal is None:
        return "none", "no pipeline"
    ideal_text = exact(ideal, f"{ideal:.1%}")
    if predicted is None:
        return ideal_text, "ideal: of the schedule, equal stages"
    return exact(predicted, f"{predicted:.1%}"), f"predicted; {ideal_text} ideal, of the schedule with equal stages"


def parts_legend(parts: Sequence[str]) -> str:
    """Return the legend of bars of memory by part."""
    items = "".join(f"<li>{part_sample(PARTS.index(part))}{part}: {ABOUT[part]}</li>" for part in parts)
    return f'<ul class="parts">{items}</ul>'


def _memory(found: Prediction) -> str:
    """Return bars of ranks by part, their legend, the numbers."""
    present = [part for part in PARTS if any(held.get(part) for held in found.memory_bytes)]
    drawn = shown_ranks(found, MOST_BARS)
    are_alike = len(set(map(str, found.memory_bytes))) == 1
    name = lambda rank: "every rank" if are_alike else f"rank {rank}"  # noqa: E731
    bars = stacked_bars([(name(r), found.memory_bytes[r]) for r in drawn], PARTS, found.limit_bytes, size_text)
    few = (
        "" if are_alike or len(drawn) == len(found.memory_bytes) else "<p>The first rank, the fullest and the last.</p>"
    )
    columns = ["", *present, total_name(found)]
    if found.is_compiled:
        columns.append(PREDICTED)
    rows = []
    for rank in [0] if are_alike else range(len(found.memory_bytes)):
        sizes = [*(found.memory_bytes[rank].get(part, 0) for part in present), found.total_bytes[rank]]
        sizes += [found.predicted_bytes[rank]] if found.is_compiled else []
        rows.append([name(rank), *(exact(each, size_text(each)) for each in sizes)])
    limit = "not known" if found.limit_bytes is None else exact(found.limit_bytes, size_text(found.limit_bytes))
    compiled = "" if found.compile_s is None else f" Compiled in {exact(found.compile_s, f'{found.compile_s:.1f}')} s."
    source = "" if found.limit_source is None else f" ({escape(found.limit_source)})"
    about = f"<p class='soft'>Memory of a device: {limit}{source}.{compiled}</p>"
    return f"{few}{bars}{parts_legend(present)}{table('numbers of the bars', columns, rows)}{about}"


def _stages(found: Prediction, config: Config) -> str:
    """Return a table of the stages of each rank, a chunk a column."""
    if not config.executor.IS_PIPELINED:
        return f"<p>executor=reference has no stages: one device holds all {config.model.num_layers} layers.</p>"
    cells, first, last = defaultdict(list), 0, len(found.partition) - 1
    for stage, (n, rank) in enumerate(zip(found.partition, found.rank_of, strict=True)):
        which = "" if n == 0 else f" ({first})" if n == 1 else f" ({first} to {first + n - 1})"
        layers = f"{exact(n, str(n))} layer{'s' * (n != 1)}{which}"
        around = ["<b>embedding</b>"] * (stage == 0), ["<b>head</b>"] * (stage == last)
        holds = ", ".join([*around[0], layers, *around[1]])
        cells[rank].append(f"stage {stage}: {holds}")
        first += n
    rows = [[f"rank {exact(rank, str(rank))}", *cells[rank]] for rank in sorted(cells)]
    columns = ["", *(f"chunk {chunk}" for chunk in range(max(map(len, cells.values()))))]
    listed = f'<div class="stages">{table("stages of each rank", columns, rows)}</div>{_stage_seconds(found)}'
    if not found.layers:
        return listed
    of_layers = table(LAYERS_TITLE, LAYERS_COLUMNS, [list(map(escape, row)) for row in layer_rows(found.layers)])
    about = escape(LAYERS_TITLE[0].upper() + LAYERS_TITLE[1:])
    return f"{listed}<p class='soft'>{about}.</p><div class=\"stages\">{of_layers}</div>"


def _stage_seconds(found: Prediction) -> str:
    """Return a table of each stage's layers, submesh and seconds."""
    rows = []
    for s, stage in enumerate(found.stages):
        devices = " ".join(exact(device, str(device)) for device in stage.devices)
        held = exact(stage.first_layer, str(stage.first_layer)), exact(stage.num_layers, str(stage.num_layers))
        of_kinds = [stage.forward_s, stage.backward_s, stage.input_grad_s, stage.weight_grad_s]
        texts = [forward_text(stage), *map(seconds_text, of_kinds[1:])]
        spent = (text if each is None else exact(each, text) for each, text in zip(of_kinds, texts, strict=True))
        rows.append([f"stage {s}", *held, exact(stage.rank, str(stage.rank)), devices, *spent])
    columns = ["", "first layer", "layers", "rank", "devices", "forward s", "backward s", "I s", "W s"]
    if not any(stage.devices for stage in found.stages):
        columns, rows = [*columns[:4], *columns[5:]], [[*row[:4], *row[5:]] for row in rows]
    left = found.stages and found.stages[-1].forward_s == 0
    listed = table("seconds of a microbatch", columns, rows)
    listed += f"<p class='soft'>{escape(LEFT_TO_BACKWARD)}.</p>" if left else ""
    costs, transfer_s = costs_text(found), found.transfer_s
    if costs is None or transfer_s is None:
        return listed
    of_schedule = f"<p class='soft'>A transfer: {exact(transfer_s, f'{transfer_s:.3g} s')}. Costs {escape(costs)}.</p>"
    return listed + of_schedule


def _picture(picture: Drawing | str, found: Prediction, config: Config) -> str:
    if isinstance(picture, str):
        return f"<p>{escape(picture)}</p>"
    notes = [
        "Ticks in lockstep, as executor=spmd runs them: each lasts as long as its slowest rank, and a transfer."
        if config.executor.IN_TICKS
        else "Ranks run freely: a task starts when its rank is free and its values have arrived."
    ]
    if isinstance(config.executor, Spmd) and config.executor.idle == "compute":
        notes.append("Where a rank has no task it computes all the same (executor.idle=compute), which is not drawn.")
    if _is_shared(picture.timeline):
        notes.append("The simulated devices share this machine's cores, so that tasks take longer while others run.")
    if found.per_step_overhead_s is not None:
        notes.append(
            f"Not drawn: {found.per_step_overhead_s:.3g} s per-step overhead for parameters, gradients and optimizer."
        )
    return f"<p class='soft'>{escape(' '.join(notes))}</p>\n{charts_html([picture])}"


def _is_shared(timeline: Timeline) -> bool:
    """Return whether a task takes longer than on a device working alone."""
    chunks = timeline.schedule.num_chunks
    alone = ((task, duration_s(task, timeline.costs, chunks)) for task in timeline.start_s)
    return any(timeline.end_s[t] - timeline.start_s[t] > alone_s * 1.000001 for t, alone_s in alone if alone_s)


def _settings(config: Config) -> str:
    """Return the settings that a plan depends on, as one types them."""
    rows = [[f"mesh={escape(config.mesh.text)}", ""]]
    for part in SETTINGS:
        values = asdict(getattr(config, part))
        name = f"{part}={values.pop('name')}"
        values_text = " ".join(
            f"<code>{escape(f'{part}.{key}={_typed(value)}')}</code>" for key, value in values.items()
        )
        rows.append([escape(name), values_text])
    rows.append([f"run.dtype={escape(_typed(config.run.dtype))}", ""])
    return f'<div class="request">{table("settings", [], rows)}</div>'


def _typed(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
