"""`ppctl schedule`: draw, list, compare and check schedules from assumed costs; starts no JAX.

This file parses and composes the requests. `ppctl.cli.subcommands.schedule_show` and
`schedule_curves` simulate and draw them.
"""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ppctl.cli.choices import did_you_mean, options, schema_of, settings_of
from ppctl.cli.command_options import Parser
from ppctl.cli.subcommands import schedule_curves, schedule_show
from ppctl.config import ScheduleConfig
from ppctl.config.changed_settings import value_text
from ppctl.config.schedule_from_config import read_valid, settings_of_family
from ppctl.errors import ConfigError
from ppctl.schedule.families.registry import FAMILIES

SUBCOMMANDS = {
    "show": "one schedule: chart, bubble and memory of each rank",
    "list": "every family at one size, with its makespan, bubble and memory vs. the lower bound",
    "compare": "several schedules or files in one table; html and figures: charts on one time axis",
    "curves": "bubble, speedup and memory over ranks and microbatches, as tables or figures",
    "check": "check the schedule in a CSV file: exit code 0, or 1 and the place of the fault",
}
USAGE = """\
show    [FILE.csv] [GROUP=OPTION ...] [SETTING=VALUE ...]
       ppctl schedule list    [GROUP=OPTION ...] [SETTING=VALUE ...]
       ppctl schedule compare NAME[:KNOB=VALUE,...]|FILE.csv ... [GROUP=OPTION ...]
                              [SETTING=VALUE ...]
       ppctl schedule curves  [GROUP=OPTION ...] [SETTING=VALUE ...] [--ranks P] [--microbatches M]
       ppctl schedule check   FILE.csv"""
NOTES = "\n".join(
    [
        *(f"  {name:8} {about}" for name, about in SUBCOMMANDS.items()),
        "\nGroups: mesh, schedule, costs, recipes. Only these parts of a recipe are read.",
        "`ppctl schedule list` shows every schedule, `ppctl train --help schedule costs --all` the "
        "settings.",
    ]
)
FORMAT = (
    "text (default), html, svg, pdf, png, json or csv; list: all but html; curves: text, svg, pdf, "
    "png, json"
)
OF_CURVES = ("ranks", "microbatches", "kept_mb")  # options of `curves` only
MOST_SIZES = 1024  # largest number of ranks or microbatches in `curves`


class _Words(NamedTuple):
    """The parsed command line of a subcommand. names: schedules or files. out: file of --out."""

    args: argparse.Namespace
    names: list[str]
    overrides: list[str]
    out: Path | None


def parser() -> Parser:
    """Return the parser for the options of `ppctl schedule`."""
    options = Parser("schedule", USAGE, notes=NOTES)
    add = options.add_argument
    add("--format", metavar="F", help=FORMAT)
    about = "curves: sizes as in 2,4,8-12 (default 2,4,8,16)"
    add("--ranks", metavar="P", help=about)
    about = "curves: sizes likewise (default 1,2,4,8,16,32,64)"
    add("--microbatches", metavar="M", help=about)
    about = (
        "curves: MB of activations that a rank keeps for a microbatch, to show memory in MB; "
        "several, as in 30,10 (all of them, or only the stage's input), are drawn together"
    )
    add("--kept-mb", metavar="MB", help=about)
    about = "write to FILE instead of stdout; without --format, its ending chooses the format"
    add("--out", metavar="FILE", help=about)
    about = "look for recipes in DIR too (DIR/recipes/x.yaml is recipes=x)"
    add("-cd", "--config-dir", metavar="DIR", help=about)
    return options


def serve(args: argparse.Namespace) -> int:
    """Run the requested subcommand; return the exit code."""
    if args == parser().read([]):  # neither words nor options
        parser().print_help()
        return 0
    subcommand, *rest = args.words or [""]
    if subcommand not in SUBCOMMANDS:
        what = f"{subcommand} is not a subcommand of `ppctl schedule`"
        hint = did_you_mean(subcommand, SUBCOMMANDS) if subcommand else ""
        what = what if subcommand else "`ppctl schedule` needs a subcommand"
        raise ConfigError(f"{what}.{hint} ({', '.join(SUBCOMMANDS)})")
    overrides = [word for word in rest if re.match(r"[^:=]+=|=", word)]
    names = [word for word in rest if word not in overrides]
    for option in OF_CURVES:
        if getattr(args, option) is not None and subcommand != "curves":
            shown = f"--{option.replace('_', '-')}"
            raise ConfigError(f"{shown} only goes with `ppctl schedule curves`.")
    if names and subcommand in ("list", "curves"):
        hint = f" Use schedule={names[0]}." * (subcommand == "curves")
        raise ConfigError(f"{names[0]} is not KEY=VALUE.{hint}")
    out = None if args.out is None else Path(args.out)
    return _SERVE[subcommand](_Words(args, names, overrides, out))


def _show(words: _Words) -> int:
    form, overrides = _format(words, schedule_show.FORMATS), words.overrides
    if words.names:
        overrides = [*_csv(_one_file("show", words.names)), *overrides]
    drawing = schedule_show.draw(_compose(words.args, overrides))
    return schedule_show.show_drawing(drawing, form, words.out)


def _list(words: _Words) -> int:
    config = _compose(words.args, words.overrides)
    given = {word.partition("=")[0] for word in words.overrides}
    form = _format(words, schedule_show.LIST_FORMATS)
    return schedule_show.list_families(config, _families(config, given), form, words.out)


def _compare(words: _Words) -> int:
    # 1. the words
    args, names, overrides, out = words
    if not names:
        example = "ppctl schedule compare gpipe 1f1b interleaved"
        raise ConfigError(f"Name the schedules to compare, for example: {example}")
    form = _format(words, schedule_show.FORMATS)
    for word in overrides:
        if word.startswith("schedule="):
            use = f"`ppctl schedule compare` takes only the name: {word.partition('=')[2]}"
            raise ConfigError(f"{word}: {use}")
    # 2. the settings that each schedule has
    files = [name for name in names if name.endswith(".csv") and not name.startswith("csv:")]
    knobs_of = {name: _knobs("csv" if name in files else name.partition(":")[0]) for name in names}

    def has(knobs: set[str] | None, override: str) -> bool:
        key = override.partition("=")[0]
        return not key.startswith("schedule.") or knobs is None or key in knobs

    for word in overrides:
        if not any(has(knobs, word) for knobs in knobs_of.values()):
            raise ConfigError(f"{word}: none of {', '.join(names)} has such a setting.")
    # 3. a request for each schedule
    if files:
        num_ranks, number = _size_of_files(files)
        overrides = [f"mesh=1x{num_ranks}", f"schedule.num_microbatches={number}", *overrides]
    requests: list[ScheduleConfig] = []
    for name, knobs in knobs_of.items():
        family, _, values = name.partition(":")
        shared = [word for word in overrides if has(knobs, word)]
        extra = [f"schedule.{value}" for value in values.split(",") if value]
        chosen = _csv(Path(name)) if name in files else [f"schedule={family}"]
        requests.append(_compose(args, [*chosen, *shared, *extra]))
    return schedule_show.show_comparison(requests, form, out)


def _size_of_files(names: Sequence[str]) -> tuple[int, int]:
    """Return (num_ranks, num_microbatches) of schedule files. ConfigError if the files differ."""
    schedules = {name: read_valid(Path(name)) for name in names}
    sizes = {name: (one.num_ranks, one.num_microbatches) for name, one in schedules.items()}
    if len({*sizes.values()}) > 1:
        each = [f"{name} has {p} ranks and {m} microbatches" for name, (p, m) in sizes.items()]
        raise ConfigError(f"{', '.join(each)}: only schedules of one size are compared.")
    return sizes[names[0]]


def _curves(words: _Words) -> int:
    # 1. the words
    args = words.args
    axes = {"mesh": "ranks", "mesh.pp": "ranks", "schedule.num_microbatches": "microbatches"}
    for key, option in axes.items():
        if any(word.startswith(f"{key}=") for word in words.overrides):
            use = f"`ppctl schedule curves` takes several sizes. Use --{option}."
            raise ConfigError(f"{key}: {use}")
    # 2. the grid of sizes
    form = _format(words, schedule_curves.FORMATS)
    ranks = _sizes("--ranks", args.ranks or "2,4,8,16")
    microbatches = _sizes("--microbatches", args.microbatches or "1,2,4,8,16,32,64")
    kept_mb = [] if args.kept_mb is None else _positive("--kept-mb", args.kept_mb)
    config = _compose(args, words.overrides)
    grid = schedule_curves.curve_grid(config, ranks, microbatches, kept_mb)
    return schedule_curves.show_curves(grid, form, words.out)


def _sizes(option: str, text: str) -> list[int]:
    """Return the sorted numbers in a list of numbers and ranges.

    >>> _sizes("--ranks", "8,2-4")
    [2, 3, 4, 8]
    """
    found: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if not 1 <= first <= last <= MOST_SIZES:
            use = f"write numbers and ranges from 1 to {MOST_SIZES}, as in 2,4,8-12"
            raise ConfigError(f"{option} {text}: {use}.")
        found |= set(range(first, last + 1))
    return sorted(found)


def _positive(option: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < value < math.inf for value in found):  # written so that NaN fails
        raise ConfigError(f"{option} {text}: write numbers above 0, as in 30,10.")
    return found


def _check(words: _Words) -> int:
    if words.overrides or words.out or words.args.format or words.args.json:
        raise ConfigError("`ppctl schedule check` takes a file and nothing else.")
    return schedule_show.check_file(_one_file("check", words.names))


_SERVE = {"show": _show, "list": _list, "compare": _compare, "curves": _curves, "check": _check}


def _one_file(subcommand: str, names: Sequence[str]) -> Path:
    if len(names) != 1:
        what = f"`ppctl schedule {subcommand}` takes one file, not {len(names)}"
        raise ConfigError(f"{what}: FILE.csv")
    if not names[0].endswith(".csv"):
        hint = did_you_mean(names[0], options("schedule"), "schedule=")
        raise ConfigError(f"{names[0]} is neither KEY=VALUE nor a FILE.csv.{hint}")
    return Path(names[0])


def _csv(path: Path) -> list[str]:
    return ["schedule=csv", f"schedule.path={value_text(str(path))}"]


def _compose(args: argparse.Namespace, overrides: list[str]) -> ScheduleConfig:
    from ppctl.cli.compose import compose_drawing

    return compose_drawing(overrides, args.config_dir)


def _knobs(family: str) -> set[str] | None:
    """Return the keys (schedule.NAME) of a shipped schedule's settings; None for other names."""
    if family not in options("schedule"):
        return None
    return set(settings_of("schedule", schema_of("schedule", family)))


def _families(request: ScheduleConfig, given: set[str]) -> list[ScheduleConfig]:
    """Return a request for each family, with the settings in `given` that the family has."""
    requests: list[ScheduleConfig] = []
    for family in FAMILIES:
        cls = settings_of_family(family)
        same = {"schedule.num_microbatches"} | (given & set(settings_of("schedule", cls)))
        names = [key.partition(".")[2] for key in same]
        schedule = cls(name=family, **{name: getattr(request.schedule, name) for name in names})
        requests.append(request._replace(schedule=schedule))
    return requests


def _format(words: _Words, known: Sequence[str]) -> str:
    """Return the output format: --format or --json, else the ending of --out, else text."""
    args, out = words.args, words.out
    if args.json and args.format not in (None, "json"):
        raise ConfigError(f"--json and --format {args.format} exclude each other.")
    ending = "text" if out is None else out.suffix[1:]
    form = "json" if args.json else args.format or ending
    forms = [each for each in known if out is None or each != "text"]  # text is for stdout
    if form not in forms:
        option = f"--out {out}" if form == ending and out is not None else f"--format {form}"
        hint = did_you_mean(form, forms)
        raise ConfigError(f"{option} is not one of {', '.join(forms)}.{hint}")
    if form in ("pdf", "png") and out is None:
        raise ConfigError(f"--format {form} is not text. Add --out FILE.{form}.")
    return form
