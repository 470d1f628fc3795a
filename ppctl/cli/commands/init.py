"""`ppctl init`: write a project to start from: a custom model and data set, a recipe that runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from ppctl.cli.commands import COMMANDS
from ppctl.config.config_dirs import ROOT
from ppctl.errors import ConfigError

STARTER = ROOT / "recipes/starter"
NETWORK = ROOT / "recipes/starter_network"
MAKE_DATA = "make_data.py"  # of a network's starter: writes MADE in the new directory
MADE = ("images.npy", "labels.npy")
KINDS = (".py", ".yaml", ".md")


def serve(words: list[str]) -> int:
    """Write the files; return 0. ConfigError if that fails or would replace others."""
    # 1. the directory and the starter
    if words in (["-h"], ["--help"]):
        about = COMMANDS["init"]
        print(
            f"Usage: ppctl init DIR [--network]\n\n{about[0].upper()}{about[1:]}.\n\n"
            f"  DIR            a Stack, equal layers between an embedding and a head: "
            f"{_listed(STARTER)}\n"
            f"  DIR --network  a Network, any JAX function of a batch, with .npy files: "
            f"{_listed(NETWORK)}"
        )
        return 0
    names = [word for word in words if word != "--network"]
    if len(names) != 1 or names[0].startswith("-"):
        line = f"ppctl init {' '.join(words)}".rstrip()
        raise ConfigError(f"{line} is not `ppctl init DIR [--network]`: name one directory.")
    directory, starter = Path(names[0]), NETWORK if "--network" in words else STARTER
    # 2. the files
    files = _files(starter)
    has_maker = Path(MAKE_DATA) in files
    written = [*map(str, files), *(MADE if has_maker else ())]
    there = [str(directory / file) for file in written if (directory / file).exists()]
    if there:
        fault = f"{there[0]} is there already, and nothing is overwritten."
        raise ConfigError(f"{fault} Name another directory.")
    try:
        for file in files:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(starter / file, directory / file)
    except OSError as error:
        fault = f"{directory} cannot be written: {error.strerror}."
        raise ConfigError(f"{fault} Name another directory.") from error
    maker = [sys.executable, MAKE_DATA]
    if has_maker and subprocess.run(maker, cwd=directory, check=False).returncode:
        fault = f"{directory / MAKE_DATA} cannot write {' and '.join(MADE)} here"
        raise ConfigError(f"{fault}: its error is above.")
    # 3. the next commands
    print("wrote    " + ", ".join(str(directory / file) for file in written))
    print(f"train    cd {directory} && ppctl train --config-dir . recipes=mine")
    print("verify   ppctl verify --config-dir . recipes=mine run.dtype=float64")
    print("use      python predict.py")
    return 0


def option_names() -> list[str]:
    """Return every option of `ppctl init`."""
    return ["--network", "--help"]


def completions(words: list[str]) -> list[str]:
    """Return no candidates: the directory is a new one."""
    del words
    return []


def _files(starter: Path) -> list[Path]:
    """Return the files of a starter, relative to the directory."""
    return sorted(file.relative_to(starter) for file in starter.rglob("*") if file.suffix in KINDS)


def _listed(starter: Path) -> str:
    return ", ".join(map(str, _files(starter)))
