"""`ppctl stop`: make a running run save and end after its step, with exit code 0."""

import argparse
import time

from ppctl.cli.command_options import Parser
from ppctl.cli.commands.runs import run_named
from ppctl.errors import ConfigError, os_errors
from ppctl.reports.foreign_files import printable
from ppctl.reports.run_files import RUNNING, run_summary
from ppctl.reports.run_status import STOP_FILE
from ppctl.reports.terminal_output import show_json

POLL_S = 0.5
NOTES = """\
    ppctl stop NAME           ask the run, and return
    ppctl stop NAME --wait    and wait until it has ended

NAME is a path, a name in `ppctl runs`, or a part of one. The run may be on another machine
that shares the directory. The same `ppctl train` command resumes it later."""


def parser() -> Parser:
    """Return the parser for the options of `ppctl stop`."""
    options = Parser("stop", "NAME [OPTIONS]", notes=NOTES)
    options.add_argument("--wait", action="store_true", help="wait until the run has ended")
    return options


def serve(options: argparse.Namespace) -> int:
    """Ask a run to end; return 0."""
    if len(options.words) != 1:
        raise ConfigError("`ppctl stop` needs the name of one run; `ppctl runs` lists them.")
    # 1. the request
    name, path = run_named(options.words[0])
    found = run_summary(name, path)
    if found.status != RUNNING:
        raise ConfigError(f"{name} is not running but {found.status} at step {found.steps_text}.")
    with os_errors(f"{path / STOP_FILE} cannot be written"):
        (path / STOP_FILE).touch()
    if not options.json:
        print(printable(f"{name} saves and ends after its current step, {found.steps_text}."))
    # 2. the end of the run
    while options.wait and (found := run_summary(name, path)).status == RUNNING:
        time.sleep(POLL_S)
    if options.json:
        show_json({"run_dir": str(path), "status": found.status, "step": found.step})
    elif options.wait:
        print(printable(f"{name}: {found.status} at step {found.steps_text}"))
    return 0
