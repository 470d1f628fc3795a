"""A request as a recipe: a file that `ppctl train recipes=NAME` runs as it is."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from ppctl.config import AutoHardware, Config, Hardware, Mesh, Run
from ppctl.config.files import ROOT
from ppctl.errors import ConfigError
from ppctl.planner.candidate import Candidate
from ppctl.training.known_hardware import known

MARK = "# Written by `ppctl tune`, which writes it again when it is run again."
CHOSEN = ("model", "mesh", "schedule", "partition", "executor", "optim", "data")  # parts chosen by name
PLANNED = ("hardware", "costs")  # likewise, where they are not the default: what a plan counts with
OTHERS = ("run",)


def recipe_path(name: str | None) -> Path | None:
    """Return the path of a recipe of this name. ConfigError where another file is there, or none can be written."""
    return None if name is None else own_path(name, ".yaml")


def own_path(name: str, suffix: str) -> Path:
    """Return the path of a file that belongs to a recipe of this name. ConfigError likewise."""
    path = Path("recipes") / f"{name}{suffix}"
    with writing(path, name):
        if path.exists() and MARK not in path.read_text():
            raise ConfigError(
                f"tune.recipe={name}: {path} was not written by `ppctl tune` and stays. Use another name, or null."
            )
        there = next(each for each in (path, path.parent, Path()) if each.exists())
        if not os.access(there, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        if there == path.parent and not there.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return path


@contextmanager
def writing(path: Path, name: str) -> Iterator[None]:
    """Raise errors of files in the body as ConfigErrors."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"tune.recipe={name}: {path} cannot be written: {why}. Use another name, another directory, or null."
        ) from error


def command_of(path: Path) -> str:
    """Return the command that trains with the recipe, from the directory it was written in."""
    is_found = path.absolute().parent == (ROOT / "recipes").absolute()
    return f"ppctl train {'' if is_found else '--config-dir . '}recipes={path.stem}"


def write_recipe(path: Path, config: Config, candidate: Candidate, measured_s: float | None) -> None:
    """Write the request of a layout as a recipe."""
    seconds = f"{candidate.time.total_s:.4g} seconds a step as planned"
    seconds += "" if measured_s is None else f", {measured_s:.4g} as measured"
    head = [
        "# @package _global_",
        MARK,
        f"# Claim: the fastest layout found for {config.mesh.num_devices} devices: {seconds}.",
        f"# Command: {command_of(path)}",
        f"# Assumes: {_assumed(config)}.",
    ]
    if config.hardware.name not in (AutoHardware().name, *known()):
        head.append(f"# Needs: hardware/{config.hardware.name}.yaml next to recipes/.")
    parts = (*CHOSEN, *(part for part in PLANNED if getattr(config, part) != getattr(Config(), part)))
    document: dict[str, Any] = {"defaults": [{f"override /{part}": _choice(config, part)} for part in parts]}
    for part in (*parts, *OTHERS):
        document |= {part: found} if (found := _settings(getattr(config, part))) else {}
    name = path.stem if config.run.name == Run().name else config.run.name
    document["run"] = document.get("run", {}) | {"name": name}
    if config.run.dir == f"runs/{config.run.name}":
        document["run"].pop("dir", None)  # it follows from the name
    with writing(path, path.stem):
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join([*head, yaml.safe_dump(document, sort_keys=False)]))


def _assumed(config: Config) -> str:
    """Return the data and the hardware that a layout is the fastest for, as one types them."""
    data = _settings(config.data) | {"batch_size": config.data.batch_size}
    words = [f"data={config.data.name}", *(f"data.{name}={value}" for name, value in data.items())]
    seq_len = getattr(config.model, "seq_len", None)
    words += [] if seq_len is None else [f"model.seq_len={seq_len}"]
    hardware = config.hardware.name
    return f"{' '.join(words)}, hardware={hardware}" + (" (what is here)" if hardware == AutoHardware().name else "")


def _choice(config: Config, part: str) -> str:
    if part == "mesh":
        return config.mesh.text
    return getattr(config, part).name


def _settings(part: Any) -> dict[str, Any]:
    """Return the settings of a part that are not the default, nested ones too; of a mesh its sizes are the choice."""
    if isinstance(part, Hardware):
        values = asdict(part)
        own = {name: value for name, value in values.items() if name != "name"}  # all: of a file that may change
        return _differences(values, asdict(known()[part.name])) if part.name in known() else own
    if isinstance(part, Mesh):
        return {} if part.order == Mesh().order else {"order": part.order}
    usual = {}
    for field in fields(part):
        made = field.default if field.default_factory is MISSING else field.default_factory()
        usual[field.name] = asdict(made) if is_dataclass(made) and not isinstance(made, type) else made
    return _differences(asdict(part), usual)


def _differences(values: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and usual[name]:  # of fields, not of names of the user's
            inner = _differences(value, usual[name])
            found |= {name: inner} if inner else {}
        elif name != "name" and (name not in usual or value != usual[name]):
            found[name] = value
    return found
