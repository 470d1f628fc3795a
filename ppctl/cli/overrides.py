"""From the config.yaml of a run back to the words that ask for it: what differs from the defaults. Loads no Hydra."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ppctl.cli.choices import PARTS, PLAIN, default_option, options, schema_of, settings_of
from ppctl.config import Mesh
from ppctl.config.files import ROOT
from ppctl.launch.local import HOST
from ppctl.reports.runs_table import read_config

PLAIN_TEXT = re.compile(r"(?!(true|false|null|nan|inf)$)[A-Za-z_/][\w./-]*", re.IGNORECASE)  # needs no quotes in Hydra
JOINED = (
    "distributed",
    "coordinator",
    "num_processes",
    "process_id",
)  # of run: what the launcher says to its processes


class Asked(NamedTuple):
    words: tuple[str, ...]  # GROUP=OPTION and SETTING=VALUE, as Hydra reads them
    notes: tuple[str, ...]  # what the words cannot say


def asked(config: Mapping[str, Any], run_dir: str) -> Asked:
    """What a composed config asks for beside the defaults, so that it goes on in `run_dir`.

    run.resume is left out: a run that was not to go on with another's checkpoints is to go on with its own.
    """
    words: list[str] = []
    notes: list[str] = []
    config = {part: dict(values) for part, values in config.items() if isinstance(values, Mapping)}
    if "run" in config:
        config["run"].pop("resume", None)
        config["run"]["dir"] = os.path.normpath(run_dir)
        words += _joined(config["run"], notes)
    for part in (*PARTS, *PLAIN):
        if part not in config:
            notes.append(f"config.yaml has no {part}")
        elif part == "mesh":
            words[:0] = _mesh(config[part], notes)
        elif part in PLAIN:
            words += _settings(part, PLAIN[part], {}, config[part], notes)
        elif config[part].get("name") in options(part):
            words += _part(part, config[part], notes)
        else:
            words.append(f"{part}={config[part].get('name')}")
            notes.append(f"{words[-1]} is none of ppctl's own: add --config-dir, and what was set of it")
    return Asked(tuple(words), tuple(notes))


def resuming(path: Path) -> tuple[dict[str, Any], Asked, str]:
    """(settings of a run, what it was asked for, what goes on with it); nothing where its settings cannot be read."""
    config = read_config(path)
    if isinstance(config, str):
        return {}, Asked((), (config,)), ""
    found = asked(config, str(path))
    return config, found, shlex.join(["ppctl", "train", *found.words])


def _joined(run: dict[str, Any], notes: list[str]) -> Iterator[str]:
    """What to say instead of the place that a process had among those of the run, which `run` loses."""
    said = {key: run.pop(key, None) for key in JOINED}
    if said["distributed"] == "explicit" and str(said["coordinator"]).startswith(f"{HOST}:"):
        yield f"launch.processes={said['num_processes']}"  # `launch.processes` chose the rest
    elif said["distributed"] == "explicit":
        yield from (f"run.{key}={_value(said[key])}" for key in JOINED[:3])
        notes.append(f"{said['num_processes']} processes: each with its own run.process_id=0, 1, ...")
    elif said["distributed"] not in (None, "off"):
        yield f"run.distributed={said['distributed']}"
        notes.append("several processes: start it in each of them")


def _mesh(values: Mapping[str, Any], notes: list[str]) -> list[str]:
    try:
        text = Mesh(**values).text
    except TypeError:
        notes.append("the mesh of config.yaml has other settings than there are now")
        return []
    return [] if text == default_option("mesh") else [f"mesh={text}"]


def _part(part: str, values: Mapping[str, Any], notes: list[str]) -> Iterator[str]:
    option = values["name"]
    if option != default_option(part):
        yield f"{part}={option}"
    with open(ROOT / f"conf/{part}/{option}.yaml", encoding="utf-8") as file:
        own = yaml.safe_load(file)
    yield from _settings(part, schema_of(part, option), own, values, notes)


def _settings(
    part: str, cls: type, own: Mapping[str, Any], values: Mapping[str, Any], notes: list[str]
) -> Iterator[str]:
    """SETTING=VALUE for what is not the default of a part's dataclass, nor of its option's own file."""
    found = dict(_flat(part, values))
    for key, setting in settings_of(part, cls).items():
        if isinstance(values_of := _below(values, key), Mapping):
            usual = own.get(key.removeprefix(f"{part}."), {})
            found = {name: value for name, value in found.items() if not name.startswith(f"{key}.")}
            for name, value in values_of.items():
                if not _is_same(value, usual.get(name)):
                    yield f"{'' if name in usual else '+'}{key}.{name}={_value(value)}"
        elif key in found:
            value, usual = found.pop(key), own.get(key.removeprefix(f"{part}."), setting.default)
            if key == "run.dir":
                usual = f"runs/{values.get('name')}"
            if not _is_same(value, usual):
                yield f"{key}={_value(value)}"
    found.pop(f"{part}.name", None)
    if found:
        notes.append(f"no settings now: {', '.join(found)}")


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}.{name}", value)
        else:
            yield f"{prefix}.{name}", value


def _below(values: Any, key: str) -> Any:
    for name in key.split(".")[1:]:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _is_same(value: Any, usual: Any) -> bool:
    if isinstance(value, float) and isinstance(usual, str):
        try:  # YAML 1.1 takes 1e12 for text
            usual = float(usual)
        except ValueError:
            return False
    both_nan = isinstance(value, float) and isinstance(usual, float) and math.isnan(value) and math.isnan(usual)
    return both_nan or value == usual


def _value(value: Any) -> str:
    """A value in Hydra's grammar.

    >>> _value(None), _value("a b"), _value([1, "x"]), _value("3"), _value(1e-05)
    ('null', '"a b"', '[1,x]', '"3"', '1e-05')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    if not isinstance(value, str) or PLAIN_TEXT.fullmatch(value):
        return str(value)
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)  # only before a quote is a backslash special
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return '"' + escaped.replace("${", r"\${") + '"'
