"""The results of `ppctl tune`, printed and as JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ppctl.planner.cost.request_text import sizes_text
from ppctl.planner.search.layout_candidate import Candidate
from ppctl.planner.search.tune_layouts import Row, Tuned
from ppctl.planner.search.tuned_files import command_of
from ppctl.reports import terminal_output as terminal
from ppctl.schedule.mesh_axes import mesh_text
from ppctl.schedule.partition.partition import LETTERS, layout_text
from ppctl.training.pipeline.mfu import mfu

# columns that make room in a narrow terminal, the first one first
LEAST = ("per-step overhead", "bubble ideal", "tok/s", "bubble predicted", "MFU", "microbatches")


def show_tuned(tuned: Tuned, *, as_json: bool) -> None:
    """Print the layouts, best first, as lines and a table or as JSON."""
    if as_json:
        terminal.show_json(document(tuned))
        return
    console, best = terminal.OutputConsole(), tuned.found.best
    terminal.show_lines(console, *_before(tuned))
    if not best:
        return
    longest_s = max(row.measured_s or row.step_s for row in best)
    rows = [cells_of(tuned, i, row, longest_s) for i, row in enumerate(best, start=1)]
    title = "the fastest layouts, as predicted for the hardware"
    terminal.show_table(console, title, [*rows[0]], [[*row.values()] for row in rows], LEAST)
    if not all(row.layout.is_even for row in best):
        print(f"stages as partition.layers takes them: {LETTERS}")
    terminal.show_lines(console, *_after(tuned))


def _before(tuned: Tuned) -> Iterator[str]:
    """Yield the lines above the table: the numbers of layouts, and a remedy if no layout fits."""
    found, limit = tuned.found, tuned.limit
    limit_text = (
        "" if limit is None else f" of {terminal.size_text(limit.size_bytes)} each ({limit.source})"
    )
    yield f"{tuned.model}, {sizes_text(tuned.dtype, tuned.batch_size, tuned.seq_len)}"
    yield (
        f"{found.num_layouts:,} layouts for {tuned.devices}{limit_text}: {found.num_too_large:,} "
        f"too large, {found.num_simulated:,} simulated in {tuned.search_s:.1f} s"
    )
    if found.that_divide is not None:
        batch, number = found.that_divide
        yield (
            f"no layout: {tuned.devices} cannot share a batch of {tuned.batch_size:,} evenly. Use "
            f"data.batch_size={batch} or tune.devices={number}."
        )
    elif found.ended_by is not None:
        what = "these are the best so far" if found.best else "nothing is predicted yet"
        yield f"the search ended early ({found.ended_by}): {what}."
    elif not found.best:
        least = ""
        if found.smallest_bytes is not None:
            least = f": each needs {terminal.size_text(found.smallest_bytes)} a device or more"
        yield f"no layout fits{least}. Use more devices (tune.devices), or a smaller model."


def _after(tuned: Tuned) -> Iterator[str]:
    yield _about_pipelines(tuned)
    if tuned.token_budget is not None:
        yield f"tokens, with the first: {tuned.token_budget.text}."
    if tuned.recipe is not None:
        yield f"the first is a recipe now, {tuned.recipe}: {command_of(Path(tuned.recipe))}"
    if tuned.job_script is not None:
        yield f"its job script is {tuned.job_script}: {tuned.job_command}"


def cells_of(tuned: Tuned, number: int, row: Row, longest_s: float) -> dict[str, str]:
    """Return the cells of the number-th layout, by column. longest_s: chooses the unit of time."""
    # 1. the layout
    layout, plan, is_alone = row.layout, row.plan, row.layout.mesh.pp == 1
    cells = {
        "": str(number),
        "mesh": mesh_text(layout.mesh.by_axis),
        "schedule": "none" if is_alone else _schedule_text(layout),
        "microbatches": str(layout.num_microbatches),
        "remat": layout.remat,
        "stages": "even" if layout.is_even else layout_text(layout.partition),
        "step": terminal.seconds_text(row.step_s, longest_s),
    }

    # 2. speeds, measured if any were
    are_measured = tuned.found.best[0].measured_s is not None
    s = row.measured_s if are_measured else row.step_s
    if are_measured:
        cells["measured"] = "" if s is None else terminal.seconds_text(s, longest_s)
    if tuned.batch_tokens is not None:
        cells["tok/s"] = "" if s is None else f"{tuned.batch_tokens / s:,.0f}"
    if tuned.peak_flops is not None and tuned.step_flops is not None:
        fraction = mfu(tuned.step_flops, s, tuned.peak_flops)
        cells["MFU"] = "" if fraction is None else f"{fraction:.1%}"

    # 3. overheads and memory
    bubbles = {"bubble ideal": plan.ideal_bubble, "bubble predicted": plan.bubble}
    for name, bubble in bubbles.items():
        cells[name] = "" if is_alone or bubble is None else f"{bubble:.1%}"
    overhead_s = plan.overhead_s or 0.0
    return cells | {
        "per-step overhead": f"{overhead_s / row.step_s:.1%}",
        "memory": terminal.size_text(row.total_bytes),
    }


def _schedule_text(layout: Candidate) -> str:
    """Return the name of the schedule, with the settings for stages a rank and vocabulary."""
    text = layout.family + "".join(f" ({name}={n})" for name, n in layout.knobs.items())
    return text if layout.vocab == "whole" else f"{text}, vocab={layout.vocab}"


def _about_pipelines(tuned: Tuned) -> str:
    """Return a line that compares the best layout with the best one without a pipeline."""
    first, *others = tuned.found.best
    if first.layout.mesh.pp == 1:
        return f"no pipeline is needed: mesh={mesh_text(first.layout.mesh.by_axis)} is fastest."
    alone = next((row for row in others if row.layout.mesh.pp == 1), tuned.found.without_pipeline)
    if alone is None:
        what = "nothing fits" if tuned.found.ended_by is None else "nothing was predicted yet"
        return f"without a pipeline (mesh.pp=1) {what}."
    layout, ratio = alone.layout, alone.step_s / first.step_s
    if first.measured_s is not None and alone.measured_s is not None:
        ratio = alone.measured_s / first.measured_s
    mesh, number = mesh_text(layout.mesh.by_axis), layout.num_microbatches
    about = f"mesh={mesh}, {number} microbatches, remat={layout.remat}"
    return f"without a pipeline the best is {about}: {ratio:.2f} times as long."


def document(tuned: Tuned) -> dict[str, Any]:
    """Return the JSON document that `--json` prints for a search."""
    found, limit = tuned.found, tuned.limit
    size_bytes, source, fraction = (None, None, None) if limit is None else limit
    alone, records = found.without_pipeline, ("token_budget", "hosts")
    plain = {name: value for name, value in vars(tuned).items() if name not in ("found", "limit")}
    return plain | {
        **{name: None if plain[name] is None else asdict(plain[name]) for name in records},
        "limit_bytes": size_bytes,
        "limit_source": source,
        "limit_fraction": fraction,
        **vars(found),
        "best": [_plain(row) for row in found.best],
        "without_pipeline": None if alone is None else _plain(alone),
    }


def _plain(row: Row) -> dict[str, Any]:
    hidden = ("layout", "least_bytes")
    layout = {name: value for name, value in vars(row.layout).items() if name not in hidden}
    return layout | {
        "mesh": row.layout.mesh.by_axis,
        "time": asdict(row.plan.time) if row.plan.time is not None else None,
        "memory": row.memory,
        "schedule": _schedule_text(row.layout),
        "overrides": overrides_of(row.layout),
        "step_time_s": row.step_s,
        "measured_s": row.measured_s,
        "ideal_bubble_fraction": row.plan.ideal_bubble,
        "predicted_bubble_fraction": row.plan.bubble,
        "total_bytes": row.total_bytes,
    }


def overrides_of(layout: Candidate) -> list[str]:
    """Return the overrides of `ppctl train` for a layout."""
    chosen = {"mesh": mesh_text(layout.mesh.by_axis), "schedule": layout.family}
    chosen["schedule.num_microbatches"] = str(layout.num_microbatches)
    chosen |= {f"schedule.{name}": str(number) for name, number in layout.knobs.items()}
    if layout.vocab != "whole":
        chosen["schedule.vocab"] = layout.vocab
    chosen["executor.remat"] = layout.remat
    if not layout.is_even:
        chosen["partition"] = "explicit"
        chosen["partition.layers"] = f"[{','.join(map(str, layout.partition))}]"
    return [f"{key}={value}" for key, value in chosen.items()]


# the best layouts for several numbers of devices in one table: tune.devices=[64,128,256]

Numbers = Mapping[int, Tuned]  # results by number of devices, ascending
NOT_SHOWN = ("", "bubble ideal", "per-step overhead")  # columns of `cells_of` left out


def chosen_number(found: Numbers, days: float | None) -> int | None:
    """Return the smallest number of devices that trains plan.tokens in `days`; None if none does.

    With days=None, return the number of devices with the fewest device-seconds a step.
    """
    fits = {number: tuned for number, tuned in found.items() if tuned.found.best}
    if days is not None:
        budgets = {number: tuned.token_budget for number, tuned in fits.items()}
        return next((n for n, budget in budgets.items() if budget and budget.days <= days), None)
    return min(fits, key=lambda number: number * _step_s(fits[number]), default=None)


def show_numbers(
    found: Numbers, chosen: int | None, days: float | None, recipe: Path | None, *, as_json: bool
) -> None:
    """Print the best layout for each number of devices. recipe: file of the chosen layout."""
    recipe = None if chosen is None else recipe
    if as_json:
        numbers = [{"num_devices": n, **document(tuned)} for n, tuned in found.items()]
        path = None if recipe is None else str(recipe)
        terminal.show_json({"chosen": chosen, "recipe": path, "numbers": numbers})
        return
    console = terminal.OutputConsole()
    fits = {number: tuned for number, tuned in found.items() if tuned.found.best}
    if fits:
        rows = [_row(number, tuned, fits) for number, tuned in fits.items()]
        title = "the fastest layout for each number of devices"
        terminal.show_table(console, title, [*rows[0]], [[*row.values()] for row in rows], LEAST)
    terminal.show_lines(console, *_lines(found, fits, chosen, days, recipe))


def _row(number: int, tuned: Tuned, fits: Numbers) -> dict[str, str]:
    """Return the cells of a number's best layout, by column; 100% is the smallest number."""
    fewest = min(fits)
    per_device = fewest * _step_s(fits[fewest]) / (number * _step_s(tuned))
    cells = cells_of(tuned, number, tuned.found.best[0], _step_s(fits[fewest]))
    cells = {name: cell for name, cell in cells.items() if name not in NOT_SHOWN}
    row = {"devices": f"{number:,}", **cells, f"each, of {fewest:,}": f"{per_device:.1%}"}
    if (budget := tuned.token_budget) is not None:
        hours = f"{budget.devices}-hours"
        row |= {"days": f"{budget.days:,.1f}", hours: f"{budget.device_hours:,.0f}"}
    return row


def _lines(
    found: Numbers, fits: Numbers, chosen: int | None, days: float | None, recipe: Path | None
) -> Iterator[str]:
    """Yield the lines below the table: the numbers without a layout, and the choice."""
    if lacking := [f"{number:,}" for number in found if number not in fits]:
        yield f"no layout fits on {', '.join(lacking)} devices."
    goal = "" if days is None else f" in {days:g} days"
    if chosen is None:
        why = f"no number of devices trains plan.tokens{goal}. " if fits else ""
        yield f"{why}Use more devices."
        return
    why = f"are the fewest that train plan.tokens{goal}" if goal else "need the least device time"
    yield f"{chosen:,} devices {why}."
    if recipe is not None:
        yield f"their layout is a recipe now, {recipe}: {command_of(recipe)}"


def _step_s(tuned: Tuned) -> float:
    return tuned.found.best[0].step_s
