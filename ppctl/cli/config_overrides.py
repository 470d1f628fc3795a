"""The command line of a composed config. Loads no Hydra."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from ppctl.cli import choices
from ppctl.cli.choices import PARTS, PLAIN, settings_of, value_text
from ppctl.config import Mesh
from ppctl.config.config_dirs import ROOT


def request_words(composed: Mapping[str, Any]) -> list[str]:
    """Return the overrides by which the parts of a composed config differ from the defaults."""
    words: list[str] = []
    for part in (*PARTS, *PLAIN):
        if part == "mesh" and part in composed:
            words[:0] = _mesh_words(composed[part])
        elif part in composed:
            words += _part_words(part, composed[part])
    return words


def _mesh_words(values: Mapping[str, Any]) -> list[str]:
    text, order = Mesh(**values).text, values["order"]
    words = [] if text == choices.default_option("mesh") else f"mesh={text}".split()
    return words if order == "auto" else [*words, f"mesh.order={order}"]


def _part_words(part: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield GROUP=OPTION, and SETTING=VALUE for values other than the option's and the class's."""
    # 1. the option, and what its file states
    cls, stated = PLAIN.get(part), dict[str, Any]()
    if cls is None:
        option = values["name"]
        if option != choices.default_option(part):
            yield f"{part}={option}"
        if option not in choices.options(part):
            return  # of --config-dir, whose file holds its settings
        cls = choices.schema_of(part, option)
        stated = yaml.safe_load((ROOT / f"conf/{part}/{option}.yaml").read_text(encoding="utf-8"))
    # 2. other values
    for key, setting in settings_of(part, cls).items():
        value, usual = _below(values, key), _below(stated, key)
        usual = setting.default if usual is None else usual
        if key == "run.dir":
            usual = f"runs/{values['name']}"
        if isinstance(value, Mapping) and isinstance(usual, Mapping):
            for name, each in value.items():
                if not _is_same(each, usual.get(name)):
                    yield f"{'' if name in usual else '+'}{key}.{name}={value_text(each)}"
        elif not _is_same(value, usual):
            yield f"{key}={value_text(value)}"


def _below(values: Any, key: str) -> Any:
    for name in key.split(".")[1:]:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _is_same(value: Any, usual: Any) -> bool:
    if isinstance(value, float) and isinstance(usual, str):  # YAML 1.1 takes 1e12 for text
        return value == float(usual)
    return value == usual
