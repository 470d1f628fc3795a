"""The best layouts for several numbers of devices in one table: tune.devices=[64,128,256]."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from ppctl.planner.search.tune_layouts import Tuned
from ppctl.planner.search.tuned_recipe import command_of
from ppctl.planner.show.tune_terminal import LEAST, cells_of, document
from ppctl.reports.terminal_output import OutputConsole, show_json, show_lines, show_table

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
        show_json({"chosen": chosen, "recipe": path, "numbers": numbers})
        return
    console = OutputConsole()
    fits = {number: tuned for number, tuned in found.items() if tuned.found.best}
    if fits:
        rows = [_row(number, tuned, fits) for number, tuned in fits.items()]
        title = "the fastest layout for each number of devices"
        show_table(console, title, [*rows[0]], [[*row.values()] for row in rows], LEAST)
    show_lines(console, *_lines(found, fits, chosen, days, recipe))


def _row(number: int, tuned: Tuned, fits: Numbers) -> dict[str, str]:
    """Return the cells of the best layout for a number of devices, by column.

    fits: the results with a layout that fits; the smallest number is the base of percentages.
    """
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
        yield (
            f"no number of devices trains plan.tokens{goal}. Use more devices."
            if fits
            else "Use more devices."
        )
        return
    why = f"are the fewest that train plan.tokens{goal}" if goal else "need the least device time"
    yield f"{chosen:,} devices {why}."
    if recipe is not None:
        yield f"their layout is a recipe now, {recipe}: {command_of(recipe)}"


def _step_s(tuned: Tuned) -> float:
    return tuned.found.best[0].step_s
