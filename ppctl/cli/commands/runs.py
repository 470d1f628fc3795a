"""`ppctl runs`: list runs and how they ended, show one or a sweep, remove runs or checkpoints."""

import argparse
import os
import time
from pathlib import Path

from ppctl.cli.command_options import Parser
from ppctl.cli.resume_command import resumption
from ppctl.cli.runs_selection import columns_of, least_of, ordered, orders_of
from ppctl.cli.subcommands.runs_remove import prune, remove
from ppctl.cli.subcommands.runs_sweep import find_sweep, jobs_without_runs, show_sweep
from ppctl.errors import ConfigError
from ppctl.reports import run_files, runs_table
from ppctl.reports.foreign_files import printable
from ppctl.reports.run_page.read_run import read_run
from ppctl.reports.terminal_output import show_json

DEFAULT_DIR = "runs"  # parent of run.dir by default
NOTES = f"""\
    ppctl runs [DIR ...]            every run below DIR, sweeps included
    ppctl runs show NAME [DIR ...]  one run: settings, losses, speed, checkpoints, resume command
    ppctl runs SWEEP                the jobs of a sweep, including those not started
    ppctl runs show SWEEP           a sweep's directory: axes, jobs, their status, the best
    ppctl runs rm NAME ...          remove runs for good, with their checkpoints
    ppctl runs prune NAME --keep N  remove a run's checkpoints but the newest N and those kept for
                                    good (run.checkpoint.keep_every), and those set aside

DIR is {DEFAULT_DIR} by default. NAME is a path or a name in the list; for show also a unique part
of a name. Write ./show for a directory named show. rm asks once, and refuses a run that is running,
is reached through a symlink, or holds files that no run wrote. A run directory may be moved with
mv: show prints the command that resumes it there. With --json the list has all settings of every
run.

Status:
  running          a living process records it
  finished         all run.num_steps are done and saved
  interrupted      by Ctrl-C or SIGTERM, after saving
  failed           by an error, which is shown
  broken off       its process ended without a record: killed, stopped while it compiled, or its
                   machine lost
  no end recorded  unknown from this machine: it began on another one
  not started      it has settings and nothing else"""


def parser() -> Parser:
    """Return the parser for the options of `ppctl runs`."""
    usage = "[show NAME | rm NAME ... | prune NAME] [DIR ...] [OPTIONS]"
    options = Parser("runs", usage, notes=NOTES)
    about = (
        "order the list by a column or a setting, ascending; COLUMN:desc descending; A,B: by A, "
        "then B. Runs without a value are last. Default: the newest record first"
    )
    options.add_argument("--sort", metavar="COLUMN", help=about)
    about = (
        "these columns or settings, after the name; +A,B: after the usual ones (status step loss "
        "eval_loss mesh schedule lr age); also started, active, size, or any setting (optim.lr)"
    )
    options.add_argument("--columns", metavar="A,B,...", help=about)
    about = "prune: number of newest checkpoints to keep"
    options.add_argument("--keep", type=int, metavar="N", help=about)
    about = "rm, prune: do not ask; needed without a terminal"
    options.add_argument("-y", "--yes", action="store_true", help=about)
    return options


def serve(options: argparse.Namespace) -> int:
    """List runs, show one or remove some; return the exit code."""
    action, *rest = options.words or [""]
    if action == "show":
        _refuse(options, "`ppctl runs show`", "columns", "sort", "yes", "keep")
        return _show(rest, options)
    if action == "rm":
        _refuse(options, "`ppctl runs rm`", "columns", "sort", "keep")
        return remove(rest, Path(DEFAULT_DIR), is_sure=options.yes, as_json=options.json)
    if action == "prune":
        _refuse(options, "`ppctl runs prune`", "columns", "sort")
        top, keep = Path(DEFAULT_DIR), options.keep
        return prune(rest, top, keep, is_sure=options.yes, as_json=options.json)
    _refuse(options, "the list", "yes", "keep")
    return _list(options.words, options)


def _refuse(options: argparse.Namespace, whose: str, *names: str) -> None:
    given = [f"--{name}" for name in names if getattr(options, name)]
    if given:
        raise ConfigError(f"{' and '.join(given)}: not an option of {whose}. Leave it out.")


def _list(words: list[str], options: argparse.Namespace) -> int:
    if options.json and options.columns:
        reason = "--json has all settings of every run. Leave out one of the two."
        raise ConfigError(f"--columns {options.columns}: {reason}")
    tops, now_s = _tops(words), time.time()
    tops = [top if os.path.isdir(top) else find_sweep(str(top), _tops([])) or top for top in tops]
    closed: list[str] = []
    found = [run_files.run_summary(*each) for each in runs_table.names_of(tops, closed)]
    found += [job for top in tops for job in jobs_without_runs(top)]
    where = runs_table.listed(tops)
    if not found and not options.json:
        print(f"No run is in {where}.", *map(printable, closed), sep="\n")
        return 0
    shown = ordered(found, orders_of(options.sort, found))
    if options.json:
        documents = [runs_table.summary_document(run, now_s) for run in shown]
        show_json({"runs": documents, "problems": closed})
        return 0
    columns = columns_of(options.columns, found)
    texts = {each.name: [each.text(run, now_s) for run in shown] for each in columns}
    title = f"{len(found)} run{'s' * (len(found) != 1)} in {where}"
    return runs_table.list_runs(shown, title, texts, least_of(options.columns), closed)


def _show(words: list[str], options: argparse.Namespace) -> int:
    if not words:
        raise ConfigError("`ppctl runs show` needs the name of a run; `ppctl runs` lists them.")
    sweep = find_sweep(words[0], _tops(words[1:]))
    if sweep is not None:
        return show_sweep(sweep, as_json=options.json)
    name, path = runs_table.find_run(words[0], _tops(words[1:]))
    found = resumption(path)
    run = read_run(name, path, found.words, found.command, found.notes, pipeline="")
    return runs_table.show_run(run, as_json=options.json)


def run_named(word: str) -> tuple[str, Path]:
    """Return (name, directory) of the run that a word names: a path, or a name in the list."""
    top = Path(DEFAULT_DIR)
    if not run_files.is_run(Path(word)) and not (top.is_dir() and run_files.find_runs(top)):
        where = f"{DEFAULT_DIR}/ has no runs"
        raise ConfigError(f"{word} is no run, and {where}. Give the path of one.")
    return runs_table.find_run(word, [top])


def _tops(words: list[str]) -> list[Path]:
    return [Path(word) for word in words or [DEFAULT_DIR]]
