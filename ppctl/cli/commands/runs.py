"""`ppctl runs`: list runs and how they ended, show one or a sweep, rename and remove runs; starts no JAX."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ppctl.cli.commands import COMMANDS
from ppctl.cli.options import Parser
from ppctl.errors import ConfigError

DEFAULT_DIR = "runs"  # what run.dir lies in by default
EXAMPLES = (
    "ppctl runs",
    "ppctl runs --filter failed,broken-off --sort started:desc",
    "ppctl runs --filter schedule=1f1b --columns +data.batch_size --sort loss",
    "ppctl runs show tiny /scratch/runs --json",
    "ppctl runs mv tiny baseline",
    "ppctl runs rm --yes tiny sweep/optim.lr=0.1",
)
HELP = f"""\
ppctl runs: {COMMANDS["runs"]}.

Usage: ppctl runs [DIR ...] [--filter ...] [--sort ...] [--columns ...] [--json]   every run below DIR, sweeps included
       ppctl runs show NAME [DIR ...] [--json]   one run: settings, losses, speed, checkpoints, what resumes it
       ppctl runs show SWEEP [--json]            a sweep's directory: its axes, jobs, how they stand, the best
       ppctl runs mv NAME NEW [--yes] [--json]   rename a run; it resumes where it is then
       ppctl runs rm NAME ... [--yes] [--json]   remove runs for good, with their checkpoints

DIR is {DEFAULT_DIR} if you name none. NAME is a path or a name in the list; of show also a part that no other has. NEW
is a name, or a path that begins with /, ./, ../ or {DEFAULT_DIR}/. A directory named show is ./show. mv and rm ask
once, and leave alone what is running, lies behind a link, or holds what no run wrote.

Options of the list:
  --filter WHAT      only runs with this status (failed,broken-off: one of these), or SETTING=VALUE as in overrides
                     (schedule=gpipe,1f1b: one of these; optim.lr=1e-3; mesh=2x4); given twice, both must hold
  --sort COLUMN      by a column or a setting, ascending; COLUMN:desc descending; A,B: by B where A is alike. Runs
                     without a value are last. Without it the newest record is first
  --columns A,B,...  these, columns or settings, after the name; +A,B: after the usual ones (status step loss eval_loss
                     mesh schedule lr age); there are also started, active and any setting (model.num_layers)

Status:
  running          a living process records it
  finished         all run.num_steps are done and saved
  interrupted      by Ctrl-C or SIGTERM, after saving
  failed           by an error, which is shown
  broken off       its process is gone without a word: killed, stopped while it compiled, or its machine lost
  no end recorded  nobody can tell from here: begun by an older ppctl, on another machine, or where files have no locks
  not started      it has settings and nothing else

Options:
  -y, --yes   mv, rm: do not ask; where there is no terminal, it is needed
  --json      print the result as JSON on stdout: of every run all settings, started and last_active in UTC, too
  -h, --help  this text

Examples:
""" + "\n".join(f"  {line}" for line in EXAMPLES)
LIST_OPTIONS, CHANGE_OPTIONS = ("columns", "sort", "filter"), ("yes",)


def serve(words: list[str]) -> int:
    """List runs, show, rename or remove some; return the exit code."""
    options = _parser().read(words)
    if options.help:
        print(HELP)
        return 0
    action, *rest = options.words or [""]
    if action not in ACTIONS:
        _refuse(options, "the list", CHANGE_OPTIONS)
        return _list(options.words, options)
    _refuse(options, f"`ppctl runs {action}`", LIST_OPTIONS if action in ("mv", "rm") else (*LIST_OPTIONS, "yes"))
    return ACTIONS[action](rest, options)


def _refuse(options: argparse.Namespace, whose: str, names: tuple[str, ...]) -> None:
    given = [f"--{name}" for name in names if getattr(options, name)]
    if given:
        raise ConfigError(f"{' and '.join(given)}: no option of {whose}. Leave it out.")


def _list(words: list[str], options: argparse.Namespace) -> int:
    from ppctl.cli.run_selection import columns_of, conditions_of, orders_of
    from ppctl.reports.run_files import run_summary
    from ppctl.reports.runs_columns import ordered
    from ppctl.reports.runs_table import list_runs, listed, names_of

    if options.json and options.columns:
        raise ConfigError(
            f"--columns {options.columns}: --json has all settings of every run. Leave out one of the two."
        )
    tops = _tops(words)
    found = [run_summary(*each) for each in names_of(tops)]
    conditions = conditions_of(options.filter, found)
    shown = [run for run in found if all(condition.holds(run) for condition in conditions)]
    shown = ordered(shown, orders_of(options.sort, found))
    which = f" with {' and '.join(condition.text for condition in conditions)}" if conditions else ""
    if not shown and not options.json:
        print(f"No run is in {listed(tops)}{which}." + (f" Without --filter: {len(found)}." if found else ""))
        return 0
    of = f" of {len(found)}" if conditions else ""
    title = f"{len(shown)}{of} run{'s' * (len(found) != 1)} in {listed(tops)}{which}"
    return list_runs(shown, title, columns_of(options.columns, found, shown), as_json=options.json)


def _show(words: list[str], options: argparse.Namespace) -> int:
    if not words:
        raise ConfigError("`ppctl runs show` needs the name of a run; `ppctl runs` lists them.")
    from ppctl.cli.commands.runs_sweep import find_sweep, show_sweep
    from ppctl.cli.overrides import resumption
    from ppctl.reports import runs_table

    sweep = find_sweep(words[0], _tops(words[1:]))
    if sweep is not None:
        return show_sweep(sweep, as_json=options.json)
    name, path = runs_table.find_run(words[0], _tops(words[1:]))
    found = resumption(path)
    return runs_table.show_run(name, path, found.words, found.command, found.notes, as_json=options.json)


def _move(words: list[str], options: argparse.Namespace) -> int:
    from ppctl.cli.commands import runs_change

    return runs_change.move(words, Path(DEFAULT_DIR), is_sure=options.yes, as_json=options.json)


def _remove(words: list[str], options: argparse.Namespace) -> int:
    from ppctl.cli.commands import runs_change

    return runs_change.remove(words, Path(DEFAULT_DIR), is_sure=options.yes, as_json=options.json)


ACTIONS: dict[str, Callable[[list[str], argparse.Namespace], int]] = {"show": _show, "mv": _move, "rm": _remove}


def completions(words: list[str]) -> list[str]:
    """Return what may follow `ppctl runs` and these words, options aside."""
    if not words:
        return [*ACTIONS]
    if words[0] not in ACTIONS or not Path(DEFAULT_DIR).is_dir() or (words[0] != "rm" and len(words) > 1):
        return []
    from ppctl.launch.sweep.recorded import is_sweep
    from ppctl.reports.run_files import find_runs

    names = [name for name, _ in find_runs(Path(DEFAULT_DIR))]
    if words[0] == "show":
        above = dict.fromkeys(str(parent) for name in names for parent in Path(name).parents if parent.name)
        names += [each for each in above if each not in names and is_sweep(Path(DEFAULT_DIR, each))]
    return [name for name in names if name not in words and not any(map(str.isspace, name))]


def option_names() -> list[str]:
    """Return every option of `ppctl runs`."""
    return _parser().names()


def _parser() -> Parser:
    parser = Parser("ppctl runs")
    parser.add_argument("--columns")
    parser.add_argument("--sort")
    parser.add_argument("--filter", action="append", default=[])
    parser.add_argument("-y", "--yes", action="store_true")
    return parser


def _tops(words: list[str]) -> list[Path]:
    return [Path(word) for word in words or [DEFAULT_DIR]]
