"""From a composed config back to the words that one types for it. Loads no Hydra."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from ppctl.cli.choices import PARTS, PLAIN, default_option, options, schema_of, settings_of, value_text
from ppctl.config import Mesh
from ppctl.config.files import ROOT


def request_words(config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return (overrides by which a composed config differs from the defaults, notes on what they cannot say)."""
    words: list[str] = []
    notes: list[str] = []
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
    return words, notes


def _mesh(values: Mapping[str, Any], notes: list[str]) -> list[str]:
    try:
        text = Mesh(**values).text
    except TypeError:
        notes.append("the mesh of config.yaml has other settings than there are now")
        return []
    order = values.get("order", "auto")
    words = [] if text == default_option("mesh") else [f"mesh={text}"]
    return words if order == "auto" else [*words, f"mesh.order={order}"]


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
    """Yield SETTING=VALUE for what is not the default of a part's dataclass, nor of its option's own file."""
    found = dict(_flat(part, values))
    for key, setting in settings_of(part, cls).items():
        if isinstance(values_of := _below(values, key), Mapping):
            usual = own.get(key.removeprefix(f"{part}."), {})
            found = {name: value for name, value in found.items() if not name.startswith(f"{key}.")}
            for name, value in values_of.items():
                if not _is_same(value, usual.get(name)):
                    yield f"{'' if name in usual else '+'}{key}.{name}={value_text(value)}"
        elif key in found:
            value, usual = found.pop(key), own.get(key.removeprefix(f"{part}."), setting.default)
            if key == "run.dir":
                usual = f"runs/{values.get('name')}"
            if not _is_same(value, usual):
                yield f"{key}={value_text(value)}"
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
