"""The printed form of `ppctl rehearse` and its page, one html file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ppctl.config import Config
from ppctl.planner.plan_page import MOST_BARS, parts_legend
from ppctl.planner.plan_terminal import overhead_text, speed_text
from ppctl.planner.rehearse import Rehearsal, RehearsedRank
from ppctl.reports.charts.drawing import drawing_of_timeline
from ppctl.reports.charts.elements import section, table
from ppctl.reports.charts.html import charts_html, html_page
from ppctl.reports.charts.plots import stacked_bars
from ppctl.reports.terminal import OutputConsole, show_table, size_text
from ppctl.schedule.search.extrapolate import MOST_TASKS
from ppctl.schedule.simulate import Timeline
from ppctl.training.engines.memory import PARTS

MOST_RANKS = 16  # of the table on the terminal
COLUMNS = ("rank", "ran as", "tasks s", "update s", "forward s", "backward s", "memory")
PART_COLUMN = "part s"  # before the memory, where ranks have parts of a vocabulary


def show_rehearsal(found: Rehearsal, config: Config) -> None:
    """Print a rehearsal for people."""
    console = OutputConsole()
    for name, text in _lines(found, config):
        console.print(f"{name:<10}{text}", markup=False, highlight=False, soft_wrap=True)
    ranks = _shown(found.ranks)
    title = "ranks, with seconds of a step, and of a microbatch through each stage"
    title += "" if len(ranks) == len(found.ranks) else f" ({len(ranks)} of {len(found.ranks)})"
    show_table(console, title, _columns(found), [_row(each) for each in ranks])


def rehearsal_page(found: Rehearsal, timeline: Timeline, config: Config) -> str:
    """Return the text of the page."""
    title = f"{config.model.name} of {config.model.num_layers} layers, mesh {config.mesh.text}, {found.schedule}"
    about = table("the step", [], [[escape(name), escape(text)] for name, text in _lines(found, config)])
    drawn = _shown(found.ranks, MOST_BARS)
    present = [part for part in PARTS if any(each.memory_bytes.get(part) for each in found.ranks)]
    bars = stacked_bars([(f"rank {r.rank}", r.memory_bytes) for r in drawn], PARTS, found.limit_bytes, size_text)
    rows = [[*map(escape, _row(each))] for each in found.ranks]
    num_tasks = len(timeline.start_s)
    chart = f"<p>Not drawn: {num_tasks:,} tasks are too many for a chart ({MOST_TASKS:,} at most).</p>"
    if num_tasks <= MOST_TASKS:
        chart = charts_html([drawing_of_timeline(found.schedule, timeline)])
    sections = [
        f'<div class="request">{about}</div>',
        section("Ranks", table("seconds of a step, and of a microbatch through each stage", _columns(found), rows)),
        section("Memory of one device", bars + parts_legend(present)),
        section("The step, simulated from the ranks' times", chart),
    ]
    return html_page(f"Rehearsal: {title}", f"<main>\n{''.join(sections)}</main>\n", "plots.css", "plan.css")


def _lines(found: Rehearsal, config: Config) -> Iterator[tuple[str, str]]:
    mesh, number = config.mesh, len({each.ran_as for each in found.ranks})
    yield "mesh", f"{mesh.axes_text}, links as of hardware={found.hardware}"
    yield "ran here", f"{number} of {len(found.ranks)} ranks on one {found.device}; the others are like these"
    yield "schedule", f"{found.schedule}, {config.schedule.num_microbatches} microbatches, {config.executor.name}"
    yield "step", _step_text(found)
    if mesh.tp * mesh.cp > 1:
        yield (
            "tp, cp",
            f"{found.sent_s:.3g} s of the step, counted: what devices that divide a stage send; one ran here",
        )
    if found.analytic_step_time_s is None:
        yield "analytic", f"not known: {found.analytic_unknown}"
    else:
        ratio = found.step_time_s / found.analytic_step_time_s
        yield "analytic", f"{found.analytic_step_time_s:.4g} s by costs=analytic; rehearsed over it {ratio:.2f}"
    worst = max(found.ranks, key=lambda each: each.total_bytes)
    limit = "" if found.limit_bytes is None else f" of {size_text(found.limit_bytes)}"
    yield "memory", f"{size_text(worst.total_bytes)}{limit} on rank {worst.rank}, which needs most"


def _step_text(found: Rehearsal) -> str:
    speed = speed_text(found.step_time_s, found.tokens_per_s, found.unit, found.mfu_fraction, found.mfu_causal_fraction)
    cpu = "" if found.step_cpu_s is None else f", {found.step_cpu_s:.4g} CPU seconds"
    overhead = overhead_text(found.per_step_overhead_s, found.step_time_s)
    return f"{speed}, bubble {found.bubble_fraction:.1%}{cpu}; {overhead}"


def _shown(ranks: tuple[RehearsedRank, ...], most: int = MOST_RANKS) -> tuple[RehearsedRank, ...]:
    """Return the ranks to show: all, up to `most`, else those that ran, the fullest and the last."""
    if len(ranks) <= most:
        return ranks
    fullest = max(ranks, key=lambda each: each.total_bytes)
    return tuple(each for each in ranks if each.ran_as == each.rank or each in (fullest, ranks[-1]))


def _columns(found: Rehearsal) -> tuple[str, ...]:
    *names, memory = COLUMNS
    has_parts = any(each.part_s is not None for each in found.ranks)
    return (*names, *[PART_COLUMN] * has_parts, memory)


def _row(of_rank: RehearsedRank) -> list[str]:
    seconds = lambda values: " ".join(f"{value:.3g}" for value in values)  # noqa: E731
    return [
        str(of_rank.rank),
        str(of_rank.ran_as),
        f"{of_rank.tasks_s:.4g}",
        f"{of_rank.update_s:.4g}",
        seconds(of_rank.forward_s),
        seconds(of_rank.backward_s),
        *([] if of_rank.part_s is None else [seconds([of_rank.part_s])]),
        size_text(of_rank.total_bytes),
    ]
