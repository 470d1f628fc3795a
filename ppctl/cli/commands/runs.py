"""`ppctl runs`: list past and present runs, how they stand and ended; show one, and what resumes it; starts no JAX."""

from __future__ import annotations

from pathlib import Path

from ppctl.cli.commands import COMMANDS
from ppctl.cli.options import Parser
from ppctl.errors import ConfigError

DEFAULT_DIR = "runs"  # what run.dir lies in by default
EXAMPLES = ("ppctl runs", "ppctl runs show tiny", "ppctl runs show tiny /scratch/runs --json")
HELP = f"""\
ppctl runs: {COMMANDS["runs"]}.

Usage: ppctl runs [DIR ...] [--json]             every run below DIR, sweeps included, the newest record first
       ppctl runs show NAME [DIR ...] [--json]   one run: settings, losses, speed, checkpoints, what resumes it

DIR is {DEFAULT_DIR} if you name none. NAME is a path, a name in the list, or a part of one that no other has. A
directory named show is ./show.

Status:
  running          a living process records it
  finished         all run.num_steps are done and saved
  interrupted      by Ctrl-C or SIGTERM, after saving
  failed           by an error, which is shown
  broken off       its process is gone without a word: killed, stopped while it compiled, or its machine lost
  no end recorded  nobody can tell from here: begun by an older ppctl, on another machine, or where files have no locks
  not started      it has settings and nothing else

Options:
  --json      print the result as JSON on stdout
  -h, --help  this text

Examples:
""" + "\n".join(f"  {line}" for line in EXAMPLES)


def serve(words: list[str]) -> int:
    """List runs or show one; return the exit code."""
    options = Parser("ppctl runs").read(words)
    if options.help:
        print(HELP)
        return 0
    if options.words[:1] == ["show"]:
        if len(options.words) < 2:
            raise ConfigError("`ppctl runs show` needs the name of a run; `ppctl runs` lists them.")
        return _show(options.words[1], _tops(options.words[2:]), as_json=options.json)
    from ppctl.reports import runs_table

    return runs_table.list_runs(_tops(options.words), as_json=options.json)


def _show(name: str, tops: list[Path], *, as_json: bool) -> int:
    from ppctl.cli.overrides import resumption
    from ppctl.reports import runs_table

    name, path = runs_table.find_run(name, tops)
    found = resumption(path)
    return runs_table.show_run(name, path, found.words, found.command, found.notes, as_json=as_json)


def completions(words: list[str]) -> list[str]:
    """Return what may follow `ppctl runs` and these words, options aside."""
    if not words:
        return ["show"]
    if words != ["show"] or not Path(DEFAULT_DIR).is_dir():
        return []
    from ppctl.reports.run_files import find_runs

    return [name for name, _ in find_runs(Path(DEFAULT_DIR)) if not any(map(str.isspace, name))]


def option_names() -> list[str]:
    """Return every option of `ppctl runs`."""
    return Parser("ppctl runs").names()


def _tops(words: list[str]) -> list[Path]:
    return [Path(word) for word in words or [DEFAULT_DIR]]
