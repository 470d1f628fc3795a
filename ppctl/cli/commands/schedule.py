"""`ppctl schedule`: draw, list, compare, certify and check schedules from costs alone; starts no JAX.

Words in, requests composed, handed to `ppctl.cli.commands.schedule_show` and `schedule_curves`.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ppctl.cli.choices import DRAWN, did_you_mean, options, schema_of, settings_of
from ppctl.cli.commands import COMMANDS
from ppctl.cli.help import setting_table
from ppctl.cli.options import Parser
from ppctl.config import Costs, Csv, ScheduleConfig
from ppctl.errors import ConfigError
from ppctl.reports.model_costs import costs_from

SUBCOMMANDS = {
    "show": "one schedule: chart, bubble and memory of each rank",
    "list": "every family at one size, with its makespan, bubble and memory vs. the lower bound",
    "compare": "several schedules, or files of them, in one table; their charts on one time axis in html and figures",
    "curves": "bubble, speedup and memory over ranks and microbatches, as tables or figures",
    "certify": "how short any order of a small schedule's tasks can be, proven by CP-SAT (ppctl[certify])",
    "check": "whether a CSV file holds a valid schedule: exit code 0, or 1 and where the fault is",
}
EXAMPLES = (
    "ppctl schedule show mesh=1x4",
    "ppctl schedule show schedule=1f1b mesh=1x8 schedule.num_microbatches=32 --out 1f1b.html",
    "ppctl schedule list mesh=1x8 schedule.num_microbatches=32 costs.transfer_s=0.1",
    "ppctl schedule compare gpipe 1f1b interleaved:num_chunks=4 mesh=1x8 schedule.num_microbatches=32",
    "ppctl schedule compare 1f1b zb_h1 zb_v mesh=1x4 --out panels.pdf",
    "ppctl schedule curves schedule=1f1b --ranks 2,4,8,16 --microbatches 1-64 --out curves.svg",
    "ppctl schedule show schedule=gpipe mesh=1x4 --format csv --out gpipe.csv",
    "ppctl schedule show schedule=eager_1f1b mesh=1x4 --format tasks",
    "ppctl schedule check gpipe.csv",
    "ppctl schedule show schedule=auto schedule.max_activations=3 mesh=1x4",
    "ppctl schedule compare 1f1b zb_h1 mesh=1x4 --costs-from plan.json",
)
USAGE = """\
Usage: ppctl schedule show    [FILE.csv] [GROUP=OPTION ...] [SETTING=VALUE ...] [--format F] [--out FILE]
       ppctl schedule list    [GROUP=OPTION ...] [SETTING=VALUE ...] [--format F] [--out FILE]
       ppctl schedule compare NAME[:KNOB=VALUE,...]|FILE.csv ... [GROUP=OPTION ...] [SETTING=VALUE ...]
                              [--format F] [--out FILE]
       ppctl schedule curves  [GROUP=OPTION ...] [SETTING=VALUE ...] [--ranks P] [--microbatches M] [--over AXIS]
                              [--kept-mb MB] [--format F] [--out FILE]
       ppctl schedule certify [GROUP=OPTION ...] [SETTING=VALUE ...] [--seconds S] [--format F] [--out FILE]
       ppctl schedule check   FILE.csv"""
FLAGS = """\
  --format F        text (default), html, svg, pdf, png, json, csv, perfetto or tasks: each rank's list in JaxPP's
                    words (fwd_2__0, bwd_2__0; bwd_i, bwd_w where the backward is split; on the last stage a forward
                    and its own backward right after it are a FusedTask). compare: all but perfetto and tasks; list:
                    nor html; curves: text, svg, pdf, png, json; certify: text, json
  --json            the same as --format json
  --ranks P         curves: sizes as in 2,4,8-12 (default 2,4,8,16)
  --microbatches M  curves: sizes likewise (default 1,2,4,8,16,32,64)
  --over AXIS       curves: ranks or microbatches along the x axis (default: whichever has more sizes)
  --costs-from X    show, list, compare, certify: costs of a model, from a file of `ppctl plan --json` or from the
                    directory of a run with run.timeline=true; costs.SETTING=VALUE still counts
  --kept-mb MB      curves: MB that a rank keeps of a microbatch, for memory in MB instead of activations; several, as
                    in 30,10 (all of it, or the stage's input alone), are drawn together
  --seconds S       how long certify may search (default 60)
  --out FILE        write to FILE instead of stdout; its ending chooses the format if --format does not
  --config-dir DIR  look for groups (DIR/costs/x.yaml is costs=x) and recipes in DIR too
  -h, --help        this text"""

OWNED = {"seconds": ("certify",), "costs_from": ("show", "list", "compare", "certify")}
OWNED |= dict.fromkeys(("ranks", "microbatches", "over", "kept_mb"), ("curves",))
MOST_SIZES = 1024  # of an axis of curves


def serve(words: list[str]) -> int:
    """Do what the words say; return the exit code."""
    args = _parse(words)
    if args.help or not words:
        print(schedule_help())
        return 0
    if not args.words or args.words[0] not in SUBCOMMANDS:
        what = f"{args.words[0]} is not something that `ppctl schedule` does" if args.words else "Say what to do"
        hint = did_you_mean(args.words[0], SUBCOMMANDS) if args.words else ""
        raise ConfigError(f"{what}.{hint} ({', '.join(SUBCOMMANDS)})")
    subcommand, *rest = args.words
    overrides = [word for word in rest if re.match(r"[^:=]+=|=", word)]
    names = [word for word in rest if word not in overrides]
    for option, owners in OWNED.items():
        if getattr(args, option) is not None and subcommand not in owners:
            raise ConfigError(f"--{option.replace('_', '-')} only goes with `ppctl schedule {'|'.join(owners)}`.")
    out = None if args.out is None else Path(args.out)
    if args.found is not None:
        print(f"costs {args.found.source}, equal stages", file=sys.stderr)
    return _SERVE[subcommand](args, names, overrides, out)


def _show(args: argparse.Namespace, names: list[str], overrides: list[str], out: Path | None) -> int:
    from ppctl.cli.commands import schedule_show
    from ppctl.config.schedule_from_config import read_valid

    form = _format(args, schedule_show.SHOW_FORMATS, out)
    if not names:
        return schedule_show.show(_compose(args, overrides), form, out)
    path = _one_file("show", names)
    bad = next((word for word in overrides if not word.startswith("costs")), None)
    if bad:
        raise ConfigError(f"{bad}: {path} says what the schedule is. Only costs can be set with a file.")
    schedule = read_valid(path)
    costs = _compose(args, [f"mesh=1x{schedule.num_ranks}", *overrides]).costs
    return schedule_show.show_drawing(schedule_show.drawing_of(schedule, costs, path.name), form, out)


def _list(args: argparse.Namespace, names: list[str], overrides: list[str], out: Path | None) -> int:
    from ppctl.cli.commands import schedule_show

    if names:
        raise ConfigError(f"{names[0]} is not KEY=VALUE. `ppctl schedule list` lists every family.")
    config = _compose(args, overrides)
    given = {word.partition("=")[0] for word in overrides}
    form = _format(args, schedule_show.LIST_FORMATS, out)
    return schedule_show.list_families(config, _families(config, given), form, out)


def _compare(args: argparse.Namespace, names: list[str], overrides: list[str], out: Path | None) -> int:
    from ppctl.cli.commands import schedule_show

    if not names:
        raise ConfigError("Name the schedules to compare, for example: ppctl schedule compare gpipe 1f1b interleaved")
    form = _format(args, schedule_show.COMPARE_FORMATS, out)
    chosen = next((word for word in overrides if word.startswith("schedule=")), None)
    if chosen:
        raise ConfigError(f"{chosen}: `ppctl schedule compare` takes the names alone: {chosen.partition('=')[2]}")
    files = [name for name in names if name.endswith(".csv") and not name.startswith("csv:")]
    owns = {name: _knobs("csv" if name in files else name.partition(":")[0]) for name in names}
    for word in overrides:
        key = word.partition("=")[0]
        if key.startswith("schedule.") and not any(own is None or key in own for own in owns.values()):
            raise ConfigError(f"{word}: none of {', '.join(names)} has such a setting.")
    requests = []
    if files:
        num_ranks, num_microbatches = _size_of_files(files)
        overrides = [f"mesh=1x{num_ranks}", f"schedule.num_microbatches={num_microbatches}", *overrides]
    for name, own in owns.items():
        family, _, knobs = name.partition(":")
        shared = [w for w in overrides if own is None or not w.startswith("schedule.") or w.partition("=")[0] in own]
        extra = [f"schedule.{knob}" for knob in knobs.split(",") if knob]
        if name in files:
            asked = _compose(args, shared)
            wanted = Csv(name="csv", path=name, num_microbatches=asked.schedule.num_microbatches)
            requests.append(replace(asked, schedule=wanted))
        else:
            requests.append(_compose(args, [f"schedule={family}", *shared, *extra]))
    return schedule_show.show_comparison(requests, form, out)


def _size_of_files(names: Sequence[str]) -> tuple[int, int]:
    """Return the ranks and microbatches that files of schedules have, which must be the same."""
    from ppctl.config.schedule_from_config import read_valid

    found = {name: read_valid(Path(name)) for name in names}
    sizes = {name: (each.num_ranks, each.num_microbatches) for name, each in found.items()}
    if len({*sizes.values()}) > 1:
        each = ", ".join(f"{name} has {p} ranks and {m} microbatches" for name, (p, m) in sizes.items())
        raise ConfigError(f"{each}: only schedules of one size are compared.")
    return sizes[names[0]]


def _certify(args: argparse.Namespace, names: list[str], overrides: list[str], out: Path | None) -> int:
    from ppctl.cli.commands import schedule_show

    if names:
        raise ConfigError(f"{names[0]} is not KEY=VALUE. For a file: schedule=csv schedule.path={names[0]}")
    seconds = 60.0 if args.seconds is None else args.seconds
    if not 0 < seconds < math.inf:  # written so that NaN fails
        raise ConfigError(f"--seconds {seconds} must be above 0.")
    form = _format(args, schedule_show.WITHOUT_TASKS, out)
    return schedule_show.show_certified(_compose(args, overrides), seconds, form, out)


def _curves(args: argparse.Namespace, names: list[str], overrides: list[str], out: Path | None) -> int:
    from ppctl.cli.commands import schedule_curves

    if names:
        raise ConfigError(f"{names[0]} is not KEY=VALUE. Name one schedule, as in schedule={names[0]}.")
    for key, option in (("mesh", "--ranks"), ("mesh.pp", "--ranks"), ("schedule.num_microbatches", "--microbatches")):
        if any(word.startswith(f"{key}=") for word in overrides):
            raise ConfigError(f"{key}: `ppctl schedule curves` takes several sizes. Use {option}.")
    if args.over not in (None, "ranks", "microbatches"):
        raise ConfigError(f"--over {args.over} is not one of ranks, microbatches.")
    form = _format(args, schedule_curves.FORMATS, out)
    ranks = _sizes("--ranks", args.ranks or "2,4,8,16")
    microbatches = _sizes("--microbatches", args.microbatches or "1,2,4,8,16,32,64")
    kept_mb = [] if args.kept_mb is None else _positive("--kept-mb", args.kept_mb)
    grid = schedule_curves.curve_grid(_compose(args, overrides), ranks, microbatches, args.over, kept_mb)
    return schedule_curves.show_curves(grid, form, out)


def _sizes(option: str, text: str) -> list[int]:
    """Return the numbers of a list of numbers and ranges, ascending.

    >>> _sizes("--ranks", "8,2-4")
    [2, 3, 4, 8]
    """
    found: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if not 1 <= first <= last <= MOST_SIZES:
            raise ConfigError(f"{option} {text}: write numbers and ranges from 1 to {MOST_SIZES}, as in 2,4,8-12.")
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


def _check(args: argparse.Namespace, names: list[str], overrides: list[str], out: Path | None) -> int:
    from ppctl.cli.commands import schedule_show

    if overrides or out or args.format or args.json:
        raise ConfigError("`ppctl schedule check` takes a file and nothing else.")
    return schedule_show.check_file(_one_file("check", names))


_SERVE = {"show": _show, "list": _list, "compare": _compare, "curves": _curves, "certify": _certify, "check": _check}


def _one_file(subcommand: str, names: Sequence[str]) -> Path:
    if len(names) != 1:
        raise ConfigError(f"`ppctl schedule {subcommand}` takes one file, not {len(names)}: FILE.csv")
    if not names[0].endswith(".csv"):
        hint = did_you_mean(names[0], options("schedule"), "schedule=")
        raise ConfigError(f"{names[0]} is neither KEY=VALUE nor a FILE.csv.{hint}")
    return Path(names[0])


def _compose(args: argparse.Namespace, overrides: list[str]) -> ScheduleConfig:
    from ppctl.cli.compose import compose_drawing

    flags = [] if args.config_dir is None else ["--config-dir", args.config_dir]
    config = compose_drawing(overrides, flags)
    return config if args.found is None else compose_drawing([*args.found.words(config.mesh.pp), *overrides], flags)


def _knobs(family: str) -> set[str] | None:
    """Return the settings of a shipped schedule, `schedule.` included; None for one that only composing can find."""
    if family not in options("schedule"):
        return None
    return set(settings_of("schedule", schema_of("schedule", family)))


def _families(config: ScheduleConfig, given: set[str]) -> list[ScheduleConfig]:
    """Return the request with each family in turn: what was given of its settings, else its defaults."""
    from ppctl.config.schedule_from_config import settings_of_family
    from ppctl.schedule import FAMILIES

    found: list[ScheduleConfig] = []
    for family in FAMILIES:
        cls = settings_of_family(family)
        same = {"schedule.num_microbatches"} | (given & set(settings_of("schedule", cls)))
        values = {key.partition(".")[2]: getattr(config.schedule, key.partition(".")[2]) for key in same}
        found.append(ScheduleConfig(mesh=config.mesh, schedule=cls(name=family, **values), costs=config.costs))
    return found


def _format(args: argparse.Namespace, known: Sequence[str], out: Path | None) -> str:
    """Return the format that is wanted: --format or --json, else the ending of --out, else text."""
    if args.json and args.format not in (None, "json"):
        raise ConfigError(f"--json and --format {args.format} exclude each other.")
    form = "json" if args.json else args.format
    if form is None and out is not None:
        form = {".txt": "text"}.get(out.suffix, out.suffix[1:])
        if form not in known:
            raise ConfigError(f"--out {out}: its ending is not a format. Add --format, one of {', '.join(known)}.")
    form = form or "text"
    if form not in known:
        raise ConfigError(f"--format {form} is not one of {', '.join(known)}.{did_you_mean(form, known)}")
    if form in ("pdf", "png") and out is None:
        raise ConfigError(f"--format {form} is not text. Add --out FILE.{form}.")
    return form


def schedule_help() -> str:
    """Return what `ppctl schedule --help` prints."""
    costs = [*settings_of("costs", Costs).values()]
    return "\n".join(
        [
            f"ppctl schedule: {COMMANDS['schedule']}.",
            "",
            *(f"  {name:8} {about}" for name, about in SUBCOMMANDS.items()),
            "",
            USAGE,
            "",
            f"Groups: {', '.join(DRAWN)}, recipes. A recipe's mesh and schedule count, the rest of it does not matter.",
            *textwrap.wrap(f"Schedules: {', '.join(options('schedule'))}", 120, subsequent_indent="  "),
            "  (settings of each: ppctl train --help schedule)",
            f"Costs: {', '.join(name for name in options('costs') if schema_of('costs', name) is Costs)}",
            setting_table(costs),
            "",
            "Options:",
            FLAGS,
            "",
            "Examples:",
            *(f"  {line}" for line in EXAMPLES),
        ]
    )


def _parse(words: list[str]) -> argparse.Namespace:
    args = _parser().read(words)
    if args.config_dir is not None and not Path(args.config_dir).is_dir():
        raise ConfigError(f"--config-dir {args.config_dir}: there is no such directory.")
    args.found = None if args.costs_from is None else costs_from(Path(args.costs_from))
    return args


def completions(words: list[str]) -> list[str] | None:
    """Return what may follow `ppctl schedule`; None after it, where the overrides of a config may follow."""
    return None if words else [*SUBCOMMANDS]


def option_names() -> list[str]:
    """Return every option of `ppctl schedule`."""
    return _parser().names()


def _parser() -> Parser:
    parser = Parser("ppctl schedule")
    parser.add_argument("--format")
    parser.add_argument("--out")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--ranks")
    parser.add_argument("--microbatches")
    parser.add_argument("--over")
    parser.add_argument("--kept-mb")
    parser.add_argument("--costs-from")
    parser.add_argument("-cd", "--config-dir")
    return parser
