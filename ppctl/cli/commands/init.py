"""`ppctl init`: write a project to start from: your own model, your own data, a recipe that runs."""

from __future__ import annotations

import shutil
from pathlib import Path

from ppctl.cli.commands import COMMANDS
from ppctl.config.files import ROOT
from ppctl.errors import ConfigError

STARTER = ROOT / "recipes/starter"


def serve(words: list[str]) -> int:
    """Write the files; return 0. ConfigError where they cannot be, or would replace others."""
    if words in (["-h"], ["--help"]):
        about = COMMANDS["init"]
        print(f"Usage: ppctl init DIR\n\n{about[0].upper()}{about[1:]}: {', '.join(map(str, _files()))}.")
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(f"ppctl init {' '.join(words)}".rstrip() + " is not `ppctl init DIR`: name one directory.")
    directory = Path(words[0])
    there = [str(directory / file) for file in _files() if (directory / file).exists()]
    if there:
        raise ConfigError(f"{there[0]} is there already, and nothing is overwritten. Name another directory.")
    try:
        for file in _files():
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(STARTER / file, directory / file)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}. Name another directory.") from error
    print("wrote    " + ", ".join(str(directory / file) for file in _files()))
    print(f"train    cd {directory} && ppctl train --config-dir . recipes=mine")
    print("verify   ppctl verify --config-dir . recipes=mine run.dtype=float64")
    return 0


def option_names() -> list[str]:
    """Return every option of `ppctl init`."""
    return ["--help"]


def completions(words: list[str]) -> list[str]:
    """Return no candidates: the directory is a new one."""
    del words
    return []


def _files() -> list[Path]:
    """Return what is written, below the directory."""
    return sorted(file.relative_to(STARTER) for file in STARTER.rglob("*") if file.suffix in (".py", ".yaml"))
