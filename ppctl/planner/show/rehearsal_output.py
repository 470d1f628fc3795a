"""The printed form of `ppctl rehearse` and its page, one html file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterator

from ppctl.config import Config
from ppctl.planner.rehearsal.rehearse_ranks import Rehearsal, RehearsedRank
from ppctl.planner.show.plan_page import MOST_BARS, request_title
from ppctl.planner.show.plan_terminal import ABOUT, overhead_text, speed_text
from ppctl.reports import page_kit as kit
from ppctl.reports.charts.html_charts import charts_html, too_many_tasks
from ppctl.reports.charts.memory_bars import memory_bars
from ppctl.reports.charts.schedule_drawing import drawing_of_timeline
from ppctl.reports.terminal_output import OutputConsole, show_lines, show_table, size_text
from ppctl.schedule.simulator import Timeline
from ppctl.training.pipeline.engines.engine_memory import PARTS

MOST_RANKS = 16  # of the table on the terminal
COLUMNS = ("rank", "ran as", "tasks s", "update s", "forward s", "backward s", "memory")
PART_COLUMN = "part s"  # before the memory, where ranks have parts of a vocabulary


def show_rehearsal(found: Rehearsal, config: Config) -> None:
    """Print a rehearsal for people."""
    console = OutputConsole()
    show_lines(console, *(f"{name:<10}{text}" for name, text in _lines(found, config)))
    ranks = _shown(found.ranks)
    title = "ranks, with seconds of a step, and of a microbatch through each stage"
    title += "" if len(ranks) == len(found.ranks) else f" ({len(ranks)} of {len(found.ranks)})"
    show_table(console, title, _columns(found), [_row(each) for each in ranks])


def rehearsal_page(found: Rehearsal, timeline: Timeline, config: Config) -> str:
    """Return the text of the page."""
    about = [[kit.text(name), kit.text(words)] for name, words in _lines(found, config)]
    rows = [[*map(kit.text, _row(each))] for each in found.ranks]
    title = "seconds of a step, and of a microbatch through each stage"
    sums = [(f"rank {each.rank}", each.memory_bytes) for each in _shown(found.ranks, MOST_BARS)]
    if (reason := too_many_tasks(len(timeline.start_s))) is not None:
        chart = f"<p>{reason}</p>"
    else:
        chart = charts_html([drawing_of_timeline(found.schedule, timeline)])
    return kit.page(
        f"Rehearsal: {request_title(config)}, {found.schedule}",
        kit.table("the step", [], about, "request"),
        kit.section("Ranks", kit.table(title, _columns(found), rows)),
        kit.section("Memory of one device", memory_bars(sums, PARTS, found.limit_bytes, ABOUT)),
        kit.section("The step, simulated from the ranks' times", chart),
    )


def _lines(found: Rehearsal, config: Config) -> Iterator[tuple[str, str]]:
    mesh, number = config.mesh, len({each.ran_as for each in found.ranks})
    yield "mesh", f"{mesh.axes_text}, links as of hardware={found.hardware}"
    ran = f"{number} of {len(found.ranks)} ranks on one {found.device}"
    yield "ran here", f"{ran}; the others are like these"
    microbatches = f"{config.schedule.num_microbatches} microbatches"
    yield "schedule", f"{found.schedule}, {microbatches}, {config.executor.name}"
    yield "step", _step_text(found)
    if mesh.tp * mesh.cp > 1:
        sent = "sends between devices that divide a stage; one ran here"
        yield "tp, cp", f"{found.sent_s:.3g} s of the step, counted: {sent}"
    if (counted_s := found.analytic_step_time_s) is None:
        yield "analytic", f"not known: {found.analytic_unknown}"
    else:
        ratio = f"rehearsed over it {found.step_time_s / counted_s:.2f}"
        yield "analytic", f"{counted_s:.4g} s by costs=analytic; {ratio}"
    worst = max(found.ranks, key=lambda each: each.total_bytes)
    limit = "" if found.limit_bytes is None else f" of {size_text(found.limit_bytes)}"
    yield "memory", f"{size_text(worst.total_bytes)}{limit} on rank {worst.rank}, which needs most"


def _step_text(found: Rehearsal) -> str:
    cpu = "" if found.step_cpu_s is None else f", {found.step_cpu_s:.4g} CPU seconds"
    overhead = overhead_text(found.per_step_overhead_s, found.step_time_s)
    return f"{speed_text(found)}, bubble {found.bubble_fraction:.1%}{cpu}; {overhead}"


def _shown(ranks: tuple[RehearsedRank, ...], most: int = MOST_RANKS) -> tuple[RehearsedRank, ...]:
    """Return the ranks to show: all up to `most`, else those that ran, the fullest, the last."""
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
