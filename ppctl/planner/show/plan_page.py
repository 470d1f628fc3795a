"""The self-contained pages of `ppctl plan` and `ppctl rehearse`."""

import shlex
from collections.abc import Iterable, Sequence

from ppctl.planner.cost.predict_step import steps_of, target_of, timeline_of
from ppctl.planner.cost.step_time import op_times
from ppctl.planner.make_plan import Prediction
from ppctl.planner.rehearsal.rehearse_ranks import Rehearsal
from ppctl.planner.show import plan_terminal as terminal
from ppctl.reports import page_kit as kit
from ppctl.reports.charts.cluster_figure import cluster_svg
from ppctl.reports.charts.draw_schedule import charts_html, too_many_tasks
from ppctl.reports.charts.page_figures import memory_bars
from ppctl.reports.charts.schedule_drawing import Drawing
from ppctl.schedule.mesh_axes import RANK_AXES, axes_text
from ppctl.schedule.simulator import Timeline
from ppctl.training.pipeline.job import TrainingJob

MOST_BARS = 64
FITS = {True: kit.YES, False: kit.NO, None: kit.UNKNOWN}


def plan_page(
    found: Prediction, picture: Drawing | str, words: Sequence[str], cluster: str = ""
) -> str:
    """Return the HTML page of a plan.

    picture: the drawing of the step, or why it is missing. words: arguments of `ppctl plan`.
    cluster: the figure of the devices; "": none.
    """
    pipeline = "un-pipelined" if found.ideal_bubble_fraction is None else found.schedule
    shown = terminal.shown_ranks(found, MOST_BARS)
    bars = [(terminal.rank_name(found, r), found.memory_bytes[r]) for r in shown]
    memory = memory_bars(bars, terminal.PARTS, found.limit_bytes, terminal.ABOUT)
    stages = [_table(*terminal.stage_table(found.stages), "stages")] if found.stages else []
    return kit.page(
        f"Plan: {found.request.title}, {pipeline}",
        kit.verdict(FITS[found.fits], terminal.fit_text(found)),
        _table("the step", [], terminal.plan_lines(found), "request"),
        kit.section("Memory of one device", memory, _table(*terminal.memory_table(found))),
        kit.section("Stages", *stages),
        kit.section("Devices by rank", cluster),
        kit.section("The step, as predicted, without per-step overhead", _chart(picture)),
        kit.section("What this assumes", kit.bullets(found.assumes)),
        kit.section("The request", kit.command(shlex.join(["ppctl", "plan", *words]))),
    )


def rehearsal_page(found: Rehearsal, timeline: Timeline) -> str:
    """Return the HTML page of a rehearsal."""
    shown = terminal.ranks_to_show(found, MOST_BARS)
    bars = [(f"rank {each.rank}", each.memory_bytes) for each in shown]
    memory = memory_bars(bars, terminal.PARTS, found.limit_bytes, terminal.ABOUT)
    reason = too_many_tasks(len(timeline.start_s))
    picture = Drawing(found.schedule, timeline) if reason is None else reason
    return kit.page(
        f"Rehearsal: {found.request.title}, {found.schedule}",
        _table("the step", [], terminal.rehearsal_lines(found), "request"),
        kit.section("Ranks", _table(*terminal.rank_table(found, len(found.ranks)))),
        kit.section("Memory of one device", memory),
        kit.section("The step, simulated from the ranks' times", _chart(picture)),
    )


def picture_of(job: TrainingJob, unknown: str | None) -> Drawing | str:
    """Return the drawing of the predicted step, or why it is missing.

    unknown: why the step time is unknown; None if it is known.
    """
    schedule = job.pipe.schedule
    if not job.pipe.execution.engine.is_pipelined:
        return "executor=reference has no pipeline to draw."
    if unknown is not None:
        return f"Not drawn, because the step time is unknown: {unknown}"
    reason = too_many_tasks(sum(map(len, schedule.ranks)))
    if reason is not None:
        return reason
    return Drawing(schedule.name, timeline_of(job.pipe, [*map(op_times, steps_of(job))]))


def cluster_of(job: TrainingJob, found: Prediction) -> str:
    """Return the figure of the devices by rank and host; "" without a pipeline.

    Ranks take the devices in order, as `mesh.order=auto` places them over hosts.
    """
    sizes, target = job.pipe.meshes.sizes_by_rank, target_of(job)
    if len(sizes) == 1 or job.config.mesh.order != "auto":
        return ""
    stages, ranks = dict[int, list[str]](), list[tuple[str, int]]()
    for stage in found.stages:
        last = stage.first_layer + stage.num_layers - 1
        layers = f"{stage.first_layer}-{last}" if stage.num_layers > 1 else f"{last}"
        stages.setdefault(stage.rank, []).append(layers)
    for rank, of in enumerate(sizes):
        axes = axes_text(of.only(RANK_AXES).shown(RANK_AXES))
        place = next((each.place for each in found.stages if each.rank == rank), "")
        where = place or f"{of.num_devices}, {axes}"
        ranks.append((f"rank {rank}, layers {' '.join(stages[rank])}: {where}", of.num_devices))
    hardware = target.known_hardware
    host = None if hardware is None else hardware.host_devices
    return cluster_svg(ranks, host or sum(number for _, number in ranks))


def _table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], look: str = ""
) -> str:
    """Return a table of plain text."""
    return kit.table(title, columns, [[*map(kit.text, row)] for row in rows], look)


def _chart(picture: Drawing | str) -> str:
    return f"<p>{kit.text(picture)}</p>" if isinstance(picture, str) else charts_html([picture])
