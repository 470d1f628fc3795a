"""The results of `ppctl tune tune.groups=unequal`, printed and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ppctl.planner.search.tune_groups import PlannedGroups, TunedGroups
from ppctl.planner.search.tune_layouts import Tuned
from ppctl.planner.search.tuned_files import command_of
from ppctl.planner.show import tune_terminal
from ppctl.reports import terminal_output as terminal
from ppctl.schedule.mesh_axes import RANK_AXES, axes_text
from ppctl.schedule.partition.partition import layout_text


def show_groups(
    tuned: Tuned | None, found: TunedGroups, recipe: Path | None, *, as_json: bool
) -> None:
    """Print the best layouts of any schedule, then those of equal and unequal ranks.

    tuned: the layouts of equal ranks; None: chips differ. recipe: the file of the unequal layout.
    """
    if as_json:
        terminal.show_json(_document(tuned, found, recipe))
        return
    if tuned is not None:
        tune_terminal.show_tuned(tuned, as_json=False)
    console, rows = terminal.OutputConsole(), list[list[str]]()
    for name, each in (("equal", found.equal), ("unequal", found.unequal)):
        if each is not None:
            step = terminal.seconds_text(each.step_s, each.step_s)
            memory = terminal.size_text(max(each.plan.total_bytes))
            layout, request = each.layout, each.request
            how = str(layout.num_microbatches), str(layout.remat), layout_text(layout.layers)
            rows.append([name, request.mesh.text, *how, step, memory])
    if rows:
        columns = ["ranks", "mesh", "microbatches", "remat", "stages", "step", "memory"]
        title = f"schedule 1f1b on {found.devices}, searched in {found.search_s:.1f} s"
        terminal.show_table(console, title, columns, rows, ("microbatches",))
    if found.unequal is not None:
        title, columns = "stages of the unequal ranks", ["stage", "layers", "devices", "submesh"]
        columns += ["logical shape", "hardware"]
        terminal.show_table(console, title, columns, stage_rows(found.unequal), ())
    terminal.show_lines(console, *_lines(tuned, found, recipe))


def stage_rows(found: PlannedGroups) -> list[list[str]]:
    """Return a row for each stage: layers, devices, hosts x devices of a host, axes, hardware."""
    rows = []
    for number, stage in enumerate(found.layout.stages.stages):
        last = stage.first_device + stage.submesh.devices - 1
        chip, sizes, hosts = stage.submesh.label
        rows.append([
            str(number),
            _range(stage.first_layer, stage.end_layer - 1),
            _range(stage.first_device, last),
            f"{hosts}x{stage.submesh.devices // hosts}",
            axes_text(sizes.only(RANK_AXES).shown(RANK_AXES)),
            chip,
        ])  # fmt: skip
    return rows


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _lines(tuned: Tuned | None, found: TunedGroups, recipe: Path | None) -> Iterator[str]:
    equal, unequal = found.equal, found.unequal
    if found.ended_by is not None:
        yield f"the search for unequal ranks ended early ({found.ended_by})."
    if unequal is None:
        if found.ended_by is None:
            yield f"no layout of schedule 1f1b fits {found.devices}. Use more devices."
        return
    yield f"gain of unequal ranks: {gain_text(equal, unequal)}"
    best = None if tuned is None or not tuned.found.best else tuned.found.best[0]
    if best is not None:
        ratio = best.step_s / unequal.step_s
        faster = f"{ratio - 1:.1%} faster" if ratio >= 1 else f"{1 / ratio - 1:.1%} slower"
        yield f"with 1f1b the step is {faster} than the first of all schedules, above."
    idle = found.num_devices - unequal.layout.stages.num_devices
    if idle:
        first = found.num_devices - idle
        yield f"idle devices: {_range(first, found.num_devices - 1)}, the last {idle:,}."
    if recipe is not None:
        yield f"the unequal ranks are a recipe now, {recipe}: {command_of(recipe)}"


def gain_text(equal: PlannedGroups | None, unequal: PlannedGroups) -> str:
    """Return the gain of unequal ranks over equal ones with the same schedule, as a sentence."""
    if equal is None:
        return "equal ranks do not fit."
    if len({*unequal.layout.ranks}) == 1:
        return "none, equal ranks are the fastest."
    gain = equal.step_s / unequal.step_s - 1
    return f"{gain:.1%} over equal ranks of the same schedule."


def _document(tuned: Tuned | None, found: TunedGroups, recipe: Path | None) -> dict[str, Any]:
    plain = {name: value for name, value in vars(found).items() if name not in RANKS}
    each = {f"{name}_ranks": _plain(getattr(found, name)) for name in RANKS}
    document = None if tuned is None else tune_terminal.document(tuned)
    return plain | each | {"any_schedule": document, "recipe": recipe and str(recipe)}


RANKS = ("equal", "unequal")


def _plain(found: PlannedGroups | None) -> dict[str, Any] | None:
    if found is None:
        return None
    layout = found.layout
    return {
        "mesh": found.request.mesh.text,
        "ranks": [sizes.only(RANK_AXES).by_axis for sizes in layout.ranks],
        "hardware": layout.chips,
        "layers": layout.layers,
        "num_microbatches": layout.num_microbatches,
        "remat": str(layout.remat),
        "step_time_s": found.step_s,
        "estimated_s": layout.seconds,
        "total_bytes": found.plan.total_bytes,
        "time": None if found.plan.time is None else asdict(found.plan.time),
    }
