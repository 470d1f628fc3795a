"""`ppctl init`: write a project to start from: a custom model and data set, a recipe that runs."""

import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from ppctl.cli.command_options import Parser
from ppctl.config.config_dirs import ROOT
from ppctl.errors import ConfigError, os_errors
from ppctl.reports.foreign_files import check_place
from ppctl.reports.terminal_output import show_result

STARTER = ROOT / "recipes/starter"
FUNCTIONS = ROOT / "recipes/starter_functions"  # in place of files of STARTER
NETWORK = ROOT / "recipes/starter_network"
MAKE_DATA = "make_data.py"  # script of the network starter: writes MADE in the new directory
MADE = ("images.npy", "labels.npy")
KINDS = (".py", ".yaml", ".md")


def parser() -> Parser:
    """Return the parser for the options of `ppctl init`."""
    notes = f"DIR gets a Flax module, data and a recipe that trains it:\n{_listed(STARTER)}"
    usage = "DIR [--functions | --network] [--json]"
    options = Parser("init", usage, notes=notes, words="dir", nargs=None)
    kinds = options.add_mutually_exclusive_group()
    about = "a Stack of pure functions in place of the Flax module"
    kinds.add_argument("--functions", action="store_true", help=about)
    about = f"a Network, any JAX function of a batch, with .npy files: {_listed(NETWORK)}"
    kinds.add_argument("--network", action="store_true", help=about)
    return options


def serve(options: Namespace) -> int:
    """Write the files; return 0. ConfigError if that fails or would overwrite files."""
    # 1. the files
    directory, starters = Path(options.dir), (NETWORK,) if options.network else (STARTER,)
    starters += (FUNCTIONS,) if options.functions else ()
    check_place(directory, "DIR")
    files = {file: starter / file for starter in starters for file in _files(starter)}
    has_maker = Path(MAKE_DATA) in files
    written = [directory / file for file in (*files, *(MADE if has_maker else ()))]
    there = next((file for file in written if file.exists()), None)
    if there is not None:
        fault = f"{there} exists already, and nothing is overwritten."
        raise ConfigError(f"{fault} Name another directory.")
    with os_errors(f"{directory} cannot be written", "Name another directory."):
        for file, source in files.items():
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, directory / file)
    maker = [sys.executable, MAKE_DATA]
    if has_maker and subprocess.run(maker, cwd=directory, check=False).returncode:
        fault = f"{directory / MAKE_DATA} cannot write {' and '.join(MADE)} here"
        raise ConfigError(f"{fault}: its error is above.")
    # 2. the next commands
    places = list(map(str, written))
    lines = (
        f"wrote    {', '.join(places)}",
        f"train    cd {directory} && ppctl train --config-dir . recipes=mine",
        "verify   ppctl verify --config-dir . recipes=mine run.dtype=float64",
        "use      python predict.py",
    )
    return show_result({"files": places}, lines, as_json=options.json)


def _files(starter: Path) -> list[Path]:
    """Return the files of a starter, relative to its directory."""
    return sorted(file.relative_to(starter) for file in starter.rglob("*") if file.suffix in KINDS)


def _listed(starter: Path) -> str:
    return ", ".join(map(str, _files(starter)))
