"""`ppctl runs`: list runs and how they ended, show one or a sweep, remove runs; starts no JAX."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ppctl.cli.command_options import Parser
from ppctl.cli.commands import COMMANDS
from ppctl.errors import ConfigError

DEFAULT_DIR = "runs"  # parent of run.dir by default
EXAMPLES = (
    "ppctl runs",
    "ppctl runs --sort status,started:desc",
    "ppctl runs --columns +data.batch_size --sort loss",
    "ppctl runs show tiny /scratch/runs --json",
    "ppctl runs rm --yes tiny sweep/optim.lr=0.1",
)
HELP = f"""\
ppctl runs: {COMMANDS["runs"]}.

Usage: ppctl runs [DIR ...] [--sort ...] [--columns ...] [--json]
                                     every run below DIR, sweeps included
       ppctl runs show NAME [DIR ...] [--json]
                                     one run: settings, losses, speed, checkpoints, resume command
       ppctl runs show SWEEP [--json]
                                     a sweep's directory: axes, jobs, their status, the best
       ppctl runs rm NAME ... [--yes] [--json]
                                     remove runs for good, with their checkpoints

DIR is {DEFAULT_DIR} by default. NAME is a path or a name in the list; for show also a part that no
other name has. A directory named show is ./show. rm asks once, and refuses a run that is running,
lies outside its directory of runs by a link, or holds files that no run wrote. A run directory may
be renamed by the shell's mv: show prints the command that resumes it there.

Options of the list:
  --sort COLUMN      by a column or a setting, ascending; COLUMN:desc descending; A,B: by A, then B.
                     Runs without a value are last. Default: the newest record first
  --columns A,B,...  these, columns or settings, after the name; +A,B: after the usual ones (status
                     step loss eval_loss mesh schedule lr age); also started, active and any
                     setting (model.num_layers)

Status:
  running          a living process records it
  finished         all run.num_steps are done and saved
  interrupted      by Ctrl-C or SIGTERM, after saving
  failed           by an error, which is shown
  broken off       its process ended without a record: killed, stopped while it compiled, or its
                   machine lost
  no end recorded  unknown from this machine: it began on another one, or where files have no locks
  not started      it has settings and nothing else

Options:
  -y, --yes   rm: do not ask; needed without a terminal
  --json      print the result as JSON on stdout: all settings of every run, started and
              last_active in UTC, too
  -h, --help  this text

Examples:
""" + "\n".join(f"  {line}" for line in EXAMPLES)
LIST_OPTIONS, CHANGE_OPTIONS = ("columns", "sort"), ("yes",)


def serve(words: list[str]) -> int:
    """List runs, show one or remove some; return the exit code."""
    options = _parser().read(words)
    if options.help:
        print(HELP)
        return 0
    action, *rest = options.words or [""]
    if action not in ACTIONS:
        _refuse(options, "the list", CHANGE_OPTIONS)
        return _list(options.words, options)
    unused = LIST_OPTIONS if action == "rm" else (*LIST_OPTIONS, *CHANGE_OPTIONS)
    _refuse(options, f"`ppctl runs {action}`", unused)
    return ACTIONS[action](rest, options)


def _refuse(options: argparse.Namespace, whose: str, names: tuple[str, ...]) -> None:
    given = [f"--{name}" for name in names if getattr(options, name)]
    if given:
        raise ConfigError(f"{' and '.join(given)}: no option of {whose}. Leave it out.")


def _list(words: list[str], options: argparse.Namespace) -> int:
    from ppctl.cli.runs_selection import columns_of, orders_of
    from ppctl.reports.run_files import run_summary
    from ppctl.reports.runs_columns import ordered
    from ppctl.reports.runs_table import list_runs, listed, names_of

    if options.json and options.columns:
        reason = "--json has all settings of every run. Leave out one of the two."
        raise ConfigError(f"--columns {options.columns}: {reason}")
    tops = _tops(words)
    found = [run_summary(*each) for each in names_of(tops)]
    if not found and not options.json:
        print(f"No run is in {listed(tops)}.")
        return 0
    title = f"{len(found)} run{'s' * (len(found) != 1)} in {listed(tops)}"
    shown = ordered(found, orders_of(options.sort, found))
    return list_runs(shown, title, columns_of(options.columns, found), as_json=options.json)


def _show(words: list[str], options: argparse.Namespace) -> int:
    if not words:
        raise ConfigError("`ppctl runs show` needs the name of a run; `ppctl runs` lists them.")
    from ppctl.cli.resume_command import resumption
    from ppctl.cli.subcommands.runs_sweep import find_sweep, show_sweep
    from ppctl.reports import runs_table
    from ppctl.reports.run_page.read_run import read_run

    sweep = find_sweep(words[0], _tops(words[1:]))
    if sweep is not None:
        return show_sweep(sweep, as_json=options.json)
    name, path = runs_table.find_run(words[0], _tops(words[1:]))
    found = resumption(path)
    run = read_run(name, path, found.config, found.words, found.command, found.notes, pipeline="")
    return runs_table.show_run(run, as_json=options.json)


def _remove(words: list[str], options: argparse.Namespace) -> int:
    from ppctl.cli.subcommands.runs_remove import remove

    return remove(words, Path(DEFAULT_DIR), is_sure=options.yes, as_json=options.json)


ACTIONS: dict[str, Callable[[list[str], argparse.Namespace], int]] = {"show": _show, "rm": _remove}


def completions(words: list[str]) -> list[str]:
    """Return the words that may follow `ppctl runs` and these words, options aside."""
    if not words:
        return [*ACTIONS]
    takes_more = words[0] == "rm" or (words[0] in ACTIONS and len(words) == 1)
    if not takes_more or not Path(DEFAULT_DIR).is_dir():
        return []
    from ppctl.launch.sweep.sweep_records import is_sweep
    from ppctl.reports.run_files import find_runs

    names = [name for name, _ in find_runs(Path(DEFAULT_DIR))]
    if words[0] == "show":
        parents = (parent for name in names for parent in Path(name).parents)
        above = dict.fromkeys(str(parent) for parent in parents if parent.name)
        names += [each for each in above if each not in names and is_sweep(Path(DEFAULT_DIR, each))]
    return [name for name in names if name not in words and not any(map(str.isspace, name))]


def option_names() -> list[str]:
    """Return every option of `ppctl runs`."""
    return _parser().names()


def _parser() -> Parser:
    parser = Parser("ppctl runs")
    parser.add_argument("--columns")
    parser.add_argument("--sort")
    parser.add_argument("-y", "--yes", action="store_true")
    return parser


def _tops(words: list[str]) -> list[Path]:
    return [Path(word) for word in words or [DEFAULT_DIR]]
