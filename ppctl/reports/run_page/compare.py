"""Several runs as one html page: what differs between them in a table, their losses and speeds drawn together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ppctl.reports.charts.elements import exact, section, table
from ppctl.reports.charts.html import whole
from ppctl.reports.charts.lines import key
from ppctl.reports.run_page.figures import SPEED_NAMES, of_several
from ppctl.reports.run_page.page import MARK, STYLES, link, loss_text, printable, steps_text, warnings
from ppctl.reports.run_page.read import SPEEDS, Run
from ppctl.reports.terminal import size_text

OWN = (
    "run.name",
    "run.dir",
    "run.resume",
    "run.distributed",
    "run.coordinator",
    "run.process_id",
)  # of every run, and no difference
NONE = "&ndash;"


def page(runs: Sequence[Run], file: Path) -> str:
    """The text of the page; `file`: where it will stand."""
    labels = [f"{number} {Path(run.standing.name).name}" for number, run in enumerate(runs, 1)]
    figures = of_several(runs, list(map(printable, labels)))
    sections = [
        section("Runs", _table(runs)),
        section("Over the steps", f'<div class="figures">{"".join(figures)}</div>') if figures else "",
        section("Where they are", _places(runs, file)),
        _warnings(runs),
    ]
    return whole(f"{len(runs)} runs", f"{MARK}\n{''.join(sections)}</main>\n", *STYLES)


def differences(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """Return each setting that is not the same in all runs that have it, or that someone set: its value in each run."""
    names = dict.fromkeys(word.split("=", 1)[0].lstrip("+") for run in runs for word in run.words)
    names |= dict.fromkeys(name for name in _names(runs[0].config) if all(name in _names(run.config) for run in runs))
    found = {name: [_value(run.config, name) for run in runs] for name in names if name not in OWN}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _names(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the settings and choices of a composed config, `mesh` as one."""
    for word, value in config.items():
        name = f"{prefix}{word}"
        if name == "mesh" or not isinstance(value, dict):
            yield name.removesuffix(".name") if name != "run.name" else name
        else:
            yield from _names(value, f"{name}.")


def _value(config: Mapping[str, Any], name: str) -> str | None:
    """A setting or a choice of a composed config; None where it has none of that name."""
    if name == "mesh":
        values = config.get(name)
        return "x".join(map(str, values.values())) if isinstance(values, dict) else None
    value: Any = config
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return str(value.get("name") if isinstance(value, dict) else value)


def _table(runs: Sequence[Run]) -> str:
    differ = differences(runs)
    columns = ["", *(_breakable(name) for name in differ), "status", "step", "loss"]
    has_eval, has_mfu = (
        any(run.standing.eval_loss is not None for run in runs),
        any(run.values("mfu_fraction") for run in runs),
    )
    speeds = [speed for speed in SPEEDS if any(run.speed == speed for run in runs)]
    columns += [
        *(["eval loss"] if has_eval else []),
        "s/step",
        *(SPEED_NAMES[speed] for speed in speeds),
        *(["MFU"] if has_mfu else []),
        "memory",
        "bubble",
        "measured",
    ]
    rows = []
    for index, run in enumerate(runs):
        said = run.standing
        numbers: list[tuple[float | None, Any]] = [
            *([(said.eval_loss, "{:.4f}".format)] if has_eval else []),
            (run.median("step_time_s"), "{:.4g}".format),
            *((run.median(speed), "{:,.0f}".format) for speed in speeds),
            *([(run.median("mfu_fraction"), "{:.1%}".format)] if has_mfu else []),
            (run.newest.get("memory_bytes"), lambda size: size_text(int(size))),
            (run.newest.get("predicted_bubble_fraction"), "{:.1%}".format),
            (run.measured_bubble, "{:.1%}".format),
        ]
        settings = [
            NONE if value is None else escape(printable(value)) for value in (each[index] for each in differ.values())
        ]
        cells = [NONE if value is None else exact(value, text(value)) for value, text in numbers]
        name = f"{key(index)}{index + 1} {escape(printable(said.name))}"
        rows.append([name, *settings, said.status, steps_text(run), loss_text(run), *cells])
    about = (
        "Seconds of a step and speed are medians. Memory: of the fullest device, as compiled. Bubble: predicted; "
        "measured: of a timeline (run.timeline=true)."
    )
    same = "" if differ else " No setting that anyone asked for differs."
    return f'<div class="jobs runs">{table("the runs", columns, rows)}</div><p class="soft">{about}{same}</p>'


def _places(runs: Sequence[Run], file: Path) -> str:
    rows = []
    for number, run in enumerate(runs, 1):
        own = run.standing.path / "report.html"
        told = link(run.standing.path, file) + (f", {link(own, file)}" if own.exists() else "")
        rows.append([f"{number} {escape(printable(run.standing.name))}", told])
    return f'<div class="stages">{table("directories", [], rows)}</div>'


def _warnings(runs: Sequence[Run]) -> str:
    told = [(run, each) for run in runs for each in warnings(run)]
    items = "".join(f"<li>{escape(printable(f'{run.standing.name}: {each}'))}</li>" for run, each in told)
    return section("To know", f'<ul class="warnings">{items}</ul>') if items else ""


def _breakable(name: str) -> str:
    return escape(printable(name)).replace(".", ".<wbr>").replace("_", "_<wbr>")
