"""A request as a recipe: a file that `ppctl train recipes=NAME` runs as it is."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from ppctl.config import Config, Run
from ppctl.config.files import ROOT
from ppctl.errors import ConfigError
from ppctl.plan.search import Candidate

MARK = "# Written by `ppctl tune`, which writes it again when it is run again."
CHOSEN = ("model", "mesh", "schedule", "partition", "executor", "optim", "data")  # parts chosen by name
OTHERS = ("run",)


def recipe_path(name: str | None) -> Path | None:
    """Where a recipe of this name goes. ConfigError where something else is there, or nothing can be written."""
    if name is None:
        return None
    path = Path("recipes") / f"{name}.yaml"
    try:
        is_ours = not path.exists() or MARK in path.read_text()
        path.parent.mkdir(exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"tune.recipe={name}: {path} cannot be written: {error.strerror}.") from error
    if not is_ours:
        raise ConfigError(f"tune.recipe={name}: {path} is not of `ppctl tune` and stays. Use another name, or null.")
    if not path.stat().st_size:
        path.unlink()
    return path


def command_of(path: Path) -> str:
    """What trains with the recipe, from the directory it was written in."""
    is_found = path.absolute().parent == (ROOT / "recipes").absolute()
    return f"ppctl train {'' if is_found else '--config-dir . '}recipes={path.stem}"


def write_recipe(path: Path, config: Config, candidate: Candidate, measured_s: float | None) -> None:
    """Nothing; writes the request that a layout is."""
    seconds = f"{candidate.time.total_s:.4g} seconds a step as planned"
    seconds += "" if measured_s is None else f", {measured_s:.4g} as measured"
    head = [
        "# @package _global_",
        MARK,
        f"# Claim: the fastest layout found for {config.mesh.num_devices} devices: {seconds}.",
        f"# Command: {command_of(path)}",
    ]
    document: dict[str, Any] = {"defaults": [{f"override /{part}": _choice(config, part)} for part in CHOSEN]}
    for part in (*CHOSEN, *OTHERS):
        if part != "mesh":
            document |= {part: said} if (said := _said(getattr(config, part))) else {}
    name = path.stem if config.run.name == Run().name else config.run.name
    document["run"] = document.get("run", {}) | {"name": name}
    if config.run.dir == f"runs/{config.run.name}":
        document["run"].pop("dir", None)  # it follows from the name
    path.write_text("\n".join([*head, yaml.safe_dump(document, sort_keys=False)]))


def _choice(config: Config, part: str) -> str:
    if part == "mesh":
        return config.mesh.text
    return getattr(config, part).name


def _said(part: Any) -> dict[str, Any]:
    """The settings of a part that are not the default, nested ones too."""
    usual = {}
    for field in fields(part):
        made = field.default if field.default_factory is MISSING else field.default_factory()
        usual[field.name] = asdict(made) if is_dataclass(made) and not isinstance(made, type) else made
    return _differences(asdict(part), usual)


def _differences(values: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(usual[name], dict):
            inner = _differences(value, usual[name])
            found |= {name: inner} if inner else {}
        elif name != "name" and value != usual[name]:
            found[name] = value
    return found
