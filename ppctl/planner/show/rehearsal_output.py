"""The printed form of `ppctl rehearse`: lines and a table of the ranks."""

from collections.abc import Iterator

from ppctl.planner.rehearsal.rehearse_ranks import Rehearsal, RehearsedRank
from ppctl.planner.show.plan_terminal import TextTable, overhead_text, speed_text
from ppctl.reports.terminal_output import OutputConsole, show_lines, show_table, size_text

MOST_RANKS = 16  # of the table on the terminal
COLUMNS = ("rank", "ran as", "tasks s", "update s", "forward s", "backward s", "memory")


def show_rehearsal(found: Rehearsal) -> None:
    """Print a rehearsal for people."""
    console = OutputConsole()
    show_lines(console, *(f"{name:<10}{text}" for name, text in rehearsal_lines(found)))
    show_table(console, *rank_table(found, MOST_RANKS))


def rehearsal_lines(found: Rehearsal) -> Iterator[tuple[str, str]]:
    request, number = found.request, len({each.ran_as for each in found.ranks})
    yield "mesh", f"{request.axes}, links as of hardware={found.hardware}"
    ran = f"{number} of {len(found.ranks)} ranks on one {found.device}"
    yield "ran here", f"{ran}; the others are like these"
    microbatches = f"{request.num_microbatches} microbatches"
    yield "schedule", f"{found.schedule}, {microbatches}, {request.executor}"
    cpu = "" if found.step_cpu_s is None else f", {found.step_cpu_s:.4g} CPU seconds"
    overhead = overhead_text(found.per_step_overhead_s, found.step_time_s)
    yield "step", f"{speed_text(found)}, bubble {found.bubble_fraction:.1%}{cpu}; {overhead}"
    if request.stage_axes:
        sent = "sends between devices that divide a stage; one ran here"
        yield ", ".join(request.stage_axes), f"{found.sent_s:.3g} s of the step, counted: {sent}"
    counted_s = found.analytic_step_time_s
    ratio = f"rehearsed over it {found.step_time_s / counted_s:.2f}"
    yield "analytic", f"{counted_s:.4g} s as `ppctl plan` counts; {ratio}"
    worst = max(found.ranks, key=lambda each: each.total_bytes)
    limit = "" if found.limit_bytes is None else f" of {size_text(found.limit_bytes)}"
    yield "memory", f"{size_text(worst.total_bytes)}{limit} on rank {worst.rank}, which needs most"


def ranks_to_show(found: Rehearsal, most: int) -> tuple[RehearsedRank, ...]:
    """Return the ranks to show: all up to `most`, else those that ran, the fullest, the last."""
    ranks = found.ranks
    if len(ranks) <= most:
        return ranks
    fullest = max(ranks, key=lambda each: each.total_bytes)
    return tuple(each for each in ranks if each.ran_as == each.rank or each in (fullest, ranks[-1]))


def rank_table(found: Rehearsal, most: int) -> TextTable:
    """Return a table of up to `most` ranks."""
    ranks = ranks_to_show(found, most)
    title = "ranks, with seconds of a step, and of a microbatch through each stage"
    title += "" if len(ranks) == len(found.ranks) else f" ({len(ranks)} of {len(found.ranks)})"
    return TextTable(title, COLUMNS, [*map(_row, ranks)])


def _row(of_rank: RehearsedRank) -> list[str]:
    seconds = lambda values: " ".join(f"{value:.3g}" for value in values)  # noqa: E731
    return [
        str(of_rank.rank),
        str(of_rank.ran_as),
        f"{of_rank.tasks_s:.4g}",
        f"{of_rank.update_s:.4g}",
        seconds(of_rank.forward_s),
        seconds(of_rank.backward_s),
        size_text(of_rank.total_bytes),
    ]
