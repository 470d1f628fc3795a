"""The result of `ppctl tune`, printed and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ppctl import config as settings
from ppctl.config import Config, Explicit
from ppctl.config.schedule_from_config import label
from ppctl.planner.cost.target_devices import DeviceLimit
from ppctl.planner.search.job_script import Hosts
from ppctl.planner.search.layout_candidate import Candidate
from ppctl.planner.search.layout_search import Found
from ppctl.planner.search.token_budget import TokenBudget
from ppctl.planner.search.tuned_recipe import command_of
from ppctl.reports.terminal_output import (
    OutputConsole,
    show_json,
    show_lines,
    show_table,
    size_text,
)
from ppctl.schedule.mesh_axes import mesh_text
from ppctl.schedule.partition.partition import LETTERS, layout_text
from ppctl.training.pipeline.mfu import mfu


@dataclass(frozen=True)
class Tuned:
    """The layouts found, with the request's devices, data and limits."""

    found: Found
    measured_s: tuple[float, ...]  # of the first of `found.best`, which were run
    search_s: float
    devices: str
    limit: DeviceLimit | None  # the memory of a device
    batch_tokens: int | None  # of a step; None if the data are not text
    step_flops: float  # of the model, nothing recomputed
    peak_flops: float | None  # of all devices
    recipe: str | None = None  # the file
    token_budget: TokenBudget | None = None  # of plan.tokens, with the first layout
    hosts: Hosts | None = None  # of tune.launch
    job_script: str | None = None  # the file
    job_command: str | None = None  # that starts it


def show_tuned(tuned: Tuned, configs: Sequence[Config], *, as_json: bool) -> None:
    """Print the layouts, best first; `configs` are their requests."""
    if as_json:
        show_json(_document(tuned, configs))
        return
    console = OutputConsole()
    show_lines(console, *_before(tuned))
    if not configs:
        return
    rows = [_cells(tuned, i, config) for i, config in enumerate(configs)]
    title = "the fastest, as counted for the hardware"
    show_table(console, title, list(rows[0]), [list(row.values()) for row in rows])
    if any(isinstance(config.partition, Explicit) for config in configs):
        print(f"stages as partition.layers takes them: {LETTERS}")
    show_lines(console, *_after(tuned))


def _before(tuned: Tuned) -> Iterator[str]:
    """Yield the lines above the table: the number of layouts, and the smallest where none fits."""
    found, limit = tuned.found, tuned.limit
    limit_text = "" if limit is None else f" of {size_text(limit.size_bytes)} each ({limit.source})"
    yield (
        f"{found.num_layouts:,} layouts for {tuned.devices}{limit_text}: {found.num_too_large:,} "
        f"too large, {found.num_simulated:,} simulated in {tuned.search_s:.1f} s"
    )
    if not found.best:
        least = ""
        if found.smallest is not None:
            least = f": the smallest needs {size_text(found.smallest.total_bytes)} a device"
        yield f"none fits{least}. Use more devices (tune.devices), or a smaller model."


def _after(tuned: Tuned) -> Iterator[str]:
    """Yield the lines below the table."""
    yield _about_pipelines(tuned)
    if tuned.token_budget is not None:
        yield f"tokens, with the first: {tuned.token_budget.text}."
    if tuned.recipe is not None:
        yield f"the first is a recipe now, {tuned.recipe}: {command_of(Path(tuned.recipe))}"
    if tuned.job_script is not None:
        yield f"its job script is {tuned.job_script}: {tuned.job_command}"


def _cells(tuned: Tuned, i: int, config: Config) -> dict[str, str]:
    """Return the cells of a layout by their columns."""
    # 1. the layout
    candidate = tuned.found.best[i]
    time, is_alone = candidate.time, candidate.mesh.pp == 1
    is_explicit = isinstance(config.partition, Explicit)
    cells = {
        "": str(i + 1),
        "mesh": config.mesh.text,
        "schedule": "none" if is_alone else _schedule_text(config),
        "microbatches": str(candidate.num_microbatches),
        "remat": candidate.remat,
        "stages": layout_text(candidate.partition) if is_explicit else "even",
        "step s": f"{time.total_s:.4g}",
    }

    # 2. speeds, measured if any were
    measured_s = tuned.measured_s[i] if i < len(tuned.measured_s) else None
    s = measured_s if tuned.measured_s else time.total_s
    if tuned.measured_s:
        cells["measured s"] = "" if s is None else f"{s:.4g}"
    if tuned.batch_tokens is not None:
        cells["tok/s"] = "" if s is None else f"{tuned.batch_tokens / s:,.0f}"
    if tuned.peak_flops is not None:
        fraction = mfu(tuned.step_flops, s, tuned.peak_flops)
        cells["MFU"] = "" if fraction is None else f"{fraction:.1%}"

    # 3. overheads and memory
    bubbles = {"bubble ideal": candidate.ideal_bubble, "bubble predicted": candidate.bubble}
    for name, bubble in bubbles.items():
        cells[name] = "" if is_alone or bubble is None else f"{bubble:.1%}"
    return cells | {
        "recomputed": f"{candidate.recomputed_fraction:.1%}",
        "per-step overhead": f"{time.overhead_s / time.total_s:.1%}",
        "memory": size_text(candidate.total_bytes),
    }


def _schedule_text(config: Config) -> str:
    """Return the schedule, its knobs, and vocab if that is not the default."""
    vocab, text = config.schedule.vocab, label(config.schedule)
    return text if vocab == settings.Schedule().vocab else f"{text}, vocab={vocab}"


def _about_pipelines(tuned: Tuned) -> str:
    """Return a line: how the best layout compares with the best one that has no pipeline."""
    first, alone = tuned.found.best[0], tuned.found.without_pipeline
    if first.mesh.pp == 1:
        rival, slower = next((c for c in tuned.found.best if c.mesh.pp > 1), None), ""
        if rival is not None:
            slower = f"; the best pipeline takes {_times(tuned, rival):.2f} times as long"
        mesh = mesh_text(first.mesh.by_axis)
        return f"no pipeline is needed: mesh={mesh} (pp=1) is fastest{slower}."
    alone = next((c for c in tuned.found.best if c.mesh.pp == 1), alone)
    if alone is None:
        return "without a pipeline (mesh.pp=1) nothing fits."
    ratio = f"{_times(tuned, alone):.2f} times as long"
    mesh, number = mesh_text(alone.mesh.by_axis), alone.num_microbatches
    about = f"mesh={mesh}, {number} microbatches, remat={alone.remat}"
    return f"without a pipeline the best is {about}: {ratio}."


def _times(tuned: Tuned, other: Candidate) -> float:
    """Return another layout's time over the first one's; measured, where both were."""
    first = tuned.found.best[0]
    measured_s = dict(zip(tuned.found.best, tuned.measured_s, strict=False))
    if other in measured_s:
        return measured_s[other] / measured_s[first]
    return other.time.total_s / first.time.total_s


def _document(tuned: Tuned, configs: Sequence[Config]) -> dict[str, Any]:
    # 1. the layouts
    found, best = tuned.found, list[dict[str, Any]]()
    for candidate, config, measured_s in zip_longest(found.best, configs, tuned.measured_s):
        words = {"schedule": _schedule_text(config), "overrides": _overrides(config)}
        best.append(_plain(candidate) | words | {"measured_s": measured_s})
    alone, smallest = found.without_pipeline, found.smallest

    # 2. all else
    apart = ("found", "limit")
    size_bytes, source, fraction = (None, None, None) if tuned.limit is None else tuned.limit
    return {name: value for name, value in asdict(tuned).items() if name not in apart} | {
        "limit_bytes": size_bytes,
        "limit_source": source,
        "limit_fraction": fraction,
        "best": best,
        "without_pipeline": None if alone is None else _plain(alone),
        "num_layouts": found.num_layouts,
        "num_too_large": found.num_too_large,
        "num_simulated": found.num_simulated,
        "smallest_bytes": None if smallest is None else smallest.total_bytes,
    }


def _plain(candidate: Candidate) -> dict[str, Any]:
    apart = ("ideal_bubble", "bubble")
    found = {name: value for name, value in asdict(candidate).items() if name not in apart}
    return found | {
        "step_time_s": candidate.time.total_s,
        "ideal_bubble_fraction": candidate.ideal_bubble,
        "predicted_bubble_fraction": candidate.bubble,
        "total_bytes": candidate.total_bytes,
    }


def _overrides(config: Config) -> list[str]:
    """Return the overrides of `ppctl train` for this layout."""
    schedule, partition, knobs = config.schedule, config.partition, config.schedule.knobs()
    layout: dict[str, Any] = {"mesh": config.mesh.text, "schedule": schedule.name}
    layout["schedule.num_microbatches"] = schedule.num_microbatches
    if "num_chunks" in knobs:
        layout["schedule.num_chunks"] = knobs["num_chunks"]
    if schedule.vocab != settings.Schedule().vocab:
        layout["schedule.vocab"] = schedule.vocab
    layout["executor.remat"] = config.executor.remat
    if isinstance(partition, Explicit):
        layout["partition"] = partition.name
        layout["partition.layers"] = f"[{','.join(map(str, partition.layers))}]"
    return [f"{key}={value}" for key, value in layout.items()]
