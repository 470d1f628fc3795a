"""`ppctl runs`: list runs and how they ended, show one or a sweep; starts no JAX."""

from __future__ import annotations

import argparse
from pathlib import Path

from ppctl.cli.command_options import Parser
from ppctl.errors import ConfigError

DEFAULT_DIR = "runs"  # parent of run.dir by default
EXAMPLES = (
    "ppctl runs",
    "ppctl runs show tiny /scratch/runs --json",
)
NOTES = f"""\
    ppctl runs [DIR ...]            every run below DIR, sweeps included
    ppctl runs show NAME [DIR ...]  one run: settings, losses, speed, checkpoints, resume command
    ppctl runs show SWEEP           a sweep's directory: axes, jobs, their status, the best

DIR is {DEFAULT_DIR} by default. NAME is a path, a name in the list, or a part that no other name
has. A directory named show is ./show. A run directory may be renamed by the shell's mv: show prints
the command that resumes it there. With --json the list has all settings of every run.

Status:
  running          a living process records it
  finished         all run.num_steps are done and saved
  interrupted      by Ctrl-C or SIGTERM, after saving
  failed           by an error, which is shown
  broken off       its process ended without a record: killed, stopped while it compiled, or its
                   machine lost
  no end recorded  unknown from this machine: it began on another one, or where files have no locks
  not started      it has settings and nothing else"""


def parser() -> Parser:
    """Return the options of `ppctl runs`."""
    return Parser("runs", "[show NAME] [DIR ...] [--json]", notes=NOTES, examples=EXAMPLES)


def serve(options: argparse.Namespace) -> int:
    """List runs, or show one; return the exit code."""
    first, *rest = options.words or [""]
    return _show(rest, options) if first == "show" else _list(options.words, options)


def _list(words: list[str], options: argparse.Namespace) -> int:
    from ppctl.reports.run_files import run_summary
    from ppctl.reports.runs_table import list_runs, listed, names_of

    tops = _tops(words)
    found = [run_summary(*each) for each in names_of(tops)]
    if not found and not options.json:
        print(f"No run is in {listed(tops)}.")
        return 0
    title = f"{len(found)} run{'s' * (len(found) != 1)} in {listed(tops)}"
    newest_first = sorted(found, key=lambda run: (-run.recorded_s, run.name))
    return list_runs(newest_first, title, as_json=options.json)


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


def _tops(words: list[str]) -> list[Path]:
    return [Path(word) for word in words or [DEFAULT_DIR]]
